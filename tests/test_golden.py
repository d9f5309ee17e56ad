"""What users see and what is declared, as it was: a change of the house changes none of these files but on purpose.

`pytest tests/test_golden.py --snapshot-update` writes them anew; git shows what has changed. Names of contents (hashes,
commits) are left out, since every edit changes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode
from syrupy.location import PyTestLocation

from images.build import answers, make
from images.flags import ImageFlags
from images.plan import versions
from infra.config import parse
from infra.plan.cost import cost
from infra.plan.stack import Plan
from infra.preflight.commands import rules
from infra.preflight.offline import run_offline
from infra.preflight.report import as_data, cost_lines
from launch.backends import load_all
from launch.flags import TrainFlags
from launch.submit import dry_run
from lustrain.problem import UserError
from node_setup.agent.model import Request
from node_setup.agent.run.plan import plan, rows
from node_setup.agent.settings import catalog
from tests.infra.edits import STACKS, edited, place, spec_of
from tests.infra.mistakes import MISTAKES, NOW
from tests.infra.registered import properties_of
from tests.infra.test_preflight_planted import FORM
from tests.infra.test_stack_zones import declared
from tests.launch.test_request import EC2, EKS, FOLDER, IMAGE, cluster, config, resolve
from tests.node_setup.machines import DOCUMENT, facts_of
from tests.node_setup.slurm_machines import cpu_files, p5_files

HASH = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{12,64}\b")
COMMITS = (".git.dirty", ".image.revision", ".image.version")
"""Labels that follow the commit."""
FOLDED = re.compile(r"[A-Za-z0-9+/=]{200,}")
"""Scripts that are handed over packed; they hold the bundle's name."""
SOURCES = re.compile(r"(?<=\nSOURCES = {\n).*(?=\n}\nsupervise)", re.DOTALL)
"""The supervisor in the batch script of Slurm."""


class Golden(SingleFileSnapshotExtension):
    """One text file a test in tests/golden, so that a review reads it."""

    _write_mode = WriteMode.TEXT
    file_extension = "txt"

    @classmethod
    def dirname(cls, *, test_location: PyTestLocation) -> str:
        return str(Path(test_location.filepath).with_name("golden"))


@pytest.fixture
def golden(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    return snapshot.use_extension(Golden)


def text(lines: Iterable[str]) -> str:
    return "\n".join(FOLDED.sub("<packed>", HASH.sub("<hash>", line)) for line in lines) + "\n"


def as_lines(data: Any) -> list[str]:
    return json.dumps(
        data, indent=1, sort_keys=True, default=lambda one: type(one).__name__, ensure_ascii=False
    ).splitlines()


def test_the_rules(golden: SnapshotAssertion) -> None:
    assert text(rules()) == golden


@pytest.mark.parametrize("stack", STACKS)
def test_what_preflight_says_of_an_example(stack: str, golden: SnapshotAssertion) -> None:
    found = run_offline(spec_of(stack, {}), place(stack), NOW)
    prices = cost_lines(cost(Plan(spec_of(stack, {}), place(stack), NOW)))
    assert text([*found, *as_lines(as_data(found)), *prices]) == golden


@pytest.mark.slow
def test_what_preflight_says_of_every_planted_mistake(golden: SnapshotAssertion) -> None:
    lines = []
    for mistake in MISTAKES:
        where = mistake.place or place(mistake.stack)
        found = run_offline(spec_of(mistake.stack, mistake.edits), where, NOW)
        lines += [f"# {mistake} in {mistake.stack}", *found, *(json.dumps(row) for row in as_data(found))]
    for name, stack, edits, _ in FORM:
        try:
            parse(edited(stack, edits))
        except UserError as error:
            lines += [f"# {name}", *error.problems]
    assert text(lines) == golden


@pytest.mark.slow
@pytest.mark.parametrize("stack", STACKS)
def test_what_a_stack_declares(stack: str, golden: SnapshotAssertion) -> None:
    made = declared(stack).registered
    found = {f"{kind} {name}": properties_of(request) for (kind, name), request in made.items()}
    assert text(as_lines(found)) == golden


@pytest.mark.parametrize("machine", ["p5", "cpu", "gaudi", "login"])
def test_what_the_agent_would_do_on_a_recorded_host(machine: str, golden: SnapshotAssertion) -> None:
    assert text(as_lines(rows(plan(catalog.load(), facts_of(machine), Request(document=DOCUMENT))))) == golden


@pytest.mark.parametrize("files", [cpu_files, p5_files], ids=["cpu", "p5"])
def test_what_slurm_is_configured_with(
    files: Callable[[Path], dict[str, str]], tmp_path: Path, golden: SnapshotAssertion
) -> None:
    assert (
        text(line for name, content in files(tmp_path).items() for line in (f"==> {name}", *content.splitlines()))
        == golden
    )


@pytest.mark.parametrize("backend", ["local", "slurm", "kubernetes", "ssh"])
def test_what_a_dry_run_of_fab_train_prints(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: SnapshotAssertion
) -> None:
    monkeypatch.setattr("sys.executable", "/venv/bin/python")
    where, flags = {
        "local": (None, TrainFlags("config.toml", nproc="2")),
        "slurm": (cluster(), TrainFlags("config.toml", name="first", nodes="2-3", spare="1", time="1-12:00:00")),
        "kubernetes": (cluster(**EKS), TrainFlags("config.toml", name="first", nodes="2", queue="train")),
        "ssh": (cluster(**EC2), TrainFlags("config.toml", name="first", nodes="2")),
    }[backend]
    image = IMAGE if backend == "kubernetes" else ("", "")
    request = resolve(flags, config(tmp_path, global_batch=64), where, image=image)
    plan = load_all()[request.backend].plan(request, FOLDER, {"PATH": "/bin", "AWS_REGION": "us-east-1"})
    lines, _ = dry_run(replace(request, config="<the settings>"), plan)
    assert text(SOURCES.sub("<the modules>", "\n".join(lines)).splitlines()) == golden


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(versions.load().budgets))
def test_what_an_image_is_made_of(target: str, tmp_path: Path, golden: SnapshotAssertion) -> None:
    base = "example.org/base@sha256:" + "a" * 64
    flags = ImageFlags(
        target, repository="example.org/trainer", base=base, tools=base, image_file=str(tmp_path / "image.json")
    )
    with make.prepare(flags) as planned:
        found = answers.plan(planned)
    # The commit and what is named after it, and every file of the trainer by name.
    del found["git"], found["ref"], found["inputs"]["code"]
    found["labels"] = {name: value for name, value in found["labels"].items() if not name.endswith(COMMITS)}
    assert text(as_lines(found)) == golden
