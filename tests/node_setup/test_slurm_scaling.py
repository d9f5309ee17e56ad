"""Groups of a stack's Slurm that go to zero: what the plan makes of a queue, and what the controller does about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from node_setup.agent.facts.instance import NODE
from node_setup.agent.host import Done
from node_setup.agent.slurm import scaler, scaling
from node_setup.agent.slurm.scaling import (
    BOOTED_WITHIN_S,
    BOOTING,
    ENDING,
    HOLDS_S,
    IDLE,
    KEPT,
    Change,
    Group,
    Machine,
    Waiting,
    changes,
    waiting_jobs,
)
from tests.node_setup.agents import BareHost

IDLE_S = 600.0
FOUR = Waiting("1", ("train",), 4)
TERMINATE = "terminate-instance-in-auto-scaling-group"


def machines(*states: str, for_s: float = 0.0) -> tuple[Machine, ...]:
    return tuple(Machine(f"i-{at}", f"n{at}", state, for_s) for at, state in enumerate(states))


def group(*states: str, desired: int | None = None, for_s: float = 0.0, **more: Any) -> Group:
    wanted = len(states) if desired is None else desired
    return Group("train", "train", wanted, 8, machines(*states, for_s=for_s), **more)


def change(one: Group, *waiting: Waiting, others: int = 0) -> Change:
    return changes([one], waiting, {"train": others}, IDLE_S)["train"]


def instances(found: Change) -> list[str]:
    return [machine.instance for machine in (*found.ended, *found.lost)]


@pytest.mark.parametrize(
    ("before", "waiting", "desired"),
    [
        (group(), [FOUR], 4),
        (group(), [], None),
        (group(KEPT, KEPT), [FOUR], 6),
        (group(IDLE), [FOUR], 4),
        (group(BOOTING, desired=4), [FOUR], None),
        (group(KEPT, KEPT, KEPT, KEPT, KEPT, KEPT), [FOUR], 8),
        (group(), [Waiting("1", ("train",), 9)], None),
        (group(), [Waiting("1", ("train",), 1, tasks=50)], 8),
        (group(), [Waiting("1", ("other",), 1)], None),
        (group(KEPT, desired=4), [], None),
        (group(KEPT, desired=4, unfilled_s=IDLE_S), [], 1),
        (group(KEPT, KEPT, desired=1), [], 2),
        (Group("train", "train", 1, 1, machines(KEPT, KEPT)), [FOUR], None),
        (group(KEPT, desired=4, held=True), [FOUR], 1),
        (group(unproven=True), [FOUR], 1),
        (group(BOOTING, unproven=True), [FOUR], None),
    ],
)
def test_desired_capacity_follows_the_queue(before: Group, waiting: list[Waiting], desired: int | None) -> None:
    assert change(before, *waiting) == Change(desired)


def test_job_beyond_all_nodes_of_its_partition_brings_none() -> None:
    huge = Waiting("1", ("train",), 9)
    assert change(group(), huge) == Change()
    assert change(group(), huge, others=1).desired == 8


@pytest.mark.parametrize(
    ("cpus", "waiting", "desired"),
    [
        (48, Waiting("1", ("train",), 1, cpus=64), 2),
        (48, Waiting("1", ("train",), 3, cpus=64), 3),
        (48, Waiting("1", ("train",), 1, cpus=48), 1),
        (48, Waiting("1", ("train",), 1, tasks=3, cpus=64), 6),
        (48, Waiting("1", ("train",), 1, cpus=9 * 48), None),
        (None, Waiting("1", ("train",), 1, cpus=64), 1),
    ],
)
def test_job_without_nodes_brings_what_its_processors_need(cpus: int | None, waiting: Waiting, desired: int) -> None:
    """On an empty partition Slurm itself says one node."""
    assert change(group(cpus=cpus), waiting).desired == desired


def test_group_whose_processors_are_unknown_may_be_the_larger() -> None:
    pair = [Group("first", "gpu", 0, 2, (), cpus=48), Group("second", "gpu", 0, 2, ())]
    found = changes(pair, [Waiting("1", ("gpu",), 1, cpus=96)], {}, IDLE_S)
    assert [found[name].desired for name in ("first", "second")] == [1, None]


def test_groups_of_a_partition_share_its_jobs_in_order() -> None:
    pair = [Group(name, "gpu", 0, 2, ()) for name in ("first", "second")]
    found = changes(pair, [Waiting("1", ("gpu",), 3)], {}, IDLE_S)
    assert {name: one.desired for name, one in found.items()} == {"first": 2, "second": 1}


@pytest.mark.parametrize("state", [KEPT, BOOTING])
def test_only_idle_machines_end(state: str) -> None:
    assert instances(change(group(state, IDLE, for_s=IDLE_S))) == ["i-1"]


def test_idle_machine_stays_until_its_time_and_for_waiting_jobs() -> None:
    assert instances(change(group(IDLE, IDLE, for_s=IDLE_S - 1))) == []
    assert instances(change(group(IDLE, IDLE, for_s=IDLE_S), Waiting("1", ("train",), 1))) == ["i-0"]
    assert instances(change(group(IDLE, IDLE, for_s=IDLE_S), FOUR)) == []


def test_part_of_a_job_is_not_kept_while_launches_fail() -> None:
    assert instances(change(group(IDLE, IDLE, for_s=IDLE_S, held=True), FOUR)) == ["i-0", "i-1"]


def test_machine_that_never_becomes_a_node_ends_and_holds_its_group() -> None:
    found = change(group(BOOTING, for_s=BOOTED_WITHIN_S), FOUR)
    assert (found.desired, instances(found)) == (None, ["i-0"])


def test_drained_machine_ends_or_takes_jobs_again_after_a_try() -> None:
    assert instances(change(group(ENDING), FOUR)) == ["i-0"]
    tried = change(group(ENDING, for_s=30), FOUR)
    assert (instances(tried), [one.instance for one in tried.freed]) == ([], ["i-0"])


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        ("12 PD 4 1 train nodes= PartitionConfig", [Waiting("12", ("train",), 4)]),
        ("12 PD 1 64 train nodes= PartitionConfig", [Waiting("12", ("train",), 1, cpus=64)]),
        (
            "12 PD 1 1 train,gpu nodes= Nodes required for job are DOWN, DRAINED or",
            [Waiting("12", ("train", "gpu"), 1)],
        ),
        (
            "12 PD 1 1 train nodes= BeginTime\n13 PD 1 1 train nodes= JobHeldUser\n"
            "14 PD 1 1 train nodes= Dependency\n15 R 1 1 train nodes= None",
            [],
        ),
        ("12 PD 1 1 train nodes=n1 ReqNodeNotAvail, UnavailableNodes:n1", []),
        ("12 PD 1 1 train nodes= ReqNodeNotAvail, Reserved for maintenance", []),
        ("12 PD 1 1 train nodes= ReqNodeNotAvail, UnavailableNodes:n1", [Waiting("12", ("train",), 1)]),
        ("7_[0-9:2,12] PD 1 1 train nodes= Resources", [Waiting("7", ("train",), 1, 6)]),
        ("7_[3-9%2] PD 1 1 train nodes= Priority\n7_1 R 1 1 train nodes= None", [Waiting("7", ("train",), 1, 1)]),
        ("7_[1,3,100-12...%5] PD 1 1 train nodes= Priority", [Waiting("7", ("train",), 1, 2)]),
    ],
)
def test_jobs_that_nodes_would_help_are_counted(listed: str, found: list[Waiting]) -> None:
    assert waiting_jobs(listed) == found


SHOWN = "NodeName={} ActiveFeatures=train NodeAddr={} State={}+DYNAMIC_NORM Partitions=train LastBusyTime=x {}\n"


class Cloud(BareHost):
    """Slurm and Auto Scaling as far as they are asked: `queue`, `nodes` by name, and one group."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.queue = ""
        self.nodes: dict[str, str] = {}
        self.live: list[str] = []
        self.desired = 0
        self.activities: list[dict[str, str]] = []
        self.job_before_drain = False
        self.denied = ""
        self.answers_late = False
        self.halved: dict[str, str] = {}
        self.protected, self.most = True, 4
        self.has_addresses = True
        self.write(NODE, json.dumps({"cluster": "demo", "region": "us-east-1"}))

    def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "", keep: Sequence[str] = ()) -> Done:
        self.ran.append(tuple(command))
        answer = getattr(self, "_" + command[0 if command[0] == "squeue" else 1].replace("-", "_"))
        out = self._aws(command) if command[0] == "aws" else answer(command)
        return out if isinstance(out, Done) else Done(0, out, "")

    def _squeue(self, command: Sequence[str]) -> str:
        return self.queue

    def _show(self, command: Sequence[str]) -> str:
        lines = (SHOWN.format(name, f"10.0.0.{name[1:]}", *state.split("|")) for name, state in self.nodes.items())
        return "".join(lines)

    def _update(self, command: Sequence[str]) -> str:
        kind, name = command[2].split("=")
        if kind == "NodeName" and "State=DRAIN" in command:
            state = "ALLOCATED" if self.job_before_drain else "IDLE"
            self.nodes[name] = f"{state}+DRAIN|{command[4]} [root@x]"
        elif kind == "NodeName":
            self.nodes[name] = "IDLE|"
        return ""

    def _autoscaling(self, command: Sequence[str]) -> str:
        return ""

    _ec2 = _autoscaling

    def _aws(self, command: Sequence[str]) -> Done | str:
        verb = command[2]
        if verb == self.denied:
            return Done(254, "", "AccessDenied: not authorized")
        if verb in self.halved:
            return self.halved[verb]
        if verb == "describe-auto-scaling-groups":
            tags = [{"Key": "lustrain:group", "Value": "train"}]
            live = [
                {"InstanceId": one, "LifecycleState": "InService", "ProtectedFromScaleIn": self.protected}
                for one in self.live
            ]
            gone = [{"InstanceId": "i-9", "LifecycleState": "Terminating:Wait"}]
            sizes = {"DesiredCapacity": self.desired, "MaxSize": self.most}
            one = {"AutoScalingGroupName": "demo-train-gang-1", "Tags": tags, "Instances": live + gone, **sizes}
            return json.dumps({"AutoScalingGroups": [one]})
        if verb == "describe-instances":
            faces = [
                {
                    "InstanceId": one,
                    "NetworkInterfaces": [{"PrivateIpAddress": f"10.0.0.{one[2:]}"}] * self.has_addresses,
                }
                for one in self.live
            ]
            return json.dumps({"Reservations": [{"Instances": faces}]})
        if verb == "describe-scaling-activities":
            return json.dumps({"Activities": self.activities})
        if verb == "set-desired-capacity":
            self.desired = int(command[command.index("--desired-capacity") + 1])
        if verb == "terminate-instance-in-auto-scaling-group":
            self.live.remove(command[command.index("--instance-id") + 1])
            self.desired -= 1
            return Done(124, "", "aws did not end within 60 s") if self.answers_late else ""
        if verb == "set-instance-protection":
            self.protected = True
        return ""


class Watched:
    def __init__(self, root: Path) -> None:
        self.cloud, self.lines = Cloud(root), list[str]()
        request = {"idle_minutes": 10, "partitions": {"train": "train"}, "cpus": {"train": 48}}
        self.scaler = scaler.Scaler(self.cloud, self.lines.append, request)

    def has(self, *nodes: str) -> None:
        """Have a machine in service for each node, and each idle."""
        self.cloud.live = [f"i-{node[1:]}" for node in nodes]
        self.cloud.nodes = dict.fromkeys(nodes, "IDLE|")
        self.cloud.desired = len(nodes)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_tasks_bring_machines_for_all_their_processors(watched: Watched) -> None:
    watched.cloud.queue = "1 PD 1 96 train nodes= PartitionConfig\n"
    watched.scaler.check_once(0)
    assert watched.cloud.desired == 2


def test_waiting_job_raises_the_group_and_idle_ends_it(watched: Watched) -> None:
    watched.cloud.queue = "1 PD 2 1 train nodes= PartitionConfig\n"
    watched.scaler.check_once(0)
    assert watched.cloud.desired == 2
    watched.has("n1", "n2")
    watched.cloud.queue = ""
    for now_s in (60, 659):
        watched.scaler.check_once(now_s)
    assert watched.cloud.live == ["i-1", "i-2"]
    watched.scaler.check_once(660)
    assert (watched.cloud.live, watched.cloud.desired) == ([], 0)


def test_machine_whose_node_gets_a_job_at_last_is_not_ended(watched: Watched) -> None:
    """The drain comes too late; the job goes on, and the node takes more afterwards."""
    watched.has("n1")
    watched.cloud.job_before_drain = True
    for now_s in (0, 600):
        watched.scaler.check_once(now_s)
    assert watched.cloud.live == ["i-1"]
    assert ("scontrol", "update", "NodeName=n1", "State=RESUME") in watched.cloud.ran


def test_node_of_a_refused_end_takes_jobs_again(watched: Watched) -> None:
    watched.has("n1")
    watched.cloud.denied = TERMINATE
    for now_s in (0, 600, 630, 660):
        watched.scaler.check_once(now_s)
    assert watched.cloud.nodes == {"n1": "IDLE|"}
    logged = len(watched.lines)
    watched.scaler.check_once(1259)
    assert len(watched.lines) == logged, "the next try is after another idle time"


def test_node_of_an_end_that_answers_late_gets_no_job(watched: Watched) -> None:
    watched.has("n1")
    watched.cloud.answers_late = True
    for now_s in (0, 600, 630, 660):
        watched.scaler.check_once(now_s)
    assert watched.cloud.live == []
    assert watched.cloud.nodes["n1"].startswith("IDLE+DRAIN")


def test_drain_of_a_person_after_the_look_is_kept(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.has("n1")
    watched.scaler.check_once(0)

    def drained_meanwhile(*given: Any) -> dict[str, Change]:
        watched.cloud.nodes["n1"] = "IDLE+DRAIN|Reason=a fan is loud [root@x]"
        return changes(*given)

    monkeypatch.setattr(scaling, "changes", drained_meanwhile)
    watched.scaler.check_once(600)
    assert (watched.cloud.live, "fan" in watched.cloud.nodes["n1"]) == (["i-1"], True)


def test_machine_that_became_a_node_after_the_look_stays(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.has("n1")
    watched.cloud.nodes = {}
    watched.scaler.check_once(0)

    def registered_meanwhile(*given: Any) -> dict[str, Change]:
        watched.cloud.nodes["n1"] = "ALLOCATED|"
        return changes(*given)

    monkeypatch.setattr(scaling, "changes", registered_meanwhile)
    watched.scaler.check_once(BOOTED_WITHIN_S)
    assert watched.cloud.live == ["i-1"]


def test_node_whose_address_came_late_is_known_by_it(watched: Watched) -> None:
    watched.has("n1")
    watched.cloud.nodes = {"n1": "ALLOCATED|"}
    watched.cloud.has_addresses = False
    watched.scaler.check_once(0)
    watched.cloud.has_addresses = True
    for now_s in (30, BOOTED_WITHIN_S, 2 * BOOTED_WITHIN_S):
        watched.scaler.check_once(now_s)
    assert watched.cloud.live == ["i-1"]


def test_machines_from_before_are_protected_or_nothing_changes(watched: Watched) -> None:
    watched.has("n1")
    watched.cloud.protected = False
    watched.cloud.denied = "set-instance-protection"
    for now_s in (0, 600, 1200):
        watched.scaler.check_once(now_s)
    assert watched.cloud.live == ["i-1"]
    watched.cloud.denied = ""
    watched.scaler.check_once(1230)
    assert watched.cloud.protected


@pytest.mark.parametrize(
    "state", ["DOWN", "ALLOCATED", "MIXED", "IDLE+DRAIN", "IDLE+COMPLETING", "IDLE+NOT_RESPONDING"]
)
def test_node_that_is_not_plainly_idle_stays(watched: Watched, state: str) -> None:
    watched.has("n1")
    watched.cloud.nodes = {"n1": f"{state}|Reason=a fan is loud [root@x]"}
    for now_s in (0, 600, 6000):
        watched.scaler.check_once(now_s)
    assert watched.cloud.live == ["i-1"]


def test_lack_of_capacity_is_shown_and_pauses_the_group(watched: Watched) -> None:
    cloud = watched.cloud
    cloud.queue = "1 PD 2 1 train nodes= PartitionConfig\n"
    watched.scaler.check_once(0)
    cloud.activities = [
        {"ActivityId": "a", "StatusCode": "Failed", "StatusMessage": "InsufficientInstanceCapacity - none"}
    ]
    watched.scaler.check_once(30)
    (comment,) = (command[-1] for command in cloud.ran if command[:3] == ("scontrol", "update", "JobId=1"))
    assert "InsufficientInstanceCapacity" in comment
    assert cloud.desired == 0
    cloud.activities = [{**cloud.activities[0], "ActivityId": "of the same try"}, *cloud.activities]
    watched.scaler.check_once(30 + HOLDS_S[0] - 1)
    assert cloud.desired == 0
    for now_s in (30 + HOLDS_S[0], 60 + HOLDS_S[0]):
        watched.scaler.check_once(now_s)
    assert cloud.desired == 2, "the old failure is not taken for a new one"
    cloud.activities = [{**cloud.activities[0], "ActivityId": "b"}, *cloud.activities]
    watched.scaler.check_once(400)
    watched.scaler.check_once(400 + HOLDS_S[1] - 1)
    assert cloud.desired == 0, "the second pause is longer"


def test_pauses_grow_though_aws_gives_a_part_each_time(watched: Watched) -> None:
    cloud, now_s, tries = watched.cloud, 0.0, list[float]()
    cloud.queue = "1 PD 4 1 train nodes= PartitionConfig\n"
    while len(tries) < len(HOLDS_S) + 1:
        watched.scaler.check_once(now_s)
        if cloud.desired == 4:
            tries.append(now_s)
            watched.has("n1", "n2")
            cloud.desired = 4
            failed = {"ActivityId": str(len(tries)), "StatusCode": "Failed", "StatusMessage": "none left"}
            cloud.activities = [failed, *cloud.activities]
        now_s += scaler.LOOK_S
    # The failure is seen a look after the request.
    pauses = [after - before - scaler.LOOK_S for before, after in pairwise(tries)]
    assert pauses == list(HOLDS_S)
    watched.has("n1", "n2", "n3", "n4")
    cloud.queue = "1 R 4 1 train nodes= None\n"
    cloud.nodes = dict.fromkeys(cloud.nodes, "ALLOCATED|")
    watched.scaler.check_once(now_s + 2 * HOLDS_S[-1])
    cloud.queue, cloud.most = "2 PD 4 1 train nodes= PartitionConfig\n", 8
    watched.scaler.check_once(now_s := now_s + 3 * HOLDS_S[-1])
    assert cloud.desired == 8
    cloud.activities = [{**cloud.activities[0], "ActivityId": "of another request"}, *cloud.activities]
    watched.scaler.check_once(now_s + 30)
    assert cloud.desired == 4
    watched.scaler.check_once(now_s + 30 + HOLDS_S[0])
    assert cloud.desired == 8, "all were had once, so that the pause is the first again"


def test_after_machines_that_never_boot_one_is_tried(watched: Watched) -> None:
    cloud = watched.cloud
    cloud.queue = "1 PD 4 1 train nodes= PartitionConfig\n"
    watched.scaler.check_once(0)
    assert cloud.desired == 4

    def boots_badly() -> None:
        cloud.live, cloud.nodes = [f"i-{at + 1}" for at in range(cloud.desired)], {}

    boots_badly()
    lost_s = 30 + BOOTED_WITHIN_S
    for now_s in (30, lost_s):
        watched.scaler.check_once(now_s)
    assert (cloud.live, cloud.desired) == ([], 0)
    watched.scaler.check_once(lost_s + HOLDS_S[0])
    assert cloud.desired == 1
    boots_badly()
    for now_s in (lost_s + HOLDS_S[0] + 30, lost_s + HOLDS_S[0] + 30 + BOOTED_WITHIN_S):
        watched.scaler.check_once(now_s)
    watched.scaler.check_once(now_s + HOLDS_S[1] - 1)
    assert cloud.desired == 0, "the second pause is longer, though the group had what it wanted"
    watched.scaler.check_once(now_s + HOLDS_S[1])
    assert cloud.desired == 1
    watched.has("n1")
    watched.scaler.check_once(now_s + HOLDS_S[1] + 30)
    assert cloud.desired == 4


def test_refused_request_is_told_once_and_to_its_jobs(watched: Watched) -> None:
    cloud = watched.cloud
    cloud.queue, cloud.denied = "1 PD 2 1 train nodes= PartitionConfig\n", "set-desired-capacity"
    for now_s in (0, 30, 60):
        watched.scaler.check_once(now_s)
    assert len(watched.lines) == 1
    (comment,) = (command[-1] for command in cloud.ran if command[:3] == ("scontrol", "update", "JobId=1"))
    assert "AccessDenied" in comment
    cloud.denied = ""
    watched.scaler.check_once(90)
    assert (cloud.desired, len(watched.lines)) == (2, 2)


def test_no_further_node_is_drained_where_aws_refuses_an_end(watched: Watched) -> None:
    watched.has("n1", "n2", "n3")
    watched.cloud.denied = TERMINATE
    for now_s in (0, 600):
        watched.scaler.check_once(now_s)
    assert [state.partition("|")[0] for state in watched.cloud.nodes.values()].count("IDLE+DRAIN") == 1


def test_nothing_changes_where_slurm_or_aws_is_silent(watched: Watched) -> None:
    watched.has("n1")
    watched.scaler.check_once(0)
    watched.cloud.denied = "describe-auto-scaling-groups"
    for now_s in (600, 1200):
        watched.scaler.check_once(now_s)
    assert watched.cloud.live == ["i-1"]
    assert len(watched.lines) == 1, "the same line once"
    watched.cloud.denied = ""
    watched.scaler.check_once(1230)
    assert watched.cloud.live == ["i-1"], "what was not seen is no idle time"


@pytest.mark.parametrize("verb", ["describe-auto-scaling-groups", "describe-instances"])
@pytest.mark.parametrize("answer", ["", "{}", "[]", '{"AutoScalingGroups": [{}], "Reservations": [{}]}'])
def test_nothing_changes_at_half_an_answer(watched: Watched, verb: str, answer: str) -> None:
    watched.has("n1")
    watched.cloud.queue = "1 PD 2 1 train nodes= PartitionConfig\n"
    watched.cloud.halved = {verb: answer}
    for now_s in (0, 600):
        watched.scaler.check_once(now_s)
    assert (watched.cloud.live, watched.cloud.desired, len(watched.lines)) == (["i-1"], 1, 1)


def test_failures_from_before_a_restart_hold_nothing(watched: Watched) -> None:
    cloud = watched.cloud
    cloud.activities = [{"ActivityId": "old", "StatusCode": "Failed", "StatusMessage": "last week"}]
    cloud.queue, cloud.desired = "1 PD 2 1 train nodes= PartitionConfig\n", 2
    for now_s in (0, 30):
        watched.scaler.check_once(now_s)
    assert (cloud.desired, watched.lines) == (2, [])


def test_group_that_is_being_destroyed_is_left_alone(watched: Watched) -> None:
    watched.has("n1")
    watched.cloud.protected, watched.cloud.most, watched.cloud.desired = False, 0, 0
    for now_s in (0, 600):
        watched.scaler.check_once(now_s)
    assert (watched.cloud.protected, watched.cloud.desired, watched.cloud.live) == (False, 0, ["i-1"])


def test_missing_group_leaves_the_others_scaled(tmp_path: Path) -> None:
    cloud, lines = Cloud(tmp_path), list[str]()
    request = {"idle_minutes": 10, "partitions": {"gone": "gone", "train": "train"}}
    cloud.queue = "1 PD 2 1 train nodes= PartitionConfig\n"
    one = scaler.Scaler(cloud, lines.append, request)
    for now_s in (0, 30):
        one.check_once(now_s)
    assert cloud.desired == 2
    assert sum("gone" in line for line in lines) == 1
