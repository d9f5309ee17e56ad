"""What the tasks are told arrives in the rooms that do it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from invoke.context import Context

from images import tasks
from images.build import make
from images.check import inspection, scan
from images.flags import BuildFlags
from images.plan import lock, versions
from images.registry import client, ecr, read

REF = "127.0.0.1:1/team/trainer:a"
ECR = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/team/trainer@sha256:{'0' * 64}"


class Arrived(Exception):
    """The room was reached; nothing after it runs."""


CASES: list[tuple[Any, dict[str, Any], Any, str, int | str, object]] = [
    (tasks.image_verify, {"ref": REF}, inspection, "verify", "budgets", versions.load().budgets),
    (tasks.image_verify, {"ref": REF, "max_age": "7"}, inspection, "verify", "oldest_days", 7),
    (tasks.image_diff, {"a": REF, "b": REF, "platform": "linux/arm64"}, read, "image", 2, "linux/arm64"),
    (tasks.image_lock, {"upgrade": True}, lock, "write_all", "upgrade", True),
    (tasks.image_lock, {}, lock, "write_all", "upgrade", False),
    (tasks.image_push, {"target": "cuda"}, make, "build", 0, BuildFlags("cuda", push=True)),
    (tasks.image_scan, {"ref": ECR, "threshold": "LOW"}, scan, "gate", "threshold", "LOW"),
]


@pytest.mark.parametrize(("task", "flags", "room", "name", "key", "expected"), CASES)
def test_flags_of_a_task_arrive_in_the_function_that_does_it(
    monkeypatch: pytest.MonkeyPatch,
    task: Any,
    flags: dict[str, Any],
    room: Any,
    name: str,
    key: int | str,
    expected: object,
) -> None:
    """`key` is the name or the place of the argument."""
    seen: list[object] = []

    def stop(*words: Any, **named: Any) -> NoReturn:
        seen.append(named[key] if isinstance(key, str) else words[key])
        raise Arrived

    monkeypatch.setattr(room, name, stop)
    monkeypatch.setattr(client, "connect", lambda ref: SimpleNamespace())
    monkeypatch.setattr(ecr, "client", lambda region: SimpleNamespace())
    with pytest.raises(Arrived):
        task(Context(), **flags)
    assert seen == [expected]
