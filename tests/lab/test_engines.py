"""An engine of the lab shares nothing with the machine's, and leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rehearsal.lab import network
from rehearsal.lab.containers import base
from rehearsal.lab.containers import engine as engine_module
from rehearsal.lab.containers.engine import Engine, why_not
from rehearsal.lab.containers.registry import Registry
from tests.conftest import require
from tests.processes import alive, children_of, command_line, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def possible() -> None:
    require(why_not() is None, str(why_not()))


def descendants(pid: int) -> set[int]:
    children = children_of(pid)
    return set(children).union(*map(descendants, children))


def rules() -> list[str]:
    asked = [["/usr/sbin/iptables", "-w", "60", "-t", table, "-S"] for table in ("filter", "nat")]
    return "".join(subprocess.run(one, capture_output=True, text=True, check=True).stdout for one in asked).splitlines()


def test_an_engine_ends_with_everything_it_started(tmp_path: Path) -> None:
    others, before = set(children_of(os.getpid())), set(rules())
    with Engine(tmp_path) as engine:
        link, folder = engine.subnet.link, engine.subnet.folder
        started = set[int]().union(*map(descendants, set(children_of(os.getpid())) - others))
        commands = [Path(command_line(pid).split(" ")[0]).name for pid in started]
        assert {"dockerd", "containerd"} <= set(commands)
        assert Path("/sys/class/net", link).exists()
        # Another engine of this machine may come or go meanwhile.
        assert len([line for line in set(rules()) - before if link in line]) == 3
    wait_until(lambda: not any(map(alive, started)))
    assert not Path("/sys/class/net", link).exists()
    assert link not in "".join(rules())
    assert not folder.exists()
    assert str(folder) not in Path("/proc/self/mounts").read_text()


def test_engine_dies_with_its_starter_and_the_next_one_sweeps_up(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from rehearsal.lab.containers.engine import Engine\n"
        "e = Engine(Path(sys.argv[1])).start(); print(e.subnet.link, e.subnet.folder, flush=True); sys.stdin.read()"
    )
    command, pipe = [sys.executable, "-c", script, str(tmp_path)], subprocess.PIPE
    starter = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert starter.stdout is not None
    link, folder = starter.stdout.readline().split()
    started = descendants(starter.pid)
    assert started
    starter.kill()
    starter.communicate()
    wait_until(lambda: not any(map(alive, started)))
    held: list[network.Subnet] = []
    try:
        # Its number is free again, so sooner or later a subnet is that one; another process' lab may be faster than we.
        while Path(folder).exists():
            held.append(network.Subnet())
        assert link not in {one.link for one in held} or not Path("/sys/class/net", link).exists()
    finally:
        for one in held:
            one.release()


def test_its_client_has_buildx_and_finds_nothing_of_the_users(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONTEXT", "elsewhere")
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    assert engine.docker("buildx", "version").stdout
    assert engine.docker("context", "show").stdout.strip() == "default"
    status = engine.docker("info", "--format", "{{.DriverStatus}} {{.DockerRootDir}}").stdout
    assert "io.containerd.snapshotter" in status
    assert str(engine.subnet.folder) in status


def test_a_missing_program_is_told_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"mmdebstrap": None}
    monkeypatch.setattr(engine_module.shutil, "which", lambda name, path=None: found.get(name, f"/bin/{name}"))
    assert "Debian's mmdebstrap; fix" in str(why_not())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in str(why_not())


def test_a_registry_lets_in_whom_it_knows_and_forgets_nothing(engine: Engine, tmp_path: Path) -> None:
    with Registry(tmp_path, users={"ada": "first"}, tls=True, address=engine.address) as registry:
        tag = f"{registry.host}/tiny:1"
        (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
        engine.docker("buildx", "build", "--quiet", "--provenance=false", "-t", tag, tmp_path)
        login = ("login", "--username", "ada", "--password-stdin", registry.host)
        assert "certificate" in engine.docker("push", tag, check=False).stderr
        engine.trust(registry.host, registry.ca)
        assert "no basic auth" in engine.docker("push", tag, check=False).stderr
        engine.docker(*login, input="first")
        engine.docker("push", tag)
        registry.set_users({"ada": "second"})
        assert engine.docker("push", tag, check=False).returncode
        engine.docker(*login, input="second")
        registry.kill()
        registry.start()
        engine.docker("image", "rm", tag)
        engine.docker("pull", tag)
        assert ("PUT", "/v2/tiny/manifests/1", 201) in registry.requests()
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(registry.url, timeout=300)


def test_a_base_is_made_once_and_again_where_it_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []

    def mmdebstrap(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        made.append(time.time())
        with tarfile.open(command[-1], "w"):
            pass
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(base.subprocess, "run", mmdebstrap)
    tar = base.base_tar(tmp_path)
    assert base.base_tar(tmp_path) == tar
    assert len(made) == 1
    tar.write_bytes(tar.read_bytes()[:-1])
    base.base_tar(tmp_path)
    assert len(made) == 2
    old = time.time() - 2 * base.DAY_S
    os.utime(tar, (old, old))
    base.base_tar(tmp_path)
    assert len(made) == 3


def test_a_checkout_has_what_images_are_made_from_and_no_more(tmp_path: Path) -> None:
    folder = base.checkout(tmp_path / "copy")
    assert (folder / "images" / "trainer.Dockerfile").is_file()
    assert (folder / "trainer" / "__init__.py").is_file()
    wheels = [one.name for one in (folder / "images" / "site" / "wheels").iterdir()]
    assert wheels == [next(base.wheels().glob("torch-*")).name]
    assert not list(folder.rglob("__pycache__"))
