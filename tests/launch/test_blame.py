"""Who is to blame for an attempt that ended in silence: whom most others did not hear."""

from __future__ import annotations

import pytest

from launch.supervisor.policy import Launch, RestartPolicy, Start, Stop, final_decision, next_decision
from trainer.errors import EXIT_DONE, EXIT_PEERS, EXIT_REQUEUE
from trainer.node.exit_report import NodeExit, report_exit
from trainer.run import journal
from trainer.storage import open_store


@pytest.mark.parametrize(
    ("words", "silent"),
    [
        ({0: "node 3", 1: "", 2: "node 3", 3: "node 0"}, {3}),
        ({0: "node 2, node 3", 1: ""}, {2, 3}),
        ({1: "node 0", 2: "node 0", 3: "node 0"}, {0}),
        ({0: "node 1, node 2, node 3", 1: "node 0", 2: "node 0", 3: "node 0"}, {0}),
        ({3: "node 0"}, {0}),
        ({0: "node 1"}, {1}),
        ({0: "node 1", 1: "node 0"}, {0, 1}),
        ({0: "", 1: ""}, set()),
        ({}, set()),
    ],
)
def test_a_cut_link_does_not_make_the_other_side_silent(words: dict[int, str], silent: set[int]) -> None:
    assert journal.silent_nodes(words) == silent


def ended(
    uri: str, monkeypatch: pytest.MonkeyPatch, nodes: list[str], words: dict[int, tuple[int, str]]
) -> dict[str, object]:
    store = open_store(uri)
    number = journal.begin(store, nodes, "a test")
    monkeypatch.setenv("LUSTRAIN_ATTEMPT", str(number))
    for node, (code, silent) in words.items():
        report_exit(uri, node, NodeExit(code, code, silent))
    # The scheduler's own code for a step that lost a node.
    return journal.finish(store, number, 137)


def test_between_two_nodes_it_is_the_link(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    record = ended(f"{tmp_path}/run", monkeypatch, ["a", "b"], {0: (EXIT_PEERS, "node 1"), 1: (EXIT_PEERS, "node 0")})
    assert (record["code"], record["blamed"]) == (EXIT_PEERS, [])
    assert "link" in str(record["said"])


def test_a_launcher_says_so_where_its_ranks_have_saved(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {0: (EXIT_REQUEUE, "node 2"), 1: (EXIT_REQUEUE, "node 2")}
    record = ended(f"{tmp_path}/run", monkeypatch, ["a", "b", "c"], words)
    # Whose ranks have saved may leave before the others: nobody is to blame.
    assert (record["code"], record["blamed"]) == (EXIT_REQUEUE, [])


def test_what_a_killed_launcher_left_open_ends_with_next_start(tmp_path: object) -> None:
    store = open_store(f"{tmp_path}/run")
    journal.begin(store, ["a"], "killed")
    store.put(journal.REQUEST, b'{"version": 1, "after": 1}')
    assert journal.load_and_close_stale(store) == []
    (record,) = journal.read(store)
    assert (record["code"], "ended" in record) == (None, True)


def test_a_run_that_is_over_asks_for_no_nodes() -> None:
    assert final_decision(RestartPolicy(), [Launch(1, ("a",), EXIT_DONE)], 0.0) == Stop(EXIT_DONE, "all steps are done")
    assert final_decision(RestartPolicy(), [Launch(1, ("a",), EXIT_PEERS, blamed=("a",))], 0.0) is None


@pytest.mark.parametrize(
    ("micro_batches", "used", "idle"), [(8, ("a", "b", "c"), ()), (4, ("a", "b", "c"), ()), (2, ("a", "b"), ("c",))]
)
def test_only_a_node_without_a_micro_batch_is_idle(
    micro_batches: int, used: tuple[str, ...], idle: tuple[str, ...]
) -> None:
    policy = RestartPolicy(min_nodes=2, max_nodes=4, micro_batches_per_step=micro_batches)
    move = next_decision(policy, [], ["a", "b", "c"], 0.0)
    assert isinstance(move, Start)
    assert (move.nodes, move.idle) == (used, idle)
