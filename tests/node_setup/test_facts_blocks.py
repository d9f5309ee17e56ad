"""What lies on a disk, by what real tools write on one; blank is only what holds nothing and nobody uses."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from node_setup.agent.facts.devices import blocks
from node_setup.agent.facts.scene import Scene, look, parse_mounts
from node_setup.agent.facts.wanted import Wanted
from node_setup.agent.host import Host
from tests.conftest import require
from tests.node_setup.machines import facts_of

SIZE = 64 * 2**20
PATHS = "/usr/sbin:/sbin:/usr/bin:/bin"


def contents(path: Path) -> tuple[str | None, bool | None]:
    folder = path.parent / "root"
    (folder / "dev").mkdir(parents=True, exist_ok=True)
    device = folder / "dev" / "nvme1n1"
    device.unlink(missing_ok=True)
    device.hardlink_to(path)
    return blocks._contents(Scene(Host(str(folder)), Wanted()), "nvme1n1", path.stat().st_size)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.touch()
    os.truncate(path, SIZE)
    return path


def test_a_disk_of_zeros_is_blank(disk: Path) -> None:
    assert contents(disk) == (None, True)


@pytest.mark.parametrize("offset", [0, 511, 4096, 65535, 2**20 - 1, SIZE - 2**20, SIZE - 1])
def test_one_byte_near_either_end_is_not_blank(disk: Path, offset: int) -> None:
    with disk.open("r+b") as file:
        file.seek(offset)
        file.write(b"x")
    assert contents(disk) == (None, False)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["mkfs.ext4", "-q", "-F"], "ext4"),
        (["mkswap"], "swap"),
    ],
)
def test_what_a_real_tool_wrote_is_known_by_name(disk: Path, command: list[str], name: str) -> None:
    program = shutil.which(command[0], path=PATHS)
    require(program, f"no {command[0]}")
    assert program
    done = subprocess.run([program, *command[1:], str(disk)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert contents(disk) == (name, False)


@pytest.mark.parametrize(
    ("offset", "magic", "name"),
    [
        (0, b"XFSB", "xfs"),
        (0x10040, b"_BHRfS_M", "btrfs"),
        (0, b"LUKS\xba\xbe", "crypto_LUKS"),
        (0x218, b"LVM2 001", "LVM2_member"),
        (512, b"EFI PART", "gpt"),
        (SIZE - 512, b"EFI PART", "gpt"),
        (510, b"\x55\xaa", "dos"),
    ],
)
def test_a_superblock_of_a_tool_that_is_not_here_is_known_by_name(
    disk: Path, offset: int, magic: bytes, name: str
) -> None:
    with disk.open("r+b") as file:
        file.seek(offset)
        file.write(magic)
    assert contents(disk) == (name, False)


@pytest.mark.parametrize("place", [0, 4096, SIZE - 65536, SIZE - 8192])
def test_a_member_of_an_array_is_known_wherever_its_version_keeps_the_superblock(disk: Path, place: int) -> None:
    with disk.open("r+b") as file:
        file.seek(place)
        file.write(b"\xfc\x4e\x2b\xa9")
    assert contents(disk) == ("linux_raid_member", False)


@pytest.fixture
def loop(disk: Path) -> Iterator[str]:
    require(os.geteuid() == 0 and shutil.which("losetup", path=PATHS), "needs root and losetup for a real block device")
    made = subprocess.run(["losetup", "--find", "--show", str(disk)], capture_output=True, text=True)
    require(made.returncode == 0, f"no loop device can be made: {made.stderr.strip()}")
    name = made.stdout.strip()
    try:
        yield name
    finally:
        subprocess.run(["losetup", "--detach", name], check=True)


def test_a_real_device_in_use_is_not_blank_even_where_its_mount_is_not_seen(loop: str, tmp_path: Path) -> None:
    subprocess.run(["mkfs.ext4", "-q", loop], check=True)
    where = tmp_path / "mounted"
    where.mkdir()
    scene = Scene(Host(), Wanted())
    assert blocks._contents(scene, Path(loop).name, SIZE) == ("ext4", False)
    subprocess.run(["mount", loop, str(where)], check=True)
    try:
        assert blocks._contents(scene, Path(loop).name, SIZE) == (None, False)
        assert scene.errors == []
        seen = blocks._disk(look(Host(), Wanted()), Path(loop).name, blocks._places(look(Host(), Wanted())))
        assert (seen["mountpoints"], seen["fstype"], seen["blank"]) == ([str(where)], "ext4", False)
    finally:
        subprocess.run(["umount", str(where)], check=True)
    assert blocks._contents(scene, Path(loop).name, SIZE) == ("ext4", False)


def test_a_disk_that_cannot_be_read_is_neither_blank_nor_not(tmp_path: Path) -> None:
    scene = Scene(Host(str(tmp_path)), Wanted())
    assert blocks._contents(scene, "nvme1n1", SIZE) == (None, None)
    assert "cannot tell whether it is blank" in scene.errors[0]["why"]


def test_instance_store_is_told_from_the_root_volume() -> None:
    disks = {one["name"]: one for one in facts_of("p5")["blocks"]}
    assert len(disks) == 9
    assert (disks["nvme0n1"]["root"], disks["nvme0n1"]["instance_store"], disks["nvme0n1"]["blank"]) == (
        True,
        False,
        False,
    )
    assert (disks["nvme1n1"]["instance_store"], disks["nvme1n1"]["blank"], disks["nvme1n1"]["scheduler"]) == (
        True,
        True,
        "mq-deadline",
    )


def test_a_disk_below_an_array_or_a_volume_counts_as_mounted_where_that_is(tmp_path: Path) -> None:
    files = {
        "sys/block/nvme1n1/size": "1000000",
        "sys/block/nvme1n1/dev": "259:2",
        "sys/block/nvme1n1/holders/md0/keep": "",
        "sys/block/md0/size": "2000000",
        "sys/block/md0/dev": "9:0",
        "sys/block/md0/md/level": "raid0",
        "sys/block/md0/slaves/nvme1n1/keep": "",
        "sys/block/md0/holders/dm-0/keep": "",
        "sys/block/dm-0/dm/name": "vg-scratch",
        "sys/block/dm-0/dev": "253:0",
        "sys/block/dm-0/size": "2000000",
        "proc/mounts": "/dev/mapper/vg-scratch /opt/dlami/nvme xfs rw 0 0\n",
    }
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    host = Host(str(tmp_path))
    found = blocks.collect(Scene(host, Wanted(), mounts=parse_mounts(host.read("/proc/mounts") or "")))
    (disk,) = found["blocks"]
    assert (disk["holders"], disk["mountpoints"], disk["blank"]) == (["md0"], ["/opt/dlami/nvme"], False)
    (array,) = found["arrays"]
    assert (array["name"], array["level"], array["members"]) == ("md0", "raid0", ["nvme1n1"])
    assert (array["mountpoints"], array["blank"]) == (["/opt/dlami/nvme"], False)
