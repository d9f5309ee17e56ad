"""buildx builds what the plan says, with its arguments as they are, its types and its cache; Ctrl-C leaves nothing of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests

from images.build.bake import Bake, bake_file
from images.model import Output
from lustrain.problem import UserError
from rehearsal.lab.containers.engine import Engine
from rehearsal.lab.containers.registry import Registry
from tests.images.builds import Remembering, context, docker_that_says, named, plan
from tests.processes import alive, wait_until

DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
OCI = "application/vnd.oci.image.manifest.v1+json"


def manifest(registry: Registry, name: str, reference: str) -> requests.Response:
    accepted = {"Accept": f"{DOCKER_MANIFEST}, {OCI}"}
    return requests.get(f"{registry.url}/v2/{name}/manifests/{reference}", headers=accepted, timeout=300)


def target_of(output: Output, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = bake_file(plan("r.example/a:1", **more), "small", output)["target"]["small"]
    return found


def test_image_is_requested_in_gzip_with_the_types_it_needs() -> None:
    plain, attested = target_of(Output.LOAD), target_of(Output.LOAD, attestations=True)
    assert (plain["tags"], plain["attest"]) == (["r.example/a:1"], ["type=provenance,disabled=true"])
    assert plain["output"] == ["type=docker,oci-mediatypes=false,compression=gzip"]
    assert attested["attest"] == ["type=provenance,mode=max", "type=sbom"]
    assert attested["output"] == ["type=docker,oci-mediatypes=true,compression=gzip"]
    by_digest = target_of(Output.PUSH_BY_DIGEST)
    options = "type=image,push=true,push-by-digest=true,name-canonical=true,name=r.example/a,store=false"
    assert (by_digest["tags"], by_digest["output"]) == ([], [f"{options},oci-mediatypes=false,compression=gzip"])


def test_a_check_exports_neither_image_nor_cache(tmp_path: Path) -> None:
    cache = "r.example/a:cache"
    flags = {"cache_to": cache, "cache_from": (cache,), "secrets": {"ca": tmp_path / "a,b"}}
    found = target_of(Output.CHECK, **flags)
    assert found["output"] == ["type=cacheonly"]
    assert "cache-to" not in found
    assert found["cache-from"] == [f"type=registry,ref={cache}"]
    assert found["secret"] == [f'id=ca,"src={tmp_path}/a,b"']
    kept = f"type=registry,ref={cache},mode=max,image-manifest=true,oci-mediatypes=true,ignore-error=true"
    assert target_of(Output.LOAD, **flags)["cache-to"] == [kept]


VERSIONS = [
    ("github.com/docker/buildx v0.12.1 30feaa1", False),
    ("", False),
    ("github.com/docker/buildx 0.13.1+ds1 0.13.1+ds1-3", True),
    ("github.com/docker/buildx v0.29.1 a", True),
    ("github.com/docker/buildx 1b5c9e0 a", True),
]


@pytest.mark.parametrize(("version", "taken"), VERSIONS)
def test_a_plugin_that_is_missing_or_too_old_is_refused(tmp_path: Path, version: str, taken: bool) -> None:
    """Versions are written as distributions write them."""
    bake = Bake(docker_that_says(tmp_path, f'[ "$*" = "buildx version" ] && exec printf %s "{version}"'))
    if taken:
        bake.check(plan("a:1"))
    else:
        with pytest.raises(UserError, match=r"buildx.*; fix: "):
            bake.check(plan("a:1"))


SMALL = """FROM scratch AS small
ARG WORD
LABEL word=$WORD
COPY a /a
"""


@pytest.mark.slow
def test_what_was_pushed_has_reported_digest_types_and_arguments(
    tmp_path: Path, engine: Engine, registry: Registry
) -> None:
    tag = f"{registry.host}/team/a:1"
    odd = {"WORD": "${HOME} %{if} $X 100%"}
    asked = plan(tag, arguments=odd, labels={"odd.label": "a ${b} %{c} \"d\" 'e'"})
    watch = Remembering()
    built = Bake(engine.environment).build(asked, context(tmp_path / "c", SMALL, a="1"), "small", Output.PUSH, watch)
    answer = manifest(registry, "team/a", "1")
    assert answer.headers["Docker-Content-Digest"] == built.digest
    found = answer.json()
    assert found["mediaType"] == DOCKER_MANIFEST
    assert {layer["mediaType"] for layer in found["layers"]} == {DOCKER_LAYER}
    config = requests.get(f"{registry.url}/v2/team/a/blobs/{found['config']['digest']}", timeout=300).json()
    assert config["config"]["Labels"] == {"word": odd["WORD"], **asked.labels}
    assert [step for step in watch.steps if "COPY" in step.name] == [named(built.steps, "COPY a /a")]


@pytest.mark.slow
def test_a_second_build_is_cached_and_a_changed_file_is_not(tmp_path: Path, engine: Engine) -> None:
    bake, asked = Bake(engine.environment), plan("bake/cached:1")
    text = f"FROM scratch AS small\nLABEL at={time.time_ns()}\nCOPY a /{time.time_ns()}\n"
    first = bake.build(asked, context(tmp_path / "c", text, a="1"), "small", Output.LOAD, Remembering())
    again = bake.build(asked, context(tmp_path / "c", text, a="1"), "small", Output.LOAD, Remembering())
    # Same size, same time, in a folder of the same name.
    changed = bake.build(asked, context(tmp_path / "d" / "c", text, a="2"), "small", Output.LOAD, Remembering())
    assert [named(built.steps, "COPY a").cached for built in (first, again, changed)] == [False, True, False]
    assert first.digest == again.digest == again.image_id
    assert changed.image_id != first.image_id
    listed = engine.docker("image", "inspect", "--format", "{{.Id}}", "bake/cached:1").stdout.strip()
    assert listed == changed.image_id


@pytest.mark.slow
def test_a_check_runs_the_steps_and_leaves_no_image(tmp_path: Path, engine: Engine) -> None:
    listing = ("images", "--all", "--quiet", "--no-trunc")
    before = sorted(engine.docker(*listing).stdout.split())
    made = context(tmp_path / "c", f"FROM scratch AS small\nCOPY a /{time.time_ns()}\n", a="1")
    built = Bake(engine.environment).build(plan("bake/check:1"), made, "small", Output.CHECK, Remembering())
    assert not named(built.steps, "COPY a").cached
    assert (built.digest, built.image_id) == (None, None)
    assert sorted(engine.docker(*listing).stdout.split()) == before


@pytest.mark.slow
def test_failed_step_is_named_with_its_logs_end_sans_secret(tmp_path: Path, engine: Engine, base_image: str) -> None:
    (tmp_path / "ca").write_text("canary-7f3a")
    text = f"""FROM {base_image} AS small
RUN --mount=type=secret,id=ca test -s /run/secrets/ca && echo first && ls /none
"""
    asked = plan("bake/failed:1", secrets={"ca": tmp_path / "ca"})
    with pytest.raises(UserError) as caught:
        Bake(engine.environment).build(asked, context(tmp_path / "c", text), "small", Output.LOAD, Remembering())
    first, *log = caught.value.problems
    assert first.startswith("build small: step [small 2/2] RUN --mount=type=secret,id=ca")
    assert first.endswith("exit code 2")
    assert "  | first" in log
    assert any("/none" in line for line in log)
    assert "canary" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM scratch AS small\nNONSENSE\n", "unknown instruction: NONSENSE"),
        ("FROM scratch AS other\nCOPY a /\n", 'target stage "small" could not be found'),
        ("FROM 127.0.0.1:1/no/where:1 AS small\nCOPY a /\n", "127.0.0.1:1"),
        ("FROM scratch AS small\nCOPY none /\n", '"/none": not found'),
    ],
)
def test_dockerfile_that_cannot_be_built_shows_buildkits_words(
    tmp_path: Path, engine: Engine, text: str, expected: str
) -> None:
    made = context(tmp_path / "c", text, a="1")
    with pytest.raises(UserError) as caught:
        Bake(engine.environment).build(plan("bake/bad:1"), made, "small", Output.CHECK, Remembering())
    assert caught.value.problems[0].startswith("build small: ")
    assert expected in caught.value.problems[0]


@pytest.mark.slow
def test_ctrl_c_leaves_no_child_and_the_engine_stops_too(tmp_path: Path, engine: Engine, base_image: str) -> None:
    mark = str(time.time_ns())
    context(tmp_path / "c", f"FROM {base_image} AS small\nRUN echo {mark} && sleep 3600.{mark[-6:]}\n")
    script = f"""
from pathlib import Path
from images.build.bake import Bake
from images.model import Context, Output
from tests.images.builds import Silent, plan
class Watch(Silent):
    def log(self, name, text): print("LOG", text, flush=True)
Bake().build(plan("a:1"), Context(Path({str(tmp_path / "c")!r}), {{}}), "small", Output.CHECK, Watch())
"""
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    child = subprocess.Popen(command, env=engine.environment, stdout=pipe, stderr=pipe, text=True)
    assert child.stdout is not None
    while f"LOG {mark}" not in (line := child.stdout.readline()):
        assert line, child.communicate()[1]
    children = running(str(tmp_path / "c"))
    assert children
    wait_until(lambda: sleeping(mark))
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=300)
    assert child.returncode != 0
    assert "KeyboardInterrupt" in error
    wait_until(lambda: not any(map(alive, children)))
    wait_until(lambda: not sleeping(mark))


def running(folder: str) -> list[int]:
    """Processes that work in that folder."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(one / "cwd") == folder:
                found.append(int(one.name))
    return found


def sleeping(mark: str) -> bool:
    command = ["pgrep", "-f", f"^sleep 3600.{mark[-6:]}"]
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0
