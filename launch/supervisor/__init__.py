"""What follows when a launch ends, and the loop around it. Standard library and Python 3.9 only: the batch script of Slurm
carries these files."""
