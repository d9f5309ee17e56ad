"""Promises to users of torch.distributed.checkpoint: their own state dicts fill with verified bytes, however sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lustrain.problem import UserError
from tests.checkpoint.written import assert_same, flip_bit, put_lease, sample_state, split_state, write_checkpoint
from tests.fork_server import ForkServer
from trainer.checkpoint.dcp_reader import LustrainReader
from trainer.checkpoint.format.layout import ManifestId
from trainer.storage.local import LocalStore

ROWS = 997


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(str(tmp_path / "run"))
    put_lease(store, 1, (1, None))
    for step in (10, 20):
        write_checkpoint(store, step, split_state(sample_state(step, ROWS), 3), nonce=f"{step:08x}")
    return store


def model_of(step: int) -> dict[str, torch.Tensor]:
    state = sample_state(step, ROWS)
    return {name.removeprefix("model/"): tensor for name, tensor in state.items() if name.startswith("model/")}


@pytest.mark.parametrize(("step", "found"), [(None, 20), (10, 10)])
def test_plain_tensors_are_filled_from_the_chosen_checkpoint(store: LocalStore, step: int | None, found: int) -> None:
    state = {name: torch.zeros_like(tensor) for name, tensor in sample_state(0, ROWS).items()}
    dcp.load(state, storage_reader=LustrainReader(store.uri, step=step), no_dist=True)
    assert_same(state, sample_state(found, ROWS))


def test_with_a_prefix_a_models_own_state_dict_is_enough(store: LocalStore) -> None:
    state = {name: torch.zeros_like(tensor) for name, tensor in model_of(0).items()}
    dcp.load(state, storage_reader=LustrainReader(store, prefix="model/"), no_dist=True)
    assert_same(state, model_of(20))
    with pytest.raises(CheckpointException, match="optim/step"):
        dcp.load({"optim/step": torch.zeros(())}, storage_reader=LustrainReader(store, prefix="model/"), no_dist=True)


class RowsPlanner(DefaultLoadPlanner):
    """Fills a tensor of its own for each first row of the regions that a rank holds."""

    def __init__(self, targets: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.targets[read_item.storage_offsets[0]]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: a target is filled in place."""


def test_rank_that_holds_several_regions_of_a_tensor_gets_each(store: LocalStore) -> None:
    name, expected = "embed.weight", model_of(20)["embed.weight"]
    targets = {first: torch.zeros(7, 33) for first in (0, 500, 990)}
    reader = LustrainReader(store, prefix="model/")
    held = [ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([7, 33])) for first in targets]
    items = create_read_items_for_chunk_list(name, reader.read_metadata().state_dict_metadata[name], held)
    reader.read_data(LoadPlan(items), RowsPlanner(targets)).wait()
    assert_same(
        {str(first): target for first, target in targets.items()},
        {str(first): expected[first : first + 7] for first in targets},
    )


def test_checkpoint_id_names_another_run(store: LocalStore, tmp_path: Path) -> None:
    other = LocalStore(str(tmp_path / "other"))
    put_lease(other, 1, (1, None))
    write_checkpoint(other, 30, split_state(sample_state(30, ROWS), 2))
    state = {"optim/step": torch.zeros(())}
    dcp.load(state, storage_reader=LustrainReader(store), checkpoint_id=other.uri, no_dist=True)
    assert state["optim/step"].item() == 30


def test_a_flipped_bit_never_reaches_a_tensor(store: LocalStore) -> None:
    flip_bit(store, f"attempts/000001-0000000020-{20:08x}/rank-00001.bin", 77)
    state = {name: torch.zeros_like(tensor) for name, tensor in model_of(0).items()}
    with pytest.raises(CheckpointException, match=r"rank 1, .*block 0: checksum"):
        dcp.load(state, storage_reader=LustrainReader(store, prefix="model/"), no_dist=True)


def test_missing_step_and_a_place_without_a_run_are_lines(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--step = 15: .*allowed: 20, 10"):
        LustrainReader(store, step=15)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no run: there is no lease\.json"):
        LustrainReader(str(tmp_path / "empty"))


def test_ranks_with_different_newest_checkpoints_do_not_mix_them(store: LocalStore) -> None:
    early, late = LustrainReader(store, step=10), LustrainReader(store, step=20)
    plans = [reader.prepare_local_plan(LoadPlan([])) for reader in (early, late)]
    assert plans[0].storage_data == ManifestId(1, 10)
    with pytest.raises(UserError, match="different newest checkpoints"):
        late.prepare_global_plan(plans)


def _load_sharded(rank: int, world: int, uri: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    expected = model_of(20)
    placements: dict[str, Any] = {"embed.weight": Shard(0), "mask": Shard(1), "norm.weight": Replicate()}
    state = {
        name: distribute_tensor(torch.zeros_like(expected[name]), mesh, [placement])
        for name, placement in placements.items()
    }
    dcp.load(state, storage_reader=LustrainReader(uri, prefix="model/"))
    for name, tensor in state.items():
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.full_tensor(), expected[name]), name
    dist.barrier()


@pytest.mark.slow
def test_sharded_tensors_of_two_ranks_load_parts_of_three(
    fork_server: ForkServer, store: LocalStore, tmp_path: Path
) -> None:
    fork_server.call(_load_sharded, 2, 2, store.uri, str(tmp_path))
