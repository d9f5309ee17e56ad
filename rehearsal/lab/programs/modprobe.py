"""Not modprobe: loads nothing, but gives a module known here a folder in /sys/module with its parameters.

Parameters take the options of modprobe.d when the module is loaded, and not later; the kernel's own table of modules
(/proc/modules) is simulated where the machine's kernel has one.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from .state import hardware, refuse

# Defaults as the modules of Lustre 2.15 declare them (lnet/klnds/socklnd/socklnd_modparams.c, ptlrpc/ptlrpcd.c,
# libcfs/libcfs_cpu.c); what each needs is what depmod finds, shortened.
_PARAMETERS = {
    "libcfs": {"cpu_npartitions": "0", "cpu_pattern": "N"},
    "lnet": {"networks": "", "lnet_peer_discovery_disabled": "0"},
    "ksocklnd": {"credits": "256", "peer_credits": "8", "nscheds": "0", "conns_per_peer": "0"},
    "ptlrpc": {"ptlrpcd_per_cpt_max": "8", "max_ptlrpcds": "0"},
    "lustre": {},
    "kefalnd": {"ipif_name": ""},
    "nvidia_uvm": {},
    "gdrdrv": {},
    "efa": {},
    "tcp_bbr": {},
}
_NEEDS = {
    "lustre": ["ptlrpc", "ksocklnd"],
    "ptlrpc": ["lnet"],
    "ksocklnd": ["lnet"],
    "kefalnd": ["lnet"],
    "lnet": ["libcfs"],
}
_LUSTRE = ("libcfs", "lnet", "ksocklnd", "kefalnd", "ptlrpc", "lustre")


def main(arguments: Sequence[str]) -> int:
    names = [argument for argument in arguments if not argument.startswith("-")]
    if "-r" in arguments or "--remove" in arguments:
        for name in names:
            _folder(name).rename(f"/run/simulated/removed.{_name(name)}")
        return 0
    # Of `modprobe MODULE option=value` only the first word is a module, unless -a says that all are.
    for name in names if "-a" in arguments else names[:1]:
        insert(name)
    return 0


def insert(name: str) -> None:
    name = _name(name)
    if name not in _PARAMETERS or (name in _LUSTRE and not hardware()["lustre"]):
        refuse(f"modprobe: FATAL: Module {name} not found in directory /lib/modules")
    for needed in _NEEDS.get(name, []):
        insert(needed)
    if _folder(name).exists():
        return
    values = {**_PARAMETERS[name], **options().get(name, {})}
    (_folder(name) / "parameters").mkdir(parents=True)
    for parameter, value in values.items():
        if parameter not in _PARAMETERS[name]:
            print(f"{name}: unknown parameter '{parameter}' ignored")
            continue
        (_folder(name) / "parameters" / parameter).write_text(f"{value}\n")
    table = Path("/proc/modules")
    if table.exists():
        with table.open("a") as file:
            file.write(f"{name} 16384 0 - Live 0x0000000000000000\n")


def options() -> dict[str, dict[str, str]]:
    """Return the settings of modprobe.d; the last one counts."""
    by_module: dict[str, dict[str, str]] = {}
    for file in sorted(Path("/etc/modprobe.d").glob("*.conf")):
        for line in file.read_text().splitlines():
            words = shlex.split(line, comments=True)
            if len(words) > 2 and words[0] == "options":
                pairs = (word.partition("=")[::2] for word in words[2:])
                by_module.setdefault(_name(words[1]), {}).update(pairs)
    return by_module


def _name(module: str) -> str:
    return module.replace("-", "_")


def _folder(name: str) -> Path:
    return Path("/sys/module", _name(name))
