"""What follows when an attempt has ended: every row of docs/launch.md's table, and that no history goes on forever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.supervisor import policy as policies
from launch.supervisor.policy import (
    LEAVING_S,
    MAX_FUTILE_LAUNCHES,
    Decision,
    ExtraNodes,
    Launch,
    Requeue,
    RestartPolicy,
    Start,
    Stop,
    Wait,
    grows_at,
    growth,
    launch_of,
    next_decision,
)
from trainer import errors

NODES = ("n1", "n2", "n3")
GOOD = Launch(1, ("n1", "n2"), code=1, ended=0.0, gained=100, start_s=10.0, step_s=1.0)
POOR = replace(GOOD, gained=5)
TWO = RestartPolicy(min_nodes=2, max_nodes=2, micro_batches_per_step=4, scheduler_can_replace_nodes=True)


def after(
    *history: Launch, policy: RestartPolicy = TWO, healthy: tuple[str, ...] = NODES, now: float = 1.0
) -> Decision:
    return next_decision(policy, history, healthy, now)


def start(move: Decision) -> Start:
    assert isinstance(move, Start)
    return move


def test_its_exit_codes_are_the_trainers() -> None:
    assert (policies.DONE, policies.USAGE, policies.PEERS) == (errors.EXIT_DONE, errors.EXIT_CONFIG, errors.EXIT_PEERS)
    assert (policies.REQUEUE, policies.LOST_RUN) == (errors.EXIT_REQUEUE, errors.EXIT_LOST_RUN)


def test_a_run_begins_at_once_on_as_many_nodes_as_are_asked_for() -> None:
    assert after() == Start(("n1", "n2"))
    assert after(policy=replace(TWO, max_nodes=3, micro_batches_per_step=12)) == Start(NODES)


@pytest.mark.parametrize(
    ("code", "why"),
    [(0, "all steps are done"), (2, "the configuration is refused: lr"), (86, "a newer job owns the run: lr")],
)
def test_what_no_further_attempt_can_mend_is_the_end(code: int, why: str) -> None:
    assert after(replace(GOOD, code=code, error="lr")) == Stop(code, why)


def test_notice_costs_no_pause_and_its_node_is_left_out() -> None:
    noticed = replace(POOR, code=85, noticed=("n1",))
    assert after(noticed) == Start(("n2", "n3"), 0.0, "AWS takes n1 away")
    assert after(noticed, now=LEAVING_S) == Start(("n1", "n2"), 0.0, "AWS takes n1 away")


def test_a_lost_node_is_not_used_next_and_costs_no_pause() -> None:
    assert after(replace(POOR, code=75, blamed=("n2",))) == Start(("n1", "n3"), 0.0, "n2 was lost")


def test_lost_node_in_a_new_allocation_is_used() -> None:
    lost = replace(POOR, code=75, blamed=("n2",), launcher_id="start 1")
    assert next_decision(TWO, [lost], ("n1", "n2"), 1.0, launcher_id="start 1") == Requeue(
        (), "1 of 2 nodes are there; left out: n2"
    )
    assert next_decision(TWO, [lost], ("n1", "n2"), 1.0, launcher_id="start 2") == Start(
        ("n1", "n2"), 0.0, "n2 was lost"
    )


def test_too_few_nodes_give_the_job_back_without_the_doomed_ones() -> None:
    noticed = replace(GOOD, code=85, noticed=("n1",))
    assert after(noticed, healthy=("n1", "n2")) == Requeue(("n1",), "1 of 2 nodes are there; left out: n1")
    lost = replace(GOOD, code=75, blamed=("n1",))
    assert after(lost, healthy=("n2",)) == Requeue((), "1 of 2 nodes are there; left out: n1")


def test_without_a_scheduler_nodes_are_awaited_and_used_again() -> None:
    alone = replace(TWO, scheduler_can_replace_nodes=False)
    assert after(replace(GOOD, code=75, blamed=("n1",)), policy=alone) == Start(("n1", "n2"), 0.0, "n1 was lost")
    assert after(policy=alone, healthy=("n2",)) == Wait("1 of 2 nodes are there", idle=1)


def test_nodes_allocation_lost_stay_out_until_slurm_has_seen_it() -> None:
    lost = replace(GOOD, code=75, blamed=("n2",), launcher_id="start 1")
    failed = replace(GOOD, code=1, launcher_id="start 1")
    assert next_decision(TWO, [lost, failed], NODES, 1.0, launcher_id="start 1") == Start(
        ("n1", "n3"), 5.0, "the last launch ended with 1"
    )


def test_node_to_blame_twice_is_used_where_the_run_would_wait() -> None:
    twice = [replace(GOOD, blamed=("n1",)), replace(GOOD, blamed=("n1",))]
    assert start(after(*twice, healthy=("n1", "n2"))).nodes == ("n1", "n2")
    assert start(after(*twice, healthy=NODES, now=90_000.0)).nodes == ("n1", "n2"), "a day later"


def test_run_interrupted_often_pauses_and_is_not_given_up() -> None:
    noticed = replace(POOR, code=85)
    assert [start(after(*[noticed] * count)).after_s for count in range(1, 5)] == [0.0, 5.0, 10.0, 20.0]


def test_no_attempt_begins_once_the_capacity_has_ended() -> None:
    block = replace(TWO, deadline=100.0)
    assert isinstance(after(replace(GOOD, code=85), policy=block, now=99.0), Start)
    assert after(replace(GOOD, code=85), policy=block, now=100.0) == Stop(
        85, "its capacity ends, by interrupt.deadline"
    )


def test_node_to_blame_twice_is_left_out_unless_nodes_are_kept() -> None:
    twice = [replace(GOOD, blamed=("n1",)), GOOD, replace(GOOD, blamed=("n1",)), GOOD]
    assert start(after(*twice)).nodes == ("n2", "n3")
    assert start(after(*twice, policy=replace(TWO, allow_blamed_nodes=True))).nodes == ("n1", "n2")


def test_failures_are_tried_again_after_5_10_20_to_300_seconds() -> None:
    pauses = [start(after(GOOD, *[POOR] * count)).after_s for count in range(3)]
    assert pauses == [5.0, 5.0, 10.0]
    lost = [replace(POOR, code=75, blamed=(f"m{number}",)) for number in range(12)]
    waited = [start(after(*lost[:count])).after_s for count in range(1, 13)]
    assert waited == [0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0, 300.0, 300.0]


@pytest.mark.parametrize("code", [1, 75, None])
def test_three_worthless_attempts_in_a_row_stop_run_and_say_so(code: int | None) -> None:
    poor = replace(POOR, code=code, error="CUDA error")
    assert isinstance(after(GOOD, poor, poor), Start)
    stop = after(GOOD, poor, poor, poor)
    assert isinstance(stop, Stop)
    assert stop.code == 1
    assert stop.why.startswith("3 launches in a row committed no more than their own start cost; the last error: CUDA")
    assert isinstance(after(poor, poor, GOOD, poor), Start)


@pytest.mark.parametrize(
    ("gained", "start_s", "step_s", "worthless"),
    [(10, 10.0, 1.0, True), (11, 10.0, 1.0, False), (0, None, None, True), (5, 0.0, None, True)],
)
def test_attempt_is_worth_more_if_it_committed_beyond_its_start(
    gained: int, start_s: float | None, step_s: float | None, worthless: bool
) -> None:
    assert Launch(1, NODES, 1, gained=gained, start_s=start_s, step_s=step_s).made_no_progress is worthless


def test_who_asks_for_its_end_gets_it() -> None:
    assert next_decision(TWO, [replace(GOOD, code=85)], NODES, 1.0, stop="fab stop") == Stop(85, "fab stop")
    assert next_decision(TWO, [replace(GOOD, code=0)], NODES, 1.0, stop="fab stop") == Stop(0, "all steps are done")


@pytest.mark.parametrize(
    ("there", "micro_batches", "size"),
    [(9, 48, 8), (7, 48, 7), (5, 48, 5), (3, 48, 3), (2, 48, 0), (8, 13, 6), (8, 6, 3), (8, 5, 0)],
)
def test_all_healthy_nodes_are_used_up_to_the_micro_batches(there: int, micro_batches: int, size: int) -> None:
    policy = RestartPolicy(min_nodes=3, max_nodes=8, ranks_per_node=2, micro_batches_per_step=micro_batches)
    assert policy.usable_nodes(there) == size


@pytest.mark.parametrize(("micro_batches", "used", "idle"), [(64, 7, 0), (60, 7, 0), (50, 6, 1)])
def test_run_of_eight_nodes_goes_on_with_the_seven_left(micro_batches: int, used: int, idle: int) -> None:
    """Eight ranks a node: the micro-batches of a step need not divide among them."""
    nodes = tuple(f"n{number}" for number in range(1, 9))
    policy = RestartPolicy(min_nodes=2, max_nodes=8, ranks_per_node=8, micro_batches_per_step=micro_batches)
    lost = Launch(1, nodes, code=75, ended=0.0, gained=100, start_s=10.0, step_s=1.0, blamed=("n8",))
    move = start(after(lost, policy=policy, healthy=nodes[:7]))
    assert (move.nodes, move.idle) == (nodes[:used], nodes[used : used + idle])


@pytest.mark.parametrize(
    ("there", "ranks", "shard", "size"),
    [
        (9, 8, 16, 8),
        (7, 8, 16, 6),
        (7, 8, 8, 7),
        (7, 8, 4, 7),
        (5, 8, 24, 3),
        (3, 8, 16, 0),
        (8, 3, 4, 8),
        (7, 3, 4, 4),
    ],
)
def test_nodes_of_a_sharded_run_make_up_whole_replicas(there: int, ranks: int, shard: int, size: int) -> None:
    policy = RestartPolicy(
        min_nodes=3, max_nodes=8, ranks_per_node=ranks, micro_batches_per_step=512, ranks_per_replica=shard
    )
    assert policy.usable_nodes(there) == size


@pytest.mark.parametrize(
    ("there", "ranks", "tensor", "size"), [(9, 8, 4, 6), (9, 2, 4, 8), (5, 2, 4, 4), (9, 16, 8, 6)]
)
def test_tensor_ranks_share_a_micro_batch(there: int, ranks: int, tensor: int, size: int) -> None:
    policy = RestartPolicy(
        min_nodes=3,
        max_nodes=8,
        ranks_per_node=ranks,
        micro_batches_per_step=12,
        ranks_per_micro_batch=tensor,
        ranks_per_replica=tensor,
    )
    assert policy.usable_nodes(there) == size


GROWING = RestartPolicy(min_nodes=1, max_nodes=4, micro_batches_per_step=4, scheduler_can_replace_nodes=True)
LOST = replace(GOOD, code=75, blamed=("n2",), launcher_id="start 1")


@pytest.mark.parametrize(
    ("policy", "history", "extra", "expected"),
    [
        (GROWING, [], ExtraNodes(("n2",)), (2, False)),
        (GROWING, [], ExtraNodes(("n1",)), None),
        (GROWING, [], ExtraNodes((), ("n2", "n3")), (3, True)),
        (GROWING, [], ExtraNodes(("n2",), ("n3",)), (2, False)),
        (replace(GROWING, scheduler_can_replace_nodes=False), [], ExtraNodes((), ("n2",)), None),
        (replace(GROWING, micro_batches_per_step=1), [], ExtraNodes(("n2", "n3")), None),
        (replace(GROWING, ranks_per_replica=3), [], ExtraNodes(("n2",)), None),
        (replace(GROWING, ranks_per_replica=3), [], ExtraNodes(("n2", "n3")), (3, False)),
        (GROWING, [replace(GOOD, code=85, noticed=("n2",))], ExtraNodes(("n2",), ("n2",)), None),
        (GROWING, [LOST], ExtraNodes(("n2",)), None),
        (GROWING, [LOST], ExtraNodes((), ("n2",)), (2, True)),
        (GROWING, [LOST, replace(LOST, number=2)], ExtraNodes((), ("n2",)), None),
        (replace(GROWING, allow_blamed_nodes=True), [LOST, LOST], ExtraNodes((), ("n2",)), (2, True)),
    ],
)
def test_run_grows_only_to_sizes_it_can_use(
    policy: RestartPolicy, history: list[Launch], extra: ExtraNodes, expected: tuple[int, bool] | None
) -> None:
    larger = growth(policy, history, ["n1"], extra, 1.0, launcher_id="start 1")
    assert (larger and (larger.size, larger.requeue)) == expected


def test_growth_counts_no_running_node_that_is_left_out_next() -> None:
    assert growth(GROWING, [LOST, LOST], ["n1", "n2"], ExtraNodes(("n3",)), 1.0) is None


def test_growth_waits_for_its_cost_and_longer_after_one_in_vain() -> None:
    small = replace(GOOD, nodes=("n1",), code=85, start_s=10.0)
    assert grows_at(GROWING, [], ["n1"], 100.0) == 700.0
    assert grows_at(GROWING, [replace(GOOD, start_s=60.0)], ["n1"], 100.0) == 1300.0
    assert grows_at(GROWING, [small], ["n1"], 100.0) == 100.0 + 4 * 600
    assert grows_at(GROWING, [small, small], ["n1"], 100.0) == 100.0 + 16 * 600
    assert grows_at(GROWING, [small], ["n1", "n2"], 100.0) == 700.0, "it brought a node"
    assert grows_at(GROWING, [small] * 9, ["n1"], 0.0) == policies.DAY_S
    assert grows_at(replace(GROWING, grow_after_s=5.0), [], ["n1"], 100.0) == 105.0
    assert grows_at(replace(GROWING, grow_after_s=0.0), [small], ["n1"], 100.0) == 100.0 + 4 * 60
    assert grows_at(GROWING, [], ["n1", "n2", "n3", "n4"], 100.0) is None
    assert grows_at(replace(GROWING, deadline=1200.0), [], ["n1"], 100.0) is None


def test_a_record_is_read_with_and_without_what_it_may_lack() -> None:
    bare = {"attempt": 3, "nodes": ["n1"], "code": None}
    assert launch_of(bare) == Launch(3, ("n1",))
    whole = bare | {"code": 75, "ended": 5.0, "gained": 2, "start_s": 1.5, "step_s": 0.5, "blamed": ["n1"], "said": "x"}
    assert launch_of(whole) == Launch(3, ("n1",), 75, 5.0, 2, 1.5, 0.5, ("n1",), (), "x")


ENDS = st.builds(
    dict,
    code=st.sampled_from([None, 1, 2, 75, 85, 86, 137]),
    gained=st.integers(0, 3),
    start_s=st.none() | st.floats(0, 100),
    step_s=st.none() | st.floats(0.1, 10),
    blamed=st.sets(st.sampled_from(NODES), max_size=2).map(tuple),
    noticed=st.sets(st.sampled_from(NODES), max_size=1).map(tuple),
)
POLICIES = st.builds(
    RestartPolicy,
    min_nodes=st.integers(1, 2),
    max_nodes=st.integers(2, 3),
    micro_batches_per_step=st.sampled_from([2, 12]),
    allow_blamed_nodes=st.booleans(),
    scheduler_can_replace_nodes=st.booleans(),
)


@given(
    policy=POLICIES,
    ends=st.lists(ENDS, max_size=12),
    healthy=st.sets(st.sampled_from(NODES)).map(sorted),
    jitter=st.floats(0, 1),
)
def test_every_move_can_be_made(
    policy: RestartPolicy, ends: list[dict[str, object]], healthy: list[str], jitter: float
) -> None:
    """Nodes that live and are not left out, no more ranks than micro-batches, a bounded pause, a reason."""
    history = [Launch(number, NODES, ended=float(number), **end) for number, end in enumerate(ends)]  # type: ignore[arg-type]
    now = len(ends) + 1.0
    move = next_decision(policy, history, healthy, now, jitter=jitter)
    if isinstance(move, Start):
        assert set(move.nodes) <= set(healthy)
        assert not set(move.nodes) & {node for one in history for node in one.noticed}
        assert policy.min_nodes <= len(move.nodes) <= policy.max_nodes
        assert len(move.nodes) * policy.ranks_per_node <= policy.micro_batches_per_step
        assert 0 <= move.after_s <= 300
        assert bool(move.why) == bool(history)
    else:
        assert move.why
        assert isinstance(move, Requeue) == (policy.scheduler_can_replace_nodes and not isinstance(move, Stop))


@given(policy=POLICIES, ends=st.lists(ENDS.map(lambda end: end | {"gained": 0}), min_size=40, max_size=40))
def test_a_run_that_makes_no_progress_ends(policy: RestartPolicy, ends: list[dict[str, object]]) -> None:
    """Whoever is to blame: without a commit, attempts on the same nodes come to an end, or pauses are long."""
    history: list[Launch] = []
    counted, now = 0, 0.0
    for number, end in enumerate(ends):
        move = next_decision(policy, history, NODES, now)
        if not isinstance(move, Start):
            return
        counted += history[-1].counts_against_limit if history else 0
        assert counted < MAX_FUTILE_LAUNCHES
        now += move.after_s + 1
        history.append(Launch(number, move.nodes, ended=now, **end))  # type: ignore[arg-type]
    assert now > 1800
