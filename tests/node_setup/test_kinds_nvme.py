"""Local disks: the scheduler, and scratch on what is blank and on nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_setup.agent import owned
from node_setup.agent.facts.devices.blocks import collect, signature
from node_setup.agent.facts.scene import look
from node_setup.agent.facts.wanted import Wanted
from node_setup.agent.host import Host
from node_setup.agent.kinds.disks.scheduler import udev_rule
from node_setup.agent.kinds.disks.scratch import FORMAT_SECONDS, LABEL, mount_unit
from node_setup.agent.model import PERSISTED, RUNTIME, Put, Remark, Run, Step
from node_setup.agent.settings.catalog import wanted
from tests.conftest import require
from tests.node_setup.kinds_facts import SETTINGS, applied, array, commands, disk, machine, plan, remark, steps

PLACE = "/opt/dlami/nvme"
UNIT = "/etc/systemd/system/opt-dlami-nvme.mount"
ENABLED = {"opt-dlami-nvme.mount": {"load": "loaded", "active": "active", "enabled": "enabled"}}
OURS = {UNIT: {"content": mount_unit(PLACE), "mode": "0644"}}
TWO = ["nvme1n1", "nvme2n1"]
CREATE = "mdadm --create /dev/md/lustrain --level=0 --raid-devices=2 --name=lustrain --homehost=any"
DESTROYS = ("mkfs", "mdadm --create", "wipefs", "dd ", "parted", "blkdiscard")


def node(*blocks: dict[str, Any], files: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    facts = machine(blocks=list(blocks), **sections)
    facts["files"].update(files or {UNIT: None})
    return facts


def scratch(facts: dict[str, Any]) -> list[Step | Remark]:
    return plan("nvme.scratch", facts)


def test_only_instance_store_gets_the_scheduler_and_a_rule_for_disks_to_come() -> None:
    root = disk("nvme0n1", instance_store=False, root=True, scheduler="mq-deadline", blank=False)
    volume = disk("nvme3n1", instance_store=False, scheduler="mq-deadline")
    facts = node(root, volume, disk("nvme1n1", scheduler="mq-deadline"), disk("nvme2n1"))
    said = plan("nvme.scheduler", facts)
    assert [(step.part, step.target, step.found) for step in steps(said)] == [
        (RUNTIME, "/sys/block/nvme1n1/queue/scheduler", "mq-deadline"),
        (PERSISTED, owned.UDEV, "missing"),
    ]
    assert steps(said)[0].actions == (Put("/sys/block/nvme1n1/queue/scheduler", "none"),)
    again = remark(plan("nvme.scheduler", applied(facts, said)))
    assert (again.status, again.why) == ("ok", "on nvme1n1, nvme2n1, and on disks added later")


def test_an_instance_store_that_holds_the_root_is_left_alone() -> None:
    only = remark(plan("nvme.scheduler", node(disk("nvme0n1", root=True, scheduler="mq-deadline"))))
    assert only.status == "skipped"


@pytest.mark.parametrize(
    ("changed", "status", "why"),
    [
        ({"scheduler": None, "schedulers": []}, "unknown", "could not be read"),
        ({"scheduler": "bfq", "schedulers": ["bfq"]}, "skipped", "offers bfq only"),
    ],
)
def test_a_disk_that_cannot_have_it_says_so(changed: dict[str, Any], status: str, why: str) -> None:
    files = {owned.UDEV: {"content": udev_rule("none"), "mode": "0644"}}
    only = remark(plan("nvme.scheduler", node(disk("nvme1n1", **changed), files=files)))
    assert only.status == status
    assert why in only.why


def test_a_rule_of_another_scheduler_is_replaced() -> None:
    facts = node(disk("nvme1n1"), files={owned.UDEV: {"content": udev_rule("kyber"), "mode": "0644"}})
    assert [(step.part, step.found) for step in steps(plan("nvme.scheduler", facts))] == [(PERSISTED, "differs")]


def test_unread_disks_are_unknown() -> None:
    assert remark(plan("nvme.scheduler", machine(blocks=None))).status == "unknown"
    assert remark(scratch(machine(blocks=None))).status == "unknown"


def test_blank_disks_become_one_file_system() -> None:
    facts = node(*map(disk, TWO))
    said = scratch(facts)
    assert [step.part for step in steps(said)] == [PERSISTED, RUNTIME]
    assert commands(said) == [
        "systemctl daemon-reload",
        "systemctl enable opt-dlami-nvme.mount",
        f"{CREATE} /dev/nvme1n1 /dev/nvme2n1",
        "udevadm settle",
        "mkfs.xfs -K -L lustrain /dev/md/lustrain",
        "udevadm settle",
        "systemctl start opt-dlami-nvme.mount",
    ]
    assert remark(scratch(applied(facts, said))).status == "ok"


def test_one_blank_disk_needs_no_array() -> None:
    facts = node(disk("nvme1n1"))
    said = scratch(facts)
    assert "mkfs.xfs -K -L lustrain /dev/nvme1n1" in commands(said)
    assert not any("mdadm" in one for one in commands(said))
    assert remark(scratch(applied(facts, said))).status == "ok"


def test_nothing_forces_a_program_that_would_refuse() -> None:
    for facts in (node(disk("nvme1n1")), node(*map(disk, TWO))):
        words = [
            word
            for one in steps(scratch(facts))
            for action in one.actions
            if isinstance(action, Run)
            for word in action.command
        ]
        assert not {"-f", "--force", "--run", "-R", "--assume-clean", "--zero-superblock"} & set(words)


@pytest.mark.parametrize("names", [TWO, TWO[:1]])
@pytest.mark.parametrize("stop_after", range(9))
def test_a_run_that_was_cut_off_anywhere_is_finished_by_the_next(names: list[str], stop_after: int) -> None:
    facts = node(*map(disk, names))
    cut = applied(facts, scratch(facts), stop_after)
    said = scratch(cut)
    whole = applied(cut, said)
    assert remark(scratch(whole)).status == "ok"
    assert whole["mounts"][-1]["target"] == PLACE


def test_after_a_reboot_the_file_system_is_only_mounted() -> None:
    facts = node(*map(disk, TWO))
    after = applied(facts, scratch(facts))
    after["mounts"] = []
    after["arrays"][0]["mountpoints"] = []
    assert commands(scratch(after)) == ["systemctl start opt-dlami-nvme.mount"]


def test_after_a_reboot_an_array_that_nobody_assembled_is_assembled_and_its_data_is_there() -> None:
    members = [disk(name, fstype="linux_raid_member", blank=False) for name in TWO]
    kept = array("md127", TWO, fstype="xfs", blank=False, label=LABEL)
    facts = node(*members, files=OURS, services=ENABLED, array_on_disk=kept)
    said = scratch(facts)
    assert commands(said) == [
        "mdadm --assemble /dev/md/lustrain /dev/nvme1n1 /dev/nvme2n1",
        "udevadm settle",
        "systemctl start opt-dlami-nvme.mount",
    ]
    assert remark(scratch(applied(facts, said))).status == "ok"


def test_instance_store_that_comes_back_blank_after_a_stop_is_made_again() -> None:
    facts = node(*map(disk, TWO), files=OURS, services=ENABLED)
    said = scratch(facts)
    assert [step.part for step in steps(said)] == [RUNTIME]
    assert f"{CREATE} /dev/nvme1n1 /dev/nvme2n1" in commands(said)
    assert remark(scratch(applied(facts, said))).status == "ok"


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
def test_one_disk_that_is_not_blank_keeps_all_from_being_formatted(
    changed: dict[str, Any], status: str, why: str
) -> None:
    for files in ({UNIT: None}, OURS):
        only = remark(scratch(node(disk("nvme1n1"), disk("nvme2n1", **changed), files=files)))
        assert only.status == status
        assert why in only.why
        assert "nvme1n1 is blank" in only.why


def test_a_file_system_that_is_not_ours_is_not_even_mounted() -> None:
    only = remark(scratch(node(disk("nvme1n1", fstype="xfs", blank=False))))
    assert only.status == "conflict"


@pytest.mark.parametrize(
    "other", [array("md127", TWO, level="raid1"), array("md127", TWO[:1]), array("md127", [*TWO, "nvme9n1"])]
)
def test_an_array_that_is_not_over_exactly_these_disks_is_not_ours_to_format(other: dict[str, Any]) -> None:
    members = [disk(name, holders=["md127"], blank=False) for name in TWO]
    for files in ({UNIT: None}, OURS):
        only = remark(scratch(node(*members, files=files, arrays=[other])))
        assert only.status == "conflict"


def test_an_array_that_is_not_known_to_be_ours_is_not_assembled_nor_one_in_use() -> None:
    members = [disk(name, fstype="linux_raid_member", blank=False) for name in TWO]
    assert remark(scratch(node(*members))).status == "conflict"
    members[1]["holders"] = ["md5"]
    assert remark(scratch(node(*members, files=OURS))).status == "conflict"


def test_disks_that_look_free_under_an_array_with_data_are_not_blank() -> None:
    used = array("md127", TWO, fstype="ext4", blank=False)
    assert remark(scratch(node(*map(disk, TWO), arrays=[used]))).status == "conflict"


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


@pytest.mark.parametrize(
    ("service", "mounts", "status"),
    [
        ({"load": "loaded", "active": "active", "enabled": "enabled"}, [], "skipped"),
        ({"load": "loaded", "active": "activating", "enabled": "enabled"}, [], "skipped"),
        ({"load": "loaded", "active": "active", "enabled": "disabled"}, [], "skipped"),
        ({"load": "loaded", "active": "failed", "enabled": "enabled"}, [], "failed"),
        ({"load": "loaded", "active": "failed", "enabled": "enabled"}, [{"target": PLACE}], "skipped"),
    ],
)
def test_where_the_image_does_it_we_do_not(service: dict[str, str], mounts: list[Any], status: str) -> None:
    facts = node(*map(disk, TWO), services={"dlami-nvme.service": service}, mounts=mounts)
    assert remark(scratch(facts)).status == status


@pytest.mark.parametrize("service", [{}, {"load": "masked", "active": "inactive", "enabled": "masked"}])
def test_an_image_that_does_not_do_it_leaves_it_to_us(service: dict[str, str]) -> None:
    assert commands(scratch(node(*map(disk, TWO), services={"dlami-nvme.service": service})))


def test_what_somebody_else_mounted_there_stays() -> None:
    mount = {"source": "/dev/mapper/vg.01-lv_ephemeral", "target": PLACE, "fstype": "ext4", "options": ["rw"]}
    only = remark(scratch(node(disk("nvme1n1", holders=["dm-0"], blank=False), mounts=[mount])))
    assert only.status == "skipped"
    assert "vg.01-lv_ephemeral" in only.why


def test_without_disks_or_systemd_or_knowledge_nothing_is_done() -> None:
    assert remark(scratch(node(disk("nvme0n1", instance_store=False)))).status == "skipped"
    assert remark(scratch(node(disk("nvme1n1"), init="other"))).status == "skipped"
    assert remark(scratch(node(disk("nvme1n1"), init=None))).status == "unknown"
    assert remark(scratch(machine(blocks=[disk("nvme1n1")]))).status == "unknown"


def test_the_catalogue_has_read_what_scratch_looks_at() -> None:
    asked = wanted(SETTINGS.values(), {})
    assert UNIT in asked.mount_units
    assert {"dlami-nvme.service", "opt-dlami-nvme.mount"} <= set(asked.services)


@pytest.mark.parametrize(
    ("content", "fstype", "blank"), [(b"", None, True), (b"XFSB", "xfs", False), (None, None, None)]
)
def test_facts_tell_what_lies_on_an_array(
    tmp_path: Path, content: bytes | None, fstype: str | None, blank: bool | None
) -> None:
    block = tmp_path / "sys/block/md127"
    for member in TWO:
        (block / "slaves" / member).mkdir(parents=True)
    (block / "md").mkdir()
    (block / "md/level").write_text("raid0\n")
    (block / "size").write_text("8192\n")
    if content is not None:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/md127").write_bytes(content.ljust(8192 * 512, b"\0"))
    [found] = collect(look(Host(str(tmp_path)), Wanted()))["arrays"]
    assert found == array("md127", TWO, fstype=fstype, blank=blank)


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    require(shutil.which("systemd-analyze") is not None, "no systemd-analyze")
    path = tmp_path / "opt-dlami-nvme.mount"
    path.write_text(mount_unit(PLACE))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True, timeout=300)
    assert done.stderr == ""


@pytest.mark.slow
def test_the_real_mkfs_takes_a_blank_image_once_and_refuses_it_then(tmp_path: Path) -> None:
    mkfs = shutil.which("mkfs.xfs", path="/usr/sbin:/sbin:/usr/bin:/bin")
    require(mkfs is not None, "no mkfs.xfs")
    image = tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(512 * 2**20)
    facts = node(disk("nvme1n1", path=str(image)))
    [command] = [one for one in commands(scratch(facts)) if one.startswith("mkfs.xfs")]
    words = [str(mkfs), *command.split()[1:]]
    first = subprocess.run(words, capture_output=True, text=True, timeout=FORMAT_SECONDS)
    assert first.returncode == 0, first.stderr
    head, tail = _ends(image)
    assert signature(head, tail) == "xfs"
    assert LABEL.encode() in head[108:120]
    second = subprocess.run(words, capture_output=True, text=True, timeout=FORMAT_SECONDS)
    assert second.returncode != 0
    assert _ends(image) == (head, tail)


def _ends(image: Path) -> tuple[bytes, bytes]:
    content = image.read_bytes()
    return content[: 2**20], content[-(2**20) :]
