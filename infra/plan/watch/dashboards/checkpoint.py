"""Checkpoints: what would be lost now, do saves succeed, and what do they cost?"""

from __future__ import annotations

from infra.plan.watch.dashboards.panel import CHOOSE_RUN, RUN, Dashboard, Panel, Query, Row, make_panel

_BLOCKED = f'lustrain_step_seconds_{{kind}}{{{{{RUN},part="blocked"}}}}'

DASHBOARD = Dashboard(
    "checkpoint",
    "Checkpoints",
    "The checkpoints of runs, and the Lustre that they are written to.",
    (CHOOSE_RUN,),
    (
        Row(
            "What would be lost now?",
            (
                Panel(
                    "Age of the newest checkpoint",
                    "Is it above two intervals between commits?",
                    (
                        Query(f"max by (run) (lustrain_checkpoint_age_seconds{{{RUN}}})", "{{run}} age"),
                        Query(f"max by (run) (lustrain_checkpoint_interval_seconds{{{RUN}}})", "{{run}} interval"),
                    ),
                    "s",
                    alerts=("CheckpointOld",),
                ),
                make_panel(
                    "Steps at risk",
                    "How many steps are newer than the newest checkpoint?",
                    f"max by (run) (lustrain_step{{{RUN}}}) - max by (run) (lustrain_checkpoint_step{{{RUN}}})",
                    legend="{{run}}",
                    alerts=("LaunchesWithoutCommit",),
                ),
            ),
        ),
        Row(
            "Do saves succeed?",
            (
                make_panel(
                    "Failed saves",
                    "How many saves failed within a quarter of an hour?",
                    f"sum by (run) (increase(lustrain_saves_failed_total{{{RUN}}}[15m]))",
                    legend="{{run}}",
                    alerts=("SavesFailing",),
                ),
                make_panel(
                    "Loop stopped by a save",
                    "How many seconds does a save stop the loop?",
                    f"sum by (run) (rate({_BLOCKED.format(kind='sum')}[$__rate_interval]))"
                    f" / sum by (run) (rate({_BLOCKED.format(kind='count')}[$__rate_interval]))",
                    "s",
                    legend="{{run}}",
                    alerts=("SaveBlocks",),
                ),
            ),
        ),
        Row(
            "The store, where it is Lustre",
            (
                make_panel(
                    "Written",
                    "Do all nodes together write as fast as the file system can?",
                    "sum by (file_system) (rate(lustrain_node_lustre_write_bytes_total[$__rate_interval]))",
                    "Bps",
                    legend="{{file_system}}",
                ),
                make_panel(
                    "Fullest target",
                    "Is a storage target full, though others have room?",
                    "max by (job) (lustrain_node_lustre_fullest_target_ratio)",
                    "percentunit",
                    legend="{{job}}",
                    alerts=("LustreFull",),
                ),
            ),
        ),
    ),
)
