"""The loop around the decisions, on a clock of its own: one attempt at a time, patience with an end, no attempt unrecorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from launch.supervisor.executor import Superseded, TemporarilyUnavailable
from launch.supervisor.loop import MAX_IDLE_ALLOCATION_S, supervise
from launch.supervisor.policy import ExtraNodes, Launch, Requeue, RestartPolicy, Stop


@dataclass
class World:
    """Nodes, a journal in memory and a clock. Left out: everything that takes time or can fail by itself."""

    codes: list[int]
    nodes: list[list[str]] = field(default_factory=lambda: [["n1", "n2"]])
    """At each look; the last ones stay."""
    silent_until: float = 0.0
    """The journal does not answer before this time."""
    told_at: float = float("inf")
    now: float = 0.0
    launcher_id: str = "the test"
    alive: int = 0
    reads: int = 0
    attempts: list[Launch] = field(default_factory=list)
    grows_to: list[int] = field(default_factory=list)
    """What was recorded of each attempt's end."""
    idle: tuple[str, ...] = ()
    """Nodes that the last attempt left idle."""
    said: list[str] = field(default_factory=list)
    extra: ExtraNodes = field(default_factory=ExtraNodes)
    """What a launch could have beside its nodes."""
    extra_at: float = 0.0
    """From when on; until then Slurm does not answer."""

    def read(self) -> tuple[list[Launch], str]:
        self.reads += 1
        assert self.reads < 10_000, "the loop does not end"
        if self.now < self.silent_until:
            raise TemporarilyUnavailable("the store is away")
        return [one for one in self.attempts if one.ended], ""

    def begin(self, nodes: Sequence[str], idle: Sequence[str]) -> int:
        self.attempts.append(Launch(len(self.attempts) + 1, tuple(nodes)))
        self.idle = tuple(idle)
        return len(self.attempts)

    def finish(self, number: int, code: int, grows_to: int) -> None:
        self.grows_to.append(grows_to)
        worth = {"gained": 100, "start_s": 10.0, "step_s": 1.0}
        self.attempts[number - 1] = replace(self.attempts[number - 1], code=code, ended=self.now, **worth)  # type: ignore[arg-type]

    def healthy_nodes(self) -> list[str]:
        return self.nodes.pop(0) if len(self.nodes) > 1 else self.nodes[0]

    def run_launch(self, number: int, nodes: Sequence[str], should_end: Callable[[], bool]) -> int:
        assert not self.alive, "one attempt at a time"
        self.alive += 1
        for _ in range(20):
            self.now += 5
            if should_end():
                self.alive -= 1
                return 85
        self.alive -= 1
        return self.codes.pop(0)

    def extra_nodes(self, running: Sequence[str]) -> ExtraNodes:
        if self.now < self.extra_at:
            raise TemporarilyUnavailable("the scheduler is away")
        return self.extra

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def stop_reason(self) -> str:
        return "told to end" if self.now >= self.told_at else ""

    def supervise(self, policy: RestartPolicy, max_wait_s: float = 3600.0) -> Stop | Requeue:
        return supervise(
            self, self, policy, self.said.append, max_wait_s=max_wait_s, clock=lambda: self.now, jitter=lambda: 1.0
        )


TWO = RestartPolicy(min_nodes=2, max_nodes=2, micro_batches_per_step=2)


def test_it_starts_again_until_the_run_is_done_and_says_why() -> None:
    world = World([1, 85, 0])
    assert world.supervise(TWO) == Stop(0, "all steps are done")
    assert [(one.number, one.code) for one in world.attempts] == [(1, 1), (2, 85), (3, 0)]
    assert world.said == [
        "the last launch ended with 1: starting again in 5 s on n1, n2",
        "the last launch ended with 85: starting again on n1, n2",
    ]


def test_nodes_without_a_micro_batch_are_recorded_as_idle() -> None:
    world = World([0], nodes=[["n1", "n2", "n3"]])
    assert world.supervise(replace(TWO, max_nodes=4)).why == "all steps are done"
    assert (world.attempts[0].nodes, world.idle) == (("n1", "n2"), ("n3",))
    (line,) = world.said
    assert line.startswith("idle, and paid for: n3; ")


def test_missing_nodes_are_waited_for_and_given_up_in_the_end() -> None:
    world = World([0], nodes=[["n1"]])
    assert world.supervise(TWO) == Stop(75, "1 of 2 nodes are there, for 1 hour; fix: go on later with --resume")
    assert world.said == ["1 of 2 nodes are there; waiting for at most 1 hour"]
    assert 3600 < world.now < 3620
    assert not world.attempts
    back = World([0], nodes=[["n1"], ["n1"], ["n1", "n2"]])
    assert back.supervise(TWO).why == "all steps are done"


def test_rented_nodes_that_wait_for_others_are_named_as_cost() -> None:
    rented = replace(TWO, nodes_are_rented=True)
    waiting = World([0], nodes=[["n1"], [], ["n1", "n2"]])
    waiting.supervise(rented)
    assert [line.partition("waiting for at most 1 hour")[2] for line in waiting.said] == [
        "; 1 node idle, and paid for",
        "",
    ]
    away = World([0], silent_until=60.0)
    away.supervise(rented)
    assert away.said == ["the store is away; waiting for at most 1 hour; all nodes idle, and paid for"]


def test_a_journal_that_does_not_answer_is_waited_for() -> None:
    world = World([0], silent_until=60.0)
    assert world.supervise(TWO) == Stop(0, "all steps are done")
    assert world.said == ["the store is away; waiting for at most 1 hour"]


def test_whoever_is_told_to_end_while_it_waits_ends_at_once() -> None:
    assert World([0], nodes=[["n1"]], told_at=20.0).supervise(TWO) == Stop(85, "told to end")
    assert World([0], silent_until=60.0, told_at=20.0).supervise(TWO) == Stop(85, "told to end")
    assert World([85, 0], told_at=50.0).supervise(TWO) == Stop(85, "told to end")
    paused = World([1, 0], told_at=103.0)
    assert paused.supervise(TWO) == Stop(85, "told to end")
    assert len(paused.attempts) == 1


def test_nodes_of_a_scheduler_are_not_held_long_without_training() -> None:
    world = World([0], silent_until=5000.0)
    assert world.supervise(replace(TWO, scheduler_can_replace_nodes=True), max_wait_s=86_400.0) == Requeue(
        (), "the store is away"
    )
    assert MAX_IDLE_ALLOCATION_S < world.now < MAX_IDLE_ALLOCATION_S + 20


def test_attempt_that_cannot_be_recorded_is_given_up_in_time() -> None:
    class Full(World):
        def begin(self, nodes: Sequence[str], idle: Sequence[str]) -> int:
            raise TemporarilyUnavailable("the store is full")

    world = Full([0])
    assert world.supervise(TWO).why.startswith("the store is full, for 1 hour")
    assert len(world.said) == 1


def test_of_two_launchers_that_begin_together_one_ends() -> None:
    class Second(World):
        def begin(self, nodes: Sequence[str], idle: Sequence[str]) -> int:
            raise Superseded

    assert Second([0]).supervise(TWO) == Stop(86, "a newer job owns the run")


def test_launcher_that_has_to_end_while_it_records_stops() -> None:
    class Told(World):
        def begin(self, nodes: Sequence[str], idle: Sequence[str]) -> int:
            self.told_at = self.now
            return super().begin(nodes, idle)

        def run_launch(self, number: int, nodes: Sequence[str], should_end: Callable[[], bool]) -> int:
            raise AssertionError("no rank starts")

    world = Told([0])
    assert world.supervise(TWO) == Stop(85, "told to end")
    assert [one.code for one in world.attempts] == [85]


def test_a_run_that_another_launcher_took_over_is_left_to_it() -> None:
    class TakenOver(World):
        def finish(self, number: int, code: int, grows_to: int) -> None:
            super().finish(number, -1, grows_to)

    assert TakenOver([86, 0]).supervise(TWO) == Stop(86, "a newer job owns the run")


def test_end_that_cannot_be_recorded_does_not_end_the_run() -> None:
    class Forgetful(World):
        def finish(self, number: int, code: int, grows_to: int) -> None:
            if number == 1:
                raise TemporarilyUnavailable("the store is away")
            super().finish(number, code, grows_to)

    world = Forgetful([85, 0])
    assert world.supervise(TWO) == Stop(0, "all steps are done")
    assert world.said == ["the end of launch 1 is not recorded: the store is away"]


def test_node_that_this_allocation_lost_is_left_out_of_the_next() -> None:
    class Losing(World):
        def finish(self, number: int, code: int, grows_to: int) -> None:
            super().finish(number, code, grows_to)
            lost = ("n2",) if code == 75 else ()
            self.attempts[number - 1] = replace(self.attempts[number - 1], blamed=lost, launcher_id=self.launcher_id)

    world = Losing([75, 0], nodes=[["n1", "n2", "n3"]])
    world.supervise(replace(TWO, scheduler_can_replace_nodes=True))
    assert [launch.nodes for launch in world.attempts] == [("n1", "n2"), ("n1", "n3")]


GROWING = RestartPolicy(min_nodes=1, max_nodes=3, micro_batches_per_step=3, grow_after_s=20.0)


def test_run_grows_back_when_a_node_is_there_again() -> None:
    world = World([75, 0], nodes=[["n1", "n2", "n3"], ["n1", "n2"], ["n1", "n2", "n3"]])
    world.extra, world.extra_at = ExtraNodes(("n3",)), 150.0
    assert world.supervise(GROWING) == Stop(0, "all steps are done")
    assert [(one.nodes, one.code, one.ended) for one in world.attempts] == [
        (("n1", "n2", "n3"), 75, 100.0),
        (("n1", "n2"), 85, 180.0),
        (("n1", "n2", "n3"), 0, 280.0),
    ]
    assert world.grows_to == [0, 3, 0]
    (line,) = [line for line in world.said if "instead of" in line]
    assert line.startswith("n3 can be used: ")
    assert line.endswith("; it costs one restart, about 10 s")


def test_node_that_is_idle_for_a_moment_is_no_reason_to_grow() -> None:
    class Flickering(World):
        looks = 0

        def extra_nodes(self, running: Sequence[str]) -> ExtraNodes:
            self.looks += 1
            return ExtraNodes(("n3",)) if self.looks % 2 else ExtraNodes()

    world = Flickering([0], nodes=[["n1", "n2"]])
    assert world.supervise(GROWING) == Stop(0, "all steps are done")
    assert (world.looks, len(world.attempts)) == (3, 1)


def test_launch_that_could_not_save_is_the_last_to_make_way() -> None:
    class Failing(World):
        def run_launch(self, number: int, nodes: Sequence[str], should_end: Callable[[], bool]) -> int:
            return 1 if super().run_launch(number, nodes, should_end) == 85 else 0

    world = Failing([0], nodes=[["n1", "n2"]], extra=ExtraNodes(("n3",)))
    assert world.supervise(GROWING) == Stop(0, "all steps are done")
    assert [one.code for one in world.attempts] == [1, 0]
    assert world.grows_to == [0, 0]


def test_stop_of_a_launch_that_makes_way_is_no_growth() -> None:
    class Stopped(World):
        def run_launch(self, number: int, nodes: Sequence[str], should_end: Callable[[], bool]) -> int:
            code = super().run_launch(number, nodes, should_end)
            self.told_at = self.now
            return code

    world = Stopped([0], nodes=[["n1", "n2"]], extra=ExtraNodes(("n3",)))
    assert world.supervise(GROWING) == Stop(85, "told to end")
    assert [line for line in world.said if line.startswith("n3 can be used")]
    assert world.grows_to == [0]


def test_growth_by_the_queue_gives_the_job_back_once_saved() -> None:
    queued = replace(GROWING, scheduler_can_replace_nodes=True)
    world = World([], nodes=[["n1", "n2"]], extra=ExtraNodes((), ("n4",)))
    world.attempts = [
        Launch(number, ("n3",), 75, ended=1.0, gained=90, step_s=1.0, blamed=("n3",)) for number in (1, 2)
    ]
    decision = world.supervise(queued)
    assert isinstance(decision, Requeue)
    assert decision.without == ("n3",)
    assert [(one.nodes, one.code) for one in world.attempts[2:]] == [(("n1", "n2"), 85)]
    stopped = World([], nodes=[["n1", "n2"]], extra=ExtraNodes((), ("n4",)), told_at=20.0)
    assert stopped.supervise(queued) == Stop(85, "told to end")
