"""Where Slurm and munge keep what the agent reads and writes."""

from __future__ import annotations

from node_setup.agent.facts import scheduler

FOLDER = "/etc/slurm"
CONF = scheduler.CONF
DBD_CONF = f"{FOLDER}/slurmdbd.conf"
HEADER = "# Written by lustrain (fab slurm-up): the whole file is replaced; change the Cluster instead.\n"
"""It begins every configuration that is ours. A slurm.conf without it belongs to somebody else, and is never replaced."""
STACK_HEADER = "# Written by lustrain at boot: the whole file is replaced; change the stack instead.\n"
MUNGE_KEY = "/etc/munge/munge.key"
STATE, SPOOL, LOGS = scheduler.STATE, "/var/spool/slurmd", "/var/log/slurm"
OPTIONS = scheduler.OPTIONS
WATCH_UNIT = "/etc/systemd/system/lustrain-slurm.service"
STATE_MOUNT = "/etc/systemd/system/var-spool-slurmctld.mount"
STATE_DROP_IN = "/etc/systemd/system/slurmctld.service.d/90-lustrain.conf"
SCALING = "/etc/lustrain/scaling.json"
"""On the controller of a stack with groups that go to zero: which, and after how long without a job."""
RESTART_OWED = "/run/lustrain/slurm-restart.json"
"""Units whose files changed and that were not restarted yet: it outlives an agent that is killed in between, and a boot makes
it void."""


def restart_drop_in(unit: str) -> str:
    """Return the file that has systemd start the unit again. Of slurmd, limits are in another one, of the settings
    (`owned.SLURMD`)."""
    return f"/etc/systemd/system/{unit}.d/90-lustrain-restart.conf"
