"""Start and stop of the commands in a unit file, for the stand-in of systemctl."""

from __future__ import annotations

import os
import re
import resource
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import supervise
from .unit import Unit

State = dict[str, Any]
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LOG = "/run/simulated/units.log"
_LIMITS = {
    "LimitMEMLOCK": (resource.RLIMIT_MEMLOCK, "Max locked memory"),
    "LimitNOFILE": (resource.RLIMIT_NOFILE, "Max open files"),
    "LimitSTACK": (resource.RLIMIT_STACK, "Max stack size"),
    "LimitNPROC": (resource.RLIMIT_NPROC, "Max processes"),
}
_START_SECONDS = _STOP_SECONDS = 90.0
"""These are the defaults of systemd-system.conf(5)."""
_NO_EXEC, _TIMED_OUT = 203, 124


def start(unit: Unit) -> State:
    for path in unit.all("Unit.ConditionPathExists"):
        if os.path.exists(path.lstrip("!")) == path.startswith("!"):
            return _state("inactive", "dead")
    if unit.name.endswith(".mount"):
        return _mount(unit)
    if unit.name.endswith(".automount"):
        # The real one mounts when somebody looks.
        other = f"{unit.name.removesuffix('.automount')}.mount"
        subprocess.run(["systemctl", "start", other], env={"PATH": _PATH}, check=False)
        return _state("active", "waiting")
    if not unit.name.endswith(".service"):
        return _state("active", "active")
    if unit.last("Service.Type") == "oneshot":
        return _oneshot(unit)
    return _daemon(unit)


def stop(unit: Unit, state: State) -> None:
    if unit.name.endswith(".mount"):
        subprocess.run(["umount", unit.last("Mount.Where")], env={"PATH": _PATH}, check=False)
        return
    for command in unit.all("Service.ExecStop"):
        _run(unit, command)
    if state["pid"]:
        _end(unit, int(state["pid"]))
    for command in unit.all("Service.ExecStopPost"):
        _run(unit, command)


def send(unit: Unit, pid: int, number: int, whom: str) -> None:
    """Signal a service's main process, or all that it has started."""
    for one in [pid] if whom == "main" else supervise.members(pid):
        with suppress(ProcessLookupError):
            os.kill(one, number)


def _end(unit: Unit, pid: int) -> None:
    """Send SIGTERM, and SIGKILL to what is left after the unit's time (systemd.kill(5))."""
    mode = unit.last("Service.KillMode", "control-group")
    number = signal.Signals[unit.last("Service.KillSignal", "SIGTERM")]
    send(unit, pid, number, "all" if mode == "control-group" else "main")
    limit = supervise.seconds(unit.last("Service.TimeoutStopSec"), _STOP_SECONDS)
    ends = None if limit is None else time.monotonic() + limit
    # Of a mixed or single kill the main process decides; what it leaves behind then gets SIGKILL, or is left alone.
    waits_for_all = mode == "control-group"
    while _left(pid, waits_for_all) and (ends is None or time.monotonic() < ends):
        time.sleep(0.005)
    send(unit, pid, signal.SIGKILL, "main" if mode == "process" else "all")
    while _left(pid, mode != "process"):
        time.sleep(0.005)


def _left(pid: int, whole: bool) -> list[int]:
    return [one for one in supervise.members(pid) if whole or one == pid]


def _state(active: str, sub: str, result: str = "success", pid: int = 0, status: int = 0) -> State:
    return {"active": active, "sub": sub, "result": result, "pid": pid, "status": status}


def _mount(unit: Unit) -> State:
    where = unit.last("Mount.Where")
    Path(where).mkdir(parents=True, exist_ok=True)
    command = ["mount", unit.last("Mount.What"), where]
    if unit.last("Mount.Type"):
        command += ["-t", unit.last("Mount.Type")]
    if unit.last("Mount.Options"):
        command += ["-o", unit.last("Mount.Options")]
    with open(_LOG, "ab") as log:
        done = subprocess.run(command, env={"PATH": _PATH}, stdout=log, stderr=log, check=False)
    return _state("active", "mounted") if done.returncode == 0 else _state("failed", "failed", "exit-code")


def _oneshot(unit: Unit) -> State:
    for command in unit.all("Service.ExecStartPre") + unit.all("Service.ExecStart"):
        status = _run(unit, command)
        if status and not command.startswith("-"):
            return _state("failed", "failed", "timeout" if status == _TIMED_OUT else "exit-code", status=status)
    if unit.flag("Service.RemainAfterExit"):
        return _state("active", "exited")
    return _state("inactive", "dead")


def _run(unit: Unit, command: str) -> int:
    seconds = supervise.seconds(unit.last("Service.TimeoutStartSec"), _START_SECONDS) or None
    with open(_LOG, "ab") as log:
        try:
            done = subprocess.run(
                shlex.split(command.lstrip("-@:+!")),
                env=_environment(unit),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=seconds,
                preexec_fn=lambda: _set_limits(unit),
                check=False,
            )
        except OSError:
            return _NO_EXEC
        except subprocess.TimeoutExpired:
            return _TIMED_OUT
    return done.returncode


def _daemon(unit: Unit) -> State:
    def spawn() -> subprocess.Popen[bytes]:
        with open(unit.last("Service.StandardOutput").removeprefix("append:") or _LOG, "ab") as log:
            process = subprocess.Popen(
                shlex.split(unit.last("Service.ExecStart").lstrip("-@:+!")),
                env=_environment(unit),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
                **_identity(unit),
                preexec_fn=lambda: _set_limits(unit),
            )
        _show_limits(unit, process.pid)
        return process

    try:
        return _state("active", "running", pid=supervise.beside(unit, spawn))
    except OSError:
        return _state("failed", "failed", "exit-code", status=_NO_EXEC)


def _environment(unit: Unit) -> dict[str, str]:
    lines = unit.all("Service.Environment")
    for file in unit.all("Service.EnvironmentFile"):
        path = Path(file.removeprefix("-"))
        # With a dash the file may be missing (systemd.exec(5)).
        if path.exists() or not file.startswith("-"):
            lines += path.read_text().splitlines()
    pairs = (word.partition("=")[::2] for line in lines for word in shlex.split(line))
    return {"PATH": _PATH, "LANG": "C.UTF-8", **_home(unit), **dict(pairs)}


def _home(unit: Unit) -> dict[str, str]:
    """Return the variables that a service with User= has (systemd.exec(5))."""
    if not (name := unit.last("Service.User")):
        return {}
    # Takes longer to import than most calls here run.
    import pwd

    user = pwd.getpwnam(name)
    return {"HOME": user.pw_dir, "LOGNAME": name, "USER": name, "SHELL": user.pw_shell}


def _identity(unit: Unit) -> dict[str, Any]:
    """Return the user and groups of a service, as arguments of Popen."""
    if not (name := unit.last("Service.User")):
        return {}
    import pwd

    group = pwd.getpwnam(name).pw_gid
    return {"user": name, "group": group, "extra_groups": os.getgrouplist(name, group)}


def _wanted(unit: Unit) -> dict[str, tuple[int, int]]:
    """Return soft and hard limit by key of the unit file."""
    limits = {}
    for key in _LIMITS:
        text = unit.last(f"Service.{key}")
        if text:
            soft, _, hard = text.partition(":")
            limits[key] = (_limit(soft), _limit(hard or soft))
    return limits


def _limit(text: str) -> int:
    factor = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}.get(text[-1:], 1)
    return resource.RLIM_INFINITY if text == "infinity" else int(text.rstrip("KMGT")) * factor


def _set_limits(unit: Unit) -> None:
    for key, pair in _wanted(unit).items():
        try:
            resource.setrlimit(_LIMITS[key][0], pair)
        except (PermissionError, ValueError):
            # The machine lacks the right to raise it: `_show_limits` says what would be in force.
            continue


def _show_limits(unit: Unit, pid: int) -> None:
    """Where a limit could not be set, a file over the process' /proc entry shows what systemd would have set."""
    path = Path(f"/proc/{pid}/limits")
    text = shown = path.read_text()
    for key, pair in _wanted(unit).items():
        title = _LIMITS[key][1]
        values = ["unlimited" if item == resource.RLIM_INFINITY else str(item) for item in pair]
        row = f"{title:<26}{values[0]:<21}{values[1]:<21}"
        shown = re.sub(rf"^{title} .{{{68 - len(title) - 1}}}", row, shown, flags=re.MULTILINE)
    if shown != text:
        file = Path(f"/run/simulated/limits.{pid}")
        file.write_text(shown)
        subprocess.run(["/usr/bin/mount", "--bind", str(file), str(path)], check=True)
