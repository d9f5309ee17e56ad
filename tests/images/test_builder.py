"""One function builds: what stands in the way is one line, and nothing leaves unchecked."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from images.build import engine as engine_module
from images.build.bake import Bake
from images.build.builder import build, connect, no_room
from images.build.progress import Live
from images.model import Built, Context, Output, Plan, Step, Watch
from lustrain.problem import FAILED, UserError
from rehearsal.lab.containers.base import base_tar
from rehearsal.lab.containers.engine import Engine
from tests.conftest import require
from tests.images.builds import Remembering, context, named, plan

BASE = "base/bookworm:minbase"


class OldEngine(HTTPServer):
    """Answers /version, /info and /_ping on a unix socket as an engine would; it cannot do anything else."""

    address_family = socket.AF_UNIX

    def __init__(self, path: Path, version: dict[str, Any], info: dict[str, Any], headers: dict[str, str]) -> None:
        told = {"/version": version, "/info": info}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = next((json.dumps(one) for name, one in told.items() if self.path.endswith(name)), "OK").encode()
                self.send_response(200)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def address_string(self) -> str:
                return "unix"

            def log_message(self, format: str, *args: Any) -> None: ...

        super().__init__(str(path), Handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)


@contextmanager
def old_engine(path: Path, number: str, headers: dict[str, str], **version: Any) -> Iterator[dict[str, str]]:
    found = {"Version": number, "ApiVersion": "1.41", "MinAPIVersion": "1.12", **version}
    with OldEngine(path, found, {"OSType": "linux"}, headers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield {"DOCKER_HOST": f"unix://{path}", "PATH": os.environ["PATH"]}
        finally:
            server.shutdown()
            thread.join()


def refused(environment: dict[str, str]) -> tuple[str, int]:
    with pytest.raises(UserError) as caught:
        connect(environment)
    (line,) = caught.value.problems
    assert "\n" not in line
    return line, caught.value.exit_code


@pytest.mark.parametrize(
    ("number", "headers", "more", "expected"),
    [
        ("20.10.24", {"Builder-Version": "2"}, {}, "COPY --link; allowed: >= 23.0; fix: install a newer"),
        ("5.4.0", {}, {"Components": [{"Name": "Podman Engine"}]}, "is Podman 5.4.0"),
    ],
)
def test_an_engine_that_cannot_build_this_is_one_line(
    tmp_path: Path, number: str, headers: dict[str, str], more: dict[str, Any], expected: str
) -> None:
    with old_engine(tmp_path / "s", number, headers, **more) as environment:
        line, code = refused(environment)
        assert expected in line
        assert code == 1


def test_an_engine_with_buildkit_is_taken(tmp_path: Path) -> None:
    with old_engine(tmp_path / "s", "29.0.1", {"Builder-Version": "2"}) as environment:
        assert engine_module.facts(environment).version == "29.0.1"
        connect(environment)


def test_an_engine_that_does_not_answer_is_one_line_with_its_address(tmp_path: Path) -> None:
    for host in (f"unix://{tmp_path}/none.sock", "nonsense/x", "tcp://127.0.0.1:1"):
        line, code = refused({"DOCKER_HOST": host, "PATH": os.environ["PATH"]})
        assert line.startswith("no engine answers: ")
        assert host.partition("/x")[0] in line
        assert "fix: install Docker Engine and start it" in line
        assert code == 1


def test_a_socket_that_is_not_ours_to_use_names_the_group(tmp_path: Path) -> None:
    require(os.geteuid() == 0 and shutil.which("setpriv"), "root, to become somebody else")
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        path.chmod(0o660)
        for folder in (tmp_path, *tmp_path.parents):
            if folder.stat().st_uid == 0 and folder.is_relative_to("/tmp/pytest-of-root"):
                folder.chmod(0o711)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            try:
                connect({"DOCKER_HOST": f"unix://{path}"})
                said = "it came in"
            except UserError as error:
                said = str(error)
            os.write(write, said.encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as told:
            said = told.read()
        os.waitpid(child, 0)
    assert "no permission to use the engine's socket; fix: sudo usermod -aG docker" in said


def test_without_the_docker_command_there_is_one_line(tmp_path: Path) -> None:
    line, _ = refused({"PATH": str(tmp_path)})
    assert "not on PATH; fix: install docker-buildx" in line


class Noting(Bake):
    """Builds nothing: it notes what it is asked."""

    def __init__(self) -> None:
        super().__init__({})
        self.asked: list[tuple[str, Output, bool]] = []

    def cannot(self, plan: Plan, output: Output) -> str | None:
        return "no; fix: do not" if plan.attestations else None

    def build(self, plan: Plan, context: Context, target: str, output: Output, watch: Watch) -> Built:
        self.asked.append((target, output, plan.no_cache))
        cached = output is not Output.CHECK
        own = (
            Step("[x-verify 1/1] RUN verify", 1.0, False)
            if output is Output.CHECK
            else Step("exporting to image", 2.0, False)
        )
        return Built(
            (Step("[x 1/1] RUN a", 0.0 if cached else 3.0, cached), own), 2.0, None if not cached else "sha256:1"
        )


def test_the_check_goes_first_and_nothing_is_made_twice(tmp_path: Path, engine: Engine) -> None:
    noting, env = Noting(), engine.environment
    staged = Context(tmp_path, {})
    built = build(plan("a:1", no_cache=True), staged, noting, output=Output.PUSH, watch=Remembering(), environment=env)
    assert noting.asked == [("small-verify", Output.CHECK, True), ("small", Output.PUSH, False)]
    assert [(step.name, step.cached) for step in built.steps] == [
        ("[x 1/1] RUN a", False),
        ("[x-verify 1/1] RUN verify", False),
        ("exporting to image", False),
    ]
    assert (built.seconds, built.digest) == (4.0, "sha256:1")
    noting.asked.clear()
    build(plan("a:1"), staged, noting, output=Output.LOAD, verify=False, watch=Remembering(), environment=env)
    assert noting.asked == [("small", Output.LOAD, False)]


class Losing(Noting):
    """An engine that loses a snapshot some times before it succeeds, in the words of Docker 26."""

    lost = 'step exporting to image failed: failed to prepare extraction snapshot "x": parent snapshot y does not exist'

    def __init__(self, times: int, why: str = lost) -> None:
        super().__init__()
        self.times, self.why = times, why

    def build(self, plan: Plan, context: Context, target: str, output: Output, watch: Watch) -> Built:
        built = super().build(plan, context, target, output, watch)
        self.times -= 1
        if self.times >= 0:
            raise UserError(f"build {target}: {self.why}", FAILED)
        return built


def test_a_snapshot_that_the_engine_lost_is_no_reason_to_fail(tmp_path: Path, engine: Engine) -> None:
    def made(losing: Losing) -> tuple[Built, str]:
        staged, said, env = Context(tmp_path, {}), io.StringIO(), engine.environment
        with Live("x", stream=said) as watch:
            wanted = plan("a:1", no_cache=True)
            built = build(wanted, staged, losing, output=Output.LOAD, verify=False, watch=watch, environment=env)
        return built, said.getvalue()

    losing = Losing(2)
    built, said = made(losing)
    # Each try is told, and runs every step again where that was asked for.
    assert losing.asked == [("small", Output.LOAD, True)] * 3
    assert said.count("lost a snapshot that it was unpacking on; building again") == 2
    assert [step.name for step in built.steps if step.error] == []
    for final in (Losing(3), Losing(1, "no space left on device")):
        with pytest.raises(UserError):
            made(final)
    assert len(final.asked) == 1


def test_what_the_tries_before_did_is_in_the_answer(tmp_path: Path, engine: Engine) -> None:
    class Cached(Losing):
        """Its second try finds what the first one made."""

        def build(self, plan: Plan, context: Context, target: str, output: Output, watch: Watch) -> Built:
            first = self.times > 0
            watch.ended(Step("[x 1/1] RUN a", 3.0 * first, not first))
            return super().build(plan, context, target, output, watch)

    staged, env = Context(tmp_path, {}), engine.environment
    built = build(
        plan("a:1"), staged, Cached(1), output=Output.LOAD, verify=False, watch=Remembering(), environment=env
    )
    assert [(step.name, step.cached) for step in built.steps] == [
        ("[x 1/1] RUN a", False),
        ("exporting to image", False),
    ]


def test_what_buildx_cannot_do_is_refused_before_anything_is_built(tmp_path: Path, engine: Engine) -> None:
    noting = Noting()
    with pytest.raises(UserError) as caught:
        build(plan("a:1", attestations=True), Context(tmp_path, {}), noting, output=Output.PUSH, watch=Remembering())
    assert caught.value.problems == ["no; fix: do not"]
    assert caught.value.exit_code == 2
    assert noting.asked == []


@pytest.mark.slow
def test_an_image_whose_check_fails_does_not_leave(tmp_path: Path, engine: Engine, base_image: str) -> None:
    tag = "verified/buildx:1"
    text = f"""FROM {base_image} AS small
COPY a /a
FROM small AS small-verify
RUN grep -q good /a || {{ echo "a is not good"; exit 1; }}
"""
    one = Bake(engine.environment)
    with pytest.raises(UserError, match="a is not good"):
        build(
            plan(tag),
            context(tmp_path / "c", text, a="bad"),
            one,
            output=Output.LOAD,
            watch=Remembering(),
            environment=engine.environment,
        )
    assert engine.docker("image", "inspect", tag, check=False).returncode != 0
    built = build(
        plan(tag),
        context(tmp_path / "d", text, a="good"),
        one,
        output=Output.LOAD,
        watch=Remembering(),
        environment=engine.environment,
    )
    assert engine.docker("image", "inspect", "--format", "{{.Id}}", tag).stdout.strip() == built.image_id
    assert not named(built.steps, "grep -q").cached
    layers = json.loads(engine.docker("image", "inspect", tag).stdout)[0]["RootFS"]["Layers"]
    assert len(layers) == 2


def test_a_full_disk_is_told_before_the_build_and_a_cache_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = engine_module.Engine("unix:///x", "29.0", True, tmp_path)
    gib = 1 << 30
    monkeypatch.setattr(engine_module.Engine, "free_bytes", lambda self: 2 * gib)
    monkeypatch.setattr(engine_module, "cached_bytes", lambda environment=None: 0)
    said = no_room("cuda", found)
    assert said is not None
    assert "2.0 GiB free, and building cuda takes about" in said
    assert no_room("unbudgeted", found) is None
    monkeypatch.setattr(engine_module, "cached_bytes", lambda environment=None: 16 * gib)
    assert no_room("cuda", found) is None
    monkeypatch.setattr(engine_module.Engine, "free_bytes", lambda self: gib // 2)
    assert no_room("cuda", found) is not None
    monkeypatch.setattr(engine_module.Engine, "free_bytes", lambda self: None)
    assert no_room("cuda", found) is None


@pytest.mark.slow
def test_free_space_is_that_of_the_engines_own_disk(engine: Engine) -> None:
    found = engine_module.facts(engine.environment)
    assert found.local
    assert found.root.is_relative_to(engine.subnet.folder)
    free = found.free_bytes()
    assert free is not None
    assert abs(free - shutil.disk_usage(found.root).free) < 1 << 30
    assert engine_module.cached_bytes(engine.environment) >= 0


def test_a_remote_engine_is_no_place_to_look_for_space_or_to_serve_a_context() -> None:
    for host, local in (
        ("unix:///run/docker.sock", True),
        ("tcp://127.0.0.1:2375", True),
        ("tcp://localhost:2375", True),
        ("tcp://10.0.0.1:2375", False),
        ("tcp://127.0.0.1.example.com:2375", False),
        ("ssh://user@host", False),
    ):
        found = engine_module.Engine(host, "29", True, Path("/"))
        assert found.local is local
        assert (found.free_bytes() is None) is not local


@pytest.mark.slow
def test_a_disk_that_fills_during_the_build_is_told_as_such(tmp_path: Path, engine: Engine, base_image: str) -> None:
    """Its data lies on a file system of 600 MB, which is full for real."""
    with SmallEngine(tmp_path / "engine") as small:
        small.docker("import", base_tar(), BASE)
        text = f"FROM {BASE} AS small\nRUN head -c 1G /dev/zero > /large\n"
        with pytest.raises(UserError) as caught:
            Bake(small.environment).build(
                plan("full:1"), context(tmp_path / "c", text), "small", Output.CHECK, Remembering()
            )
        assert "build small: the engine's disk is full in [2/2] RUN head -c 1G" in caught.value.problems[0]
        assert "fix: free space there" in caught.value.problems[0]
        said = no_room("cpu", engine_module.facts(small.environment), small.environment)
        assert said is not None
        assert "GiB free" in said


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
