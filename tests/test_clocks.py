"""No verdict of a test depends on how fast the machine is: what would make it so is found in the syntax of the tests.

Found are upper bounds on how long something took, timers, and pauses of a fixed length in the body of a test. Benches measure.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "time", "time_ns"}
SMALLER, LARGER = (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)
SCOPE = ast.FunctionDef | ast.Lambda | ast.ClassDef
MENTIONED = re.compile(rf"\b(?:{'|'.join(CLOCKS)})\(\s*\)|\bTimer\b|\bsleep\b")
"""Sources without it need no look at their syntax, which takes a hundred times as long."""


def verdicts_by_the_clock(source: str) -> list[tuple[int, str]]:
    """Return (line, what) for whatever lets the speed of the machine decide, in the order of lines."""
    if not MENTIONED.search(source):
        return []
    tree = ast.parse(source)
    found: set[tuple[int, str]] = set()
    for function in [tree, *(one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef))]:
        took = _names_of_durations(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Compare) and _bounds_above(node, took):
                found.add((node.lineno, "an upper bound on how long something took"))
            if isinstance(node, ast.Call) and _name(node.func) == "Timer":
                found.add((node.lineno, "a timer"))
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
            found |= {(node.lineno, "a pause of a fixed length") for node in _straight(function) if _is_pause(node)}
    return sorted(found)


def _names_of_durations(function: ast.AST) -> set[str]:
    """Names that are given the difference of two clock readings, also by way of max() and the like."""
    return {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and _is_duration(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _is_duration(node: ast.AST, took: set[str]) -> bool:
    """Whether something is, or is made from, the difference of two clock readings."""
    if isinstance(node, ast.Name):
        return node.id in took
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and any(map(_reads_clock, (node.left, node.right))):
        return True
    children = (
        node.args if isinstance(node, ast.Call) else [node.left, node.right] if isinstance(node, ast.BinOp) else []
    )
    return any(_is_duration(child, took) for child in children)


def _reads_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) in CLOCKS and not node.args


def _bounds_above(node: ast.Compare, took: set[str]) -> bool:
    sides = [node.left, *node.comparators]
    return any(
        (isinstance(operator, SMALLER) and _is_duration(left, took))
        or (isinstance(operator, LARGER) and _is_duration(right, took))
        or (isinstance(operator, ast.Eq) and (_is_duration(left, took) or _is_duration(right, took)))
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False)
    )


def _straight(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """What a test does itself, once: neither in a loop, which waits for a condition, nor in a fake."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.While | ast.For | SCOPE):
            todo += ast.iter_child_nodes(node)


def _is_pause(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) == "sleep"


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize(
    "planted",
    [
        "def test_a():\n    began = time.monotonic()\n    work()\n    assert time.monotonic() - began < 5\n",
        "def test_a():\n    took = max(0, time.perf_counter() - began)\n    assert (code, took <= 6) == (0, True)\n",
        "def test_a():\n    assert 0.1 < round(time.time() - began, 1) < 5\n",
        "def test_a():\n    threading.Timer(0.5, stop.set).start()\n    assert work() == STOPPED\n",
        "def test_a():\n    with server:\n        time.sleep(0.5)\n    assert server.asked\n",
        "def test_a():\n    assert 2 > monotonic() - began\n",
    ],
)
def test_a_planted_verdict_by_the_clock_is_found(planted: str) -> None:
    assert len(verdicts_by_the_clock(planted)) == 1


@pytest.mark.parametrize(
    "sound",
    [
        "def test_a():\n    assert time.monotonic() - began >= 0.5\n",
        "def wait():\n    end = time.monotonic() + 300\n    while not done():\n        assert time.monotonic() < end\n",
        "def test_a():\n    while not done():\n        time.sleep(0.01)\n",
        "def test_a():\n    class Slow:\n        def __call__(self):\n            time.sleep(600)\n",
    ],
)
def test_waiting_for_a_condition_is_no_verdict_by_the_clock(sound: str) -> None:
    assert verdicts_by_the_clock(sound) == []


def test_no_verdict_depends_on_the_speed_of_the_machine() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}: {what}"
        for path in sorted(TESTS.rglob("*.py"))
        if "bench" not in path.relative_to(TESTS).parts
        for line, what in verdicts_by_the_clock(path.read_text(encoding="utf-8"))
    ]
    assert found == []
