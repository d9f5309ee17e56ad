"""install_efa.sh runs for real, as root of a tree of its own, with an installer that is ours.

The installer leaves out everything of AWS's: packages, libfabric, the plugin's code. It notes its flags, and puts files where
the real one does, of which the plugin is a real library of this machine. What the real one does on Debian was never seen here.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.conftest import require

SCRIPT = Path(__file__).parents[2] / "images" / "scripts" / "install_efa.sh"
BASE = "-y --skip-kmod --skip-limit-conf --no-verify"
NGC = f"{BASE} --disable-ngc --disable-build-ngc"

_INSTALLER = """#!/bin/sh
set -eu
mkdir -p /opt/amazon/efa/bin {folder}
echo "$@" >/opt/amazon/flags
echo "# EFA installer version: {named}" >/opt/amazon/efa_installed_packages
printf '#!/bin/sh\\necho "libfabric: 2.4.0amzn5.0"\\n' >/opt/amazon/efa/bin/fi_info
chmod 755 /opt/amazon/efa/bin/fi_info
{plugin}
"""
# A file system of our own over the machine's root: what the script changes is gone with the namespace.
_ROOT = """set -eu
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
mount --rbind /dev "$1/root/dev"
mount -t tmpfs tmpfs "$1/root/opt"
shift
code=0
chroot "$NEW_ROOT" "$@" || code=$?
cat "$NEW_ROOT/opt/amazon/flags" 2>/dev/null || true
cat "$NEW_ROOT/etc/ld.so.conf.d/lustrain-ofi-nccl.conf" 2>/dev/null || true
exit $code
"""


class Installation:
    """One run of the script with one release of an installer."""

    def __init__(self, folder: Path) -> None:
        require(os.geteuid() == 0, "a root of its own needs root; fix: run as root")
        require(shutil.which("unshare"), "unshare; fix: apt-get install util-linux")
        self._folder = folder

    def run(
        self,
        version: str = "1.49.0",
        *,
        plugin: bytes | None = None,
        place: str = "/opt/amazon/ofi-nccl/lib",
        sha256: str | None = None,
        named: str | None = None,
        ending: str = "",
        url: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """`plugin` b"" is an installer that leaves none; None one whose libraries are all there."""
        tarball = self._tarball(named or version, _real_library() if plugin is None else plugin, place, ending)
        mount = self._folder / "mount"
        mount.mkdir()
        total = hashlib.sha256(tarball.read_bytes()).hexdigest()
        environment = {
            "PATH": "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin",
            "NEW_ROOT": str(mount / "root"),
            "EFA_VERSION": version,
            "EFA_SHA256": total if sha256 is None else sha256,
            "EFA_URL": url or str(tarball),
        }
        command = ["unshare", "--mount", "--fork", "sh", "-c", _ROOT, "sh", str(mount), str(SCRIPT)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)

    def _tarball(self, named: str, plugin: bytes, place: str, ending: str) -> Path:
        copy = f'cp "$(dirname "$0")/plugin" {place}/libnccl-net-ofi.so' if plugin else ""
        script = _INSTALLER.format(folder=place, named=named, plugin=f"{copy}\n{ending}")
        path = self._folder / "aws-efa-installer.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            for name, data, mode in (("efa_installer.sh", script.encode(), 0o755), ("plugin", plugin, 0o644)):
                member = tarfile.TarInfo(f"aws-efa-installer/{name}")
                member.size, member.mode = len(data), mode
                tar.addfile(member, io.BytesIO(data))
        return path


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "flags"),
    [
        ("1.9.0", BASE),
        ("1.44.0", BASE),
        ("1.47.0", BASE),
        ("1.48.0", NGC),
        ("1.49.0", NGC),
        ("1.100.0", NGC),
        ("2.0.0", NGC),
    ],
)
def test_each_release_gets_the_flags_it_knows(installation: Installation, version: str, flags: str) -> None:
    done = installation.run(version)
    assert done.returncode == 0, done.stderr
    assert flags in done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib64"])
def test_the_linker_is_told_where_the_plugin_is(installation: Installation, place: str) -> None:
    done = installation.run(place=place)
    assert done.returncode == 0, done.stderr
    assert place in done.stdout.splitlines()


def test_another_archive_than_the_pinned_one_is_never_run(installation: Installation) -> None:
    done = installation.run(sha256="0" * 64)
    assert done.returncode == 1
    assert f"wanted {'0' * 64}" in done.stderr
    assert "--skip-kmod" not in done.stdout


def test_a_release_without_a_sum_is_refused(installation: Installation) -> None:
    done = installation.run(sha256="")
    assert done.returncode != 0
    assert "by its sha256 only" in done.stderr


@pytest.mark.parametrize("version", ["latest", "1.49", "1.49.0; true"])
def test_a_version_that_is_none_is_refused(installation: Installation, version: str) -> None:
    done = installation.run(version)
    assert done.returncode == 1
    assert "not a release like 1.2.3" in done.stderr


def test_an_installer_that_leaves_no_plugin_fails_the_build(installation: Installation) -> None:
    done = installation.run(plugin=b"")
    assert done.returncode == 1
    assert "left no libnccl-net-ofi.so" in done.stderr


@pytest.mark.slow
def test_a_plugin_that_misses_a_library_fails_the_build(installation: Installation) -> None:
    done = installation.run(plugin=_real_library().replace(b"libc.so.6\0", b"libq.so.6\0"))
    assert done.returncode == 1
    assert "libq.so.6 => not found" in done.stderr


def test_another_release_than_asked_for_fails_the_build(installation: Installation) -> None:
    done = installation.run("1.49.0", named="1.48.0")
    assert done.returncode == 1
    assert "does not name 1.49.0" in done.stderr


def test_an_installer_that_fails_is_quoted(installation: Installation) -> None:
    done = installation.run(ending="echo rdma-core is held back; exit 3")
    assert done.returncode == 1
    assert "rdma-core is held back" in done.stderr
    assert "efa_installer.sh -y" in done.stderr


def test_an_archive_that_is_not_there_is_one_line(installation: Installation) -> None:
    done = installation.run(url="/site/aws-efa-installer.tar.gz")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "/site/aws-efa-installer.tar.gz" in done.stderr


def _real_library() -> bytes:
    """A small shared library that is on every glibc system."""
    found = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    (path, *_) = [line.split(" => ")[1] for line in found.splitlines() if line.strip().startswith("libanl.so.1 ")]
    return Path(path).read_bytes()
