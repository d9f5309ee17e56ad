"""Alert rules: each one watches metrics that exist, has a section in the runbook, fires when it should, and clears."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from invoke.context import Context as Invocation

from infra import tasks
from infra.plan.watch.alert_rules import ALERTS, RECORDINGS, render, rule_file, scale_times
from tests.conftest import require

DOCS = Path(__file__).parents[2] / "docs"
RUN = 'run="r",launch="1",rank="0"'
RANK_DATA = 'lustrain_rank_step_seconds_{kind}{{run="r",launch="1",rank="{rank}",part="data"}}'


def test_each_alert_has_a_section_in_the_runbook() -> None:
    titles = re.findall(r"^## (\w+)$", (DOCS / "runbook.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert titles == [alert.name for alert in ALERTS]
    assert all(alert.runbook.endswith(f"section {alert.name}") for alert in ALERTS)


def test_rule_file_is_yaml_with_each_name_once() -> None:
    assert yaml.safe_load(render()) == rule_file()
    [group] = rule_file()["groups"]
    names = [rule.get("alert") or rule["record"] for rule in group["rules"]]
    assert len(names) == len(set(names)) == len(ALERTS) + len(RECORDINGS)


def test_time_scale_changes_times_and_nothing_else() -> None:
    expression = 'max_over_time(a:mean10m{x="5m"}[1d:10m] offset 90s) > 0.85 * 3 * clamp_min(b, 120)'
    scaled = 'max_over_time(a:mean10m{x="5m"}[8640000ms:60000ms] offset 9000ms) > 0.85 * 3 * clamp_min(b, 12)'
    assert scale_times(expression, 0.1) == scaled
    rules = {rule.get("alert"): rule for rule in rule_file(0.1)["groups"][0]["rules"]}
    assert (rules["RunDown"]["for"], "for" in rules["SavesFailing"]) == ("90000ms", False)


def test_each_alert_has_a_case() -> None:
    assert set(CASES) == {alert.name for alert in ALERTS}


@dataclass(frozen=True)
class Case:
    """What a rule sees, a value a minute in promtool's notation; at minute `fires` it fires, at `before` and `cleared` not.

    `labels` are those of the alert beside its severity.
    """

    series: dict[str, str]
    fires: int
    cleared: int
    labels: dict[str, str] = field(default_factory=dict)
    before: int = 0


def _of_run(name: str, values: str, more: str = "") -> dict[str, str]:
    return {f"lustrain_{name}{{{RUN}{more}}}": values}


def _on_each_node(name: str, values: str, labels: str = "") -> dict[str, str]:
    """Two nodes of one cluster: what they both see is one alert."""
    return {f'lustrain_node_{name}{{instance="{node}",{labels}}}': values for node in ("a", "b")}


LAUNCH = {"run": "r", "launch": "1"}
RANK = {**LAUNCH, "rank": "0"}
STEPS = _of_run("step_seconds_sum", "500x90", ',part="compute"') | _of_run(
    "step_seconds_count", "50x90", ',part="compute"'
)
"""Fifty steps of ten seconds."""
CASES = {
    "RunDown": Case(
        # The first launch is lost at minute 20; the next one trains from minute 50 on.
        _of_run("step", "100+10x20 stale") | {'lustrain_step{run="r",launch="2",rank="0"}': "_x50 310+10x60"},
        40,
        55,
        {"run": "r"},
        before=34,
    ),
    "RunStalled": Case(_of_run("step_age_seconds", "5x9 20 55+60x4 5x20") | STEPS, 14, 20, RANK, before=10),
    "CheckpointOld": Case(
        _of_run("checkpoint_age_seconds", "0+60x20 0+60x20") | _of_run("checkpoint_interval_seconds", "300x60"),
        17,
        24,
        RANK,
        before=12,
    ),
    "SavesFailing": Case(_of_run("saves_failed_total", "0x5 1 2 3 3x60"), 8, 40, RANK, before=4),
    "LossNotFinite": Case(_of_run("loss", "2x4 NaN Inf 2x9"), 6, 8, RANK, before=3),
    "LossSpiked": Case(_of_run("loss", "2x60 4x20 2x60"), 72, 90, RANK, before=64),
    "ThroughputLow": Case(_of_run("tokens_per_second", "1000x89 700x60 1000x60"), 125, 200, {"run": "r"}, before=88),
    "DataSlow": Case(
        _of_run("step_seconds_sum", "0+1x30 31+10x40 431+1x60", ',part="data"')
        | _of_run("step_seconds_sum", "0+60x140", ',part="compute"'),
        60,
        110,
        LAUNCH,
        before=25,
    ),
    "SaveBlocks": Case(
        _of_run("step_seconds_sum", "0+0.1x60 6+3x60 186+0.1x120", ',part="blocked"')
        | _of_run("step_seconds_count", "0+1x250", ',part="blocked"'),
        118,
        220,
        LAUNCH,
        before=50,
    ),
    "StragglerData": Case(
        {
            RANK_DATA.format(kind=kind, rank=rank): values
            for rank in range(8)
            for kind, values in (
                ("count", "0+60x120"),
                ("sum", "0+0.6x20 12+60x40 2412+0.6x60" if rank == 3 else "0+0.6x120"),
            )
        },
        50,
        90,
        {**LAUNCH, "rank": "3"},
        before=15,
    ),
    "LaunchesWithoutCommit": Case(
        {
            f'lustrain_launch{{run="r",launch="{number}",rank="0"}}': f"_x{10 * number} {number}x9"
            for number in (1, 2, 3)
        }
        | {'lustrain_checkpoint_step{run="r",launch="1",rank="0"}': "40x100"},
        32,
        95,
        {"run": "r"},
        before=25,
    ),
    "RunInterrupted": Case(
        # The launch that is interrupted never shows it; the next one brings the count.
        _of_run("interruptions", "0x20 stale") | {'lustrain_interruptions{run="r",launch="2",rank="0"}': "_x40 1x60"},
        45,
        60,
        {"run": "r"},
        before=39,
    ),
    "CapacityEnds": Case(_of_run("deadline_timestamp_seconds", "90000x100 stale"), 62, 110, RANK, before=58),
    "EfaDropsPackets": Case(
        {'lustrain_node_efa_rx_drops_total{device="d"}': "0x9 0+5x20 100x30"}, 25, 45, {"device": "d"}, before=9
    ),
    "EfaPeerUnresponsive": Case(
        {'lustrain_node_efa_unresponsive_remote_events_total{device="d"}': "0x5 1x40"}, 8, 25, {"device": "d"}, before=4
    ),
    "GpuXid": Case(
        {
            'lustrain_node_gpu_xids_total{xid="79",action="REBOOT"}': "_x3 1x5 stale",
            'lustrain_node_gpu_xids_total{xid="31",action="NONE"}': "2x40",
        },
        5,
        12,
        {"xid": "79", "action": "REBOOT"},
        before=2,
    ),
    "GpuThrottled": Case(
        {
            'lustrain_node_gpu_throttled{gpu="0",reason="hw_slowdown"}': "0x4 1x12 0x9",
            'lustrain_node_gpu_throttled{gpu="0",reason="sw_power_cap"}': "1x40",
        },
        12,
        20,
        {"gpu": "0", "reason": "hw_slowdown"},
        before=7,
    ),
    "GpuRemapPending": Case({'lustrain_node_gpu_remap_pending{gpu="2"}': "0x3 1x5 0x9"}, 6, 12, {"gpu": "2"}, before=2),
    "GpuIdle": Case(
        {f'DCGM_FI_DEV_GPU_UTIL{{gpu="{gpu}",cluster="c"}}': "98x20 40x40 98x60" for gpu in range(2)}
        | {
            'DCGM_FI_DEV_GPU_UTIL{gpu="2",cluster="c"}': "0x120",
            f'lustrain_tokens_total{{{RUN},cluster="c"}}': "0+600x120",
        },
        45,
        80,
        {"cluster": "c"},
        before=20,
    ),
    "LustreFull": Case(_on_each_node("lustre_fullest_target_ratio", "0.85x5 0.86x9 0.5x9"), 12, 18, before=5),
    "LustreTargetLost": Case(
        _on_each_node("lustre_targets", "0x5 1x9 0x9", 'state="silent"')
        | _on_each_node("lustre_targets", "6x60", 'state="answering"'),
        12,
        18,
        before=5,
    ),
    "LustreDisconnected": Case(
        _on_each_node("lustre_connections", "_x5 1x9 stale", 'file_system="f",state="DISCONN"')
        | _on_each_node("lustre_connections", "5x60", 'file_system="f",state="FULL"')
        | _on_each_node("lustre_connections", "5x60", 'file_system="f",state="IDLE"'),
        12,
        20,
        before=5,
    ),
    "LustreSlow": Case(_on_each_node("lustre_timeouts_total", "0x5 0+3x20 60x40"), 15, 48, before=5),
    "ClockOff": Case({"lustrain_node_clock_offset_seconds": "0.0005x5 -0.002x9 0x9"}, 12, 18, before=5),
    "ScratchMissing": Case({"lustrain_node_scratch_mounted": "1x5 0x9 1x9"}, 12, 18, before=5),
    "NodeDrifted": Case(
        {
            'lustrain_node_settings{status="change"}': "0x5 2x20 0x9",
            'lustrain_node_settings{status="conflict"}': "0x60",
            'lustrain_node_settings{status="ok"}': "40x60",
        },
        23,
        30,
        before=18,
    ),
    "SlurmDown": Case({"lustrain_slurm_up": "1x5 0x9 1x9", "up": "1x60"}, 12, 18, before=5),
    "SlurmNodesOut": Case(
        {
            'lustrain_slurm_nodes{instance="a",state="drained"}': "0x5 1x20 0x9",
            'lustrain_slurm_nodes{instance="a",state="down",flag="not_responding"}': "0x5 2x20 stale",
            'lustrain_slurm_nodes{instance="a",state="idle"}': "4x60",
        },
        23,
        30,
        before=18,
    ),
    "NodeMetricsStale": Case(
        {'node_textfile_mtime_seconds{file="/x/lustrain.prom"}': "0x14 900+60x60"},
        13,
        18,
        {"file": "/x/lustrain.prom"},
        before=5,
    ),
    "NodeMissing": Case(
        {'up{instance="a",job="node"}': "1x5 0x20 1x9", 'up{instance="b",job="run"}': "0x40"},
        23,
        30,
        {"instance": "a", "job": "node"},
        before=18,
    ),
    "DiskFull": Case(
        {
            f'node_filesystem_{kind}{{mountpoint="{mount}"}}': values
            for mount, kind, values in (
                ("/scratch", "size_bytes", "100x40"),
                ("/scratch", "avail_bytes", "11x5 9x9 50x20"),
                ("/scratch", "readonly", "0x40"),
                ("/snap", "size_bytes", "100x40"),
                ("/snap", "avail_bytes", "0x40"),
                ("/snap", "readonly", "1x40"),
            )
        },
        12,
        18,
        {"mountpoint": "/scratch"},
        before=5,
    ),
}


@dataclass(frozen=True)
class Quiet:
    """What looks like a fault at a minute, and is none; with values at an interval of promtool's."""

    series: dict[str, str]
    minute: int
    interval: str = "1m"


FURTHER_CASES = {
    "NodeMissing": Case(  # of two nodes one vanishes, and another one comes
        {
            f'{name}{{instance="{node}"}}': values
            for name in ("up", "node_boot_time_seconds")
            for node, values in (("a", "1x60"), ("b", "1x5 stale"), ("c", "_x30 1x40"))
        },
        25,
        35,
        {"instance": "b"},
        before=18,
    ),
    "SlurmDown": Case(  # the machine goes with its controller
        {"lustrain_slurm_up": "1x5 stale _x9 1x9", "up": "1x5 0x10 1x9"}, 12, 18, before=5
    ),
    "CheckpointOld": Case(  # the first save is missing
        _of_run("checkpoint_age_seconds", "0+60x80 5x20") | _of_run("checkpoint_interval_seconds", "_x80 4805x20"),
        70,
        84,
        RANK,
        before=62,
    ),
    "RunStalled": Case(  # the first step hangs
        _of_run("step_age_seconds", "0+60x20 0x9")
        | _of_run("step_seconds_sum", "0x30", ',part="compute"')
        | _of_run("step_seconds_count", "0x30", ',part="compute"'),
        15,
        25,
        RANK,
        before=10,
    ),
    "LaunchesWithoutCommit": Case(  # nothing was ever committed, until the fourth launch does
        {
            f'lustrain_launch{{run="r",launch="{number}",rank="0"}}': f"_x{10 * number} {number}x9"
            for number in (1, 2, 3, 4)
        }
        | {
            f'lustrain_checkpoint_{name}{{run="r",launch="4",rank="0"}}': "_x45 40x9"
            for name in ("step", "interval_seconds")
        },
        32,
        46,
        {"run": "r"},
        before=25,
    ),
}
QUIET: dict[str, Quiet] = {
    "NodeMissing": Quiet(  # a new node is there before the old one goes
        {
            f'{name}{{instance="{node}"}}': values
            for name in ("up", "node_boot_time_seconds")
            for node, values in (("a", "1x80"), ("b", "1x30 stale"), ("c", "_x25 1x55"))
        },
        55,
    ),
    "SlurmDown": Quiet({"lustrain_slurm_up": "1x40", 'up{instance="n1"}': "0x40"}, 20),  # another machine is gone
    "SlurmNodesOut": Quiet(  # idle machines end one after the other, others are off, reboot or are worked on
        {
            f'lustrain_slurm_nodes{{state="{state}",flag="{flag}"}}': "2x60"
            for state, flag in (
                ("drained", "ending"),
                ("down", "ending"),
                ("down", "powered_off"),
                ("drained", "reboot_pending"),
                ("down", "maintenance"),
                ("idle", "not_responding"),
            )
        },
        40,
    ),
    "RunDown": Quiet(  # it was done, at a step after the last one that was scraped
        _of_run("step", "100+10x20 stale") | _of_run("done_step", "_x20 303 stale"),
        40,
    ),
    "CheckpointOld": Quiet(  # a resume off the grid of saves makes one interval short
        _of_run("checkpoint_interval_seconds", "600x20 stale")
        | {
            'lustrain_checkpoint_interval_seconds{run="r",launch="2",rank="0"}': "_x25 60x30",
            'lustrain_checkpoint_age_seconds{run="r",launch="2",rank="0"}': "_x25 0+60x9 0+60x9 0+60x9",
        },
        34,
    ),
    "SavesFailing": Quiet(_of_run("saves_failed_total", "0x40 1x60"), 35, interval="40s"),
    "LaunchesWithoutCommit": Quiet(  # the third launch makes the run's first commit
        {
            f'lustrain_launch{{run="r",launch="{number}",rank="0"}}': f"_x{10 * number} {number}x9"
            for number in (1, 2, 3)
        }
        | {
            f'lustrain_checkpoint_{name}{{run="r",launch="3",rank="0"}}': "_x30 40x9"
            for name in ("step", "interval_seconds")
        },
        35,
    ),
    "LustreDisconnected": Quiet(  # the target is lost, which LustreTargetLost says
        _on_each_node("lustre_connections", "1x40", 'file_system="f",state="DISCONN"')
        | _on_each_node("lustre_targets", "1x40", 'state="silent"'),
        20,
    ),
    "LossSpiked": Quiet(_of_run("loss", "3x60 100 3x60"), 66),  # one bad batch
    "GpuIdle": Quiet(  # a run starts again after minutes
        {
            'DCGM_FI_DEV_GPU_UTIL{gpu="0"}': "98x40 0x3 98x60",
            'lustrain_tokens_total{run="r",launch="1",rank="0"}': "0+600x40 stale",
            'lustrain_tokens_total{run="r",launch="2",rank="0"}': "_x44 0+600x60",
        },
        58,
    ),
    "LustreSlow": Quiet(  # a target was lost, and answers again
        _on_each_node("lustre_timeouts_total", "0x5 3x40")
        | _on_each_node("lustre_targets", "0x5 1x4 0x40", 'state="silent"'),
        16,
    ),
}
"""Where a rule that is a little wrong would fire."""


def promtool_tests(rules: Path) -> dict[str, Any]:
    """Return the cases in the form of `promtool test rules`
    (https://prometheus.io/docs/prometheus/latest/configuration/unit_testing_rules/)."""
    tests = []
    by_name = {alert.name: alert for alert in ALERTS}
    for name, case in [*CASES.items(), *FURTHER_CASES.items()]:
        alert = by_name[name]
        annotations = {"summary": alert.reason, "runbook": alert.runbook}
        firing = [{"exp_labels": {**case.labels, "severity": alert.severity}, "exp_annotations": annotations}]
        tests.append(_promtool_test(name, case.series, {case.before: [], case.fires: firing, case.cleared: []}))
    tests += [_promtool_test(name, one.series, {one.minute: []}, one.interval) for name, one in QUIET.items()]
    return {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}


def _promtool_test(
    name: str, series: dict[str, str], expected: dict[int, list[Any]], interval: str = "1m"
) -> dict[str, Any]:
    return {
        "interval": interval,
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": alerts} for minute, alerts in expected.items()
        ],
    }


def test_each_alert_fires_stays_quiet_and_clears(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    require(promtool, "promtool; fix: apt-get install prometheus")
    (tmp_path / "rules.yml").write_text(render(), encoding="utf-8")
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(promtool_tests(tmp_path / "rules.yml")), encoding="utf-8")
    done = subprocess.run(
        [str(promtool), "test", "rules", str(tmp_path / "tests.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_task_prints_the_rule_file(capsys: pytest.CaptureFixture[str]) -> None:
    tasks.alert_rules(Invocation())
    assert yaml.safe_load(capsys.readouterr().out) == rule_file()
    tasks.alert_rules(Invocation(), json=True)
    assert json.loads(capsys.readouterr().out) == rule_file()
