"""Slurm on machines that have no scheduler: the plan of its files from the Cluster and facts, and the run that applies it."""
