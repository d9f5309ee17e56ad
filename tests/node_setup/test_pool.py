"""Many nodes at once, against nodes that are functions here: who is asked, how many at a time, and what becomes of the rest."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node_setup.answers import parse
from node_setup.fleet.faults import MISTAKE, NOT_BEGUN, RUNS_ON, STOPPED, TIMEOUT, UNREACHABLE, Fault
from node_setup.fleet.hosts import Node
from node_setup.fleet.known_hosts import KnownHosts
from node_setup.fleet.pool import ANSWERED, Concurrency, Outcome, run
from node_setup.fleet.protocol import Traffic
from node_setup.fleet.transport import Connections, Deadline

AgentResponse = Callable[[Node], int]


class Fleet:
    """Nodes by name whose answer is an exit status; it keeps when each began and ended. There is no connection."""

    def __init__(self, count: int, answer: AgentResponse, seconds: float = 0.0) -> None:
        self.nodes = [Node(f"n{number:02d}", "-") for number in range(count)]
        self.connections = Connections(KnownHosts("/nowhere/known"))
        self.began: list[str] = []
        self.at_once = self.most_at_once = 0
        self._answer, self._seconds, self._lock = answer, seconds, threading.Lock()

    def __call__(self, node: Node, deadline: Deadline, traffic: Traffic) -> Outcome:
        with self._lock:
            self.began.append(node.name)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.connections.stopped.wait(min(self._seconds, deadline.remaining())):
                raise Fault(STOPPED, "stopped while it ran")
            return Outcome(node, ANSWERED, status=self._answer(node), answer=parse({"version": 1}))
        finally:
            with self._lock:
                self.at_once -= 1

    def run(self, concurrency: Concurrency, told: Callable[[Outcome], None] = lambda one: None) -> list[Outcome]:
        return run(self.nodes, self, self.connections, concurrency, told)


def failing(*numbers: int) -> AgentResponse:
    return lambda node: int(int(node.name[1:]) in numbers)


def unreachable(node: Node) -> int:
    if node.name == "n01":
        raise Fault(UNREACHABLE, "connection refused", "start it")
    return 0


def test_every_node_has_one_outcome_in_order_and_is_told_once() -> None:
    fleet, told = Fleet(20, failing()), list[Outcome]()
    outcomes = fleet.run(Concurrency(max_parallel=4), told.append)
    assert [one.node.name for one in outcomes] == [node.name for node in fleet.nodes]
    assert sorted(one.node.name for one in told) == [node.name for node in fleet.nodes]
    assert all(one.good for one in outcomes)


def test_no_more_nodes_at_once_than_the_bound() -> None:
    together = threading.Barrier(5)

    def answer(node: Node) -> int:
        together.wait()
        return 0

    fleet = Fleet(25, answer)
    fleet.run(Concurrency(max_parallel=5))
    assert fleet.most_at_once == 5


def test_a_node_that_fails_costs_the_others_nothing() -> None:
    outcomes = Fleet(3, unreachable).run(Concurrency())
    assert [(one.kind, one.why, one.fix) for one in outcomes] == [
        (ANSWERED, "", ""),
        (UNREACHABLE, "connection refused", "start it"),
        (ANSWERED, "", ""),
    ]


def test_a_mistake_of_ours_costs_no_other_node_its_outcome() -> None:
    def broken(node: Node) -> int:
        return {"n00": 0, "n02": 0}[node.name]

    outcomes = Fleet(3, broken).run(Concurrency(max_parallel=1))
    assert [(one.kind, one.status) for one in outcomes] == [(ANSWERED, 0), (MISTAKE, None), (ANSWERED, 0)]
    assert outcomes[1].why.startswith("KeyError: 'n01' (in broken, test_pool.py:")
    assert not outcomes[1].good


def test_batches_follow_one_another() -> None:
    fleet = Fleet(7, failing(), seconds=0.01)
    fleet.run(Concurrency(serial=3))
    assert [sorted(fleet.began[at : at + 3]) for at in (0, 3, 6)] == [
        ["n00", "n01", "n02"],
        ["n03", "n04", "n05"],
        ["n06"],
    ]
    assert fleet.most_at_once <= 3


def test_too_many_failures_begin_no_further_batch() -> None:
    fleet = Fleet(8, failing(0, 1))
    outcomes = fleet.run(Concurrency(serial=2, fail_percent=50))
    assert sorted(fleet.began) == ["n00", "n01"]
    assert [one.kind for one in outcomes] == [ANSWERED] * 2 + [NOT_BEGUN] * 6
    assert outcomes[2].why == "2 of 2 nodes failed, more than 50 %"


def test_fail_percent_alone_makes_batches_of_max_parallel() -> None:
    fleet = Fleet(9, failing(0))
    assert [one.kind for one in fleet.run(Concurrency(max_parallel=3, fail_percent=0))].count(NOT_BEGUN) == 6


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 11)), st.integers(1, 12), st.integers(0, 100))
def test_whoever_is_not_begun_stands_behind_all_who_are(bad: set[int], serial: int, percent: int) -> None:
    fleet = Fleet(12, failing(*bad))
    outcomes = fleet.run(Concurrency(serial=serial, fail_percent=percent))
    begun = [one.kind != NOT_BEGUN for one in outcomes]
    assert begun == sorted(begun, reverse=True)
    assert sorted(fleet.began) == [one.node.name for one in outcomes if one.kind != NOT_BEGUN]
    done = begun.count(True)
    assert done % serial == 0 or done == 12
    before = (done - 1) // serial * serial
    assert 100 * sum(one < before for one in bad) <= percent * before
    assert done == 12 or 100 * sum(one < done for one in bad) > percent * done


class Deaf(Fleet):
    """Its nodes neither answer nor hear that they are stopped."""

    def __call__(self, node: Node, deadline: Deadline, traffic: Traffic) -> Outcome:
        self.began.append(node.name)
        threading.Event().wait()
        raise AssertionError


@pytest.mark.slow
def test_the_time_for_all_ends_it_whatever_the_nodes_do() -> None:
    fleet, later = Deaf(3, failing()), count(4000, 10)
    outcomes = fleet.run(Concurrency(max_parallel=2, clock=lambda: 0 if len(fleet.began) < 2 else next(later)))
    assert [(one.kind, one.why) for one in outcomes] == [(TIMEOUT, "the 3600 s for all nodes are over")] * 3


def test_node_time_is_limited_by_the_remaining_total() -> None:
    seen: list[float] = []

    class Looking(Fleet):
        def __call__(self, node: Node, deadline: Deadline, traffic: Traffic) -> Outcome:
            seen.append(deadline.remaining())
            return super().__call__(node, deadline, traffic)

    Looking(3, failing()).run(Concurrency(serial=1, node_s=10, total_s=16, clock=lambda: 4.0 * len(seen)))
    assert seen == [10, 10, 8]


def test_ctrl_c_reports_what_ran_and_closes_what_waits() -> None:
    told: list[Outcome] = []

    def answer(one: Outcome) -> None:
        told.append(one)
        raise KeyboardInterrupt

    class Mixed(Fleet):
        def __call__(self, node: Node, deadline: Deadline, traffic: Traffic) -> Outcome:
            if node.name == "n00":
                return Outcome(node, ANSWERED, status=0, answer=parse({"version": 1}))
            return super().__call__(node, deadline, traffic)

    fleet = Mixed(6, failing(), seconds=600)
    outcomes = fleet.run(
        Concurrency(max_parallel=2, serial=3, node_s=600), lambda one: answer(one) if not told else None
    )
    assert fleet.connections.stopped.is_set()
    assert outcomes[0].kind == ANSWERED
    assert {one.kind for one in outcomes[1:3]} <= {STOPPED, NOT_BEGUN}
    assert [(one.kind, one.why) for one in outcomes[3:]] == [(NOT_BEGUN, "stopped by Ctrl-C")] * 3


@pytest.mark.slow
def test_the_fleet_gives_a_sign_of_life_while_it_waits() -> None:
    beats, seen_twice = [time.monotonic()], threading.Event()

    def beat() -> None:
        beats.append(time.monotonic())
        if len(beats) > 2:
            seen_twice.set()

    fleet = Fleet(1, lambda node: 0 if seen_twice.wait() else 1)
    run(fleet.nodes, fleet, fleet.connections, Concurrency(), lambda one: None, beat)
    assert all(later - sooner > 0.9 for sooner, later in pairwise(beats))


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_lose_the_report() -> None:
    fleet, handlers = Deaf(2, failing()), []
    fleet.connections.stop = lambda: handlers.append(signal.getsignal(signal.SIGINT))  # type: ignore[method-assign]

    def press() -> None:
        if fleet.began:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    outcomes = run(
        fleet.nodes, fleet, fleet.connections, Concurrency(max_parallel=1, serial=1), lambda one: None, press
    )
    assert [(one.kind, one.why) for one in outcomes] == [(STOPPED, RUNS_ON), (NOT_BEGUN, "stopped by Ctrl-C")]
    assert (handlers, signal.getsignal(signal.SIGINT)) == ([signal.SIG_IGN], before)
