"""A fault is one expression written differently, at its place; the same seed draws the same faults."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.sites import draw, mutants


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("x = a < b\n", ["x = (a <= b)\n"]),
        ("é = 1\nx = not b\n", ["é = (2)\nx = not b\n", "é = 1\nx = (b)\n"]),
        ("x = a and b\n", ["x = (a or b)\n"]),
        ("x = True\n", ["x = (False)\n"]),
        ("x = (1.5 if a\n     else c)\n", ["x = ((c if a else 1.5))\n"]),
        ("def f(a: 1 = b) -> 2: return f'{3}' + 'a'\n", []),
    ],
)
def test_each_fault_is_one_expression_at_its_place(source: str, changed: list[str]) -> None:
    assert [one.applied(source.encode()).decode() for one in mutants("a.py", source.encode())] == changed


def test_the_same_seed_draws_the_same_faults_of_each_room(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").write_text("".join(f"x{n} = {n}\n" for n in range(50)))
    rooms = {"first": ("a/*.py",), "second": ("b/*.py",)}
    drawn = draw(tmp_path, rooms, 7, seed=1)
    assert [one.file for one in drawn] == ["a/x.py"] * 4 + ["b/x.py"] * 3
    assert drawn == draw(tmp_path, rooms, 7, seed=1) != draw(tmp_path, rooms, 7, seed=2)
    assert all(ast.parse(one.applied((tmp_path / one.file).read_bytes())) for one in drawn)
