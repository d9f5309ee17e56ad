"""The same settings told to Ansible and to pyinfra, which run from a virtual environment of their own.

Both get the fastest way their documentation names: Ansible over kept OpenSSH connections with pipelining, a process for each
node, and no facts gathered (https://docs.ansible.com/ansible/latest/reference_appendices/config.html#ansible-pipelining);
pyinfra with its default of all nodes at once. Host keys are checked by both.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.same_settings import Wanted

REQUIREMENTS = ("ansible==12.*", "pyinfra==3.10.*")
PERSIST_S = 3600
"""Ansible's own 60 s would end its connections while the others are measured."""
LONGEST_S = 900
PLACE = "LUSTRAIN_PEERS"


class PeerError(Exception):
    """A tool did not do what it was told: the figure would be of something else."""


@dataclass(frozen=True)
class Target:
    """Root of one node, who is let in by the private key in file `key`."""

    address: str
    key: str


def installed(folder: Path) -> Path:
    """Ansible's and pyinfra's folder of programs: `environment` in the folder that LUSTRAIN_PEERS names, else in `folder`."""
    return environment(Path(os.environ.get(PLACE) or folder), REQUIREMENTS, ("ansible-playbook", "pyinfra"))


def environment(folder: Path, requirements: Sequence[str], programs: Sequence[str]) -> Path:
    """`bin` of a virtual environment that has the programs; where one lacks, it is made anew, which takes minutes."""
    bin_ = folder / "bin"
    if not all((bin_ / name).exists() for name in programs):
        print(f"installing {', '.join(requirements)} into {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True)
        subprocess.run([bin_ / "pip", "install", "--quiet", "--quiet", *requirements], check=True, stdout=sys.stderr)
    return bin_


class Ansible:
    """`ansible-playbook` over a playbook with one task a setting."""

    def __init__(
        self, programs: Path, folder: Path, wanted: Wanted, targets: Sequence[Target], known_hosts: str, python: str
    ) -> None:
        self.folder = folder
        self.command = [str(programs / "ansible-playbook"), "-i", "hosts.json", "playbook.json"]
        self.environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "ANSIBLE_PIPELINING": "True",
            "ANSIBLE_FORKS": str(len(targets)),
            "ANSIBLE_HOST_KEY_CHECKING": "True",
            "ANSIBLE_SSH_ARGS": f"-C -o ControlMaster=auto -o ControlPersist={PERSIST_S}s -o UserKnownHostsFile={known_hosts}",
            "ANSIBLE_HOME": str(folder / "home"),
            "ANSIBLE_NOCOLOR": "True",
        }
        folder.mkdir(parents=True, exist_ok=True)
        hosts = {
            target.address: {
                "ansible_user": "root",
                "ansible_ssh_private_key_file": target.key,
                "ansible_python_interpreter": python,
            }
            for target in targets
        }
        (folder / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts}}))
        (folder / "playbook.json").write_text(json.dumps([playbook(wanted)]))

    def __call__(self) -> int:
        """Run once; how many tasks on nodes changed something."""
        said = _run(self.command, self.folder, self.environment)
        recap = re.findall(r"^\S+ +: ok=\d+ +changed=(\d+) ", said, re.MULTILINE)
        if not recap:
            raise PeerError(f"Ansible told of no node:\n{said[-1000:]}")
        return sum(map(int, recap))

    def disconnect(self) -> None:
        """End the connections that were kept: their nodes are about to go."""
        for kept in (self.folder / "home/cp").glob("*"):
            subprocess.run(["ssh", "-O", "exit", "-S", kept, "any"], capture_output=True, check=False)
            kept.unlink(missing_ok=True)


class Pyinfra:
    """`pyinfra` over a deploy that reads the same settings."""

    def __init__(
        self, programs: Path, folder: Path, wanted: Wanted, targets: Sequence[Target], known_hosts: str
    ) -> None:
        self.folder = folder
        self.command = [str(programs / "pyinfra"), "--yes", "--json", "inventory.py", "deploy.py"]
        folder.mkdir(parents=True, exist_ok=True)
        shared = {"ssh_user": "root", "ssh_strict_host_key_checking": "yes", "ssh_known_hosts_file": known_hosts}
        hosts = [(target.address, {**shared, "ssh_key": target.key}) for target in targets]
        (folder / "inventory.py").write_text(f"nodes = {hosts!r}\n")
        (folder / "wanted.json").write_text(json.dumps(asdict(wanted)))
        (folder / "deploy.py").write_text(PYINFRA_DEPLOY)

    def __call__(self) -> int:
        """Run once; how many operations on nodes changed something."""
        said = _run(self.command, self.folder, dict(os.environ))
        totals = json.loads(said[said.index("{") :])["results"]["totals"]
        if totals["error"] or not totals["hosts"]:
            raise PeerError(f"pyinfra did not do it all: {totals}")
        return int(totals["success"])


def playbook(wanted: Wanted) -> dict[str, Any]:
    """A play with a task for each setting, and a handler for each service whose file changed."""
    tasks: list[dict[str, Any]] = [
        {
            "ansible.posix.sysctl": {
                "name": key,
                "value": value,
                "sysctl_set": True,
                "reload": False,
                "sysctl_file": "/etc/sysctl.d/90-ansible.conf",
            }
        }
        for key, value in wanted.sysctls
    ]
    for file in wanted.files:
        copy = {"dest": file.path, "content": file.content, "mode": file.mode}
        folder = {"path": str(Path(file.path).parent), "state": "directory"}
        tasks += [{"ansible.builtin.file": folder}] if file.own_folder else []
        tasks.append({"ansible.builtin.copy": copy, **({"notify": file.restarts} if file.restarts else {})})
    for unit in wanted.units:
        state = {"state": "started"} if unit.running else {}
        tasks.append({"ansible.builtin.systemd_service": {"name": unit.name, "enabled": True, **state}})
    handlers = [
        {
            "name": name,
            "ansible.builtin.systemd_service": {"name": name, "state": "restarted", "daemon_reload": True},
        }
        for name in sorted({file.restarts for file in wanted.files if file.restarts})
    ]
    return {"hosts": "all", "gather_facts": False, "tasks": tasks, "handlers": handlers}


PYINFRA_DEPLOY = """\
import io
import json
import pathlib

from pyinfra.operations import files, server, systemd

wanted = json.loads(pathlib.Path("wanted.json").read_text())
for key, value in wanted["sysctls"]:
    server.sysctl(name=key, key=key, value=value, persist=True, persist_file="/etc/sysctl.d/90-pyinfra.conf")
for file in wanted["files"]:
    put = files.put(name=file["path"], src=io.StringIO(file["content"]), dest=file["path"], mode=file["mode"])
    if file["restarts"]:
        systemd.service(
            name="restart " + file["restarts"],
            service=file["restarts"],
            restarted=True,
            daemon_reload=True,
            _if=put.did_change,
        )
for unit in wanted["units"]:
    systemd.service(name=unit["name"], service=unit["name"], running=unit["running"] or None, enabled=True)
"""


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONGEST_S)
    if done.returncode:
        said = done.stdout + done.stderr
        raise PeerError(f"{' '.join(command)} ended with {done.returncode}\n{said[-3000:]}")
    return done.stdout
