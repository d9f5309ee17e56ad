"""Metrics from a node's facts and the rows of its plan. Pure. docs/metrics.md has a row for each name.

What node_exporter and dcgm-exporter export by themselves is left to them; docs/metrics.md says what that is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lustrain.status import Status
from node_setup.agent.metrics.text import COUNTER, GAUGE, Metric, Sample
from node_setup.agent.model import Facts
from node_setup.agent.slurm.queue import Queue
from node_setup.agent.verify.gpu import event_action
from node_setup.agent.verify.storage import scratch_is_mounted

LLITE_STATS, OSC_IMPORTS = "llite.*.stats", "osc.*.import"
LUSTRE_PARAMETERS = (LLITE_STATS, OSC_IMPORTS)
"""These patterns of `lctl get_param` are read beside those of the settings."""

EFA = {
    "retrans_bytes": "Bytes sent again",
    "retrans_pkts": "Packets sent again",
    "retrans_timeout_events": "Times that packets were sent again after a timeout",
    "unresponsive_remote_events": "Times that a remote side did not answer",
    "impaired_remote_conn_events": "Times that a connection was slowed down for its losses",
    "rx_drops": "Packets dropped on receipt",
    "rdma_read_wr_err": "RDMA reads that failed",
    "rdma_write_wr_err": "RDMA writes that failed",
    "rx_bytes": "Bytes received",
    "tx_bytes": "Bytes sent",
}
"""Hardware counters by the driver's names (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-working-monitor.html); a
device or a driver that lacks one has no series of it."""
THROTTLES = ("sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
"""Of the reasons for low clocks, these cost speed; the others are idleness and settings."""
STATUSES = tuple(status for status in Status if status not in (Status.CHANGED, Status.WARNING))
"""These statuses are possible in a plan."""


def readings(facts: Facts, rows: Iterable[Mapping[str, Any]], queue: Queue | None = None) -> Iterator[Metric]:
    """Yield every metric of the node, and of Slurm on its controller; what was not read has no samples."""
    yield from _efa(facts)
    yield from _lustre(facts.get("lustre") or {})
    yield from _gpu(facts.get("gpu") or {})
    yield from _clock(facts.get("time") or {})
    mounted = scratch_is_mounted(facts)
    samples = [] if mounted is None else [Sample(int(mounted))]
    yield Metric("lustrain_node_scratch_mounted", GAUGE, "Whether the instance store is mounted", samples)
    counts = Counter(row["status"] for row in rows)
    by_status = [Sample(counts[status], {"status": str(status)}) for status in STATUSES]
    yield Metric("lustrain_node_settings", GAUGE, "Settings by what a tune would find now", by_status)
    unread = [Sample(len(facts.get("errors") or ()))]
    yield Metric("lustrain_node_unread_facts", GAUGE, "Facts that could not be read", unread)
    if queue:
        yield from _slurm(queue)


def _efa(facts: Facts) -> Iterator[Metric]:
    devices = (facts.get("efa") or {}).get("devices") or ()
    for counter, text in EFA.items():
        values = [(device["name"], device["counters"].get(counter)) for device in devices]
        samples = [Sample(value, {"device": name}) for name, value in values if value is not None]
        yield Metric(f"lustrain_node_efa_{counter}_total", COUNTER, text, samples)


def _lustre(lustre: Mapping[str, Any]) -> Iterator[Metric]:
    osts = lustre.get("osts") or {}
    states = {"answering": osts.get("count"), "inactive": osts.get("inactive"), "read_only": osts.get("read_only")}
    states["silent"] = None if osts.get("silent") is None else len(osts["silent"])
    targets = [Sample(number, {"state": state}) for state, number in states.items() if number is not None]
    yield Metric("lustrain_node_lustre_targets", GAUGE, "Targets of the first mounted Lustre, by state", targets)
    percent = osts.get("fullest_percent")
    fullest = [] if percent is None else [Sample(percent / 100)]
    yield Metric(
        "lustrain_node_lustre_fullest_target_ratio", GAUGE, "Used share of its fullest storage target", fullest
    )
    parameters = lustre.get("parameters") or {}
    moved: dict[str, Counter[str]] = {"read_bytes": Counter(), "write_bytes": Counter()}
    for parameter, value in parameters.get(LLITE_STATS, {}).items():
        for name, total in parse_stats(value).items():
            if name in moved:
                # A file system may be mounted more than once.
                moved[name][_mounted(parameter)] += total
    for name, of_systems in moved.items():
        samples = [Sample(total, {"file_system": system}) for system, total in of_systems.items()]
        text = f"Bytes of {name.partition('_')[0]} calls, also those that the cache served"
        yield Metric(f"lustrain_node_lustre_{name}_total", COUNTER, text, samples)
    connections: Counter[tuple[str, str]] = Counter()
    timeouts: Counter[str] = Counter()
    for name, value in parameters.get(OSC_IMPORTS, {}).items():
        state, timed_out = parse_import(value)
        connections[_of_target(name), state] += 1
        timeouts[_of_target(name)] += timed_out
    states_of = [Sample(number, {"file_system": fs, "state": state}) for (fs, state), number in connections.items()]
    yield Metric("lustrain_node_lustre_connections", GAUGE, "Connections to storage targets, by state", states_of)
    lost = [Sample(number, {"file_system": system}) for system, number in timeouts.items()]
    yield Metric("lustrain_node_lustre_timeouts_total", COUNTER, "Requests to storage targets that timed out", lost)
    drops = [
        Sample(sum(nid["drop"] or 0 for nid in network["nids"]), {"net": network["net"]})
        for network in lustre.get("nets") or ()
        if network["net"] != "lo"
    ]
    yield Metric("lustrain_node_lnet_drops_total", COUNTER, "Messages of Lustre's network that were dropped", drops)


def _mounted(parameter: str) -> str:
    """Return the file system's name, which may hold dashes, in `llite.NAME-ffff….stats`; the address is new at each mount."""
    return parameter.split(".")[1].rpartition("-")[0]


def _of_target(parameter: str) -> str:
    """Return the file system's name in `osc.NAME-OST0000-osc-ffff….import`."""
    return parameter.split(".")[1].partition("-OST")[0]


def parse_stats(text: str) -> dict[str, int]:
    """Parse `llite.*.stats`: the sum of each counter in bytes, from `read_bytes 12 samples [bytes] MIN MAX SUM`
    (http://lists.lustre.org/pipermail/lustre-discuss-lustre.org/2018-April/015426.html)."""
    found = re.findall(r"^(\w+)\s+\d+ samples \[bytes\] \d+ \d+ (\d+)", text, re.MULTILINE)
    return {name: int(total) for name, total in found}


def parse_import(text: str) -> tuple[str, int]:
    """Parse `osc.*.import`: the connection's state, such as FULL or DISCONN, and how many requests timed out
    (`lprocfs_import_seq_show` in https://github.com/lustre/lustre-release/blob/master/lustre/obdclass/lprocfs_status.c)."""
    state = re.search(r"^\s*state:\s*(\w+)", text, re.MULTILINE)
    timeouts = re.search(r"^\s*timeouts:\s*(\d+)", text, re.MULTILINE)
    return (state[1] if state else "unknown", int(timeouts[1]) if timeouts else 0)


def _gpu(gpu: Mapping[str, Any]) -> Iterator[Metric]:
    devices = gpu.get("devices") or ()
    name = str(devices[0]["name"] or "") if devices else ""
    xids = Counter(
        (event["pci"], str(event["xid"]), "switch" if event["switch"] else "gpu", event_action(event, name))
        for event in gpu.get("xids") or ()
    )
    seen = [Sample(number, dict(zip(("pci", "xid", "of", "action"), which))) for which, number in sorted(xids.items())]
    yield Metric(
        "lustrain_node_gpu_xids_total", COUNTER, "Errors that the driver reported since the boot, by code", seen
    )
    throttled = [
        Sample(int(reason in device["throttle"]), {"gpu": str(device["index"]), "reason": reason})
        for device in devices
        if device["throttle"] is not None
        for reason in THROTTLES
    ]
    yield Metric("lustrain_node_gpu_throttled", GAUGE, "Whether a GPU's clocks are held down, by reason", throttled)
    pending = [
        Sample(int(device["remap_pending"]), {"gpu": str(device["index"])})
        for device in devices
        if device["remap_pending"] is not None
    ]
    yield Metric(
        "lustrain_node_gpu_remap_pending", GAUGE, "Whether memory rows wait for a reset to be remapped", pending
    )


def _clock(time: Mapping[str, Any]) -> Iterator[Metric]:
    offset, synchronised = time.get("offset_s"), time.get("synchronised")
    offsets = [] if offset is None else [Sample(offset)]
    yield Metric("lustrain_node_clock_offset_seconds", GAUGE, "How far the clock is behind its source", offsets)
    states = [] if synchronised is None else [Sample(int(synchronised))]
    yield Metric("lustrain_node_clock_synchronised", GAUGE, "Whether the clock follows a source", states)


def _slurm(queue: Queue) -> Iterator[Metric]:
    yield Metric("lustrain_slurm_up", GAUGE, "Whether Slurm's controller answers", [Sample(int(queue.error is None))])
    nodes = [Sample(number, {"state": state, "flag": flag}) for (state, flag), number in sorted(queue.nodes.items())]
    yield Metric("lustrain_slurm_nodes", GAUGE, "Nodes of Slurm, by state and flag", nodes)
    jobs = [Sample(number, {"state": state}) for state, number in sorted(queue.jobs.items())]
    yield Metric("lustrain_slurm_jobs", GAUGE, "Jobs of Slurm, by state", jobs)
