"""A push ends with the digest that the registry holds, whatever happens on the way, or with one line."""

from __future__ import annotations

import base64
import json
import re
import secrets
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from images.build import builder
from images.build.bake import Bake
from images.build.engine import facts
from images.model import Built, Output, Step
from images.registry import tags
from images.registry.client import connect
from lustrain.problem import UserError
from rehearsal.lab.containers import registry as lab
from rehearsal.lab.containers.engine import Engine, why_not
from tests.conftest import require
from tests.images.builds import Silent, context, plan
from tests.images.certificates import certify
from tests.images.scripted import Asked, Said, scripted
from tests.images.seeds import put_image
from tests.processes import wait_until

pytestmark = pytest.mark.slow

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
    chosen: Engine = request.getfixturevalue("engine" if request.param == "containerd" else "classic")
    return chosen


def test_an_engine_with_the_older_store_says_what_it_cannot(classic: Engine, engine: Engine, tmp_path: Path) -> None:
    assert (facts(classic.environment).containerd_store, facts(engine.environment).containerd_store) == (False, True)
    bake = Bake(classic.environment)
    bake.check(plan("a:1"))
    with pytest.raises(UserError, match=r"export its cache.*containerd-snapshotter"):
        bake.check(plan("a:1", cache_to="r.example/a:cache"))
    made = context(tmp_path / "c", "FROM scratch AS small\nCOPY a /a\n", a="1")
    assert bake.build(plan("older:1"), made, "small", Output.LOAD, Silent()).image_id


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "pause_s", lambda *_: 0.2)


@dataclass
class Watched(Silent):
    """Keeps steps; calls `act` once a layer is on its way to `registry`, and `on_retry` before a second try."""

    registry: lab.Registry | None = None
    act: Callable[[], object] = lambda: None
    on_retry: Callable[[], object] = lambda: None
    steps: list[Step] = field(default_factory=list)
    acted: threading.Event = field(default_factory=threading.Event)

    def started(self, name: str) -> None:
        if self.registry and name.startswith("pushing") and not self.acted.is_set():
            threading.Thread(target=self._act_mid_push, args=(self.registry,)).start()

    def _act_mid_push(self, registry: lab.Registry) -> None:
        wait_until(lambda: any(method == "POST" for method, _, _ in registry.requests()))
        self.acted.set()
        self.act()

    def ended(self, step: Step) -> None:
        self.steps.append(step)
        if "pushing again" in step.name:
            self.on_retry()


def push(engine: Engine, folder: Path, ref: str, *sizes: int, watch: Watched | None = None, **more: str) -> Built:
    """Build an image of random layers of these sizes, the same for the same folder, and push it."""
    text = "\n".join(["FROM scratch AS small", *(f"COPY layer-{index} /" for index in range(len(sizes)))])
    new = not folder.exists()
    made, bake = context(folder, text), Bake({**engine.environment, **more})
    for index, size in enumerate(sizes if new else ()):
        (folder / f"layer-{index}").write_bytes(secrets.token_bytes(size))
    return builder.build(plan(ref), made, bake, output=Output.PUSH, verify=False, watch=watch or Watched())


def refusal(*pushed: Any, **more: Any) -> tuple[str, int]:
    """The line of a push that fails, and its exit code."""
    with pytest.raises(UserError) as caught:
        push(*pushed, **more)
    line = caught.value.problems[0]
    assert "\n" not in line
    return line, caught.value.exit_code


def uploads(registry: lab.Registry) -> list[str]:
    """What was put into the registry and stayed: digests of blobs, in order."""
    made = [path for method, path, status in registry.requests() if method == "PUT" and status == 201]
    return [path.partition("digest=")[2] for path in made if "digest=" in path]


def test_what_was_pushed_is_in_registry_and_is_not_pushed_again(
    any_engine: Engine, registry: lab.Registry, tmp_path: Path
) -> None:
    ref = f"{registry.host}/team/a:1"
    digest = push(any_engine, tmp_path / "image", ref, 3_000_000, 1000).digest
    assert connect(ref).digest_of(ref) == digest
    puts = uploads(registry)
    assert len(puts) == 3
    assert push(any_engine, tmp_path / "image", ref, 3_000_000, 1000).digest == digest
    assert uploads(registry) == puts


def test_a_tag_is_never_taken_from_another_image(any_engine: Engine, registry: lab.Registry, tmp_path: Path) -> None:
    ref = f"{registry.host}/a:1"
    theirs = put_image(registry, "a", "1")
    before = uploads(registry)
    line, code = refusal(any_engine, tmp_path / "image", ref, 1000)
    assert ("never overwritten" in line, code) == (True, 2)
    assert uploads(registry) == before
    assert connect(ref).digest_of(ref) == theirs


def test_a_tag_that_someone_else_takes_meanwhile_is_found_out(
    engine: Engine, registry: lab.Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirm = tags.confirm

    def late(tag: str, digest: str) -> str:
        put_image(registry, "a", "1")
        return confirm(tag, digest)

    monkeypatch.setattr(tags, "confirm", late)
    line, _ = refusal(engine, tmp_path / "image", f"{registry.host}/a:1", 1000)
    assert "already names a different image" in line


def test_registry_that_dies_under_a_big_layer_gets_only_the_rest(
    any_engine: Engine, registry: lab.Registry, tmp_path: Path
) -> None:
    ref = f"{registry.host}/a:1"

    finished = threading.Event()

    def blink() -> None:
        registry.kill()
        if isinstance(any_engine, Classic):
            # This engine tries again by itself, for 50 s. The registry ends with the thread that started it.
            registry.start()
            finished.wait(600)

    watched = Watched(registry, blink, (lambda: None) if isinstance(any_engine, Classic) else registry.start)
    digest = push(any_engine, tmp_path / "image", ref, 1000, BIG, watch=watched).digest
    assert watched.acted.is_set()
    assert connect(ref).digest_of(ref) == digest
    puts = uploads(registry)
    assert len(puts) == len(set(puts)) == 3
    finished.set()


def test_a_registry_that_never_comes_back_is_one_line(engine: Engine, registry: lab.Registry, tmp_path: Path) -> None:
    watched = Watched(registry, registry.kill)
    line, _ = refusal(engine, tmp_path / "image", f"{registry.host}/a:1", BIG, watch=watched)
    assert re.match(r"registry = .*Connection refused; fix: ", line)
    assert watched.acted.is_set()
    assert [step for step in watched.steps if "pushing again" in step.name]


def login(folder: Path, host: str, password: str) -> None:
    auth = base64.b64encode(f"ann:{password}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))


def test_refused_credentials_are_one_line_without_password(
    any_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with lab.Registry(tmp_path / "registry", users={"ann": "right"}) as registry:
        wanted = (any_engine, tmp_path / "image", f"{registry.host}/a:1", 1000)
        login(tmp_path, registry.host, "wrong-secret")
        line, _ = refusal(*wanted, DOCKER_CONFIG=str(tmp_path))
        assert "refuses the credentials of user 'ann'" in line
        assert "wrong-secret" not in line
        assert not uploads(registry)
        login(tmp_path, registry.host, "right")
        digest = push(*wanted, DOCKER_CONFIG=str(tmp_path)).digest
        assert connect(wanted[2]).digest_of(wanted[2]) == digest


def test_an_engine_that_does_not_trust_the_registry_is_one_line(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab.Registry(tmp_path / "registry", tls=True, address=engine.address) as registry:
        monkeypatch.setenv("SSL_CERT_FILE", str(registry.ca))
        # A name like this, or a port like 57403, is not the refusal that it looks like.
        ref = f"{registry.host}/denied/403:1"
        line, _ = refusal(engine, tmp_path / "image", ref, 1000)
        assert re.match("push = .*certificate is not signed by a known CA", line)
        assert f"/etc/docker/certs.d/{registry.host}/ca.crt" in line
        engine.trust(registry.host, registry.ca)
        assert push(engine, tmp_path / "image", ref, 1000).digest == connect(ref).digest_of(ref)


REFUSALS = [
    (404, {"code": "NAME_UNKNOWN", "message": "repository name not known"}, "no such repository", 1),
    (403, {"code": "DENIED", "message": "requested access is denied"}, "refuses the credentials", 1),
    (400, {"code": "TAG_INVALID", "message": "the tag 1 is immutable"}, "keeps the tag", 2),
]


def test_what_a_registry_refuses_is_told_with_the_way_out(
    any_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No registry here refuses like this. The fake has every blob already where it is about a tag, and none otherwise."""
    ca = certify(tmp_path / "tls", "127.0.0.1")
    monkeypatch.setenv("SSL_CERT_FILE", str(ca))

    def refused(status: int, answer: dict[str, str]) -> tuple[str, int]:
        def refuses(asked: Asked) -> Said:
            if asked.method == "HEAD" and "/blobs/" in asked.path and status == 400:
                return Said(200)
            wrong = json.dumps({"errors": [answer]}).encode()
            return Said(404) if asked.method in ("GET", "HEAD") else Said(status, wrong)

        with scripted(refuses, greets=True, tls=ca.parent) as fake:
            return refusal(any_engine, tmp_path / str(status), f"{fake.host}/a:1", 1000)

    # Side by side: an engine with the classic store waits 50 s before it gives one up.
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda case: refused(*case[:2]), REFUSALS))
    for (line, code), (_, _, why, wanted) in zip(answers, REFUSALS, strict=True):
        assert (why in line, code) == (True, wanted)


def test_an_engine_that_dies_mid_push_is_one_line(registry: lab.Registry, tmp_path: Path) -> None:
    with Engine(tmp_path / "engine") as mortal:
        watched = Watched(registry, mortal.kill)
        line, _ = refusal(mortal, tmp_path / "image", f"{registry.host}/a:1", BIG, watch=watched)
        assert line.startswith("no engine answers: ")
        assert watched.acted.is_set()


def test_a_full_disk_of_the_registry_is_one_line(engine: Engine, tmp_path: Path) -> None:
    room = tmp_path / "registry" / "blobs"
    room.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(room)], check=True)
    try:
        with lab.Registry(tmp_path / "registry") as registry:
            refusal(engine, tmp_path / "image", f"{registry.host}/a:1", 8 << 20)
    finally:
        subprocess.run(["umount", str(room)], check=True)
