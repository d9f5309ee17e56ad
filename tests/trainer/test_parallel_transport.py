"""EFA devices that are there and not used stop a training over several nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


UNUSED, USED = {"efa": ["efa0"], "opened": ["mlx5_0"]}, {"efa": ["efa0", "efa1"], "opened": ["efa1"]}


def test_hosts_that_do_not_use_their_efa_are_named() -> None:
    answers = {
        0: {"host": "a", **USED},
        1: {"host": "c", **UNUSED},
        2: {"host": "b", **UNUSED},
        3: {"host": "b", **UNUSED},
    }
    with pytest.raises(UserError, match=r"parallel\.allow_sockets.* of b and 1 more,") as refused:
        require_efa(answers, allow_sockets=False)
    assert refused.value.exit_code == EXIT_CONFIG
    assert require_efa(answers, allow_sockets=True) == answers[0]


@pytest.mark.parametrize(
    ("hosts", "has"), [("aa", UNUSED), ("ab", USED), ("ab", {"efa": [], "opened": []})], ids=["one", "used", "none"]
)
def test_one_host_or_efa_in_use_is_not_refused(hosts: str, has: dict[str, Any]) -> None:
    require_efa({rank: {"host": host, **has} for rank, host in enumerate(hosts)}, allow_sockets=False)
