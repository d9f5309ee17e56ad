"""Machines without a scheduler as a backend: `fab train` supervises over SSH what units of systemd run on them."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from launch import runs
from launch.backends import HeldJob, LaunchPlan, LogLine, Submission
from launch.backends.local import RunJournal, print_line
from launch.backends.log_file import LineReader
from launch.backends.slurm import FIRST_PORT, PORTS, SPARE_S, late_s, ranks_environment
from launch.backends.ssh_executor import SshExecutor, SshPlan
from launch.backends.ssh_nodes import Nodes, as_record, from_record, nodes_of_group
from launch.backends.ssh_unit import (
    FORBIDDEN_CHARACTER,
    LOG_FOLDER,
    Inspection,
    Launcher,
    Patience,
    check_variables,
    launch_of_unit,
    remove_script,
    unit_name,
    unit_prefix,
)
from launch.flags import TrainFlags
from launch.request import RunRequest, Target
from launch.supervisor.executor import Superseded, TemporarilyUnavailable
from launch.supervisor.loop import supervise
from launch.supervisor.policy import DONE, Launch, Stop
from lustrain.cluster import Cluster
from lustrain.problem import UNREACHABLE, USAGE, Problem, UserError, problem
from node_setup.fleet.faults import UNREACHABLE as NOT_REACHED
from node_setup.fleet.faults import Fault
from node_setup.fleet.hosts import Node
from trainer.environment import max_silence_s
from trainer.launch import journal
from trainer.launch.heartbeat import SILENT_S
from trainer.storage import ObjectStore, StorageError

SERVED = ("ec2", "machines")
CHUNK = 4 << 20
"""Bytes of a log that one call reads."""
NOTICE_S = 30.0
"""Seconds beside those of the allowed silence, in which a launcher notices that others are lost, and ends."""


@dataclass(frozen=True)
class SshOptions:
    """Which nodes are used."""

    cluster: Cluster
    group: str
    efa: bool


class SshBackend:
    own_flags = ()
    uses_groups = True
    scheduler_can_replace_nodes = False

    def serves(self, cluster: Cluster) -> bool:
        return cluster.backend in SERVED and cluster.slurm is None and cluster.kubernetes is None

    def default_ranks(self, target: Target, problems: list[Problem]) -> int:
        return target.group.gpus if target.group else 0

    def options(self, flags: TrainFlags, target: Target, problems: list[Problem]) -> SshOptions | None:
        cluster, group = target.cluster, target.group
        if cluster is None:
            problems.append(problem("--on", flags.on, "needs a Cluster", fix="give --cluster or --stack"))
            return None
        if cluster.backend not in SERVED:
            why = f"nodes of {cluster.backend} belong to a scheduler"
            problems.append(problem("--on", flags.on, why, fix="leave --on out"))
        if target.spare_nodes:
            fix = "leave it out: every other node of the group takes a lost one's place"
            problems.append(problem("--spare", flags.spare, "only valid with --on slurm", fix=fix))
        for path, word in {"run.uri": target.run, "--python": flags.python or ""}.items():
            if match := FORBIDDEN_CHARACTER.search(word):
                problems.append(problem(path, word, f"holds {match[0]!r}, which a unit of systemd cannot"))
        if flags.image != TrainFlags.image:
            problems.append(problem("--image", flags.image, "only valid with --on kubernetes"))
        name = next((name for name, one in cluster.groups.items() if one is group), "")
        return SshOptions(cluster, name, bool(group and group.efa))

    def plan(self, request: RunRequest, folder: Path, environ: Mapping[str, str]) -> LaunchPlan:
        plan = ssh_plan(request, environ)
        check_variables(plan.variables)
        names = tuple(f"NODE{rank}" for rank in range(request.policy.max_nodes))
        unit, user = unit_name(request.run, 1), request.options.cluster.reach.user
        master = f"ADDRESS0:{plan.port + 1}"
        launcher = Launcher(unit, user, plan.python, plan.run, plan.config, names, master, plan.ranks, plan.stop_s)
        return LaunchPlan(tuple(launcher.command(0)))

    def check(self, request: RunRequest, plan: LaunchPlan, folder: Path, *, resume: bool) -> None:
        options: SshOptions = request.options
        nodes = Nodes()
        try:
            print("lustrain: looking at the nodes", file=sys.stderr, flush=True)
            common = ssh_plan(request, os.environ)
            found = nodes.inspect(nodes_of_group(options.cluster, options.group), common.python, common.variables)
        finally:
            nodes.close()
        refuse_too_few(request, {node.name: one for node, one in found.items()}, resume=resume)

    def submit(
        self, request: RunRequest, plan: LaunchPlan, folder: Path, store: ObjectStore, output: IO[Any] | None
    ) -> Submission:
        options: SshOptions = request.options
        recorded = recorded_nodes(runs.read_record(store, runs.SUBMITTED), request.run)

        def save_nodes(used: Sequence[Node]) -> None:
            listed = {node.name: node for node in (*recorded, *used)}
            recorded[:] = listed.values()
            job = {"nodes": [as_record(node) for node in recorded], "current": [node.name for node in used]}
            runs.save_job(store, request.backend, job)

        def list_nodes() -> list[Node]:
            return nodes_of_group(options.cluster, options.group)

        nodes = Nodes()
        try:
            executor = SshExecutor(ssh_plan(request, os.environ), nodes, list_nodes, save_nodes, print_line)
            end = take_over(executor, store, recorded) or supervise(
                executor, OwnedJournal(store), request.policy, print_line, max_wait_s=request.max_wait_s
            )
        finally:
            nodes.close()
        assert isinstance(end, Stop), "machines have no queue"
        data = {"run": request.run, "exit_code": end.code, "why": end.why}
        return Submission((f"{request.run}: {end.why}",), data, code=end.code)

    def describe(self, job: Mapping[str, Any]) -> str:
        return f"nodes over SSH: {', '.join(map(str, job.get('current', ())))}"

    def held_job(self, run: str) -> HeldJob | None:
        return None

    def cancel(self, run: str, job: Mapping[str, Any] | None) -> list[str]:
        """Stop the units on the nodes of the last launch. Those of earlier ones have ended, or do when they hear no peer."""
        script = remove_script(unit_prefix(run))
        nodes = Nodes()
        try:
            recorded = recorded_nodes({"ssh": job or {}}, run)
            used = [node for node in recorded if node.name in (job or {}).get("current", ())]
            answers = nodes.each(used, lambda node: nodes.run(node, script, root=True, seconds=600))
        finally:
            nodes.close()
        faults = {node.name: answer for node, answer in answers.items() if isinstance(answer, Fault)}
        if faults:
            fix = "run it again when the node answers; its launcher ends by itself once it does not hear the others"
            raise UserError(
                [f"{name}: {fault.kind}: {fault.why}; fix: {fix}" for name, fault in faults.items()], UNREACHABLE
            )
        return [f"unit {unit} on {node.name}" for node, answer in answers.items() for unit in str(answer).split()]

    def read_log(
        self, run: str, job: Mapping[str, Any] | None, launch: int | None, more: Callable[[], bool]
    ) -> Iterator[LogLine]:
        """Read the files on the nodes that the run was started on, one a launch."""
        if job is None:
            raise UserError(problem("RUN", run, "no node of it is recorded", fix=f"fab status {run}"))
        logs = [NodeLog(node, run, launch) for node in recorded_nodes({"ssh": job}, run)]
        nodes = Nodes()
        try:
            while True:
                goes_on = more()
                for log_of_node in logs:
                    yield from log_of_node.new_lines(nodes, last=not goes_on)
                if not goes_on:
                    return
        finally:
            nodes.close()


class OwnedJournal(RunJournal):
    """The journal of a run that this process has requested. Once another one has, on any machine, the run is that one's."""

    def read(self) -> tuple[list[Launch], str]:
        self._check_owner()
        return super().read()

    def begin(self, nodes: Sequence[str], idle: Sequence[str]) -> int:
        self._check_owner()
        return super().begin(nodes, idle)

    def _check_owner(self) -> None:
        try:
            request = runs.read_record(self.store, journal.REQUEST) or {}
        except StorageError as error:
            raise TemporarilyUnavailable(str(error)) from None
        if (request.get("host"), request.get("pid")) != (platform.node(), os.getpid()):
            raise Superseded(f"{request.get('by')} has requested the run since")


class NodeLog:
    """The logs of a run on one node, and how far they were read."""

    def __init__(self, node: Node, run: str, launch: int | None) -> None:
        self._node, self._run, self._launch = node, run, launch
        self._files: dict[str, tuple[int, LineReader]] = {}
        self._silent = False

    def new_lines(self, nodes: Nodes, *, last: bool) -> Iterator[LogLine]:
        """Yield what was printed since the last call, at the `last` one also a line without an end. A node that does not answer
        is named once."""
        try:
            listing = nodes.run(
                self._node, f"cd {LOG_FOLDER} 2>/dev/null && ls -1 {unit_prefix(self._run)}*.log 2>/dev/null; exit 0"
            )
            for name in sorted(listing.split()):
                number = launch_of_unit(self._run, name)
                if number is not None and self._launch in (None, number):
                    yield from self._of_file(nodes, name, number, last=last)
            self._silent = False
        except Fault as fault:
            if not self._silent:
                print_line(f"{self._node.name}: its log cannot be read: {fault.why}")
            self._silent = True

    def _of_file(self, nodes: Nodes, name: str, launch: int, *, last: bool) -> Iterator[LogLine]:
        offset, lines = self._files.get(name, (0, LineReader()))
        while True:
            script = f"tail -c +{offset + 1} {LOG_FOLDER}/{name} | head -c {CHUNK}"
            data = nodes.read(self._node, script, root=True)
            offset += len(data)
            self._files[name] = (offset, lines)
            ends = len(data) < CHUNK
            for text in lines.feed(data) + (lines.rest() if ends and last else []):
                yield LogLine(text, self._node.name, launch)
            if ends:
                return


def ssh_plan(request: RunRequest, environ: Mapping[str, str]) -> SshPlan:
    """Return what all launches of the request have in common. Pure."""
    variables = ranks_environment(environ) | ({"NCCL_NET_PLUGIN": "ofi"} if request.options.efa else {})
    notice_s = max_silence_s(SILENT_S, variables) + NOTICE_S
    return SshPlan(
        run=request.run,
        config=request.config_uri,
        python=request.python or sys.executable,
        ranks=request.policy.ranks_per_node,
        port=FIRST_PORT + sum(request.run.encode()) % PORTS,
        variables=variables,
        patience=Patience(notice_s, notice_s, late_s(request)),
        stop_s=round(request.grace_s) + SPARE_S,
    )


def refuse_too_few(request: RunRequest, found: Mapping[str, Inspection], *, resume: bool) -> None:
    """Refuse a request for which too few nodes are ready, or that would start a run a second time. UserError."""
    busy = {name: unit for name, one in found.items() for unit in one.running()}
    own = {name: unit for name, unit in busy.items() if launch_of_unit(request.run, unit) is not None}
    if own and not resume:
        name, unit = next(iter(own.items()))
        fix = f"take it over by --resume, or fab stop {request.run} --now"
        raise UserError(problem("run.uri", request.run, f"unit {unit} of it still runs on {name}", fix=fix))
    bad = {name: one for name, one in found.items() if one.why}
    foreign = busy.keys() - own.keys() - bad.keys()
    ready = len(found) - len(bad) - len(foreign)
    low = request.policy.min_nodes
    if ready >= low:
        return
    lines: list[str] = [f"{name}: {one.why}" + (f"; fix: {one.fix}" if one.fix else "") for name, one in bad.items()]
    lines += [f"{name}: it trains another run, by unit {busy[name]}; fix: wait for its end" for name in sorted(foreign)]
    why = f"{ready} of {len(found)} nodes are ready"
    lines.append(problem("--nodes", low, why, fix="mend these, or ask for fewer nodes"))
    unreachable = any(one.why.startswith(f"{NOT_REACHED}: ") for one in bad.values())
    raise UserError(lines, UNREACHABLE if unreachable else USAGE)


def recorded_nodes(submitted: Mapping[str, Any] | None, run: str) -> list[Node]:
    """Return the nodes that launches of the run were started on."""
    return [from_record(one, run) for one in ((submitted or {}).get("ssh") or {}).get("nodes", ())]


def take_over(executor: SshExecutor, store: ObjectStore, recorded: Sequence[Node]) -> Stop | None:
    """Follow the launch whose supervisor is gone to its end, so that no other one begins beside it; return how the run then
    ended, None where it goes on."""
    records = journal.read(store)
    if not records or "ended" in records[-1]:
        return None
    record = records[-1]
    by_name = {node.name: node for node in recorded}
    nodes = [by_name[name] for name in record["nodes"] if name in by_name]
    if not nodes:
        return None
    print_line(f"launch {record['attempt']} on {', '.join(record['nodes'])} goes on, and is taken over")
    code = executor.follow(record["attempt"], nodes)
    done = journal.finish(store, record["attempt"], code)
    return Stop(DONE, "all steps are done") if done["code"] == DONE else None


BACKEND = SshBackend()
