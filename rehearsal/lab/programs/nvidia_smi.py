"""Not NVIDIA's nvidia-smi: answers queries from a table, keeps application clocks and persistence until the node reboots.

Field names and forms as of driver 570. Left out: every field not listed here (refused as the real one refuses it), all but
queries, -pm, -ac, -rac and nvlink. GPUs compute nothing, are never busy, hot or broken unless the state file says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .state import change, hardware, peek, refuse

_MAX = {"graphics": "1980", "memory": "2619"}
_DEFAULT = {"graphics": "1830", "memory": "2619"}
_IDLE = {"graphics": "345", "memory": "2619"}
_LINKS = 18


def main(arguments: Sequence[str]) -> int:
    options = {one.partition("=")[0]: one.partition("=")[2] for one in arguments if one.startswith("-")}
    if "--query-gpu" in options:
        return _query(options["--query-gpu"].split(","), options.get("--format", "csv"), _chosen(arguments))
    if "--query-compute-apps" in options:
        for pid in peek("gpu").get("processes", []):
            print(pid)
        return 0
    if arguments[:1] == ["nvlink"]:
        return _nvlink("-e" in arguments)
    flag = next((one for one in ("-pm", "-ac", "-rac") if one in arguments), None)
    if flag is None:
        refuse(f"nvidia-smi: this stand-in does not know {' '.join(arguments)!r}")
    value = arguments[list(arguments).index(flag) + 1] if flag != "-rac" else ""
    return _set(flag, value, _chosen(arguments))


def _chosen(arguments: Sequence[str]) -> list[int]:
    every = list(range(hardware()["gpus"]))
    for place, one in enumerate(arguments):
        if one in ("-i", "--id") or one.startswith(("--id=", "-i=")):
            text = one.partition("=")[2] or arguments[place + 1]
            return [index for index in every if str(index) in text.split(",")]
    return every


def _gpu(index: int) -> dict[str, Any]:
    """Return a GPU by the names of its fields; what a test broke or a command set replaces what is here."""
    persistent = peek("systemd").get("units", {}).get("nvidia-persistenced.service", {}).get("active") == "active"
    gpu = {
        "index": str(index),
        "name": hardware()["gpu_name"],
        "uuid": f"GPU-00000000-0000-0000-0000-{index:012d}",
        "pci.bus_id": f"00000000:{0x50 + index:02X}:00.0",
        "driver_version": "570.172.08",
        "memory.total": "81559",
        "persistence_mode": "Enabled" if persistent else "Disabled",
        "ecc.errors.uncorrected.volatile.total": "0",
        "remapped_rows.pending": "No",
        "remapped_rows.failure": "No",
        "clocks_throttle_reasons.active": "0x0000000000000001",
        "fabric.state": "Completed",
        "fabric.status": "Success",
    }
    for kind, clocks in (("current", _IDLE), ("max", _MAX), ("applications", _DEFAULT)):
        gpu |= {f"clocks.{kind}.{name}": value for name, value in clocks.items()}
    return {**gpu, **peek("gpu").get(str(index), {})}


def _query(fields: list[str], form: str, chosen: list[int]) -> int:
    gpus = [_gpu(index) for index in chosen]
    for field in fields:
        if gpus and field not in gpus[0]:
            print(f'Field "{field}" is not a valid field to query.\n')
            return 2
    if "noheader" not in form:
        print(", ".join(fields))
    for gpu in gpus:
        print(", ".join(gpu[field] for field in fields))
    return 0


def _nvlink(errors: bool) -> int:
    for index in range(hardware()["gpus"]):
        gpu = _gpu(index)
        print(f"GPU {index}: {gpu['name']} (UUID: {gpu['uuid']})")
        for link in range(_LINKS):
            if errors:
                print("".join(f"\t Link {link}: {kind} Errors: 0\n" for kind in ("Replay", "Recovery", "CRC")))
            else:
                print(f"\t Link {link}: 26.562 GB/s")
    return 0


def _set(flag: str, value: str, chosen: list[int]) -> int:
    with change("gpu") as state:
        for index in chosen:
            gpu = state.setdefault(str(index), {})
            if flag == "-pm":
                gpu["persistence_mode"] = "Enabled" if value in ("1", "ENABLED") else "Disabled"
                continue
            memory, _, graphics = (
                value.partition(",") if flag == "-ac" else (_DEFAULT["memory"], "", _DEFAULT["graphics"])
            )
            if memory != _MAX["memory"] or not graphics.isdigit() or int(graphics) > int(_MAX["graphics"]):
                refuse(
                    f'Specified clock combination "(MEM {memory}, SM {graphics})" is not supported for GPU {index}.', 1
                )
            gpu |= {"clocks.applications.memory": memory, "clocks.applications.graphics": graphics}
            print(f'Applications clocks set to "(MEM {memory}, SM {graphics})" for GPU {index}')
    print("All done.")
    return 0
