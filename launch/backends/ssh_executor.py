"""Starts the launches of a run over SSH and follows them. It can be lost at any moment: units go on without it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from launch.backends.signals import CaughtSignal
from launch.backends.ssh_nodes import CALL_S, REFUSED, Nodes
from launch.backends.ssh_unit import (
    LOST,
    RUNNING,
    STARTING,
    UNKNOWN,
    Inspection,
    NodeState,
    Runner,
    SshPlan,
    environment_text,
    launch_code,
    launch_of_unit,
    next_step,
    parse_states,
    remove_script,
    signal_script,
    start_script,
    state_script,
    unit_name,
)
from launch.supervisor.executor import TemporarilyUnavailable, launch_port
from launch.supervisor.policy import ExtraNodes
from lustrain.problem import UNREACHABLE, UserError
from node_setup.fleet.faults import NOT_REACHED, SUDO, Fault
from node_setup.fleet.hosts import Node
from trainer.errors import EXIT_FAILURE, EXIT_PEERS
from trainer.run.journal import put_node_exit
from trainer.storage import StorageError

POLL_S = 2.0
STATE_S = 15.0
"""For one look at a node; one that is slower counts as not known."""
NOT_STARTED = (125, 126, 127)
"""Codes of `docker run` and `podman run` for what they could not start: https://docs.docker.com/engine/containers/run/#exit-status"""
SIGNAL_AGAIN_S = 30.0
"""After which a launcher that goes on gets the same signal again: docker drops one that comes while a container starts."""


class SshExecutor:
    """An executor whose nodes are reached over SSH, and whose own signals go on to the launchers."""

    def __init__(
        self,
        plan: SshPlan,
        nodes: Nodes,
        list_nodes: Callable[[], list[Node]],
        ended_nodes: Callable[[Sequence[Node]], set[Node]],
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """`list_nodes` returns the group's nodes now; `ended_nodes`, which of these nodes certainly run nothing any more;
        `stopped`, whether `fab stop` has requested the run's end."""
        self._plan, self._nodes, self._list_nodes, self._ended_nodes = plan, nodes, list_nodes, ended_nodes
        self._log, self._clock, self._stopped = log, clock, stopped
        self.newest_launch = 0
        """Of those that this process knows to have begun; a later one is another supervisor's."""
        self._known: dict[str, Node] = {}
        self._addresses: dict[str, str] = {}
        self._runners: dict[str, Runner] = {}
        self._left_out: dict[str, str] = {}
        self._starts_until: dict[tuple[str, Node], float] = {}
        """Until when a unit that is not there yet may still start on a node."""
        self._inspecting = False
        self._stop_seen = False
        self._caught = CaughtSignal(self._stop_inspecting)

    def healthy_nodes(self) -> list[str]:
        try:
            listed = self._list_nodes()
        except UserError as error:
            raise TemporarilyUnavailable(str(error)) from None
        self._known.update((node.name, node) for node in listed)
        inspections = {} if self._caught.number else self._inspect(listed)
        if self.stop_reason():
            return []
        left_out = {node.name: self._why_not(node, inspection) for node, inspection in inspections.items()}
        for name, why in left_out.items():
            if why and self._left_out.get(name) != why:
                self._log(f"{name} is left out: {why}")
        self._left_out = left_out
        self._addresses.update(
            (node.name, inspection.address) for node, inspection in inspections.items() if inspection.address
        )
        self._runners.update((node.name, inspection.runner) for node, inspection in inspections.items())
        return [node.name for node in listed if not left_out[node.name]]

    def _inspect(self, listed: Sequence[Node]) -> dict[Node, Inspection]:
        """Inspect nodes. They may fetch the image for many minutes, for which neither a signal nor `fab stop` waits."""
        done = threading.Event()

        def look_for_stop() -> None:
            while not done.wait(POLL_S):
                # A store that does not answer does not say that the run is stopped.
                with suppress(StorageError):
                    if self._stopped():
                        self._stop_seen = True
                        self._nodes.stop()
                        return

        thread = threading.Thread(target=look_for_stop, name="stop-look", daemon=True)
        self._inspecting = True
        if self._plan.container is not None:
            thread.start()
        try:
            return self._nodes.inspect(listed, self._plan)
        finally:
            self._inspecting = False
            done.set()
            if thread.is_alive():
                thread.join()

    def known_nodes(self, names: Sequence[str]) -> list[Node]:
        """Return the nodes that `healthy_nodes` has named."""
        return [self._known[name] for name in names]

    def extra_nodes(self, running: Sequence[str]) -> ExtraNodes:
        try:
            others = [node for node in self._list_nodes() if node.name not in running]
        except UserError as error:
            raise TemporarilyUnavailable(str(error)) from None
        # The next launch fetches the image: that may take many minutes, in which this one is not followed.
        inspections = self._nodes.inspect(others, self._plan, seconds=STATE_S, try_image=False)
        idle = (node.name for node, one in inspections.items() if not one.why and not any(one.running()))
        return ExtraNodes(tuple(idle))

    def run_launch(self, number: int, nodes: Sequence[str], should_end: Callable[[], bool]) -> int:
        chosen = self.known_nodes(nodes)
        if not self._start(number, chosen):
            self._signal_all(unit_name(self._plan.run, number), chosen, "TERM")
        return self.follow(number, chosen, should_end=should_end)

    def follow(
        self,
        number: int,
        nodes: Sequence[Node],
        *,
        age_s: float | None = None,
        should_end: Callable[[], bool] = lambda: False,
    ) -> int:
        """Wait for the end of a launch, and return the job's exit code.

        `age_s`: seconds since another process began it, where some of its launchers may still be to start.
        """
        unit, patience = unit_name(self._plan.run, number), self._plan.patience
        self.newest_launch = max(self.newest_launch, number)
        if age_s is not None:
            self._expect(unit, nodes, age_s)
        first_end: float | None = None
        stopped_at: float | None = None
        silent = ending = False
        signalled: dict[Node, float] = {}
        while True:
            states = self._states(unit, nodes)
            now = self._clock()
            if first_end is None and any(state.kind in ("ended", "lost") for state in states):
                first_end = now
            if silent != all(state == UNKNOWN for state in states):
                silent = not silent
                self._log(f"no node answers: launch {number} may go on there" if silent else "nodes answer again")
            step = next_step(states, 0.0 if first_end is None else now - first_end, patience)
            if step == "over":
                self._report_containers(number, nodes, states)
                self._remove(unit, nodes)
                return launch_code(states)
            if self._caught.number and silent:
                why = f"no node answers: whether launch {number} goes on is not known"
                raise UserError(f"{why}; fix: fab train … --resume once they answer", UNREACHABLE)
            if not self._caught.number and not ending and all(state == RUNNING for state in states):
                ending = should_end()
            if self._caught.number or ending:
                # One that starts, or does not answer, gets it later.
                here = [node for node, state in zip(nodes, states, strict=True) if state == RUNNING]
                due = [node for node in here if now - signalled.get(node, -SIGNAL_AGAIN_S) >= SIGNAL_AGAIN_S]
                signalled |= dict.fromkeys(self._signal_all(unit, due, "TERM"), now)
            if step == "stop" and stopped_at is None:
                stopped_at = now
                self._signal_all(unit, nodes, "TERM")
            elif stopped_at is not None and now - stopped_at > self._plan.stop_s:
                self._signal_all(unit, nodes, "KILL", whole=True)
            self.sleep(POLL_S)

    def sleep(self, seconds: float) -> None:
        self._caught.sleep(seconds)

    def stop_reason(self) -> str:
        return self._caught.stop_reason() or ("fab stop ended it" if self._stop_seen else "")

    def _start(self, number: int, nodes: Sequence[Node]) -> bool:
        """Start the launcher of every node; whether none refused. A lost connection is no refusal: the unit may be there."""
        plan, names = self._plan, tuple(node.name for node in nodes)
        unit = unit_name(plan.run, number)
        master = f"{self._addresses.get(names[0]) or nodes[0].address}:{launch_port(plan.port, number)}"
        variables = environment_text(plan.variables, number)
        launcher = plan.launcher(number, names, master)

        def start(node: Node) -> str:
            script = start_script(launcher, nodes.index(node), self._runners[node.name])
            return self._nodes.run(node, script, variables, root=True)

        answers = self._nodes.each(nodes, start)
        refused = {
            node: answer
            for node, answer in answers.items()
            if isinstance(answer, Fault) and answer.kind in (*NOT_REACHED, REFUSED, SUDO)
        }
        for node, answer in answers.items():
            if isinstance(answer, Fault) and node not in refused:
                self._log(f"{node.name}: whether its launcher was started is not known: {answer.why}")
                self._expect(unit, [node])
        for node, fault in refused.items():
            line = f"{node.name}: its launcher was not started: {fault.why}"
            self._log(line)
            try:
                put_node_exit(plan.run, number, nodes.index(node), EXIT_PEERS, EXIT_FAILURE, "", line)
            except UserError as error:
                self._log(f"why {node.name} failed is not recorded in the run: {error}")
        return not refused

    def _states(self, unit: str, nodes: Sequence[Node]) -> list[NodeState]:
        script = state_script(unit)
        answers = self._nodes.each(nodes, lambda node: self._nodes.run(node, script, seconds=STATE_S))
        ended = self._ended([node for node, answer in answers.items() if isinstance(answer, Fault)])
        return [
            (LOST if node in ended else UNKNOWN) if isinstance(answer, Fault) else self._state(unit, node, answer)
            for node, answer in answers.items()
        ]

    def _state(self, unit: str, node: Node, answer: str) -> NodeState:
        state = parse_states(answer).get(unit, LOST)
        return STARTING if state == LOST and self._clock() < self._starts_until.get((unit, node), 0.0) else state

    def _expect(self, unit: str, nodes: Sequence[Node], age_s: float = 0.0) -> None:
        """Count a unit that is not there as one that starts, for as long as its start may take: to log in, to wait for another
        start, and to stop what is left of an earlier launch."""
        start_s = 2 * CALL_S + self._plan.stop_s
        until = self._clock() + start_s - min(max(age_s, 0.0), start_s)
        self._starts_until.update(((unit, node), until) for node in nodes)

    def _ended(self, silent: Sequence[Node]) -> set[Node]:
        try:
            return self._ended_nodes(silent) if silent else set()
        except UserError:
            return set()

    def _signal_all(self, unit: str, nodes: Sequence[Node], name: str, *, whole: bool = False) -> set[Node]:
        """Signal the launchers that can be reached, and return the nodes that took it; one that has ended takes none."""
        script = signal_script(unit, name, whole=whole)
        answers = self._nodes.each(nodes, lambda node: self._nodes.run(node, script, root=True))
        return {node for node, answer in answers.items() if not isinstance(answer, Fault)}

    def _report_containers(self, number: int, nodes: Sequence[Node], states: Sequence[NodeState]) -> None:
        """Name the nodes whose engine did not start the launcher."""
        for node, state in zip(nodes, states, strict=True):
            if self._plan.container is not None and state.code in NOT_STARTED:
                why = f"its container did not start (exit code {state.code})"
                self._log(f"{node.name}: {why}; fix: fab logs {self._plan.run} --launch {number} shows why")

    def _remove(self, unit: str, nodes: Sequence[Node]) -> None:
        script = remove_script(unit)
        answers = self._nodes.each(
            nodes, lambda node: self._nodes.run(node, script, root=True, seconds=self._plan.stop_s + 30)
        )
        for node, answer in answers.items():
            if isinstance(answer, Fault):
                self._log(f"{node.name}: its unit is not removed: {answer.why}")

    def _why_not(self, node: Node, inspection: Inspection) -> str:
        if inspection.why:
            return inspection.why
        for unit in inspection.running():
            launch = launch_of_unit(self._plan.run, unit)
            if launch is None:
                return f"it trains another run, by unit {unit}"
            if launch > self.newest_launch:
                return f"unit {unit} is of a launch that another fab train began"
            # It was cut off while the others ended that launch.
            self._signal_all(unit, [node], "TERM")
            return f"unit {unit} of an earlier launch still ends"
        return ""

    def _stop_inspecting(self, _signal: int) -> None:
        if self._inspecting:
            # A node may fetch the image for many minutes.
            self._nodes.stop()
