"""The interruption queue: what AWS's events say, and that a run acts on and deletes what is about its own nodes alone."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from moto import mock_aws

from lustrain import capacity_events as events
from lustrain.capacity_events import LOOK_S
from tests.processes import wait_until
from tests.trainer.tiny_runs import commits, train, write_config
from tests.trainer.tiny_runs import events as run_events
from trainer.config import InterruptConfig
from trainer.errors import EXIT_REQUEUE
from trainer.interrupt import Notice, NoticeWatcher, config_problems
from trainer.interrupt.queue import PAUSE_S, RETRY_S, YIELD_S, QueueReader, asset_tag, region_of
from trainer.interrupt.queue_message import STALE_S, NodeEvent, needs_action, parse_message

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

NOW = 1_700_000_000.0
MINE, OTHER = "i-1234567890abcdef0", "i-0fedcba9876543210"


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def message(kind: str, detail: dict[str, Any], sent: float = NOW) -> str:
    return json.dumps({"version": "0", "detail-type": kind, "time": stamp(sent), "detail": detail})


def spot(instance: str = MINE, sent: float = NOW) -> str:
    return message(events.SPOT, {"instance-id": instance, "instance-action": "terminate"}, sent)


HOOK = {
    "AutoScalingGroupName": "llm-train-gang-1a2b3c4",
    "EC2InstanceId": MINE,
    "LifecycleTransition": "autoscaling:EC2_INSTANCE_TERMINATING",
}
TAKEN_BACK = {"instance-id": MINE, "instance-action": "terminate", "instance-termination-time": stamp(NOW + 90)}
RETIREMENT = {
    "service": "EC2",
    "eventTypeCode": "AWS_EC2_PERSISTENT_INSTANCE_RETIREMENT_SCHEDULED",
    "eventTypeCategory": "scheduledChange",
    "startTime": "Tue, 14 Nov 2023 23:13:20 GMT",
    "affectedEntities": [{"entityValue": MINE}, {"entityValue": OTHER}],
}


def health(status: str) -> dict[str, Any]:
    summary = {"HealthStatus": status, "HealthStatusReason": "NvidiaErrorTerminate", "RepairAction": "Replace"}
    return {"ClusterName": "llm", "InstanceId": MINE, "HealthSummary": summary}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (spot(), NodeEvent("spot", "terminate", (MINE,), NOW, NOW + 120)),
        (message(events.REBALANCE, {"instance-id": MINE}), NodeEvent("rebalance", "recommended", (MINE,), NOW)),
        (
            message(events.TERMINATE, HOOK),
            NodeEvent("autoscaling", "llm-train-gang-1a2b3c4 ends it", (MINE,), NOW),
        ),
        *(
            (message(kind, TAKEN_BACK), NodeEvent("reservation", "terminate", (MINE,), NOW, NOW + 90))
            for kind in events.RESERVATION_INTERRUPTION
        ),
        (
            message(events.HEALTH, RETIREMENT),
            NodeEvent("scheduled", RETIREMENT["eventTypeCode"], (MINE, OTHER), NOW, NOW + 3600),  # type: ignore[arg-type]
        ),
        (
            message(events.HYPERPOD_NODE, health("Unhealthy")),
            NodeEvent("hyperpod", "NvidiaErrorTerminate", (MINE,), NOW),
        ),
        (message(events.HEALTH, {**RETIREMENT, "statusCode": "closed"}), None),
        (message(events.HEALTH, {**RETIREMENT, "startTime": "Tue, 14 Nov 999999999999 23:13:20 GMT"}), None),
        (message(events.HYPERPOD_NODE, health("Healthy")), None),
        (message(events.BLOCK_END[0], {"capacity-reservation-id": "cr-0123456789abcdef0"}), None),
        (message(events.HYPERPOD_STATE, {"ClusterName": "llm", "ClusterStatus": "Failed"}), None),
        (message(events.SPOT, {}), None),
        (message(events.SPOT, []), None),  # type: ignore[arg-type]
        ("[]", None),
        ("garbage", None),
    ],
)
def test_message_says_which_instances_end_and_when(body: str, expected: NodeEvent | None) -> None:
    assert parse_message(body) == expected


def test_old_refused_and_far_events_need_no_action() -> None:
    def acts(source: str, now: float, *, ends: float | None = None, rebalance: bool = True) -> bool:
        return needs_action(NodeEvent(source, "", (MINE,), NOW, ends), now, NOW - 1, rebalance=rebalance)

    assert [acts("spot", NOW + late) for late in (0, STALE_S)] == [True, False]
    assert [acts("rebalance", NOW, rebalance=wanted) for wanted in (True, False)] == [True, False]
    assert not needs_action(NodeEvent("rebalance", "", (MINE,), NOW), NOW + 2, NOW + 1, rebalance=True)
    assert [acts("scheduled", NOW, ends=NOW + far) for far in (300, 86_400, -1800)] == [True, False, False]


class Queue:
    """A queue of the embedded AWS, and readers of it whose clocks stand."""

    def __init__(self) -> None:
        self.sqs: SQSClient = boto3.client("sqs", region_name="us-east-1")
        self.url = self.sqs.create_queue(QueueName="llm-interruptions")["QueueUrl"]
        self.events: list[tuple[str, dict[str, Any]]] = []

    def send(self, *bodies: str) -> None:
        for body in bodies:
            self.sqs.send_message(QueueUrl=self.url, MessageBody=body)

    def reader(self, nodes: dict[str, str], notices: list[Notice], *, url: str | None = None) -> QueueReader:
        return QueueReader(
            url or self.url,
            nodes,
            rebalance=False,
            on_notice=notices.append,
            on_event=lambda kind, fields: self.events.append((kind, fields)),
            wait_s=0,
            wall_clock=lambda: NOW + 20,
            monotonic=lambda: 1000.0,
        )

    def show_again(self) -> None:
        """Have all that readers hide come back, as after LOOK_S seconds."""
        for held in self._messages():
            held.change_visibility(0)

    def bodies(self) -> list[str]:
        return [held.body for held in self._messages()]

    def _messages(self) -> Any:
        """Also those that a reader hides."""
        from moto.sqs.models import sqs_backends

        (queue,) = sqs_backends["123456789012"]["us-east-1"].queues.values()
        return queue._messages


@pytest.fixture
def queue() -> Iterator[Queue]:
    with mock_aws():
        yield Queue()


def test_run_acts_on_its_node_once_and_deletes_after_the_commit(queue: Queue) -> None:
    notices: list[Notice] = []
    reader = queue.reader({MINE: "node1"}, notices)
    queue.send(spot(), spot())
    assert reader.receive() == PAUSE_S
    (notice,) = notices
    assert (notice.source, notice.host, notice.instance_id, notice.deadline) == ("spot", "node1", MINE, 1100.0)
    assert reader.poll() == notice
    assert len(queue.bodies()) == 2, "a launch that is killed before it has saved leaves them to the next one"
    queue.show_again()
    reader.receive()
    assert len(notices) == 1
    reader.close(saved=True)
    assert queue.bodies() == []


def test_message_about_nodes_of_two_runs_is_left_to_both(queue: Queue) -> None:
    both = message(events.HEALTH, RETIREMENT | {"startTime": "Tue, 14 Nov 2023 22:18:20 GMT"})
    queue.send(both)
    for instance, host in ((MINE, "node1"), (OTHER, "node2")):
        notices: list[Notice] = []
        reader = queue.reader({instance: host}, notices)
        assert reader.receive() == YIELD_S
        assert [notice.host for notice in notices] == [host]
        reader.close(saved=True)
        queue.show_again()
    assert queue.bodies() == [both]


def test_own_message_is_seen_among_many_of_others(queue: Queue) -> None:
    notices: list[Notice] = []
    odd = message(events.SPOT, {"instance-id": ["i-1"], "instance-action": "terminate"})
    queue.send(*[spot(OTHER)] * 34, odd, spot())
    queue.reader({MINE: "node1"}, notices).receive()
    assert [notice.instance_id for notice in notices] == [MINE]


def test_two_runs_on_one_queue_each_get_their_own_node(queue: Queue) -> None:
    first, second = [], []  # type: list[Notice], list[Notice]
    readers = [queue.reader({MINE: "node1"}, first), queue.reader({OTHER: "node2"}, second)]
    foreign, garbage = spot("i-00000000000000000"), "not an event"
    queue.send(spot(OTHER), foreign, garbage)
    assert readers[0].receive() == PAUSE_S
    assert not first
    queue.show_again()
    assert readers[0].receive() == YIELD_S > LOOK_S, "the next look is another reader's"
    queue.show_again()
    readers[1].receive()
    assert [notice.host for notice in second] == ["node2"]
    for reader in readers:
        reader.close(saved=True)
    assert queue.bodies() == [foreign, garbage], "what no run acts on is left to its age"


@pytest.mark.parametrize("variable", [None, "AWS_ENDPOINT_URL_SQS"])
def test_queue_that_cannot_be_read_is_one_warning(
    queue: Queue, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = queue.reader({MINE: "node1"}, [], url=f"{queue.url}-gone")
    if variable:
        monkeypatch.setenv(variable, "no endpoint")
    assert [reader.receive(), reader.receive()] == [RETRY_S, RETRY_S]
    (event,) = queue.events
    assert (event[0], event[1]["source"]) == ("warning", "queue")


def watcher(queue: Queue, seen: list[dict[str, Any]]) -> NoticeWatcher:
    """A watch whose clocks stand."""
    return NoticeWatcher(
        InterruptConfig(queue=queue.url, poll_s=0.01),
        on_event=lambda kind, fields: seen.append({"event": kind} | fields),
        local_clock=lambda: NOW + 20,
        monotonic=lambda: 1000.0,
    )


def test_message_and_metadata_notice_of_a_node_count_once(queue: Queue) -> None:
    seen: list[dict[str, Any]] = []
    queue.send(spot())
    with watcher(queue, seen) as watch:
        watch.read_queue({MINE: "node1"})
        wait_until(lambda: watch.notice() is not None)
        watch.report_notice(Notice("spot", "terminate at 12:00", None, MINE, host="node1").fields())
    assert [(one["event"], one["source"], one["host"]) for one in seen] == [("notice", "spot", "node1")]
    assert seen[0]["deadline"] == stamp(NOW + 120)
    assert queue.bodies() == []


def test_run_that_fails_before_it_saved_leaves_its_message(queue: Queue) -> None:
    queue.send(spot())
    watch = watcher(queue, [])

    def fail() -> None:
        with watch:
            watch.read_queue({MINE: "node1"})
            wait_until(lambda: watch.notice() is not None)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(queue.bodies()) == 1


@pytest.mark.slow
def test_run_saves_and_ends_with_85_on_a_message_about_its_node(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.interrupt.watch.asset_tag", lambda: MINE)
    foreign = spot(OTHER)
    queue.send(foreign, spot(MINE, datetime.now(UTC).timestamp()))
    config = write_config(tmp_path, steps=1_000_000, micro_batch=2, every_steps=1_000_000)
    assert train(config, f"interrupt.queue={queue.url}") == EXIT_REQUEUE
    (notice,) = run_events(tmp_path / "run", "notice")
    assert (notice["source"], notice["host"], notice["instance_id"]) == ("spot", socket.gethostname(), MINE)
    assert len(commits(tmp_path / "run")) == 1
    assert queue.bodies() == [foreign]


def test_nodes_without_a_known_instance_read_no_queue() -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    config = InterruptConfig(queue="https://sqs.us-east-1.amazonaws.com/123456789012/llm-interruptions")
    watch = NoticeWatcher(config, on_event=lambda kind, fields: seen.append((kind, fields)))
    watch.read_queue({})
    watch.close()
    assert [(kind, fields["source"]) for kind, fields in seen] == [("warning", "queue")]


def test_queue_url_region_and_instance_id_are_read(tmp_path: Path) -> None:
    good = "https://sqs.cn-north-1.amazonaws.com.cn/123456789012/llm-interruptions"
    assert (region_of(good), region_of("http://127.0.0.1:5000/1/q")) == ("cn-north-1", None)
    assert config_problems(InterruptConfig(queue=good)) == config_problems(InterruptConfig(queue="")) == []
    for bad in ("llm-interruptions", "arn:aws:sqs:us-east-1:123456789012:q", "https://sqs", "s3://bucket/key"):
        (line,) = config_problems(InterruptConfig(queue=bad))
        assert line.startswith(f"interrupt.queue = {bad!r}: ")
    tag = tmp_path / "tag"
    assert asset_tag(tag) is None
    for text, expected in ((f"{MINE}\n", MINE), ("Not Specified\n", None)):
        tag.write_text(text)
        assert asset_tag(tag) == expected
