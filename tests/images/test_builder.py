"""One function builds: what stands in the way is one line, and nothing leaves unchecked."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from images.build import builder
from images.build import engine as engine_module
from images.build.bake import Bake
from images.build.builder import build, check_room
from images.build.engine import facts
from images.build.failure import BuildError, failure
from images.build.progress import Live
from images.build.steps import Steps
from images.model import BuildObserver, Built, Context, Output, Plan, Step
from lustrain.problem import UserError
from rehearsal.lab.containers.base import base_tar
from rehearsal.lab.containers.engine import Engine
from tests.images.builds import Remembering, Silent, context, docker_that_says, named, plan

BASE = "base/bookworm:minbase"
GIB = 1 << 30


def engine_that_says(folder: Path, version: dict[str, Any], info: dict[str, Any]) -> dict[str, str]:
    """The environment of a docker command that knows what its engine is, and nothing else."""
    said = {"context": "unix:///x", "version": json.dumps({"Server": version}), "info": json.dumps(info)}
    return docker_that_says(folder, "".join(f"[ $1 = {word} ] && exec echo '{text}'\n" for word, text in said.items()))


def refused(environment: dict[str, str]) -> tuple[str, int]:
    with pytest.raises(UserError) as caught:
        facts(environment)
    (line,) = caught.value.problems
    assert "\n" not in line
    assert "; fix: " in line
    return line, caught.value.exit_code


@pytest.mark.parametrize(
    ("version", "info", "told"),
    [
        ({"Version": "22.9"}, {}, "allowed: >= 23.0"),
        ({"Version": "5.4.0", "Components": [{"Name": "Podman Engine"}]}, {}, "Podman 5.4.0"),
        ({"Version": "29.0.1"}, {"OSType": "windows"}, "windows"),
    ],
)
def test_an_engine_that_cannot_build_this_is_one_line(
    tmp_path: Path, version: dict[str, Any], info: dict[str, Any], told: str
) -> None:
    line, code = refused(engine_that_says(tmp_path, version, info))
    assert (told in line, code) == (True, 1)


def test_an_engine_with_buildkit_is_taken(tmp_path: Path) -> None:
    assert facts(engine_that_says(tmp_path, {"Version": "23.0"}, {})).version == "23.0"


def test_engine_that_is_silent_is_one_line_with_its_address(tmp_path: Path) -> None:
    for host in (f"unix://{tmp_path}/none.sock", "nonsense/x", "tcp://127.0.0.1:1"):
        line, code = refused({"DOCKER_HOST": host, "PATH": os.environ["PATH"]})
        assert line.startswith("no engine answers: ")
        assert host.partition("/x")[0] in line
        assert code == 3


def test_a_socket_that_is_not_ours_to_use_names_the_group(tmp_path: Path) -> None:
    words = "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock"
    line, code = refused(docker_that_says(tmp_path, f"echo '{words}' >&2"))
    assert ("usermod -aG docker" in line, code) == (True, 1)


def test_without_the_docker_command_there_is_one_line(tmp_path: Path) -> None:
    line, _ = refused({"PATH": str(tmp_path)})
    assert "not on PATH" in line


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "pause_s", lambda *_: 0)


RAN, CACHED = Step("[x 1/1] RUN a", 3.0, False), Step("[x 1/1] RUN a", 0.0, True)
VERIFY, EXPORT = Step("[x-verify 1/1] RUN verify", 1.0, False), Step("exporting to image", 2.0, False)
MADE = Built((CACHED, EXPORT), 2.0, "sha256:1")
LOST = 'step exporting to image failed: failed to prepare extraction snapshot "x": parent snapshot y does not exist'
"""In the words of Docker 26."""


def failing(why: str, *steps: Step) -> BuildError:
    error = failure("small", Steps(Silent()), [f"ERROR: {why}"])
    error.steps = steps
    return error


class Noting(Bake):
    """Builds nothing: it notes what it is asked, and answers what it was given."""

    def __init__(self, folder: Path, *outcomes: Built | BuildError) -> None:
        # The disk of an engine whose folder is not here is not looked at.
        super().__init__(engine_that_says(folder, {"Version": "29.0"}, {"DockerRootDir": "/nowhere"}))
        self.outcomes = list(outcomes)
        self.asked: list[tuple[str, Output, bool]] = []

    def check(self, plan: Plan) -> None:
        if plan.attestations:
            raise UserError("no; fix: do not")

    def build(self, plan: Plan, context: Context, target: str, output: Output, watch: BuildObserver) -> Built:
        self.asked.append((target, output, plan.no_cache))
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BuildError):
            raise outcome
        return outcome


def test_the_check_goes_first_and_nothing_is_made_twice(tmp_path: Path) -> None:
    noting, staged = Noting(tmp_path, Built((RAN, VERIFY), 2.0, None), MADE, MADE), Context(tmp_path, {})
    built = build(plan("a:1", no_cache=True), staged, noting, output=Output.PUSH, watch=Silent())
    assert noting.asked == [("small-verify", Output.CHECK, True), ("small", Output.PUSH, False)]
    assert (built.steps, built.seconds, built.digest) == ((RAN, VERIFY, EXPORT), 4.0, "sha256:1")
    build(plan("a:1"), staged, noting, output=Output.LOAD, verify=False, watch=Silent())
    assert noting.asked[2:] == [("small", Output.LOAD, False)]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("failures", "tries", "ends_well"),
    [([LOST] * 2, 3, True), ([LOST] * 3, 3, False), (["no space left on device"], 1, False)],
)
def test_snapshot_that_the_engine_lost_is_worth_two_more_tries(
    tmp_path: Path, failures: list[str], tries: int, ends_well: bool
) -> None:
    noting = Noting(tmp_path, *(failing(why, RAN) for why in failures), MADE)
    said = io.StringIO()
    outcome: Built | UserError
    with Live("x", stream=said) as watch:
        try:
            wanted = plan("a:1", no_cache=True)
            outcome = build(wanted, Context(tmp_path, {}), noting, output=Output.LOAD, verify=False, watch=watch)
        except UserError as error:
            outcome = error
    # Each try is told, and runs every step again where that was asked for.
    assert noting.asked == [("small", Output.LOAD, True)] * tries
    assert said.getvalue().count("building again") == tries - 1
    assert isinstance(outcome, Built) is ends_well
    if isinstance(outcome, Built):
        # What the tries before did is in the answer.
        assert outcome.steps == (RAN, RAN, EXPORT)


def test_what_buildx_cannot_do_is_refused_before_a_build(tmp_path: Path) -> None:
    noting, wanted = Noting(tmp_path), plan("a:1", attestations=True)
    with pytest.raises(UserError, match="no; fix: do not"):
        build(wanted, Context(tmp_path, {}), noting, output=Output.PUSH, watch=Silent())
    assert noting.asked == []


@pytest.mark.slow
def test_an_image_whose_check_fails_does_not_leave(tmp_path: Path, engine: Engine, base_image: str) -> None:
    tag, bake = "verified/buildx:1", Bake(engine.environment)
    text = f"""FROM {base_image} AS small
COPY a /a
FROM small AS small-verify
RUN grep -q good /a || {{ echo "a is not good"; exit 1; }}
"""
    bad, good = (context(tmp_path / word, text, a=word) for word in ("bad", "good"))
    with pytest.raises(UserError, match="a is not good"):
        build(plan(tag), bad, bake, output=Output.LOAD, watch=Silent())
    assert engine.docker("image", "inspect", tag, check=False).returncode != 0
    built = build(plan(tag), good, bake, output=Output.LOAD, watch=Silent())
    (found,) = json.loads(engine.docker("image", "inspect", tag).stdout)
    assert (found["Id"], len(found["RootFS"]["Layers"])) == (built.image_id, 2)
    assert not named(built.steps, "grep -q").cached


@pytest.mark.parametrize(
    ("free", "cached", "target", "fits"),
    [
        (2 * GIB, 0, "cuda", False),
        (2 * GIB, 0, "unbudgeted", True),
        (2 * GIB, 16 * GIB, "cuda", True),
        (GIB, 16 * GIB, "cuda", True),
        (GIB - 1, 16 * GIB, "cuda", False),
        (None, 0, "cuda", True),
    ],
)
def test_a_full_disk_is_told_before_the_build_and_a_cache_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int | None, cached: int, target: str, fits: bool
) -> None:
    found = engine_module.Engine("unix:///x", "29.0", True, tmp_path)
    monkeypatch.setattr(engine_module.Engine, "free_bytes", lambda self: free)
    monkeypatch.setattr(engine_module, "cached_bytes", lambda environment=None: cached)
    if fits:
        check_room(target, found)
    else:
        with pytest.raises(UserError, match="GB free"):
            check_room(target, found)


@pytest.mark.slow
def test_free_space_is_that_of_the_engines_own_disk(engine: Engine) -> None:
    found = facts(engine.environment)
    assert found.local
    assert found.root.is_relative_to(engine.subnet.folder)
    free = found.free_bytes()
    assert free is not None
    assert abs(free - shutil.disk_usage(found.root).free) < GIB
    assert engine_module.cached_bytes(engine.environment) >= 0


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("unix:///run/docker.sock", True),
        ("tcp://127.0.0.1:2375", True),
        ("tcp://localhost:2375", True),
        ("tcp://10.0.0.1:2375", False),
        ("tcp://127.0.0.1.example.com:2375", False),
        ("ssh://user@host", False),
    ],
)
def test_a_remote_engine_is_no_place_to_look_for_space(host: str, local: bool) -> None:
    found = engine_module.Engine(host, "29", True, Path("/"))
    assert (found.local, found.free_bytes() is not None) == (local, local)


@pytest.mark.slow
def test_a_disk_that_fills_during_the_build_is_told_as_such(tmp_path: Path, engine: Engine) -> None:
    """Its data lies on a file system of 600 MB, which is full for real."""
    with SmallEngine(tmp_path / "engine") as small:
        small.docker("import", base_tar(), BASE)
        made = context(tmp_path / "c", f"FROM {BASE} AS small\nRUN head -c 1G /dev/zero > /large\n")
        with pytest.raises(UserError, match=r"disk is full in \[2/2\] RUN head -c 1G"):
            Bake(small.environment).build(plan("full:1"), made, "small", Output.CHECK, Remembering())
        with pytest.raises(UserError, match="B free"):
            check_room("cpu", facts(small.environment), small.environment)


class SmallEngine(Engine):
    """An engine whose images and cache have 600 MB."""

    def _furnish(self) -> None:
        super()._furnish()
        data = self.subnet.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600m", "tmpfs", str(data)], check=True)

    def stop(self) -> None:
        mounted = self.subnet.folder / "data"
        self.kill()
        for _ in range(50):
            if subprocess.run(["umount", str(mounted)], capture_output=True, check=False).returncode == 0:
                break
            time.sleep(0.1)
        super().stop()
