"""What the tasks are told arrives in the rooms that do it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from invoke.context import Context

from images import tasks
from images.build import make
from images.check import inspection, scan
from images.plan import lock, versions
from images.registry import client, ecr, read

REF = "127.0.0.1:1/team/trainer:a"
ECR = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/team/trainer@sha256:{'0' * 64}"


class Arrived(Exception):
    """The room was reached; nothing after it runs."""


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[Any]]:
    """Records the arguments of a room's function, and ends the task there."""

    def record(room: Any, name: str) -> list[Any]:
        calls: list[Any] = []

        def stop(*positional: Any, **named: Any) -> NoReturn:
            calls.append((positional, named))
            raise Arrived

        monkeypatch.setattr(room, name, stop)
        return calls

    monkeypatch.setattr(client, "connect", lambda ref: SimpleNamespace())
    monkeypatch.setattr(ecr, "client", lambda region: SimpleNamespace())
    return record


def run(task: Any, **flags: Any) -> None:
    with pytest.raises(Arrived):
        task(Context(), **flags)


def test_an_image_is_verified_against_the_budgets_of_versions(arrived: Callable[[Any, str], list[Any]]) -> None:
    calls = arrived(inspection, "verify")
    run(tasks.image_verify, ref=REF)
    assert calls[0][1]["budgets"] == versions.load().budgets != {}


def test_a_diff_is_of_the_platform_that_was_named(arrived: Callable[[Any, str], list[Any]]) -> None:
    calls = arrived(read, "image")
    run(tasks.image_diff, a=REF, b=REF, platform="linux/arm64")
    assert calls[0][0][2:] == ("linux/arm64",)


@pytest.mark.parametrize("upgrade", [True, False])
def test_locks_are_upgraded_where_the_flag_says_so(arrived: Callable[[Any, str], list[Any]], upgrade: bool) -> None:
    calls = arrived(lock, "write_all")
    run(tasks.image_lock, upgrade=upgrade)
    assert calls[0][1]["upgrade"] is upgrade


def test_a_push_puts_a_tag_also_where_the_build_was_by_digest(arrived: Callable[[Any, str], list[Any]]) -> None:
    calls = arrived(make, "build")
    run(tasks.image_push, by_digest=True)
    assert (calls[0][0][0].push, calls[0][0][0].by_digest) == (True, False)


def test_a_scan_is_weighed_by_the_threshold_that_was_given(arrived: Callable[[Any, str], list[Any]]) -> None:
    calls = arrived(scan, "gate")
    run(tasks.image_scan, ref=ECR, threshold="LOW")
    assert calls[0][1]["threshold"] == "LOW"
