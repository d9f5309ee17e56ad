"""The bars of the house: what keeps it small enough to be held in the head."""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1]
ROOMS = ("lustrain", "infra", "images", "node_setup", "trainer", "launch", "rehearsal")
LONGEST_FILE, MOST_BOXES, LARGEST_IMAGES = 400, 15, 5000
ONE_FILE_A_PROGRAM = "rehearsal/lab/programs"
"""Its files are the programs of a simulated node, each under its own name."""


def sources(*folders: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=HOUSE, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    return [HOUSE / name for name in listed.stdout.split("\0") if name.endswith(".py") and (HOUSE / name).is_file()]


def test_no_file_is_longer_than_a_sitting() -> None:
    long = {str(path): count for path in sources() if (count := len(path.read_text().splitlines())) > LONGEST_FILE}
    assert long == {}


def test_no_folder_has_more_boxes_than_one_can_keep_apart() -> None:
    boxes: dict[str, set[str]] = defaultdict(set)
    for path in sources(*ROOMS):
        parts = path.relative_to(HOUSE).parts
        for depth in range(1, len(parts)):
            if parts[depth] != "__init__.py":
                boxes["/".join(parts[:depth])].add(parts[depth])
    crowded = {folder: len(names) for folder, names in boxes.items() if len(names) > MOST_BOXES}
    assert set(crowded) == {ONE_FILE_A_PROGRAM}


def test_images_stay_small_and_there_is_one_form_of_problem() -> None:
    assert sum(len(path.read_text().splitlines()) for path in sources("images")) <= LARGEST_IMAGES
    found = [path for path in sources(*ROOMS) if "\ndef problem(" in path.read_text()]
    assert found == [HOUSE / "lustrain/problem.py"]


def test_nothing_of_ours_draws_from_the_streams_that_belong_to_a_task() -> None:
    """A retry that took a number from Python's own stream made a resumed run unlike the one that was never interrupted."""
    allowed = {"SystemRandom", "Random", "seed", "getstate", "setstate"}
    drawn = []
    for path in sources("lustrain", "trainer"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "random":
                drawn.append(f"{path}:{node.lineno}")
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
                drawn += [f"{path}:{node.lineno}"] if node.attr not in allowed else []
    assert drawn == []
