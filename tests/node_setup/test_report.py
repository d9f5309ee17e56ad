"""What a run came to: exit codes and their precedence, the table, what stands under it, and one JSON object."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lustrain.problem import DIFFERS
from node_setup import report
from node_setup.answers import parse
from node_setup.fleet.faults import HOST_KEY, LOGIN, LOST, NOT_BEGUN, STOPPED, SUDO, TIMEOUT, UNREACHABLE
from node_setup.fleet.hosts import Node, Route
from node_setup.fleet.pool import ANSWERED, Outcome
from node_setup.fleet.protocol import Traffic


def row(setting: str, status: str, why: str = "", **more: Any) -> dict[str, Any]:
    return {"setting": setting, "status": status, "why": why, "part": None, "target": None, "found": None,
            "wanted": None, "needs": "", "severity": "should", **more}  # fmt: skip


def result(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"version": 1, "agent": "ab", "profile": "cpu", "rows": list(rows), "refused": None, "reboot": [],
            "lint": [], "unplanned": [], "errors": [], **more}  # fmt: skip


def answered(name: str, status: int = 0, *rows: dict[str, Any], **more: Any) -> Outcome:
    return Outcome(Node(name, name), ANSWERED, status=status, answer=parse(result(*rows, **more)), seconds=0.5)


def bad(name: str, kind: str) -> Outcome:
    return Outcome(Node(name, name), kind, "why it is so", "what to do")


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([], 0),
        ([answered("a")], 0),
        ([answered("a"), answered("b", 2)], 4),
        ([answered("a", 2), bad("b", UNREACHABLE)], 3),
        ([answered("a", 2), bad("b", UNREACHABLE), answered("c", 1)], 1),
        ([answered("a", 4)], 1),
        ([bad("a", LOGIN)], 3),
        ([bad("a", HOST_KEY)], 3),
        ([bad("a", SUDO)], 1),
        ([bad("a", TIMEOUT)], 1),
        ([bad("a", LOST), bad("b", UNREACHABLE)], 1),
        ([answered("a"), bad("b", NOT_BEGUN)], 1),
        ([answered("a", 77)], 1),
    ],
)
def test_exit_code_is_the_worst_nodes(outcomes: list[Outcome], code: int) -> None:
    assert report.exit_code(outcomes) == code


def test_a_table_counts_by_node_and_tells_what_changed_under_it() -> None:
    changed = row("sysctl.a", "changed", "shards", part="runtime", target="/proc/a", found="1", wanted="2")
    waits, left = row("kernel.b", "reboot", "in place"), row("z", "skipped", "no GPU")
    read_only, opt_in = row("x", "failed", "read-only"), row("w", "skipped", 'opt-in: name it "on"')
    outcomes = [
        answered("n1", 0, row("x", "ok"), row("y", "ok"), changed, left, waits, reboot=["kernel.b: in place"]),
        answered("n2", 1, read_only, left, row("v", "skipped", 'opt-in: name it "on"'), opt_in),
        bad("n3", UNREACHABLE),
    ]
    assert report.tune_lines(outcomes, check=False) == [
        "node  profile  settings  ok  changed  skipped  failed  reboot",
        "n1    cpu             5   2        1        1       0       1",
        "n2    cpu             4   0        0        3       1       0  failed",
        "n3    -               -   -        -        -       -       -  unreachable",
        "",
        "n1:",
        "  changed  sysctl.a (runtime) /proc/a: 1 → 2: shards",
        "  reboot   kernel.b: in place",
        "",
        "n2:",
        "  failed   x: read-only",
        "",
        "n3:",
        "  unreachable: why it is so; fix: what to do",
        "",
        "skipped:",
        "  no GPU: z",
        "  opt-in: v, w (n2)",
        "",
        "3 nodes: 1 in order, 1 failed, 1 unreachable; n1 needs a reboot: fab node-reboot",
    ]


def test_check_counts_changes_and_reports_differs() -> None:
    lines = report.tune_lines([answered("n1", 2, row("a", "change", wanted="2"))], check=True)
    assert lines[0].split() == ["node", "profile", "settings", "ok", "to", "change", "skipped", "failed", "reboot"]
    assert lines[1].split() == ["n1", "cpu", "1", "0", "1", "0", "0", "0", "differs"]
    assert "  change   a: nothing → 2" in lines
    assert lines[-1] == "1 node: 1 differs"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["ok", "skipped", "change", "failed", "unknown"]))))
def test_a_setting_of_many_parts_is_counted_once_as_its_worst(rows: list[tuple[str, str]]) -> None:
    lines = report.tune_lines([answered("n1", 2, *(row(name, status) for name, status in rows))], check=True)
    total, *parts = map(int, lines[1].split()[2:-1])
    assert total == sum(parts) == len({name for name, _ in rows})
    assert parts[3] == len({name for name, status in rows if status in ("failed", "unknown")})
    assert parts[2] == len({name for name, _ in rows} - {name for name, status in rows if status != "skipped"})


def test_settings_that_are_left_out_for_one_reason_are_one_line() -> None:
    rows = [row(f"gpu.{name}", "skipped", "for efa-gpu; this node is cpu") for name in "abcdef"]
    lines = report.tune_lines([answered("n1", 0, *rows, row("x", "skipped", "turned off"))], check=False)
    assert lines[-5:-1] == [
        "skipped:",
        "  for efa-gpu; this node is cpu: gpu.a, gpu.b, gpu.c, gpu.d and 2 more",
        "  turned off: x",
        "",
    ]


@pytest.mark.parametrize(
    ("outcome", "word", "line"),
    [
        (answered("n1", 4, refused="a job runs; fix: wait"), "refused", "  refused: a job runs; fix: wait"),
        *((bad("n1", kind), kind, f"1 node: 1 {kind}") for kind in (STOPPED, NOT_BEGUN, TIMEOUT)),
    ],
)
def test_untuned_node_has_one_word_in_row_and_details(outcome: Outcome, word: str, line: str) -> None:
    lines = report.tune_lines([outcome], check=False)
    assert (lines[1].endswith(word), line in lines) == (True, True)


def test_findings_that_nodes_share_stand_once() -> None:
    finding = {"where": "/etc/nccl.conf", "line": 3, "name": "NCCL_PROTO", "value": "simple", "why": "replaces the plugin's",
               "fix": "remove it", "harm": "harmful"}  # fmt: skip
    nodes = [answered(name, 0, lint=[finding] * (name != "n3")) for name in ("n1", "n2", "n3")]
    line = "  harmful: NCCL_PROTO=simple in /etc/nccl.conf:3: replaces the plugin's; fix: remove it (n1, n2)"
    assert report.tune_lines(nodes, check=False)[-3:-1] == [line, ""]


@given(st.text(), st.text())
def test_foreign_text_cannot_move_the_cursor_or_make_lines(why: str, found: str) -> None:
    changed = row("a", "changed", why, found=found, wanted="2")
    lines = report.tune_lines([answered("n1", 0, changed, row("s", "skipped", why))], check=False)
    assert all(one.isprintable() for line in lines for one in line)


def test_json_is_one_object_with_everything_and_no_way_in() -> None:
    outcome = replace(
        answered("n1", 2, row("a", "change")),
        node=Node("n1", "10.0.0.1", "train", "i-1", route=Route("ubuntu", 22, "/home/me/.ssh/secret-key")),
        traffic=Traffic(1, 400, 9000),
    )
    said = report.as_json("node-tune", [outcome, bad("n2", UNREACHABLE)], 3, cluster="c", notes=[], check=True)
    assert json.loads(json.dumps(said)) == said
    assert (said["version"], said["command"], said["exit"], said["check"]) == (1, "node-tune", 3, True)
    first, second = said["nodes"]
    assert (first["name"], first["outcome"], first["round_trips"], first["sent"]) == ("n1", "answered", 1, 400)
    assert first["result"]["rows"][0]["setting"] == "a"
    assert (second["outcome"], second["why"], second["result"]) == ("unreachable", "why it is so", None)
    assert "secret-key" not in json.dumps(said)


FACTS = {
    "version": 1, "os": {"id": "ubuntu", "version": "22.04"}, "kernel": {"release": "6.8"}, "cpu": {"count": 192},
    "memory": {"gib": 1999.6}, "instance": {"type": "p5.48xlarge"}, "group": "train", "jobs": [],
    "gpu": {"devices": [{}] * 8}, "efa": {"devices": []}, "lustre": {"mounts": None},
}  # fmt: skip


def test_facts_are_a_line_per_node_with_dashes_for_unknown() -> None:
    said = {"n1": parse(FACTS), "n2": parse({"version": 1})}
    known = [replace(answered(name), answer=answer) for name, answer in said.items()]
    lines = report.facts_lines([*known, bad("n3", LOGIN)])
    assert " ".join(lines[1].split()) == "n1 train p5.48xlarge ubuntu 22.04 6.8 192 2000 8 0 - 0"
    assert lines[2].split() == ["n2", *["-"] * 10]
    told = "  login refused: why it is so; fix: what to do"
    assert lines[-4:] == ["n3:", told, "", "3 nodes: 2 in order, 1 login refused"]


def verified(name: str, ready: bool, drain: str | None = None, **digest: Any) -> Outcome:
    check = {"check": "efa-devices", "status": "ok" if ready else "failed", "why": "30 of 32", "found": "30"}
    said = {
        "version": 1,
        "ready": ready,
        "drain": drain,
        "results": [{**check, "expected": "32"}],
        "facts_digest": digest,
    }
    return Outcome(Node(name, name, "train"), ANSWERED, status=0 if ready else 2, answer=parse(said))


def test_verify_reports_unready_drained_and_differing_nodes() -> None:
    reason = "lustrain: efa-devices: 30 of 32; action=REPLACE"
    outcomes = [verified(f"n{number}", True, kernel="6.8") for number in range(3)]
    outcomes += [verified("n3", False, reason, kernel="6.5"), bad("n4", UNREACHABLE)]
    found = report.differences(outcomes)
    lines = report.verify_lines(outcomes, found)
    assert lines[4].split() == ["n3", "no", "1", "1", *reason.split()]
    assert lines[5].split()[:2] == ["n4", "unreachable"]
    assert "  failed   efa-devices: 30 of 32 (found 30, expected 32)" in lines
    assert "  train: kernel: n3: 6.5; most have 6.8" in lines
    assert lines[-1] == "5 nodes: 3 ready, 1 not ready, 1 unreachable"
    assert report.drain_lines(outcomes) == [f"n3 {reason}"]
    assert found[0].hosts == {"n3": "6.5"}


def test_nodes_that_need_the_same_are_told_once() -> None:
    said = [(f"n{number}", ["drift a"]) for number in range(6)] + [("m", ["drift b"]), ("fine", [])]
    assert report.shared_blocks(said) == ["", "n0, n1, n2, n3 and 2 more:", "  drift a", "", "m:", "  drift b"]


def test_what_else_a_run_came_to_counts_too() -> None:
    assert [report.exit_code([answered("a", status)], DIFFERS) for status in (0, 2, 1)] == [4, 4, 1]
