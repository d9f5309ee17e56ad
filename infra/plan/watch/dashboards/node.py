"""One node: is it the one that differs? GPUs, network, Lustre, clock and drift, beside what node_exporter has."""

from __future__ import annotations

from infra.plan.watch.dashboards.panel import (
    CARDS,
    CHOOSE_NODE,
    DISKS,
    NO_DCGM,
    NODE,
    Dashboard,
    Panel,
    Query,
    Row,
    make_panel,
)


def _gpu(title: str, question: str, metric: str, unit: str, alerts: tuple[str, ...] = ()) -> Panel:
    expression = f"{metric}{{{NODE}}}"
    return make_panel(
        title, question, expression, unit, legend="{{instance}} GPU {{gpu}}", alerts=alerts, absent=NO_DCGM
    )


def _efa(name: str, legend: str) -> Query:
    rate = f"rate(lustrain_node_efa_{name}_total{{{NODE}}}[$__rate_interval])"
    return Query(f"sum by (instance) ({rate})", f"{{{{instance}}}} {legend}")


DASHBOARD = Dashboard(
    "node",
    "Node",
    "One node, or several beside each other: look for the one that differs.",
    (CHOOSE_NODE,),
    (
        Row(
            "Is it in order?",
            (
                make_panel(
                    "Settings that have drifted",
                    "Would a tune change something, or could it not?",
                    f'sum by (instance) (lustrain_node_settings{{{NODE},status=~"change|conflict|failed"}})',
                    legend="{{instance}}",
                    kind="number",
                    alerts=("NodeDrifted",),
                ),
                make_panel(
                    "Age of these metrics",
                    "Does the agent still write them? Facts that it cannot read are counted beside.",
                    f'time() - node_textfile_mtime_seconds{{{NODE},file=~".*lustrain[.]prom"}}',
                    "s",
                    legend="{{instance}}",
                    kind="number",
                    alerts=("NodeMetricsStale",),
                ),
                make_panel(
                    "Unread facts",
                    "Does a program hang, or is it missing?",
                    f"lustrain_node_unread_facts{{{NODE}}}",
                    legend="{{instance}}",
                    kind="number",
                ),
                make_panel(
                    "Scratch",
                    "Is the instance store mounted? 1 is yes; a node without one has no number.",
                    f"lustrain_node_scratch_mounted{{{NODE}}}",
                    legend="{{instance}}",
                    kind="number",
                    alerts=("ScratchMissing",),
                ),
                make_panel(
                    "Clock",
                    "Does it follow a source? 1 is yes.",
                    f"lustrain_node_clock_synchronised{{{NODE}}}",
                    legend="{{instance}}",
                    kind="number",
                    alerts=("ClockOff",),
                ),
                make_panel(
                    "Clock's offset",
                    "How far is it behind its source? A millisecond is much.",
                    f"lustrain_node_clock_offset_seconds{{{NODE}}}",
                    "s",
                    legend="{{instance}}",
                    alerts=("ClockOff",),
                ),
            ),
        ),
        Row(
            "GPUs",
            (
                _gpu("GPU utilisation", "Is one GPU idle?", "DCGM_FI_DEV_GPU_UTIL", "percent", ("GpuIdle",)),
                _gpu("GPU memory", "How much of it is used?", "DCGM_FI_DEV_FB_USED", "decmbytes"),
                _gpu("SM clock", "Is one GPU slower than the others?", "DCGM_FI_DEV_SM_CLOCK", "rotmhz"),
                _gpu("GPU power", "Does one GPU draw less than the others?", "DCGM_FI_DEV_POWER_USAGE", "watt"),
                _gpu("GPU temperature", "Is one GPU hot?", "DCGM_FI_DEV_GPU_TEMP", "celsius", ("GpuThrottled",)),
                make_panel(
                    "Clocks held down",
                    "By what? sw_power_cap is usual under load.",
                    f"sum by (instance, reason) (lustrain_node_gpu_throttled{{{NODE}}})",
                    legend="{{instance}} {{reason}}",
                    alerts=("GpuThrottled",),
                ),
                make_panel(
                    "Errors of the driver since the boot",
                    "Which need a reboot or another node?",
                    f"sum by (instance, xid, action) (lustrain_node_gpu_xids_total{{{NODE}}})",
                    legend="{{instance}} Xid {{xid}} {{action}}",
                    kind="table",
                    alerts=("GpuXid",),
                ),
                make_panel(
                    "GPUs that wait for a reset",
                    "Are memory rows to be remapped?",
                    f"sum by (instance) (lustrain_node_gpu_remap_pending{{{NODE}}})",
                    legend="{{instance}}",
                    alerts=("GpuRemapPending",),
                ),
            ),
        ),
        Row(
            "Network",
            (
                Panel(
                    "EFA traffic",
                    "Does one node carry less than the others?",
                    (_efa("rx_bytes", "received"), _efa("tx_bytes", "sent")),
                    "Bps",
                ),
                Panel(
                    "EFA faults",
                    "Are packets sent again, dropped, or not answered?",
                    (
                        _efa("retrans_pkts", "sent again"),
                        _efa("retrans_timeout_events", "timeouts"),
                        _efa("rx_drops", "dropped"),
                        _efa("unresponsive_remote_events", "not answered"),
                        _efa("impaired_remote_conn_events", "slowed down"),
                    ),
                    "ops",
                    alerts=("EfaDropsPackets", "EfaPeerUnresponsive"),
                ),
                Panel(
                    "Network cards",
                    "What goes over the cards themselves: sockets, S3, SSH?",
                    (
                        Query(
                            f"sum by (instance) (rate(node_network_receive_bytes_total{{{NODE},{CARDS}}}[$__rate_interval]))",
                            "{{instance}} received",
                        ),
                        Query(
                            f"sum by (instance) (rate(node_network_transmit_bytes_total{{{NODE},{CARDS}}}[$__rate_interval]))",
                            "{{instance}} sent",
                        ),
                    ),
                    "Bps",
                ),
            ),
        ),
        Row(
            "Lustre",
            (
                Panel(
                    "Lustre traffic",
                    "Does the node read and write as the others do?",
                    tuple(
                        Query(
                            f"sum by (instance) (rate(lustrain_node_lustre_{way}_bytes_total{{{NODE}}}[$__rate_interval]))",
                            f"{{{{instance}}}} {way}",
                        )
                        for way in ("read", "write")
                    ),
                    "Bps",
                ),
                make_panel(
                    "Connections to storage targets",
                    "Are there any that are not FULL or IDLE?",
                    f"sum by (instance, state) (lustrain_node_lustre_connections{{{NODE}}})",
                    legend="{{instance}} {{state}}",
                    alerts=("LustreDisconnected",),
                ),
                Panel(
                    "Lustre faults",
                    "Do servers not answer in time, and are messages dropped?",
                    (
                        Query(
                            f"sum by (instance) (rate(lustrain_node_lustre_timeouts_total{{{NODE}}}[$__rate_interval]))",
                            "{{instance}} timeouts",
                        ),
                        Query(
                            f"sum by (instance) (rate(lustrain_node_lnet_drops_total{{{NODE}}}[$__rate_interval]))",
                            "{{instance}} dropped",
                        ),
                    ),
                    "ops",
                    alerts=("LustreSlow",),
                ),
            ),
        ),
        Row(
            "Host",
            (
                make_panel(
                    "CPU",
                    "Is the host itself the bottleneck?",
                    f'1 - avg by (instance) (rate(node_cpu_seconds_total{{{NODE},mode="idle"}}[$__rate_interval]))',
                    "percentunit",
                    legend="{{instance}}",
                ),
                make_panel(
                    "Free memory",
                    "Is there room for a copy of the state?",
                    f"node_memory_MemAvailable_bytes{{{NODE}}}",
                    "bytes",
                    legend="{{instance}}",
                    alerts=("SaveBlocks",),
                ),
                make_panel(
                    "Free space",
                    "Does a file system fill up?",
                    f"node_filesystem_avail_bytes{{{NODE},{DISKS}}} / node_filesystem_size_bytes{{{NODE},{DISKS}}}",
                    "percentunit",
                    legend="{{instance}} {{mountpoint}}",
                    alerts=("DiskFull",),
                ),
            ),
        ),
    ),
)
