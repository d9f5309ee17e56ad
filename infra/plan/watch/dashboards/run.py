"""One run: does it step, does it learn, how fast is it, and what slows it down?"""

from __future__ import annotations

from infra.plan.watch.alert_rules import DATA_MEAN
from infra.plan.watch.dashboards.panel import CHOOSE_RUN, NO_PEAK, RUN, Dashboard, Panel, Query, Row, make_panel

_PART = f"sum by (run, part) (rate(lustrain_step_seconds_sum{{{RUN}}}[$__rate_interval]))"
_STEP = f'lustrain_step_seconds_bucket{{{RUN},part="compute"}}'
_SHARE = (
    f'sum by (run) (rate(lustrain_step_seconds_sum{{{RUN},part="data"}}[$__rate_interval]))'
    f' / sum by (run) (rate(lustrain_step_seconds_sum{{{RUN},part=~"data|compute"}}[$__rate_interval]))'
)

DASHBOARD = Dashboard(
    "run",
    "Run",
    "One training run, or several beside each other.",
    (CHOOSE_RUN,),
    (
        Row(
            "Is it well?",
            (
                make_panel(
                    "Step", "How far is it?", f"max by (run) (lustrain_step{{{RUN}}})", legend="{{run}}", kind="number"
                ),
                make_panel(
                    "Age of the step",
                    "Does it step? The seconds since the step in progress began, 0 between steps.",
                    f"max by (run) (lustrain_step_age_seconds{{{RUN}}})",
                    "s",
                    legend="{{run}}",
                    kind="number",
                    alerts=("RunStalled", "RunDown"),
                ),
                make_panel(
                    "Goodput",
                    "Which share of the time since its first launch is in steps that count?",
                    f"max by (run) (lustrain_goodput_ratio{{{RUN}}})",
                    "percentunit",
                    legend="{{run}}",
                    kind="number",
                ),
                make_panel(
                    "Tokens per second",
                    "How fast is it, over all ranks?",
                    f"max by (run) (lustrain_tokens_per_second{{{RUN}}})",
                    legend="{{run}}",
                    kind="number",
                ),
                make_panel(
                    "MFU",
                    "Which share of the GPUs' peak is used? None where the GPU's peak is not known.",
                    f"max by (run) (lustrain_mfu_ratio{{{RUN}}})",
                    "percentunit",
                    legend="{{run}}",
                    kind="number",
                    absent=NO_PEAK,
                ),
                make_panel(
                    "Age of the checkpoint",
                    "How much training would be lost now?",
                    f"max by (run) (lustrain_checkpoint_age_seconds{{{RUN}}})",
                    "s",
                    legend="{{run}}",
                    kind="number",
                    alerts=("CheckpointOld",),
                ),
            ),
        ),
        Row(
            "Does it learn?",
            (
                make_panel(
                    "Loss",
                    "Does it fall? A gap is a loss that is no number.",
                    f"lustrain_loss{{{RUN}}}",
                    legend="{{run}}, launch {{launch}}",
                    alerts=("LossNotFinite", "LossSpiked"),
                ),
                make_panel(
                    "Gradient norm",
                    "Does it grow over many steps? Then the rate is too high.",
                    f"lustrain_gradient_norm{{{RUN}}}",
                    legend="{{run}}, launch {{launch}}",
                ),
                make_panel(
                    "Learning rate",
                    "Is it what the schedule was meant to give?",
                    f"max by (run) (lustrain_learning_rate{{{RUN}}})",
                    "sci",
                    legend="{{run}}",
                ),
                make_panel(
                    "Skipped steps",
                    "Which updates were not applied?",
                    f"sum by (run) (increase(lustrain_steps_skipped_total{{{RUN}}}[$__rate_interval]))",
                    legend="{{run}}",
                ),
            ),
        ),
        Row(
            "How fast is it?",
            (
                make_panel(
                    "Throughput",
                    "Is it as fast as it was?",
                    f"sum by (run) (rate(lustrain_tokens_total{{{RUN}}}[$__rate_interval]))",
                    legend="{{run}}, tokens per second",
                    alerts=("ThroughputLow",),
                ),
                make_panel(
                    "MFU over time",
                    "Is it as well used as it was?",
                    f"max by (run) (lustrain_mfu_ratio{{{RUN}}})",
                    "percentunit",
                    legend="{{run}}",
                    absent=NO_PEAK,
                ),
                make_panel(
                    "Where the time goes",
                    "Seconds per second in batches (data), in saves that block the loop (blocked), in all else (compute).",
                    _PART,
                    "percentunit",
                    legend="{{run}} {{part}}",
                    alerts=("SaveBlocks",),
                ),
                make_panel(
                    "Share of data",
                    "Do batches take more than a twentieth of a step?",
                    _SHARE,
                    "percentunit",
                    legend="{{run}}",
                    alerts=("DataSlow",),
                ),
                Panel(
                    "Seconds of a step without its batches",
                    "Are all steps alike? Half of them, and 19 of 20, take less.",
                    tuple(
                        Query(
                            f"histogram_quantile({share}, sum by (run, le) (rate({_STEP}[$__rate_interval])))",
                            f"{{{{run}}}} {share}",
                        )
                        for share in (0.5, 0.95)
                    ),
                    "s",
                ),
                make_panel(
                    "Slowest ranks by their data",
                    "Is it one rank that all others wait for? Needs the recording rules of fab alert-rules.",
                    f"topk(5, {DATA_MEAN}{{{RUN}}})",
                    "s",
                    legend="{{run}}, rank {{rank}}",
                    alerts=("StragglerData",),
                ),
            ),
        ),
        Row(
            "What interrupted it?",
            (
                Panel(
                    "Launches and generations",
                    "Launches without a checkpoint gain nothing; generations that grow alone are rollbacks.",
                    (
                        Query(f"max by (run) (lustrain_launch{{{RUN}}})", "{{run}} launches"),
                        Query(f"max by (run) (lustrain_generation{{{RUN}}})", "{{run}} generations"),
                    ),
                    alerts=("LaunchesWithoutCommit",),
                ),
                make_panel(
                    "Interruptions",
                    "How often did a launch end on a notice, or without a word?",
                    f"max by (run) (lustrain_interruptions{{{RUN}}})",
                    legend="{{run}}",
                    alerts=("RunInterrupted",),
                ),
                make_panel(
                    "Until the capacity ends",
                    "Is a run done by then?",
                    f"min by (run) (lustrain_deadline_timestamp_seconds{{{RUN}}}) - time()",
                    "s",
                    legend="{{run}}",
                    alerts=("CapacityEnds",),
                ),
                make_panel(
                    "Ranks",
                    "Does it go on with fewer nodes than planned?",
                    f"max by (run) (lustrain_world_size{{{RUN}}})",
                    legend="{{run}}",
                ),
            ),
        ),
    ),
)
