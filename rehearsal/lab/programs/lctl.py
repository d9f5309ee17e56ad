"""Not Lustre's lctl: keeps parameters of a simulated client, several instances of each, from mount to unmount or reboot.

Names, defaults and bounds as in Lustre 2.15 (lustre/osc/lproc_osc.c, mdc/lproc_mdc.c, llite/lproc_llite.c, ldlm/
ldlm_resource.c). Left out: every parameter that is not listed here, `set_param -P` and all of lctl but parameters.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .state import change, peek, refuse

OSTS, MDTS = 4, 2
CLIENT = "ffff8c4d0cd43800"
VERSION = "2.15.6"
SERVER_PAGES = 1024
"""Pages per RPC that the servers grant: a client takes no more, without an error."""

_Bound = tuple[str, int, int]
_DEFAULTS: dict[str, dict[str, _Bound]] = {
    "osc": {
        "max_rpcs_in_flight": ("8", 1, 256),
        "max_dirty_mb": ("64", 1, 2047),
        "max_pages_per_rpc": ("256", 1, 4096),
        "checksums": ("1", 0, 1),
    },
    "mdc": {"max_rpcs_in_flight": ("8", 1, 256), "max_mod_rpcs_in_flight": ("7", 1, 256)},
    "llite": {
        "statahead_max": ("32", 0, 8192),
        "statahead_agl": ("1", 0, 1),
        "statahead_xattr": ("1", 0, 1),
        "max_read_ahead_mb": ("1024", 0, 2**20),
        "max_read_ahead_per_file_mb": ("512", 0, 2**20),
    },
    "ldlm.namespaces": {"lru_max_age": ("3900000", 0, 2**31), "lru_size": ("0", 0, 2**31)},
}


def main(arguments: Sequence[str]) -> int:
    words = [item for item in arguments if not item.startswith("-")]
    options = [argument for argument in arguments if argument.startswith("-")]
    if "--version" in options:
        print(f"lctl {VERSION}")
        return 0
    if not words or words[0] not in ("get_param", "set_param", "list_param"):
        refuse(f"lctl: this stand-in knows get_param, set_param and list_param, not {' '.join(words[:1])!r}")
    file_system = mounted()
    if words[0] == "set_param":
        return _set(words[1:], file_system)
    return _get(words[1:], file_system, bare="-n" in options, names=words[0] == "list_param")


def mounted() -> str | None:
    """Name of the file system that is mounted, as its servers call it."""
    sources = [entry["source"] for entry in peek("mounts").values() if entry["type"] == "lustre"]
    return str(sources[0]).rpartition("/")[2] if sources else None


def _names(file_system: str) -> Iterator[tuple[str, _Bound]]:
    osts = [f"{file_system}-OST{number:04x}-osc-{CLIENT}" for number in range(OSTS)]
    mdts = [f"{file_system}-MDT{number:04x}-mdc-{CLIENT}" for number in range(MDTS)]
    instances = {"osc": osts, "mdc": mdts, "llite": [f"{file_system}-{CLIENT}"], "ldlm.namespaces": osts + mdts}
    for device, parameters in _DEFAULTS.items():
        for parameter, bound in parameters.items():
            for instance in instances[device]:
                yield f"{device}.{instance}.{parameter}", bound


def _matching_pairs(pattern: str, verb: str, file_system: str | None) -> list[tuple[str, _Bound]]:
    names = list(_names(file_system)) if file_system else []
    pairs = [pair for pair in names if fnmatch.fnmatchcase(pair[0], pattern.replace("/", "."))]
    if not pairs:
        path = pattern.replace(".", "/")
        print(f"error: {verb}: param_path '{path}': No such file or directory", file=sys.stderr)
    return pairs


def _get(patterns: list[str], file_system: str | None, bare: bool, names: bool) -> int:
    values, status = peek("lustre"), 0
    for pattern in patterns:
        pairs = _matching_pairs(pattern, "list_param" if names else "get_param", file_system)
        status = status or (0 if pairs else 2)
        for name, (default, _, _) in pairs:
            value = values.get(name, default)
            print(name if names else value if bare else f"{name}={value}")
    return status


def _set(assignments: list[str], file_system: str | None) -> int:
    status = 0
    with change("lustre") as values:
        for assignment in assignments:
            pattern, _, value = assignment.partition("=")
            pairs = _matching_pairs(pattern, "set_param", file_system)
            status = status or (0 if pairs else 2)
            for name, bound in pairs:
                why = _why_not(name, value, bound, lambda other: values.get(other))
                if why:
                    print(f"error: set_param: setting {name.replace('.', '/')}={value}: {why}", file=sys.stderr)
                    status = 34 if why.startswith("Numerical") else 22
                    continue
                values[name] = str(min(int(value), SERVER_PAGES)) if name.endswith("max_pages_per_rpc") else value
                print(f"{name}={value}")
    return status


def _why_not(name: str, value: str, bound: _Bound, get: Callable[[str], Any]) -> str | None:
    if not value.lstrip("-").isdigit():
        return "Invalid argument"
    if not bound[1] <= int(value) <= bound[2]:
        return "Numerical result out of range"
    if name.endswith("max_mod_rpcs_in_flight"):
        # mdc keeps room for one request that changes nothing.
        most = int(get(name.replace("max_mod_rpcs", "max_rpcs")) or _DEFAULTS["mdc"]["max_rpcs_in_flight"][0])
        return "Numerical result out of range" if int(value) >= most else None
    return None
