"""Carries out `scaling` on Slurm's controller: reads the queue and the Auto Scaling groups, raises their desired capacity, and
drains and ends idle machines. It remembers only since when things are as they are: after a restart idle times begin anew."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from node_setup.agent.facts import scheduler
from node_setup.agent.facts.instance import NODE
from node_setup.agent.host import Host
from node_setup.agent.slurm import key, paths, scaling
from node_setup.agent.slurm.scaling import Change, Group, Machine, Waiting

LOOK_S = 30.0
ENDS = "lustrain: idle, its machine ends"
"""The reason of a node that is drained so that its machine can be ended without a job."""
CLUSTER_TAG, GROUP_TAG = "lustrain:cluster", "lustrain:group"
LIVE = ("Pending", "InService")
"""What LifecycleState begins with while an instance counts
(https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-lifecycle.html)."""
ACTIVITIES = 20
LONGEST_MESSAGE = 200
MOST_COMMENTED = 1000
"""Jobs that get AWS's words, the first in the queue: more would not fit into one command line."""
MOST_PROTECTED = 19
"""Of one call: https://docs.aws.amazon.com/cli/latest/reference/autoscaling/set-instance-protection.html"""
SHOW_NODES = ("scontrol", "show", "node", "--oneliner")
FIELDS = {**scheduler.FIELDS, "address": "NodeAddr", "busy": "LastBusyTime", "partitions": "Partitions"}
OUT_OF_SERVICE = (*scheduler.UNUSABLE, "COMPLETING", "RESERVED", "REBOOT", "POWER")
"""In the state of a node that is IDLE and takes no job all the same, or has not done with one."""
Log = Callable[[str], None]
Node = Mapping[str, Any]


class ReadError(Exception):
    """Slurm or AWS does not say what is there, so that nothing is changed."""


class Scaler:
    """Keeps the groups that go to zero at what the queue needs; `request` is `scaling` of slurm.json."""

    def __init__(self, host: Host, log: Log, request: Mapping[str, Any]) -> None:
        node = json.loads(host.read(NODE) or "{}")
        self._host, self._log = host, log
        self._cluster, self._region = str(node.get("cluster")), str(node.get("region"))
        self._partitions: Mapping[str, str] = request["partitions"]
        # An earlier stack's request does not say them.
        self._cpus: Mapping[str, int] = request.get("cpus", {})
        self._idle_s = 60.0 * request["idle_minutes"]
        self._since: Mapping[tuple[str, ...], float] = {}
        self._addresses: Mapping[str, frozenset[str]] = {}
        self._failures: dict[str, Failures] = {name: Failures() for name in self._partitions}
        self._error = self._missing = ""
        self._refused: dict[str, str] = {}
        self._looked_s = 0.0

    def check_once(self, now_s: float) -> None:
        """Inspect once and change what is to be changed. Time without answers does not count as time without a job."""
        try:
            groups, names, waiting, others = self._read(now_s)
            self._error = ""
        except (ReadError, LookupError, TypeError, ValueError, AttributeError) as error:
            why = str(error) if isinstance(error, ReadError) else f"an answer of Slurm or AWS is not whole: {error!r}"
            if why != self._error:
                self._log(f"groups are left as they are: {why}")
            self._error = why
            self._since = {what: since_s + now_s - self._looked_s for what, since_s in self._since.items()}
            return
        finally:
            self._looked_s = now_s
        for name, change in scaling.changes(groups, waiting, others, self._idle_s).items():
            self._apply(name, names[name], change, waiting, now_s)

    def _read(self, now_s: float) -> tuple[list[Group], dict[str, str], list[Waiting], dict[str, int]]:
        """Return the groups, the names that AWS has for them, the jobs that wait and the other nodes of partitions."""
        states = "--states=PD,CF,R,S"
        listed = self._slurm("squeue", "--all", "--noheader", "--noconvert", states, f"--format={scaling.QUEUE}")
        waiting = scaling.waiting_jobs(listed)
        nodes = scheduler.parse(self._slurm(*SHOW_NODES), FIELDS)
        by_name = self._groups()
        self._learn_addresses(by_name)
        since: dict[tuple[str, ...], float] = {}

        def lasts_s(*what: str) -> float:
            since[what] = self._since.get(what, now_s)
            return now_s - since[what]

        groups, names, own = [], {}, set[str]()
        for name, described in by_name.items():
            self._protect(name, described)
            machines = [self._machine(one, nodes, lasts_s) for one in live_instances(described)]
            own |= {machine.node for machine in machines if machine.node}
            desired = described["DesiredCapacity"]
            unfilled = desired > len(machines)
            failures = self._failures[name]
            failures.look(now_s, desired, sum(machine.node is not None for machine in machines))
            if unfilled or failures.unread or now_s < failures.held_until_s:
                self._note_failures(name, described["AutoScalingGroupName"], now_s, waiting)
            group = Group(
                name,
                self._partitions[name],
                desired,
                described["MaxSize"],
                tuple(machines),
                lasts_s("unfilled", name) if unfilled else 0.0,
                now_s < failures.held_until_s,
                self._cpus.get(name),
                failures.unproven,
            )
            groups.append(group)
            names[name] = described["AutoScalingGroupName"]
        self._since = since
        return groups, names, waiting, count_others(nodes, own)

    def _machine(self, instance: str, nodes: Mapping[str, Node], lasts_s: Callable[..., float]) -> Machine:
        name = self._node_of(instance, nodes)
        state = machine_state(nodes[name]) if name else scaling.BOOTING
        # A job that began and ended between two looks leaves another time.
        last = str(nodes[name]["busy"]) if name else ""
        return Machine(instance, name, state, lasts_s(instance, state, last))

    def _node_of(self, instance: str, nodes: Mapping[str, Node]) -> str | None:
        """Return the name of the node that a machine is, by its address; None while it is none."""
        addresses = self._addresses.get(instance, frozenset())
        return next((name for name, node in nodes.items() if node["address"] in addresses), None)

    def _groups(self) -> dict[str, Any]:
        """Return the groups of this cluster that are scaled and not being deleted, as AWS describes them, by name."""
        filters = f"Name=tag:{CLUSTER_TAG},Values={self._cluster}"
        answer = self._aws("autoscaling", "describe-auto-scaling-groups", "--filters", filters)
        by_name = {}
        for group in answer["AutoScalingGroups"]:
            name = next((tag["Value"] for tag in group["Tags"] if tag["Key"] == GROUP_TAG), None)
            # A destroy first makes the most 0 and takes away the protection; a Status is there once the group is deleted.
            ends = group.get("Status") or not group["MaxSize"]
            if name is not None and name in self._partitions and not ends:
                by_name[str(name)] = group
        missing = ", ".join(sorted(set(self._partitions) - set(by_name)))
        if missing and missing != self._missing:
            self._log(f"no Auto Scaling group of {missing} is there, or it is being deleted")
        self._missing = missing
        return by_name

    def _protect(self, name: str, described: Mapping[str, Any]) -> None:
        """Protect machines from Auto Scaling that were there before their group protected new ones."""
        open_ = [
            one["InstanceId"]
            for one in described["Instances"]
            if one["LifecycleState"] == "InService" and not one["ProtectedFromScaleIn"]
        ]
        for at in range(0, len(open_), MOST_PROTECTED):
            some = open_[at : at + MOST_PROTECTED]
            options = ("--auto-scaling-group-name", described["AutoScalingGroupName"], "--protected-from-scale-in")
            if error := self._call("autoscaling", "set-instance-protection", *options, "--instance-ids", *some):
                raise ReadError(f"machines of group {name} are not protected: {error}")
            self._log(f"group {name}: {', '.join(some)} are protected from scale-in")

    def _learn_addresses(self, by_name: Mapping[str, Any]) -> None:
        """Ask for the addresses of machines only where there is a new one."""
        live = {instance for group in by_name.values() for instance in live_instances(group)}
        if live <= set(self._addresses):
            return
        groups = ",".join(group["AutoScalingGroupName"] for group in by_name.values())
        filters = f"Name=tag:aws:autoscaling:groupName,Values={groups}"
        answer = self._aws("ec2", "describe-instances", "--filters", filters)
        self._addresses = {
            one["InstanceId"]: addresses
            for reservation in answer["Reservations"]
            for one in reservation["Instances"]
            if (
                addresses := frozenset(
                    filter(None, (face.get("PrivateIpAddress") for face in one["NetworkInterfaces"]))
                )
            )
        }

    def _note_failures(self, name: str, group: str, now_s: float, waiting: Sequence[Waiting]) -> None:
        options = ("--auto-scaling-group-name", group, "--max-items", str(ACTIVITIES))
        answer = self._aws("autoscaling", "describe-scaling-activities", *options)
        failed = {one["ActivityId"]: one for one in answer["Activities"] if one["StatusCode"] == "Failed"}
        new = self._failures[name].new(failed)
        if not new or now_s < self._failures[name].held_until_s:
            return
        hold_s = self._failures[name].hold(now_s)
        why = " ".join(str(failed[new[0]].get("StatusMessage", "no reason given")).split())[:LONGEST_MESSAGE]
        line = f"group {name} gets no more machines: {why}; the next try is in {hold_s / 60:.0f} min"
        self._log(line)
        self._tell_jobs(name, waiting, line)

    def _apply(self, name: str, group: str, change: Change, waiting: Sequence[Waiting], now_s: float) -> None:
        if change.desired is not None:
            options = ("--auto-scaling-group-name", group, "--desired-capacity", str(change.desired))
            done = self._call("autoscaling", "set-desired-capacity", *options, "--no-honor-cooldown")
            line = f"group {name}: desired capacity {change.desired}{_unless(done)}"
            if not done or line != self._refused.get(name):
                self._log(line)
                if done:
                    self._tell_jobs(name, waiting, line)
            self._refused[name] = line if done else ""
        for machine in change.freed:
            self._log(f"{machine.node} of group {name} takes jobs again: its machine did not end")
            self._resume(machine)
        for machine in change.lost:
            if self._has_node(machine):
                continue
            done = self._terminate(machine)
            why = (
                f"is no node after {machine.for_s / 60:.0f} min; the log of its boot, where logs are carried, says why"
            )
            self._log(f"{machine.instance} of group {name} {why}. It is ended{_unless(done)}")
            if done:
                break
        if change.lost:
            self._failures[name].lost(now_s)
        for machine in change.ended:
            # Where AWS does not answer, each call takes its whole time, and more nodes would be drained for nothing.
            if not self._end(name, machine):
                break

    def _tell_jobs(self, name: str, waiting: Sequence[Waiting], line: str) -> None:
        """Show the line in the jobs that wait for this group."""
        jobs = list(dict.fromkeys(job.job for job in waiting if self._partitions[name] in job.partitions))
        if jobs:
            listed = ",".join(jobs[:MOST_COMMENTED])
            self._host.run(("scontrol", "update", f"JobId={listed}", f"AdminComment=lustrain: {line}"), 30)

    def _end(self, name: str, machine: Machine) -> bool:
        """Drain the node, and end its machine only where no job came before that; return whether AWS did not refuse it.

        Where AWS refuses or does not answer, the node stays drained: its machine may be ending. The next looks see it."""
        assert machine.node is not None
        if self._state(machine.node) not in (scaling.IDLE, scaling.ENDING):
            return True
        drain = ("scontrol", "update", f"NodeName={machine.node}", "State=DRAIN", f"Reason={ENDS}")
        drained = self._host.run(drain, 30)
        if not drained.ok or self._state(machine.node) != scaling.ENDING:
            why = "it has a job, or cannot be seen" if drained.ok else drained.complaint
            self._log(f"{machine.node} of group {name} is not ended: {why}")
            self._resume(machine)
            return True
        done = self._terminate(machine)
        self._log(f"{machine.node} of group {name} was idle, and {machine.instance} is ended{_unless(done)}")
        return not done

    def _state(self, name: str) -> str:
        """Return what the node is now; kept where Slurm does not say."""
        node, _ = scheduler.show_node(self._host, name)
        return scaling.KEPT if node is None else machine_state(node)

    def _has_node(self, machine: Machine) -> bool:
        """Return whether a machine became a node since the look, or Slurm does not say."""
        done = self._host.run(SHOW_NODES, 30)
        return not done.ok or self._node_of(machine.instance, scheduler.parse(done.out, FIELDS)) is not None

    def _resume(self, machine: Machine) -> None:
        self._host.run(("scontrol", "update", f"NodeName={machine.node}", "State=RESUME"), 30)

    def _terminate(self, machine: Machine) -> str:
        options = ("--instance-id", machine.instance, "--should-decrement-desired-capacity")
        return self._call("autoscaling", "terminate-instance-in-auto-scaling-group", *options)

    def _slurm(self, *command: str) -> str:
        done = self._host.run(command, 30)
        if not done.ok:
            raise ReadError(f"{command[0]}: {done.complaint}")
        return done.out

    def _aws(self, *words: str) -> Any:
        done = self._host.run(("aws", *words, "--region", self._region, "--output", "json"), key.CALL_S, "", key.KEPT)
        if not done.ok:
            raise ReadError(f"aws {words[1]}: {done.complaint}")
        try:
            return json.loads(done.out)
        except ValueError:
            raise ReadError(f"aws {words[1]}: its answer is not JSON") from None

    def _call(self, *words: str) -> str:
        """Return why the call failed; empty where it did not."""
        done = self._host.run(("aws", *words, "--region", self._region), key.CALL_S, "", key.KEPT)
        return "" if done.ok else done.complaint


class Failures:
    """Launches of a group that failed, and until when no more are requested."""

    def __init__(self) -> None:
        self.held_until_s = 0.0
        self.unproven = False
        """Machines were lost, and none has become a node since."""
        self._seen: set[str] | None = None
        self._in_turn = self._wanted = 0

    @property
    def unread(self) -> bool:
        return self._seen is None

    def new(self, failed: Iterable[str]) -> list[str]:
        """Return the activities that were not there at the last look, the newest first; none at the first look, whose failures
        may be weeks old."""
        listed = list(failed)
        new = [] if self._seen is None else [activity for activity in listed if activity not in self._seen]
        self._seen = set(listed)
        return new

    def hold(self, now_s: float) -> float:
        """Return for how long nothing is requested: longer after each failure in turn."""
        hold_s = scaling.HOLDS_S[min(self._in_turn, len(scaling.HOLDS_S) - 1)]
        self._in_turn += 1
        self.held_until_s = now_s + hold_s
        return hold_s

    def lost(self, now_s: float) -> None:
        """Hold the group, and have one machine tried first: the others may boot no better."""
        self.hold(now_s)
        self.unproven = True

    def look(self, now_s: float, desired: int, nodes: int) -> None:
        """Forget failures once as many machines as were requested are nodes: AWS may give a part each time, or all, and none
        may boot. While the group is held it wants what it has, which says nothing."""
        if desired > nodes and now_s >= self.held_until_s:
            self._wanted = desired
        if nodes:
            self.unproven = False
            if nodes >= self._wanted:
                self._in_turn = 0


def live_instances(group: Mapping[str, Any]) -> list[str]:
    return [one["InstanceId"] for one in group["Instances"] if one["LifecycleState"].startswith(LIVE)]


def machine_state(node: Node) -> str:
    """Return what a node is to its group. One that does not answer is kept: it may come back, or is deleted."""
    state = str(node["state"])
    words = set(re.findall(r"[A-Z_]+", state))
    if "IDLE" not in words or not scheduler.is_registered(dict(node)):
        return scaling.KEPT
    if words & {"DRAIN"} and str(node["reason"]).startswith(ENDS) and "COMPLETING" not in words:
        return scaling.ENDING
    return scaling.KEPT if any(word in state for word in OUT_OF_SERVICE) else scaling.IDLE


def count_others(nodes: Mapping[str, Node], own: set[str]) -> dict[str, int]:
    """Return the nodes of each partition that are in no group that goes to zero."""
    counts: dict[str, int] = {}
    for name, node in nodes.items():
        for partition in str(node["partitions"]).split(",") if name not in own else ():
            counts[partition] = counts.get(partition, 0) + 1
    return counts


def request(host: Host) -> Mapping[str, Any] | None:
    """Return what the boot wrote down of the groups to scale; None where there are none."""
    text = host.read(paths.SCALING)
    return json.loads(text) if text else None


def _unless(error: str) -> str:
    return f", but not done: {error}" if error else ""
