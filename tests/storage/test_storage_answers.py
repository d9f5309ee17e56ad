"""An answer of S3 that lacks what it must hold is asked for again, and then one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from botocore.client import BaseClient

from trainer.storage import answers
from trainer.storage.answers import PatientClient
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
