"""The part of the systemctl stand-in that stays beside a service: sees it end, and starts it again where its unit says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from .state import change, peek
from .unit import Unit, unload_if_transient

State = dict[str, Any]
Spawn = Callable[[], "subprocess.Popen[bytes]"]
CLEAN = (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)
"""These deaths count as an end without a failure (systemd.service(5), SuccessExitStatus=)."""
_POLL_S = 0.02
_NOTED_S = 10.0


def beside(unit: Unit, spawn: Spawn) -> int:
    """Start the service with a supervisor of its own and return its process id. OSError where it cannot be started."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        _detach(writer)
        try:
            _supervise(unit, spawn, writer)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        message = json.loads(pipe.read() or '{"errno": 5}')
    if "errno" in message:
        raise OSError(message["errno"], os.strerror(message["errno"]))
    return int(message["pid"])


def again(unit: Unit, status: int) -> bool:
    """Check whether a service that ended with `status` (of Popen) is to be started again."""
    failed = status > 0 or (status < 0 and -status not in CLEAN)
    restart = unit.last("Service.Restart", "no")
    return restart == "always" or (restart == "on-failure" and failed) or (restart == "on-success" and not failed)


def ended(unit: Unit, status: int) -> State:
    """Return the state of a service that has ended and stays so."""
    main = {"pid": 0, "status": abs(status), "killed": status < 0}
    if status == 0 or -status in CLEAN:
        stays = unit.flag("Service.RemainAfterExit")
        active, sub = ("active", "exited") if stays else ("inactive", "dead")
        return {"active": active, "sub": sub, "result": "success", **main}
    return {"active": "failed", "sub": "failed", "result": "exit-code" if status > 0 else "signal", **main}


def members(pid: int) -> list[int]:
    """Return the processes of a service's session: a node has no control groups to find them by."""
    pids = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[3] == str(pid) and fields[0] != "Z":
            pids.append(int(name))
    return pids


def _detach(keep: int) -> None:
    """Leave the session of systemctl's caller: an open output would keep its connection open."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    highest = os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 4096 else 4096
    os.closerange(3, keep)
    os.closerange(keep + 1, highest)


def _supervise(unit: Unit, spawn: Spawn, writer: int) -> None:
    starts: list[float] = []
    process = _first(spawn, writer)
    while process is not None:
        starts.append(time.monotonic())
        status = process.wait()
        if not _noted(unit, process.pid):
            return
        if not again(unit, status):
            _change(unit, process.pid, ended(unit, status))
            return
        burst = int(unit.last("Unit.StartLimitBurst", "5"))
        interval = seconds(unit.last("Unit.StartLimitIntervalSec"), 10.0) or 0.0
        if interval and sum(time.monotonic() - start < interval for start in starts) >= burst:
            _change(
                unit,
                process.pid,
                {**ended(unit, status), "active": "failed", "sub": "failed", "result": "start-limit-hit"},
            )
            return
        if not _change(unit, process.pid, {"active": "activating", "sub": "auto-restart"}):
            return
        time.sleep(seconds(unit.last("Service.RestartSec"), 0.1) or 0.0)
        process = _next(unit, process.pid, spawn)


def _first(spawn: Spawn, writer: int) -> subprocess.Popen[bytes] | None:
    process = None
    try:
        process = spawn()
        message = {"pid": process.pid}
    except OSError as error:
        message = {"errno": error.errno or 5}
    os.write(writer, json.dumps(message).encode())
    os.close(writer)
    return process


def _next(unit: Unit, before: int, spawn: Spawn) -> subprocess.Popen[bytes] | None:
    """Start the service once more; None where it was stopped meanwhile, or cannot be started any more."""
    with change("systemd") as systemd:
        state = systemd["units"].get(unit.name, {})
        if (state.get("pid"), state.get("active")) != (before, "activating"):
            return None
        try:
            process = spawn()
        except OSError:
            state.update(ended(unit, 203))
            return None
        state.update(active="active", sub="running", pid=process.pid, restarts=state.get("restarts", 0) + 1)
        return process


def _noted(unit: Unit, pid: int) -> bool:
    """Check whether the manager holds this process for the running service: its starter writes that down, or stops it."""
    ends = time.monotonic() + _NOTED_S
    while time.monotonic() < ends:
        state = peek("systemd").get("units", {}).get(unit.name, {})
        if state.get("pid") == pid:
            return bool(state["active"] == "active")
        time.sleep(_POLL_S)
    return False


def _change(unit: Unit, pid: int, new: State) -> bool:
    """Write a new state down unless the service was stopped or started by others meanwhile; whether it was written."""
    with change("systemd") as systemd:
        state = systemd["units"].get(unit.name, {})
        if state.get("pid") != pid or state.get("active") != "active":
            return False
        state.update(new)
        unload_if_transient(systemd, unit)
        return True


def seconds(text: str, otherwise: float) -> float | None:
    """Read a time of a unit file; None for no limit."""
    if not text:
        return otherwise
    if text == "infinity":
        return None
    units = {"ms": 0.001, "min": 60.0, "s": 1.0, "": 1.0}
    unit = next(ending for ending in ("ms", "min", "s", "") if text.endswith(ending))
    try:
        return float(text[: len(text) - len(unit)]) * units[unit]
    except ValueError:
        return otherwise
