"""Local disks: the scheduler, and scratch on what is blank and on nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_setup.agent import owned
from node_setup.agent.facts.devices.blocks import signature
from node_setup.agent.kinds.disks.scheduler import udev_rule
from node_setup.agent.kinds.disks.scratch import FORMAT_SECONDS, LABEL, mount_unit
from node_setup.agent.model import PERSISTED, RUNTIME, Put, Remark, Step, Write
from tests.conftest import require
from tests.node_setup.kinds_facts import applied, array, commands, disk, machine, plan, remark, service, steps

PLACE = "/opt/dlami/nvme"
UNIT = "/etc/systemd/system/opt-dlami-nvme.mount"
ENABLED = {"opt-dlami-nvme.mount": service("loaded", "active", "enabled", "success")}
OURS = {UNIT: {"content": mount_unit(PLACE), "mode": "0644"}}
RULE = {owned.UDEV: {"content": udev_rule("none"), "mode": "0644"}}
TWO = ["nvme1n1", "nvme2n1"]
CREATE = "mdadm --create /dev/md/lustrain --level=0 --raid-devices=2 --name=lustrain --homehost=any"
DESTROYS = ("mkfs", "mdadm --create", "wipefs", "dd ", "parted", "blkdiscard")


def node(*blocks: dict[str, Any], files: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    facts = machine(blocks=list(blocks), **sections)
    facts["files"].update(files or {UNIT: None})
    return facts


def scratch(facts: dict[str, Any]) -> list[Step | Remark]:
    return plan("nvme.scratch", facts)


def test_only_instance_store_gets_the_scheduler_and_rule() -> None:
    root = disk("nvme0n1", root=True, scheduler="mq-deadline", blank=False)
    volume = disk("nvme3n1", instance_store=False, scheduler="mq-deadline")
    facts = node(root, volume, disk("nvme1n1", scheduler="mq-deadline"), disk("nvme2n1"))
    said = plan("nvme.scheduler", facts)
    assert [(step.part, step.current, step.actions) for step in steps(said)] == [
        (RUNTIME, "mq-deadline", (Put("/sys/block/nvme1n1/queue/scheduler", "none"),)),
        (PERSISTED, "missing", (Write(owned.UDEV, udev_rule("none")),)),
    ]
    assert remark(plan("nvme.scheduler", applied(facts, said))).status == "ok"
    facts = node(disk("nvme1n1"), files={owned.UDEV: {"content": udev_rule("kyber"), "mode": "0644"}})
    assert [(step.part, step.current) for step in steps(plan("nvme.scheduler", facts))] == [(PERSISTED, "differs")]


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        (node(disk("nvme1n1", scheduler=None, schedulers=[]), files=RULE), "unknown"),
        (node(disk("nvme1n1", scheduler="bfq", schedulers=["bfq"]), files=RULE), "skipped"),
        (node(disk("nvme0n1", root=True, scheduler="mq-deadline")), "skipped"),
        (machine(blocks=None), "unknown"),
    ],
)
def test_a_disk_that_cannot_have_it_says_so(facts: dict[str, Any], status: str) -> None:
    assert remark(plan("nvme.scheduler", facts)).status == status


@pytest.mark.parametrize(
    ("names", "gather"),
    [
        (TWO, [f"{CREATE} /dev/nvme1n1 /dev/nvme2n1", "udevadm settle", "mkfs.xfs -K -L lustrain /dev/md/lustrain"]),
        (TWO[:1], ["mkfs.xfs -K -L lustrain /dev/nvme1n1"]),
    ],
)
def test_blank_disks_are_formatted_and_only_mounted_on_reboot(names: list[str], gather: list[str]) -> None:
    facts = node(*map(disk, names))
    said, start = scratch(facts), "systemctl start opt-dlami-nvme.mount"
    assert [step.part for step in steps(said)] == [PERSISTED, RUNTIME]
    unit = ["systemctl daemon-reload", "systemctl enable opt-dlami-nvme.mount"]
    assert commands(said) == [*unit, *gather, "udevadm settle", start]
    done = applied(facts, said)
    assert remark(scratch(done)).status == "ok"
    after_stop = node(*map(disk, names), files=OURS, services=ENABLED)
    assert commands(scratch(after_stop)) == [*gather, "udevadm settle", start]
    done["mounts"] = []
    for one in (*done["arrays"], *done["blocks"]):
        one["mountpoints"] = []
    assert commands(scratch(done)) == [start]


@pytest.mark.parametrize("names", [TWO, TWO[:1]])
@pytest.mark.parametrize("stop_after", range(9))
def test_a_run_that_was_cut_off_anywhere_is_finished_by_the_next(names: list[str], stop_after: int) -> None:
    facts = node(*map(disk, names))
    cut = applied(facts, scratch(facts), stop_after)
    said = scratch(cut)
    whole = applied(cut, said)
    assert remark(scratch(whole)).status == "ok"
    assert whole["mounts"][-1]["target"] == PLACE


def test_array_is_reassembled_with_its_data_after_a_reboot() -> None:
    kept = array("md127", TWO, fstype="xfs", blank=False, label=LABEL)
    facts = {**gathered(), "services": ENABLED, "array_on_disk": kept}
    said = scratch(facts)
    assemble = "mdadm --assemble /dev/md/lustrain /dev/nvme1n1 /dev/nvme2n1"
    assert commands(said) == [assemble, "udevadm settle", "systemctl start opt-dlami-nvme.mount"]
    assert remark(scratch(applied(facts, said))).status == "ok"


@pytest.mark.parametrize("files", [{UNIT: None}, OURS])
@pytest.mark.parametrize(
    ("changed", "status", "why"),
    [
        ({"fstype": "ext4", "blank": False}, "conflict", "nvme2n1 holds ext4"),
        ({"blank": None}, "unknown", "nvme2n1 could not be read"),
        ({"blank": False}, "conflict", "nvme2n1 holds data"),
        ({"holders": ["dm-0"], "blank": False}, "conflict", "used by dm-0"),
        ({"partitions": ["nvme2n1p1"], "blank": False}, "conflict", "used by nvme2n1p1"),
        ({"mountpoints": ["/data"], "fstype": "xfs", "blank": False}, "conflict", "used by /data"),
    ],
)
def test_one_disk_with_data_prevents_formatting(
    changed: dict[str, Any], status: str, why: str, files: dict[str, Any]
) -> None:
    found = remark(scratch(node(disk("nvme1n1"), disk("nvme2n1", **changed), files=files)))
    assert (found.status, why in found.why, "nvme1n1 is blank" in found.why) == (status, True, True)


def gathered(*arrays: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Two disks as members of an array, with these arrays over them."""
    members = [disk(name, fstype="linux_raid_member", blank=False, **changed) for name in TWO]
    return node(*members, files=OURS, arrays=list(arrays))


def image(load: str, active: str, enabled: str, *mounts: dict[str, Any]) -> dict[str, Any]:
    """A node with a service of the image that gathers the disks."""
    services = {"dlami-nvme.service": service(load, active, enabled, "success")}
    return node(*map(disk, TWO), services=services, mounts=list(mounts))


OTHERS_MOUNT = {"source": "/dev/mapper/vg.01-lv", "target": PLACE, "fstype": "ext4", "options": ["rw"]}
LEFT_ALONE = {
    "another's file system": (node(disk("nvme1n1", fstype="xfs", blank=False)), "conflict"),
    "another level": (gathered(array("md127", TWO, level="raid1"), holders=["md127"]), "conflict"),
    "over fewer disks": (gathered(array("md127", TWO[:1]), holders=["md127"]), "conflict"),
    "over more disks": (gathered(array("md127", [*TWO, "nvme9n1"]), holders=["md127"]), "conflict"),
    "an array in use": (gathered(holders=["md5"]), "conflict"),
    "not known to be our array": ({**gathered(), "files": {UNIT: None}}, "conflict"),
    "data on an array": (node(*map(disk, TWO), arrays=[array("md127", TWO, fstype="ext4", blank=False)]), "conflict"),
    "the image does it": (image("loaded", "active", "enabled"), "skipped"),
    "the image will do it": (image("loaded", "activating", "enabled"), "skipped"),
    "the image did it": (image("loaded", "active", "disabled"), "skipped"),
    "the image failed": (image("loaded", "failed", "enabled"), "failed"),
    "it failed and yet": (image("loaded", "failed", "enabled", {"target": PLACE}), "skipped"),
    "somebody's mount": (node(disk("nvme1n1", holders=["dm-0"], blank=False), mounts=[OTHERS_MOUNT]), "skipped"),
    "no instance store": (node(disk("nvme0n1", instance_store=False)), "skipped"),
    "no systemd": (node(disk("nvme1n1"), init="other"), "skipped"),
    "systemd unknown": (node(disk("nvme1n1"), init=None), "unknown"),
    "unit not read": (machine(blocks=[disk("nvme1n1")]), "unknown"),
    "disks not read": (machine(blocks=None), "unknown"),
}


@pytest.mark.parametrize(("facts", "status"), LEFT_ALONE.values(), ids=LEFT_ALONE.keys())
def test_what_is_not_ours_or_not_known_is_left_as_it_is(facts: dict[str, Any], status: str) -> None:
    assert remark(scratch(facts)).status == status


@pytest.mark.parametrize("facts", [image("masked", "inactive", "masked"), image("loaded", "inactive", "disabled")])
def test_an_image_that_does_not_do_it_leaves_it_to_us(facts: dict[str, Any]) -> None:
    assert commands(scratch(facts))


BLOCKS = st.builds(
    lambda name, **changed: disk(name, **changed),
    st.just(""),
    blank=st.sampled_from([True, True, True, False, None]),
    fstype=st.sampled_from([None, None, None, "xfs", "ext4", "linux_raid_member", "LVM2_member"]),
    holders=st.sampled_from([[], [], ["md127"], ["dm-0"]]),
    partitions=st.sampled_from([[], [], ["p1"]]),
    mountpoints=st.sampled_from([[], [], ["/data"], ["/", "[SWAP]"]]),
    instance_store=st.sampled_from([True, True, True, False]),
    root=st.sampled_from([False, False, False, True]),
)


@given(
    blocks=st.lists(BLOCKS, max_size=4),
    on_array=st.one_of(st.none(), BLOCKS),
    members=st.sampled_from(["all", "some"]),
    level=st.sampled_from(["raid0", "raid1", None]),
    ours=st.booleans(),
    service=st.sampled_from([{}, {"load": "loaded", "active": "active", "enabled": "enabled"}, {"load": "masked"}]),
)
def test_nothing_that_is_not_known_to_be_blank_is_ever_formatted(
    blocks: list[dict[str, Any]],
    on_array: dict[str, Any] | None,
    members: str,
    level: str | None,
    ours: bool,
    service: dict[str, str],
) -> None:
    for number, block in enumerate(blocks):
        block.update(name=f"nvme{number}n1", path=f"/dev/nvme{number}n1")
    names = [block["name"] for block in blocks if block["instance_store"]]
    arrays = []
    if on_array is not None:
        content = {key: on_array[key] for key in ("fstype", "holders", "mountpoints", "blank")}
        arrays = [array("md127", names if members == "all" else names[:1], level=level, **content)]
    facts = node(*blocks, files=OURS if ours else None, arrays=arrays, services={"dlami-nvme.service": service})
    harmful = [one for one in commands(scratch(facts)) if one.startswith(DESTROYS)]
    for command in harmful:
        if command.startswith("mkfs") and not any(one.startswith("mdadm --create") for one in harmful):
            [target] = [one for one in (*blocks, *arrays) if command.endswith(one["path"])]
            assert _nothing_on(target)
        else:
            written = [block for block in blocks if block["instance_store"] and not block["root"]]
            assert all(_nothing_on(block) for block in written)
            assert not any(one["level"] == "raid0" and one["members"] == names for one in arrays)
            assert not any(block["path"] in command for block in blocks if block not in written)


def _nothing_on(block: dict[str, Any]) -> bool:
    used = block.get("partitions") or block["holders"] or block["mountpoints"] or block["fstype"]
    return block["blank"] is True and not used


@pytest.mark.slow
def test_real_mkfs_formats_a_blank_image_once(tmp_path: Path) -> None:
    mkfs = shutil.which("mkfs.xfs", path="/usr/sbin:/sbin:/usr/bin:/bin")
    require(mkfs is not None, "no mkfs.xfs")
    image = tmp_path / "disk"
    image.touch()
    os.truncate(image, 512 * 2**20)
    [command] = [one for one in commands(scratch(node(disk("nvme1n1", path=str(image))))) if one.startswith("mkfs.xfs")]
    words = [str(mkfs), *command.split()[1:]]
    first = subprocess.run(words, capture_output=True, text=True, timeout=FORMAT_SECONDS)
    assert first.returncode == 0, first.stderr
    content = image.read_bytes()
    assert signature(content[: 2**20], content[-(2**20) :]) == "xfs"
    assert LABEL.encode() in content[108:120]
    assert subprocess.run(words, capture_output=True, timeout=FORMAT_SECONDS).returncode != 0
    assert image.read_bytes() == content
