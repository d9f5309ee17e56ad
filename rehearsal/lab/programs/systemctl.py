"""Not systemd: a stand-in for systemctl that reads unit files, keeps which are active, and runs what they say at once.

Left out: jobs and transactions beyond Requires/Wants/After, timers, sockets, automounts on demand, watchdogs, sandboxing,
D-Bus, the journal, fstab's units. Of Restart= it knows no, always, on-success and on-failure; ExecStopPost= runs at a stop
alone. A service is the session of its main process in place of a control group, so that what leaves the session outlives a
stop; limits that the machine may not grant are shown in /proc/PID/limits and not in force.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .power import restart, switch_off
from .state import change, peek, refuse
from .unit import Unit, file_state, load, to_state, unload_if_transient, wanted_by

INACTIVE = {"active": "inactive", "sub": "dead", "result": "success", "pid": 0, "status": 0}


def main(arguments: Sequence[str]) -> int:
    words, options, properties = _split(arguments)
    verb = words[0] if words else "list-units"
    if verb not in _VERBS:
        refuse(f"Unknown command verb {verb}. (This stand-in for systemctl knows {', '.join(sorted(_VERBS))}.)")
    return _VERBS[verb]([_full(word) for word in words[1:]], options, properties)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return words, options, and the properties for `show`."""
    words: list[str] = []
    options: list[str] = []
    properties: list[str] = []
    rest = list(arguments)
    while rest:
        one = rest.pop(0)
        if one in ("-p", "--property"):
            properties.append(rest.pop(0))
        elif one in ("-s", "--signal", "--kill-whom", "--kill-who"):
            options.append(f"--{one.lstrip('-')}={rest.pop(0)}")
        elif one.startswith(("--property=", "-p")):
            properties.append(one.partition("=")[2] if "=" in one else one[2:])
        elif one.startswith("-"):
            options.append(one)
        else:
            words.append(one)
    return words, options, properties


def start_unit(name: str, starting: frozenset[str] = frozenset()) -> bool:
    """Start a unit after those that it requires or wants; whether it is up or ended well."""
    unit = _loaded(name)
    if unit.load != "loaded":
        refuse(f"Failed to start {name}: Unit {name} {'is masked' if unit.load == 'masked' else 'not found'}.", 5)
    if peek("systemd").get("units", {}).get(unit.name, INACTIVE)["active"] == "active":
        return True
    for other in unit.words("Unit.Requires") + unit.words("Unit.Wants"):
        if other not in starting and load(other).load == "loaded" and not other.endswith(".target"):
            good = start_unit(other, starting | {name})
            if not good and other in unit.words("Unit.Requires"):
                return _set(unit, {**INACTIVE, "result": "dependency"})
    from . import run_unit

    return _set(unit, run_unit.start(unit))


def stop_unit(name: str) -> None:
    unit = _loaded(name)
    state = peek("systemd").get("units", {}).get(unit.name, INACTIVE)
    if state["active"] == "active":
        from . import run_unit

        # Else its supervisor would start it again.
        _set(unit, {**state, "active": "deactivating"})
        run_unit.stop(unit, state)
    _set(unit, dict(INACTIVE))


def _set(unit: Unit, state: dict[str, Any]) -> bool:
    with change("systemd") as systemd:
        systemd.setdefault("units", {})[unit.name] = state
        systemd.setdefault("loaded", {})[unit.name] = to_state(unit)
        unload_if_transient(systemd, unit)
    return bool(state["active"] == "active" or state["result"] == "success")


def _loaded(name: str) -> Unit:
    """Return the unit as the manager last read it: a changed file counts after daemon-reload."""
    kept = peek("systemd").get("loaded", {}).get(name)
    return Unit(**kept) if kept else load(name)


def _full(name: str) -> str:
    return name if "." in name else f"{name}.service"


def _start(units: list[str], options: list[str], properties: list[str]) -> int:
    bad = [name for name in units if not start_unit(name)]
    for name in bad:
        print(f"Job for {name} failed. See 'systemctl status {name}' for details.", file=sys.stderr)
    return 1 if bad else 0


def _stop(units: list[str], options: list[str], properties: list[str]) -> int:
    for name in units:
        if _loaded(name).load == "not-found":
            refuse(f"Failed to stop {name}: Unit {name} not loaded.", 5)
        stop_unit(name)
    return 0


def _restart(units: list[str], options: list[str], properties: list[str]) -> int:
    for name in units:
        stop_unit(name)
    return _start(units, options, properties)


def _try_restart(units: list[str], options: list[str], properties: list[str]) -> int:
    active = peek("systemd").get("units", {})
    return _restart([name for name in units if active.get(name, INACTIVE)["active"] == "active"], options, properties)


def _reload(units: list[str], options: list[str], properties: list[str]) -> int:
    return 0


def _daemon_reload(units: list[str], options: list[str], properties: list[str]) -> int:
    with change("systemd") as systemd:
        systemd["loaded"] = {}
    return 0


def _enable(units: list[str], options: list[str], properties: list[str]) -> int:
    for name in units:
        unit = load(name)
        if unit.load != "loaded":
            refuse(f"Failed to enable unit: Unit file {name} does not exist.")
        for link, target in wanted_by(unit):
            if not os.path.lexists(link):
                os.makedirs(os.path.dirname(link), exist_ok=True)
                os.symlink(target, link)
                print(f"Created symlink {link} → {target}.", file=sys.stderr)
    _daemon_reload([], [], [])
    return _start(units, options, properties) if "--now" in options else 0


def _disable(units: list[str], options: list[str], properties: list[str]) -> int:
    for name in units:
        unit = load(name)
        if unit.load == "not-found":
            refuse(f"Failed to disable unit: Unit file {name} does not exist.")
        for link, _ in wanted_by(unit):
            if os.path.lexists(link):
                os.unlink(link)
                print(f"Removed {link}.", file=sys.stderr)
        if "--now" in options:
            stop_unit(name)
    _daemon_reload([], [], [])
    return 0


def _mask(units: list[str], options: list[str], properties: list[str]) -> int:
    for name in units:
        link = Path("/etc/systemd/system", name)
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    return _daemon_reload([], [], [])


def _unmask(units: list[str], options: list[str], properties: list[str]) -> int:
    for name in units:
        link = Path("/etc/systemd/system", name)
        if link.is_symlink() and os.readlink(link) == "/dev/null":
            link.unlink()
    return _daemon_reload([], [], [])


def _is_active(units: list[str], options: list[str], properties: list[str]) -> int:
    states = [_properties(name)["ActiveState"] for name in units]
    if not {"-q", "--quiet"} & set(options):
        print("\n".join(states))
    return 0 if "active" in states else 3


def _is_failed(units: list[str], options: list[str], properties: list[str]) -> int:
    states = [_properties(name)["ActiveState"] for name in units]
    if not {"-q", "--quiet"} & set(options):
        print("\n".join(states))
    return 0 if "failed" in states else 1


def _is_enabled(units: list[str], options: list[str], properties: list[str]) -> int:
    good = False
    for name in units:
        state = file_state(load(name))
        good = good or state in ("enabled", "enabled-runtime", "static")
        if not state:
            print(f"Failed to get unit file state for {name}: No such file or directory", file=sys.stderr)
        elif not {"-q", "--quiet"} & set(options):
            print(state)
    return 0 if good else 1


def _kill(units: list[str], options: list[str], properties: list[str]) -> int:
    from . import run_unit

    wanted = dict(option.lstrip("-").partition("=")[::2] for option in options)
    number, whom = (
        _signal(wanted.get("signal") or wanted.get("s") or "SIGTERM"),
        wanted.get("kill-whom") or wanted.get("kill-who", "all"),
    )
    for name in units:
        unit = _loaded(name)
        state = peek("systemd").get("units", {}).get(unit.name, INACTIVE)
        if not state["pid"]:
            refuse(f"Failed to kill unit {name}: Unit {name} not loaded or without a process.")
        run_unit.send(unit, int(state["pid"]), number, whom)
    return 0


def _signal(name: str) -> int:
    import signal

    known = {one.name: one.value for one in signal.Signals}
    wanted = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
    if not name.isdecimal() and wanted not in known:
        refuse(f"Failed to parse signal string {name}.")
    return int(name) if name.isdecimal() else known[wanted]


def _reset_failed(units: list[str], options: list[str], properties: list[str]) -> int:
    with change("systemd") as systemd:
        known = systemd.get("units", {})
        for name in units or list(known):
            if known.get(name, INACTIVE)["active"] == "failed":
                known[name] = dict(INACTIVE)
                unload_if_transient(systemd, _loaded(name))
    return 0


def _is_system_running(units: list[str], options: list[str], properties: list[str]) -> int:
    if not Path("/run/simulated/booted").exists():
        print("starting")
        return 1
    failed = any(state["active"] == "failed" for state in peek("systemd").get("units", {}).values())
    print("degraded" if failed else "running")
    return 1 if failed else 0


def _show(units: list[str], options: list[str], properties: list[str]) -> int:
    requested = {name for item in properties for name in item.split(",")}
    bare = "--value" in options
    blocks = []
    for name in units:
        by_name = _properties(name)
        lines = [
            value if bare else f"{key}={value}" for key, value in by_name.items() if not requested or key in requested
        ]
        blocks.append("\n".join(lines))
    print("\n\n".join(blocks))
    return 0


def _properties(name: str) -> dict[str, str]:
    unit, now = _loaded(name), load(name)
    state = peek("systemd").get("units", {}).get(unit.name, INACTIVE)
    limits = {key.partition(".")[2]: unit.last(key) for key in unit.values if key.startswith("Service.Limit")}
    return {
        "Type": unit.last("Service.Type", "simple"),
        "Result": state["result"],
        "MainPID": str(state["pid"]),
        "ExecMainCode": _main_code(state),
        "ExecMainStatus": str(state["status"]),
        "NRestarts": str(state.get("restarts", 0)),
        **limits,
        "Id": unit.name,
        "Description": unit.last("Unit.Description", unit.name),
        "LoadState": unit.load,
        "ActiveState": state["active"],
        "SubState": state["sub"],
        "FragmentPath": unit.fragment,
        "DropInPaths": " ".join(unit.drop_ins),
        "UnitFileState": file_state(now),
        "NeedDaemonReload": "yes" if (now.values, now.drop_ins) != (unit.values, unit.drop_ins) else "no",
    }


def _main_code(state: dict[str, Any]) -> str:
    """Return CLD_EXITED or CLD_KILLED of siginfo.h; 0 for a process that has not ended."""
    return ("2" if state["killed"] else "1") if "killed" in state else "0"


def _power(act: Callable[[], None]) -> Callable[[list[str], list[str], list[str]], int]:
    def verb(units: list[str], options: list[str], properties: list[str]) -> int:
        act()
        return 0

    return verb


_VERBS: dict[str, Callable[[list[str], list[str], list[str]], int]] = {
    "start": _start,
    "stop": _stop,
    "restart": _restart,
    "try-restart": _try_restart,
    "reload": _reload,
    "reload-or-restart": _restart,
    "daemon-reload": _daemon_reload,
    "enable": _enable,
    "disable": _disable,
    "mask": _mask,
    "unmask": _unmask,
    "is-active": _is_active,
    "kill": _kill,
    "is-failed": _is_failed,
    "is-enabled": _is_enabled,
    "is-system-running": _is_system_running,
    "reset-failed": _reset_failed,
    "show": _show,
    "reboot": _power(restart),
    "poweroff": _power(switch_off),
}
