"""The controller's own volume, where slurmctld keeps its queue: found by its id, formatted only while it is blank, mounted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from node_setup.agent.facts import Wanted
from node_setup.agent.facts.devices import blocks
from node_setup.agent.facts.reading import start_reading
from node_setup.agent.host import Host
from node_setup.agent.slurm import apply, paths
from node_setup.agent.slurm.wanted import File

POLL_S = 5.0
FORMAT_S = 300.0
UNIT = paths.STATE_MOUNT.rpartition("/")[2]
MOUNT = """{header}[Unit]
Description=State of Slurm's controller

[Mount]
What=/dev/{name}
Where={path}
Type=xfs
Options=noatime
"""
DROP_IN = f"""{paths.STACK_HEADER}[Unit]
# On the root volume slurmctld would begin with an empty queue.
RequiresMountsFor={paths.STATE}
"""


def steps(host: Host, volume: str, wait_s: float, clock: apply.Clock) -> Iterator[apply.Step]:
    yield _formatted(host, volume, wait_s, clock)
    text = MOUNT.format(header=paths.STACK_HEADER, name=device(host, volume), path=paths.STATE)
    yield apply.file_step(host, File(paths.STATE_MOUNT, text), ())
    yield apply.service(host, UNIT, clock, enabled=False)
    yield apply.file_step(host, File(paths.STATE_DROP_IN, DROP_IN), ())


def device(host: Host, volume: str) -> str | None:
    """Return the kernel's name of a volume, whose id without a dash is its serial number
    (https://docs.aws.amazon.com/ebs/latest/userguide/identify-nvme-ebs-device.html); None where it is not attached."""
    serial = volume.replace("-", "")
    names = host.names("/sys/block")
    return next((n for n in names if (host.read(f"/sys/block/{n}/device/serial") or "").strip() == serial), None)


def _formatted(host: Host, volume: str, wait_s: float, clock: apply.Clock) -> apply.Step:
    def inspect() -> str | None:
        block = _block(host, volume)
        if block is None:
            return "not attached"
        if block["fstype"] == "xfs":
            return None
        return "blank" if _is_free(block) else f"not blank: {block['fstype'] or 'it holds data, or could not be read'}"

    def mend() -> str | None:
        end = clock.monotonic() + wait_s
        while (block := _block(host, volume)) is None and clock.monotonic() < end:
            clock.sleep(POLL_S)
        if block is None or block["fstype"] == "xfs":
            return None
        if not _is_free(block):
            return f"what holds something is never formatted; fix: mkfs.xfs -f {block['path']}, where it may be erased"
        # Without -f mkfs.xfs refuses a disk that holds something after all.
        done = host.run(("mkfs.xfs", "-K", block["path"]), FORMAT_S)
        return None if done.ok else f"mkfs.xfs: {done.complaint}"

    return apply.Step("slurm.state-volume", volume, "xfs", inspect, mend)


def _is_free(block: Mapping[str, Any]) -> bool:
    used = block["partitions"] or block["holders"] or block["mountpoints"] or block["fstype"]
    return block["blank"] is True and not used


def _block(host: Host, volume: str) -> Mapping[str, Any] | None:
    name = device(host, volume)
    found = blocks.collect(start_reading(host, Wanted()))["blocks"] if name else []
    return next((block for block in found if block["name"] == name), None)
