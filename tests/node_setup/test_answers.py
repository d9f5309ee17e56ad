"""A reply that is none of our agent's is that node's trouble, and costs no other node its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_setup import report, verify_report
from node_setup.differences import odd_ones
from node_setup.fleet.agent_call import Asker
from node_setup.fleet.faults import NO_ANSWER, Fault
from node_setup.fleet.hosts import Node
from node_setup.fleet.known_hosts import KnownHosts
from node_setup.fleet.pool import ANSWERED, Outcome, Pace, run
from node_setup.fleet.protocol import Agent, Question, Traffic, ask
from node_setup.fleet.session import Answer
from node_setup.fleet.transport import Ways
from node_setup.shape import DEEPEST, flaw

SHA = "a" * 64
OURS = Agent(b"", SHA)
ROW = {"setting": "a", "status": "ok", "why": ""}
FINE: dict[str, Any] = {"version": 1, "agent": SHA, "rows": [ROW], "errors": [], "lint": []}
FACTS: dict[str, Any] = {"version": 1, "agent": {"sha256": SHA}, "host": {}, "kernel": {}}
VERIFIED: dict[str, Any] = {"version": 1, "results": [], "facts_digest": {}, "ready": True}


class Node1:
    """A session whose node prints one text, whatever it is asked."""

    root, user = True, "root"

    def __init__(self, out: bytes, status: int = 0) -> None:
        self.answer = Answer(status, out, b"")

    def execute(self, command: str, stdin: bytes, seconds: float) -> Answer:
        return self.answer

    def close(self) -> None:
        """Nothing is open."""


def levels(depth: int) -> bytes:
    return b'{"version": 1, "rows": [], "x": ' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize(
    ("command", "status", "result"),
    [
        ("plan", 0, FINE),
        ("tune", 2, FINE),
        ("tune", 1, {"version": 1, "agent": SHA, "errors": [{"where": "a", "why": "b"}]}),
        ("facts", 0, FACTS),
        ("facts", 1, {"version": 1, "agent": SHA, "errors": [{"where": "a", "why": "b"}]}),
        ("verify --tier fast", 2, VERIFIED),
        ("reboot-check", 4, {"version": 1, "agent": SHA, "boot": {"boot_id": "b"}, "refused": "a job runs"}),
    ],
)
def test_what_our_agent_says_is_an_answer(command: str, status: int, result: dict[str, Any]) -> None:
    assert flaw(command, status, result, SHA) is None


@pytest.mark.parametrize(
    ("command", "result", "why"),
    [
        ("tune", {}, "its version is None, not 1"),
        ("tune", {**FINE, "version": 2}, "its version is 2, not 1"),
        ("tune", {**FINE, "agent": "b" * 64}, "it is of agent"),
        ("tune", {"version": 1, "rows": []}, "it has no agent"),
        ("plan", {"version": 1, "agent": SHA}, "it has no rows"),
        ("plan", {**FINE, "rows": [{}]}, "its rows has another form"),
        ("plan", {**FINE, "rows": [{**ROW, "status": ["ok"]}]}, "its rows has another form"),
        ("plan", {**FINE, "rows": {"a": ROW}}, "its rows has another form"),
        ("plan", {**FINE, "errors": ["trouble"]}, "its errors has another form"),
        ("plan", {**FINE, "lint": [{"name": "NCCL_PROTO"}]}, "its lint has another form"),
        ("facts", {**FACTS, "agent": {"sha256": "b"}}, "it is of agent 'b'"),
        ("facts", {**FACTS, "kernel": None}, "it has no kernel"),
        ("facts", {**FACTS, "gpu": {"devices": 8}}, "its gpu.devices has another form"),
        ("facts", {**FACTS, "memory": {"gib": float("inf")}}, "its memory.gib has another form"),
        ("verify --tier fast", {**VERIFIED, "ready": "yes"}, "its ready has another form"),
        ("verify --tier facts", {"version": 1, "ready": True}, "it has no results"),
        ("reboot-check", {"version": 1, "agent": SHA}, "it has no boot"),
    ],
)
def test_what_is_not_is_no_answer_and_no_node_in_order(command: str, result: dict[str, Any], why: str) -> None:
    with pytest.raises(Fault) as caught:
        ask(Node1(json.dumps(result).encode()), OURS, Question(command), Traffic())
    assert (caught.value.kind, why in caught.value.why, bool(caught.value.fix)) == (NO_ANSWER, True, True), caught.value


@pytest.mark.parametrize("depth", [DEEPEST, 300, 900, 100_000])
def test_levels_without_end_are_no_answer(depth: int) -> None:
    with pytest.raises(Fault) as caught:
        ask(Node1(levels(depth)), OURS, Question("plan"), Traffic())
    assert caught.value.kind == NO_ANSWER


def test_one_bad_reply_leaves_the_others_their_report(tmp_path: Path) -> None:
    good = json.dumps(FINE).encode()
    bad = [b"{}", b'{"rows": [{}]}', levels(100_000), b"[]", b"nonsense", b"", b'{"version": 1, "rows": [1]}']
    said = dict(enumerate([good, *bad, good]))
    nodes = [Node(f"n{number}", "-") for number in said]
    ways = Ways(KnownHosts(str(tmp_path / "known")))
    ways.connect = lambda node, deadline: Node1(said[int(node.name[1:])])  # type: ignore[method-assign]
    outcomes = run(nodes, Asker(ways, OURS, "tune", lambda node: {}), ways, Pace(), lambda one: None)
    assert [one.kind for one in outcomes] == [ANSWERED, *[NO_ANSWER] * len(bad), ANSWERED]
    assert report.exit_code(outcomes) == report.FAILURE
    lines = report.tuned(outcomes, check=False)
    assert lines[-1] == f"9 nodes: {len(bad)} no answer, 2 in order"


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(SHA),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*ROW, *FINE, "where", "gib"]), inner),
    max_leaves=8,
)
PARTS = ["rows", "errors", "lint", "results", "reboot", "unplanned", "boot", "ready", "facts_digest", "jobs", "gpu",
         "efa", "lustre", "memory", "profile", "refused", "group", "instance", "os", "kernel", "cpu", "drain"]  # fmt: skip


@pytest.mark.slow
@given(
    st.sampled_from(["facts", "plan", "verify"]),
    st.sampled_from([0, 1, 2, 4]),
    st.dictionaries(st.sampled_from(PARTS), ANY),
)
def test_of_whatever_passes_for_an_answer_every_report_can_be_made(
    command: str, status: int, parts: dict[str, Any]
) -> None:
    base = {"facts": FACTS, "plan": FINE, "verify": VERIFIED}[command]
    result = {**base, **parts}
    if flaw(command, status, result, SHA):
        return
    outcomes = [Outcome(Node("n1", "n1"), ANSWERED, status=status, result=result)]
    lines = {
        "facts": lambda: report.facts(outcomes),
        "plan": lambda: report.tuned(outcomes, check=True) + report.rebooted(outcomes),
        "verify": lambda: (
            verify_report.lines(outcomes, verify_report.odd(outcomes)) + verify_report.drain_lines(outcomes)
        ),
    }[command]()
    assert all(isinstance(line, str) for line in lines)
    json.dumps(report.as_json("node-x", outcomes, report.exit_code(outcomes)), indent=1)
    odd_ones({"a": dict(result.get("facts_digest") or {})}, {})
