"""An answer that is none of our agent's is that node's trouble, and costs no other node its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lustrain.problem import FAILED
from node_setup import report
from node_setup.answers import NoAnswerError, response_to
from node_setup.differences import find_differences
from node_setup.fleet.agent_call import AgentCall
from node_setup.fleet.faults import NO_ANSWER, Fault
from node_setup.fleet.hosts import Node
from node_setup.fleet.known_hosts import KnownHosts
from node_setup.fleet.pool import ANSWERED, Concurrency, Outcome, run
from node_setup.fleet.protocol import Agent, Request, Traffic, send_request
from node_setup.fleet.session import Completed
from node_setup.fleet.transport import Connections
from tests.node_setup.test_protocol import Said

SHA = "a" * 64
OURS = Agent(b"", SHA)
ROW = {"setting": "a", "status": "ok", "why": ""}
FINE: dict[str, Any] = {"version": 1, "agent": SHA, "rows": [ROW], "errors": [], "lint": []}
FACTS: dict[str, Any] = {"version": 1, "agent": {"sha256": SHA}, "host": {}, "kernel": {}}
VERIFIED: dict[str, Any] = {"version": 1, "results": [], "facts_digest": {}, "ready": True}


def printing(out: bytes) -> Said:
    """A node that prints this, whatever it is asked."""
    return Said(*[Completed(0, out, b"")] * 2)


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
    assert response_to(command, status, SHA, result).to_json() == result


@pytest.mark.parametrize(
    ("command", "result", "why"),
    [
        ("tune", {}, "version is missing"),
        ("tune", {**FINE, "version": 2}, "version = 2: not allowed; allowed: 1"),
        ("tune", {**FINE, "agent": "b" * 64}, "not the agent that was called"),
        ("tune", {"version": 1, "rows": []}, "agent is missing"),
        ("plan", {"version": 1, "agent": SHA}, "rows is missing"),
        ("plan", {**FINE, "rows": [{}]}, "rows.0.setting is missing"),
        ("plan", {**FINE, "rows": [{**ROW, "status": ["ok"]}]}, "rows.0.status"),
        ("plan", {**FINE, "rows": [{**ROW, "status": "fine"}]}, "rows.0.status = 'fine'"),
        ("plan", {**FINE, "rows": {"a": ROW}}, "rows = "),
        ("plan", {**FINE, "errors": ["trouble"]}, "errors.0 = 'trouble'"),
        ("plan", {**FINE, "lint": [{"name": "NCCL_PROTO"}]}, "lint.0.where is missing"),
        ("facts", {**FACTS, "agent": {"sha256": "b"}}, "not the agent that was called"),
        ("facts", {**FACTS, "kernel": None}, "kernel is missing"),
        ("facts", {**FACTS, "gpu": {"devices": 8}}, "gpu.devices = 8: wrong type"),
        ("facts", {**FACTS, "memory": {"gib": float("inf")}}, "memory.gib = inf"),
        ("verify --tier fast", {**VERIFIED, "ready": "yes"}, "ready = 'yes': wrong type"),
        ("verify --tier facts", {"version": 1, "ready": True}, "results is missing"),
        ("reboot-check", {"version": 1, "agent": SHA}, "boot is missing"),
    ],
)
def test_what_is_not_is_no_answer_and_no_node_in_order(command: str, result: dict[str, Any], why: str) -> None:
    with pytest.raises(Fault) as caught:
        send_request(printing(json.dumps(result).encode()), OURS, Request(command), Traffic())
    assert (caught.value.kind, why in caught.value.why, bool(caught.value.fix)) == (NO_ANSWER, True, True), caught.value


def test_half_a_surrogate_pair_in_a_files_name_costs_no_report() -> None:
    row = {**ROW, "found": "\udcff"}
    response = send_request(printing(json.dumps({**FINE, "rows": [row]}).encode()), OURS, Request("plan"), Traffic())
    assert [one.current for one in response.answer.rows or ()] == ["?"]
    assert response.answer.to_json()["rows"] == [{**row, "found": "?"}]


@pytest.mark.parametrize("depth", [300, 900, 100_000])
def test_levels_without_end_are_no_answer(depth: int) -> None:
    with pytest.raises(Fault) as caught:
        send_request(printing(levels(depth)), OURS, Request("plan"), Traffic())
    assert caught.value.kind == NO_ANSWER


def test_one_bad_reply_leaves_the_others_their_report(tmp_path: Path) -> None:
    good = json.dumps(FINE).encode()
    bad = [b"{}", b'{"rows": [{}]}', levels(100_000), b"[]", b"nonsense", b"", b'{"version": 1, "rows": [1]}']
    said = dict(enumerate([good, *bad, good]))
    nodes = [Node(f"n{number}", "-") for number in said]
    connections = Connections(KnownHosts(str(tmp_path / "known")))
    connections.connect = lambda node, deadline: printing(said[int(node.name[1:])])  # type: ignore[method-assign]
    outcomes = run(
        nodes, AgentCall(connections, OURS, "tune", lambda node: {}), connections, Concurrency(), lambda one: None
    )
    assert [one.kind for one in outcomes] == [ANSWERED, *[NO_ANSWER] * len(bad), ANSWERED]
    assert report.exit_code(outcomes) == FAILED
    lines = report.tune_lines(outcomes, check=False)
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
def test_every_accepted_answer_can_be_reported(command: str, status: int, parts: dict[str, Any]) -> None:
    base = {"facts": FACTS, "plan": FINE, "verify": VERIFIED}[command]
    try:
        answer = response_to(command, status, SHA, {**base, **parts})
    except NoAnswerError:
        return
    outcomes = [Outcome(Node("n1", "n1"), ANSWERED, status=status, answer=answer)]
    lines = {
        "facts": lambda: report.facts_lines(outcomes),
        "plan": lambda: report.tune_lines(outcomes, check=True) + report.reboot_lines(outcomes),
        "verify": lambda: report.verify_lines(outcomes, report.differences(outcomes)) + report.drain_lines(outcomes),
    }[command]()
    assert all(isinstance(line, str) for line in lines)
    json.dumps(report.as_json("node-x", outcomes, report.exit_code(outcomes)), indent=1)
    find_differences({"a": answer.facts_digest or {}}, {})
