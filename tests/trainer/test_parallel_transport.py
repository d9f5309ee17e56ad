"""EFA devices that are there and not used stop a training over several nodes."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from lustrain.problem import UserError
from tests.trainer.ranks import run_threads
from tests.trainer.tiny_runs import write_config
from trainer.config import load
from trainer.errors import EXIT_CONFIG
from trainer.metrics.terminal import event_line
from trainer.parallel import World
from trainer.parallel.transport import Transport, read_transport, require_efa
from trainer.parallel.votes import StoreVotes
from trainer.train import check_transport


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


@pytest.mark.parametrize("allowed", [False, True])
def test_start_names_the_devices_or_ends_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    """Rank 0 and rank 1 are on two hosts; the second one leaves its EFA devices closed."""
    answers = [{"host": "a", **USED}, {"host": "b", **UNUSED}]
    store, reader, lines = HashStore(), threading.local(), []  # type: HashStore, threading.local, list[str]
    config = load(write_config(tmp_path, 8, 1), [f"parallel.allow_sockets={str(allowed).lower()}"])
    monkeypatch.setattr("trainer.train.all_reduce_stats", lambda world, values: values)

    def start(rank: int) -> None:
        reader.rank = rank
        world = World(rank, 2, rank, torch.device("cpu"), store)
        check_transport(
            config, world, StoreVotes(store, 2), lambda kind, fields: lines.append(event_line(kind, fields))
        )

    monkeypatch.setattr("trainer.train.read_transport", lambda: SimpleNamespace(to_json=lambda: answers[reader.rank]))
    ends = run_threads(2, start)
    if allowed:
        assert ends == [None, None]
        (line,) = lines
        assert [name in line for name in ("transport", "efa0", "efa1")] == [True] * 3
    else:
        assert [end.exit_code for end in ends] == [EXIT_CONFIG] * 2
        assert [str(end).partition(" ")[0] for end in ends] == ["parallel.allow_sockets"] * 2
        assert lines == []
