"""What goes wrong on a node of a lab, and jobs that stand in its way."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from rehearsal.lab.node import Node


def use_python(node: Node, interpreter: Path | str) -> None:
    """Make this the node's `python3`, for everybody but the programs that stand in for hardware."""
    if node.exec("test", "-x", str(interpreter), check=False).returncode:
        raise RuntimeError(f"{node.name} does not see {interpreter}; fix: hand its folder to Lab(folders=…)")
    node.exec("ln", "-sfn", str(interpreter), "/usr/local/bin/python3")


def read_only_etc(node: Node, read_only: bool = True) -> None:
    """Until the next boot, as where an image mounts it so or its file system went read-only after an error."""
    if node.exec("mountpoint", "-q", "/etc", check=False).returncode:
        node.exec("/usr/bin/mount", "--bind", "/etc", "/etc")
    node.exec("/usr/bin/mount", "-o", f"remount,bind,{'ro' if read_only else 'rw'}", "/etc")


def calls(node: Node, program: str) -> list[str]:
    """Return the command lines with which a stand-in program was called since the node booted."""
    return node.exec("cat", f"/run/simulated/calls/{program}", check=False).stdout.splitlines()


def hang(node: Node, program: str) -> None:
    """From now on the program never returns, whatever it is asked."""
    node.exec("rm", "-f", f"/usr/local/sbin/{program}")
    script = f"#!/bin/sh\ntouch /run/simulated/hangs.{program}\nexec sleep infinity\n"
    node.write(f"/usr/local/sbin/{program}", script, 0o755)


def wait_until_hung(node: Node, program: str, seconds: float = 300.0) -> None:
    """Wait until a program that hangs has been called. TimeoutError."""
    end = time.monotonic() + seconds
    while not node.exists(f"/run/simulated/hangs.{program}"):
        if time.monotonic() > end:
            raise TimeoutError(f"{node.name}: {program} was not called within {seconds:g} s")
        time.sleep(0.05)


def unhang(node: Node, program: str) -> None:
    node.exec("rm", "-f", f"/usr/local/sbin/{program}")


def run_job(node: Node, job: int) -> subprocess.Popen[bytes]:
    """Start a process titled as the batch step of a Slurm job; only its name is Slurm's."""
    node.exec("cp", "--update", "/usr/bin/sleep", "/run/simulated/slurmstepd")
    title = f"slurmstepd: [{job}.batch]"
    return node.start("bash", "-c", f"exec -a '{title}' /run/simulated/slurmstepd infinity")


def end_job(node: Node, job: int) -> None:
    node.exec("pkill", "-KILL", "-f", f"^slurmstepd: .{job}.batch")
