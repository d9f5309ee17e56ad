"""Checks of local storage: room and health."""

from __future__ import annotations

from lustrain.status import Status
from node_setup.agent.kinds.s3_mounts import CLIENT, left_over
from node_setup.agent.model import Facts, Request
from node_setup.agent.verify.expected import ExpectedHardware
from node_setup.agent.verify.result import REBOOT, Result, fact_at, unread_result

GIB = 2**30
SHM_SHARE = 0.25
"""/dev/shm should have this share of memory; the kernel's own size of a tmpfs is half of it. Data loaders pass their batches
through /dev/shm."""


def shm(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    size, memory = fact_at(facts, "memory", "shm_gib"), fact_at(facts, "memory", "gib")
    if size is None or memory is None:
        return unread_result("shm", facts, "memory", "the size of /dev/shm")
    shown = f"{size:g} GiB"
    if size < memory * SHM_SHARE:
        return Result("shm", Status.WARNING, f"less than a quarter of {memory:g} GiB of memory", actual=shown)
    return Result("shm", Status.OK, "large enough", actual=shown)


def scratch(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check that local drives, where there are any, are mounted somewhere: directly or as parts of an array."""
    if not want.nvme:
        return Result("scratch", Status.SKIPPED, "no local drives")
    blocks, mounts = fact_at(facts, "blocks"), fact_at(facts, "mounts")
    if blocks is None or mounts is None:
        return unread_result("scratch", facts, "blocks" if blocks is None else "mounts", "block devices and mounts")
    if scratch_is_mounted(facts):
        points = [point for block in blocks if block.get("instance_store") for point in block.get("mountpoints") or ()]
        return Result("scratch", Status.OK, "mounted", actual=", ".join(points) or None)
    return Result("scratch", Status.WARNING, "local drives are not mounted; fix: fab node-tune")


def scratch_is_mounted(facts: Facts) -> bool | None:
    """Check for a mount of the instance store; None where the node has none, or where disks or mounts were not read."""
    drives = [block for block in facts.get("blocks") or () if block.get("instance_store")]
    if not drives or facts.get("mounts") is None:
        return None
    names = {str(name) for block in drives for name in (block["name"], *(block.get("holders") or ()))}
    sources = {str(mount["source"]).rsplit("/", 1)[-1] for mount in facts["mounts"]}
    return any(block.get("mountpoints") for block in drives) or bool(sources & names)


def disk(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check the root file system: one that is full or has gone read-only breaks every job, and tuning too."""
    root = fact_at(facts, "disk", "/")
    if not root or root.get("free_bytes") is None:
        return unread_result("disk", facts, "disk", "free space on /")
    if root.get("read_only"):
        return Result("disk", Status.FAILED, "/ is read-only", REBOOT)
    free, inodes = root["free_bytes"] / GIB, root.get("free_inodes")
    if free < 1 or (inodes is not None and inodes < 10_000):
        return Result(
            "disk", Status.FAILED, f"/ is full: {free:.1f} GiB and {inodes} inodes free", actual=f"{free:.1f} GiB"
        )
    return Result("disk", Status.WARNING if free < 10 else Status.OK, "free space on /", actual=f"{free:.0f} GiB")


def s3_mounts(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check that the cluster's buckets are mounted: a job would write into an empty folder of the root disk otherwise."""
    paths, mounts = request.document.get("s3_mounts") or (), fact_at(facts, "mounts")
    removed = ", ".join(f"{unit} at {point}" for unit, point in left_over(facts, request).items())
    if not paths and not removed:
        return Result("s3-mounts", Status.SKIPPED, "the cluster mounts no buckets")
    if mounts is None:
        return unread_result("s3-mounts", facts, "mounts", "mounts")
    there = {mount["target"] for mount in mounts if mount["source"] == CLIENT}
    if absent := [path for path in paths if path not in there]:
        fix = "`journalctl -u 'lustrain-s3-*'` says why; replace a node that is older than the mount"
        return Result("s3-mounts", Status.FAILED, f"no bucket is mounted at {', '.join(absent)}; fix: {fix}")
    if removed:
        return Result("s3-mounts", Status.WARNING, f"the cluster no longer has {removed}; fix: fab node-tune")
    return Result("s3-mounts", Status.OK, f"mounted: {', '.join(paths)}")


CHECKS = (shm, scratch, disk, s3_mounts)
