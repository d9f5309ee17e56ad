"""Memory that cannot be had is one line with the figures before it is asked for."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lustrain.problem import UserError
from tests.sharded import LlamaSource, first_of
from tests.trainer.token_sets import write_token_set
from trainer.__main__ import main
from trainer.config import Config, ParallelConfig, PrecisionConfig, TaskConfig
from trainer.memory import Memory, available_memory, host_memory
from trainer.parallel import World
from trainer.parallel.fsdp import Sharded
from trainer.parallel.mesh import ParallelDims
from trainer.parallel.shards import local_chunk
from trainer.run import footprint
from trainer.run.footprint import NoMemoryError, check_memory, report_lack_of_memory
from trainer.tasks import Footprint, make_task
from trainer.tasks.models import llama, patchnet

GB = 10**9
CPU = World(0, 1, 0, torch.device("cpu"), HashStore())
EIGHT_B = replace(llama.PRESETS["8b"], vocab_size=128_256)
SEVENTY_B = replace(EIGHT_B, width=8192, layers=80, heads=64, hidden=28_672)
"""https://huggingface.co/meta-llama/Meta-Llama-3-70B/blob/main/config.json"""
CONFIG = Config.model_validate(
    {
        "run": {"uri": "run"},
        "task": {"name": "language_model"},
        "train": {"steps": 1, "global_batch": 128, "micro_batch": 8},
    }
)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@settings(max_examples=15, deadline=None)
@given(
    heads=st.integers(1, 3),
    groups=st.integers(1, 2),
    layers=st.integers(1, 3),
    hidden=st.integers(1, 9),
    vocab=st.integers(1, 9),
    tied=st.booleans(),
)
def test_a_decoders_parameters_are_counted_without_making_it(
    heads: int, groups: int, layers: int, hidden: int, vocab: int, tied: bool
) -> None:
    shape = llama.LlamaShape(heads * groups * 4, layers, heads * groups, heads, hidden, vocab, tied)
    assert llama.parameters(shape) == count(llama.Llama(shape, length=4))


@settings(max_examples=15, deadline=None)
@given(patch=st.sampled_from([1, 4]), width=st.integers(1, 9), layers=st.integers(0, 3), kernel=st.sampled_from([1, 5]))
def test_a_classifiers_parameters_are_counted_before_it_is(patch: int, width: int, layers: int, kernel: int) -> None:
    shape = patchnet.PatchNetShape(8, patch, width, layers, kernel, 7)
    assert patchnet.parameters(shape) == count(patchnet.PatchNet(shape))


@pytest.mark.parametrize(
    ("need", "ranks", "code", "says"),
    [
        (Footprint(10**9, 4 * GB, "task.model"), 1, None, ""),
        (Footprint(10**9, 2 * GB, "task.model"), 2, 2, "train.micro_batch = 8: model and micro-batch take at least 36 GB"),
        (Footprint(10**9, 8 * GB, "task.model"), 1, 1, "train.micro_batch = 8: model and micro-batch take at least 24 GB"),
        (Footprint(10**12, GB, "task.model"), 1, 2, "task.model (parameters) = 1000000000000: the model takes at least 16 TB"),
        (None, 99, None, ""),
    ],
)  # fmt: skip
def test_what_never_fits_is_mistake_what_does_not_now_a_failure(
    monkeypatch: pytest.MonkeyPatch, need: Footprint | None, ranks: int, code: int | None, says: str
) -> None:
    monkeypatch.setattr(footprint, "host_memory", lambda: Memory("this machine", 32 * GB, 20 * GB))
    if code is None:
        check_memory(CONFIG, need, replace(CPU, world_size=ranks), {"LOCAL_WORLD_SIZE": str(ranks)})
        return
    with pytest.raises(UserError) as caught:
        check_memory(CONFIG, need, replace(CPU, world_size=ranks), {"LOCAL_WORLD_SIZE": str(ranks)})
    (line,) = caught.value.problems
    assert line.startswith(says)
    assert "this machine has 32 GB, of which 20 GB are free" in line
    assert caught.value.exit_code == code


def test_gpu_holds_the_training_and_the_host_each_ranks_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "host_memory", lambda: Memory("this machine", 32 * GB, 32 * GB))
    monkeypatch.setattr(footprint, "gpu_memory", lambda device: Memory("GPU 0", 80 * GB, 80 * GB))
    world = World(0, 8, 0, torch.device("cuda", 0), HashStore())
    check_memory(CONFIG, Footprint(10**9, 60 * GB, "task.model"), world, {"LOCAL_WORLD_SIZE": "8"})
    with pytest.raises(UserError, match=r"^train\.micro_batch = 8: .* GPU 0 has 80 GB.*allowed: <= 7;"):
        check_memory(CONFIG, Footprint(10**9, 72 * GB, "task.model"), world, {"LOCAL_WORLD_SIZE": "8"})
    with pytest.raises(UserError, match=r"at least 64 GB for 8 ranks, this machine has 32 GB"):
        check_memory(CONFIG, Footprint(2 * 10**9, GB, "task.model"), world, {"LOCAL_WORLD_SIZE": "8"})


@pytest.mark.parametrize(
    ("parallel", "whole", "path"),
    [
        ({"shard": 8}, False, None),
        ({"shard": 0}, False, None),
        ({"shard": 8}, True, "task.model (parameters)"),
        ({"shard": 4}, False, "train.micro_batch"),
        ({"shard": 4, "tensor": 2}, False, None),
        ({"shard": 2, "tensor": 2}, False, None),
        ({"shard": 2, "tensor": 4}, True, "task.model (parameters)"),
        ({"tensor": 2}, False, "train.micro_batch"),
        ({}, False, "task.model (parameters)"),
    ],
    ids=str,
)
def test_shards_divide_what_a_rank_holds(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, object], whole: bool, path: str | None
) -> None:
    monkeypatch.setattr(footprint, "host_memory", lambda: Memory("this machine", 32 * GB, 32 * GB))
    monkeypatch.setattr(footprint, "gpu_memory", lambda device: Memory("GPU 0", 80 * GB, 80 * GB))
    world, eight = World(0, 8, 0, torch.device("cuda", 0), HashStore()), Footprint(8 * 10**9, 60 * GB, "task.model")
    config = CONFIG.model_copy(update={"parallel": ParallelConfig.model_validate(parallel)})
    with pytest.raises(UserError) if path else nullcontext() as refused:
        check_memory(config, eight, world, {"LOCAL_WORLD_SIZE": "8"}, built_whole=whole)
    assert path is None or [line.path for line in refused.value.problems] == [path]


@pytest.mark.parametrize(
    ("batch", "parallel", "fits"), [(64, {"shard": 8}, True), (72, {"shard": 8}, False), (64, {}, False)], ids=str
)
def test_gradients_wait_for_a_second_micro_batch(
    monkeypatch: pytest.MonkeyPatch, batch: int, parallel: dict[str, object], fits: bool
) -> None:
    """With one micro-batch for each of 8 ranks, no gradient is there yet beside its activations, except in DDP's buckets."""
    monkeypatch.setattr(footprint, "host_memory", lambda: None)
    monkeypatch.setattr(footprint, "gpu_memory", lambda device: Memory("GPU 0", 80 * GB, 80 * GB))
    world, held = World(0, 8, 0, torch.device("cuda", 0), HashStore()), 80 * GB * (8 if parallel else 1)
    train = CONFIG.train.model_copy(update={"global_batch": batch})
    config = CONFIG.model_copy(update={"train": train, "parallel": ParallelConfig.model_validate(parallel)})
    need = Footprint(held // 32, 45 * GB, "task.model")
    with nullcontext() if fits else pytest.raises(UserError):
        check_memory(config, need, world, {}, built_whole=False)


@pytest.mark.parametrize(
    ("host", "gpu", "path"),
    [(33, 61, None), (31, 61, "task.model (parameters)"), (33, 59, "train.micro_batch")],
)
def test_offloaded_states_have_to_fit_into_host_memory(
    monkeypatch: pytest.MonkeyPatch, host: int, gpu: int, path: str | None
) -> None:
    """Eight ranks on a node hold 32 GB of states together, and each its activations alone on its GPU."""
    monkeypatch.setattr(footprint, "host_memory", lambda: Memory("this machine", host * GB, host * GB))
    monkeypatch.setattr(footprint, "gpu_memory", lambda device: Memory("GPU 0", gpu * GB, gpu * GB))
    config = CONFIG.model_copy(update={"parallel": ParallelConfig(shard=8, offload="states")})
    world = World(0, 8, 0, torch.device("cuda", 0), HashStore())
    with pytest.raises(UserError) if path else nullcontext() as refused:
        check_memory(
            config, Footprint(2 * GB, 60 * GB, "task.model"), world, {"LOCAL_WORLD_SIZE": "8"}, built_whole=False
        )
    assert path is None or [line.path for line in refused.value.problems] == [path]


@pytest.mark.parametrize(("chunk", "fits"), [(4096, True), (0, False)])
def test_8b_on_40_gb_is_refused_without_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, fits: bool
) -> None:
    """The mesh of docs/train.md: 32,768 tokens, which are 1,024 samples here."""
    data = write_token_set(tmp_path / "set", {"train": b"the quick brown fox jumps over the lazy dog. "})
    model = {"preset": "8b", "vocab_size": EIGHT_B.vocab_size}
    given = {"name": "language_model", "data": str(data), "seq_len": 32, "loss_chunk": chunk, "model": model}
    task = make_task(TaskConfig.model_validate(given), seed=1)
    task.open(tmp_path / "cache")
    monkeypatch.setattr(footprint, "host_memory", lambda: None)
    monkeypatch.setattr(footprint, "gpu_memory", lambda device: Memory("GPU 0", 40 * GB, 40 * GB))
    config = CONFIG.model_copy(update={"parallel": ParallelConfig(shard=4, tensor=2)})
    world = World(0, 8, 0, torch.device("cuda", 0), HashStore())
    with nullcontext() if fits else pytest.raises(UserError, match=r"task\.loss_chunk"):
        check_memory(config, task.footprint(1024), world, {}, built_whole=False)


def bytes_of_weights(shape: llama.LlamaShape, shard: int, tensor: int) -> int:
    """What torch allocates for the weights of one rank."""
    source, ranks = LlamaSource(shape), shard * tensor
    with first_of(ranks):
        world = World(0, ranks, 0, torch.device("cpu"), HashStore())
        strategy = Sharded(ParallelConfig(), PrecisionConfig(), world, ParallelDims(1, shard, 0, tensor))
        weights = strategy.wrap(strategy.build(source), source).state_dict().items()
        return sum(local_chunk(name, weight)[0].untyped_storage().nbytes() for name, weight in weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "shard", "tensor"),
    [(EIGHT_B, 4, 2), (SEVENTY_B, 8, 8)],
    ids=["8b, 4 x 2", "70B, 8 x 8"],
)
def test_allocated_weights_are_a_quarter_of_counted_bytes(
    monkeypatch: pytest.MonkeyPatch, shape: llama.LlamaShape, shard: int, tensor: int
) -> None:
    weights = bytes_of_weights(shape, shard, tensor)
    config = CONFIG.model_copy(update={"parallel": ParallelConfig(shard=shard, tensor=tensor)})
    world = World(0, shard * tensor, 0, torch.device("cuda", 0), HashStore())
    monkeypatch.setattr(footprint, "host_memory", lambda: None)
    for factor, refused in ((0.99, True), (1.01, False)):
        room = Memory("GPU 0", int(4 * weights * factor), int(4 * weights * factor))
        monkeypatch.setattr(footprint, "gpu_memory", lambda device, room=room: room)
        with pytest.raises(UserError) if refused else nullcontext():
            check_memory(config, Footprint(llama.parameters(shape), 0, "task.model"), world, {}, built_whole=False)


def test_the_lowest_limit_from_the_own_group_up_counts_with_swap(tmp_path: Path) -> None:
    meminfo, own, groups = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups"
    meminfo.write_text("MemTotal: 1000 kB\nSwapTotal: 24 kB\nSwapFree: 0 kB\nHugePages_Total: 0\n")

    def total() -> int:
        found = host_memory(meminfo, own, groups)
        assert found is not None
        return found.total

    assert total() == 1024 * 1024
    job = groups / "system.slice" / "job_7"
    (job / "step_0").mkdir(parents=True)
    limits = {groups: "1000000", job: "4096", job / "step_0": "max"}
    for folder, limit in limits.items():
        (folder / "memory.max").write_text(f"{limit}\n")
    for path, expected in (
        ("/", 1_000_000),
        ("/system.slice/job_7/step_0", 4096),
        ("/system.slice/job_8", 1_000_000),
        ("/../../elsewhere", 1_000_000),
    ):
        own.write_text(f"4:memory:/old\n0::{path}\n")
        assert total() == expected
    own.write_text("0::/system.slice/job_7/step_0\n")
    (job / "memory.current").write_text("4000\n")
    (job / "memory.stat").write_text("anon 2000\ninactive_file 904\n")
    assert available_memory(meminfo, own, groups) == 1000
    meminfo.write_text("MemAvailable: 0 kB\n")
    assert available_memory(meminfo, own, groups) == 0
    assert host_memory(tmp_path / "elsewhere", own, groups) is None


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_NTASKS_PER_NODE": "8"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NTASKS_PER_NODE": "1"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "999"}, 16),
        ({}, 1),
    ],
)
def test_the_ranks_that_share_a_node_are_counted_under_srun_too(environ: dict[str, str], ranks: int) -> None:
    assert footprint.ranks_here(16, environ) == ranks


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    data = write_token_set(tmp_path / "set", {"train": b"the quick brown fox jumps over the lazy dog. " * 40})
    monkeypatch.setenv("LUSTRAIN_CACHE", str(tmp_path / "cache"))
    text = f'[run]\nuri = "{tmp_path}/run"\n[task]\nname = "language_model"\ndata = "{data}"\nseq_len = 32\n'
    (tmp_path / "config.toml").write_text(text + "[train]\nsteps = 1\nglobal_batch = 16777216\nmicro_batch = 1\n")
    return ["train", str(tmp_path / "config.toml"), "--set", "parallel.device=cpu"]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("task.model={width = 131072, layers = 4096}", "task.model (parameters) = "),
        ("task.model.vocab_size=2147483648", "task.model (parameters) = "),
        ("train.micro_batch=16777216", "train.micro_batch = 16777216: model and micro-batch take at least "),
    ],
)
def test_a_training_larger_than_the_machine_is_refused_at_once(
    config: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, says: str
) -> None:
    assert main([*config, "--set", setting]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(says)
    assert not (tmp_path / "run" / "lease.json").exists()


@pytest.mark.parametrize("ask", [lambda: bytearray(2**62), lambda: torch.empty(2**50)])
def test_an_allocation_that_fails_later_is_one_line_too(ask: Any) -> None:
    with pytest.raises(NoMemoryError, match=r"^memory ran out"), report_lack_of_memory():
        ask()
    with pytest.raises(RuntimeError, match="other"), report_lack_of_memory():
        raise RuntimeError("other")


def test_a_limit_of_control_groups_of_version_1_counts(tmp_path: Path) -> None:
    meminfo, own, groups = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups"
    meminfo.write_text("MemTotal: 1000 kB\n")
    own.write_bytes(b"5:cpu,memory:/slurm/job_7/step_0\n1:name=systemd:/\xff\n")
    job = groups / "memory" / "slurm" / "job_7"
    job.mkdir(parents=True)
    (groups / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (job / "memory.limit_in_bytes").write_text("4096\n")
    found = host_memory(meminfo, own, groups)
    assert found is not None
    assert found.total == 4096
    (job / "memory.usage_in_bytes").write_text("4000\n")
    (job / "memory.stat").write_text("inactive_file 4\ntotal_inactive_file 904\n")
    assert available_memory(meminfo, own, groups) == 1000


def test_available_memory_is_no_more_than_the_machine_has() -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = available_memory()
    assert free is not None
    assert 0 < free <= machine
