"""States in host memory train, save and load as those on the device do; what a GPU makes of it needs a GPU to tell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.checkpoint.saving import Events, checkpointer, save_one
from tests.sharded import LlamaSource
from trainer.checkpoint.lineage.lease import committed
from trainer.checkpoint.load.parts import Places, read_manifest
from trainer.checkpoint.load.stored import StoredCheckpoint
from trainer.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from trainer.parallel.fsdp import Sharded, move_buffers, offload_policy
from trainer.parallel.mesh import ParallelDims
from trainer.parallel.shards import local_shard
from trainer.parallel.world import World, backends
from trainer.step import optim, precision
from trainer.storage.local import LocalStore
from trainer.tasks.models import llama

SHAPE = llama.LlamaShape(width=64, layers=2, heads=4, kv_heads=2, hidden=96, vocab_size=331, tied=False)
DIMS = ParallelDims(1, 1, 0)
OFFLOAD = ParallelConfig(offload="states")
CUDA = torch.device("cuda", 0)
STEPS = 5
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Source(LlamaSource):
    def initialise(self, model: nn.Module) -> None:
        assert isinstance(model, llama.Llama)
        model.initialise(1)


class Run:
    """One rank under FSDP2: its model, and the step that the trainer takes."""

    def __init__(self, config: ParallelConfig, mode: str, device: torch.device) -> None:
        self.device, self.precision = device, PrecisionConfig(mode=mode)  # type: ignore[arg-type]
        strategy, source = Sharded(config, self.precision, World(0, 1, 0, device, HashStore()), DIMS), Source(SHAPE, 32)
        self.model = strategy.wrap(strategy.build(source), source)
        self.optimizer = optim.make_optimizer(self.model, OptimizerConfig(lr=1e-3))
        self.scaler = precision.make_scaler(self.precision, device)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return optim.model_tensors(self.model) | optim.optimizer_tensors(self.model, self.optimizer)

    def train(self, steps: range) -> list[tuple[float, float]]:
        """Loss and gradient norm of each of these steps, with two micro-batches."""
        return [self._step(torch.Generator().manual_seed(step)) for step in steps]

    def _step(self, generator: torch.Generator) -> tuple[float, float]:
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for _ in range(2):
            tokens = torch.randint(SHAPE.vocab_size, (2, 33), generator=generator).to(self.device)
            with precision.autocast(self.precision, self.device):
                loss = self.model(tokens[:, :-1], tokens[:, 1:])
            self.scaler.scale(loss / 128).backward()
            total += float(loss) / 128
        self.scaler.unscale_(self.optimizer)
        norm = optim.clip_(list(self.model.parameters()), 0.5, scale=1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return total, norm


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    device = CUDA if request.param == "cuda" else torch.device("cpu")
    dist.init_process_group(backends(device, OFFLOAD), store=HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_offloaded_run_has_the_losses_of_one_on_the_device(device: torch.device, mode: str) -> None:
    """To the bit on a CPU, where both step alike; a GPU's AdamW rounds unlike its host's."""
    there, here = Run(ParallelConfig(), mode, device), Run(OFFLOAD, mode, device)
    assert {tensor.device.type for tensor in here.tensors.values()} == {"cpu"}
    assert {buffer.device.type for buffer in here.model.buffers()} == {device.type}
    expected, found = there.train(range(STEPS)), here.train(range(STEPS))
    assert expected[-1] != expected[0]
    if device.type == "cpu":
        assert found == expected
    else:
        for mine, others in zip(found, expected, strict=True):
            assert mine == pytest.approx(others, rel=1e-4 if mode == "fp32" else 2e-2)


@pytest.mark.slow
def test_offloaded_state_is_saved_and_goes_on_either_way(device: torch.device, tmp_path: Path) -> None:
    store, run = LocalStore(str(tmp_path / "run")), Run(OFFLOAD, "fp32", device)
    run.train(range(2))
    with checkpointer(store, Events(), mesh=DIMS.axes) as saver:
        assert save_one(saver, 2, run.tensors).committed
    expected = run.train(range(2, STEPS))
    for config in (OFFLOAD, ParallelConfig()):
        again = Run(config, "fp32", device)
        shards = {name: local_shard(name, tensor, DIMS.axes) for name, tensor in again.tensors.items()}
        StoredCheckpoint(Places(store), read_manifest(store, max(committed(store)))).fill_shards(shards)
        found = again.train(range(2, STEPS))
        if config is OFFLOAD or device.type == "cpu":
            assert found == expected
        else:
            assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-4)


def test_states_are_page_locked_for_a_gpu_alone() -> None:
    policies = [offload_policy(OFFLOAD, device) for device in (CUDA, torch.device("cpu"))]
    assert [isinstance(policy, CPUOffloadPolicy) and policy.pin_memory for policy in policies] == [True, False]
    assert not isinstance(offload_policy(ParallelConfig(), CUDA), CPUOffloadPolicy)


def test_host_tensors_of_gpu_ranks_have_a_backend_too() -> None:
    assert backends(CUDA, OFFLOAD) == "cpu:gloo,cuda:nccl"
    assert [backends(CUDA, ParallelConfig()), backends(torch.device("cpu"), OFFLOAD)] == ["nccl", "gloo"]


def test_buffers_move_alone_and_stay_out_of_the_state_dict() -> None:
    model = llama.build(SHAPE, length=8, seed=0)
    names = list(model.state_dict())
    move_buffers(model, torch.device("meta"))
    assert all(buffer.is_meta for buffer in model.buffers())
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert list(model.state_dict()) == names
