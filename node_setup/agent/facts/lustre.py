"""The Lustre client: modules, mounts, parameters, networks, layouts, targets.

A path on a mounted Lustre may hang forever when servers are away, so none is looked at by this process: only by programs
that are killed when they take too long.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from typing import Any, Callable

from node_setup.agent.facts.reading import MachineReading, Mount, integer, parse_mounts, run_side_by_side
from node_setup.agent.host import TIMED_OUT

EMPTY: dict[str, Any] = {
    "lustre": {
        **dict.fromkeys(
            (
                "client",
                "loaded",
                "lctl",
                "lfs",
                "lnetctl",
                "nets",
                "peers",
                "preferred",
                "interface",
                "aws_configured",
                "osts",
            )
        ),
        "mounts": [],
        "parameters": {},
        "stripes": {},
    }
}
AWS_UNIT = "configure-efa-fsx-lustre-client.service"
"""AWS's script for Lustre over EFA installs this unit."""
_ANSWER_SECONDS = 10.0
_NO_NETWORKS = "Network is down"
"""lnetctl prints this where the module is loaded and nothing is configured (ENETDOWN)."""
_NO_ANSWER = {"exists": None, "empty": None, "layout": None, "error": "the file system did not answer"}


def collect(reading: MachineReading) -> dict[str, Any]:
    mounts = _mounts(reading)
    lctl, lfs, lnetctl = (reading.host.which(name) is not None for name in ("lctl", "lfs", "lnetctl"))
    loaded = "lustre" in reading.loaded or reading.host.exists("/sys/fs/lustre/version") or bool(mounts)
    paths = [path for path in reading.wanted.stripe_paths if any(_holds(mount, path) for mount in mounts)]
    calls: dict[str, Callable[[], Any]] = {}
    if lctl and loaded:
        calls["lustre.parameters"] = lambda: _parameters(reading)
    if lnetctl and (loaded or "lnet" in reading.loaded):
        calls["lustre.nets"] = lambda: _nets(reading)
        calls["lustre.preferred"] = lambda: _parsed(reading, "preferred", ["lnetctl", "udsp", "show"], parse_udsp)
    if lnetctl:
        calls["lustre.interface"] = lambda: _interface(reading)
    if lnetctl and mounts:
        calls["lustre.peers"] = lambda: _parsed(reading, "peers", ["lnetctl", "peer", "show"], parse_peers)
    if lfs and mounts:
        calls["lustre.osts"] = lambda: _osts(reading, mounts[0].target)
    for path in paths:
        calls[f"lustre.stripes.{path}"] = functools.partial(_stripe, reading, path, lfs)
    results = run_side_by_side(reading, calls, within=3 * _ANSWER_SECONDS)
    return {
        "lustre": {
            "client": _version(reading, lctl) if loaded else None,
            "loaded": loaded,
            "lctl": lctl,
            "lfs": lfs,
            "lnetctl": lnetctl,
            "mounts": [_mount(mount) for mount in mounts],
            "parameters": results.get("lustre.parameters", {}),
            "nets": results.get("lustre.nets"),
            "peers": results.get("lustre.peers"),
            "preferred": results.get("lustre.preferred"),
            "interface": results.get("lustre.interface"),
            "aws_configured": _aws_configured(reading),
            "stripes": {path: results[f"lustre.stripes.{path}"] or _NO_ANSWER for path in paths},
            "osts": results.get("lustre.osts"),
        }
    }


def _mounts(reading: MachineReading) -> list[Mount]:
    """Return the Lustre mounts. Where a wanted directory lies below a mount on demand, that is mounted first."""
    waiting = [mount for mount in reading.mounts if mount.fstype == "autofs"]
    for mount in waiting:
        if any(_holds(mount, path) for path in reading.wanted.stripe_paths):
            reading.host.run(_list(mount.target), _ANSWER_SECONDS)
            reading.mounts = parse_mounts(reading.host.read("/proc/mounts") or "")
    return [mount for mount in reading.mounts if mount.fstype == "lustre"]


def _list(path: str) -> list[str]:
    """Return a command that prints one entry of a directory and no more: a Lustre directory may have millions."""
    return ["find", path, "-maxdepth", "1", "-mindepth", "1", "-print", "-quit"]


def _holds(mount: Mount, path: str) -> bool:
    return path == mount.target or path.startswith(mount.target.rstrip("/") + "/")


def _mount(mount: Mount) -> dict[str, Any]:
    return {"target": mount.target, "source": mount.source, "options": list(mount.options)}


def _version(reading: MachineReading, lctl: bool) -> str | None:
    """Return the version of the loaded client, from the kernel or from its program; for a client that is not loaded no program
    is run."""
    text = reading.text("/sys/fs/lustre/version") or reading.text("/sys/module/lustre/version")
    if text is None and lctl:
        text = reading.output_of("lustre.client", ["lctl", "--version"])
    match = re.search(r"\d+\.\d+[\w.-]*", text or "")
    return match[0] if match else None


def _aws_configured(reading: MachineReading) -> bool:
    return any(
        reading.host.exists(f"{folder}/{AWS_UNIT}") for folder in ("/etc/systemd/system", "/usr/lib/systemd/system")
    )


def _parameters(reading: MachineReading) -> dict[str, dict[str, str]] | None:
    """Read all patterns with one call. lctl fails when any of them matches nothing, which only says that there is none."""
    patterns = reading.wanted.lustre_parameters
    if not patterns:
        return {}
    done = reading.host.run(["lctl", "get_param", *patterns], _ANSWER_SECONDS)
    real = [line for line in done.err.splitlines() if line.strip() and "No such file" not in line]
    if not done.ok and (real or not done.err.strip()):
        reading.fault("lustre.parameters", f"lctl get_param: {real[-1] if real else done.complaint}")
        if done.status == TIMED_OUT or not done.out:
            return None
    return by_pattern(patterns, parse_parameters(done.out))


_PARAMETER = r"([\w-]+(?:\.[^\s=]+)+)=(.*)$"


def parse_parameters(text: str) -> dict[str, str]:
    """Parse `lctl get_param`: `name=value`, or `name=` with the value on lines of its own."""
    parameters: dict[str, str] = {}
    name = None
    for line in text.splitlines():
        match = re.match(_PARAMETER, line)
        if match:
            name = match[1]
            parameters[name] = match[2]
        elif name is not None:
            parameters[name] = f"{parameters[name]}\n{line}".lstrip("\n")
    return parameters


def by_pattern(patterns: tuple[str, ...], values: dict[str, str]) -> dict[str, dict[str, str]]:
    return {
        pattern: {name: value for name, value in values.items() if fnmatch.fnmatchcase(name, pattern)}
        for pattern in patterns
    }


def _nets(reading: MachineReading) -> list[dict[str, Any]] | None:
    done = reading.host.run(["lnetctl", "net", "show", "-v"], _ANSWER_SECONDS)
    if not done.ok and _NO_NETWORKS in done.out + done.err:
        return []
    if not done.ok:
        reading.fault("lustre.nets", f"lnetctl: {done.complaint}")
        return None
    return parse_nets(done.out)


def _parsed(
    reading: MachineReading, fact: str, command: list[str], parse: Callable[[str], list[Any]]
) -> list[Any] | None:
    text = reading.output_of(f"lustre.{fact}", command, _ANSWER_SECONDS)
    return None if text is None else parse(text)


def parse_nets(text: str) -> list[dict[str, Any]]:
    """Parse `lnetctl net show -v`: every network with all its interfaces, whose counters a caller sums over all of them."""
    nets: list[dict[str, Any]] = []
    nid: dict[str, Any] = {}
    section = ""
    for line in text.splitlines():
        key, _, value = line.strip().lstrip("- ").partition(":")
        value = value.strip().strip('"')
        if key == "net type":
            nets.append({"net": value, "nids": []})
        elif not nets:
            continue
        elif key == "nid":
            nid = {"nid": value, "interface": None, "status": None, "send": None, "recv": None, "drop": None}
            nets[-1]["nids"].append(nid)
        elif not value:
            section = key
        elif key == "status" and nid:
            nid["status"] = value
        elif section == "interfaces" and key == "0" and nid:
            nid["interface"] = value
        elif section == "statistics" and key in ("send_count", "recv_count", "drop_count") and nid:
            nid[key.partition("_")[0]] = integer(value)
    return nets


def parse_peers(text: str) -> list[dict[str, Any]]:
    """Parse `lnetctl peer show`: every node that LNet has talked to, and all addresses that the node names."""
    peers: list[dict[str, Any]] = []
    for line in text.splitlines():
        key, _, value = line.strip().lstrip("- ").partition(":")
        if key == "primary nid":
            peers.append({"nids": []})
        elif key == "nid" and peers:
            peers[-1]["nids"].append(value.strip())
    return peers


def parse_udsp(text: str) -> list[str]:
    """Parse `lnetctl udsp show`: local networks that a selection policy prefers to others."""
    return re.findall(r"^[ \t]*src:[ \t]*(?!NA\b)(\S+)[ \t]*$", text, re.MULTILINE)


def _interface(reading: MachineReading) -> str | None:
    """Return the interface of the node's own address, else of the default route: a HyperPod node has the service's network
    card beside that of the cluster's VPC. AWS's script for Lustre over EFA goes by `hostname -i` as well
    (https://docs.aws.amazon.com/fsx/latest/LustreGuide/configure-efa-clients.html)."""
    own = reading.host.run(["hostname", "-i"], _ANSWER_SECONDS)
    held = reading.host.run(["ip", "-o", "addr", "show"], _ANSWER_SECONDS)
    if own.ok and held.ok:
        interface = own_interface(own.out, held.out)
        if interface is not None:
            return interface
    return default_interface(reading.host.read("/proc/net/route") or "")


def own_interface(own: str, held: str) -> str | None:
    """Return, from `hostname -i` and `ip -o addr show`, the one interface that holds the node's addresses; None where that is
    none or several, as where the name is resolved to all addresses that the node has."""
    addresses = set(own.split())
    rows = [line.split() for line in held.splitlines()]
    interfaces = {
        row[1].partition("@")[0] for row in rows if len(row) > 3 and row[3].partition("/")[0] in addresses
    } - {"lo"}
    return interfaces.pop() if len(interfaces) == 1 else None


def default_interface(text: str) -> str | None:
    """Return, from /proc/net/route, the interface of the default route with the lowest metric; None without one."""
    rows = [line.split() for line in text.splitlines()[1:]]
    routes = [
        (number, row[0])
        for row in rows
        if len(row) > 7 and row[1] == row[7] == "00000000"
        if (number := integer(row[6])) is not None
    ]
    return min(routes, default=(0, None))[1]


def _osts(reading: MachineReading, target: str) -> dict[str, Any] | None:
    text = reading.output_of("lustre.osts", ["lfs", "df", target], _ANSWER_SECONDS)
    return None if text is None else parse_df(text)


_TARGET = r"^\S*(?:OST|MDT)[0-9a-f]{4,8}\S*[ \t].*$"
_USED = r"\S*OST\S*[ \t]+(?:\S+[ \t]+){3}(\d+)%[ \t]"
_ANSWERS = r"\S+[ \t]+(?:\S+[ \t]+){3}\d+%[ \t]"
_INACTIVE = r"\S+[ \t]*:[ \t]*inactive"
_READ_ONLY = r".*\][ \t]+[A-Za-z]*R"


def parse_df(text: str) -> dict[str, Any]:
    """Parse `lfs df`: how many object storage targets answer, how full the fullest is, how many are switched off or read-only,
    and the lines of those, metadata targets too, that do not answer.

    Such a line has an error of the kernel in place of numbers; letters at a line's end are a target's states
    (https://doc.lustre.org/lustre_manual.xhtml#lustremaint.obtaining_space).
    """
    rows = re.findall(_TARGET, text, re.MULTILINE)
    used = [int(match[1]) for row in rows if (match := re.match(_USED, row))]
    return {
        "count": len(used),
        "fullest_percent": max(used) if used else None,
        "inactive": sum(bool(re.match(_INACTIVE, row)) for row in rows),
        "read_only": sum(bool(re.match(_READ_ONLY, row)) for row in rows),
        "silent": [" ".join(row.split()) for row in rows if not re.match(f"{_ANSWERS}|{_INACTIVE}", row)],
    }


def _stripe(reading: MachineReading, path: str, lfs: bool) -> dict[str, Any]:
    """Read a directory's own entries (`empty`) and the layout that new files in it get, its own or an inherited one."""
    state: dict[str, Any] = {"exists": None, "empty": None, "layout": None, "error": None}
    listed = reading.host.run(_list(path), _ANSWER_SECONDS)
    if not listed.ok:
        if "No such file or directory" in listed.err:
            return {**state, "exists": False}
        return {**state, "error": listed.complaint}
    state = {**state, "exists": True, "empty": not listed.out.strip()}
    if not lfs:
        return {**state, "error": "there is no lfs"}
    printed = reading.host.run(["lfs", "getstripe", "-d", path], _ANSWER_SECONDS)
    layout = parse_layout(printed.out) if printed.ok else None
    if layout is None:
        return {
            **state,
            "error": f"lfs getstripe: {printed.complaint if not printed.ok else 'no layout in what it printed'}",
        }
    return {**state, "layout": layout}


_ENTRY = r"\b(?:lmm_)?(stripe_count|stripe_size|pattern|stripe_offset|pool|e_start|e_end):\s*(\S+)"


def parse_layout(text: str) -> dict[str, Any] | None:
    """Parse `lfs getstripe -d`: {count, size, offset, pattern, pool, components}; sizes in bytes, `components` of a composite
    layout each with `start` and `end` in bytes, the last end None. The values beside it are then the last component's."""
    components: list[dict[str, Any]] = []
    for key, value in re.findall(_ENTRY, text):
        opens = key == "e_start" or (key == "stripe_count" and not components)
        if opens:
            components.append(dict.fromkeys(("start", "end", "count", "size", "offset", "pattern", "pool")))
        if components:
            name = key.replace("stripe_", "").replace("e_", "")
            components[-1][name] = value if name in ("pattern", "pool") else integer(value)
    if not components or components[-1]["count"] is None:
        return None
    last = {name: components[-1][name] for name in ("count", "size", "offset", "pattern", "pool")}
    return {**last, "components": components if "lcm" in text else []}
