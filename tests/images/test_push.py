"""A push ends with the digest that the registry holds, whatever happens on the way, or with one line."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import docker
import pytest
from docker.client import DockerClient

from images.model import Silent, Step
from images.registry.client import Registry
from images.registry.credentials import Credentials, for_registry
from images.registry.push import push
from images.registry.retry import Patience
from lustrain.problem import UserError
from rehearsal.lab import registry as lab
from rehearsal.lab.engine import Engine, why_not
from tests.conftest import require
from tests.images.certificates import certify
from tests.images.scripted import Asked, Said, scripted
from tests.images.seeds import digest_of, put_image

pytestmark = pytest.mark.slow

QUICK = Patience(tries=4, first_s=0.2, longest_s=1)
BIG = 96 << 20


class Classic(Engine):
    """With the image store that engines had before containerd's; most have it still."""

    def _furnish(self) -> None:
        super()._furnish()
        file = self.folder / "daemon.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps(settings | {"features": {"containerd-snapshotter": False}}))


@pytest.fixture(scope="module")
def classic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    require(why_not() is None, str(why_not()))
    with Classic(tmp_path_factory.mktemp("classic")) as running:
        yield running


@pytest.fixture(params=["containerd", "classic"])
def any_engine(request: pytest.FixtureRequest) -> Engine:
    """Tests that take this run with both image stores."""
    found: Engine = request.getfixturevalue("engine" if request.param == "containerd" else "classic")
    return found


@dataclass
class Watched(Silent):
    """Keeps what it is told, and does something the first time that `when` holds."""

    when: Callable[[str, int], bool] = lambda name, done: False
    act: Callable[[], object] = lambda: None
    on_retry: Callable[[], object] = lambda: None
    logs: list[str] = field(default_factory=list)
    moves: list[tuple[str, int, int]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    acted: bool = False
    retried: bool = False

    def moved(self, name: str, done: int, total: int) -> None:
        self.moves.append((name, done, total))
        if not self.acted and self.when(name, done):
            self.acted = True
            self.act()

    def log(self, name: str, text: str) -> None:
        self.logs.append(text)
        if "trying again" in text and not self.retried:
            self.retried = True
            self.on_retry()

    def ended(self, step: Step) -> None:
        self.steps.append(step)


def client_of(engine: Engine) -> DockerClient:
    return docker.DockerClient(base_url=f"unix://{engine.socket}")


def build(engine: Engine, folder: Path, ref: str, *sizes: int) -> str:
    """An image of random layers of these sizes, first to last."""
    folder.mkdir(exist_ok=True)
    lines = ["FROM scratch"]
    for index, size in enumerate(sizes):
        (folder / f"layer-{index}").write_bytes(os.urandom(size))
        lines.append(f"COPY layer-{index} /")
    (folder / "Dockerfile").write_text("\n".join(lines))
    engine.docker("buildx", "build", "--provenance=false", "--load", "-t", ref, folder)
    return ref


def to(registry: lab.Registry, credentials: Credentials | None = None) -> Registry:
    return Registry(registry.host, credentials, registry.ca if registry.tls else None, QUICK)


def uploads(registry: lab.Registry) -> list[str]:
    """What was put into the registry and stayed: digests of blobs, in order."""
    made = [path for method, path, status in registry.requests() if method == "PUT" and status == 201]
    return [path.partition("digest=")[2] for path in made if "digest=" in path]


def line_of(caught: pytest.ExceptionInfo[UserError]) -> str:
    (line,) = caught.value.problems
    assert "\n" not in line
    return line


def test_what_was_pushed_is_in_the_registry_and_what_is_there_is_not_pushed_again(
    any_engine: Engine, registry: lab.Registry, tmp_path: Path
) -> None:
    ref = build(any_engine, tmp_path / "image", f"{registry.host}/team/a:1", 30_000_000, 1000)
    watched = Watched()
    digest = push(ref, client_of(any_engine), watched, to=to(registry))
    assert to(registry).digest_of(ref) == digest
    assert [(step.name, step.cached, step.error) for step in watched.steps] == [(f"push {ref}", False, None)]
    assert any(done == total > 29_000_000 for _, done, total in watched.moves)
    puts = uploads(registry)
    again = Watched()
    assert push(ref, client_of(any_engine), again, to=to(registry)) == digest
    assert uploads(registry) == puts
    assert again.logs == ["already there, nothing pushed"]
    assert again.steps[0].cached


def test_a_tag_is_never_taken_from_another_image(any_engine: Engine, registry: lab.Registry, tmp_path: Path) -> None:
    ref = f"{registry.host}/a:1"
    theirs = put_image(registry, "a", "1")
    build(any_engine, tmp_path / "image", ref, 1000)
    before = uploads(registry)
    with pytest.raises(UserError, match="never overwritten") as caught:
        push(ref, client_of(any_engine), to=to(registry))
    line_of(caught)
    assert caught.value.exit_code == 2
    assert uploads(registry) == before
    assert to(registry).digest_of(ref) == theirs


def test_a_registry_that_dies_under_a_big_layer_gets_only_what_is_missing(
    any_engine: Engine, registry: lab.Registry, tmp_path: Path
) -> None:
    ref = build(any_engine, tmp_path / "image", f"{registry.host}/a:1", 1000, BIG)
    watched = Watched(when=lambda name, done: done > 1 << 20, act=registry.kill, on_retry=registry.start)
    digest = push(ref, client_of(any_engine), watched, to=to(registry))
    assert watched.acted
    assert to(registry).digest_of(ref) == digest
    assert watched.retried
    puts = uploads(registry)
    # The small layer may be stored, and the registry dead before its log says so.
    assert len(puts) == len(set(puts))
    assert len(puts) in (2, 3)


def test_a_registry_that_never_comes_back_is_one_line(engine: Engine, registry: lab.Registry, tmp_path: Path) -> None:
    ref = build(engine, tmp_path / "image", f"{registry.host}/a:1", BIG // 3)
    watched = Watched(when=lambda name, done: done > 1 << 20, act=registry.kill)
    with pytest.raises(UserError, match=r"gave up after 4 tries: .*fix: see that the registry runs") as caught:
        push(ref, client_of(engine), watched, to=to(registry))
    line_of(caught)
    assert watched.acted
    assert watched.steps[0].error == line_of(caught)


def login(folder: Path, host: str, password: str) -> None:
    auth = base64.b64encode(f"ann:{password}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))


def test_a_password_that_changes_mid_push_is_read_again_once(
    any_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with lab.Registry(tmp_path / "registry", users={"ann": "first"}) as registry:
        login(tmp_path, registry.host, "first")
        ref = build(any_engine, tmp_path / "image", f"{registry.host}/a:1", BIG // 3)

        def change() -> None:
            registry.set_users({"ann": "second"})
            login(tmp_path, registry.host, "second")

        watched = Watched(when=lambda name, done: done > 1 << 20, act=change)
        there = to(registry, for_registry(registry.host))
        digest = push(ref, client_of(any_engine), watched, to=there)
        assert watched.acted
        assert [text for text in watched.logs if "fresh credentials" in text]
        assert there.digest_of(ref) == digest
        assert "second" not in str(watched.logs)


def test_a_password_that_is_refused_mid_push_is_one_line(any_engine: Engine, tmp_path: Path) -> None:
    with lab.Registry(tmp_path / "registry", users={"ann": "first-secret"}) as registry:
        ref = build(any_engine, tmp_path / "image", f"{registry.host}/a:1", BIG // 3)
        watched = Watched(when=lambda name, done: done > 1 << 20, act=lambda: registry.set_users({"ann": "second"}))
        with pytest.raises(UserError, match=r"refuses user 'ann'.*docker login") as caught:
            push(ref, client_of(any_engine), watched, to=to(registry, Credentials("ann", "first-secret")))
        assert "first-secret" not in line_of(caught)


@pytest.mark.parametrize(
    ("credentials", "why"),
    [
        (None, "requires credentials, and none for it were found"),
        (Credentials("ann", "wrong"), "does not take the credentials"),
    ],
)
def test_who_may_not_come_in_is_told_before_anything_is_pushed(
    engine: Engine, tmp_path: Path, credentials: Credentials | None, why: str
) -> None:
    with lab.Registry(tmp_path / "registry", users={"ann": "right"}, tls=True) as registry:
        ref = build(engine, tmp_path / "image", f"{registry.host}/a:1", 1000)
        with pytest.raises(UserError, match=why) as caught:
            push(ref, client_of(engine), to=to(registry, credentials))
        assert "docker login" in line_of(caught)
        assert not uploads(registry)


def test_an_engine_that_does_not_trust_the_registry_is_one_line(tmp_path: Path, engine: Engine) -> None:
    address = engine.address
    with lab.Registry(tmp_path / "registry", users={"ann": "right"}, tls=True, address=address) as registry:
        # A name like this, or a port like 57403, is not the refusal that it looks like.
        ref = build(engine, tmp_path / "image", f"{registry.host}/denied/403:1", 1000)
        there = to(registry, Credentials("ann", "right"))
        with pytest.raises(UserError, match="does not trust the registry") as caught:
            push(ref, client_of(engine), to=there)
        assert f"/etc/docker/certs.d/{registry.host}/ca.crt" in line_of(caught)
        engine.trust(registry.host, registry.ca)
        assert push(ref, client_of(engine), to=there) == there.digest_of(ref)


def test_a_registry_that_hands_out_something_else_than_was_pushed_is_found_out(engine: Engine, tmp_path: Path) -> None:
    """The fake has every blob already, and answers with a manifest that has one byte more than the one put there."""
    kept: list[Asked] = []

    def lies(asked: Asked) -> Said:
        if asked.method == "PUT":
            kept.append(asked)
            return Said(201, headers={"Docker-Content-Digest": digest_of(asked.body)})
        if "/blobs/" in asked.path:
            return Said(200)
        kind = {"Content-Type": asked.headers.get("Accept", "").partition(",")[0]}
        return Said(200, kept[0].body + b" ", kind) if kept else Said(404)

    ca = certify(tmp_path / "tls", "127.0.0.1")
    with scripted(lies, greets=True, tls=ca.parent) as fake:
        ref = build(engine, tmp_path / "image", f"{fake.host}/a:1", 1000)
        with pytest.raises(UserError, match="a different digest than the engine pushed") as caught:
            push(ref, client_of(engine), to=Registry(fake.host, None, ca, QUICK))
    line_of(caught)
    assert kept


def test_a_tag_that_someone_else_takes_meanwhile_is_found_out(
    engine: Engine, registry: lab.Registry, tmp_path: Path
) -> None:
    ref = build(engine, tmp_path / "image", f"{registry.host}/a:1", 1000)

    class Late(Registry):
        def manifest(self, ref: object) -> object:  # type: ignore[override]
            put_image(registry, "a", "1")
            return super().manifest(str(ref))

    with pytest.raises(UserError, match="a different digest than the engine pushed"):
        push(ref, client_of(engine), to=Late(registry.host, None, patience=QUICK))


REFUSALS = [
    (404, '{"code": "NAME_UNKNOWN", "message": "repository name not known"}', r"no such repository.*fix: make the", 1),
    (403, '{"code": "DENIED", "message": "requested access is denied"}', r"no credentials were found.*docker login", 1),
    (400, '{"code": "TAG_INVALID", "message": "the tag 1 is immutable"}', r"tag.*fix: commit", 2),
]


def test_what_a_registry_refuses_is_told_with_the_way_out(any_engine: Engine, tmp_path: Path) -> None:
    """No registry here refuses like this. The fake has every blob already where it is about a tag, and none otherwise."""

    def refused(status: int, said: str) -> tuple[str, int]:
        def refuses(asked: Asked) -> Said:
            if asked.method == "HEAD" and "/blobs/" in asked.path and status == 400:
                return Said(200)
            return Said(404) if asked.method in ("GET", "HEAD") else Said(status, f'{{"errors": [{said}]}}'.encode())

        folder = tmp_path / str(status)
        folder.mkdir()
        ca = certify(folder / "tls", "127.0.0.1")
        with scripted(refuses, greets=True, tls=ca.parent) as fake:
            ref = build(any_engine, folder / "image", f"{fake.host}/a:1", 1000)
            with pytest.raises(UserError) as caught:
                push(ref, client_of(any_engine), to=Registry(fake.host, None, ca, QUICK))
        return line_of(caught), caught.value.exit_code

    # Side by side: an engine with the classic store waits 50 s before it gives one up.
    with ThreadPoolExecutor() as pool:
        told = list(pool.map(lambda refusal: refused(*refusal[:2]), REFUSALS))
    for (line, ended), (_, _, why, exit_code) in zip(told, REFUSALS, strict=True):
        assert re.search(why, line)
        assert ended == exit_code


def test_what_cannot_be_pushed_is_told_before_a_registry_is_asked(engine: Engine, registry: lab.Registry) -> None:
    for ref, why in (
        (f"{registry.host}/a", "under a tag"),
        (f"{registry.host}/a@sha256:" + "0" * 64, "under a tag"),
        (f"{registry.host}/never:1", "no such image"),
    ):
        before = registry.requests()
        with pytest.raises(UserError, match=why) as caught:
            push(ref, client_of(engine), to=to(registry))
        assert caught.value.exit_code == 2
        assert registry.requests() == before


def test_no_engine_is_one_line(registry: lab.Registry, tmp_path: Path) -> None:
    nobody = docker.DockerClient(base_url=f"unix://{tmp_path}/no.sock", version="1.44")
    with pytest.raises(UserError, match=r"engine = .*does not answer; fix: start it"):
        push(f"{registry.host}/a:1", nobody, to=to(registry))


def test_an_engine_that_dies_mid_push_is_one_line(registry: lab.Registry, tmp_path: Path) -> None:
    require(why_not() is None, str(why_not()))
    with Engine(tmp_path / "engine") as mortal:
        ref = build(mortal, tmp_path / "image", f"{registry.host}/a:1", BIG // 3)
        watched = Watched(when=lambda name, done: done > 1 << 20, act=mortal.kill)
        with pytest.raises(UserError, match="does not answer") as caught:
            push(ref, client_of(mortal), watched, to=to(registry))
        line_of(caught)
        assert watched.acted


def test_a_full_disk_of_the_registry_is_one_line(engine: Engine, tmp_path: Path) -> None:
    room = tmp_path / "registry" / "blobs"
    room.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(room)], check=True)
    try:
        with lab.Registry(tmp_path / "registry") as registry:
            ref = build(engine, tmp_path / "image", f"{registry.host}/a:1", 8 << 20)
            with pytest.raises(UserError) as caught:
                push(ref, client_of(engine), to=Registry(registry.host, None, patience=Patience(2, 0.1, 0.1)))
            line_of(caught)
    finally:
        subprocess.run(["umount", str(room)], check=True)
