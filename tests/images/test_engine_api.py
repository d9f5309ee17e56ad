"""Without a docker command the engine builds the same, and what that way cannot do is said."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import time
from pathlib import Path

import pytest

from images.bake import Bake
from images.engine_api import CA, EngineApi, packed
from images.records import Output
from lustrain.problem import UserError
from rehearsal.lab.engine import Engine
from rehearsal.lab.registry import Registry
from tests.images.builds import Remembering, context, named, plan
from tests.images.test_bake import DOCKER_LAYER, DOCKER_MANIFEST, OlderStore, manifest

TEXT = """FROM {base} AS other
ARG WORD
COPY a /layers/b/a
RUN echo "$WORD" > /layers/b/word && find /layers -exec touch --no-dereference --date=@0 {{}} +
FROM scratch AS small
LABEL fixed=1
ENV PATH=/bin
COPY --link --from=other /layers/b/ /
USER 1000:1000
ENTRYPOINT ["/a"]
"""


@pytest.mark.slow
def test_both_backends_make_the_same_files_and_configuration(tmp_path: Path, engine: Engine, base_image: str) -> None:
    text = TEXT.format(base=base_image)
    made = {}
    for backend in (Bake(engine.environment), EngineApi(engine.environment)):
        asked = plan(
            f"both/{backend.name}:1", arguments={"WORD": "${x} %{y} 'z'"}, labels={"a.b": "c ${d}"}, no_cache=True
        )
        built = backend.build(asked, context(tmp_path / backend.name, text, a="1"), "small", Output.LOAD, Remembering())
        found = json.loads(engine.docker("image", "inspect", asked.tags[0]).stdout)[0]
        assert found["Id"] == built.image_id == built.digest
        made[backend.name] = (found["RootFS"]["Layers"], found["Config"], found["Architecture"])
        assert not named(built.steps, "RUN echo").cached
    assert made["buildx"] == made["sdk"]
    assert made["sdk"][1]["Labels"] == {"fixed": "1", "a.b": "c ${d}"}


@pytest.mark.slow
def test_steps_are_told_as_they_run_and_the_second_time_they_are_cached(
    tmp_path: Path, engine: Engine, base_image: str
) -> None:
    text = f"FROM {base_image} AS small\nRUN echo {time.time_ns()} && sleep 0.3 && echo done\n"
    builds = []
    for name in ("c", "d"):
        watch = Remembering()
        built = EngineApi(engine.environment).build(
            plan("sdk/steps:1"), context(tmp_path / name, text), "small", Output.LOAD, watch
        )
        step = named(built.steps, "RUN echo")
        assert step in watch.steps
        assert step.name in watch.begun
        builds.append((step, [said for of, said in watch.logs if of == step.name], built.seconds))
    (first, log, seconds), (second, none, _) = builds
    assert not first.cached
    assert first.seconds >= 0.3
    assert seconds >= 0.3
    assert "done\n" in "".join(log)
    assert second.cached
    assert none == []


@pytest.mark.slow
def test_a_changed_file_of_the_same_size_and_time_is_seen(tmp_path: Path, engine: Engine) -> None:
    text = f"FROM scratch AS small\nCOPY a /{time.time_ns()}\n"
    ids = []
    for word in ("1", "2", "1"):
        built = EngineApi(engine.environment).build(
            plan("sdk/change:1"), context(tmp_path / "c", text, a=word), "small", Output.LOAD, Remembering()
        )
        ids.append(built.image_id)
    assert ids[0] == ids[2] != ids[1]


@pytest.mark.slow
def test_a_check_leaves_no_image_in_either_store(tmp_path: Path, engine: Engine) -> None:
    with OlderStore(tmp_path / "older") as older:
        for one in (engine, older):
            before = sorted(one.docker("images", "--all", "--quiet", "--no-trunc").stdout.split())
            text = f"FROM scratch AS small\nCOPY a /{time.time_ns()}\n"
            built = EngineApi(one.environment).build(
                plan("sdk/check:1"), context(tmp_path / "c", text, a="1"), "small", Output.CHECK, Remembering()
            )
            assert not named(built.steps, "COPY a").cached
            assert (built.digest, built.image_id) == (None, None)
            assert sorted(one.docker("images", "--all", "--quiet", "--no-trunc").stdout.split()) == before


@pytest.mark.slow
def test_what_was_pushed_has_the_told_digest_and_types(tmp_path: Path, engine: Engine, registry: Registry) -> None:
    asked = plan(f"{registry.host}/team/s:1")
    built = EngineApi(engine.environment).build(
        asked, context(tmp_path / "c", "FROM scratch AS small\nCOPY a /a\n", a="1"), "small", Output.PUSH, Remembering()
    )
    answer = manifest(registry, "team/s", "1")
    assert answer.headers["Docker-Content-Digest"] == built.digest
    assert answer.json()["mediaType"] == DOCKER_MANIFEST
    assert {layer["mediaType"] for layer in answer.json()["layers"]} == {DOCKER_LAYER}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM {base} AS small\nRUN echo first && ls /none\n", ": step [2/2] RUN echo first && ls /none failed after"),
        ("FROM scratch AS small\nNONSENSE\n", "unknown instruction: NONSENSE"),
        ("FROM scratch AS small\nCOPY none /\n", '"/none": not found'),
    ],
)
def test_a_failed_build_is_told_as_buildx_tells_it(
    tmp_path: Path, engine: Engine, base_image: str, text: str, expected: str
) -> None:
    told = []
    for backend in (EngineApi(engine.environment), Bake(engine.environment)):
        with pytest.raises(UserError) as caught:
            backend.build(
                plan("sdk/bad:1"),
                context(tmp_path / backend.name, text.format(base=base_image)),
                "small",
                Output.CHECK,
                Remembering(),
            )
        first, *log = caught.value.problems
        assert first.startswith("build small: ")
        assert expected in first
        told.append(sorted(log))
    assert told[0] == told[1]


@pytest.mark.slow
def test_the_authority_that_a_build_needs_is_there_for_run_and_not_in_the_image(
    tmp_path: Path, engine: Engine, base_image: str
) -> None:
    (tmp_path / "ca.pem").write_text("canary-51d2")
    text = f"""FROM {base_image} AS small
RUN --mount=type=bind,source=images/site,target=/site grep -q canary /site/ca.crt
"""
    asked = plan("sdk/ca:1", secrets={"ca": tmp_path / "ca.pem"})
    api = EngineApi(engine.environment)
    assert api.cannot(asked, Output.LOAD) is None
    staged = context(tmp_path / "c", text)
    built = api.build(asked, staged, "small", Output.LOAD, Remembering())
    assert not named(built.steps, "RUN --mount").error
    saved = tmp_path / "image.tar"
    engine.docker("image", "save", "--output", saved, "sdk/ca:1")
    assert b"canary-51d2" not in saved.read_bytes()
    # Not put into the folder that others may build from.
    assert not (staged.folder / CA).exists()


@pytest.mark.parametrize(
    ("more", "output", "expected"),
    [
        ({"cache_to": "r.example/a:cache"}, Output.PUSH, "export its cache"),
        ({"attestations": True}, Output.PUSH, "attestations"),
        ({}, Output.PUSH_BY_DIGEST, "push by digest"),
    ],
)
def test_what_needs_a_session_is_refused_in_one_line(more: dict[str, object], output: Output, expected: str) -> None:
    said = EngineApi({}).cannot(plan("r.example/a:1", **more), output)
    assert said is not None
    assert expected in said
    assert "fix: install docker-buildx" in said
    assert "\n" not in said


def test_secrets_other_than_the_authority_are_refused(tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("x")
    said = EngineApi({}).cannot(plan("a:1", secrets={"netrc": tmp_path / "netrc"}), Output.LOAD)
    assert said is not None
    assert "secrets" in said


def test_a_context_is_packed_alike_whoever_checked_it_out(tmp_path: Path) -> None:
    sums = []
    for name in ("one", "two"):
        context(tmp_path / name, "FROM scratch\n", a="1", b="2" * 10_000)
        archive = io.BytesIO()
        packed(tmp_path / name, None, archive)
        sums.append(hashlib.sha256(archive.getvalue()).hexdigest())
    assert sums[0] == sums[1]
    with tarfile.open(fileobj=io.BytesIO(archive.getvalue())) as found:
        assert {(one.name, one.uid, one.uname) for one in found} == {(name, 0, "") for name in ("Dockerfile", "a", "b")}
        assert b"pax" not in archive.getvalue()
