"""No promise loses its test: every test that docs/test-and-prove.md names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.prove.scenes import scene_of

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def names_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_a_helper_is_no_test() -> None:
    own = names_in(Path(__file__))
    assert "names_in" not in own
    assert "test_a_helper_is_no_test" in own


@pytest.mark.parametrize("page", ["docs/test-and-prove.md"])
def test_every_test_that_is_named_exists(page: str) -> None:
    named = NAMED.findall((ROOT / page).read_text(encoding="utf-8"))
    assert named, "the page names tests"
    gone = [path for path, _ in named if not (ROOT / path).exists()]
    gone += [
        f"{path}::{test}" for path, test in named if test and path not in gone and test not in names_in(ROOT / path)
    ]
    assert gone == []


def promises() -> list[tuple[str, str, str]]:
    """Each promise, the word for what proves it, and the tests that are named for it."""
    lines = (ROOT / "docs/test-and-prove.md").read_text(encoding="utf-8").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [(row[0], row[1], row[2]) for row in cells if row[0] != "promise"]


@pytest.mark.parametrize(("promise", "where", "tests"), promises())
def test_a_promise_names_what_keeps_it_and_where_that_runs(promise: str, where: str, tests: str) -> None:
    named = [f"{file}::{test}" if test else file for file, test in NAMED.findall(tests)]
    runs = {scene_of(one) or "test" for one in named} | ({"rehearse"} if "`make rehearse`" in tests else set())
    assert runs, "a promise needs what keeps it"
    assert set(where.split(", ")) == runs
