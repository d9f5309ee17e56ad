"""How every task ends: its lines or its JSON on standard output, a mistake on standard error, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NoReturn

import pytest
from invoke.exceptions import Exit

from lustrain.problem import DIFFERS, FAILED, UNREACHABLE, UserError
from lustrain.task import TaskResult, perform


def raising(error: BaseException) -> Callable[[], NoReturn]:
    def work() -> NoReturn:
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "out", "data", "message", "code"),
    [
        (lambda: TaskResult(["a", "b"], {"n": 1}), "a\nb\n", {"n": 1}, None, 0),
        (lambda: TaskResult(["a"], [1], DIFFERS), "a\n", [1], None, DIFFERS),
        (lambda: TaskResult(["a"], [1], FAILED, ["bad", "worse"]), "a\n", None, "bad\nworse", FAILED),
        (lambda: TaskResult(["a"], {"n": 1}, FAILED, ["bad"]), "a\n", {"n": 1}, "bad", FAILED),
        (raising(UserError(["one", "two", "three"], UNREACHABLE)), "", None, "one\ntwo\nthree", UNREACHABLE),
        (raising(FileNotFoundError(2, "No such file", "/nowhere")), "", None, "/nowhere: No such file", FAILED),
        (raising(OSError(28, "No space left on device")), "", None, "this machine: No space left on device", FAILED),
        (raising(KeyboardInterrupt()), "", None, "stopped by Ctrl-C", FAILED),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_task_ends_with_its_answer_or_with_all_its_problems(
    work: Callable[[], TaskResult],
    out: str,
    data: object,
    message: str | None,
    code: int,
    as_json: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended, printed = 0, None
    try:
        perform(work, as_json=as_json)
    except Exit as error:
        ended, printed = error.code, error.message
    found = capsys.readouterr().out
    assert (ended, printed or None) == (code, message)
    if as_json:
        refused = {} if message is None else {"error": message.splitlines(), "exit_code": code}
        assert json.loads(found) == (data if message is None else {**(data or {}), **refused})
    else:
        assert found == out
