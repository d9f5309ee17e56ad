"""A stack's Slurm on one node: what slurm.conf says of groups, the key, the state volume, and what watches beside daemons."""

from __future__ import annotations

import base64
import json
import os
import pwd
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.local.metadata import LocalMetadata
from lustrain.cluster import NodeGroup
from lustrain.problem import UserError
from lustrain.status import Status
from node_setup.agent.facts import Wanted as FactsWanted
from node_setup.agent.facts import scheduler
from node_setup.agent.facts.instance import NODE
from node_setup.agent.facts.reading import MachineReading
from node_setup.agent.host import NO_PROGRAM, TIMED_OUT, Done
from node_setup.agent.model import Request
from node_setup.agent.slurm import apply, boot, key, paths, volume, watch
from node_setup.agent.slurm.apply import Clock, take_steps
from node_setup.agent.slurm.wanted import DUTIES
from node_setup.agent.verify import slurm as checks
from node_setup.agent.verify.expected import expected_hardware
from node_setup.slurm import dynamic
from tests.node_setup.agents import BareHost, silent

SECRET = "arn:aws:secretsmanager:us-west-2:123456789012:secret:demo-munge-a1b2c3"
EMPTY = "can't find the specified secret value for staging label: AWSCURRENT"
DENIED = "AccessDeniedException: not authorized to perform secretsmanager:GetSecretValue"
NODE2 = "NodeName=node2 State={} Gres={}{}\n"


def document(settings: dict[str, str] | None = None, **groups: NodeGroup) -> dict[str, Any]:
    return dynamic.document(
        "Demo.1", groups or {"train": NodeGroup(type="p5.48xlarge", count=2, gpus=8)}, settings or {}
    )


class Fake(BareHost):
    """A machine whose programs answer from a list by their first words; `now` passes as it waits."""

    def __init__(self, root: Path, **answers: Sequence[Done]) -> None:
        super().__init__(root)
        self.answers = {name: list(given) for name, given in answers.items()}
        self.given: list[str] = []
        self.now = 0.0
        self.write("/proc/sys/kernel/hostname", "node2\n")

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "", keep: Sequence[str] = ()) -> Done:
        self.ran.append(tuple(command))
        self.given.append(stdin)
        left = self.answers.get(command[0].replace(".", "_"), [])
        return (left.pop(0) if len(left) > 1 else left[0]) if left else Done(NO_PROGRAM, "", "no such program")


class Secrets(Fake):
    """A Secrets Manager: `unseen` times it does not show yet what it has; a version's value cannot be replaced."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.versions: dict[str, str] = {}
        self.value, self.unseen = "", 0

    def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "", keep: Sequence[str] = ()) -> Done:
        self.ran.append(tuple(command))
        if "put-secret-value" in command:
            version = command[command.index("--client-request-token") + 1]
            if self.versions.setdefault(version, stdin) != stdin:
                return done(status=254, err="ResourceExistsException: you can't modify an existing version")
            self.value = stdin
            return done()
        self.unseen -= 1
        return done(self.value + "\n") if self.value and self.unseen < 0 else done(status=254, err=EMPTY)


def done(out: str = "", status: int = 0, err: str = "") -> Done:
    return Done(status, out, err)


KNOWN, UNKNOWN = done(NODE2.format("IDLE", "(null)", "")), done(status=1, err="Node node2 not found")


def test_partitions_are_of_groups_and_no_node_is_named() -> None:
    groups = {
        "controller": NodeGroup(type="m7i.large", count=1, role="controller"),
        "train": NodeGroup(type="p5.48xlarge", count=2, gpus=8),
        "spare": NodeGroup(type="p5.48xlarge", count=1, gpus=8, partition="train"),
        "cpu": NodeGroup(type="c7i.2xlarge", count=4),
    }
    lines = document({"slurmdtimeout": "30"}, **groups)["files"]["slurm.conf"].splitlines()
    assert {"ClusterName=demo-1", "GresTypes=gpu", "MaxNodeCount=4096", "SlurmdTimeout=30", "ReturnToService=2"} < {
        *lines
    }
    assert [line for line in lines if line.startswith(("Node", "Partition"))] == [
        "NodeSet=train Feature=train",
        "NodeSet=spare Feature=spare",
        "NodeSet=cpu Feature=cpu",
        "PartitionName=train Nodes=train,spare Default=YES MaxTime=INFINITE State=UP",
        "PartitionName=cpu Nodes=cpu Default=NO MaxTime=INFINITE State=UP",
    ]


def test_a_count_that_changes_makes_no_other_document() -> None:
    one, two = (document(train=NodeGroup(type="p5.48xlarge", count=count, gpus=8)) for count in (1, 2))
    assert one == two


def test_controller_makes_the_key_and_never_shows_it(tmp_path: Path) -> None:
    host, said = Secrets(tmp_path), list[str]()
    made = key.munge_key(host, SECRET, 60, said.append, host.clock, makes=True)
    assert made == base64.b64decode(host.value)
    assert len(made) == 1024
    shown = json.dumps([*host.ran, *said])
    assert host.value[:16] not in shown
    assert host.ran[0][-2:] == ("--region", "us-west-2")


def test_one_key_is_made_though_it_is_seen_late(tmp_path: Path) -> None:
    """Nodes that had another one would be locked out."""
    host = Secrets(tmp_path)
    host.unseen = 3
    made = key.munge_key(host, SECRET, 60, silent, host.clock, makes=True)
    assert {base64.b64encode(made).decode()} == {*host.versions.values()}


def test_what_the_cli_printed_is_not_in_a_log(tmp_path: Path) -> None:
    host, said = Fake(tmp_path, aws=[done("c2VjcmV0", status=1)]), list[str]()
    with pytest.raises(UserError, match="aws ended with 1"):
        key.munge_key(host, SECRET, 0, said.append, host.clock, makes=False)


@pytest.mark.parametrize(("why", "makes"), [(EMPTY, False), (DENIED, True)])
def test_a_key_that_is_not_there_is_waited_for_and_not_made(tmp_path: Path, why: str, makes: bool) -> None:
    """A controller that may not read the secret must not make another key: it would lock all nodes out."""
    host, said = Fake(tmp_path, aws=[done(status=254, err=why)]), list[str]()
    with pytest.raises(UserError, match=r"is not to be had after 120 s"):
        key.munge_key(host, SECRET, 120, said.append, host.clock, makes=makes)
    assert not any("put-secret-value" in command for command in host.ran)
    assert said[0].endswith(why)


VOLUME = "vol-0abc"


def attached(root: Path, content: bytes | None) -> Fake:
    """Return a machine with the volume; None as its content: it cannot be read."""
    host = Fake(root, mkfs_xfs=[done()])
    for name, text in {
        "device/serial": "vol0abc\n",
        "device/model": "Amazon Elastic Block Store\n",
        "size": "4096\n",
    }.items():
        host.write(f"/sys/block/nvme1n1/{name}", text)
    if content is not None:
        host.write_bytes("/dev/nvme1n1", content.ljust(2**21, b"\0"), 0o600)
    return host


@pytest.mark.parametrize(
    ("content", "status", "formatted"),
    [
        (b"XFSB", Status.OK, False),
        (b"", Status.FAILED, True),
        (b"precious", Status.FAILED, False),
        (None, Status.FAILED, False),
    ],
)
def test_only_a_blank_volume_is_formatted(
    tmp_path: Path, content: bytes | None, status: Status, formatted: bool
) -> None:
    """mkfs.xfs of this machine does nothing, so that the blank volume's step fails after it."""
    host = attached(tmp_path, content)
    rows = take_steps([next(volume.steps(host, VOLUME, 60, host.clock))], silent, check=False)
    assert (rows[0]["status"], ("mkfs.xfs", "-K", "/dev/nvme1n1") in host.ran) == (status, formatted)


def test_a_volume_that_is_not_attached_is_waited_for(tmp_path: Path) -> None:
    host = Fake(tmp_path)
    rows = take_steps([next(volume.steps(host, VOLUME, 60, host.clock))], silent, check=False)
    assert (rows[0]["status"], rows[0]["why"], host.now) == ("failed", "it is not attached now", 60)


def test_a_booting_node_asks_for_itself_alone(tmp_path: Path) -> None:
    """A thousand that boot at once would each read the list of all."""
    host = Fake(tmp_path, scontrol=[done(NODE2.format(one, "(null)", "")) for one in ("UNKNOWN", "UNKNOWN", "IDLE")])
    rows = take_steps([boot.registers(host, host.clock)], silent, check=False)
    assert (rows[0]["status"], {command[-1] for command in host.ran}) == ("changed", {"node2"})


def test_a_predecessor_is_deleted_once_it_has_no_job(tmp_path: Path) -> None:
    class Busy(Fake):
        def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "", keep: Sequence[str] = ()) -> Done:
            if command[1] == "delete":
                return done() if self.now >= 60 else done(status=1, err="Requested nodes are busy")
            gone = self.now >= 60
            return done(status=1, err="Node node2 not found") if gone else done(NODE2.format("DOWN", "(null)", ""))

    host = Busy(tmp_path)
    rows = take_steps([boot.no_predecessor(host, host.clock)], silent, check=False)
    assert (rows[0]["status"], host.now) == ("changed", 60)


def test_slurmd_starts_though_another_unit_waits_for_the_boot(tmp_path: Path) -> None:
    """systemd holds slurmd's start until lustrain-tune.service has ended, which waits for the boot that starts slurmd."""

    class Booting(Fake):
        active = "inactive"

        def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "", keep: Sequence[str] = ()) -> Done:
            if command[1] == "restart" and "--job-mode=ignore-dependencies" not in command:
                return done(status=TIMED_OUT, err="systemctl did not end within 120 s")
            self.active = "active" if command[1] == "restart" else self.active
            return done(f"LoadState=loaded\nActiveState={self.active}\nUnitFileState=disabled\n")

    host = Booting(tmp_path)
    rows = take_steps([apply.service(host, "slurmd.service", host.clock, enabled=False)], silent, check=False)
    assert rows[0]["status"] == "changed"


def untouched() -> None:
    pytest.fail("the node was tuned")


def part(**more: Any) -> str:
    told = {"duty": "compute", "host": "c", "address": "10.0.0.9", "munge_secret": SECRET, "state_volume": None}
    node = {"group": "train", "instance_type": "p5.48xlarge", "capacity": "spot", "zone_id": "use1-az4"}
    return json.dumps({**node, "slurm": told | more})


def test_a_node_is_tuned_between_its_packages_and_slurmd(tmp_path: Path) -> None:
    """slurmd's limits are settings of nodes that have a slurmd, and its first check of the node would drain it without them."""

    class Packaged(Fake):
        def which(self, program: str) -> str | None:
            return f"/usr/bin/{program}"

    host = Packaged(tmp_path, aws=[done(base64.b64encode(b"k" * 1024).decode())], slurmd=[done("slurm 23.11.4")])
    host.write(NODE, part())
    seen: list[list[tuple[str, ...]]] = []
    groups = {"train": NodeGroup(type="c7i.2xlarge", count=1)}
    rows = boot.boot(host, json.dumps(document(**groups)), silent, lambda: seen.append([*host.ran]), host.clock)
    assert [row["setting"] for row in rows][:4] == ["slurm.release", "slurm.gpus", "slurm.packages", "slurm.release"]
    assert not any(command[0] == "aws" or "restart" in command for command in seen[0])


def test_a_slurmd_that_fails_is_started_again_by_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's unit starts it once; this machine has no user of munge or Slurm."""
    monkeypatch.setattr(pwd, "getpwnam", lambda name: pwd.getpwuid(os.getuid()))

    class Booting(Fake):
        def which(self, program: str) -> str | None:
            return f"/usr/bin/{program}"

        def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "", keep: Sequence[str] = ()) -> Done:
            if command[:2] == ("systemctl", "restart") and command[-1] == "slurmd.service":
                starts.append(self.read(paths.restart_drop_in("slurmd.service")) or "")
            if command[:2] == ("systemctl", "show"):
                wants = {"slurmctld.service": ("inactive", "disabled"), "munge.service": ("active", "enabled")}
                active, enabled = wants.get(command[-1], ("active", "disabled"))
                return done(f"ActiveState={active}\nUnitFileState={enabled}\n")
            if command[:3] == ("scontrol", "show", "node"):
                return KNOWN if starts else UNKNOWN
            return super().run(command, timeout, stdin, keep)

    starts: list[str] = []
    text = base64.b64encode(b"k" * 1024).decode()
    host = Booting(tmp_path, aws=[done(text)], slurmd=[done("slurm 22.05.8")], scontrol=[done()], systemctl=[done()])
    host.write(NODE, part())
    groups = {"train": NodeGroup(type="c7i.2xlarge", count=1)}
    rows = boot.boot(host, json.dumps(document(**groups)), silent, lambda: None, host.clock)
    assert [row for row in rows if row["status"] == "failed"] == []
    (started,) = starts
    assert "Restart=on-failure" in started.splitlines()
    assert ("systemctl", "daemon-reload") in host.ran


def test_an_old_release_is_refused_before_anything_changes(tmp_path: Path) -> None:
    class Jammy(Fake):
        def which(self, program: str) -> str | None:
            return "/usr/bin/apt-cache" if program == "apt-cache" else None

    text = base64.b64encode(b"k" * 1024).decode()
    policy = "slurmd:\n  Installed: (none)\n  Candidate: 21.08.5-2ubuntu1\n"
    host = Jammy(tmp_path, aws=[done(text)], **{"apt-cache": [done(policy)]})
    host.write(NODE, part())
    rows = boot.boot(host, json.dumps(document()), silent, untouched, host.clock)
    assert [(row["setting"], row["found"]) for row in rows] == [("slurm.release", "21.08")]
    assert "Ubuntu 24.04" in rows[0]["why"]
    assert not host.exists(paths.FOLDER)


def test_a_node_without_a_part_is_left_alone(tmp_path: Path) -> None:
    host = Fake(tmp_path)
    host.write(NODE, json.dumps({"group": "train", "slurm": None}))
    assert boot.boot(host, json.dumps(document()), silent, untouched, host.clock) == []
    assert host.ran == []


GONE = "DOWN+DYNAMIC_NORM+NOT_RESPONDING"


@pytest.mark.parametrize(
    ("shown", "reason", "deleted"),
    [
        (GONE, " Reason=Not responding [slurm@2026-11-26T16:55:44]", True),
        ("DOWN+DRAIN+DYNAMIC_NORM+NOT_RESPONDING", " Reason=lustrain: notice of AWS: spot, terminate [root@x]", True),
        (
            "DOWN+DRAIN+DYNAMIC_NORM+NOT_RESPONDING",
            " Reason=lustrain: gpu-ecc: uncorrectable; action=REPLACE [root@x]",
            False,
        ),
        ("DOWN+DRAIN+DYNAMIC_NORM+NOT_RESPONDING", " Reason=a fan is loud [root@x]", False),
        ("DOWN+COMPLETING+DYNAMIC_NORM+NOT_RESPONDING", "", False),
        ("DOWN+NOT_RESPONDING", "", False),
        ("IDLE+DYNAMIC_NORM+NOT_RESPONDING", "", False),
    ],
)
def test_a_node_that_stays_gone_is_deleted(tmp_path: Path, shown: str, reason: str, deleted: bool) -> None:
    host = Fake(tmp_path, scontrol=[done(NODE2.format(shown, "(null)", reason))])
    controller, delete = watch.Controller(host, silent, 600), ("scontrol", "delete", "NodeName=node2")
    for now_s in (0, 599):
        controller.check_once(now_s)
    assert delete not in host.ran
    controller.check_once(600)
    assert (delete in host.ran) == deleted


def test_a_node_that_came_back_is_gone_anew(tmp_path: Path) -> None:
    away, back = (done(NODE2.format(one, "(null)", "")) for one in (GONE, "IDLE+DYNAMIC_NORM"))
    host = Fake(tmp_path, scontrol=[away, back, away])
    controller = watch.Controller(host, silent, 600)
    for now_s in (0, 300, 700):
        controller.check_once(now_s)
    assert all(command[1] != "delete" for command in host.ran)


@pytest.mark.parametrize(
    ("state", "reason", "resumed"),
    [
        ("IDLE+DRAIN+DYNAMIC_NORM", "Duplicate jobid", True),
        ("IDLE+DRAIN", "Duplicate jobid", True),
        ("ALLOCATED+DRAIN", "Duplicate jobid", False),
        ("IDLE+COMPLETING+DRAIN", "Duplicate jobid", False),
        ("IDLE+DRAIN+NOT_RESPONDING", "Duplicate jobid", False),
        ("DOWN+DRAIN", "Duplicate jobid", False),
        ("IDLE+DRAIN+REBOOT_REQUESTED", "Duplicate jobid", False),
        ("IDLE", "Duplicate jobid", False),
        ("IDLE+DRAIN", "a person: Duplicate jobid", False),
        ("IDLE+DRAIN", "Kill task failed", False),
    ],
)
def test_node_drained_for_an_old_script_alone_takes_jobs_again(
    tmp_path: Path, state: str, reason: str, resumed: bool
) -> None:
    host = Fake(tmp_path, scontrol=[done(NODE2.format(state, "(null)", f" Reason={reason} [root@x]"))])
    watch.Controller(host, silent, 600).check_once(0)
    resume = ("scontrol", "update", "NodeName=node2", "State=RESUME")
    assert [command for command in host.ran if command[1] == "update"] == [resume] * resumed


class Queue(Fake):
    """A controller with one running job; `lists` is what squeue prints at each look, None where slurmctld does not answer."""

    def __init__(
        self, root: Path, lists: Sequence[str | None], batch: str = "1", requeues: bool = True, has: str = "b1"
    ) -> None:
        super().__init__(root)
        self._lists, self._batch, self._requeues, self._has, self._nodes = list(lists), batch, requeues, has, ""

    def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "", keep: Sequence[str] = ()) -> Done:
        self.ran.append(tuple(command))
        if command[0] == "squeue":
            listed = self._lists.pop(0)
            self._nodes = (listed or "||").split("|")[1]
            return done(listed) if listed is not None else done(status=1)
        if command[1:3] == ("show", "hostnames"):
            return done(command[3].replace("b[2-3]", "b2\nb3") + "\n")
        if command[1:3] == ("show", "job"):
            nodes = f"NodeList={self._nodes} BatchHost={self._has} NumNodes=2"
            return done(f"JobId=7 JobState=RUNNING BatchFlag={self._batch} Reboot=0 {nodes}")
        return done() if command[1:3] == ("requeue", "incomplete") and self._requeues else done(status=1, err="not now")


HAS, LACKS, OTHER = "7|b[2-3]|b2\n", "7|b[2-3]|b1\n", "7|b2|b1\n"


@pytest.mark.parametrize(
    ("lists", "batch", "requeued"),
    [
        ([LACKS, LACKS], "1", [1]),
        ([LACKS.replace("7", "7_1"), LACKS.replace("7", "7_1")], "2", [1]),
        ([HAS, LACKS, LACKS], "1", [2]),
        ([LACKS], "1", []),
        ([HAS, HAS, HAS], "1", []),
        ([LACKS, HAS, LACKS], "1", []),
        ([LACKS, None, LACKS], "1", [2]),
        ([LACKS, OTHER], "1", []),
        ([LACKS, ""], "1", []),
        # salloc has no script, and a part of a heterogeneous job has it elsewhere.
        ([LACKS, LACKS], "0", []),
        ([LACKS.replace("7", "7+1"), LACKS.replace("7", "7+1")], "1", []),
    ],
)
def test_job_without_its_batch_host_is_requeued_at_the_second_look(
    tmp_path: Path, lists: list[str | None], batch: str, requeued: list[int]
) -> None:
    host, at = Queue(tmp_path, lists, batch), []
    controller = watch.Controller(host, silent, 600)
    for look, listed in enumerate(lists):
        before = len(host.ran)
        controller.check_once(look)
        number = (listed or "").partition("|")[0]
        if ("scontrol", "requeue", "incomplete", number) in host.ran[before:]:
            at.append(look)
    assert at == requeued


def test_job_that_is_not_requeued_is_tried_again_and_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    host = Queue(tmp_path, [LACKS] * 4, requeues=False)
    controller = watch.Controller(host, told.append, 600)
    for look in range(4):
        controller.check_once(look)
    assert host.ran.count(("scontrol", "requeue", "incomplete", "7")) == 3
    assert len(told) == 1


def test_job_that_has_a_script_again_is_not_requeued_by_an_old_list(tmp_path: Path) -> None:
    """It was requeued and has started since squeue printed it."""
    host = Queue(tmp_path, [LACKS] * 3, has="b2")
    controller = watch.Controller(host, silent, 600)
    for look in range(3):
        controller.check_once(look)
    assert not any(command[1] == "requeue" for command in host.ran)


@pytest.mark.parametrize(
    ("answer", "state", "restarts"),
    [
        (KNOWN, "active", 0),
        (UNKNOWN, "active", 1),
        (done(status=1), "active", 0),
        (KNOWN, "failed", 1),
        (done(status=1), "failed", 1),
        # A person stopped it, or systemd starts it already.
        (UNKNOWN, "inactive", 0),
        (UNKNOWN, "activating", 0),
    ],
)
def test_slurmd_is_restarted_where_it_failed_or_was_forgotten(
    tmp_path: Path, answer: Done, state: str, restarts: int
) -> None:
    host = Fake(tmp_path, scontrol=[answer], systemctl=[done(f"ActiveState={state}\n"), done()])
    node = watch.Node(host, silent)
    node.check_once(0)
    assert host.ran == []
    node.check_once(60)
    assert host.ran.count(("systemctl", "restart", "slurmd.service")) == restarts


DRAINED = "IDLE+DRAIN+DYNAMIC_NORM"
AT_NOTICE = f"{watch.NOTICE}spot, terminate"


@pytest.mark.parametrize(
    ("state", "before", "begin", "end"),
    [
        ("IDLE+DYNAMIC_NORM", "", AT_NOTICE, "Z"),
        (DRAINED, " Reason=a fan is loud [root@2026-11-26T16:55:44]", AT_NOTICE, "; drained before: a fan is loud"),
        (DRAINED, f" Reason={AT_NOTICE} [root@x]", AT_NOTICE, "terminate"),
        ("IDLE+DYNAMIC_NORM", " Reason=Not responding [slurm@x]", AT_NOTICE, "Z"),
    ],
)
def test_notice_drains_and_keeps_a_persons_reason(
    tmp_path: Path, imds: LocalMetadata, state: str, before: str, begin: str, end: str
) -> None:
    host = Fake(tmp_path, scontrol=[done(NODE2.format(state, "(null)", before)), done()])
    host.write("/proc/sys/kernel/hostname", "node2\n")
    imds.spot_notice()
    watch.Node(host, silent).check_once(0)
    (update,) = (command for command in host.ran if command[1] == "update")
    assert update[2:4] == ("NodeName=node2", "State=DRAIN")
    reason = update[4].removeprefix("Reason=")
    assert (reason.startswith(begin), reason.endswith(end)) == (True, True), reason


def test_a_silent_slurmctld_is_a_fault_of_the_controller_alone() -> None:
    expected = expected_hardware({}, Request())
    facts = {"error": "timed out", "node": None, "gres": None, "volume": None, "mounted": False}
    results = {duty: checks.node({"slurm": {"duty": duty, **facts}}, expected, Request()).status for duty in DUTIES}
    assert results == {"controller": "failed", "compute": "unknown", "client": "unknown"}


def test_a_word_that_is_another_groups_name_is_no_feature(tmp_path: Path) -> None:
    """Or a node on spot would be in the partition of a group that is called spot."""
    host = Fake(tmp_path)
    host.write(NODE, part())
    groups = {name: NodeGroup(type="p5.48xlarge", count=1, gpus=8) for name in ("train", "spot")}
    mine = boot.part(host, json.dumps(document(**groups)))
    assert mine is not None
    assert (mine.features, mine.gpus) == (("train", "p5.48xlarge", "use1-az4"), 8)


def test_facts_tell_a_node_that_slurm_does_not_know(tmp_path: Path) -> None:
    shown = [done(status=1, err="Node node2 not found"), done(NODE2.format("IDLE", "gpu:h100:8(S:0-1)", ""))]
    host = Fake(tmp_path, scontrol=shown)
    host.write(NODE, part())
    unknown, known = (scheduler.collect(MachineReading(host, FactsWanted()))["slurm"]["node"] for _ in shown)
    assert unknown["state"] == scheduler.NOT_KNOWN
    assert (known["state"], known["gres"]) == ("IDLE", "gpu:h100:8")


def test_a_controller_without_an_answer_is_no_unknown_node(tmp_path: Path) -> None:
    host = Fake(tmp_path, scontrol=[done(status=1, err="Unable to contact slurm controller")])
    assert scheduler.show_node(host, "node2") == (None, "Unable to contact slurm controller")
