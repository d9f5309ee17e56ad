"""The disk image of a lab's nodes, as layers that all of them share under their own writes."""

from __future__ import annotations

import os
from pathlib import Path

# Whose content would make what a node finds depend on the machine that runs the lab.
_EMPTY = (
    "etc/apt/preferences.d",
    "etc/chrony",
    "etc/lustrain",
    "etc/modprobe.d",
    "etc/modules-load.d",
    "etc/needrestart",
    "etc/profile.d",
    "etc/security/limits.d",
    "etc/slurm",
    "etc/sudoers.d",
    "etc/sysctl.d",
    "etc/systemd/system",
    "etc/udev/rules.d",
    "etc/update-motd.d",
    "home",
    "root",
    "etc/default/grub.d",
    "usr/lib/modprobe.d",
    "usr/lib/sysctl.d",
    "usr/lib/systemd/system",
    "usr/lib/udev/rules.d",
    "var/cache/apt",
    "var/lib/apt/lists",
    "var/lib/lustrain",
    "var/lib/simulated",
    "var/log",
)
_FILES = {
    "etc/chrony/chrony.conf": "confdir /etc/chrony/conf.d\nsourcedir /etc/chrony/sources.d\n",
    "etc/environment": "",
    "etc/fstab": "LABEL=cloudimg-rootfs / ext4 discard,commit=30 0 1\n",
    "etc/security/limits.conf": "# End of file\n",
    "etc/sysctl.conf": "",
}


def lay_out_image(folder: Path, public_key: str, hosts: str) -> None:
    """Write the layer that lies on top of the machine's own root: cleared folders, and who may log in."""
    for name in _EMPTY:
        (folder / name).mkdir(parents=True)
        os.setxattr(folder / name, "trusted.overlay.opaque", b"y")
    files = {**_FILES, "etc/hosts": hosts, "root/.ssh/authorized_keys": public_key, **_pam()}
    for name, text in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    (folder / "root").chmod(0o700)
    (folder / "root/.ssh").chmod(0o700)
    (folder / "root/.ssh/authorized_keys").chmod(0o600)


def _pam() -> dict[str, str]:
    """Return PAM's files with optional limits: where CI may not raise limits, limits.d would end every session."""
    files = {}
    for file in Path("/etc/pam.d").iterdir():
        lines = file.read_text().splitlines()
        changed = ["session optional pam_limits.so" if _demands_limits(line) else line for line in lines]
        if changed != lines:
            files[f"etc/pam.d/{file.name}"] = "\n".join(changed) + "\n"
    return files


def _demands_limits(line: str) -> bool:
    return line.split()[:3] == ["session", "required", "pam_limits.so"]
