"""Not Lustre's lnetctl: LNet's networks, policies and peers of this boot, as its commands and mounts left them.

The counters of the network in use grow with every call, as if something had been read and written between two. Left out:
traffic, health, tunables, other networks than tcp and efa, deleting anything. A server is known by the networks that LNet had
when Lustre was mounted; whether the real one learns of EFA later is not known.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .state import change, refuse

_DOWN = 'show:\n    - net:\n          errno: -100\n          descr: "cannot get networks: Network is down"'
_SERVER = {"tcp": "198.51.100.8@tcp", "efa": "100.8.71.0@efa"}


def main(arguments: Sequence[str]) -> int:
    words = tuple(argument for argument in arguments[:2] if not argument.startswith("-"))
    options = dict(itertools.pairwise(arguments))
    if not Path("/sys/module/lnet").exists():
        refuse(_DOWN)
    if words == ("net", "show"):
        return _show_nets(options.get("--net", ""), "-v" in arguments)
    with change("lnet") as state:
        if words == ("lnet", "configure"):
            state["up"] = True
        elif words == ("net", "add"):
            _add(state, options["--net"], options["--if"])
        elif words == ("set", "discovery"):
            state["discovery"] = arguments[2]
        elif words == ("udsp", "add"):
            state.setdefault("policies", []).append((options["--src"], options["--priority"]))
        elif words == ("udsp", "show"):
            _show_policies(state.get("policies", []))
        elif words == ("peer", "show"):
            _show_peers(state.get("peers", []))
        else:
            refuse(f"lnetctl: this stand-in does not know {' '.join(arguments)!r}")
    return 0


def mounted() -> None:
    """Lustre brings LNet up by itself, over TCP by default, and meets its servers."""
    with change("lnet") as state:
        _start(state)
        state["peers"] = [_SERVER[net] for net in state["nets"]]


def _start(state: dict[str, Any]) -> None:
    state["up"] = True
    state.setdefault("nets", {"tcp": ["eth0"]})


def _add(state: dict[str, Any], net: str, interface: str) -> None:
    """Add a network card or an EFA device; refuse one that is missing, was added, or has no module."""
    if not state.get("up"):
        refuse('add:\n    - net:\n          errno: -100\n          descr: "cannot add network: Network is down"')
    module, place = {"tcp": ("ksocklnd", "net"), "efa": ("kefalnd", "infiniband")}[net]
    nets = state.setdefault("nets", {})
    if not Path("/sys/module", module).exists() or not Path("/sys/class", place, interface).exists():
        refuse(
            f'add:\n    - net:\n          errno: -22\n          descr: "cannot add network: no {interface} for {net}"'
        )
    if interface in nets.setdefault(net, []):
        refuse('add:\n    - net:\n          errno: -17\n          descr: "cannot add network: File exists"')
    nets[net].append(interface)


def _show_nets(only: str, verbose: bool) -> int:
    with change("lnet") as state:
        if Path("/sys/module/lustre").exists():
            _start(state)
        if not state.get("up"):
            refuse(_DOWN)
        nets = state.get("nets", {})
        counters = state.setdefault("counters", {})
        preferred = [source for source, _ in state.get("policies", ())]
        reached = "efa" if "efa" in preferred and _SERVER["efa"] in state.get("peers", ()) else "tcp"
        counters[reached] = counters.get(reached, 1000) + 64
    nids = {"lo": [("0@lo", "")]}
    nids["tcp"] = [("10.77.0.1@tcp", interface) for interface in nets.get("tcp", ())]
    nids["efa"] = [(f"1.61.92.{number}@efa", interface) for number, interface in enumerate(nets.get("efa", ()))]
    print("net:")
    for net in [only] if only else [net for net, listed in nids.items() if listed]:
        if not nids.get(net):
            continue
        print(f"    - net type: {net}\n      local NI(s):")
        for nid, interface in nids[net]:
            print(_interface(nid, interface, counters.get(net, 0), verbose), end="")
    return 0


def _interface(nid: str, interface: str, count: int, verbose: bool) -> str:
    text = f"        - nid: {nid}\n          status: up\n"
    if interface:
        text += f"          interfaces:\n              0: {interface}\n"
    if verbose:
        text += f"          statistics:\n              send_count: {count}\n              recv_count: {count}\n"
        text += "              drop_count: 0\n"
    return text


def _show_policies(policies: Sequence[Sequence[str]]) -> None:
    for number, (source, priority) in enumerate(policies):
        head = "udsp:\n" if number == 0 else ""
        print(f"{head}    - idx: {number}\n      src: {source}\n      dst: NA\n      rte: NA")
        print(f"      action:\n          priority: {priority}")


def _show_peers(nids: Sequence[str]) -> None:
    if nids:
        print(f"peer:\n    - primary nid: {nids[0]}\n      Multi-Rail: {len(nids) > 1}\n      peer ni:")
    for nid in nids:
        print(f"        - nid: {nid}\n          state: NA")
