"""A run as a job of Slurm: one batch script, which is Python, readable, and needs nothing but the standard library."""

from __future__ import annotations

import ast
import pprint
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.asked import Asked
from launch.programs import ask, complaint
from lustrain.problem import FAILED, UNREACHABLE, USAGE, UserError, problem
from trainer.launch.attempt import SILENT
from trainer.launch.node import LINGER_S

SCRIPT = "launch/batch.py"
SOURCES = ("decision", "loop", "slurm")
"""Of launch/supervise, in the order in which they need each other."""
FIRST_PORT, PORTS = 20_000, 10_000
"""Ports below those that Linux gives to connections by itself, from 32768:
https://docs.kernel.org/networking/ip-sysctl.html"""
SPARE_S = 10
"""Beside the trainer's own grace, from the signal to the end of the job's time."""
PING = "scontrol ping; is slurmctld up?"
_PARSABLE = re.compile(r"([0-9]+)(;\S+)?")
_HELD = re.compile("held|hold", re.IGNORECASE)
"""In the reason of a job that waits for a person: JobHeldUser, JobHeldAdmin, JobHoldMaxRequeue
(https://slurm.schedmd.com/job_reason_codes.html), "launch failed requeued held"."""


@dataclass(frozen=True)
class Job:
    """A job that waits or runs."""

    number: int
    held: str = ""
    """Why Slurm does not start it until it is released; empty where it does not hold it."""

    @property
    def release(self) -> str:
        return f"scontrol release {self.number}, as its owner or an operator of Slurm"


def options(asked: Asked, log: str) -> list[str]:
    """Return the options of sbatch, one a line of the script."""
    wish = asked.slurm
    assert wish is not None
    named = {"partition": wish.partition, "account": wish.account, "qos": wish.qos, "time": wish.time}
    nodes = str(asked.rules.least) if asked.rules.least == asked.nodes else f"{asked.rules.least}-{asked.nodes}"
    return [
        f"--job-name={asked.name}",
        f"--comment={asked.run}",
        f"--output={log}",
        "--open-mode=append",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
        # Whole nodes have all their processors by that, and by this all their memory.
        "--mem=0",
        "--no-kill",
        "--requeue",
        # The environment of whoever submits may hold secrets, and ranks on a requeue would have another one.
        "--export=NIL",
        f"--signal=B:USR1@{round(asked.grace_s) + SPARE_S}",
        *([f"--gpus-per-node={wish.gpus}"] if wish.gpus else []),
        *(f"--{key}={value}" for key, value in named.items() if value),
    ]


def plan(asked: Asked, environment: dict[str, str]) -> dict[str, Any]:
    """Return what the script has to know, as plain JSON data."""
    return {
        "run": asked.run,
        "config": asked.config_uri,
        "python": asked.python or sys.executable,
        "ranks": asked.rules.ranks,
        "port": FIRST_PORT + sum(asked.run.encode()) % PORTS,
        "rules": asdict(asked.rules),
        "give_up_s": asked.give_up_s,
        "late_s": late_s(asked),
        # The plugin by its name: without it NCCL would go over TCP, and say so in a line of its log at most.
        "environment": environment | ({"NCCL_NET_PLUGIN": "ofi"} if asked.slurm and asked.slurm.efa else {}),
    }


def late_s(asked: Asked) -> int:
    """Return the seconds after the end of the first launcher at which Slurm ends the others.

    Launchers wait for each other, and a last save takes as long as the trainer may need for one. One on a node that does not
    answer would be waited for until Slurm takes the node for lost, five minutes by default:
    https://slurm.schedmd.com/slurm.conf.html#OPT_SlurmdTimeout
    """
    return round(LINGER_S + asked.grace_s) + SPARE_S


def script(asked: Asked, log: str, environment: dict[str, str]) -> str:
    """Return the whole batch script. It is made of our own sources, without their imports of each other."""
    head = [
        "#!/usr/bin/env python3",
        *(f"#SBATCH {option}" for option in options(asked, log)),
        f'"""Starts the run {asked.name} on the nodes of this job. Made by `fab train`; see docs/launch.md."""',
        "from __future__ import annotations",
        "",
        "import sys",
        "",
        "if sys.version_info < (3, 9):",
        '    sys.exit("lustrain: Python of this host is %d.%d; allowed: 3.9 or newer" % sys.version_info[:2])',
    ]
    body = [_standalone(Path(__file__).with_name("supervise") / f"{name}.py") for name in SOURCES]
    said = pprint.pformat(plan(asked, environment), width=100, sort_dicts=False)
    return "\n".join([*head, "", f"PLAN = {said}", "", *body, "", "sys.exit(main(PLAN))", ""])


def ranks_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what ranks get of this environment: where programs and modules are, and of AWS the region alone."""
    kept = (
        "PATH",
        "PYTHONPATH",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL_S3",
        "GLOO_SOCKET_IFNAME",
        "OMP_NUM_THREADS",
        SILENT,
    )
    return {name: environ[name] for name in kept if name in environ}


def check(text: str, folder: Path) -> None:
    """Ask Slurm whether it would take the script. UserError with what it says."""
    if shutil.which("sbatch") is None:
        fix = "run fab where Slurm's programs are: on the controller or a login node"
        raise UserError(problem("--on", "slurm", "there is no sbatch on this machine", fix=fix))
    _sbatch(text, folder, "--test-only")


def submit(text: str, folder: Path, asked: Asked) -> int:
    """Give the script to Slurm; returns the job's number. UserError with what it says.

    Where it does not say whether it took the job, the queue is asked.
    """
    try:
        printed = _sbatch(text, folder, "--parsable")
    except UserError as error:
        if error.exit_code != UNREACHABLE:
            raise
        try:
            found = jobs(asked.run, asked.name)
        except UserError:
            found = []
        if found:
            return found[-1].number
        fix = f"once `scontrol ping` answers: fab stop {asked.run} --now, then fab train … --resume"
        raise UserError(f"{error}; whether Slurm took the job is not known; fix: {fix}", UNREACHABLE) from None
    # A banner of the site may stand around it.
    numbers = [match[1] for line in printed.splitlines() if (match := _PARSABLE.fullmatch(line.strip()))]
    if numbers:
        return int(numbers[-1])
    found = jobs(asked.run, asked.name)
    if not found:
        why = f"sbatch took the script and printed no number of a job: {' '.join(printed.split())[:200]!r}"
        raise UserError(f"{why}; fix: squeue --name={asked.name}", UNREACHABLE)
    return found[-1].number


def _sbatch(text: str, folder: Path, flag: str) -> str:
    said = ask(["sbatch", flag, f"--chdir={folder}"], text, fix=PING)
    if said.code:
        why = complaint(said, ("error: ", "fatal: ", "allocation failure: "))
        why = re.sub("(sbatch: |allocation failure: |error: |fatal: )+", "", why)
        lost = re.search("Unable to contact|Connection refused|timed out|No route to host", said.errors)
        raise UserError(f"sbatch: {why}; fix: {_fix(said.errors)}", UNREACHABLE if lost else USAGE)
    return said.out


def jobs(run: str, name: str) -> list[Job]:
    """Return the jobs that wait or run for this run, oldest first: those with its name and, as comment, itself.

    UserError (UNREACHABLE) where Slurm does not answer: then there may be some.
    """
    said = ask(["squeue", "--noheader", f"--name={name}", "--format=%A|%T|%r|%k"], fix=PING)
    if said.code:
        why = complaint(said, ("error: ", "fatal: "))
        raise UserError(f"squeue: {why}: whether a job waits or runs for {run} is not known; fix: {PING}", UNREACHABLE)
    rows = [row for line in said.out.splitlines() if len(row := line.strip().split("|", 3)) == 4]
    found = {
        int(number): Job(int(number), reason if state == "PENDING" and _HELD.search(reason) else "")
        for number, state, reason, comment in rows
        if comment == run and number.isdecimal()
    }
    return [found[number] for number in sorted(found)]


def cancel(job: int) -> None:
    """Have Slurm end the job: its ranks get SIGTERM and save if there is time. UserError."""
    said = ask(["scancel", str(job)], fix=PING)
    if said.code:
        raise UserError(
            f"scancel {job}: {complaint(said, ('error: ', 'fatal: '))}; fix: run it on the controller", FAILED
        )


def _fix(said: str) -> str:
    known = {
        "contact": PING,
        "timed out": PING,
        "partition": "sinfo lists the partitions",
        "account": "sacctmgr show associations user=$USER lists your accounts",
        "qos": "sacctmgr show qos lists them",
        "node configuration": "ask for fewer nodes, or another partition",
    }
    return next((fix for word, fix in known.items() if word in said.lower()), "scontrol show partition")


def _standalone(path: Path) -> str:
    """Return a source without its docstring's place at the top and without imports that a single file has no use for."""
    text = path.read_text(encoding="utf-8")
    dropped = {
        line
        for node in ast.parse(text).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("__future__", "launch."))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return "\n".join(line for number, line in enumerate(text.splitlines(), 1) if number not in dropped) + "\n"
