"""What runs beside a stack's Slurm: a node is drained at a notice of AWS, registers again where the controller forgot it, and
starts a slurmd that failed; the controller deletes nodes that are gone, requeues jobs that lost their script, and scales groups
that go to zero."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from node_setup.agent.facts import Wanted, metadata, scheduler
from node_setup.agent.facts.instance import NODE
from node_setup.agent.facts.reading import MachineReading
from node_setup.agent.host import Host
from node_setup.agent.slurm import apply, facts, scaler

POLL_S = 5.0
"""AWS asks to look for notices each 5 s: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html"""
LOOK_S = 60.0
GONE_AFTER_S = 600.0
"""A node that is gone so long is deleted. One that only took so long to boot registers as a new one."""
GONE_VARIABLE = "LUSTRAIN_SLURM_GONE_SECONDS"
"""In the service's environment: other seconds."""
DUPLICATE = "Duplicate jobid"
"""Slurm's reason for a node on which a script of the same job still ran (`_notify_slurmctld_nodes` of
https://github.com/SchedMD/slurm/blob/slurm-22.05/src/slurmctld/agent.c)."""
NOTICE = "lustrain: notice of AWS: "
"""Begins the reason of a node that is drained at a notice."""
ENDING = (NOTICE, scaler.ENDS)
"""Begin the reasons of nodes whose machines end."""
LOOKS = 2
"""A job that lacks its batch host so often in a row is requeued: what watches it from its own nodes comes first."""
Log = Callable[[str], None]


def watch(host: Host, log: Log) -> NoReturn:
    """Watch until the service is stopped."""
    controls = (json.loads(host.read(NODE) or "{}").get("slurm") or {}).get("duty") == "controller"
    gone_after_s = float(os.environ.get(GONE_VARIABLE, GONE_AFTER_S))
    looks, pause_s = [Node(host, log).check_once], POLL_S
    if controls:
        looks, pause_s = [Controller(host, log, gone_after_s).check_once], min(LOOK_S, gone_after_s / 2)
        if wanted := scaler.request(host):
            looks, pause_s = [*looks, scaler.Scaler(host, log, wanted).check_once], min(scaler.LOOK_S, pause_s)
    while True:
        for look in looks:
            look(time.monotonic())
        time.sleep(pause_s)


class Node:
    """Watches the node that it runs on."""

    def __init__(self, host: Host, log: Log) -> None:
        self._host = host
        self._log = log
        self._drained = False
        self._looked_s: float | None = None
        self._error = ""

    def check_once(self, now_s: float) -> None:
        if not self._drained:
            self._drained = self._drain_at_notice()
        # Not at once: slurmd has only just started, and registers.
        if self._looked_s is None:
            self._looked_s = now_s
        elif now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._register()

    def _drain_at_notice(self) -> bool:
        try:
            notice = metadata.read_end(MachineReading(self._host, Wanted()))
            self._error = ""
        except metadata.MetadataError as error:
            if str(error) != self._error:
                self._log(f"notices cannot be read: {error}")
            self._error = str(error)
            return False
        if notice is None:
            return False
        name = scheduler.own_name(self._host)
        reason = _reason(notice, scheduler.show_node(self._host, name)[0] or {})
        done = self._host.run(("scontrol", "update", f"NodeName={name}", "State=DRAIN", f"Reason={reason}"), 30)
        self._log(reason if done.ok else f"{reason}: not drained: {done.complaint}")
        return done.ok

    def _register(self) -> None:
        """slurmd registers when it starts, and when a controller that knows it asks. One that a person stopped stays so."""
        unit = apply.DAEMONS["compute"]
        state = facts.unit_state(self._host, unit)["active"]
        if state == "active":
            node, error = scheduler.show_node(self._host, scheduler.own_name(self._host))
            why = "the controller does not know this node" if node is None and error is None else ""
        else:
            why = "slurmd has failed" if state == "failed" else ""
        if why:
            done = self._host.run(("systemctl", "restart", unit), 120)
            self._log(f"{why}: slurmd is {'restarted' if done.ok else f'not restarted: {done.complaint}'}")


def _reason(notice: Mapping[str, Any], node: Mapping[str, Any]) -> str:
    """Return why the node is drained, and why it was before: a person may have drained it."""
    at = f" at {notice['at']}" if notice["at"] else ""
    reason = f"{NOTICE}{notice['kind']}, {notice['action']}{at}"
    before = str(node.get("reason") or "") if "DRAIN" in str(node.get("state")) else ""
    if not before:
        return reason
    return before if before.startswith(NOTICE) else f"{reason}; drained before: {before}"


class Controller:
    """Deletes nodes that are gone, so that the list of nodes does not fill; gives back those that were drained because an old
    script of a job still lived there; requeues jobs whose script is lost."""

    def __init__(self, host: Host, log: Log, gone_after_s: float) -> None:
        self._host = host
        self._log = log
        self._gone_after_s = gone_after_s
        self._since: Mapping[str, float] = {}
        self._looks: Mapping[tuple[str, ...], int] = {}
        """How often in a row each running job lacked its script."""
        self._lines: Mapping[str, str] = {}

    def check_once(self, now_s: float) -> None:
        lines = {**self._check_nodes(now_s), **self._check_jobs()}
        for name, line in lines.items():
            if self._lines.get(name) != line:
                self._log(f"{name} {line}")
        self._lines = lines

    def _check_nodes(self, now_s: float) -> dict[str, str]:
        done = self._host.run(("scontrol", "show", "node", "--oneliner"), 30)
        if not done.ok:
            return {}
        nodes = scheduler.parse(done.out)
        for name in refused_duplicate(nodes):
            resumed = self._host.run(("scontrol", "update", f"NodeName={name}", "State=RESUME"), 30)
            what = "it takes jobs again" if resumed.ok else f"not given back: {resumed.complaint}"
            self._log(f"{name} was drained for {DUPLICATE!r}, and has no job: {what}")
        self._since = {name: self._since.get(name, now_s) for name in gone(nodes)}
        due = [name for name, since_s in self._since.items() if now_s - since_s >= self._gone_after_s]
        return {name: f"is gone: {self._change('deleted', 'delete', f'NodeName={name}')}" for name in due}

    def _check_jobs(self) -> dict[str, str]:
        """Requeue the jobs that have no script. One that keeps its nodes when a node is lost (`--no-kill`) keeps them also when
        that node ran the script; a job of `fab train` watches over it, until its watchers are lost too."""
        done = self._host.run(("squeue", "--all", "--noheader", "--states=RUNNING", "--format=%i|%N|%B"), 30)
        if not done.ok:
            return {}
        looks: dict[tuple[str, ...], int] = {}
        lines: dict[str, str] = {}
        for job in {tuple(line.strip().split("|")) for line in done.out.splitlines() if line.count("|") == 2}:
            before = self._looks.get(job)
            # What a job has seldom changes: no program is started for one that had its script.
            has_script = before == 0 or self._has_script(*job)
            if has_script is None:
                continue
            looks[job] = 0 if has_script else (before or 0) + 1
            if looks[job] >= LOOKS:
                number, _, batch_host = job
                # Slurm would requeue one that has ended since, as by scancel, too.
                words = ("requeue", "incomplete", number)
                lines[f"job {number}"] = f"lost its script with node {batch_host}: {self._change('requeued', *words)}"
        self._looks = looks
        return lines

    def _has_script(self, number: str, nodes: str, batch_host: str) -> bool | None:
        """Whether the job still has its script, or never had one; None where Slurm does not answer, or it is another start or
        has other nodes by now."""
        # A part of a heterogeneous job has it on a node of another part.
        if "+" in number:
            return True
        names = self._host.run(("scontrol", "show", "hostnames", nodes), 30)
        if names.ok and batch_host in names.out.split():
            return True
        shown = self._host.run(("scontrol", "show", "job", "--oneliner", number), 30)
        if not (names.ok and shown.ok):
            return None
        job = dict(word.partition("=")[::2] for word in shown.out.split())
        if job.get("BatchFlag") == "0":
            return True
        # Where Slurm is slow, or jobs are many, the list is old by now.
        return False if (job.get("NodeList"), job.get("BatchHost")) == (nodes, batch_host) else None

    def _change(self, done: str, *words: str) -> str:
        changed = self._host.run(("scontrol", *words), 30)
        return done if changed.ok else f"not {done}: {changed.complaint}"


def refused_duplicate(nodes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the nodes that answer and have no job, and are drained only because a script of the same job still ran there when
    Slurm started it again. slurmd ends such a script as soon as it reaches the controller."""
    named = []
    for name, node in nodes.items():
        words = set(re.findall(r"[A-Z_]+", str(node["state"])))
        # Another word is another's: one that is to be rebooted is drained too, and to resume it would call that off.
        done = words - {"DYNAMIC_NORM"} == {"IDLE", "DRAIN"} and scheduler.is_registered(dict(node))
        if done and node["reason"] == DUPLICATE:
            named.append(name)
    return named


def gone(nodes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the dynamic nodes that do not answer and have no job. One that was drained is kept, with the reason, unless by a
    notice or to be ended: its machine may come back, and would take jobs as a new node."""
    named = []
    for name, node in nodes.items():
        words = set(re.findall(r"[A-Z_]+", str(node["state"])))
        silent = {"DYNAMIC_NORM", "DOWN"} <= words and not scheduler.is_registered(dict(node))
        ends = "DRAIN" not in words or str(node["reason"]).startswith(ENDING)
        if silent and ends and "COMPLETING" not in words:
            named.append(name)
    return named
