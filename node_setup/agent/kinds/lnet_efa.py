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
ON_TCP, ANEW = "mounted over TCP", "mounted anew over EFA (where it is in use: fab node-reboot)"
UMOUNT_SECONDS, MOUNT_SECONDS = 60.0, 150.0
KEPT = ("ro", "noatime", "relatime", "flock", "localflock", "user_xattr", "nosuid", "nodev", "noexec")
"""Mount options that mean the same to mount(8) as in /proc/mounts, where others stand that it does not take."""


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    """`Setting.value` is the number of interfaces."""
    unit = owned_unit.name(owned.LNET_UNIT)
    before, after = Run(("systemctl", "disable", unit)), Run(("systemctl", "daemon-reload"))
    planned = dropped(owned.LNET_UNIT, chosen, facts, request, (before,), (after,))
    for setting in chosen:
        if setting.id in selected:
            planned += _plan_one(setting, facts, request)
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
    """Whether LNet knows no server by an EFA address, as where Lustre was mounted before LNet had EFA; False where nobody
    could look.

    Some peers of an FSx file system have none, its management server among them, so that one with EFA is enough.
    """
    peers = (facts.get("lustre") or {}).get("peers") or ()
    nids = [nid for peer in peers for nid in peer["nids"]]
    return bool(nids) and not any(nid.endswith(f"@{EFA}") for nid in nids)


def _plan_one(setting: Setting, facts: Facts, request: Request) -> list[Step | Remark]:
    lustre: Mapping[str, Any] = facts.get("lustre") or {}
    if not lustre.get("lnetctl"):
        why = "there is no lnetctl on this node, so Lustre goes over TCP; fix: an image with the Lustre client and its tools"
        return [Remark(setting.id, FAILED, why)]
    if lustre.get("nets") is None and _lnet_is_loaded(facts):
        return [Remark(setting.id, UNKNOWN, "the networks of LNet could not be read")]
    kept, network = _persisted(setting, facts), _network(setting, facts, request)
    return [network, *([] if kept is None else [kept])]


def _network(setting: Setting, facts: Facts, request: Request) -> Step | Remark:
    """One step for interfaces and mount: where EFA's module does not load, nothing is unmounted for it."""
    there, devices = interfaces(facts, EFA), [str(one["name"]) for one in facts["efa"]["devices"]]
    wanted = min(int(setting.value), len(devices))
    missing = _spread([one for one in devices if one not in there], wanted - len(there))
    preferred, anew = facts["lustre"].get("preferred"), _mount_anew(facts, request)
    complete = not missing and (preferred is None or EFA in preferred)
    shown = _shown(there, preferred) + (f", {ON_TCP}" if anew else "")
    asked = f"{wanted} EFA interfaces, preferred" + (f", {ANEW}" if anew else "")
    if complete and not anew:
        return Remark(setting.id, OK, "LNet has them", shown, asked)
    tcp = interfaces(facts, TCP)
    interface = tcp[0] if tcp else facts["lustre"].get("interface")
    if interface is None:
        return Remark(setting.id, FAILED, "this node has no default route, and LNet no network to put EFA beside")
    commands = [] if complete else _commands(str(interface), bool(tcp), missing, EFA in (preferred or ()))
    return Step(setting.id, RUNTIME, "LNet", shown, asked, (*commands, *anew))


def _commands(interface: str, has_tcp: bool, missing: Sequence[str], is_preferred: bool) -> list[Run]:
    """EFA's module first: where it does not load, LNet is left as it was, and Lustre mounts over TCP."""
    commands = [Run(("modprobe", "kefalnd", f"ipif_name={interface}"))]
    if not has_tcp:
        commands += [Run(("modprobe", "ksocklnd")), Run(("lnetctl", "lnet", "configure")), _add(TCP, interface)]
    commands += [_add(EFA, one, "--peer-credits", PEER_CREDITS) for one in missing]
    commands.append(Run(("lnetctl", "set", "discovery", "1")))
    return commands if is_preferred else [*commands, Run(("lnetctl", "udsp", "add", "--src", EFA, "--priority", "0"))]


def _mount_anew(facts: Facts, request: Request) -> tuple[Run, ...]:
    """Empty where Lustre is not mounted, or over EFA. What is mounted before LNet has EFA stays on TCP, and HyperPod mounts
    before anything of ours runs. The kernel refuses a plain umount while anything there is in use, and no job runs where
    settings are applied."""
    path = (request.document.get("lustre") or {}).get("path")
    here = [one for one in facts.get("mounts") or () if one["target"] == path and one["fstype"] == "lustre"]
    if not here or (interfaces(facts, EFA) and not servers_without_efa(facts)):
        return ()
    options = ",".join([one for one in here[-1]["options"] if one in KEPT] + ["_netdev"])
    return (
        Run(("umount", str(path)), UMOUNT_SECONDS),
        Run(("mount", "-t", "lustre", "-o", options, str(here[-1]["source"]), str(path)), MOUNT_SECONDS),
    )


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
