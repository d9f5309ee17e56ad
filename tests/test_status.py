"""A status is the same text in messages, tables and JSON, under every Python."""

from __future__ import annotations

import json

import pytest

from lustrain.status import Status


@pytest.mark.parametrize("status", Status)
def test_a_status_is_its_text_everywhere(status: Status) -> None:
    assert (str(status), f"{status:<8}", json.loads(json.dumps(status))) == (
        status.value,
        status.value.ljust(8),
        status.value,
    )
