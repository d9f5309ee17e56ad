"""`fab image-verify` of an image that a real registry has not."""

from __future__ import annotations

import pytest

from images.check.inspection import lines, verify
from images.registry.client import Registry as Client
from lustrain.problem import UserError
from rehearsal.lab.containers.registry import Registry


def test_missing_image_fails_and_a_mistyped_one_is_refused(session_registry: Registry) -> None:
    client = Client(session_registry.host, lambda host: None)
    report = verify(client, f"{session_registry.host}/team/absent:1")
    assert (report.exit_code, [row.check for row in report.rows]) == (1, ["manifest"])
    assert len(lines(report)) == 1
    with pytest.raises(UserError) as caught:
        verify(client, "http://nonsense")
    assert caught.value.exit_code == 2
