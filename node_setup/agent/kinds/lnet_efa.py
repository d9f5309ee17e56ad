"""LNet over EFA: interfaces added to the running network before Lustre is mounted, and a unit that does it at every boot.

The commands are those of https://docs.aws.amazon.com/fsx/latest/LustreGuide/configure-efa-clients.html. AWS's script gives
each interface a CPU partition besides, by options of libcfs that count only where no module of Lustre is loaded yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from node_setup.agent import owned
from node_setup.agent.kinds import owned_unit
from node_setup.agent.kinds.dropped import dropped
from node_setup.agent.kinds.unit import no_systemd
from node_setup.agent.model import (
    FAILED,
    OK,
    REBOOT,
    RUNTIME,
    UNKNOWN,
    Facts,
    Remark,
    Request,
    Run,
    Setting,
    Step,
)

EFA, TCP = "efa", "tcp"
PEER_CREDITS = "32"
"""Messages in flight to one server over one interface, as the page of AWS has it."""
ADD_SECONDS = 60.0
"""Of one interface: 9 s in a transcript of a g6e.24xlarge (tests/node_setup/recorded/ORIGINS.md, the wsi-cloud one)."""
MOUNTED_BEFORE = (
    "LNet has EFA, but knows the file servers over TCP only, as where Lustre was mounted first; "
    "fix: fab node-reboot, or umount and mount while no job runs"
)


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    """`Setting.value` is the number of interfaces."""
    unit = owned_unit.name(owned.LNET_UNIT)
    before, after = Run(("systemctl", "disable", unit)), Run(("systemctl", "daemon-reload"))
    planned = dropped(owned.LNET_UNIT, chosen, facts, request, (before,), (after,))
    for setting in chosen:
        if setting.id in selected:
            planned += _plan_one(setting, facts)
    return planned


def lnet_unit() -> str:
    """Before every mount of a network file system, and before kubelet, whose pods mount: Lustre keeps the way by which it
    first reached a server (https://github.com/awslabs/awsome-distributed-ai/pull/1208)."""
    return f"""{owned.HEADER}[Unit]
Description=LNet over EFA, before Lustre is mounted
Wants=network-online.target remote-fs-pre.target
After=network-online.target
Before=remote-fs-pre.target kubelet.service lustrain-boot.service lustrain-tune.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/python3 -I -S {owned.AGENT} lnet
TimeoutStartSec=600

[Install]
WantedBy=multi-user.target
"""


def interfaces(facts: Facts, net: str) -> list[str]:
    """What LNet has on a network."""
    nets = (facts.get("lustre") or {}).get("nets") or ()
    return [str(nid["interface"]) for one in nets if one["net"] == net for nid in one["nids"]]


def servers_without_efa(facts: Facts) -> bool:
    """Whether a file system is mounted and LNet knows no server by an EFA address; False where nobody could look.

    Some peers of an FSx file system have none, its management server among them, so that one with EFA is enough.
    """
    lustre = facts.get("lustre") or {}
    peers = lustre.get("peers")
    if not lustre.get("mounts") or not peers:
        return False
    return not any(nid.endswith(f"@{EFA}") for peer in peers for nid in peer["nids"])


def _plan_one(setting: Setting, facts: Facts) -> list[Step | Remark]:
    lustre: Mapping[str, Any] = facts.get("lustre") or {}
    if not lustre.get("lnetctl"):
        why = "there is no lnetctl on this node, so Lustre goes over TCP; fix: an image with the Lustre client and its tools"
        return [Remark(setting.id, FAILED, why)]
    if lustre.get("nets") is None and _lnet_is_loaded(facts):
        return [Remark(setting.id, UNKNOWN, "the networks of LNet could not be read")]
    kept = _persisted(setting, facts)
    return [*_runtime(setting, facts), *([] if kept is None else [kept])]


def _runtime(setting: Setting, facts: Facts) -> list[Step | Remark]:
    there, devices = interfaces(facts, EFA), [str(one["name"]) for one in facts["efa"]["devices"]]
    wanted = min(int(setting.value), len(devices))
    missing = _spread([one for one in devices if one not in there], wanted - len(there))
    preferred = facts["lustre"].get("preferred")
    shown, asked = _shown(there, preferred), f"{wanted} EFA interfaces, preferred to TCP"
    if not missing and (EFA in (preferred or ()) or preferred is None):
        if servers_without_efa(facts):
            return [Remark(setting.id, REBOOT, MOUNTED_BEFORE, shown, asked)]
        return [Remark(setting.id, OK, "in LNet", shown, asked)]
    tcp = interfaces(facts, TCP)
    interface = tcp[0] if tcp else facts["lustre"].get("interface")
    if interface is None:
        return [Remark(setting.id, FAILED, "this node has no default route, and LNet no network to put EFA beside")]
    commands = [*_load(facts, str(interface)), *([] if tcp else [_add(TCP, str(interface))])]
    commands += [_add(EFA, one, "--peer-credits", PEER_CREDITS) for one in missing]
    commands.append(Run(("lnetctl", "set", "discovery", "1")))
    if EFA not in (preferred or ()):
        commands.append(Run(("lnetctl", "udsp", "add", "--src", EFA, "--priority", "0")))
    return [Step(setting.id, RUNTIME, "LNet", shown, asked, tuple(commands))]


def _load(facts: Facts, interface: str) -> list[Run]:
    """EFA's module first: where it does not load, LNet is left as it was, and Lustre mounts over TCP."""
    kefalnd = Run(("modprobe", "kefalnd", f"ipif_name={interface}"))
    rest = (("modprobe", "ksocklnd"), ("lnetctl", "lnet", "configure"))
    return [kefalnd, *([] if interfaces(facts, TCP) else [Run(command) for command in rest])]


def _add(net: str, interface: str, *more: str) -> Run:
    return Run(("lnetctl", "net", "add", "--net", net, "--if", interface, *more), ADD_SECONDS)


def _spread(devices: Sequence[str], count: int) -> list[str]:
    """So many of them, at even distances: a type's devices are in the order of its network cards."""
    number = max(0, min(count, len(devices)))
    return [devices[at * len(devices) // number] for at in range(number)]


def _shown(there: Sequence[str], preferred: Sequence[str] | None) -> str:
    policy = "" if preferred is None else ", preferred" if EFA in preferred else ", not preferred"
    return f"{len(there)} EFA interfaces{policy}" if there else "no EFA network"


def _persisted(setting: Setting, facts: Facts) -> Step | Remark | None:
    """None where the unit is in place and enabled, or AWS's own does its work."""
    if facts["lustre"].get("aws_configured"):
        return None
    missing = no_systemd(facts)
    if missing is not None:
        return Remark(setting.id, *missing)
    if owned.LNET_UNIT not in facts["files"]:
        return Remark(setting.id, UNKNOWN, f"{owned.LNET_UNIT} was not read")
    return owned_unit.in_place(setting, {owned.LNET_UNIT: lnet_unit()}, owned.LNET_UNIT, facts)


def _lnet_is_loaded(facts: Facts) -> bool:
    return "lnet" in ((facts.get("modules") or {}).get("loaded") or ())
