"""The cluster's interruption queue, read by rank 0 of each run while it trains.

Runs of one cluster share the queue, and SQS hands a message to one reader at a time. So a reader hides what it takes for LOOK_S
seconds only, and deletes what its own run has acted on and nothing else: a message about another run's node comes back for
that one. What no run acts on ends by its age; the queue's limit of receives is above what fits into that time.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lustrain.background import BackgroundThread
from lustrain.capacity_events import LOOK_S
from lustrain.problem import problem
from trainer.interrupt.notice import Notice, OnEvent, nearer
from trainer.interrupt.outage import Outage
from trainer.interrupt.queue_message import needs_action, parse_message

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient
    from mypy_boto3_sqs.type_defs import MessageTypeDef

WAIT_S = 20
"""How long a call waits for a message, the longest that there is:
https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-short-and-long-polling.html"""
MESSAGES = 10
"""The most that one call returns."""
PAUSE_S = 2.0
"""Between two calls, which return at once while there are messages about others' nodes."""
YIELD_S = LOOK_S + 2.0
"""Pause after messages that were seen before and are others': their own run shall be the next to get them."""
RETRY_S = 60.0
CALL_S = 5.0
ASSET_TAG = Path("/sys/devices/virtual/dmi/id/board_asset_tag")
"""The instance's id on Nitro instances: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/identify_ec2_instances.html"""
MAX_KNOWN = 10_000


def queue_problems(url: str) -> list[str]:
    """Check `interrupt.queue`; one line for its problem, if it has one."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.path.count("/") >= 2
    except ValueError:
        usable = False
    if usable and url.isprintable() and " " not in url:
        return []
    allowed = "like https://sqs.us-east-1.amazonaws.com/123456789012/llm-interruptions"
    return [problem("interrupt.queue", url, "is not the URL of a queue of SQS", allowed=allowed)]


def region_of(url: str) -> str | None:
    """Return the region in a queue's URL; None where its host is not one of SQS."""
    match = re.fullmatch(r"sqs\.([a-z0-9-]+)\.amazonaws\.com(\.cn)?", urlsplit(url).hostname or "")
    return match[1] if match else None


def asset_tag(path: Path = ASSET_TAG) -> str | None:
    """Return the id of this instance as its firmware says it; None elsewhere."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return text if re.fullmatch(r"i-[0-9a-f]{8,17}", text) else None


def connect(url: str) -> SQSClient:
    """Return a client for the queue's region, with the credentials of this node. ImportError, BotoCoreError."""
    import boto3
    from botocore.config import Config

    from trainer.storage.draws import draw_apart

    # The run's store may be a folder.
    draw_apart()
    config = Config(connect_timeout=CALL_S, read_timeout=WAIT_S + CALL_S, retries={"total_max_attempts": 1})
    return boto3.session.Session().client("sqs", region_name=region_of(url), config=config)


class QueueReader:
    """A source of notices (`Poller`) whose calls are made by a thread of its own: they may take half a minute."""

    def __init__(
        self,
        url: str,
        nodes: Mapping[str, str],
        *,
        rebalance: bool,
        on_notice: Callable[[Notice], None],
        on_event: OnEvent,
        wait_s: int = WAIT_S,
        wall_clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`nodes`: the host of each instance of this run. `on_notice` gets a notice for each of them that is taken away."""
        self._url, self._nodes, self._rebalance = url, nodes, rebalance
        self._on_notice, self._wait_s = on_notice, wait_s
        self._wall_clock, self._monotonic = wall_clock, monotonic
        self._outage = Outage("queue", on_event)
        self._client: SQSClient | None = None
        self._started = wall_clock()
        self._notice: Notice | None = None
        self._announced: set[tuple[str, str]] = set()
        self._receipts: dict[str, str] = {}
        """The newest receipt of each message that the run acts on, and that is about no other run's nodes."""
        self._others: dict[str, None] = {}
        """Messages that were seen and are not for this run, oldest first."""
        self._closing = threading.Event()
        self._thread = BackgroundThread(self._run, "interruption-queue")

    def start(self) -> None:
        self._thread.start()

    def poll(self) -> Notice | None:
        """Return the notice that leaves least time; raise a defect that ended the thread."""
        self._thread.check()
        return self._notice

    def close(self, *, saved: bool) -> None:
        """End, and once the run has `saved`, delete the messages that it has acted on.

        What is not deleted, as when a run fails or is killed before it has saved, is there again for the next launch.
        """
        self._closing.set()
        # The thread may still be in a call, and add to them.
        receipts = list(self._receipts.values())
        if not saved or not receipts or self._client is None:
            return
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            for receipt in receipts:
                self._client.delete_message(QueueUrl=self._url, ReceiptHandle=receipt)
        except (BotoCoreError, ClientError) as error:
            self._outage.failed(f"a notice stays in {self._url}: {error}")

    def receive(self) -> float:
        """Take the messages that are there, and return how many seconds to wait before the next look.

        A busy account has more of them than a call returns, and they come back after LOOK_S: a look takes what it can in that
        time, or one about this run could be missed among the others until it is too late.
        """
        known, until = False, self._monotonic() + LOOK_S
        while True:
            messages = self._receive()
            if messages is None:
                return RETRY_S
            if self._closing.is_set():
                # What comes after the last commit is for the next launch.
                return 0.0
            for message in messages:
                known |= self._take(message["MessageId"], message["ReceiptHandle"], message.get("Body", ""))
            if len(messages) < MESSAGES or self._monotonic() > until:
                return YIELD_S if known else PAUSE_S

    def _receive(self) -> list[MessageTypeDef] | None:
        """Return what a call returns; None where the queue cannot be read, which is one warning."""
        try:
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError as error:
            self._outage.failed(f"the interruption queue is not read: {error}")
            return None
        try:
            if self._client is None:
                self._client = connect(self._url)
            answer = self._client.receive_message(
                QueueUrl=self._url,
                MaxNumberOfMessages=MESSAGES,
                WaitTimeSeconds=self._wait_s,
                VisibilityTimeout=LOOK_S,
            )
        # ValueError: what botocore says of an endpoint that is none, as by AWS_ENDPOINT_URL_SQS.
        except (BotoCoreError, ClientError, ImportError, OSError, ValueError) as error:
            fix = "the node's role may sqs:ReceiveMessage and sqs:DeleteMessage on it, or interrupt.queue = ''"
            self._outage.failed(f"{self._url} is not read, the run goes on without it: {error}; fix: {fix}")
            return None
        self._outage.worked()
        return answer.get("Messages", [])

    def _take(self, message: str, receipt: str, body: str) -> bool:
        """Act on a message about this run's nodes; whether others shall be the next to get it."""
        event = parse_message(body)
        own = [instance for instance in event.instances if instance in self._nodes] if event else []
        if event is None or not own:
            seen = message in self._others
            self._others[message] = None
            if len(self._others) > MAX_KNOWN:
                del self._others[next(iter(self._others))]
            return seen
        now = self._wall_clock()
        if message not in self._receipts and not needs_action(event, now, self._started, rebalance=self._rebalance):
            return True
        shared = len(own) < len(event.instances)
        if not shared:
            self._receipts[message] = receipt
        left = None if event.ends is None else max(0.0, event.ends - now)
        for instance in own:
            # EventBridge may deliver an event twice.
            if (event.source, instance) in self._announced:
                continue
            self._announced.add((event.source, instance))
            deadline = None if left is None else self._monotonic() + left
            detail = f"{event.detail}, by the interruption queue"
            notice = Notice(event.source, detail, deadline, instance, host=self._nodes[instance])
            self._notice = nearer(self._notice, notice)
            self._on_notice(notice)
        return shared

    def _run(self) -> None:
        while not self._closing.is_set():
            self._closing.wait(self.receive())
