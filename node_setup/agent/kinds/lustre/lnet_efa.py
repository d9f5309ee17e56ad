"""LNet over EFA: interfaces added to the running network before Lustre is mounted, and a unit for every boot.

The commands are those of https://docs.aws.amazon.com/fsx/latest/LustreGuide/configure-efa-clients.html. AWS's script gives
each interface a CPU partition besides, by options of libcfs that count only where no module of Lustre is loaded yet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds.files import owned_unit
from node_setup.agent.kinds.files.removal import plan_removal
from node_setup.agent.kinds.lustre.mount import NOT_MOUNTED
from node_setup.agent.kinds.unit import no_systemd
from node_setup.agent.model import RUNTIME, Action, Facts, Remark, Remove, Request, Run, Setting, Step, Write

EFA, TCP = "efa", "tcp"
PEER_CREDITS = "32"
"""So many messages may be in flight to one server over one interface, as on AWS's page."""
ADD_SECONDS = 60.0
"""One interface takes so long at most: 9 s in a transcript of a g6e.24xlarge (tests/node_setup/recorded/ORIGINS.md, the
wsi-cloud one)."""
ON_TCP, ANEW = "mounted over TCP", "mounted anew over EFA (where it is in use: fab node-reboot)"
STILL_TCP = "still over TCP after Lustre was mounted anew in this boot; fix: fab node-reboot"
UMOUNT_SECONDS, MOUNT_SECONDS, MOUNT_TRIES = 60.0, 150.0, 3
KEPT = ("ro", "noatime", "relatime", "flock", "localflock", "user_xattr", "nosuid", "nodev", "noexec")
"""These mount options mean the same to mount(8) as in /proc/mounts, which also lists options that mount(8) does not take."""


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    """Plan LNet over EFA; `Setting.value` is the number of interfaces."""
    unit = owned_unit.name(owned.LNET_UNIT)
    before, after = Run(("systemctl", "disable", unit)), Run(("systemctl", "daemon-reload"))
    planned = plan_removal(owned.LNET_UNIT, chosen, facts, request, (before,), (after,))
    for setting in chosen:
        if setting.id in selected:
            planned += [*_plan_one(setting, facts, request), *_lost_mount(setting, facts, request)]
    return planned


def lnet_unit() -> str:
    """Return a unit that runs before every mount of a network file system, and before kubelet, whose pods mount: Lustre keeps
    the way by which it first reached a server (https://github.com/awslabs/awsome-distributed-ai/pull/1208).

    Its time is that of 16 interfaces and of the wait for another agent's lock. It is tried again as AWS does with its own unit
    (https://github.com/awslabs/awsome-distributed-ai/pull/1204); systemd takes Restart= of a oneshot from version 244 on, which
    Ubuntu 20.04 and Amazon Linux 2023 have. The interval holds three tries of full length.
    """
    return f"""{owned.HEADER}[Unit]
Description=LNet over EFA, before Lustre is mounted
Wants=network-online.target remote-fs-pre.target
After=network-online.target
Before=remote-fs-pre.target kubelet.service lustrain-boot.service lustrain-tune.service
StartLimitIntervalSec=2h
StartLimitBurst=3

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/python3 -I -S {owned.AGENT} lnet
TimeoutStartSec=1200
Restart=on-failure
RestartSec=20

[Install]
WantedBy=multi-user.target
"""


def interfaces(facts: Facts, net: str) -> list[str]:
    """Return LNet's interfaces on a network."""
    nets = (facts.get("lustre") or {}).get("nets") or ()
    return [str(nid["interface"]) for entry in nets if entry["net"] == net for nid in entry["nids"]]


def servers_without_efa(facts: Facts) -> bool:
    """Check that LNet knows no server by an EFA address, as where Lustre was mounted before LNet had EFA; False where no server
    is known.

    Some peers of an FSx file system have none, its management server among them, so that one with EFA is enough.
    """
    peers = (facts.get("lustre") or {}).get("peers") or ()
    nids = [nid for peer in peers for nid in peer["nids"]]
    return bool(nids) and not any(nid.endswith(f"@{EFA}") for nid in nids)


def _plan_one(setting: Setting, facts: Facts, request: Request) -> list[Step | Remark]:
    lustre: Mapping[str, Any] = facts.get("lustre") or {}
    if not lustre.get("lnetctl"):
        why = "there is no lnetctl on this node, so Lustre goes over TCP; fix: an image with the Lustre client and its tools"
        return [Remark(setting.id, Status.FAILED, why)]
    if lustre.get("nets") is None and _lnet_is_loaded(facts):
        return [Remark(setting.id, Status.UNKNOWN, "the networks of LNet could not be read")]
    kept, network = _persisted(setting, facts), _network(setting, facts, request)
    return [network, *([] if kept is None else [kept])]


def _network(setting: Setting, facts: Facts, request: Request) -> Step | Remark:
    """Plan one step for interfaces and mount: where EFA's module does not load, nothing is unmounted for it."""
    present, devices = interfaces(facts, EFA), [str(device["name"]) for device in facts["efa"]["devices"]]
    wanted = min(int(setting.value), len(devices))
    missing = _spread([device for device in devices if device not in present], wanted - len(present))
    preferred, over_tcp = facts["lustre"].get("preferred"), _over_tcp(facts, request)
    is_over = _noted(facts, owned.REMOUNTED) is not None
    anew = () if over_tcp is None or is_over else _mount_anew(over_tcp)
    complete = not missing and (preferred is None or EFA in preferred)
    shown = _shown(present, preferred) + (f", {ON_TCP}" if over_tcp else "")
    goal = f"{wanted} EFA interfaces, preferred" + (f", {ANEW}" if anew else "")
    if complete and over_tcp and not anew:
        return Remark(setting.id, Status.REBOOT, STILL_TCP, shown, goal)
    if complete and not anew:
        return Remark(setting.id, Status.OK, "LNet has them", shown, goal)
    tcp = interfaces(facts, TCP)
    interface = tcp[0] if tcp else facts["lustre"].get("interface")
    if interface is None:
        return Remark(
            setting.id, Status.FAILED, "this node has no default route, and LNet no network to put EFA beside"
        )
    commands = [] if complete else _commands(str(interface), bool(tcp), missing, EFA in (preferred or ()))
    return Step(setting.id, RUNTIME, "LNet", shown, goal, (*commands, *anew))


def _commands(interface: str, has_tcp: bool, missing: Sequence[str], is_preferred: bool) -> list[Run]:
    """Return the commands with EFA's module first: where it does not load, LNet is left as it was, and Lustre mounts over
    TCP."""
    commands = [Run(("modprobe", "kefalnd", f"ipif_name={interface}"))]
    if not has_tcp:
        commands += [Run(("modprobe", "ksocklnd")), Run(("lnetctl", "lnet", "configure")), _add(TCP, interface)]
    commands += [_add(EFA, device, "--peer-credits", PEER_CREDITS) for device in missing]
    commands.append(Run(("lnetctl", "set", "discovery", "1")))
    return commands if is_preferred else [*commands, Run(("lnetctl", "udsp", "add", "--src", EFA, "--priority", "0"))]


def _over_tcp(facts: Facts, request: Request) -> dict[str, str] | None:
    """Return what is mounted over TCP where it could be over EFA: source, mount point, and options as mount(8) takes them. What
    is mounted before LNet has EFA stays on TCP, and HyperPod mounts before anything of ours runs."""
    path = (request.document.get("lustre") or {}).get("path")
    here = [mount for mount in facts.get("mounts") or () if mount["target"] == path and mount["fstype"] == "lustre"]
    if not here or (interfaces(facts, EFA) and not servers_without_efa(facts)):
        return None
    options = ",".join([option for option in here[-1]["options"] if option in KEPT] + ["_netdev"])
    return {"source": str(here[-1]["source"]), "target": str(path), "options": options}


def _mount_anew(mount: Mapping[str, str]) -> tuple[Action, ...]:
    """Unmount and mount again. The kernel refuses umount while anything is in use, and no job runs when settings apply. A mount
    that fails leaves its note for the next run: nothing else knows by then what was mounted.

    Once per boot: LNet keeps what it knows of its servers over an umount, so that a second time may change nothing either.
    """
    note = Write(owned.REMOUNT, json.dumps(mount) + "\n")
    return (note, Run(("umount", mount["target"]), UMOUNT_SECONDS), *_mounting(mount))


def _mounting(mount: Mapping[str, str]) -> tuple[Action, ...]:
    command = ("mount", "-t", "lustre", "-o", mount["options"], mount["source"], mount["target"])
    return (
        Run(command, MOUNT_SECONDS, tries=MOUNT_TRIES),
        Write(owned.REMOUNTED, "once per boot\n"),
        Remove(owned.REMOUNT),
    )


def _lost_mount(setting: Setting, facts: Facts, request: Request) -> list[Step | Remark]:
    """Mount again what we unmounted and could not mount, also another program's mount: until it is back, jobs would write to
    the root disk. A step of its own, which is done also where LNet's fails."""
    path, note = (request.document.get("lustre") or {}).get("path"), _noted(facts, owned.REMOUNT)
    mounts = facts.get("mounts")
    if note is None or mounts is None or any(mount["target"] == path for mount in mounts):
        return []
    try:
        mount: dict[str, str] = json.loads(note)
    except ValueError:
        return [Remark(setting.id, Status.FAILED, f"{owned.REMOUNT} cannot be read; fix: fab node-reboot", NOT_MOUNTED)]
    if mount["target"] != path:
        return []
    return [Step(setting.id, RUNTIME, mount["target"], NOT_MOUNTED, mount["source"], _mounting(mount))]


def _noted(facts: Facts, path: str) -> str | None:
    file = facts["files"].get(path)
    return file["content"] if file else None


def _add(net: str, interface: str, *more: str) -> Run:
    return Run(("lnetctl", "net", "add", "--net", net, "--if", interface, *more), ADD_SECONDS)


def _spread(devices: Sequence[str], count: int) -> list[str]:
    """Select so many devices at even distances: a type's devices are in the order of its network cards."""
    number = max(0, min(count, len(devices)))
    return [devices[at * len(devices) // number] for at in range(number)]


def _shown(present: Sequence[str], preferred: Sequence[str] | None) -> str:
    policy = "" if preferred is None else ", preferred" if EFA in preferred else ", not preferred"
    return f"{len(present)} EFA interfaces{policy}" if present else "no EFA network"


def _persisted(setting: Setting, facts: Facts) -> Step | Remark | None:
    """Plan the unit; None where it is in place and enabled, or AWS's own unit does its work."""
    if facts["lustre"].get("aws_configured"):
        return None
    missing = no_systemd(facts)
    if missing is not None:
        return Remark(setting.id, *missing)
    if owned.LNET_UNIT not in facts["files"]:
        return Remark(setting.id, Status.UNKNOWN, f"{owned.LNET_UNIT} was not read")
    return owned_unit.in_place(setting, {owned.LNET_UNIT: lnet_unit()}, owned.LNET_UNIT, facts)


def _lnet_is_loaded(facts: Facts) -> bool:
    return "lnet" in ((facts.get("modules") or {}).get("loaded") or ())
