"""The mount of Lustre: two systemd units where the agent mounts it (backend `machines`), a check elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lustrain.problem import UserError
from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds.files import owned_unit
from node_setup.agent.model import RUNTIME, Facts, Remark, Request, Run, Setting, Step

FSTAB = "/etc/fstab"
EFA_SERVICE = "configure-efa-fsx-lustre-client.service"
"""This is AWS's own set-up of LNet over EFA, in the place of ours: mounted before either, Lustre would go over TCP
(https://docs.aws.amazon.com/fsx/latest/LustreGuide/configure-efa-clients.html). Only `After=`: where it fails, TCP will do."""
MOUNT_SECONDS = 150.0
"""`systemctl start` may take so long, beyond the 90 s that systemd gives a mount by itself."""
UNSEEN_OPTIONS = frozenset({"_netdev", "nofail", "rw", "defaults"})
"""These options are for systemd and mount(8) only; the kernel does not list them."""

NOT_MOUNTED = "not mounted"
OTHERS = {
    "ec2": "the first boot script mounts it: see /var/log/lustrain-boot.log",
    "hyperpod-slurm": "HyperPod mounts it before the node joins: see the lifecycle log of this instance in CloudWatch",
    "hyperpod-eks": "HyperPod mounts it before the node joins: see the lifecycle log of this instance in CloudWatch",
}


@dataclass(frozen=True)
class MountSpec:
    """This is one file system and its mount point; `source` is None where only the service that mounts knows it."""

    path: str
    source: str | None
    options: str

    @property
    def unit(self) -> str:
        return owned.mount_unit(self.path)

    @property
    def automount(self) -> str:
        return owned.mount_unit(self.path, "automount")


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    """Plan the mount; `Setting.value` are its options."""
    return [line for setting in chosen if setting.id in selected for line in _plan_one(setting, facts, request)]


def made_by_others(request: Request) -> str | None:
    """Return the mount point that is not ours to mount; None where the cluster has none, or the agent mounts it."""
    document = request.document
    return _path(document) if document.get("lustre") and document.get("backend") in OTHERS else None


def lustre_mounts(facts: Facts) -> list[Mapping[str, Any]]:
    return [mount for mount in facts.get("mounts") or () if mount["fstype"] == "lustre"]


def lustre_at(facts: Facts, path: str) -> Mapping[str, Any] | None:
    """Return the mount that a process sees at `path`: the last one on it (an automount lies beneath it)."""
    return next((mount for mount in reversed(lustre_mounts(facts)) if mount["target"] == path), None)


def same_source(current: str, wanted: str) -> bool:
    """Check that two sources name one file system. mount.lustre hands the kernel addresses for names, so `10.0.0.5@tcp:/abc`
    may be what `fs-1.example@tcp:/abc` became: the file system's own name decides, and the server's where both are names."""
    servers, _, name = current.rpartition(":/")
    server, _, wanted_name = wanted.rpartition(":/")
    hosts = [server.partition("@")[0] for server in re.split("[,:]", servers) if server]
    host = server.partition("@")[0]
    return name == wanted_name and (host in hosts or _is_address(hosts) != _is_address([host]))


def mount_unit(spec: MountSpec) -> str:
    return f"""{owned.HEADER}[Unit]
Description=Lustre at {spec.path}
Wants=network-online.target
After=network-online.target {EFA_SERVICE} {owned_unit.name(owned.LNET_UNIT)}

[Mount]
What={spec.source}
Where={spec.path}
Type=lustre
Options={spec.options}
"""


def automount_unit(spec: MountSpec) -> str:
    """Return a unit that mounts at first use: a file server that is slow at boot costs the one who asks for it, not the
    boot."""
    return f"""{owned.HEADER}[Unit]
Description=Lustre at {spec.path}, when it is first used
Before=remote-fs.target

[Automount]
Where={spec.path}

[Install]
WantedBy=remote-fs.target
"""


def _plan_one(setting: Setting, facts: Facts, request: Request) -> list[Step | Remark]:
    document = request.document
    if not document.get("lustre"):
        return [Remark(setting.id, Status.SKIPPED, "the cluster has no Lustre file system")]
    if facts.get("mounts") is None:
        return [Remark(setting.id, Status.UNKNOWN, "the mounts of this node could not be read")]
    spec = MountSpec(_path(document), _source(document, request), setting.value)
    backend = str(document.get("backend", ""))
    if backend != "machines":
        return [
            _verified(setting, spec, facts) or _absent(setting, spec, OTHERS.get(backend, "who mounts it is not known"))
        ]
    if spec.source is None:
        why = "the node document names no file system to mount; fix: take it from a deployed cluster, not from a bundle"
        return [Remark(setting.id, Status.FAILED, why)]
    if facts.get("init") != "systemd":
        why = f"{spec.unit} needs systemd, and this node's init is {facts.get('init') or 'not known'}"
        return [_verified(setting, spec, facts) or _absent(setting, spec, why)]
    return _ours(setting, spec, facts)


def _ours(setting: Setting, spec: MountSpec, facts: Facts) -> list[Step | Remark]:
    line = _fstab_line(facts, spec.path)
    if line is not None:
        foreign = _foreign(setting, spec, line)
        seen = _verified(setting, spec, facts) or _absent(setting, spec, f"{FSTAB} has it; fix: mount {spec.path}")
        return [seen] if foreign is None else [foreign, seen]
    persisted, seen_now = _persisted(setting, spec, facts), _verified(setting, spec, facts)
    if seen_now is not None:
        return [seen_now] if persisted is None else [persisted, seen_now]
    start = Run(("systemctl", "start", owned_unit.name(spec.unit)), MOUNT_SECONDS)
    runtime = Step(setting.id, RUNTIME, spec.path, NOT_MOUNTED, f"{spec.source}, {spec.options}", (start,))
    return [runtime] if persisted is None else [persisted, runtime]


def _persisted(setting: Setting, spec: MountSpec, facts: Facts) -> Step | Remark | None:
    """Plan the units; None where both are as they should be and the automount is enabled."""
    wanted = {spec.unit: mount_unit(spec), spec.automount: automount_unit(spec)}
    if any(path not in facts["files"] for path in wanted):
        return Remark(setting.id, Status.UNKNOWN, f"{spec.unit} was not read")
    return owned_unit.in_place(setting, wanted, spec.automount, facts)


def _verified(setting: Setting, spec: MountSpec, facts: Facts) -> Remark | None:
    """Judge the mount as it is; None where nothing is mounted."""
    mounts = [mount for mount in facts["mounts"] if mount["target"] == spec.path and mount["fstype"] != "autofs"]
    if not mounts:
        return None
    mount = mounts[-1]
    current = f"{mount['source']}, {mount['fstype']}"
    if mount["fstype"] != "lustre":
        return Remark(
            setting.id, Status.CONFLICT, f"{spec.path} holds another file system; fix: unmount it", current, spec.source
        )
    if spec.source is not None and not same_source(mount["source"], spec.source):
        why = f"another file system is mounted at {spec.path}; fix: stop its jobs, then umount {spec.path}"
        return Remark(setting.id, Status.CONFLICT, why, current, spec.source)
    missing = [
        option for option in spec.options.split(",") if option not in UNSEEN_OPTIONS and option not in mount["options"]
    ]
    if missing:
        why = f"mounted without {', '.join(missing)}; it takes effect when {spec.path} is mounted anew"
        return Remark(setting.id, Status.REBOOT, why, ",".join(mount["options"]), spec.options)
    return Remark(
        setting.id, Status.OK, f"{mount['source']} is mounted at {spec.path}", ",".join(mount["options"]), spec.options
    )


def _absent(setting: Setting, spec: MountSpec, why: str) -> Remark:
    return Remark(setting.id, Status.FAILED, f"Lustre is not mounted at {spec.path}: {why}", NOT_MOUNTED, spec.source)


def _foreign(setting: Setting, spec: MountSpec, line: list[str]) -> Remark | None:
    """Report a line of fstab for the mount point that differs; a line that mounts the same stays (None)."""
    needed = {option for option in spec.options.split(",") if option not in ("rw", "defaults")}
    if line[0] == spec.source and line[2] == "lustre" and needed <= set(line[3].split(",")):
        return None
    why = f"{FSTAB} has a line for {spec.path}; fix: remove it, and the mount becomes a unit of ours"
    return Remark(setting.id, Status.CONFLICT, why, " ".join(line), f"{spec.source} {spec.path} lustre {spec.options}")


def _fstab_line(facts: Facts, path: str) -> list[str] | None:
    """Return the fields of fstab's line for a mount point, at least four of them."""
    file = facts["files"].get(FSTAB)
    for line in file["content"].splitlines() if file else ():
        fields = line.split()
        if len(fields) >= 3 and not fields[0].startswith("#") and fields[1].rstrip("/") == path:
            return [*fields, "defaults"][: max(4, len(fields))]
    return None


def _is_address(hosts: Sequence[str]) -> bool:
    return bool(hosts) and all(re.fullmatch(r"\d+(\.\d+){3}", host) for host in hosts)


def _path(document: Mapping[str, Any]) -> str:
    path = str(document["lustre"]["path"])
    if not re.fullmatch(r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)+", path):
        raise UserError(
            f"lustre.path = {path!r}: not a plain absolute path; allowed: letters, digits and ._- between slashes; "
            "fix: storage.lustre.mount_path of the cluster"
        )
    return path


def _source(document: Mapping[str, Any], request: Request) -> str | None:
    mount = document.get("mount")
    if not mount:
        expected = request.expect.get("lustre_source")
        return str(expected) if expected else None
    for key in ("dns_name", "mount_name"):
        if not re.fullmatch(r"[A-Za-z0-9._:-]+", str(mount.get(key, ""))):
            raise UserError(
                f"mount.{key} = {mount.get(key)!r}: not a name that mount takes; allowed: letters, digits and ._:-; "
                "fix: take it from `aws fsx describe-file-systems`"
            )
    return f"{mount['dns_name']}@tcp:/{mount['mount_name']}"
