"""What lies on a disk, by what real tools write on one; blank is only what holds nothing and nobody uses."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node_setup.agent.facts.devices import blocks
from node_setup.agent.facts.reading import start_reading
from node_setup.agent.facts.wanted import Wanted
from node_setup.agent.host import Host
from tests.conftest import require
from tests.node_setup.kinds_facts import array
from tests.node_setup.machines import facts_of

SIZE = 64 * 2**20
PATHS = "/usr/sbin:/sbin:/usr/bin:/bin"
NVME = {"sys/block/nvme1n1/size": f"{SIZE // 512}", "sys/block/nvme1n1/dev": "259:2"}
MD = {
    "sys/block/md0/size": f"{SIZE // 512}",
    "sys/block/md0/dev": "9:0",
    "sys/block/md0/md/level": "raid0",
    "sys/block/md0/slaves/nvme1n1/keep": "",
}


def found(root: Path, files: dict[str, str]) -> dict[str, Any]:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return blocks.collect(start_reading(Host(str(root)), Wanted()))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """The device file of a disk, which is a file of zeros here."""
    path = tmp_path / "dev" / "nvme1n1"
    path.parent.mkdir()
    path.touch()
    os.truncate(path, SIZE)
    return path


def contents(disk: Path) -> tuple[str | None, bool | None]:
    [one] = found(disk.parents[1], NVME)["blocks"]
    return one["fstype"], one["blank"]


def test_disk_of_zeros_is_blank_and_unreadable_one_unknown(disk: Path) -> None:
    assert contents(disk) == (None, True)
    disk.unlink()
    assert contents(disk) == (None, None)
    reading = start_reading(Host(str(disk.parents[1])), Wanted())
    blocks.collect(reading)
    assert [one["where"] for one in reading.errors] == ["blocks.nvme1n1"]


@pytest.mark.parametrize(
    ("offset", "magic", "name"),
    [
        *((offset, b"x", None) for offset in (0, 511, 4096, 65535, 2**20 - 1, SIZE - 2**20, SIZE - 1)),
        (0, b"XFSB", "xfs"),
        (0x10040, b"_BHRfS_M", "btrfs"),
        (0, b"LUKS\xba\xbe", "crypto_LUKS"),
        (0x218, b"LVM2 001", "LVM2_member"),
        (512, b"EFI PART", "gpt"),
        (SIZE - 512, b"EFI PART", "gpt"),
        (510, b"\x55\xaa", "dos"),
        *((place, b"\xfc\x4e\x2b\xa9", "linux_raid_member") for place in (0, 4096, SIZE - 65536, SIZE - 8192)),
    ],
)
def test_byte_near_either_end_is_not_blank_and_names_its_type(
    disk: Path, offset: int, magic: bytes, name: str | None
) -> None:
    with disk.open("r+b") as file:
        file.seek(offset)
        file.write(magic)
    assert contents(disk) == (name, False)


@pytest.mark.parametrize(("command", "name"), [(["mkfs.ext4", "-q", "-F"], "ext4"), (["mkswap"], "swap")])
def test_what_a_real_tool_wrote_is_known_by_name(disk: Path, command: list[str], name: str) -> None:
    program = shutil.which(command[0], path=PATHS)
    require(program, f"no {command[0]}")
    subprocess.run([str(program), *command[1:], str(disk)], capture_output=True, check=True)
    assert contents(disk) == (name, False)


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


def test_device_in_use_is_not_blank_when_its_mount_is_hidden(loop: str, tmp_path: Path) -> None:
    """The disk's device file below another root is the loop device, of whose mount that root tells or not."""
    subprocess.run(["mkfs.ext4", "-q", loop], check=True)
    root, where = tmp_path / "root", tmp_path / "mounted"
    where.mkdir()
    (root / "dev").mkdir(parents=True)
    (root / "dev/nvme1n1").symlink_to(loop)

    def seen(mounts: str) -> tuple[Any, ...]:
        [one] = found(root, {**NVME, "proc/mounts": mounts})["blocks"]
        return one["fstype"], one["blank"], one["mountpoints"]

    assert seen("") == ("ext4", False, [])
    subprocess.run(["mount", loop, str(where)], check=True)
    try:
        assert seen("") == (None, False, [])
        assert seen(f"/dev/nvme1n1 {where} ext4 rw 0 0\n") == ("ext4", False, [str(where)])
    finally:
        subprocess.run(["umount", str(where)], check=True)


def test_disk_below_an_array_is_mounted_where_the_array_is(tmp_path: Path) -> None:
    files = {
        "sys/block/nvme1n1/holders/md0/keep": "",
        "sys/block/md0/holders/dm-0/keep": "",
        "sys/block/dm-0/dm/name": "vg-scratch",
        "sys/block/dm-0/dev": "253:0",
        "sys/block/dm-0/size": "2000000",
        "proc/mounts": "/dev/mapper/vg-scratch /opt/dlami/nvme xfs rw 0 0\n",
    }
    seen = found(tmp_path, {**NVME, **MD, **files})
    (disk,), (md,) = seen["blocks"], seen["arrays"]
    assert (disk["holders"], disk["mountpoints"], disk["blank"]) == (["md0"], ["/opt/dlami/nvme"], False)
    assert (md["name"], md["level"], md["members"]) == ("md0", "raid0", ["nvme1n1"])
    assert (md["mountpoints"], md["blank"]) == (["/opt/dlami/nvme"], False)


@pytest.mark.parametrize(
    ("content", "fstype", "blank"), [(b"", None, True), (b"XFSB", "xfs", False), (None, None, None)]
)
def test_what_lies_on_an_array_is_told_too(
    tmp_path: Path, content: bytes | None, fstype: str | None, blank: bool | None
) -> None:
    if content is not None:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/md0").write_bytes(content.ljust(SIZE, b"\0"))
    assert found(tmp_path, MD)["arrays"] == [array("md0", ["nvme1n1"], fstype=fstype, blank=blank)]


def test_the_root_volume_is_known_by_its_partitions_mount() -> None:
    [root, *others] = facts_of("p5")["blocks"]
    assert (root["name"], root["root"], root["instance_store"], root["blank"]) == ("nvme0n1", True, False, False)
    assert len(others) == 8
