"""Checks of the Elastic Fabric Adapter: its devices, libfabric's domains, and the plugin that NCCL finds."""

from __future__ import annotations

from lustrain.status import Status
from node_setup.agent.model import Facts, Request
from node_setup.agent.verify.expected import ExpectedHardware
from node_setup.agent.verify.result import REBOOT, REPLACE, Result, fact_at, judge_count, unread_result

MODULES = ("efa", "ib_uverbs", "ib_core")
HUGEPAGES, HUGEPAGE_KIB = 5128, 2048
"""EFA's installer sets so many aside. https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html"""


def devices(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check the kernel's RDMA devices by the type's count; every port has to be active."""
    all_devices = fact_at(facts, "efa", "devices")
    if want.efa is None:
        return Result("efa-devices", Status.UNKNOWN, "the number of EFA devices of this type is not known")
    if all_devices is None:
        return (
            unread_result("efa-devices", facts, "efa", "/sys/class/infiniband")
            if want.efa
            else _none("efa-devices", want)
        )
    ours = [device for device in all_devices if device.get("driver") in ("efa", None)]
    down = [str(device.get("name")) for device in ours if "ACTIVE" not in str(device.get("state") or "ACTIVE").upper()]
    if down:
        return Result("efa-devices", Status.FAILED, f"ports are down: {', '.join(down)}", REPLACE)
    on_the_bus = fact_at(facts, "efa", "pci")
    untaken = on_the_bus is not None and len(ours) < on_the_bus
    if untaken and len(ours) < want.efa:
        why = f"the driver has taken {len(ours)} of {on_the_bus} on the bus; fix: load module efa, or reboot"
        return Result("efa-devices", Status.FAILED, why, REBOOT, str(len(ours)), str(want.efa))
    return judge_count("efa-devices", len(ours), want.efa, "EFA devices", REPLACE)


def domains(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Count what libfabric offers, which is what NCCL gets: a device that the kernel lists may have no domain.
    (https://github.com/awslabs/awsome-distributed-ai/pull/1088: names differ too, so they are counted.)"""
    if not want.efa:
        return _none("efa-domains", want)
    names = fact_at(facts, "efa", "domains")
    if names is None:
        return unread_result("efa-domains", facts, "efa.domains", "fi_info")
    return judge_count("efa-domains", len(set(names)), want.efa, "libfabric domains", REBOOT)


def modules(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    if not want.efa:
        return _none("efa-modules", want)
    loaded = fact_at(facts, "modules", "loaded")
    if loaded is None:
        return unread_result("efa-modules", facts, "modules", "/proc/modules")
    missing = [name for name in MODULES if name not in loaded]
    if missing:
        return Result(
            "efa-modules", Status.FAILED, f"not loaded: {', '.join(missing)}; fix: run EFA's installer", REBOOT
        )
    return Result("efa-modules", Status.OK, "loaded", actual=", ".join(MODULES))


def plugin(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check that there is one plugin: of two on one node NCCL takes whichever the search path names first, in each job another
    one."""
    if not want.efa or not want.gpus:
        return Result("ofi-plugin", Status.SKIPPED, "no GPUs to use EFA")
    paths = fact_at(facts, "efa", "plugins")
    if paths is None:
        return unread_result("ofi-plugin", facts, "efa", "places of NCCL's plugin")
    if len(paths) > 1:
        return Result(
            "ofi-plugin",
            Status.FAILED,
            f"{len(paths)} plugins: {', '.join(paths)}; fix: keep one",
            actual=str(len(paths)),
        )
    if not paths:
        why = "none on the host: only images that bring their own talk over EFA"
        return Result("ofi-plugin", Status.WARNING, why, actual="0")
    return Result("ofi-plugin", Status.OK, "one", actual=paths[0])


def hugepages(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check the huge pages in which libfabric's bounce buffers lie; without them jobs run a little slower."""
    if not want.efa:
        return _none("efa-hugepages", want)
    total, free = fact_at(facts, "memory", "hugepages_total"), fact_at(facts, "memory", "hugepages_free")
    size = fact_at(facts, "memory", "hugepage_kib")
    if total is None or size is None:
        return unread_result("efa-hugepages", facts, "memory", "/proc/meminfo")
    counts = (str(total), str(HUGEPAGES))
    if total * size < HUGEPAGES * HUGEPAGE_KIB:
        return Result(
            "efa-hugepages",
            Status.WARNING,
            "fewer than EFA's installer sets aside",
            actual=counts[0],
            expected=counts[1],
        )
    if free == 0 and facts.get("jobs") == []:
        return Result("efa-hugepages", Status.WARNING, "none is free though no job runs", actual="0 free")
    return Result("efa-hugepages", Status.OK, "set aside", actual=counts[0], expected=counts[1])


def _none(check: str, want: ExpectedHardware) -> Result:
    return Result(check, Status.SKIPPED, "no EFA here" if want.efa == 0 else "see efa-devices")


CHECKS = (devices, domains, modules, plugin, hugepages)
