"""A real Slurm on the nodes of a lab: munge, slurmctld and slurmd as units of the nodes, and /fsx shared by all of them.

What differs from a cluster of AWS: the daemons run as root, jobs are not held by cgroups (a node has no tree of its own), there
is no accounting database unless the node agent makes one, and a node counts as lost sooner. Needs Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping

from rehearsal.lab.ground import PATH
from rehearsal.lab.node import Node
from rehearsal.lab.nodes import Lab

PROGRAMS = ("munged", "sbatch", "slurmctld", "slurmd")
ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd")
QUICK: Mapping[str, str] = {
    "AuthInfo": "cred_expire=5",
    "SlurmdTimeout": "10",
    "MessageTimeout": "10",
    "TCPTimeout": "5",
    "ReturnToService": "2",
    "UnkillableStepTimeout": "60",
    "KillWait": "30",
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1",
}
"""Of slurm.conf (https://slurm.schedmd.com/slurm.conf.html): a node that is lost is DOWN within a minute, by default after
five; a job begins at once. Shorter times would take a node that a busy machine does not let run for one that is lost."""
UNHELD: Mapping[str, str] = {
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none",
}
"""Of slurm.conf, where jobs are not held by control groups: a node of the lab has no tree of its own."""
CPUS, MEMORY_MB = 4, 2000
"""Of a node in slurm.conf: the machine's own cores are shared by all nodes."""
SHARED = "/fsx"
_POLL_S = 0.1

_MOUNT = f"""[Unit]
Description=A folder that all nodes of the lab share
[Mount]
What=/run/simulated/fsx
Where={SHARED}
Options=bind
[Install]
WantedBy=multi-user.target
"""
_UNIT = """[Unit]
Description={name}
After={after}
Requires={after}
[Service]
Type=exec
Restart=on-failure
ExecStart=/bin/sh -c '{command}'
[Install]
WantedBy=multi-user.target
"""
_MUNGE = (
    "install -d -m 755 -o munge -g munge /run/munge && install -d -m 700 -o munge -g munge /var/log/munge /var/lib/munge && "
    "exec setpriv --reuid=munge --regid=munge --init-groups munged --foreground"
)
_CONTROLLER = "mkdir -p /var/spool/slurmctld /var/log/slurm && exec slurmctld -D -s"
_COMPUTE = "mkdir -p /var/spool/slurmd /var/log/slurm && exec slurmd -D -s -b"
_PACKAGED = (
    "mkdir -p /var/spool/slurmd /var/log/slurm; [ ! -r /etc/default/slurmd ] || . /etc/default/slurmd; "
    "eval exec slurmd -D -s -b $SLURMD_OPTIONS"
)
_RECORDS = "mkdir -p /var/log/slurm && exec slurmdbd -D -s"
_DATABASE = (
    "install -d -m 755 -o mysql -g mysql /run/mysqld && exec setpriv --reuid=mysql --regid=mysql --init-groups mariadbd"
)
_CGROUP = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"


def why_not(*, accounting: bool = False) -> str | None:
    """Return one line on what keeps this machine from running a Slurm, or one with `accounting`; None where nothing does."""
    needed = PROGRAMS + (ACCOUNTING_PROGRAMS if accounting else ())
    missing = [program for program in needed if not shutil.which(program, path=PATH)]
    more = " slurmdbd mariadb-server" if accounting else ""
    fix = f"apt-get install --no-install-recommends slurm-wlm munge{more}"
    return f"a Slurm of the lab needs {', '.join(missing)}; fix: {fix}" if missing else None


def bring_packages(node: Node) -> None:
    """Leave on a node what installing Debian's packages of munge and Slurm would, and the folder that all nodes share.

    That is units which are not started, in the form that the lab's systemctl reads. The munge key is taken away, since a lab's
    nodes all see the machine's; Debian's package would have made one of the node's own.
    """
    commands = {
        "munge": ("", _MUNGE),
        "slurmctld": ("munge.service", _CONTROLLER),
        "slurmd": ("munge.service", _PACKAGED),
        # They start where accounting is on, and need slurmdbd and mariadb-server.
        "slurmdbd": ("munge.service", _RECORDS),
        "mariadb": ("", _DATABASE),
    }
    for name, (after, command) in commands.items():
        node.write(f"/etc/systemd/system/{name}.service", _UNIT.format(name=name, after=after, command=command))
    node.write("/etc/systemd/system/fsx.mount", _MOUNT)
    node.exec("rm", "-f", "/etc/munge/munge.key")
    node.exec("systemctl", "daemon-reload")
    # Started already, a stand-in for slurmd would count as active.
    node.exec("systemctl", "stop", "slurmd.service", check=False)
    node.exec("systemctl", "disable", "slurmd.service", check=False)
    node.exec("systemctl", "enable", "--now", "fsx.mount")


class Slurm:
    """The first node of `lab` is the controller, where `sbatch` is called; the others run jobs, in the partition `train`.

    `start` makes it by a recipe of the lab's own; without it, this only talks to a Slurm that something else has made there.
    """

    def __init__(self, lab: Lab, timing: Mapping[str, str] = QUICK) -> None:
        self.controller, *self.workers = lab.nodes
        self._timing = timing

    def start(self) -> Slurm:
        """Bring it up on nodes that run; returns once all workers are idle. RuntimeError where they are not in time."""
        key = secrets.token_hex(512)
        for node in (self.controller, *self.workers):
            self._install(node, key)
        self.wait({node.name: "idle" for node in self.workers})
        return self

    def states(self) -> dict[str, str]:
        """Return the state of each worker as `sinfo` has it, `*` for one that does not answer; empty while none says it."""
        done = self.call("sinfo", "--noheader", "--Node", "--format=%N %T", check=False)
        return dict(line.split() for line in done.stdout.splitlines())

    def wait(self, states: Mapping[str, str], seconds: float = 300.0) -> dict[str, str]:
        """Wait until the states of the named workers begin so; returns those of all. RuntimeError with the last ones."""
        ends = time.monotonic() + seconds
        while True:
            seen = self.states()
            if all(seen.get(name, "").startswith(state) for name, state in states.items()):
                return seen
            if time.monotonic() > ends:
                raise RuntimeError(f"Slurm's nodes are {seen} after {seconds:g} s, not {dict(states)}")
            time.sleep(_POLL_S)

    def call(self, *command: str, check: bool = True, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a program of Slurm on the controller, as root. RuntimeError where it fails and `check` is set."""
        return self.controller.exec(*command, check=check, stdin=stdin)

    def submit(self, script: str, *options: str) -> int:
        """Give a batch script to Slurm, with /fsx as its folder; returns the number of the job."""
        done = self.call("sbatch", "--parsable", f"--chdir={SHARED}", *options, stdin=script)
        return int(done.stdout.strip().partition(";")[0])

    def job(self, number: int) -> dict[str, str]:
        """Return what `scontrol show job` says of a job, by key: JobState, NodeList, Restarts and more."""
        shown = self.call("scontrol", "--oneliner", "show", "job", str(number)).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def _install(self, node: Node, key: str) -> None:
        daemon = "slurmctld" if node is self.controller else "slurmd"
        command = _CONTROLLER if node is self.controller else _COMPUTE
        node.write("/etc/munge/munge.key", key, 0o400)
        node.exec("chown", "munge:munge", "/etc/munge/munge.key")
        node.write("/etc/slurm/slurm.conf", self._configuration())
        node.write("/etc/slurm/cgroup.conf", _CGROUP)
        units = {
            "fsx.mount": _MOUNT,
            "munge.service": _UNIT.format(name="munge", after="", command=_MUNGE),
            f"{daemon}.service": _UNIT.format(name=daemon, after="munge.service fsx.mount", command=command),
        }
        for name, text in units.items():
            node.write(f"/etc/systemd/system/{name}", text)
        node.exec("systemctl", "daemon-reload")
        # Started already, a stand-in for slurmd would count as active.
        node.exec("systemctl", "stop", "slurmd.service", check=False)
        node.exec("systemctl", "enable", "--now", *units)

    def _configuration(self) -> str:
        keys = {
            "ClusterName": "lab",
            "SlurmctldHost": self.controller.name,
            "SlurmUser": "root",
            "SlurmdParameters": "config_overrides",
            "StateSaveLocation": "/var/spool/slurmctld",
            "SlurmdSpoolDir": "/var/spool/slurmd",
            "MpiDefault": "none",
            **UNHELD,
            **self._timing,
        }
        names = ",".join(node.name for node in self.workers)
        lines = [f"{key}={value}" for key, value in keys.items()]
        lines.append(f"NodeName={names} CPUs={CPUS} RealMemory={MEMORY_MB}")
        lines.append(f"PartitionName=train Nodes={names} Default=YES MaxTime=INFINITE State=UP")
        return "\n".join(lines) + "\n"
