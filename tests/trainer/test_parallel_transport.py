"""EFA devices that are there and not used stop a training over several nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lustrain.problem import UserError
from trainer.errors import EXIT_CONFIG
from trainer.parallel.transport import Transport, read_transport, require_efa


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Two EFA devices, one of another maker, and a process that holds the second and a socket open."""
    for number, (name, vendor) in enumerate([("rdmap0s6", "0x1d0f"), ("rdmap1s6", "0x1d0f"), ("mlx5_0", "0x15b3")]):
        (tmp_path / "infiniband" / name / "device").mkdir(parents=True)
        (tmp_path / "infiniband" / name / "device" / "vendor").write_text(f"{vendor}\n")
        (tmp_path / "infiniband_verbs" / f"uverbs{number}").mkdir(parents=True)
        (tmp_path / "infiniband_verbs" / f"uverbs{number}" / "ibdev").write_text(f"{name}\n")
    (tmp_path / "infiniband_verbs" / "abi_version").write_text("6\n")
    (tmp_path / "fd").mkdir()
    (tmp_path / "fd" / "3").symlink_to("socket:[4711]")
    (tmp_path / "fd" / "4").symlink_to("/dev/infiniband/uverbs1")
    return tmp_path


def test_open_devices_are_read_from_the_kernel(node: Path) -> None:
    assert read_transport(node, node / "fd") == Transport(("rdmap0s6", "rdmap1s6"), ("rdmap1s6",))


def test_a_node_without_rdma_has_no_devices(tmp_path: Path) -> None:
    (tmp_path / "fd").mkdir()
    assert read_transport(tmp_path, tmp_path / "fd") == Transport((), ())


def test_efa_that_is_not_used_is_refused_unless_allowed() -> None:
    with pytest.raises(UserError, match=r"parallel\.allow_sockets") as refused:
        require_efa(Transport(("efa0",), ("mlx5_0",)), allow_sockets=False)
    assert refused.value.exit_code == EXIT_CONFIG
    require_efa(Transport(("efa0",), ()), allow_sockets=True)
    require_efa(Transport(("efa0", "efa1"), ("efa1",)), allow_sockets=False)
    require_efa(Transport((), ()), allow_sockets=False)
