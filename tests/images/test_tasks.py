"""The tasks as a user calls them: what they refuse in one line, and one image from plan to push and what is told of it then."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from images.build import make
from images.flags import BuildFlags, ImageFlags
from images.plan import changes
from lustrain import image_file
from lustrain.problem import UserError
from tests.fab import Fab
from tests.images.builds import Silent
from tests.images.workshop import Made, Workshop, change_code


@pytest.fixture
def fab(fab: Fab) -> Fab:
    """A task where no engine is."""
    environment = {name: value for name, value in os.environ.items() if name != "LUSTRAIN_CLUSTER"}
    environment["DOCKER_HOST"] = "unix:///nowhere/docker.sock"
    return lambda *words: fab(*words, environment=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("image-build --push", "there is nowhere to push to; fix: "),
        ("image-push", "there is nowhere to push to; fix: "),
        ("image-verify --image-file nothing.json", "nothing.json = 'nothing.json': no image was built here yet; fix: "),
        ("image-scan --image-file nothing.json", "nothing.json = 'nothing.json': no image was built here yet; fix: "),
        (f"image-verify --max-age {'9' * 5000}", "--max-age = "),
        (f"image-verify --image-file {'x' * 300}", "x" * 300),
        ("image-plan --cluster nowhere.json", "--cluster = 'nowhere.json': "),
        ("image-build --repository r.example/a --push --image-file no/such/image.json", "--image-file = "),
        ("image-diff 127.0.0.1:1/a:1 Name", "image = 'Name'"),
        (f"image-scan --ref ghcr.io/a/b@sha256:{'1' * 64}", "image = "),
    ],
)
def test_a_mistake_is_one_line_and_no_traceback(fab: Fab, words: str, line: str) -> None:
    said = fab(*words.split())
    assert said.code in (1, 2), said.out
    assert "Traceback" not in said.err
    assert said.err.startswith(line)


@pytest.mark.slow
def test_a_plan_needs_no_engine_and_is_json_where_asked(fab: Fab) -> None:
    found = json.loads(fab("image-plan", "--json").out)
    assert found["ref"].startswith("lustrain/trainer:cpu-torch")
    assert [one["layer"] for one in found["rebuilds"]["rebuild"]][-2:] == ["code", "image"]


@pytest.mark.slow
def test_image_goes_from_its_plan_to_a_registry_and_into_record(
    workshop: Workshop, cpu_image: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in workshop.engine.environment.items():
        monkeypatch.setenv(name, value)
    root = workshop.checkout()
    change_code(root)
    file = tmp_path / "image.json"
    flags = BuildFlags(
        push=True,
        repository=f"{workshop.registry.host}/flow/trainer",
        base=workshop.base,
        tools=workshop.base,
        arg=("TORCH_CPU_LINKS=",),
        no_verify=True,
        image_file=str(file),
    )
    made = make.build(flags, Silent(), root=root)
    assert made.record is not None
    assert image_file.read(file) == made.record
    assert made.record.digest == made.built.digest
    with make.prepare(flags, root=root) as prepared:
        assert changes.lines(prepared.rebuilds) == ["nothing changed: every step comes from the cache"]
    # Again: the same image is there already, and the record is the same.
    assert make.build(flags, Silent(), root=root).record == made.record
    # In two steps: built into the engine, then pushed from the cache.
    change_code(root)
    make.build(replace(flags, push=False), Silent(), root=root)
    pushed = make.build(flags, Silent(), root=root)
    assert pushed.record is not None
    assert all(step.cached or step.stage == "internal" or " FROM " in step.name for step in pushed.built.steps)
    # A record of one target is not written over by another's.
    with (
        pytest.raises(UserError, match="records an image for cpu"),
        make.prepare(ImageFlags("cuda", repository=flags.repository, image_file=str(file)), pushing=True),
    ):
        pass
    # Other code under the same tag is another image.
    change_code(root)
    with make.prepare(flags, root=root) as prepared:
        assert [one.layer for one in prepared.rebuilds] == ["code"]
