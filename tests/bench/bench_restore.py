"""Restore into a model's memory, verified, against `torch.load` and a copy: local disk, page cache warm and (as root) cold."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.bench.harness import Row, interleaved, median, memcpy_seconds, run_bench, timed
from tests.checkpoint.written import whole, write_checkpoint
from trainer.checkpoint.load.parts import Places
from trainer.checkpoint.load.stored import StoredCheckpoint
from trainer.storage.local import LocalStore

SIZES = {"0.5 GB": 500_000_000, "2 GB": 2_000_000_000}
BAR = 1.0
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def adam_like_state(size: int) -> dict[str, torch.Tensor]:
    """Parameters and two moments in fp32, `size` bytes together, in tensors as a 12-layer transformer has them."""
    width = 768
    generator = torch.Generator().manual_seed(1)
    state: dict[str, torch.Tensor] = {}
    left = size // 12
    while left > 0:
        shape = (min(4 * width, -(-left // width)), width)
        for kind in ("model", "optim/exp_avg", "optim/exp_avg_sq"):
            state[f"{kind}/{len(state) // 3}.weight"] = torch.randn(shape, generator=generator)
        left -= shape[0] * width
    return state


def measure(repetitions: int = 5) -> list[dict[str, Any]]:
    rows = []
    for label, size in SIZES.items():
        folder = Path(tempfile.mkdtemp(prefix="lustrain-bench-restore-", dir=os.environ.get("LUSTRAIN_BENCH_DIR")))
        try:
            rows += _measure_size(label, size, folder, repetitions)
        finally:
            shutil.rmtree(folder)
    return [row.as_dict() for row in rows]


def _measure_size(label: str, size: int, folder: Path, repetitions: int) -> list[Row]:
    state = adam_like_state(size)
    stored = sum(t.nbytes for t in state.values())
    store = LocalStore(str(folder / "run"))
    manifest = write_checkpoint(store, 1, [{name: whole(tensor) for name, tensor in state.items()}])
    pt = folder / "state.pt"
    torch.save(state, pt)
    os.sync()
    targets = {name: torch.zeros_like(tensor).add_(1) for name, tensor in state.items()}
    cases: dict[str, Callable[[], object]] = {
        "ours": lambda: StoredCheckpoint(Places(store), manifest).read(lambda name: True, targets),
        "torch.load": lambda: _copy(torch.load(pt, weights_only=True), targets),
        "torch.load mmap": lambda: _copy(torch.load(pt, weights_only=True, mmap=True), targets),
    }
    cases["ours"]()
    if any(not torch.equal(tensor, state[name]) for name, tensor in targets.items()):
        raise AssertionError("the restored state is not the saved one")
    del state
    warm = {name: (lambda load=load: _warm(load)) for name, load in cases.items()}
    found = interleaved(warm, repetitions)
    rows = [_row(f"restore {label}, page cache warm", found, stored)]
    if os.geteuid() == 0 and os.access(_DROP_CACHES, os.W_OK):
        cases["plain read"] = lambda: _read_plainly(pt)
        cold = {name: (lambda load=load: _cold(load)) for name, load in cases.items() if "mmap" not in name}
        rows.append(_row(f"restore {label}, page cache cold", interleaved(cold, repetitions), stored))
    return rows


def _row(figure: str, found: dict[str, list[float]], stored: int) -> Row:
    ours, baseline = median(found["ours"]), median(found["torch.load"])
    speeds = f"ours {stored / ours / 1e9:.2f} GB/s, torch.load {stored / baseline / 1e9:.2f} GB/s and verifies nothing"
    note = f"into a model's memory; {speeds}"
    if "torch.load mmap" in found:
        note += f"; with torch.load(mmap=True) {median(found['torch.load mmap']):.3g} s"
    disk = median(found["plain read"]) if "plain read" in found else None
    return Row(
        figure=figure,
        ours=ours,
        baseline=baseline,
        ratio=baseline / ours,
        bar=BAR,
        limit=disk or memcpy_seconds(stored),
        unit="s",
        baseline_name="torch.load",
        limit_name="sequential read of the file" if disk else "2-thread memcpy",
        note=note,
    )


def _copy(saved: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(saved[name])


def _read_plainly(path: Path) -> None:
    """What the disk gives at best: one buffer, front to back, nothing kept."""
    buffer = bytearray(8 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _warm(load: Callable[[], object]) -> float:
    _return_freed_memory()
    return timed(load)


def _cold(load: Callable[[], object]) -> float:
    _return_freed_memory()
    os.sync()
    _DROP_CACHES.write_text("3")
    return timed(load)


def _return_freed_memory() -> None:
    """Both sides start from memory that the process does not hold yet, as a restarted job does."""
    ctypes.CDLL(None).malloc_trim(0)


def main() -> int:
    torch.set_num_threads(2)
    return run_bench(measure)


if __name__ == "__main__":
    sys.exit(main())
