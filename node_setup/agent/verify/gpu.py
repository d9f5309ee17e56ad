"""Checks of accelerators: their number, failures and speed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lustrain.status import Status
from node_setup.agent.model import Facts, Request
from node_setup.agent.settings import data
from node_setup.agent.verify.expected import ExpectedHardware
from node_setup.agent.verify.result import (
    ACTIONS,
    NONE,
    REBOOT,
    REPLACE,
    RESET_GPU,
    Result,
    fact_at,
    judge_count,
    unread_result,
)

ALIKE = 0.95
"""Memory of at least this share of the largest counts as the same: drivers set aside a little more on some cards."""


def count(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Count the GPUs, or on Gaudi the cards that hl-smi lists, and compare with the type's count."""
    gaudi = bool(fact_at(facts, "hpu", "present"))
    kind = "hpu" if gaudi else "gpu"
    devices = fact_at(facts, kind, "devices")
    if want.neuron:
        return Result(
            "gpu-count",
            Status.UNKNOWN,
            f"nothing here looks at its {want.neuron} Neuron devices",
            expected=str(want.neuron),
        )
    if want.gpus is None:
        return Result("gpu-count", Status.UNKNOWN, "the number of accelerators of this type is not known")
    if want.gpus == 0 and not devices:
        return Result("gpu-count", Status.SKIPPED, "the type has none")
    if devices is None:
        return unread_result("gpu-count", facts, kind, "hl-smi" if gaudi else "nvidia-smi")
    return judge_count("gpu-count", len(devices), want.gpus, "accelerators", REPLACE)


def memory(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check that accelerators of one model have the same memory: one with less has lost a part of it."""
    devices = fact_at(facts, "hpu", "devices") or _devices(facts)
    if not devices:
        return _without(facts, want, "gpu-memory")
    sizes = [(_name(device), str(device.get("name")), int(device.get("memory_mib") or 0)) for device in devices]
    if not all(size for _, _, size in sizes):
        return unread_result("gpu-memory", facts, "hpu" if fact_at(facts, "hpu", "present") else "gpu", "memory")
    most = {model: max(size for _, other, size in sizes if other == model) for _, model, _ in sizes}
    less = [f"{name}: {size} of {most[model]} MiB" for name, model, size in sizes if size < ALIKE * most[model]]
    if less:
        return Result("gpu-memory", Status.FAILED, f"less than others of its model: {', '.join(less)}", REPLACE)
    return Result(
        "gpu-memory", Status.OK, "alike", actual=", ".join(f"{size} MiB" for size in sorted(set(most.values())))
    )


def ecc(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check that there was no uncorrectable memory error since the driver was loaded."""
    devices = _devices(facts)
    if not devices:
        return _without(facts, want, "gpu-ecc")
    errors = {_name(device): device.get("ecc_volatile_uncorrected") for device in devices}
    bad = [f"GPU {name}: {number}" for name, number in errors.items() if number]
    if bad:
        return Result(
            "gpu-ecc", Status.FAILED, "uncorrectable memory errors: " + ", ".join(bad), RESET_GPU, actual="; ".join(bad)
        )
    if None in errors.values():
        return _uncounted("gpu-ecc", errors, want, "ECC errors")
    return Result("gpu-ecc", Status.OK, "no uncorrectable error")


def row_remap(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check remapped rows: one that could not be remapped is NVIDIA's criterion for exchange; a pending one waits for a reset.
    https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/"""
    devices = _devices(facts)
    if not devices:
        return _without(facts, want, "gpu-row-remap")
    failed = [_name(device) for device in devices if device.get("remap_failed")]
    pending = [_name(device) for device in devices if device.get("remap_pending")]
    if failed:
        return Result("gpu-row-remap", Status.FAILED, f"rows of GPU {', '.join(failed)} could not be remapped", REPLACE)
    if pending:
        return Result(
            "gpu-row-remap", Status.FAILED, f"a remapping of GPU {', '.join(pending)} waits for a reset", RESET_GPU
        )
    states = {_name(device): device.get("remap_failed") for device in devices}
    if None in states.values():
        return _uncounted("gpu-row-remap", states, want, "row remapping")
    return Result("gpu-row-remap", Status.OK, "none pending, none failed")


NVLINK_5 = range(144, 151)
"""These are Xids of NVLink 5 events, whose text says how bad each is: https://docs.nvidia.com/deploy/xid-errors/"""


def xid(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check what the driver logged since the boot, by the table of `settings/xid.toml`; Xid 154 names its own action.

    Where a reset would do, the action is a reboot: the log of this boot holds the error after a reset, too, and the node would
    be reset forever.
    """
    if not _devices(facts) and (fact_at(facts, "hpu", "present") or not want.gpus):
        return _without(facts, want, "gpu-xid")
    events = fact_at(facts, "gpu", "xids")
    if events is None:
        return unread_result("gpu-xid", facts, "gpu.xids", "the kernel's log")
    acting: list[tuple[str, str]] = []
    for event in events:
        number, switch = int(event["xid"]), bool(event.get("switch"))
        meaning = "an error of a switch" if switch else _meaning(number)
        where = f"{'SXid' if switch else 'Xid'} {number} on {event.get('pci') or 'an unnamed GPU'}"
        acting.append((event_action(event, want.gpu), f"{where}: {meaning}"))
    if not acting:
        return Result("gpu-xid", Status.OK, "none since the boot")
    action, first = max(acting, key=lambda event: ACTIONS.index(event[0]))
    why = f"{first}{f' (and {len(acting) - 1} more)' if len(acting) > 1 else ''}"
    return Result(
        "gpu-xid",
        Status.WARNING if action == NONE else Status.FAILED,
        why,
        action,
        actual=str(len(acting)),
        expected="0",
    )


def event_action(event: Mapping[str, Any], gpu: str) -> str:
    """Return what an error of a GPU or a switch calls for; `gpu` is the GPUs' name. A reset is a reboot, as `xid` says."""
    number, switch, text = int(event["xid"]), bool(event.get("switch")), str(event.get("text", ""))
    action = REBOOT if _fatal(number, text, switch) else NONE if switch else xid_action(number, text, gpu)
    return REBOOT if action == RESET_GPU else action


def xid_action(number: int, text: str, gpu: str = "") -> str:
    """Return what an Xid calls for; a code that the table does not hold is a person's to judge.

    Xid 154 reports a change, `… from 0x0 (None) to 0x2 (Node Reboot Required)`: what it changed to is what counts.
    """
    table = data.tables().get("xid", {})
    now = text.lower().rsplit(" to ", 1)[-1]
    for phrase in table.get("phrase", ()):
        if number == phrase["xid"] and phrase["text"].lower() in now:
            return str(phrase["action"])
    for row in table.get("xid", ()):
        if number in row["codes"]:
            special = row.get("gpu", {})
            return str(next((action for name, action in special.items() if name in gpu), row["action"]))
    return NONE


def _fatal(number: int, text: str, switch: bool) -> bool:
    """Check whether a switch or an NVLink 5 event calls itself fatal, and not `Non-fatal` or `Nonfatal`: the fabric is broken
    then. https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/ (SXid errors)"""
    return (switch or number in NVLINK_5) and re.search(r"(?<![-A-Za-z])Fatal\b", text) is not None


def _meaning(number: int) -> str:
    rows = data.tables().get("xid", {}).get("xid", ())
    return str(
        next((row["meaning"] for row in rows if number in row["codes"]), "not in our table; see NVIDIA's catalogue")
    )


BROKEN_COOLING = ("hw_thermal_slowdown", "hw_power_brake_slowdown")
SLOWED = ("hw_slowdown", "sw_thermal_slowdown")


def throttle(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Warn of clocks that heat or power hold down while nothing runs; an idle GPU's low clocks and a set power limit are
    normal."""
    devices = _devices(facts)
    if not devices:
        return _without(facts, want, "gpu-throttle")
    if any(device.get("throttle") is None for device in devices):
        return unread_result("gpu-throttle", facts, "gpu", "reasons for low clocks")
    for names, status, action in ((BROKEN_COOLING, Status.FAILED, REPLACE), (SLOWED, Status.WARNING, NONE)):
        slow = [
            f"GPU {_name(device)}: {reason}"
            for device in devices
            for reason in map(_plain, device["throttle"])
            if reason in names
        ]
        if slow and status == Status.FAILED:
            return _hot(facts, ", ".join(slow), action)
        if slow:
            return Result("gpu-throttle", status, ", ".join(slow), action)
    return Result("gpu-throttle", Status.OK, "not held down")


def _hot(facts: Facts, slow: str, action: str) -> Result:
    """Judge a hot GPU: an idle one that is too hot has broken cooling; one at work may have a hot day."""
    jobs = fact_at(facts, "jobs")
    if jobs is None:
        return Result("gpu-throttle", Status.UNKNOWN, f"{slow}; it is not known whether a job runs")
    if jobs:
        return Result("gpu-throttle", Status.WARNING, f"{slow}, under a job; look again when it has ended")
    return Result("gpu-throttle", Status.FAILED, slow, action)


def persistence(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check persistence mode: without it the driver forgets its state, clocks included, whenever no process holds a GPU."""
    devices = _devices(facts)
    if not devices:
        return _without(facts, want, "gpu-persistence")
    modes = [device.get("persistence") for device in devices]
    if None in modes:
        return unread_result("gpu-persistence", facts, "gpu", "persistence mode")
    if not all(_on(mode) for mode in modes):
        return Result("gpu-persistence", Status.WARNING, "off; fix: fab node-tune --only gpu.persistence")
    return Result("gpu-persistence", Status.OK, "on")


def clocks(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check that application clocks are at the highest pair that the GPU names; GPUs that know none are left alone."""
    devices = _devices(facts)
    if not devices:
        return _without(facts, want, "gpu-clocks")
    slow = []
    for device in devices:
        now, top = device.get("applications") or {}, device.get("max") or {}
        below = [name for name in ("graphics", "memory") if now.get(name) and top.get(name) and now[name] < top[name]]
        slow += [f"GPU {_name(device)}: {name} {now[name]} of {top[name]} MHz" for name in below]
    if not any((device.get("applications") or {}).get("graphics") for device in devices):
        return Result("gpu-clocks", Status.SKIPPED, "these GPUs name no application clocks")
    if slow:
        return Result("gpu-clocks", Status.WARNING, "; ".join(slow[:2]) + (" …" if len(slow) > 2 else ""))
    return Result("gpu-clocks", Status.OK, "at their highest")


def nvlinks(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check that every link of every GPU is up; errors on links that are up are named."""
    if want.nvlinks is None:
        return Result("gpu-nvlink", Status.SKIPPED, "no count of links is known for this type")
    links = fact_at(facts, "gpu", "nvlinks")
    if links is None:
        return unread_result("gpu-nvlink", facts, "gpu.nvlinks", "nvidia-smi nvlink")
    down = [
        f"GPU {gpu}: {counts['up']} of {want.nvlinks}" for gpu, counts in links.items() if counts["up"] < want.nvlinks
    ]
    if len(links) < (want.gpus or 0):
        down.append(f"{len(links)} of {want.gpus} GPUs name links")
    if down:
        return Result("gpu-nvlink", Status.FAILED, "links are down: " + ", ".join(down), REBOOT)
    errors = [f"GPU {gpu}: {counts['errors']}" for gpu, counts in links.items() if counts.get("errors")]
    if errors:
        return Result("gpu-nvlink", Status.WARNING, "links count errors: " + ", ".join(errors))
    return Result("gpu-nvlink", Status.OK, f"{want.nvlinks} links a GPU", expected=str(want.nvlinks))


def fabric_manager(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check the fabric manager: where GPUs are joined by NVSwitch, CUDA does not start without a fabric manager of the driver's
    own version."""
    if want.nvlinks is None:
        return Result("fabric-manager", Status.SKIPPED, "no NVSwitch on this type")
    driver, version = fact_at(facts, "gpu", "driver"), fact_at(facts, "gpu", "fabric_manager", "version")
    if driver is None:
        return unread_result("fabric-manager", facts, "gpu", "the driver's version")
    if version is None:
        return unread_result("fabric-manager", facts, "gpu.fabric_manager", "the fabric manager's version")
    if version != driver:
        why = f"is {version}, the driver {driver}; fix: install the same version"
        return Result("fabric-manager", Status.FAILED, why, actual=str(version), expected=str(driver))
    active = fact_at(facts, "services", "nvidia-fabricmanager.service", "active")
    if active in ("activating", "reloading"):
        return Result("fabric-manager", Status.UNKNOWN, "it is starting; look again in a minute")
    if active not in ("active", None):
        return Result("fabric-manager", Status.FAILED, "does not run", REBOOT)
    states = {_name(device): device.get("fabric_state") for device in _devices(facts)}
    apart = [f"GPU {name}: {state}" for name, state in states.items() if state not in (None, "Completed")]
    if apart and set(states.values()) <= {None, "Completed", "In Progress"}:
        # After a boot this takes minutes: a node that is rebooted for it would be rebooted forever.
        why = f"is still joining the GPUs: {', '.join(apart)}; look again in some minutes, reboot it where it stays so"
        return Result("fabric-manager", Status.UNKNOWN, why)
    if apart:
        return Result("fabric-manager", Status.FAILED, f"has not joined all GPUs: {', '.join(apart)}", REBOOT)
    # A failure is Completed, too: the status says how it went.
    failed = [
        f"GPU {_name(device)}: {device['fabric_status']}"
        for device in _devices(facts)
        if device.get("fabric_status") not in (None, "Success")
    ]
    if failed:
        return Result("fabric-manager", Status.FAILED, f"has not joined all GPUs: {', '.join(failed)}", REBOOT)
    return Result("fabric-manager", Status.OK, "as the driver", actual=str(version))


def _devices(facts: Facts) -> list[Mapping[str, Any]]:
    return list(fact_at(facts, "gpu", "devices") or ())


def _without(facts: Facts, want: ExpectedHardware, check: str) -> Result:
    """Return the result without an NVIDIA GPU: skipped where none is expected; `gpu-count` reports an unknown count."""
    if fact_at(facts, "hpu", "present") or (not want.gpus and fact_at(facts, "gpu", "present") is False):
        return Result(check, Status.SKIPPED, "no NVIDIA GPU")
    return unread_result(check, facts, "gpu", "nvidia-smi")


def _uncounted(check: str, values: Mapping[str, Any], want: ExpectedHardware, what: str) -> Result:
    """Return the result without counters: GPUs of workstations and small inference types keep none, those of training types
    do."""
    if want.nvlinks is None and not any(value is not None for value in values.values()):
        return Result(check, Status.SKIPPED, f"these GPUs do not count {what}")
    return Result(check, Status.UNKNOWN, f"{what} could not be read")


def _name(device: Mapping[str, Any]) -> str:
    return str(device.get("index", "?"))


def _on(mode: object) -> bool:
    return mode is True or str(mode).lower() in ("enabled", "on", "1", "true")


def _plain(reason: object) -> str:
    """Return a throttle reason's short name: `clocks_throttle_reasons.hw_slowdown` and `HW Slowdown` are the same."""
    return re.sub(r"[\s.]+", "_", str(reason).rsplit("reasons.", 1)[-1].strip().lower())


CHECKS = (count, memory, ecc, row_remap, xid, throttle, persistence, clocks, nvlinks, fabric_manager)
