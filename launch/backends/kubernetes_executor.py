"""Starts the launches of a run as pods, one a node, and follows them. It can be lost at any moment: pods go on without it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from launch.backends.kubernetes_nodes import RUN_NAME, PodNeeds, is_ready, left_out
from launch.backends.signals import CaughtSignal
from launch.supervisor.executor import TemporarilyUnavailable
from launch.supervisor.policy import ExtraNodes
from lustrain.problem import FAILED, UNREACHABLE, UserError
from trainer.errors import EXIT_PEERS, EXIT_REQUEUE, job_exit_code

POLL_S = 2.0
RENEW_S = 25.0
"""A kubelet renews the lease of its node every 10 s (https://kubernetes.io/docs/concepts/architecture/leases/#node-heart-beats).
Kubernetes itself takes a node for lost after 50 s, and its pod ten seconds later."""
UNPLACED_S = 60.0
"""How long a pod may find no room on its node, which had some before the launch."""
START_S = 1800.0
"""How long all pods of a launch may start: images of tens of GB are pulled meanwhile. Launchers themselves wait ten minutes for
each other."""
LAUNCH = "lustrain.dev/launch"
"""Label with the number of a pod's launch."""
LEASES = "kube-node-lease"
"""Namespace of the nodes' leases."""


class Kubectl(Protocol):
    def __call__(self, *words: str, text: str = "", namespace: str = "") -> str:
        """Return what kubectl prints; `namespace`: another one than the run's. UserError."""
        ...


@dataclass(frozen=True)
class PodState:
    """What is known of the pod of one node."""

    kind: str
    """starting, unplaced, running, ended, gone (it is no longer there), or lost with its node."""
    code: int | None = None
    why: str = ""
    """Why it does not run yet."""

    @property
    def over(self) -> bool:
        return self.kind in ("ended", "gone", "lost")


def pod_state(pod: Mapping[str, Any] | None, lost_nodes: frozenset[str]) -> PodState:
    """Return the state of a launch's pod. Pure."""
    if pod is None:
        return PodState("gone")
    status = pod["status"]
    containers = [one.get("state") or {} for one in status.get("containerStatuses", ())]
    ended = next((one["terminated"] for one in containers if "terminated" in one), None)
    if ended is not None:
        return PodState("ended", int(ended["exitCode"]))
    # Evicted, or its node's object is gone: nobody reports its container.
    if status.get("phase") in ("Succeeded", "Failed") or pod["spec"].get("nodeName") in lost_nodes:
        return PodState("lost")
    if status.get("phase") != "Pending":
        return PodState("running")
    unplaced = [
        one for one in status.get("conditions", ()) if one["type"] == "PodScheduled" and one["status"] == "False"
    ]
    waits = [one["waiting"] for one in containers if "waiting" in one]
    why = ": ".join(str(one[key]) for one in [*unplaced, *waits][:1] for key in ("reason", "message") if one.get(key))
    return PodState("unplaced" if unplaced else "starting", why=why)


class KubernetesExecutor:
    """An executor whose own signals go on to the launchers."""

    def __init__(
        self,
        kubectl: Kubectl,
        needs: PodNeeds,
        manifest: Callable[[int, Sequence[str]], str],
        reported_code: Callable[[int, Sequence[str]], int | None],
        notice_s: float,
        late_s: float,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        """`manifest` returns the pods of a launch on these nodes; `reported_code`, the job's exit code as its launchers
        reported it. After one pod has ended the others may go on for `late_s`, after one was lost for `notice_s`."""
        self._kubectl, self._needs, self._manifest = kubectl, needs, manifest
        self._reported_code, self._notice_s, self._late_s = reported_code, notice_s, late_s
        self._log, self._clock, self._sleep = log, clock, sleep
        self._left_out: dict[str, str] = {}
        self._renewed: dict[str, str] = {}
        """When nodes had renewed their leases, as the API says it: of those that may be lost since `_suspected_at`."""
        self._suspected_at = 0.0
        self._leases_seen = True
        self._caught = CaughtSignal()

    def healthy_nodes(self) -> list[str]:
        while not self._caught.number and self._waiting_for_leases():
            self.sleep(POLL_S)
        if self._caught.number:
            return []
        found = self._look()
        for name, why in found.items():
            if why and self._left_out.get(name) != why:
                self._log(f"{name} is left out: {why}")
        self._left_out = found
        return [name for name, why in found.items() if not why]

    def extra_nodes(self, running: Sequence[str]) -> ExtraNodes:
        return ExtraNodes(tuple(name for name, why in self._look().items() if not why and name not in running))

    def run_launch(self, number: int, nodes: Sequence[str], should_end: Callable[[], bool]) -> int:
        earlier = f"{RUN_NAME}={self._needs.name},{LAUNCH} notin ({number - 1},{number})"
        try:
            # The logs of the last launch but one go with its pods.
            self._kubectl("delete", "pods", f"--selector={earlier}", "--wait=false")
            self._kubectl("create", "--filename=-", text=self._manifest(number, nodes))
        except UserError as error:
            self._log(f"launch {number}: not all of its pods were created: {'; '.join(map(str, error.problems))}")
            # Whether the server has made some is not known.
            return self.follow(number, nodes, should_end, delete=True)
        return self.follow(number, nodes, should_end)

    def take_over(self, number: int, nodes: Sequence[str]) -> int | None:
        """Follow a launch whose supervisor is gone, and return the job's exit code; None where it has no pod. UserError.

        A supervisor may be lost before the server has made all pods: those that are there would wait for the others in vain.
        """
        found = len(self._pods(number))
        if not found:
            return None
        self._log(f"launch {number} on {', '.join(nodes)} goes on, and is taken over")
        return self.follow(number, nodes, delete=found < len(nodes))

    def follow(
        self, number: int, nodes: Sequence[str], should_end: Callable[[], bool] = lambda: False, *, delete: bool = False
    ) -> int:
        """Wait for the end of a launch, and return the job's exit code. With `delete` its pods are deleted first."""
        began, first_end, unplaced_since = self._clock(), None, None
        deleted, answers = False, True
        codes: dict[int, int] = {}
        explained = ""
        while True:
            try:
                states = self._states(number, nodes)
                # Who may delete none still learns that there is none.
                if delete and not deleted and not all(state.over for state in states):
                    self._delete(number)
                    deleted = True
                if not answers:
                    self._log("the API server answers again")
                answers = True
            except UserError as error:
                if self._caught.number:
                    why = f"the API server does not answer: whether launch {number} goes on is not known"
                    raise UserError(f"{why}; fix: fab train … --resume once it does", UNREACHABLE) from None
                if answers:
                    self._log(f"launch {number} goes on unseen: {'; '.join(map(str, error.problems))}")
                answers = False
                self.sleep(POLL_S)
                continue
            now = self._clock()
            codes |= {index: state.code for index, state in enumerate(states) if state.code is not None}
            if first_end is None and any(state.over for state in states):
                first_end = now
                self._suspect(nodes)
            if all(state.over for state in states):
                return self._end(number, nodes, states, list(codes.values()), deleted=deleted)
            kinds = [state.kind for state in states]
            unplaced_since = (now if unplaced_since is None else unplaced_since) if "unplaced" in kinds else None
            why = next((state.why for state in states if state.why), "")
            if why and why != explained and now - began > UNPLACED_S:
                explained = why
                self._log(f"launch {number}: {nodes[next(i for i, one in enumerate(states) if one.why)]}: {why}")
            # Launchers hear by themselves that one is silent, and say so; one that is told to end before says nothing.
            patience = self._notice_s if "lost" in kinds else self._late_s
            late = first_end is not None and now - first_end > patience
            stuck = unplaced_since is not None and now - unplaced_since > UNPLACED_S
            slow = "running" not in kinds and now - began > START_S
            # One that makes way has ranks that can save.
            grows = all(kind == "running" for kind in kinds) and should_end()
            delete = delete or bool(self._caught.number) or late or stuck or slow or grows
            if not (delete and not deleted):
                self.sleep(POLL_S)

    def sleep(self, seconds: float) -> None:
        (self._sleep or self._caught.sleep)(seconds)

    def stop_reason(self) -> str:
        return self._caught.stop_reason()

    def _end(
        self, number: int, nodes: Sequence[str], states: Sequence[PodState], codes: Sequence[int], *, deleted: bool
    ) -> int:
        """Return the exit code of a launch that is over. Pods that were deleted take theirs with them; launchers have reported
        it before."""
        lost = [f"{self._needs.name}-{number}-{index}" for index, one in enumerate(states) if one.kind == "lost"]
        if lost and not deleted:
            # Where its node comes back, nothing shall go on there. Those that have ended keep their logs.
            try:
                self._kubectl("delete", "pods", *lost, "--ignore-not-found", "--wait=false")
            except UserError as error:
                self._log(f"launch {number}: its lost pods are not deleted: {'; '.join(map(str, error.problems))}")
        whole = len(codes) == len(states)
        code = job_exit_code(codes) if whole else self._reported_code(number, nodes)
        code = EXIT_PEERS if code is None else code
        if code in (0, EXIT_REQUEUE):
            # All of them have left as they should.
            self._renewed = {}
        return code

    def _states(self, number: int, nodes: Sequence[str]) -> list[PodState]:
        pods = self._pods(number)
        by_index = {int(pod["metadata"]["name"].rpartition("-")[2]): pod for pod in pods}
        lost = self._silent_nodes() if not self._renewed.keys().isdisjoint(nodes) else frozenset()
        if any(pod["metadata"].get("deletionTimestamp") for pod in pods):
            ready = {node["metadata"]["name"] for node in self._items("get", "nodes") if is_ready(node)}
            lost |= {node for node in nodes if node not in ready}
        return [pod_state(by_index.get(index), lost) for index in range(len(nodes))]

    def _pods(self, number: int) -> list[dict[str, Any]]:
        return self._items("get", "pods", f"--selector={self._selector(number)}")

    def _delete(self, number: int) -> None:
        """Have the pods of a launch end: they get SIGTERM, save, and are killed after their grace."""
        self._kubectl("delete", "pods", f"--selector={self._selector(number)}", "--wait=false")

    def _selector(self, number: int) -> str:
        return f"{RUN_NAME}={self._needs.name},{LAUNCH}={number}"

    def _look(self) -> dict[str, str]:
        """Return, by node, why no pod of the run can start there. TemporarilyUnavailable."""
        try:
            nodes = self._items("get", "nodes")
            pods = self._items("get", "pods", "--all-namespaces", "--field-selector=status.phase!=Succeeded")
        except UserError as error:
            raise TemporarilyUnavailable("; ".join(map(str, error.problems))) from None
        found = left_out(nodes, pods, self._needs)
        silent = self._unrenewed() if self._renewed else frozenset()
        return {name: why or ("its kubelet is silent" if name in silent else "") for name, why in found.items()}

    def _items(self, *words: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = json.loads(self._kubectl(*words, "--output=json"))["items"]
        return items

    def _suspect(self, nodes: Sequence[str]) -> None:
        """Remember when these nodes were last heard of: one of them may be lost, and Kubernetes notices it late."""
        leases = self._leases() or {}
        self._renewed = {node: leases[node] for node in nodes if node in leases}
        self._suspected_at = self._clock()

    def _unrenewed(self) -> frozenset[str]:
        """Return the nodes that have not been heard of since they were suspected."""
        leases = self._leases()
        if leases is not None:
            self._renewed = {node: time for node, time in self._renewed.items() if leases.get(node) == time}
        return frozenset(self._renewed)

    def _silent_nodes(self) -> frozenset[str]:
        """Return those of them that ought to have been heard of by now."""
        unrenewed = self._unrenewed()
        return unrenewed if self._clock() - self._suspected_at >= RENEW_S else frozenset()

    def _waiting_for_leases(self) -> bool:
        return bool(self._renewed) and self._clock() - self._suspected_at < RENEW_S and bool(self._unrenewed())

    def _leases(self) -> dict[str, str] | None:
        """Return when each node was last heard of; None where that is not known. Who may not look at leases waits until
        Kubernetes takes a node for lost."""
        try:
            answer = json.loads(self._kubectl("get", "leases", "--output=json", namespace=LEASES))
        except UserError as error:
            if error.exit_code == FAILED and self._leases_seen:
                self._leases_seen = False
                self._log(f"a lost node is noticed a minute late: {'; '.join(map(str, error.problems))}")
            return None
        return {one["metadata"]["name"]: str(one["spec"].get("renewTime", "")) for one in answer["items"]}
