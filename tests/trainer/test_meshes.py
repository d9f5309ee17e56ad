"""The scene of meshes: each trains as one rank does, goes on after kills to the bit, and goes on from every other.

Without tensor ranks the runs have dropout and an output layer of their own; with tensor ranks, which refuse dropout, tied ones
and in one run an output layer of its own.
"""

from __future__ import annotations

import signal
from itertools import pairwise, permutations

import pytest

from tests.fork_server import ForkServer
from tests.trainer.meshes import MESHES, MeshRuns, assert_losses_of_one_rank, equal
from trainer.metrics.reader import read_events
from trainer.metrics.timeline import ROLLED_BACK
from trainer.storage import open_store

SPLIT = [mesh for mesh, (_, _, tensor) in MESHES.items() if tensor > 1]
WHOLE = [mesh for mesh in MESHES if mesh not in SPLIT]
KINDS = {
    "whole": {"tied": False, "dropout": 0.1},
    "split": {"tied": True, "dropout": 0.0, "micro_batch": 2},
    "untied": {"tied": False, "dropout": 0.0, "micro_batch": 2},
}
RUNS = [*(("whole", mesh) for mesh in WHOLE), *(("split", mesh) for mesh in MESHES), ("untied", "fsdp2xtp2")]
RESUMED = [*(("whole", mesh) for mesh in WHOLE), *(("split", mesh) for mesh in SPLIT if MESHES[mesh][0] <= 6)]
PAIRS = [
    *(("whole", *pair) for pair in permutations(WHOLE, 2)),
    *(("split", *pair) for pair in pairwise(["tp2", "fsdp2xtp2", "fsdp3xtp2", "tp2"])),
    *(("split", *pair) for pair in zip(["fsdp3", "ddp2", "hsdp2x2"], ["tp2", "fsdp2xtp2", "fsdp3xtp2"], strict=True)),
    *(("split", *pair) for pair in zip(["tp2", "fsdp2xtp2", "fsdp3xtp2"], ["fsdp3", "hsdp2x2", "one"], strict=True)),
    ("split", "fsdp3xtp2", "ddp2xtp2"),
    ("split", "ddp2xtp2", "fsdp3xtp2"),
]
"""With tensor ranks each way to cut, to and from another; `tests/checkpoint/test_read_layout.py` has all pairs, to the bit."""


@pytest.fixture(scope="module")
def kinds(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, MeshRuns]:
    return {kind: MeshRuns(fork_server, tmp_path_factory.mktemp(kind), **has) for kind, has in KINDS.items()}


@pytest.mark.parametrize(("kind", "mesh"), RUNS)
def test_losses_are_those_of_one_rank(kinds: dict[str, MeshRuns], kind: str, mesh: str) -> None:
    runs = kinds[kind]
    runs.once("one", "one")
    runs.once(mesh, mesh)
    assert_losses_of_one_rank(runs.steps(mesh), runs.steps("one"))


@pytest.mark.parametrize("mesh", ["ddp2", "fsdp2", "fsdp3", "hsdp2x2", "tp2", "fsdp2xtp2", "fsdp3xtp2"])
def test_hundred_steps_have_losses_of_one_rank(kinds: dict[str, MeshRuns], mesh: str) -> None:
    """At this rate a difference of rounding stays one; at the other runs' 0.02 it grows to 1e-4 in 100 steps."""
    runs = kinds["split"]
    for run in ("one", mesh):
        runs.once(
            f"{run}-100",
            run,
            "task.model.layers=1",
            "train.steps=100",
            "schedule.total_steps=100",
            "eval.every=25",
            "checkpoint.every_steps=50",
            "optimizer.lr=0.003",
            # Each rank adds up two or more; a pass through layers that are split takes the same time for twice the samples.
            f"train.micro_batch={3 if mesh in SPLIT else 2}",
        )
    assert_losses_of_one_rank(runs.steps(f"{mesh}-100"), runs.steps("one-100"))


@pytest.mark.parametrize(("kind", "mesh"), RESUMED)
def test_run_that_is_killed_ends_with_the_same_bits(kinds: dict[str, MeshRuns], kind: str, mesh: str) -> None:
    runs, killed = kinds[kind], f"{mesh}-killed"
    job = runs.server.start(
        runs.words(killed, mesh, "train.steps=1000000", "checkpoint.every_steps=2"), MESHES[mesh][0]
    )
    job.wait_for("checkpoint committed")
    job.send(signal.SIGKILL)
    job.wait()
    assert 0 not in job.codes()
    steps = max(4, len(runs.steps(killed)))
    whole = f"{mesh}-{steps}"
    runs.train(whole, mesh, f"train.steps={steps + 2}")
    runs.train(killed, mesh, f"train.steps={steps + 2}")
    assert runs.steps(killed) == runs.steps(whole)
    assert equal(runs.tensors(killed), runs.tensors(whole))


@pytest.mark.parametrize(("kind", "saved", "resumed"), PAIRS)
def test_any_mesh_goes_on_from_any_other(kinds: dict[str, MeshRuns], kind: str, saved: str, resumed: str) -> None:
    runs, run = kinds[kind], f"{saved}-to-{resumed}"
    runs.once("one", "one")
    runs.once(saved, saved)
    runs.copy(saved, run)
    runs.forget(run, after=4)
    runs.train(run, resumed, "train.steps=7")
    assert_losses_of_one_rank(runs.steps(run), runs.steps("one")[:7])
    began = [event["event"] for event in read_events(open_store(f"{runs.folder}/{run}"))]
    assert began.count("resumed") == 1


@pytest.mark.parametrize(
    "settings",
    [
        ("train.activation_checkpointing=selective", "parallel.offload=states"),
        ("train.activation_checkpointing=full", "parallel.reshard=false"),
    ],
    ids=", ".join,
)
def test_where_and_how_long_tensors_are_kept_changes_no_bit(
    kinds: dict[str, MeshRuns], settings: tuple[str, ...]
) -> None:
    runs, run = kinds["split"], settings[0].partition("=")[2]
    runs.once("fsdp2xtp2", "fsdp2xtp2")
    runs.train(run, "fsdp2xtp2", *settings)
    assert runs.steps(run) == runs.steps("fsdp2xtp2")
    assert equal(runs.tensors(run), runs.tensors("fsdp2xtp2"))


@pytest.mark.parametrize("mesh", ["fsdp3", "fsdp2xtp2"])
def test_uneven_evaluation_and_early_stop_end_all_ranks(kinds: dict[str, MeshRuns], mesh: str) -> None:
    """A step has five micro-batches and an evaluation as many samples; after the first, no evaluation counts as a gain."""
    runs = kinds["split"]
    sets = ("train.global_batch=5", "train.micro_batch=1", "eval.every=1", "eval.patience=2", "eval.min_delta=100.0")
    for run in ("one", mesh):
        runs.once(f"{run}-uneven", run, *sets)
    assert len(runs.steps(f"{mesh}-uneven")) == 3
    assert_losses_of_one_rank(runs.steps(f"{mesh}-uneven"), runs.steps("one-uneven"))


def test_tensor_ranks_make_logits_in_chunks(kinds: dict[str, MeshRuns]) -> None:
    runs = kinds["split"]
    runs.once("one", "one")
    runs.train("chunks", "tp2", "task.loss_chunk=5")
    assert_losses_of_one_rank(runs.steps("chunks"), runs.steps("one"))


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_tensor_ranks_compute_in_half_precision(kinds: dict[str, MeshRuns], mode: str) -> None:
    runs = kinds["split"]
    for run, mesh in ((f"one-{mode}", "one"), (f"split-{mode}", "fsdp2xtp2")):
        runs.train(run, mesh, f"precision.mode={mode}")
    for mine, ones in zip(runs.steps(f"split-{mode}"), runs.steps(f"one-{mode}"), strict=True):
        assert mine[0] == pytest.approx(ones[0], rel=2e-3)


def test_ranks_that_share_a_model_roll_back_as_one_rank(kinds: dict[str, MeshRuns]) -> None:
    """From step 4 on, where the only checkpoint is, spikes are looked for; the norm of step 7 is one."""
    runs = kinds["split"]
    runs.once("one", "one")
    rules = {"action": "roll_back", "spike_deviations": 2.0, "spike_window": 4, "rollback_steps": 1, "skip_batches": 1}
    sets = [f"bad_loss.{key}={value}" for key, value in rules.items()]
    for mesh in ("one", "fsdp2xtp2"):
        runs.copy("one", f"{mesh}-back")
        runs.forget(f"{mesh}-back", after=4)
        runs.train(f"{mesh}-back", mesh, "checkpoint.every_steps=1000", *sets)
        found = [
            event for event in read_events(open_store(f"{runs.folder}/{mesh}-back")) if event["event"] == ROLLED_BACK
        ]
        assert [(event["step"], event["to_step"], event["data_offset"]) for event in found] == [(7, 4, 48)]
    assert_losses_of_one_rank(runs.steps("fsdp2xtp2-back"), runs.steps("one-back"))
