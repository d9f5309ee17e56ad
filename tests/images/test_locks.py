"""What goes into an image is pinned, hashed, and what the tests ran with; a stale lock is told without asking the network."""

from __future__ import annotations

import shutil
import subprocess
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


def checked(root: Path) -> list[str]:
    return lock.check(root, versions.load(root / "images/versions.toml"))


def test_no_lock_is_stale() -> None:
    assert lock.check(ROOT) == []


@pytest.mark.parametrize("name", lock.NAMES)
def test_every_package_is_pinned_with_hashes(name: str) -> None:
    found = lock.read(name, ROOT)
    assert found.versions
    assert found.text.count("--hash=sha256:") >= len(found.versions)


def test_the_cpu_build_of_torch_is_the_one_that_others_have() -> None:
    _, _, torch = lock.read("torch-cpu", ROOT).text.partition("\ntorch==")
    assert TORCH_CPU_WHEEL in torch.partition("==")[0]


def test_locks_have_the_versions_of_the_one_place() -> None:
    known = versions.load()
    cuda = lock.read("torch-cuda", ROOT).versions
    assert lock.read("torch-cpu", ROOT).versions["torch"] == f"{known.torch}+cpu"
    assert cuda["torch"] == known.torch
    assert cuda["nvidia-nccl-cu13"] == known.nccl
    assert cuda["nvidia-cuda-runtime"].startswith(f"{known.cuda}.")
    assert lock.read("tools", ROOT).versions == {"uv": known.uv}


def test_the_trainer_finds_all_its_packages_and_none_twice() -> None:
    app, cpu, cuda = (lock.read(name, ROOT).versions for name in ("app", *lock.TORCH))
    assert not set(app) & set(cpu) & set(cuda)
    for torch in (cpu, cuda):
        assert {"boto3", "numpy", "pydantic", "torch", "typing-extensions", "filelock", "fsspec"} <= set(app) | set(
            torch
        )


def test_only_one_nccl_is_shipped() -> None:
    assert [name for name in lock.read("torch-cuda", ROOT).versions if "nccl" in name] == ["nvidia-nccl-cu13"]
    assert not [name for one in ("app", "torch-cpu") for name in lock.read(one, ROOT).versions if "nvidia" in name]


def test_a_new_dependency_makes_only_the_apps_lock_stale(checkout: Path) -> None:
    edit(checkout / "pyproject.toml", '"tomli-w>=1.1",', '"tomli-w>=1.2", "orjson>=3",')
    (line,) = checked(checkout)
    assert line.startswith(
        "images/locks/app.lock is stale: made from tomli-w>=1.1, now asked for orjson>=3, tomli-w>=1.2"
    )
    assert line.endswith("; fix: fab image-lock")


def test_a_new_torch_is_told_for_both_of_its_locks(checkout: Path) -> None:
    edit(checkout / "images/versions.toml", 'torch = "2.13.0"', 'torch = "2.14.0"')
    assert [line.split()[0] for line in checked(checkout)] == [f"images/locks/{name}.lock" for name in lock.TORCH]


def test_another_python_makes_every_lock_stale(checkout: Path) -> None:
    edit(checkout / "images/versions.toml", 'python = "3.11"', 'python = "3.13"')
    assert len(checked(checkout)) == len(lock.NAMES)


def test_a_version_that_the_tests_do_not_run_with_is_told(checkout: Path) -> None:
    edit(checkout / ".ci/constraints.txt", "\nboto3==", "\nboto3==99.")
    (line,) = checked(checkout)
    assert line.startswith("images/locks/app.lock boto3 = ")
    assert ".ci/constraints.txt tests 99." in line


def test_names_are_compared_as_the_index_does(checkout: Path) -> None:
    edit(checkout / ".ci/constraints.txt", "\ntyping_extensions==", "\nTyping.Extensions==99.")
    assert [line.split()[0] for line in checked(checkout)] == [f"images/locks/{name}.lock" for name in lock.TORCH]


def test_a_version_that_torch_brings_otherwise_is_told(checkout: Path) -> None:
    edit(checkout / "images/versions.toml", 'nccl = "2.29.7"', 'nccl = "2.30.7"')
    edit(checkout / "images/versions.toml", 'cuda = "13.0"', 'cuda = "13.2"')
    nccl, cuda = checked(checkout)
    assert nccl.startswith("versions.toml nccl = '2.30.7': torch-cuda.lock brings 2.29.7")
    assert cuda.startswith("versions.toml cuda = '13.2': torch-cuda.lock brings 13.0.")


def test_a_package_that_would_be_shipped_twice_or_hidden_is_told(checkout: Path) -> None:
    path = checkout / lock.FOLDER / "app.lock"
    brought = lock.read("torch-cpu", ROOT).versions["fsspec"]
    pins = f"fsspec=={brought} --hash={TORCH_CPU_WHEEL}\nfilelock==1.0 --hash={TORCH_CPU_WHEEL}\n"
    path.write_text(path.read_text() + pins, encoding="utf-8")
    lines = checked(checkout)
    assert any(line.startswith("images/locks/app.lock fsspec") and "shipped twice" in line for line in lines)
    assert any(line.startswith("images/locks/app.lock filelock = '1.0'") and "hide the other" in line for line in lines)


def test_a_missing_lock_is_told(checkout: Path) -> None:
    (checkout / lock.FOLDER / "tools.lock").unlink()
    (line,) = checked(checkout)
    assert "images/locks/tools.lock: cannot be read" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("numpy>=2 \\\n    --hash=sha256:" + "0" * 64, "x.lock:1 = 'numpy>=2"),
        ("numpy \\\n    --hash=sha256:" + "0" * 64, "is not a pinned package"),
        ("numpy==2.4.6", "is not a pinned package"),
        ("numpy==2.4.6 --hash=md5:00", "is not a pinned package"),
        ("numpy==2.4.6 --hash=sha256:00", "is not a pinned package"),
        ("numpy==2.*  --hash=sha256:" + "0" * 64, "is not a pinned package"),
        ("\n# x\n-e .\n", "x.lock:3 = '-e .': is not a pinned package"),
        ("--extra-index-url https://example.com", "is not a pinned package"),
        ("numpy @ https://example.com/numpy.whl --hash=sha256:" + "0" * 64, "is not a pinned package"),
        ("a==1 --hash=sha256:{0}\na==2 --hash=sha256:{0}".format("0" * 64), "x.lock:2 = 'a==2': is there twice"),
    ],
)
def test_what_is_not_exactly_one_version_with_hashes_is_no_lock(text: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        lock.parse(text, "x.lock")
    assert told in str(caught.value)
    assert caught.value.exit_code == 2


@given(st.text(alphabet="ab1=.-#\\ \n>:", max_size=60))
def test_no_text_makes_a_pin_without_a_hash(text: str) -> None:
    """Sixty such characters are too few for a hash: either there is nothing in the lock or each fault is a line."""
    found, told = {}, [""]
    try:
        found = lock.parse(text, "x.lock").versions
    except UserError as error:
        told = error.problems
    assert found == {}
    assert told == [""] or all(line.startswith("x.lock:") and "\n" not in line for line in told)


def test_a_resolver_that_finds_no_solution_is_one_line_and_writes_nothing(checkout: Path) -> None:
    """`--offline` through the environment, so that no index is asked: uv cannot know any package then."""
    before = {path.name: path.read_bytes() for path in (checkout / lock.FOLDER).iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UV_OFFLINE", "1")
        patch.setenv("UV_CACHE_DIR", str(checkout / "cache"))
        with pytest.raises(UserError) as caught:
            lock.write_all(checkout)
    (line,) = caught.value.problems
    assert line.startswith("images/locks/tools.lock: cannot be resolved: ")
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
@pytest.mark.parametrize("platform", [lock.AMD64, lock.ARM64])
def test_the_index_still_answers_with_what_is_locked_on_both_platforms(name: str, platform: str) -> None:
    """torch-cpu is left out: its wheels lie on another index. A child process asks."""
    torch = [lock.read(one, ROOT) for one in lock.TORCH] if name == "app" else []
    found = lock.resolve(name, versions.load(), ROOT, platform=platform, agree_with=torch)
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

    command = [
        find_uv_bin(),
        "pip",
        "install",
        "--dry-run",
        "--no-config",
        "--require-hashes",
        "--only-binary",
        ":all:",
    ]
    known = versions.load()
    command += ["--python-version", known.python, "--python-platform", lock.AMD64, "--target", str(tmp_path)]
    locked = ROOT / lock.FOLDER / "torch-cuda.lock"
    done = subprocess.run([*command, "-r", str(locked)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Would install {len(lock.read('torch-cuda', ROOT).versions)} packages" in done.stderr
