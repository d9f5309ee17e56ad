"""A node's metrics: what the facts say, in a form that Prometheus reads, under names that the docs explain."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infra.plan.watch.alert_rules import ALERTS
from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.host import TIMED_OUT, Done
from node_setup.agent.kinds import planner
from node_setup.agent.kinds.metrics_timer import TIMER, TIMER_UNIT, metrics_unit
from node_setup.agent.metrics.readings import EFA as EFA_COUNTERS
from node_setup.agent.metrics.readings import LUSTRE_PARAMETERS, readings
from node_setup.agent.metrics.text import GAUGE, Metric, Sample, render
from node_setup.agent.model import Remark, Remove, Request, Run, Write
from node_setup.agent.settings import allowed, catalog
from node_setup.agent.slurm.queue import Queue, collect
from node_setup.agent.slurm.scaler import ENDS
from node_setup.agent.slurm.watch import NOTICE
from tests.node_setup.agents import run
from tests.node_setup.kinds_facts import SETTINGS, applied, commands, machine, steps
from tests.node_setup.machines import DOCUMENT, MACHINES
from tests.node_setup.recorded_host import Machine, build, facts_from, recorded

DOCS = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
EFA = "/sys/class/infiniband/rdmap128s0/ports/1/hw_counters"
LUSTRE = """llite.xeo3rbev-ffff8c4d0cd43800.stats=
snapshot_time             1523008010.817348638 secs.nsecs
read_bytes                25673 samples [bytes] 1 3366225 145121869
write_bytes               13641 samples [bytes] 1 3366225 468230469 77
open                      12 samples [regs]
osc.xeo3rbev-OST0000-osc-ffff8c4d0cd43800.import=
import:
    name: xeo3rbev-OST0000-osc-ffff8c4d0cd43800
    state: FULL
    rpcs:
       inflight: 0
       timeouts: 3
osc.xeo3rbev-OST0001-osc-ffff8c4d0cd43800.import=
import:
    state: DISCONN
    rpcs:
       timeouts: 1
"""
"""Two storage targets in the form of lprocfs_import_seq_show; the counters are those of a message to lustre-discuss
(http://lists.lustre.org/pipermail/lustre-discuss-lustre.org/2018-April/015426.html)."""


def values(text: str) -> dict[str, float]:
    """Values by name and labels."""
    return {
        f"{sample.name.removeprefix('lustrain_node_')}{sorted(sample.labels.values()) or ''}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def planted(tmp_path: Path) -> dict[str, Any]:
    """Facts of a p5 with something wrong in each part."""
    node = MACHINES["p5"]()
    node.files |= {f"{EFA}/retrans_pkts": "42\n", f"{EFA}/rx_drops": "7\n"}
    node.programs[("lctl", "get_param")] = Done(0, LUSTRE, "")
    node.programs[("journalctl",)] = Done(0, recorded("xids.txt"), "")
    smi = node.programs[("nvidia-smi",)].out
    node.programs[("nvidia-smi",)] = Done(0, smi.replace("0x0000000000000001", "0x0000000000000044", 1), "")
    wanted = catalog.wanted_facts(catalog.load(), DOCUMENT)
    more = (*wanted.lustre_parameters, *LUSTRE_PARAMETERS)
    return facts_from(build(tmp_path, node), replace(wanted, lustre_parameters=more))


def test_each_fault_of_a_node_is_a_value(tmp_path: Path) -> None:
    rows = [{"status": status} for status in ("change", "ok", "ok")]
    found = values(render(readings(planted(tmp_path), rows)))
    expected = {
        "efa_retrans_pkts_total['rdmap128s0']": 42,
        "efa_retrans_pkts_total['rdmap129s0']": None,
        "efa_rx_drops_total['rdmap128s0']": 7,
        "efa_rx_drops_total['rdmap129s0']": 0,
        "lustre_read_bytes_total['xeo3rbev']": 145121869,
        "lustre_write_bytes_total['xeo3rbev']": 468230469,
        "lustre_connections['FULL', 'xeo3rbev']": 1,
        "lustre_connections['DISCONN', 'xeo3rbev']": 1,
        "lustre_timeouts_total['xeo3rbev']": 4,
        "gpu_xids_total['0000:01:00', '32', 'NONE', 'gpu']": 1,
        "gpu_xids_total['0000:3b:00', '79', 'REBOOT', 'gpu']": 1,
        "gpu_xids_total['0000:b3:00', '79', 'REBOOT', 'gpu']": 1,
        "gpu_xids_total['0000:c3:00.0', '20009', 'NONE', 'switch']": 1,
        "gpu_throttled['0', 'hw_thermal_slowdown']": 1,
        "gpu_throttled['0', 'hw_slowdown']": 0,
        "gpu_throttled['1', 'hw_thermal_slowdown']": 0,
        "clock_synchronised": 1,
        "scratch_mounted": 0,
        "settings['change']": 1,
        "settings['ok']": 2,
        "settings['failed']": 0,
        "unread_facts": 0,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "clock_offset_seconds" in found


def test_each_metric_of_a_node_stands_in_the_docs(tmp_path: Path) -> None:
    facts = planted(tmp_path)
    facts["efa"]["devices"][0]["counters"] |= dict.fromkeys(EFA_COUNTERS, 1)
    queue = Queue({("idle", ""): 1}, {"running": 1})
    names = {metric.name for metric in readings(facts, [], queue) if metric.samples}
    assert names == set(re.findall(r"^\| `(lustrain_(?:node|slurm)_\w+)`", DOCS, re.MULTILINE))


def test_mounts_of_one_file_system_are_summed() -> None:
    stats = "read_bytes 2 samples [bytes] 1 9 {}\n"
    reads = {
        f"llite.{mount}.stats": stats.format(total)
        for mount, total in (("ml-a-ffff8c4d0cd43800", 10), ("ml-a-ffff8c4d0cd44000", 5), ("ml-b-ffff8c4d0cd45000", 7))
    }
    osc = {f"osc.ml-{name}-OST0000-osc-ffff8c4d0cd43800.import": "    state: FULL\n" for name in "ab"}
    found = values(render(readings({"lustre": {"parameters": {"llite.*.stats": reads, "osc.*.import": osc}}}, [])))
    assert {
        name: found.get(name) for name in ("lustre_read_bytes_total['ml-a']", "lustre_read_bytes_total['ml-b']")
    } == {
        "lustre_read_bytes_total['ml-a']": 15,
        "lustre_read_bytes_total['ml-b']": 7,
    }
    assert [found.get(f"lustre_connections['FULL', 'ml-{name}']") for name in "ab"] == [1, 1]


def test_node_without_hardware_has_no_series_of_it() -> None:
    found = {metric.name for metric in readings({"errors": [{"where": "gpu", "why": "hangs"}]}, []) if metric.samples}
    assert found == {"lustrain_node_settings", "lustrain_node_unread_facts"}


PING = "Slurmctld(primary) at {} is {}\nSlurmctld(backup) at other is {}\n"
NODES = f"""n1 idle none
n1 idle none
n2 idle~ none
n3 down* Not responding
n4 mixed- none
n5 allocated+ none
n6 drained a fan is loud: n1 idle
n7 drained {ENDS}
n8 drained* {ENDS}
n9 draining {NOTICE}spot, terminate
"""
JOBS = "RUNNING\nRUNNING\nCOMPLETING\n"
ASKED = {
    ("scontrol", "ping"): Done(0, PING.format("head.example.com", "UP", "DOWN"), ""),
    ("sinfo",): Done(0, NODES, ""),
    ("squeue",): Done(0, JOBS, ""),
}


def slurm_values(tmp_path: Path, folder: str = "", unit: str | None = "active", **changed: Done) -> dict[str, float]:
    """What the machine `head` writes of Slurm, whose daemon's unit is in a state or missing; programs of `changed` answer
    otherwise."""
    known = {(f"{folder}{name}", *more): changed.get(name, done) for (name, *more), done in ASKED.items()}
    services = {"slurmctld.service": unit} if unit else {"another.service": "active"}
    host = build(tmp_path, Machine({"/proc/sys/kernel/hostname": "head\n"}, programs=known, services=services))
    found = {metric.name: metric.samples for metric in readings({}, [], collect(host)) if "_slurm_" in metric.name}
    return {
        f"{name.removeprefix('lustrain_slurm_')}{sorted(sample.labels.values()) or ''}": sample.value
        for name, samples in found.items()
        for sample in samples
    }


@pytest.mark.parametrize("folder", ["", "/opt/slurm/bin/"])
def test_controller_counts_nodes_once_and_jobs(tmp_path: Path, folder: str) -> None:
    assert slurm_values(tmp_path, folder) == {
        "up": 1,
        "nodes['', 'idle']": 1,
        "nodes['idle', 'powered_off']": 1,
        "nodes['down', 'not_responding']": 1,
        "nodes['mixed', 'planned']": 1,
        "nodes['', 'allocated']": 1,
        "nodes['', 'drained']": 1,
        "nodes['drained', 'ending']": 2,
        "nodes['draining', 'ending']": 1,
        "jobs['running']": 2,
        "jobs['completing']": 1,
        "jobs['pending']": 0,
    }


def test_standby_controller_answers_for_a_dead_primary(tmp_path: Path) -> None:
    assert slurm_values(tmp_path, scontrol=Done(0, PING.format("head", "DOWN", "UP"), ""))["up"] == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"scontrol": Done(0, PING.format("head", "DOWN", "DOWN"), "")},
        {"scontrol": Done(TIMED_OUT, "", "")},
        {"sinfo": Done(1, "", "slurm_load_partitions: Unable to contact slurm controller")},
        {"squeue": Done(TIMED_OUT, "", "")},
    ],
)
def test_slurm_that_does_not_answer_has_no_numbers(tmp_path: Path, changed: dict[str, Done]) -> None:
    assert slurm_values(tmp_path, **changed) == {"up": 0}


@pytest.mark.parametrize(
    "changed",
    [
        {"unit": None},
        {"unit": "failed", "scontrol": Done(TIMED_OUT, "", "")},
        {"scontrol": Done(0, PING.format("another", "UP", "UP"), "")},
        {"scontrol": Done(1, "", "scontrol: fatal: Could not establish a configuration source")},
    ],
)
def test_node_that_is_no_controller_says_nothing_of_slurm(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert slurm_values(tmp_path, **changed) == {}


def test_labels_are_escaped_and_names_come_once() -> None:
    metric = Metric("a", GAUGE, "text", [Sample(1.5, {"name": 'a"b\\c\nd'})])
    [family] = text_string_to_metric_families(render([metric]))
    assert [(sample.labels, sample.value) for sample in family.samples] == [({"name": 'a"b\\c\nd'}, 1.5)]
    with pytest.raises(ValueError, match="twice"):
        render([metric, metric])


@pytest.mark.slow
def test_agent_replaces_the_file_whole(agent: Path, tmp_path: Path) -> None:
    (tmp_path / "lustrain.prom").write_text("lustrain_old 1\n")
    done = run(agent, "metrics", "--textfile", str(tmp_path))
    assert (done.returncode, json.loads(done.stdout)["textfile"]) == (0, f"{tmp_path}/lustrain.prom")
    found = values((tmp_path / "lustrain.prom").read_text())
    assert sum(value for name, value in found.items() if name.startswith("settings[")) >= len(SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["lustrain.prom"]
    # node_exporter runs as a user of its own.
    assert (tmp_path / "lustrain.prom").stat().st_mode & 0o777 == 0o644


@pytest.mark.slow
def test_folder_that_is_not_there_is_one_line(agent: Path, tmp_path: Path) -> None:
    done = run(agent, "metrics", "--textfile", str(tmp_path / "none"))
    assert (done.returncode, len(done.stderr.splitlines()), list(tmp_path.iterdir())) == (1, 1, [])
    assert "--textfile = " in json.loads(done.stdout)["errors"][0]["why"]


SETTING = replace(SETTINGS["agent.metrics"], value="/srv/textfile")
UNITS = {owned.METRICS_UNIT: metrics_unit("/srv/textfile"), owned.METRICS_TIMER: TIMER_UNIT}


def test_timer_is_written_enabled_started_and_then_in_order() -> None:
    facts = machine()
    said = planner("metrics-timer")([SETTING], frozenset({SETTING.id}), facts, Request())
    writes = {
        action.path: action.content for step in steps(said) for action in step.actions if isinstance(action, Write)
    }
    assert writes == UNITS
    assert commands(said)[-2:] == [f"systemctl enable {TIMER}", f"systemctl start {TIMER}"]
    again = planner("metrics-timer")([SETTING], frozenset({SETTING.id}), applied(facts, said), Request())
    assert [line.status for line in again if isinstance(line, Remark)] == [Status.OK]
    assert len(again) == 1


def test_stale_file_is_older_than_the_longest_tick() -> None:
    (stale,) = (int(rule.expression.rpartition(">")[2]) for rule in ALERTS if rule.name == "NodeMetricsStale")
    [minutes] = re.findall(r"^OnUnitInactiveSec=(\d+)min$", TIMER_UNIT, re.MULTILINE)
    [longest] = re.findall(r"^TimeoutStartSec=(\d+)$", metrics_unit("/x"), re.MULTILINE)
    assert int(minutes) * 60 + int(longest) < stale


def test_timer_that_nobody_asks_for_is_stopped_and_removed() -> None:
    files = {path: {"content": content, "mode": "0644"} for path, content in UNITS.items()}
    said = planner("metrics-timer")([], frozenset(), machine(files=files), Request())
    actions = [action for step in steps(said) for action in step.actions]
    assert actions.index(Run(("systemctl", "stop", TIMER))) < actions.index(Remove(owned.METRICS_TIMER))
    assert Remove(owned.METRICS_UNIT) in actions


@pytest.mark.parametrize("folder", ["relative", "/a b", "/a%n", "/a\nExecStart=/bin/x", "/a'", "/a;b", "/"])
def test_folder_that_a_unit_would_read_otherwise_is_refused(folder: str) -> None:
    assert not allowed.accepts(SETTING.allowed, folder)
    assert allowed.accepts(SETTING.allowed, "/var/lib/node_exporter/text-files.d")
