"""What is decided when an attempt ends, and the loop that does it. Standard library and Python 3.9 only: Slurm's batch script
carries these files."""
