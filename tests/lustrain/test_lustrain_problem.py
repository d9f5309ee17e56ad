"""One line about one mistake: it keeps its parts, fits every terminal, and carries the exit code."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lustrain.problem import FAILED, LONGEST_VALUE, USAGE, Problem, UserError, did_you_mean, problem

TEXT = st.text(max_size=40)


@given(TEXT, st.text() | st.integers() | st.binary(), TEXT, TEXT, TEXT)
def test_a_problem_is_one_line_that_keeps_its_parts(path: str, value: object, why: str, allowed: str, fix: str) -> None:
    line = problem(path, value, why, allowed, fix, code="C001", level="warning")
    assert line.isprintable()
    line.encode()
    again = pickle.loads(pickle.dumps(UserError([line], FAILED)))  # noqa: S301 -- what multiprocessing does
    assert (again.exit_code, again.problems) == (FAILED, [line])
    assert vars(again.problems[0]) == vars(line)
    assert (line.path, line.why, line.allowed, line.fix) == (path, why or str(line), allowed, fix)
    assert (line.code, line.level, line.source) == ("C001", "warning", "")


@given(st.text(min_size=LONGEST_VALUE + 1, alphabet="ab"))
def test_a_long_value_is_cut(value: str) -> None:
    line = problem("key", value, "is too long")
    assert line.startswith(f"key = '{value[: LONGEST_VALUE - 1]}…: is too long")


def test_a_value_that_python_cannot_print_is_named_by_its_type() -> None:
    assert problem("key", 10**5000, "is too large") == "key = a value of type int, too large to show: is too large"


def test_a_user_error_is_a_usage_error_unless_it_says_otherwise() -> None:
    class BrokenError(UserError):
        exit_code = FAILED

    codes = [
        error.exit_code for error in (UserError("x"), UserError("x", FAILED), BrokenError("x"), BrokenError("x", 3))
    ]
    assert codes == [USAGE, FAILED, FAILED, 3]
    assert str(UserError(["a", Problem("b")])) == "a\nb"


def test_only_near_names_are_suggested() -> None:
    assert did_you_mean("budegt", ["budget", "bucket", "name"]) == "did you mean budget?"
    assert did_you_mean("zzz", ["budget"]) == ""


@pytest.mark.parametrize("value", ["http://user:hun/ter2@proxy:3128", "socks5://user:secret@proxy", "x http://u:p@h y"])
def test_credentials_in_an_address_are_not_shown(value: str) -> None:
    line = problem("network.proxy.http", value, "is wrong")
    assert "://…@" in line
    assert not any(word in line for word in ("hun", "ter2", "secret", ":p@"))
