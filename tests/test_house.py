"""What holds for all rooms, and neither a linter nor an import contract sees."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from pathlib import Path

import pulumi_aws
import pytest

HOUSE = Path(__file__).parents[1]
ROOMS = ("lustrain", "infra", "images", "node_setup", "trainer", "launch", "planner", "rehearsal")


def sources(*folders: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=HOUSE, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    return [HOUSE / name for name in listed.stdout.split("\0") if name.endswith(".py") and (HOUSE / name).is_file()]


def test_there_is_one_form_of_problem() -> None:
    found = [path for path in sources(*ROOMS) if "\ndef problem(" in path.read_text()]
    assert found == [HOUSE / "lustrain/problem.py"]


def test_nothing_of_ours_draws_from_the_streams_of_a_task() -> None:
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


def test_mypy_reads_every_service_of_aws_that_is_declared() -> None:
    """Of those that it is told to skip, it would take any argument."""
    rules = tomllib.loads((HOUSE / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    followed = {name for rule in rules if rule.get("follow_imports") == "normal" for name in rule["module"]}
    services = {path.parent.name for path in Path(pulumi_aws.__file__).parent.glob("*/__init__.py")}
    skipped = {name for name in services if f"pulumi_aws.{name}.*" not in followed}
    found = []
    for path in sources(*ROOMS):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "pulumi_aws" in text else ():
            used = []
            if isinstance(node, ast.ImportFrom) and node.module == "pulumi_aws":
                used = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom | ast.Import):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
                used = [name.split(".")[1] for name in modules if name.startswith("pulumi_aws.")]
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("aws", "pulumi_aws"):
                used = [node.attr]
            found += [f"{path}:{node.lineno}: {name}" for name in used if name in skipped]
    assert found == []
