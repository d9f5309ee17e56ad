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
from typing import Any

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


def install(
    folder: Path,
    version: str = "1.49.0",
    *,
    plugin: bytes | None = None,
    needs: bytes = b"libc.so.6\0",
    place: str = "/opt/amazon/ofi-nccl/lib",
    sha256: str | None = None,
    named: str | None = None,
    ending: str = "",
    url: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the script; `plugin` b"" is an installer that leaves none, None one whose libraries are all there."""
    require(os.geteuid() == 0, "a root of its own needs root; fix: run as root")
    require(shutil.which("unshare"), "unshare; fix: apt-get install util-linux")
    library = _real_library().replace(b"libc.so.6\0", needs) if plugin is None else plugin
    copy = f'cp "$(dirname "$0")/plugin" {place}/libnccl-net-ofi.so' if library else ""
    script = _INSTALLER.format(folder=place, named=named or version, plugin=f"{copy}\n{ending}")
    tarball = folder / "aws-efa-installer.tar.gz"
    with tarfile.open(tarball, "w:gz") as tar:
        for name, data, mode in (("efa_installer.sh", script.encode(), 0o755), ("plugin", library, 0o644)):
            member = tarfile.TarInfo(f"aws-efa-installer/{name}")
            member.size, member.mode = len(data), mode
            tar.addfile(member, io.BytesIO(data))
    mount = folder / "mount"
    mount.mkdir()
    environment = {
        "PATH": "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin",
        "NEW_ROOT": str(mount / "root"),
        "EFA_VERSION": version,
        "EFA_SHA256": hashlib.sha256(tarball.read_bytes()).hexdigest() if sha256 is None else sha256,
        "EFA_URL": url or str(tarball),
    }
    command = ["unshare", "--mount", "--fork", "sh", "-c", _ROOT, "sh", str(mount), str(SCRIPT)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "flags"), [("1.9.0", BASE), ("1.47.0", BASE), ("1.48.0", NGC), ("1.100.0", NGC), ("2.0.0", NGC)]
)
def test_each_release_gets_the_flags_it_knows(tmp_path: Path, version: str, flags: str) -> None:
    done = install(tmp_path, version)
    assert done.returncode == 0, done.stderr
    assert flags in done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib64"])
def test_the_linker_is_told_where_the_plugin_is(tmp_path: Path, place: str) -> None:
    done = install(tmp_path, place=place)
    assert done.returncode == 0, done.stderr
    assert place in done.stdout.splitlines()


def _real_library() -> bytes:
    """A small shared library that is on every glibc system."""
    found = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    (path, *_) = [line.split(" => ")[1] for line in found.splitlines() if line.strip().startswith("libanl.so.1 ")]
    return Path(path).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"sha256": "0" * 64}, f"wanted {'0' * 64}"),
        ({"sha256": ""}, "by its sha256 only"),
        ({"version": "latest"}, "EFA_VERSION = latest"),
        ({"version": "1.49"}, "EFA_VERSION = 1.49:"),
        ({"version": "1.49.0; true"}, "EFA_VERSION = 1.49.0; true"),
        ({"url": "/site/aws-efa-installer.tar.gz"}, "/site/aws-efa-installer.tar.gz"),
        ({"plugin": b""}, "left no libnccl-net-ofi.so"),
        ({"needs": b"libq.so.6\0"}, "libq.so.6 => not found"),
        ({"named": "1.48.0"}, "does not name 1.49.0"),
        ({"ending": "echo rdma-core is held back; exit 3"}, "rdma-core is held back"),
    ],
)
def test_what_is_not_the_whole_requested_release_fails_the_build(
    tmp_path: Path, given: dict[str, Any], told: str
) -> None:
    done = install(tmp_path, **given)
    assert done.returncode != 0
    assert told in done.stderr
    never_run = {"sha256", "version", "url"} & set(given)
    assert ("--skip-kmod" in done.stdout) is not bool(never_run)
