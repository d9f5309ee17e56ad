"""Where Slurm and munge keep what the agent reads and writes."""

from __future__ import annotations

FOLDER = "/etc/slurm"
CONF = f"{FOLDER}/slurm.conf"
HEADER = "# Written by lustrain (fab slurm-up): the whole file is replaced; change the Cluster instead.\n"
"""It begins every configuration that is ours. A slurm.conf without it belongs to somebody else, and is never replaced."""
MUNGE_KEY = "/etc/munge/munge.key"
STATE, SPOOL, LOGS = "/var/spool/slurmctld", "/var/spool/slurmd", "/var/log/slurm"
RESTART_OWED = "/run/lustrain/slurm-restart.json"
"""Units whose files changed and that were not restarted yet: it outlives an agent that is killed in between, and a boot makes
it void."""
