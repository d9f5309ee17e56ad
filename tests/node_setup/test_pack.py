"""The packed agent: the same bytes from the same sources everywhere, small, and running under every Python since 3.9."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lustrain.problem import UserError
from node_setup import pack
from node_setup.agent.settings import catalog, data
from tests.node_setup.agents import VERSIONS, interpreter, run

REPOSITORY = Path(__file__).resolve().parents[2]


def python(version: str) -> str:
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no Python {version} here")
    return found


def test_the_agent_is_small_and_its_digest_is_its_files(agent: Path) -> None:
    packed = agent.read_bytes()
    assert len(packed) < 200_000
    assert pack.pack(agent) == hashlib.sha256(packed).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_packed_bytes_are_reproducible(umask: int, agent: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for room in ("lustrain", "node_setup"):
        shutil.copytree(REPOSITORY / room, clone / room, ignore=shutil.ignore_patterns("__pycache__"))
    for path in clone.rglob("*"):
        os.utime(path, (1_000_000_000, time.time()))
        path.chmod(0o700)
    done = subprocess.run(
        [sys.executable, "-m", "node_setup.pack", str(tmp_path / "agent.pyz")],
        cwd=clone,
        umask=umask,
        env={**os.environ, "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (tmp_path / "agent.pyz").read_bytes() == agent.read_bytes()
    assert (tmp_path / "agent.pyz").stat().st_mode & 0o777 == 0o644
    assert done.stdout.split() == [hashlib.sha256(agent.read_bytes()).hexdigest(), str(tmp_path / "agent.pyz")]


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_another_python_packs_the_same_bytes(version: str, agent: Path, tmp_path: Path) -> None:
    command = [python(version), "-m", "node_setup.pack", str(tmp_path / "agent.pyz")]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    assert (tmp_path / "agent.pyz").read_bytes() == agent.read_bytes()


def test_a_change_of_a_source_changes_the_digest(agent: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = pack.content()
    content["node_setup/agent/owned.py"] += b"# another\n"
    monkeypatch.setattr(pack, "content", lambda: content)
    assert pack.pack(tmp_path / "agent.pyz") != hashlib.sha256(agent.read_bytes()).hexdigest()


def test_docstrings_are_left_out_and_lines_keep_their_numbers() -> None:
    text = 'X = """a\n"""\n\n\ndef f():\n    {}\n    return X\n'
    source = ('"""Of two\nlines."""\n' + text.format('"""One."""')).encode()
    assert pack.without_docstrings(source) == ('""\n\n' + text.format('""')).encode()


def test_pack_holds_agent_and_settings_only(agent: Path) -> None:
    with zipfile.ZipFile(agent) as file:
        names = file.namelist()
        tables = json.loads(file.read("node_setup/settings.json"))
    assert names == sorted(names)
    assert "__main__.py" in names
    assert all(
        name in ("__main__.py", "node_setup/__init__.py", "node_setup/settings.json", *pack.GROUND)
        or name.startswith("node_setup/agent/")
        for name in names
    )
    assert catalog.parse(tables) == catalog.load()


def test_broken_settings_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "tables", lambda: {"bad": {"setting": [{"id": "x"}]}})
    with pytest.raises(UserError, match=r"bad\.toml"):
        pack.content()


def test_an_agent_that_has_grown_too_large_is_not_packed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pack, "LARGEST", 1000)
    with pytest.raises(UserError, match="allowed: 1000"):
        pack.pack(tmp_path / "agent.pyz")
    assert not (tmp_path / "agent.pyz").exists()


def test_what_is_in_place_is_not_written_again(agent: Path) -> None:
    before = agent.stat().st_mtime_ns
    pack.pack(agent)
    assert agent.stat().st_mtime_ns == before


def test_every_packed_source_is_python_3_9() -> None:
    for name, source in pack.content().items():
        if name.endswith(".py"):
            ast.parse(source, name, feature_version=(3, 9))


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_facts_plan_and_verify_run_under_every_python(version: str, agent: Path, tmp_path: Path) -> None:
    def said(*arguments: str, stdin: str = "") -> tuple[int, Any]:
        done = run(agent, *arguments, stdin=stdin, python=python(version))
        return done.returncode, json.loads(done.stdout)

    _, told = said("version")
    assert told["agent"] == hashlib.sha256(agent.read_bytes()).hexdigest()
    assert told["python"].startswith(f"{version}.")
    status, facts = said("facts")
    assert (status, facts["agent"]["sha256"]) == (0, told["agent"])
    status, plan = said("plan", "--request", "-", stdin='{"profile": "cpu", "only": ["sysctl.*"]}')
    assert (status in (0, 2), bool(plan["rows"])) == (True, True)
    assert (plan["profile"], plan["errors"], plan["python"]) == ("cpu", [], told["python"])
    status, verified = said("verify", "--tier", "facts")
    assert (status in (0, 2), bool(verified["results"])) == (True, True)
    status, written = said("metrics", "--textfile", str(tmp_path))
    assert (status, Path(written["textfile"]).exists()) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_plan_loads_and_runs_every_kind_under_every_python(version: str, agent: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import pkgutil, importlib, node_setup.agent\n"
        "names = [one.name for one in pkgutil.walk_packages(node_setup.agent.__path__, 'node_setup.agent.')]\n"
        "print(len([importlib.import_module(name) for name in names if not name.endswith('__main__')]))"
    )
    done = subprocess.run(
        [python(version), "-I", "-S", "-W", "error", "-c", code, str(agent)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(agent) as file:
        modules = [name for name in file.namelist() if name.startswith("node_setup/agent/") and name.endswith(".py")]
    assert int(done.stdout) == len(modules) - 1


@pytest.mark.parametrize("version", ["3.6", "3.8"])
def test_an_older_python_is_told_so_in_one_line(version: str, agent: Path) -> None:
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no Python {version} here")
    done = subprocess.run([found, str(agent), "plan"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"lustrain-agent: needs Python 3.9 or later, this is {version}.")
    assert done.stderr.count("\n") == 1
