"""A run as a job of Slurm: one batch script, which is Python, readable, and needs nothing but the standard library."""

from __future__ import annotations

import ast
import pprint
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.asked import Asked
from lustrain.problem import FAILED, UNREACHABLE, USAGE, UserError, problem

SCRIPT = "launch/batch.py"
SOURCES = ("decision", "loop", "slurm")
"""Of launch/supervise, in the order in which they need each other."""
FIRST_PORT, PORTS = 20_000, 10_000
"""Ports below those that Linux gives to connections by itself, from 32768:
https://docs.kernel.org/networking/ip-sysctl.html"""
SPARE_S = 10
"""Beside the trainer's own grace, from the signal to the end of the job's time."""
SBATCH_S = 60


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
        # The plugin by its name: without it NCCL would go over TCP, and say so in a line of its log at most.
        "environment": environment | ({"NCCL_NET_PLUGIN": "ofi"} if asked.slurm and asked.slurm.efa else {}),
    }


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
    )
    return {name: environ[name] for name in kept if name in environ}


def check(text: str, folder: Path) -> None:
    """Ask Slurm whether it would take the script. UserError with what it says."""
    if shutil.which("sbatch") is None:
        fix = "run fab where Slurm's programs are: on the controller or a login node"
        raise UserError(problem("--on", "slurm", "there is no sbatch on this machine", fix=fix))
    _sbatch(text, folder, "--test-only")


def submit(text: str, folder: Path) -> int:
    """Give the script to Slurm; returns the job's number. UserError with what it says."""
    return int(_sbatch(text, folder, "--parsable").strip().partition(";")[0])


def _sbatch(text: str, folder: Path, flag: str) -> str:
    command = ["sbatch", flag, f"--chdir={folder}"]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=SBATCH_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"sbatch did not answer within {SBATCH_S} s; fix: scontrol ping", UNREACHABLE) from None
    if done.returncode:
        said = next(iter(done.stderr.splitlines()), f"exit code {done.returncode}")
        said = re.sub("^(sbatch: |allocation failure: |error: |fatal: )+", "", said)
        lost = re.search("Unable to contact|Connection refused|Socket timed out", said)
        raise UserError(f"sbatch: {said}; fix: {_fix(said)}", UNREACHABLE if lost else USAGE)
    return done.stdout


def of_run(job: object, run: str) -> bool:
    """Whether a job of this number waits or runs, and is this run's: numbers are used again, and each Slurm has its own."""
    if type(job) is not int or shutil.which("squeue") is None:
        return False
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%k"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() == run


def cancel(job: int) -> None:
    """Have Slurm end the job: its ranks get SIGTERM and save if there is time. UserError."""
    done = subprocess.run(["scancel", str(job)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"scancel {job}: {' '.join(done.stderr.split())}; fix: run it on the controller", FAILED)


def _fix(said: str) -> str:
    known = {
        "partition": "sinfo lists the partitions",
        "account": "sacctmgr show associations user=$USER lists your accounts",
        "qos": "sacctmgr show qos lists them",
        "node configuration": "ask for fewer nodes, or another partition",
        "contact": "scontrol ping; is slurmctld up?",
        "timed out": "scontrol ping; is slurmctld up?",
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
