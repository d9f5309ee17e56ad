"""Promises of staging: bit for bit what the tensors held, in memory that is there when it is needed and not twice."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lustrain.problem import UserError
from tests.checkpoint.saving import sample_tensors
from tests.checkpoint.written import raw_bytes
from trainer.checkpoint.format.records import ALIGN
from trainer.checkpoint.save.stage import Staged, Staging, StagingError
from trainer.parallel.shards import Axis

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.uint8]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]


@pytest.fixture
def staging() -> Iterator[Staging]:
    made = Staging([Axis("rank", 1, 0)], 2)
    yield made
    made.close()


def stored(staged: Staged) -> dict[str, bytes]:
    """What a process that reads the shared memory finds under each name."""
    whole = os.pread(staged.buffer.fd, staged.size, 0)
    return {entry.name: whole[entry.start : entry.start + entry.size] for entry in staged.entries}


def cut_out(tensor: Tensor, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    made = {}
    for number in range(draw(st.integers(0, 5))):
        shape = draw(st.lists(st.integers(0, 9), max_size=3))
        tensor = torch.randn(shape).to(draw(st.sampled_from(DTYPES)))
        turned = draw(st.sampled_from(["plain", "transposed", "strided", "conjugate"]))
        if turned == "transposed" and tensor.dim() > 1:
            tensor = tensor.transpose(0, 1)
        if turned == "strided" and tensor.dim() > 0:
            tensor = tensor[::2]
        if turned == "conjugate" and tensor.is_complex():
            tensor = tensor.conj()
        made[f"t{number}"] = tensor
    return made


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(tensors(), st.integers(1, 3), st.data())
def test_staged_bytes_are_tensors_bytes_of_any_kind_or_stride(
    everything: dict[str, Tensor], world_size: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    staging = Staging([Axis("rank", world_size, rank)], 2)
    try:
        staged = staging.stage(everything, urgent=False, wait_s=0)
        found = stored(staged)
        for entry in staged.entries:
            assert found[entry.name] == raw_bytes(cut_out(everything[entry.name], entry.offsets, entry.lengths))
    finally:
        staging.close()


def test_nothing_of_an_earlier_state_is_left_between_the_tensors(staging: Staging) -> None:
    staging.release(staging.stage({"x": torch.full((5000,), 255, dtype=torch.uint8)}, urgent=False, wait_s=0))
    staged = staging.stage({"a": torch.ones(10), "b": torch.ones(10)}, urgent=False, wait_s=0)
    assert os.pread(staged.buffer.fd, ALIGN - 40, 40) == bytes(ALIGN - 40)


def test_one_buffer_serves_all_saves_a_second_only_an_urgent_one(staging: Staging) -> None:
    first = staging.stage(sample_tensors(), urgent=False, wait_s=0)
    with pytest.raises(StagingError, match="still holds"):
        staging.stage(sample_tensors(), urgent=False, wait_s=0)
    second = staging.stage(sample_tensors(), urgent=True, wait_s=0)
    assert staging.usable_buffers == {first.buffer.number, second.buffer.number}
    staging.release(first)
    assert staging.usable_buffers == {second.buffer.number}
    staging.release(second)
    again = staging.stage(sample_tensors(), urgent=False, wait_s=0)
    assert again.buffer is second.buffer


def test_urgent_save_waits_without_memory_for_a_second_buffer(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = staging.stage(sample_tensors(), urgent=False, wait_s=0)
    monkeypatch.setattr("trainer.checkpoint.save.stage.available_memory", lambda: 1)
    with pytest.raises(StagingError, match="no memory for a second"):
        staging.stage(sample_tensors(), urgent=True, wait_s=0.05)
    wait_for = threading.Condition.wait_for
    waits = threading.Event()

    def waiting(changed: threading.Condition, *how: Any) -> bool:
        waits.set()
        return wait_for(changed, *how)

    monkeypatch.setattr(threading.Condition, "wait_for", waiting)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(staging.stage, sample_tensors(), urgent=True, wait_s=1e6)
        assert waits.wait(300)
        staging.release(first)
        assert second.result().buffer is first.buffer


def test_state_larger_than_the_hosts_memory_is_refused_first(staging: Staging) -> None:
    vast = {"x": torch.empty(1).expand(1 << 40)}
    with pytest.raises(StagingError, match="are available"):
        staging.stage(vast, urgent=False, wait_s=0)
    assert staging.stage(sample_tensors(), urgent=False, wait_s=0).size > 0


def test_the_memory_that_was_prepared_is_the_one_that_is_used(staging: Staging) -> None:
    staging.prepare(sample_tensors())
    staging.prepare(sample_tensors())
    staged = staging.stage(sample_tensors(), urgent=False, wait_s=0)
    assert staging.usable_buffers == {staged.buffer.number}


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_tensor_without_bytes_of_its_own_is_refused_by_name(staging: Staging, kind: str) -> None:
    tensor = {"sparse": torch.zeros(2, 2).to_sparse(), "meta": torch.empty(2, device="meta")}[kind]
    for call in (staging.prepare, partial(staging.stage, urgent=False, wait_s=0)):
        with pytest.raises(UserError) as refused:
            call({**sample_tensors(), "x": tensor})
        assert [line.path for line in refused.value.problems] == ["x"]


def test_closing_gives_back_memory_descriptors_and_threads() -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    staging = Staging([Axis("rank", 1, 0)], 3)
    staging.prepare(sample_tensors())
    staging.stage(sample_tensors(), urgent=False, wait_s=0)
    staging.stage(sample_tensors(), urgent=True, wait_s=0)
    staging.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
