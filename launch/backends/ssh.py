"""Machines without a scheduler as a backend: `fab train` supervises over SSH what units of systemd run on them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from launch import runs
from launch.backends import HeldJob, LaunchPlan, LogLine, Submission
from launch.backends.local import OwnedJournal
from launch.backends.log_file import LineReader
from launch.backends.ranks import NOTICE_S, SPARE_S, first_port, late_s, ranks_environment
from launch.backends.ssh_executor import SshExecutor
from launch.backends.ssh_handover import check_from_node, hand_over, supervisor_node
from launch.backends.ssh_nodes import Nodes, all_nodes, as_record, ended_nodes, from_record, nodes_of_group
from launch.backends.ssh_unit import (
    FORBIDDEN_CHARACTER,
    LOG_FOLDER,
    Inspection,
    Patience,
    Runner,
    SshPlan,
    check_variables,
    launch_of_unit,
    remove_script,
    supervisor_log,
    unit_prefix,
)
from launch.container import DOCKER, HOST_ONLY, Container, Engine, without_mount
from launch.flags import TrainFlags
from launch.image import container_of
from launch.request import FILE, RunRequest, Target
from launch.supervisor.loop import supervise
from launch.supervisor.policy import DONE, Stop
from lustrain.cluster import Cluster
from lustrain.problem import UNREACHABLE, USAGE, Problem, UserError, problem
from lustrain.progress import print_line
from node_setup.fleet.faults import UNREACHABLE as NOT_REACHED
from node_setup.fleet.faults import Fault
from node_setup.fleet.hosts import Node
from trainer.environment import max_silence_s
from trainer.node.heartbeat import SILENT_S
from trainer.run import journal
from trainer.storage import ObjectStore

SERVED = ("ec2", "machines")
CHUNK = 1 << 20
"""Bytes of a log that one call reads; so much of each node is held at once."""


@dataclass(frozen=True)
class SshOptions:
    """Which nodes are used."""

    cluster: Cluster
    group: str
    efa: bool
    container: Container | None
    """What ranks run in; None on the nodes themselves."""
    detach: bool = False
    """Hand the run over to one of its nodes, which supervises it."""


class SshBackend:
    own_flags = ("grow_after", "image")
    uses_groups = True
    scheduler_can_replace_nodes = False
    supervised_by_caller = True
    supervises_ranges = False

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
        name = next((name for name, one in cluster.groups.items() if one is group), "")
        return SshOptions(cluster, name, bool(group and group.efa), container_of(flags, target, problems), flags.detach)

    def plan(self, request: RunRequest, folder: Path, environ: Mapping[str, str]) -> LaunchPlan:
        plan = ssh_plan(request, environ)
        check_variables(plan.variables)
        names = tuple(f"NODE{rank}" for rank in range(request.policy.max_nodes))
        user = request.options.cluster.reach.user
        master = f"ADDRESS0:{plan.port + 1}"
        launcher = plan.launcher(1, names, master)
        # Which engine a node has, and what the user's number is there, is not known before it answers.
        engine = Engine(DOCKER, "/usr/bin/docker", "UID:GID") if plan.container else None
        return LaunchPlan(tuple(launcher.command(0, Runner(user, engine))))

    def check(self, request: RunRequest, plan: LaunchPlan, folder: Path, *, resume: bool) -> None:
        options: SshOptions = request.options
        nodes = Nodes()
        try:
            common = ssh_plan(request, os.environ)
            print_line("looking at the nodes" + (", which fetch the image if they lack it" if common.container else ""))
            if common.container:
                # The run's folder is made when all is well.
                common = replace(common, container=without_mount(common.container, request.run.removeprefix(FILE)))
            inspections = nodes.inspect(nodes_of_group(options.cluster, options.group), common)
            refuse_too_few(request, {node.name: one for node, one in inspections.items()}, resume=resume)
            if options.detach:
                node = supervisor_node(inspections)
                print_line(f"{node.name} looks at the nodes, which it will supervise")
                check_from_node(nodes, node, request, common, resume=resume)
        finally:
            nodes.close()

    def submit(
        self, request: RunRequest, plan: LaunchPlan, folder: Path, store: ObjectStore, output: IO[Any] | None
    ) -> Submission:
        cluster = request.options.cluster
        if not request.options.detach:
            return submission_of(request, supervise_run(request, store, cluster))
        nodes = Nodes()
        try:
            common = ssh_plan(request, os.environ)
            inspections = nodes.inspect(nodes_of_group(cluster, request.options.group), common)
            return hand_over(nodes, supervisor_node(inspections), request, common, store)
        finally:
            nodes.close()

    def describe(self, job: Mapping[str, Any]) -> str:
        supervised = f"; supervised on {job['supervisor']}" if job.get("supervisor") else ""
        return f"nodes over SSH: {', '.join(map(str, job.get('current', ())))}{supervised}"

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
        nodes = Nodes()
        try:
            yield from read_node_logs(nodes, recorded_nodes({"ssh": job}, run), run, launch, more)
        finally:
            nodes.close()


class NodeLog:
    """The logs of a run on one node, and how far they were read."""

    def __init__(self, node: Node, run: str, launch: int | None) -> None:
        self._node, self._run, self._launch = node, run, launch
        self._files: dict[str, tuple[int, LineReader]] = {}
        self._unread: list[tuple[str, int | None]] = []
        """Files with their launches, of which there is more to read since they were last listed."""
        self._silent = False

    def list_files(self, nodes: Nodes) -> None:
        """List the files. Fault."""
        own = supervisor_log(self._run).rpartition("/")[2]
        files = f"{unit_prefix(self._run)}*.log {own}"
        script = f"cd {LOG_FOLDER} 2>/dev/null && stat -c '%n %s' {files} 2>/dev/null; exit 0"
        self._unread = []
        for line in sorted(nodes.run(self._node, script).splitlines()):
            name, _, size = line.partition(" ")
            number = launch_of_unit(self._run, name)
            known = name == own or number is not None
            if known and self._launch in (None, number) and int(size) > self._progress(name)[0]:
                self._unread.append((name, number))

    def read_piece(self, nodes: Nodes) -> list[LogLine] | None:
        """Return lines of the next piece of what was listed; None where all of it is read. Fault."""
        if not self._unread:
            return None
        name, launch = self._unread[0]
        offset, lines = self._progress(name)
        script = f"tail -c +{offset + 1} {LOG_FOLDER}/{name} | head -c {CHUNK}"
        data = nodes.read(self._node, script, root=True)
        self._files[name] = (offset + len(data), lines)
        if len(data) < CHUNK:
            del self._unread[0]
        return [LogLine(text, self._node.name, launch) for text in lines.feed(data)]

    def unfinished_lines(self) -> list[LogLine]:
        """Return the lines without an end, each as it is so far."""
        files = [(launch_of_unit(self._run, name), lines) for name, (_, lines) in sorted(self._files.items())]
        return [LogLine(text, self._node.name, launch) for launch, lines in files for text in lines.unfinished_line()]

    def report(self, fault: Fault | None) -> None:
        """Name a node that does not answer once, until it does again."""
        if fault is not None and not self._silent:
            print_line(f"{self._node.name}: its log cannot be read: {fault.why}")
        self._silent = fault is not None

    def _progress(self, name: str) -> tuple[int, LineReader]:
        return self._files.setdefault(name, (0, LineReader()))


def read_node_logs(
    nodes: Nodes, used: Sequence[Node], run: str, launch: int | None, more: Callable[[], bool]
) -> Iterator[LogLine]:
    """Yield what the run printed on these nodes, as `Backend.read_log`. Side by side, a piece of each at a time."""
    logs = {node: NodeLog(node, run, launch) for node in used}
    while True:
        goes_on = more()
        faults = nodes.each(logs, lambda node: logs[node].list_files(nodes))
        unread = [node for node, fault in faults.items() if fault is None]
        while unread:
            pieces = nodes.each(unread, lambda node: logs[node].read_piece(nodes))
            faults.update({node: piece for node, piece in pieces.items() if isinstance(piece, Fault)})
            read = {node: piece for node, piece in pieces.items() if isinstance(piece, list)}
            for lines in read.values():
                yield from lines
            unread = list(read)
        for node, log in logs.items():
            log.report(faults[node])
            if not goes_on:
                yield from log.unfinished_lines()
        if not goes_on:
            return


def supervise_run(
    request: RunRequest,
    store: ObjectStore,
    cluster: Cluster,
    *,
    supervisor: str | None = None,
    seen_from_outside: Callable[[Node], Node] = lambda node: node,
) -> Stop:
    """Supervise a registered run until it has ended. `cluster` says how its nodes are reached from here. UserError.

    `supervisor`: the node on which this process runs, where the run was handed over to one. `seen_from_outside` returns a node
    as it is to be recorded.
    """

    def record_nodes(used: Sequence[Node]) -> None:
        save_nodes(store, request.run, cluster, [seen_from_outside(node) for node in used], supervisor)

    nodes = Nodes()
    try:
        executor = SshExecutor(
            ssh_plan(request, os.environ),
            nodes,
            lambda: nodes_of_group(cluster, request.options.group),
            lambda silent: ended_nodes(cluster, silent),
            print_line,
            stopped=lambda: journal.stopped(store),
        )
        own = OwnedJournal(store, lambda names: record_nodes(executor.known_nodes(names)))
        end = take_over(executor, store, request.run, cluster, lambda: all_nodes(cluster)) or supervise(
            executor, own, request.policy, print_line, max_wait_s=request.max_wait_s
        )
    finally:
        nodes.close()
    assert isinstance(end, Stop), "machines have no queue"
    return end


def ssh_plan(request: RunRequest, environ: Mapping[str, str]) -> SshPlan:
    """Return what all launches of the request have in common. Pure."""
    options: SshOptions = request.options
    without = HOST_ONLY if options.container else ()
    variables = ranks_environment(environ, efa=options.efa, without=without)
    notice_s = max_silence_s(SILENT_S, variables) + NOTICE_S
    return SshPlan(
        run=request.run,
        config=request.config_uri,
        python=request.python or ("python3" if options.container else sys.executable),
        ranks=request.policy.ranks_per_node,
        port=first_port(request.run),
        variables=variables,
        patience=Patience(notice_s, notice_s, late_s(request)),
        stop_s=round(request.grace_s) + SPARE_S,
        container=options.container,
    )


def submission_of(request: RunRequest, end: Stop) -> Submission:
    """Return the lines about a run that has ended: its rented nodes go on to cost money. Pure."""
    lines, rented = [f"{request.run}: {end.why}"], request.policy.nodes_are_rented
    if rented:
        lines.append(f"the nodes of group {request.options.group} stay on, and are paid for, until it is made smaller")
    data = {"run": request.run, "exit_code": end.code, "why": end.why, "nodes_stay_rented": rented}
    return Submission(tuple(lines), data, code=end.code)


def refuse_too_few(request: RunRequest, inspections: Mapping[str, Inspection], *, resume: bool) -> None:
    """Refuse a request for which too few nodes are ready, or that would start a run a second time. UserError."""
    busy = {name: unit for name, one in inspections.items() for unit in one.running()}
    own = {name: unit for name, unit in busy.items() if launch_of_unit(request.run, unit) is not None}
    if own and not resume:
        name, unit = next(iter(own.items()))
        fix = f"take it over by --resume, or fab stop {request.run} --now"
        raise UserError(problem("run.uri", request.run, f"unit {unit} of it still runs on {name}", fix=fix))
    bad = {name: one for name, one in inspections.items() if one.why}
    foreign = busy.keys() - own.keys() - bad.keys()
    ready = len(inspections) - len(bad) - len(foreign)
    low = request.policy.min_nodes
    if ready >= low:
        return
    lines: list[str] = [f"{name}: {one.why}" + (f"; fix: {one.fix}" if one.fix else "") for name, one in bad.items()]
    lines += [f"{name}: it trains another run, by unit {busy[name]}; fix: wait for its end" for name in sorted(foreign)]
    why = f"{ready} of {len(inspections)} nodes are ready"
    lines.append(problem("--nodes", low, why, fix="mend these, or ask for fewer nodes"))
    unreachable = any(one.why.startswith(f"{NOT_REACHED}: ") for one in bad.values())
    raise UserError(lines, UNREACHABLE if unreachable else USAGE)


def recorded_nodes(submitted: Mapping[str, Any] | None, run: str) -> list[Node]:
    """Return the nodes that launches of the run were started on."""
    return [from_record(one, run) for one in ((submitted or {}).get("ssh") or {}).get("nodes", ())]


def save_nodes(
    store: ObjectStore, run: str, cluster: Cluster, used: Sequence[Node], supervisor: str | None = None
) -> None:
    """Record the nodes of the next launch, beside those of earlier ones, and the node that supervises the run. UserError."""
    recorded = recorded_nodes(runs.read_record(store, runs.SUBMITTED), run)
    listed = {node.name: node for node in (*recorded, *used)}
    job = {"nodes": [as_record(node) for node in listed.values()], "current": [node.name for node in used]}
    job |= {"supervisor": supervisor} if supervisor else {}
    runs.save_job(store, "ssh", job | place_of(cluster))


def place_of(cluster: Cluster) -> dict[str, Any]:
    """Return the region and the groups in which AWS lists the Cluster's nodes, as it is recorded."""
    return {"region": cluster.region, "auto_scaling_groups": list(cluster.nodes.auto_scaling_groups)}


def take_over(
    executor: SshExecutor, store: ObjectStore, run: str, cluster: Cluster, list_nodes: Callable[[], list[Node]]
) -> Stop | None:
    """Follow the launch whose supervisor is gone to its end, so that no other one begins beside it; return how the run then
    ended, None where it goes on. UserError where it cannot be followed."""
    records = journal.read(store)
    executor.newest_launch = records[-1]["attempt"] if records else 0
    if not records or "ended" in records[-1]:
        return None
    record = records[-1]
    number = record["attempt"]
    nodes = nodes_of_launch(record["nodes"], runs.read_record(store, runs.SUBMITTED), run, cluster, list_nodes())
    print_line(f"launch {number} on {', '.join(record['nodes'])} goes on, and is taken over")
    age_s = None if journal.ranks_met(store, number) else time.time() - record["started"]
    done = journal.finish(store, number, executor.follow(number, nodes, age_s=age_s))
    return Stop(DONE, "all steps are done") if done["code"] == DONE else None


def nodes_of_launch(
    names: Sequence[str], submitted: Mapping[str, Any] | None, run: str, cluster: Cluster, listed: Sequence[Node]
) -> list[Node]:
    """Return the nodes of a launch, reached as the Cluster says today: who takes a run over may have another key or user.

    UserError where one cannot be found: its launcher may run, and nothing is started beside it.
    """
    recorded = {node.name: node for node in recorded_nodes(submitted, run)}
    by_name, by_id = {node.name: node for node in listed}, {node.instance_id: node for node in listed}
    nodes: list[Node] = []
    missing: list[str] = []
    for name in names:
        before = recorded.get(name)
        # The name of an instance may be another one's by now.
        now = by_name.get(name) if before is None or before.instance_id is None else by_id.get(before.instance_id)
        # What is not listed may have ended, if this Cluster is the one that listed it.
        found = now or (before if _same_place(submitted, cluster) else None)
        if found is None:
            missing.append(name)
        else:
            nodes.append(found)
    if missing:
        fix = "give the Cluster that the run was started on; or where no unit of it runs: "
        fix += f"python -m trainer.run.journal take {run}"
        why = "its last launch has no known end, and this Cluster does not have its nodes"
        raise UserError(problem("--resume", run, f"{why} {', '.join(missing)}", fix=fix))
    return nodes


def _same_place(submitted: Mapping[str, Any] | None, cluster: Cluster) -> bool:
    before, now = (submitted or {}).get("ssh") or {}, place_of(cluster)
    groups = set(before.get("auto_scaling_groups") or ())
    return before.get("region") == now["region"] and groups <= set(now["auto_scaling_groups"])


BACKEND = SshBackend()
