"""buildx builds what the plan says, with its arguments as they are, its types and its cache; Ctrl-C leaves nothing of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from images.build import engine as engine_module
from images.build.bake import Bake, bake_file
from images.model import Output, Plan
from images.registry import merge
from lustrain.problem import UserError
from rehearsal.lab.containers.engine import Engine
from rehearsal.lab.containers.registry import Registry
from tests.images.builds import Remembering, context, named, plan
from tests.processes import alive, wait_until

DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
OCI = "application/vnd.oci.image.manifest.v1+json"


def target_of(plan: Plan, output: Output, **more: bool) -> dict[str, object]:
    found: dict[str, object] = bake_file(plan, "small", output, **more)["target"]["small"]
    return found


def manifest(registry: Registry, name: str, reference: str) -> requests.Response:
    accepted = {"Accept": f"{DOCKER_MANIFEST}, {OCI}"}
    return requests.get(f"{registry.url}/v2/{name}/manifests/{reference}", headers=accepted, timeout=300)


def test_the_image_is_asked_for_in_gzip_and_docker_types_without_attestations() -> None:
    found = target_of(plan("r.example/a:1"), Output.LOAD)
    assert found["output"] == ["type=docker,oci-mediatypes=false,compression=gzip"]
    assert found["attest"] == ["type=provenance,disabled=true"]
    assert found["tags"] == ["r.example/a:1"]


def test_attestations_come_with_the_types_that_hold_them() -> None:
    found = target_of(plan("r.example/a:1", attestations=True), Output.LOAD)
    assert found["output"] == ["type=docker,oci-mediatypes=true,compression=gzip"]
    assert found["attest"] == ["type=provenance,mode=max", "type=sbom"]


def test_by_digest_no_tag_is_written() -> None:
    found = target_of(plan("r.example/a:1"), Output.PUSH_BY_DIGEST)
    assert found["tags"] == []
    by_digest = "type=image,push=true,push-by-digest=true,name-canonical=true,name=r.example/a,store=false"
    assert found["output"] == [f"{by_digest},oci-mediatypes=false,compression=gzip"]


def test_a_check_exports_neither_image_nor_cache() -> None:
    wished = plan("r.example/a:1", cache_to="r.example/a:cache", cache_from=("r.example/a:cache",))
    found = target_of(wished, Output.CHECK)
    assert found["output"] == ["type=cacheonly"]
    assert "cache-to" not in found
    assert found["cache-from"] == ["type=registry,ref=r.example/a:cache"]
    kept = "type=registry,ref=r.example/a:cache,mode=max,image-manifest=true,oci-mediatypes=true,ignore-error=true"
    assert target_of(wished, Output.LOAD)["cache-to"] == [kept]


def test_a_secret_is_named_by_its_file_also_when_that_has_a_comma(tmp_path: Path) -> None:
    found = target_of(plan(secrets={"ca": tmp_path / "a,b"}), Output.CHECK)
    assert found["secret"] == [f'id=ca,"src={tmp_path}/a,b"']


def plugin(folder: Path, says: str) -> dict[str, str]:
    """A docker command that knows nothing but its plugin's version: the rest of it is left out."""
    folder.mkdir()
    (folder / "docker").write_text(f'#!/bin/sh\n[ "$*" = "buildx version" ] && {says}\nexit 1\n')
    (folder / "docker").chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("exec echo github.com/docker/buildx v0.12.1 30feaa1", "allowed: >= 0.13"),
        ("exit 1", "not on PATH"),
    ],
)
def test_a_plugin_that_is_missing_or_too_old_is_one_line_with_the_fix(tmp_path: Path, says: str, expected: str) -> None:
    with pytest.raises(UserError, match=f"{expected}.*; fix:") as caught:
        Bake(plugin(tmp_path / "bin", says)).check(plan("a:1"), Output.LOAD)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("version", ["github.com/docker/buildx 0.13.1+ds1 0.13.1+ds1-3", "x v0.29.1 a", "x 1b5c9e0 a"])
def test_the_version_of_a_plugin_is_read_as_distributions_write_it(tmp_path: Path, version: str) -> None:
    Bake(plugin(tmp_path / "bin", f"exec echo {version}")).check(plan("a:1"), Output.LOAD)


SMALL = """FROM scratch AS small
ARG WORD
LABEL word=$WORD
COPY a /a
"""


@pytest.mark.slow
def test_what_was_pushed_has_the_told_digest_the_types_and_the_arguments_as_they_are(
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
    other = context(tmp_path / "d", SMALL, a="2")
    with pytest.raises(UserError, match="never overwritten") as caught:
        Bake(engine.environment).build(asked, other, "small", Output.PUSH, watch)
    assert caught.value.exit_code == 2
    assert manifest(registry, "team/a", "1").headers["Docker-Content-Digest"] == built.digest


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
    before = sorted(engine.docker("images", "--all", "--quiet", "--no-trunc").stdout.split())
    text = f"FROM scratch AS small\nCOPY a /{time.time_ns()}\n"
    built = Bake(engine.environment).build(
        plan("bake/check:1"), context(tmp_path / "c", text, a="1"), "small", Output.CHECK, Remembering()
    )
    assert not named(built.steps, "COPY a").cached
    assert (built.digest, built.image_id) == (None, None)
    assert sorted(engine.docker("images", "--all", "--quiet", "--no-trunc").stdout.split()) == before


@pytest.mark.slow
def test_a_failed_step_is_named_with_the_end_of_its_log_and_its_secret_is_not(
    tmp_path: Path, engine: Engine, base_image: str
) -> None:
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
def test_a_dockerfile_that_cannot_be_built_is_told_in_buildkits_words(
    tmp_path: Path, engine: Engine, text: str, expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        Bake(engine.environment).build(
            plan("bake/bad:1"), context(tmp_path / "c", text, a="1"), "small", Output.CHECK, Remembering()
        )
    assert expected in caught.value.problems[0]
    assert caught.value.problems[0].startswith("build small: ")


@pytest.mark.slow
def test_what_was_pushed_by_digest_gets_its_tags_afterwards_and_takes_none_away(
    tmp_path: Path, engine: Engine, registry: Registry
) -> None:
    """Only what follows the push: no builder here pushes by digest, so an image with another tag stands in for it."""
    first, second = (
        Bake(engine.environment).build(
            plan(f"{registry.host}/team/t:{tag}"),
            context(tmp_path / tag, SMALL, a=tag),
            "small",
            Output.PUSH,
            Remembering(),
        )
        for tag in ("1", "2")
    )
    new = f"{registry.host}/team/t:new"
    for _ in range(2):
        assert merge.tag(new, str(first.digest)) == first.digest
        assert manifest(registry, "team/t", "new").headers["Docker-Content-Digest"] == first.digest
    with pytest.raises(UserError, match="never overwritten") as caught:
        merge.tag(new, str(second.digest))
    assert caught.value.exit_code == 2
    assert manifest(registry, "team/t", "new").headers["Docker-Content-Digest"] == first.digest


@pytest.mark.slow
def test_the_builder_of_an_engine_says_that_it_does_not_push_by_digest(engine: Engine) -> None:
    bake = Bake(engine.environment)
    with pytest.raises(UserError, match="fix: docker buildx create"):
        bake.check(plan("r.example/a:1"), Output.PUSH_BY_DIGEST)
    bake.check(plan("r.example/a:1"), Output.PUSH)


@pytest.mark.slow
def test_a_wiped_builder_takes_its_steps_from_the_registry(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, registry: Registry, engine: Engine, base_image: str
) -> None:
    name = registry.host
    text = f"""FROM {base_image} AS heavy
RUN head -c 1000 /dev/urandom > /heavy
FROM scratch AS small
COPY --link --from=heavy /heavy /heavy
COPY --link a /a
"""
    asked = plan(f"{name}/team/a:1", cache_to=f"{name}/team/a:cache", cache_from=(f"{name}/team/a:cache",))
    first = Bake(engine.environment).build(
        asked, context(tmp_path / "c", text, a="1"), "small", Output.PUSH, Remembering()
    )
    assert not named(first.steps, "RUN head").cached
    with Engine(tmp_path_factory.mktemp("other")) as other:
        changed = replace(asked, tags=(f"{name}/team/a:2",))
        second = Bake(other.environment).build(
            changed, context(tmp_path / "c", text, a="2"), "small", Output.PUSH, Remembering()
        )
        assert named(second.steps, "RUN head").cached
        layers = [manifest(registry, "team/a", tag).json()["layers"] for tag in ("1", "2")]
        assert layers[0][0] == layers[1][0]
        assert layers[0][1] != layers[1][1]


@pytest.mark.slow
def test_ctrl_c_leaves_no_child_and_the_engine_stops_too(tmp_path: Path, engine: Engine, base_image: str) -> None:
    mark = str(time.time_ns())
    context(tmp_path / "c", f"FROM {base_image} AS small\nRUN echo {mark} && sleep 3600.{mark[-6:]}\n")
    script = f"""
from pathlib import Path
from images.build.bake import Bake
from images.model import Context, Output
from tests.images.builds import plan
class Watch:
    def started(self, name): print(name, flush=True)
    def ended(self, step): pass
    def log(self, name, text): print("LOG", text, flush=True)
    def moved(self, name, done, total): pass
Bake().build(plan("a:1"), Context(Path({str(tmp_path / "c")!r}), {{}}), "small", Output.CHECK, Watch())
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        env=engine.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
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
        try:
            if os.readlink(one / "cwd") == folder:
                found.append(int(one.name))
        except OSError:
            continue
    return found


def sleeping(mark: str) -> bool:
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"sleep\x003600.{mark[-6:]}".encode() in one.read_bytes():
                return True
        except OSError:
            continue
    return False


class OlderStore(Engine):
    """An engine that keeps images as most still do: in its own store, not containerd's."""

    def _furnish(self) -> None:
        super()._furnish()
        path = self.folder / "daemon.json"
        settings = json.loads(path.read_text())
        settings["features"]["containerd-snapshotter"] = False
        path.write_text(json.dumps(settings))


@pytest.mark.slow
def test_an_engine_with_the_older_store_builds_and_pushes_and_says_what_it_cannot(
    tmp_path: Path, registry: Registry, engine: Engine
) -> None:
    with OlderStore(tmp_path / "older") as older:
        assert not engine_module.facts(older.environment).containerd_store
        assert engine_module.facts(engine.environment).containerd_store
        bake = Bake(older.environment)
        asked = plan(f"{registry.host}/team/o:1")
        built = bake.build(asked, context(tmp_path / "c", SMALL, a="1"), "small", Output.PUSH, Remembering())
        answer = manifest(registry, "team/o", "1")
        assert answer.headers["Docker-Content-Digest"] == built.digest
        assert answer.json()["mediaType"] == DOCKER_MANIFEST
        loaded = bake.build(asked, context(tmp_path / "c", SMALL, a="1"), "small", Output.LOAD, Remembering())
        assert loaded.image_id
        with pytest.raises(UserError, match=r"export its cache.*containerd-snapshotter"):
            bake.check(plan("a:1", cache_to="r.example/a:cache"), Output.PUSH)
        bake.check(asked, Output.PUSH)
