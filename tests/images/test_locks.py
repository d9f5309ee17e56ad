"""What goes into an image is pinned, hashed, and what the tests ran with; a stale lock is told without asking the network."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images.plan import lock, versions
from lustrain.problem import UserError

ROOT = Path(__file__).parents[2]
TORCH_CPU_WHEEL = "sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
"""Of torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl, as the lock files of several public projects have it."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of everything that the locks are made from, and of them."""
    for part in ("pyproject.toml", ".ci/constraints.txt", "images/versions.toml"):
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / part, tmp_path / part)
    shutil.copytree(ROOT / lock.FOLDER, tmp_path / lock.FOLDER)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def about(root: Path) -> list[str]:
    """What each problem of the locks is about."""
    lines = lock.check(root, versions.load(root / "images/versions.toml"))
    assert not [line for line in lines if "\n" in line]
    return [line.removeprefix("images/locks/").partition(" is stale")[0].partition(": ")[0] for line in lines]


def test_no_lock_is_stale_and_every_package_has_hashes() -> None:
    assert lock.check(ROOT) == []
    for found in (lock.read(name, ROOT) for name in lock.NAMES):
        assert 0 < len(found.versions) <= found.text.count("--hash=sha256:")


def test_the_cpu_build_of_torch_is_the_one_that_others_have() -> None:
    _, _, torch = lock.read("torch-cpu", ROOT).text.partition("\ntorch==")
    assert TORCH_CPU_WHEEL in torch.partition("==")[0]


def test_locks_have_the_versions_of_the_one_place_and_one_nccl() -> None:
    known = versions.load()
    app, cpu, cuda, tools = (lock.read(name, ROOT).versions for name in ("app", *lock.TORCH, "tools"))
    assert (cpu["torch"], cuda["torch"], tools) == (f"{known.torch}+cpu", known.torch, {"uv": known.uv})
    assert {name: version for name, version in cuda.items() if "nccl" in name} == {"nvidia-nccl-cu13": known.nccl}
    assert cuda["nvidia-cuda-runtime"].startswith(f"{known.cuda}.")
    assert not [name for name in (*app, *cpu) if "nvidia" in name]


def test_the_trainer_finds_all_its_packages_and_none_twice() -> None:
    app, cpu, cuda = (set(lock.read(name, ROOT).versions) for name in ("app", *lock.TORCH))
    assert not app & cpu & cuda
    needed = {"boto3", "numpy", "pydantic", "torch", "typing-extensions", "filelock", "fsspec"}
    assert needed <= app | cpu
    assert needed <= app | cuda


STALE = [
    ("pyproject.toml", '"tomli-w>=1.1",', '"tomli-w>=1.2", "orjson>=3",', ["app.lock"]),
    ("images/versions.toml", 'torch = "2.13.0"', 'torch = "2.14.0"', ["torch-cpu.lock", "torch-cuda.lock"]),
    ("images/versions.toml", 'python = "3.11"', 'python = "3.13"', [f"{name}.lock" for name in lock.NAMES]),
    ("images/versions.toml", 'nccl = "2.29.7"', 'nccl = "2.30.7"', ["versions.toml nccl = '2.30.7'"]),
    ("images/versions.toml", 'cuda = "13.0"', 'cuda = "13.2"', ["versions.toml cuda = '13.2'"]),
    ("images/versions.toml", 'nccl = "2.29.7"', 'nccl = "2.29"', []),
]


@pytest.mark.parametrize(("file", "old", "new", "stale"), STALE)
def test_change_of_a_locks_source_makes_that_lock_stale(
    checkout: Path, file: str, old: str, new: str, stale: list[str]
) -> None:
    edit(checkout / file, old, new)
    assert about(checkout) == stale


def test_the_reason_for_a_stale_lock_is_told(checkout: Path) -> None:
    edit(checkout / "pyproject.toml", '"tomli-w>=1.1",', '"tomli-w>=1.2", "orjson>=3",')
    (line,) = lock.check(checkout)
    assert "made from tomli-w>=1.1, now configured: orjson>=3, tomli-w>=1.2; fix: fab image-lock" in line


@pytest.mark.parametrize(
    ("pin", "other", "locks"),
    [("boto3==", "boto3==99.", ["app"]), ("typing_extensions==", "Typing.Extensions==99.", lock.TORCH)],
)
def test_version_the_tests_do_not_run_with_is_named_in_the_index(
    checkout: Path, pin: str, other: str, locks: list[str]
) -> None:
    edit(checkout / ".ci/constraints.txt", f"\n{pin}", f"\n{other}")
    assert [head.partition(".lock ")[0] for head in about(checkout)] == list(locks)


def test_a_package_that_would_be_shipped_twice_or_hidden_is_told(checkout: Path) -> None:
    path = checkout / lock.FOLDER / "app.lock"
    brought = lock.read("torch-cpu", ROOT).versions["fsspec"]
    pins = f"fsspec=={brought} --hash={TORCH_CPU_WHEEL}\nfilelock==1.0 --hash={TORCH_CPU_WHEEL}\n"
    path.write_text(path.read_text() + pins, encoding="utf-8")
    assert about(checkout)[-2:] == [f"app.lock fsspec = '{brought}'", "app.lock filelock = '1.0'"]
    twice, hidden = lock.check(checkout)[-2:]
    assert ("shipped twice" in twice, "hide the other" in hidden) == (True, True)


def test_a_missing_lock_is_told(checkout: Path) -> None:
    (checkout / lock.FOLDER / "tools.lock").unlink()
    assert about(checkout) == ["tools.lock"]


ZEROS = "--hash=sha256:" + "0" * 64


NOT_PINNED = (
    *(f"numpy>=2 {ZEROS}", f"numpy {ZEROS}", f"numpy==2.* {ZEROS}", f"numpy @ https://a/numpy.whl {ZEROS}"),
    *("numpy==2.4.6", "numpy==2.4.6 --hash=md5:00", "numpy==2.4.6 --hash=sha256:00", "-e .", "--index-url https://a"),
)


def test_what_is_not_exactly_one_version_with_hashes_is_no_lock() -> None:
    twice = f"a==1 {ZEROS}\na==2 {ZEROS}"
    text = "\n".join(["# x", *(line.replace(" --", " \\\n    --") for line in NOT_PINNED), twice])
    with pytest.raises(UserError) as caught:
        lock.parse(text, "x.lock")
    told = [line.partition(": ")[0].partition(" = ") for line in caught.value.problems]
    assert [shown for _, _, shown in told] == [f"'{line}'" for line in (*NOT_PINNED, "a==2")]
    assert (told[0][0], told[-1][0]) == ("x.lock:2", f"x.lock:{text.count(chr(10)) + 1}")
    assert caught.value.exit_code == 2


@given(st.text(alphabet="ab1=.-#\\ \n>:", max_size=60))
def test_no_text_makes_a_pin_without_a_hash(text: str) -> None:
    """Sixty such characters are too few for a hash: either there is nothing in the lock or each fault is a line."""
    found: Mapping[str, str] = {}
    told: Sequence[str] = [""]
    try:
        found = lock.parse(text, "x.lock").versions
    except UserError as error:
        told = error.problems
    assert found == {}
    assert told == [""] or all(line.startswith("x.lock:") and "\n" not in line for line in told)


def test_resolver_without_a_solution_is_one_line_writes_nothing(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--offline` through the environment, so that no index is asked: uv cannot know any package then."""
    before = {path.name: path.read_bytes() for path in (checkout / lock.FOLDER).iterdir()}
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(checkout / "cache"))
    with pytest.raises(UserError, match=r"tools\.lock: cannot be resolved: ") as caught:
        lock.write_all(checkout)
    assert len(caught.value.problems) == 1
    assert {path.name: path.read_bytes() for path in (checkout / lock.FOLDER).iterdir()} == before


def test_a_missing_resolver_or_a_silent_index_is_one_line(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = checkout / "uv"
    sleeper.write_text("#!/bin/sh\nexec sleep 3600\n", encoding="utf-8")
    sleeper.chmod(0o755)
    monkeypatch.setattr("uv.find_uv_bin", lambda: str(sleeper))
    monkeypatch.setattr(lock, "PATIENCE_S", 0.2)
    with pytest.raises(UserError, match=r"tools\.lock: the package index did not answer within 0 s; fix: try again"):
        lock.write_all(checkout)
    monkeypatch.setattr("uv.find_uv_bin", lambda: str(checkout / "none"))
    with pytest.raises(UserError, match=r"tools\.lock: uv is not installed; fix: pip install"):
        lock.write_all(checkout)


def _pinned(one: lock.Lock) -> list[str]:
    """Versions and hashes, without what the lock was made from."""
    return [line for line in one.text.splitlines() if not line.startswith("#")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tools", "torch-cuda", "app"])
def test_the_index_still_answers_with_what_is_locked(name: str) -> None:
    """torch-cpu is left out: its wheels lie on another index. A child process asks."""
    torch = [lock.read(one, ROOT) for one in lock.TORCH] if name == "app" else []
    found = lock.resolve(name, versions.load(), ROOT, agree_with=torch)
    assert _pinned(found) == _pinned(lock.read(name, ROOT))


@pytest.mark.slow
def test_the_apps_lock_also_fits_the_python_of_gaudis_image() -> None:
    known = versions.load()
    theirs = known.model_copy(update={"python": known.gaudi.python})
    found = lock.resolve("app", theirs, ROOT, agree_with=[lock.read(one, ROOT) for one in lock.TORCH])
    assert _pinned(found) == _pinned(lock.read("app", ROOT))


@pytest.mark.slow
def test_the_cuda_lock_is_complete_and_its_wheels_exist(tmp_path: Path) -> None:
    """Resolved again with nothing but the lock's own pins as candidates, hash for hash, and nothing is downloaded."""
    from uv import find_uv_bin

    command = (
        f"pip install --dry-run --no-config --require-hashes --only-binary :all: --python-platform {lock.PLATFORM}"
    )
    file = ROOT / lock.FOLDER / "torch-cuda.lock"
    more = ["--python-version", versions.load().python, "--target", str(tmp_path), "-r", str(file)]
    words = [find_uv_bin(), *command.split(), *more]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Would install {len(lock.read('torch-cuda', ROOT).versions)} packages" in done.stderr
