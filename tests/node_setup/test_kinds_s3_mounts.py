"""A bucket that left the cluster is unmounted on running nodes, never while somebody uses it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from infra.config import S3Mount
from infra.plan.storage.s3_mounts import unit, unit_name
from node_setup.agent.host import Done
from node_setup.agent.model import EXIT_FAILED, EXIT_IN_SYNC, Request
from node_setup.agent.run.tune import tune
from node_setup.agent.wire.identity import Identity
from tests.node_setup.agents import BareHost, silent

POINT, SETTING = "/s3/out-put", "s3.removed-mounts"
UNIT = f"etc/systemd/system/{unit_name(POINT)}"
BUSY = Done(32, "", f"umount: {POINT}: target is busy.")


class Node(BareHost):
    """It has one bucket mounted, by the unit that a boot leaves."""

    def __init__(self, root: Path, unmounted: Done) -> None:
        super().__init__(root)
        self._unmounted = unmounted
        mount = S3Mount(bucket="theirs", prefix="out", path=POINT)
        for path, text in {
            UNIT: unit(mount, "us-east-1", "proxy.env"),
            "proc/mounts": f"mountpoint-s3 {POINT} fuse ro 0 0\n",
        }.items():
            (root / path).parent.mkdir(parents=True)
            (root / path).write_text(text)

    def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
        self.ran.append(tuple(command))
        if command[0] == "umount" and self._unmounted.ok:
            (self.root / "proc/mounts").write_text("")
        return self._unmounted if command[0] == "umount" else Done(0, "", "")


@pytest.mark.parametrize(
    ("document", "unmounted", "code", "stays"),
    [
        ({"backend": "ec2"}, Done(0, "", ""), EXIT_IN_SYNC, False),
        ({"backend": "ec2"}, BUSY, EXIT_FAILED, True),
        ({"backend": "ec2", "s3_mounts": [POINT]}, Done(0, "", ""), EXIT_IN_SYNC, True),
        ({"backend": "machines"}, Done(0, "", ""), EXIT_IN_SYNC, True),
    ],
)
def test_removed_mount_ends_unless_it_is_in_use(
    tmp_path: Path, document: dict[str, object], unmounted: Done, code: int, stays: bool
) -> None:
    node = Node(tmp_path, unmounted)
    result, status = tune(node, Request(document=document, only=(SETTING,), force=True), Identity(), 0, silent)
    assert (status, (tmp_path / UNIT).exists()) == (code, stays)
    if code == EXIT_FAILED:
        assert "target is busy" in str(result["rows"])
    asked = [command for command in node.ran if command[0] in ("umount", "systemctl") and "show" not in command]
    assert not any("stop" in command or "--now" in command for command in asked), "it would end the client of others"
    assert (("systemctl", "disable", unit_name(POINT)) in asked) != stays


def test_unit_without_a_mount_is_removed_and_not_stopped(tmp_path: Path) -> None:
    """A container may still have the mount, and its client."""
    node = Node(tmp_path, BUSY)
    (tmp_path / "proc/mounts").write_text("")
    request = Request(document={"backend": "ec2"}, only=(SETTING,), force=True)
    assert tune(node, request, Identity(), 0, silent)[1] == EXIT_IN_SYNC
    assert ("systemctl", "stop", unit_name(POINT)) not in node.ran
    assert not (tmp_path / UNIT).exists()


def test_other_file_system_at_the_mount_point_stays(tmp_path: Path) -> None:
    node = Node(tmp_path, Done(0, "", ""))
    with (tmp_path / "proc/mounts").open("a") as mounts:
        mounts.write(f"10.0.0.7:/theirs {POINT} nfs4 rw 0 0\n")
    request = Request(document={"backend": "ec2"}, only=(SETTING,), force=True)
    result, _ = tune(node, request, Identity(), 0, silent)
    assert [row["status"] for row in result["rows"]] == ["conflict"]
    assert not [command for command in node.ran if command[0] == "umount"]
    assert (tmp_path / UNIT).exists()
