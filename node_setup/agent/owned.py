"""The files that only the agent writes, whole: the content of one is compared with what it should be."""

from __future__ import annotations

import re

HEADER = "# Written by lustrain (node_setup): the whole file is replaced when the node is tuned; change the cluster instead.\n"

SYSCTL = "/etc/sysctl.d/90-lustrain.conf"
MODPROBE = "/etc/modprobe.d/lustrain-lustre.conf"
MODULES_LOAD = "/etc/modules-load.d/lustrain.conf"
UDEV = "/etc/udev/rules.d/90-lustrain-nvme.rules"
LIMITS = "/etc/security/limits.d/90-lustrain.conf"
SLURMD = "/etc/systemd/system/slurmd.service.d/90-lustrain.conf"
NEEDRESTART = "/etc/needrestart/conf.d/90-lustrain.conf"
CHRONY = "/etc/chrony/sources.d/lustrain.sources"
CHRONY_AL = "/etc/chrony.d/lustrain.sources"
GRUB = "/etc/default/grub.d/90-lustrain.cfg"
KERNEL_ARGUMENTS = "/etc/lustrain/kernel-arguments"
"""Where grubby keeps the boot entries, this file records the arguments that it was given: grubby has no file that could be
ours."""

PERSISTENCED = "/etc/systemd/system/nvidia-persistenced.service.d/90-lustrain.conf"
CLOCKS_UNIT = "/etc/systemd/system/lustrain-gpu-clocks.service"
LNET_UNIT = "/etc/systemd/system/lustrain-lnet.service"
BOOT_UNIT = "/etc/systemd/system/lustrain-tune.service"
METRICS_UNIT = "/etc/systemd/system/lustrain-metrics.service"
METRICS_TIMER = "/etc/systemd/system/lustrain-metrics.timer"
TUNING = "/etc/lustrain/tuning.json"
"""This is the node document with this node's group, as the boot unit reads them."""

UNITS = "/etc/systemd/system"
S3_UNIT = re.compile(r"lustrain-s3-[\w.-]+\.service")
"""The unit of a mounted bucket: the boot writes it, and the agent removes one that the cluster no longer has."""

AGENT = "/var/lib/lustrain/agent.pyz"
LOCK = "/run/lustrain/agent.lock"
REPORT = "/var/lib/lustrain/last.json"
"""This is the answer of the last apply."""
PENDING = "/var/lib/lustrain/owed.json"
"""These are programs that an apply has yet to run for its files; it is only there while one runs, or was killed."""

REMOUNT = "/run/lustrain/lustre-mount.json"
"""These are source, mount point and options of a Lustre mount that is being made anew; it stays where the mount failed."""
REMOUNTED = "/run/lustrain/lustre-remounted"
"""This file says that Lustre was mounted anew in this boot."""
NOTES = (REMOUNT, REMOUNTED)
"""These are of this boot only; the facts carry their content as well."""

PATHS = (
    SYSCTL,
    MODPROBE,
    MODULES_LOAD,
    UDEV,
    LIMITS,
    SLURMD,
    NEEDRESTART,
    CHRONY,
    CHRONY_AL,
    GRUB,
    KERNEL_ARGUMENTS,
    PERSISTENCED,
    CLOCKS_UNIT,
    LNET_UNIT,
    BOOT_UNIT,
    METRICS_UNIT,
    METRICS_TIMER,
    TUNING,
    PENDING,
)
"""These are text files whose content the facts carry; mount units, whose names follow their mount points, come on top."""


def mount_unit(path: str, suffix: str = "mount") -> str:
    """Return the unit file of a mount point, its name escaped as `systemd-escape --path` does for the characters we allow."""
    name = path.strip("/").replace("-", "\\x2d").replace("/", "-")
    return f"{UNITS}/{name}.{suffix}"
