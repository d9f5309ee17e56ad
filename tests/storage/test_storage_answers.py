"""Answers of S3: one that lacks what it must hold is requested again, and times are read as botocore reads them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import botocore.parsers
import pytest
from botocore.client import BaseClient
from botocore.utils import parse_timestamp

from tests.lab.servers import S3Place
from trainer.storage import answers, open_store
from trainer.storage.answers import PatientClient, parse_time
from trainer.storage.s3_errors import UnreadableAnswerError

WHOLE = {"ContentLength": 1, "ETag": '"a"', "LastModified": "now"}


def client_that_hears(monkeypatch: pytest.MonkeyPatch, *said: dict[str, Any]) -> PatientClient:
    """A client whose requests get these answers, one after another, and that may try twice."""
    left = iter(said)
    monkeypatch.setattr(BaseClient, "_make_api_call", lambda *_: next(left))
    monkeypatch.setattr(answers, "pause", lambda attempt: None)
    client = object.__new__(PatientClient)
    client.meta = SimpleNamespace(config=SimpleNamespace(retries={"total_max_attempts": 2}))
    return client


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_answer_without_a_required_header_is_requested_again(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    garbled = {key: value for key, value in WHOLE.items() if key != name}
    assert client_that_hears(monkeypatch, garbled, WHOLE)._make_api_call("HeadObject", {}) == WHOLE
    with pytest.raises(UnreadableAnswerError, match=f"{name} is missing"):
        client_that_hears(monkeypatch, garbled, garbled)._make_api_call("HeadObject", {})


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-28T19:22:55.000Z",
        "2026-11-28T19:22:55Z",
        "Sat, 28 Nov 2026 19:22:55 GMT",
        "20261128",
        "1795894975.5",
        1795894975,
        1795894975.5,
    ],
)
def test_time_is_read_as_botocore_reads_it(text: str | float) -> None:
    read, expected = parse_time(text), parse_timestamp(text)
    assert (read, read.utcoffset()) == (expected, expected.utcoffset())


@pytest.mark.filterwarnings("ignore:tzname")
@pytest.mark.parametrize("text", ["2026-11-28T19:22:55.000Z", "Sat, 28 Nov 2026 19:22:55 GMT"])
def test_garbled_time_is_read_as_botocore_reads_it(text: str) -> None:
    for position, character in enumerate(text):
        for bit in range(8):
            garbled = text[:position] + chr(ord(character) ^ 1 << bit) + text[position + 1 :]
            assert _read(parse_time, garbled) == _read(parse_timestamp, garbled), garbled


def _read(parse: Callable[[str], datetime], text: str) -> datetime | None:
    try:
        return parse(text)
    except (ValueError, RuntimeError):
        return None


@pytest.mark.slow
def test_times_of_a_listing_need_no_dateutil(s3: S3Place, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = s3.uri("times")

    def refuse(text: str) -> None:
        raise AssertionError(text)

    monkeypatch.setattr(answers, "parse_timestamp", refuse)
    monkeypatch.setattr(botocore.parsers, "DEFAULT_TIMESTAMP_PARSER", refuse)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    store = open_store(uri)
    store.put("key", b"1")
    (listed,) = store.list()
    assert int(store.stat("key").modified) == int(listed.modified)
    assert store.read("key")[0] == b"1"
