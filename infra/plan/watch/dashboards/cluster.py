"""The whole cluster on one page: what is wrong, which runs step, which nodes differ, and what Slurm has to do."""

from __future__ import annotations

from infra.plan.watch.dashboards.panel import NO_DCGM, Dashboard, Panel, Query, Row, make_panel

DASHBOARD = Dashboard(
    "cluster",
    "Cluster",
    "All runs and nodes at a glance.",
    (),
    (
        Row(
            "What is wrong?",
            (
                make_panel(
                    "Alerts",
                    "Which of the rules of fab alert-rules fire? The panel of each leads to its section of the runbook.",
                    'count by (alertname, severity, run, rank, job, instance) (ALERTS{alertstate="firing"})',
                    kind="table",
                ),
                make_panel(
                    "Targets that are down",
                    "Which scrape jobs have targets that do not answer? A port of a run is silent by right where none trains.",
                    'count by (job) (up{job!="run"}) - sum by (job) (up{job!="run"})',
                    legend="{{job}}",
                    kind="number",
                    alerts=("NodeMissing",),
                ),
            ),
        ),
        Row(
            "Runs",
            (
                make_panel(
                    "Steps per minute",
                    "Which runs step?",
                    'sum by (run) (rate(lustrain_step_seconds_count{part="compute"}[$__rate_interval])) * 60',
                    legend="{{run}}",
                    alerts=("RunDown", "RunStalled"),
                ),
                make_panel(
                    "Tokens per second of all runs",
                    "How much work is done?",
                    "max by (run) (lustrain_tokens_per_second)",
                    legend="{{run}}",
                    alerts=("ThroughputLow",),
                ),
                make_panel(
                    "Goodput of all runs",
                    "Where is time lost?",
                    "max by (run) (lustrain_goodput_ratio)",
                    "percentunit",
                    legend="{{run}}",
                ),
            ),
        ),
        Row(
            "Slurm",
            (
                make_panel(
                    "Slurm's nodes",
                    "Which are free, drained or down? A flag such as not_responding stands beside the state.",
                    "max by (job, state, flag) (lustrain_slurm_nodes)",
                    legend="{{job}} {{state}} {{flag}}",
                    alerts=("SlurmNodesOut",),
                ),
                make_panel(
                    "Slurm's jobs",
                    "Do jobs wait though nodes are free?",
                    "max by (job, state) (lustrain_slurm_jobs)",
                    legend="{{job}} {{state}}",
                ),
                make_panel(
                    "Slurm answers",
                    "Does the controller answer? 1 is yes; while it is 0, nodes and jobs have no numbers.",
                    "min by (instance) (lustrain_slurm_up)",
                    legend="{{instance}}",
                    kind="number",
                    alerts=("SlurmDown",),
                ),
            ),
        ),
        Row(
            "Nodes",
            (
                make_panel(
                    "GPU utilisation",
                    "Are GPUs idle that are paid for?",
                    "avg by (instance) (DCGM_FI_DEV_GPU_UTIL)",
                    "percent",
                    legend="{{instance}}",
                    alerts=("GpuIdle",),
                    absent=NO_DCGM,
                ),
                Panel(
                    "Faults of nodes",
                    "How many nodes have drifted, or follow no source of time? How many GPUs need a reset, or are held down?",
                    (
                        Query(
                            'sum(sum by (instance) (lustrain_node_settings{status=~"change|conflict|failed"}) > bool 0)',
                            "drifted settings",
                        ),
                        Query("sum(lustrain_node_gpu_remap_pending)", "GPUs to reset"),
                        Query(
                            'sum(max by (instance, gpu) (lustrain_node_gpu_throttled{reason=~"hw_.*"}))',
                            "GPUs held down",
                        ),
                        Query("sum(lustrain_node_clock_synchronised == bool 0)", "clocks without a source"),
                    ),
                    alerts=("NodeDrifted", "GpuRemapPending", "GpuThrottled", "ClockOff"),
                ),
                make_panel(
                    "EFA drops",
                    "Which nodes drop what they receive?",
                    "sum by (instance) (rate(lustrain_node_efa_rx_drops_total[$__rate_interval]))",
                    "pps",
                    legend="{{instance}}",
                    alerts=("EfaDropsPackets",),
                ),
                make_panel(
                    "Lustre's targets",
                    "Does a target not answer, or take no writes?",
                    "max by (job, state) (lustrain_node_lustre_targets)",
                    legend="{{job}} {{state}}",
                    alerts=("LustreTargetLost",),
                ),
            ),
        ),
    ),
)
