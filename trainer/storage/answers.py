"""How answers are read: their requests are repeated where botocore gives up, and times of a listing take no parser of prose.

A listing or a header carries no checksum, so on plain HTTP a flipped byte may garble a date or a number.
"""

from __future__ import annotations

import re
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from botocore.client import BaseClient
from botocore.exceptions import BotoCoreError, ClientError
from botocore.utils import parse_timestamp

from trainer.storage.bulk import decoded, pause
from trainer.storage.s3_errors import UnreadableAnswerError

if TYPE_CHECKING:
    import boto3

_NEEDED = {
    "GetObject": {"ContentLength", "ETag"},
    "HeadObject": {"ContentLength", "ETag", "LastModified"},
    "PutObject": {"ETag"},
    "CreateMultipartUpload": {"UploadId"},
    "UploadPart": {"ETag"},
}
"""What this package reads from an answer, by operation: a header whose name was garbled is missing."""
_LISTED = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?Z")
_IN_HEADER = re.compile(
    "(Mon|Tue|Wed|Thu|Fri|Sat|Sun), [0-9]{2} (Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [0-9]{4} "
    "[0-9]{2}:[0-9]{2}:[0-9]{2} GMT"
)
"""Standard readers of these forms take much else for a time, which may be a garbled one."""


class PatientClient(BaseClient):
    """Repeats a request until its answer can be read, as often as the client may try at all.

    A repeated conditional put may meet its own success, as after a lost answer.
    """

    def _make_api_call(self, operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
        attempts = self.meta.config.retries["total_max_attempts"]  # type: ignore[attr-defined]
        for attempt in range(attempts):
            try:
                answer: dict[str, Any] = super()._make_api_call(operation, parameters)  # type: ignore[misc]
                _expect_complete(operation, answer)
                return answer
            except (BotoCoreError, ClientError):
                raise
            # A parser raises what it likes: ValueError for a date, ResponseParserError, which is not a BotoCoreError, for XML.
            except Exception as error:  # noqa: BLE001
                unreadable = error
            if attempt + 1 < attempts:
                pause(attempt)
        why = " ".join(str(unreadable).split())[:200]
        raise UnreadableAnswerError(operation=operation, why=why) from unreadable


def make_patient(session: boto3.Session) -> None:
    """Have every S3 client that `session` makes from now on be a PatientClient.

    The event is boto3's own way to extend a client:
    https://boto3.amazonaws.com/v1/documentation/api/latest/guide/events.html
    """

    def extend(base_classes: list[type], **_: object) -> None:
        base_classes.insert(0, PatientClient)

    session.events.register("creating-client-class.s3", extend)


def read_times_quickly(session: boto3.Session) -> None:
    """Have every client that `session` makes from now on read times by `parse_time`."""
    session._session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=parse_time)


def parse_time(text: Any) -> datetime:
    """Read a time as botocore does, which hands over a number where a service answers in JSON.

    S3 writes 2026-11-28T19:22:55.000Z in listings and HTTP's own form in headers. botocore has dateutil read both, which looks
    for times in any text: that was two thirds of the processor time of a listing.
    """
    try:
        if isinstance(text, str) and _LISTED.fullmatch(text):
            return datetime.fromisoformat(text)
        if isinstance(text, str) and _IN_HEADER.fullmatch(text):
            return parsedate_to_datetime(text)
    except ValueError:
        pass
    return parse_timestamp(text)


def _expect_complete(operation: str, answer: dict[str, Any]) -> None:
    if missing := _NEEDED.get(operation, set()) - answer.keys():
        raise ValueError(f"{', '.join(sorted(missing))} is missing")
    if "ChecksumCRC64NVME" in answer:
        decoded(answer["ChecksumCRC64NVME"])
