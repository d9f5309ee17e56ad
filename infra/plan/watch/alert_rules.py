"""Alert rules for Prometheus as data: what is wrong, for how long, why that matters, and where the runbook says what to do.

Metrics are those of docs/metrics.md; thresholds are the project's own unless a source stands beside them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import yaml

RUNBOOK = "docs/runbook.md in the Lustrain repository"
"""The page by its name: where a copy of the repository is served, each team knows for itself."""
GROUP = "lustrain"

PER_RANK = "sum by (run, launch, rank)"
PER_LAUNCH = "sum by (run, launch)"
DATA_MEAN, DATA_DEVIATION = "lustrain:rank_data_seconds:mean10m", "lustrain:rank_data_seconds:deviation"
_MEDIAN_DATA = f"quantile by (run, launch) (0.5, {DATA_MEAN})"
_STEPS_ENDED = f'{PER_RANK} (lustrain_step_seconds_count{{part="compute"}})'
_LAST_STEP = "max by (run) (last_over_time(lustrain_step[1d]))"
_LONGEST_INTERVAL = "max by (run) (max_over_time(lustrain_checkpoint_interval_seconds[6h]))"
OF_ALL_NODES = "by (cluster, job)"
"""One alert for what all nodes of a scrape job see of a shared file system; `cluster` is the usual label where one Prometheus
has several clusters."""
_NODES = "count by (cluster, job) (node_boot_time_seconds)"
"""Nodes that answer. A node that the discovery drops has no `up` left, so it is counted instead: the one in its place makes up
for it. A new node that is there before the old one goes is no node more: only what lasted counts."""
_LASTING_NODES = f"max_over_time(min_over_time({_NODES}[20m:1m])[1h:1m])"
_LOST_TARGETS = 'lustrain_node_lustre_targets{state=~"silent|inactive|read_only"}'
_TARGETS_LOST = f"max {OF_ALL_NODES} ({_LOST_TARGETS}) > 0"

SHORTEST_AGE_S = 60
"""No share, count or factor in the expressions is a whole number from here on: those are all ages."""
_TIMES = re.compile(r"""(?<![\w."])(\d+)([smhd]?)(?![\w."])""")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True)
class Recording:
    """A series that Prometheus computes for the alerts."""

    name: str
    expression: str


@dataclass(frozen=True)
class Alert:
    """Fires when `expression` has had a value for `minutes`; `page` wakes a person, `ticket` waits for the day."""

    name: str
    expression: str
    minutes: int
    severity: Literal["page", "ticket"]
    reason: str

    @property
    def runbook(self) -> str:
        return f"{RUNBOOK}, section {self.name}"


RECORDINGS = (
    Recording(
        DATA_MEAN,
        f'{PER_RANK} (rate(lustrain_rank_step_seconds_sum{{part="data"}}[10m]))'
        f' / {PER_RANK} (rate(lustrain_rank_step_seconds_count{{part="data"}}[10m]))',
    ),
    Recording(DATA_DEVIATION, f"abs({DATA_MEAN} - on (run, launch) group_left () {_MEDIAN_DATA})"),
)

ALERTS = (
    Alert(
        "RunDown",
        f"{_LAST_STEP} unless on (run) lustrain_step"
        f" unless on (run) ({_LAST_STEP} <= on (run) max by (run) (last_over_time(lustrain_done_step[1d])))",
        15,
        "page",
        "the run has trained within the last day, is not done, and for a quarter of an hour nothing trains it",
    ),
    Alert(
        "RunStalled",
        "lustrain_step_age_seconds > on (run, launch, rank) group_left () clamp_min("
        f'3 * {PER_RANK} (lustrain_step_seconds_sum{{part!="blocked"}})'
        f" / {_STEPS_ENDED}, 60)"
        f" or (lustrain_step_age_seconds > 600 unless on (run, launch, rank) ({_STEPS_ENDED} > 0))",
        2,
        "page",
        "a step takes three times as long as this launch's steps do and a minute at least, or the first one ten minutes",
    ),
    Alert(
        "CheckpointOld",
        f"lustrain_checkpoint_age_seconds > on (run) group_left () clamp_min(2 * {_LONGEST_INTERVAL}, 120)"
        f" or (lustrain_checkpoint_age_seconds > 3600 unless on (run) {_LONGEST_INTERVAL})",
        5,
        "page",
        "the newest checkpoint is older than two intervals, or none was made in an hour: a lost node costs all since then",
    ),
    Alert(
        "SavesFailing",
        # A single failure is extrapolated to a little more than 1.
        "increase(lustrain_saves_failed_total[15m]) > 1.5",
        0,
        "page",
        "saves fail one after the other; the run stops when they do so for checkpoint.longest_failing_s",
    ),
    Alert(
        "LossNotFinite",
        "lustrain_loss != lustrain_loss or abs(lustrain_loss) == Inf",
        0,
        "page",
        "the newest step's loss is no number, and by bad_loss.action = skip the run goes on without its update",
    ),
    Alert(
        "LossSpiked",
        # A loss that may be negative has no half as much again. No single batch moves a median.
        "quantile_over_time(0.5, lustrain_loss[5m]) > 1.5 * (quantile_over_time(0.5, lustrain_loss[1h]) > 0)",
        5,
        "ticket",
        "the loss has been half as high again as its median of an hour, for longer than a single bad batch makes it",
    ),
    Alert(
        "ThroughputLow",
        "max by (run) (avg_over_time(lustrain_tokens_per_second[15m]))"
        " < 0.8 * max by (run) (max_over_time(avg_over_time(lustrain_tokens_per_second[1h])[1d:10m]))",
        15,
        "ticket",
        "the run is a fifth slower than in its best hour of the last day",
    ),
    Alert(
        "DataSlow",
        f'{PER_LAUNCH} (rate(lustrain_step_seconds_sum{{part="data"}}[15m]))'
        f' / {PER_LAUNCH} (rate(lustrain_step_seconds_sum{{part=~"data|compute"}}[15m])) > 0.05',
        15,
        "ticket",
        "more than a twentieth of each step goes into waiting for batches",
    ),
    Alert(
        "SaveBlocks",
        f'{PER_LAUNCH} (rate(lustrain_step_seconds_sum{{part="blocked"}}[1h]))'
        f' / {PER_LAUNCH} (rate(lustrain_step_seconds_count{{part="blocked"}}[1h])) > 1',
        0,
        "ticket",
        "a save stops the loop for more than a second",
    ),
    Alert(
        "StragglerData",
        f"({DATA_MEAN} - on (run, launch) group_left () {_MEDIAN_DATA}) > on (run, launch) group_left ()"
        f" clamp_min(5 * quantile by (run, launch) (0.5, {DATA_DEVIATION}), 0.05)",
        10,
        "ticket",
        "of three ranks or more, one waits for its batches five median absolute deviations longer than the median rank, and all"
        " wait for it",
    ),
    Alert(
        "LaunchesWithoutCommit",
        "(max by (run) (max_over_time(lustrain_launch[1h])) - min by (run) (min_over_time(lustrain_launch[1h])) > 1)"
        " unless on (run) (max by (run) (max_over_time(lustrain_checkpoint_step[1h]))"
        " > min by (run) (min_over_time(lustrain_checkpoint_step[1h])))"
        # A launch has an interval from its first commit on, also where that is the run's first.
        " unless on (run) max_over_time(lustrain_checkpoint_interval_seconds[1h])",
        0,
        "page",
        "the run has started three times within an hour and committed nothing",
    ),
    Alert(
        "RunInterrupted",
        # The launch that is interrupted seldom lives until the next scrape; the launch after it has the new count.
        "max by (run) (lustrain_interruptions) > max by (run) (max_over_time(lustrain_interruptions[1d] offset 15m))",
        0,
        "ticket",
        "a launch ended on a notice or was lost; this alert comes with the launch after it, and lasts a quarter of an hour",
    ),
    Alert(
        "CapacityEnds",
        "lustrain_deadline_timestamp_seconds - time() < 86400",
        0,
        "ticket",
        "the block, plan or reservation that the run is on ends within a day",
    ),
    Alert(
        "EfaDropsPackets",
        "rate(lustrain_node_efa_rx_drops_total[5m]) > 0",
        10,
        "ticket",
        "an EFA device drops packets that it received",
    ),
    Alert(
        "EfaPeerUnresponsive",
        "increase(lustrain_node_efa_unresponsive_remote_events_total[10m]) > 0",
        0,
        "ticket",
        "a peer no longer answers over EFA",
    ),
    Alert(
        "GpuXid",
        'lustrain_node_gpu_xids_total{action!="NONE"} > 0',
        0,
        "page",
        "since the boot a GPU or a switch has had an error that calls for a reboot or another node",
    ),
    Alert(
        "GpuThrottled",
        'lustrain_node_gpu_throttled{reason=~"hw_.*"} == 1',
        5,
        "ticket",
        "heat or power brakes hold a GPU's clocks down",
    ),
    Alert(
        "GpuRemapPending",
        "lustrain_node_gpu_remap_pending == 1",
        0,
        "ticket",
        "memory rows of a GPU wait for a reset",
    ),
    Alert(
        "GpuIdle",
        # A GPU that did nothing at all has no run, or one that starts. The pause of a new launch, and the windows that still
        # see it, are shorter than what the alert waits for.
        "avg by (cluster) (avg_over_time(DCGM_FI_DEV_GPU_UTIL[5m]) > 0) / 100 < 0.9"
        " and on (cluster) count by (cluster) (rate(lustrain_tokens_total[5m]) > 0)",
        15,
        "ticket",
        "the GPUs that are in use compute for less than nine tenths of the time while a run trains",
    ),
    Alert(
        "LustreFull",
        f"max {OF_ALL_NODES} (lustrain_node_lustre_fullest_target_ratio) > 0.85",
        5,
        "page",
        "the fullest storage target is 85 % full; writes to it fail when it is full, though others have room",
    ),
    Alert(
        "LustreTargetLost",
        _TARGETS_LOST,
        5,
        "page",
        "a target of Lustre does not answer, is switched off, or takes no writes",
    ),
    Alert(
        "LustreDisconnected",
        # A target that is lost breaks the connections to it too: LustreTargetLost pages for both.
        f'count {OF_ALL_NODES} (sum without (state, file_system) (lustrain_node_lustre_connections{{state!~"FULL|IDLE"}}) > 0)'
        f" unless on (cluster, job) ({_TARGETS_LOST})",
        5,
        "page",
        "so many nodes have lost connections to storage targets, which themselves answer",
    ),
    Alert(
        "LustreSlow",
        # What timed out while a target was lost is still in the window when it answers again.
        f"count {OF_ALL_NODES} (increase(lustrain_node_lustre_timeouts_total[15m]) > 0)"
        f" unless on (cluster, job) (max {OF_ALL_NODES} (max_over_time({_LOST_TARGETS}[15m])) > 0)",
        5,
        "ticket",
        "requests of so many nodes to storage targets time out, though all targets answer",
    ),
    Alert(
        "ClockOff",
        "abs(lustrain_node_clock_offset_seconds) > 0.001 or lustrain_node_clock_synchronised == 0",
        5,
        "ticket",
        "the clock is off by more than a millisecond, or follows no source",
    ),
    Alert(
        "ScratchMissing",
        "lustrain_node_scratch_mounted == 0",
        5,
        "ticket",
        "the node has instance store that is not mounted",
    ),
    Alert(
        "NodeDrifted",
        'sum without (status) (lustrain_node_settings{status=~"change|conflict|failed"}) > 0',
        15,
        "ticket",
        "settings of the node differ from what the cluster wants",
    ),
    Alert(
        "SlurmDown",
        # A machine that is gone writes no 0.
        "lustrain_slurm_up == 0 or up == 0 and on (instance, job) last_over_time(lustrain_slurm_up[1d])",
        5,
        "page",
        "Slurm's controller does not answer, or its machine is gone: no job starts, and a lost one is not started again",
    ),
    Alert(
        "SlurmNodesOut",
        # Other flags say why it is meant so: the machine ends, is off, comes up or reboots, or somebody works on it. A node
        # that is gone is deleted after ten minutes (GONE_AFTER_S of node_setup/agent/slurm/watch.py). Two controllers both
        # count all.
        f"max {OF_ALL_NODES} (sum by (cluster, job, instance) ("
        'lustrain_slurm_nodes{state=~"down|drained|fail|inval",flag=~"|not_responding"})) > 0',
        15,
        "ticket",
        "so many nodes of Slurm take no jobs and are billed: they are drained, down, or have less than they should",
    ),
    Alert(
        "NodeMetricsStale",
        'time() - node_textfile_mtime_seconds{file=~".*lustrain[.]prom"} > 300',
        5,
        "ticket",
        "the agent has not written the node's metrics for five minutes",
    ),
    Alert(
        "NodeMissing",
        # Of a node that never came up only the job says that it is one: `node`, as on the monitor and in docs/metrics.md.
        'up{job="node"} == 0 or up == 0 and on (instance, job) last_over_time(node_boot_time_seconds[1d])'
        " or (last_over_time(node_boot_time_seconds[1h]) unless on (instance, job) up"
        f" unless on (cluster, job) {_NODES} >= {_LASTING_NODES})",
        15,
        "ticket",
        "a node does not answer for longer than a boot takes, or it is gone and within an hour none has come in its place",
    ),
    Alert(
        "DiskFull",
        # Lustre has alerts of its own; what is mounted read-only is full by nature.
        '1 - node_filesystem_avail_bytes{fstype!="lustre"} / node_filesystem_size_bytes > 0.9'
        " unless node_filesystem_readonly == 1",
        5,
        "ticket",
        "a file system of the node is 90 % full, like its root or its scratch",
    ),
)


def rule_file(time_scale: float = 1.0) -> dict[str, Any]:
    """Return the rules in the form of Prometheus's rule files
    (https://prometheus.io/docs/prometheus/latest/configuration/alerting_rules/).

    `time_scale` multiplies every duration, window and age; the rehearsal and tests have no quarter of an hour to wait.
    """
    recordings = [{"record": one.name, "expr": scale_times(one.expression, time_scale)} for one in RECORDINGS]
    return {"groups": [{"name": GROUP, "rules": [*recordings, *(_rule(alert, time_scale) for alert in ALERTS)]}]}


@cache
def render(time_scale: float = 1.0) -> str:
    """Return the rule file as YAML."""
    return yaml.safe_dump(rule_file(time_scale), sort_keys=False, width=10_000)


def scale_times(expression: str, scale: float) -> str:
    """Return an expression with its durations times `scale`, and its whole numbers from 60 on, which are ages in seconds."""
    return expression if scale == 1 else _TIMES.sub(lambda match: _scaled(int(match[1]), match[2], scale), expression)


def _scaled(number: int, unit: str, scale: float) -> str:
    if unit:
        return _duration(number * _UNIT_S[unit] * scale)
    return str(number) if number < SHORTEST_AGE_S else f"{number * scale:g}"


def _duration(seconds: float) -> str:
    """Write a time for Prometheus, which takes whole milliseconds and none of 0."""
    return f"{max(1, round(1000 * seconds))}ms"


def _rule(alert: Alert, time_scale: float) -> dict[str, Any]:
    lasts = f"{alert.minutes}m" if time_scale == 1 else _duration(60 * alert.minutes * time_scale)
    return {
        "alert": alert.name,
        "expr": scale_times(alert.expression, time_scale),
        **({"for": lasts} if alert.minutes else {}),
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.reason, "runbook": alert.runbook},
    }
