"""What a save costs a training loop and how soon it is durable: ours, torch.save, and every mode of torch's DCP.

A loop of ~33 ms steps on one core goes on while a save is under way; the other cores are free for whoever saves, as
the host's are beside a training on accelerators (a loop on all cores gives up the processor time of the writing as
well). `blocked` is how long the loop stands still: the saving call, and the waiting for an asynchronous copy before the
optimizer may change the weights. `lost` is that plus what the steps until the save is durable take longer than before.
`durable` is from the call until everything is fsynced (ours: and committed). Like is set against like: with the loop
going on, ours against the asynchronous modes; with the loop waiting and all cores free for the save, as it is at an
interruption, ours against `dcp.save`. Every mode is run once as a warm-up, for processes to start and memory to be
touched.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from tests.bench.bench_restore import adam_like_state
from tests.bench.harness import Row, interleaved, median, memcpy_seconds, run_bench
from trainer.checkpoint.lineage.lease import Lease
from trainer.checkpoint.save.saver import Checkpointer
from trainer.config import CheckpointConfig
from trainer.parallel.shards import Axis
from trainer.parallel.votes import StoreVotes
from trainer.storage.local import LocalStore

SIZES = {"0.5 GB": 500_000_000, "2 GB": 2_000_000_000}
STEP_S = 0.033
BASE_STEPS = 15
THREADS = 2

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Started:
    """A save under way: `staged` returns when weights may change, `durable` (by perf_counter) is when it has ended."""

    staged: Callable[[], object]
    durable: Future[float]


@dataclass(frozen=True)
class Cost:
    """Seconds."""

    blocked: float
    lost: float
    durable: float


class Loop:
    """Steps of matrix products on one core, as long as STEP_S on a calm machine."""

    def __init__(self) -> None:
        self._matrix = torch.randn(768, 768)
        self._products = 1
        seconds = [self.step() for _ in range(40)]
        self._products = max(1, round(STEP_S / statistics.median(seconds)))

    def step(self) -> float:
        torch.set_num_threads(1)
        began = time.perf_counter()
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix)
        seconds = time.perf_counter() - began
        torch.set_num_threads(THREADS)
        return seconds

    def cost(self, save: Callable[[], Started]) -> Cost:
        """Let one save happen in the middle of the loop."""
        os.sync()
        usual = statistics.median(self.step() for _ in range(BASE_STEPS))
        began = time.perf_counter()
        started = save()
        blocked, slower = time.perf_counter() - began, 0.0
        waiting = True
        while waiting or not started.durable.done():
            slower += self.step() - usual
            if waiting:
                pause = time.perf_counter()
                started.staged()
                blocked += time.perf_counter() - pause
                waiting = False
        return Cost(blocked, blocked + max(slower, 0.0), started.durable.result() - began)


def modes(state: State, folder: Path, leaving: ExitStack) -> dict[str, Callable[[], Started]]:
    """Every way to save `state` below `folder`; what they hold is given back with `leaving`."""
    numbers = iter(range(10**6))

    def fresh() -> Path:
        path = folder / f"theirs-{next(numbers)}"
        path.mkdir()
        return path

    ours = _ours(state, folder, leaving)
    return {
        "ours": ours,
        "ours, loop waiting": lambda: _waited(ours()),
        "torch.save + fsync": lambda: _torch_save(state, fresh() / "state.pt"),
        "dcp.save": lambda: _dcp_save(state, fresh(), threads=1),
        "dcp.save, 2 threads": lambda: _dcp_save(state, fresh(), threads=2),
        "dcp.async_save": lambda: _dcp_async(state, fresh(), AsyncCheckpointerType.THREAD, None),
        "dcp.async_save process": _dcp_process(state, fresh, leaving, asynchronous=False),
        "dcp.async_save process, async staging": _dcp_process(state, fresh, leaving, asynchronous=True),
    }


def measure(repetitions: int = 5) -> list[dict[str, Any]]:
    torch.set_num_threads(THREADS)
    rows = []
    with _process_group():
        for label, size in SIZES.items():
            folder = Path(tempfile.mkdtemp(prefix="lustrain-bench-save-", dir=os.environ.get("LUSTRAIN_BENCH_DIR")))
            try:
                rows += _measure_size(label, size, folder, repetitions)
            finally:
                shutil.rmtree(folder)
    return [row.as_dict() for row in rows]


def _measure_size(label: str, size: int, folder: Path, repetitions: int) -> list[Row]:
    state = adam_like_state(size)
    stored = sum(tensor.nbytes for tensor in state.values())
    loop = Loop()
    costs: dict[str, list[Cost]] = defaultdict(list)
    with ExitStack() as leaving:
        ways = modes(state, folder, leaving)
        for way in ways.values():
            loop.cost(way)

        def case(name: str) -> float:
            # Between the saves, so that nobody's time holds the removal of gigabytes.
            for old in folder.glob("theirs-*"):
                shutil.rmtree(old)
            costs[name].append(loop.cost(ways[name]))
            return costs[name][-1].blocked

        cases = {name: (lambda name=name: case(name)) for name in ways}
        floors = interleaved({**cases, "memcpy": lambda: memcpy_seconds(stored)}, repetitions)["memcpy"]
        # Not among the others: the host may still be busy with these bytes when the guest's flush has returned.
        disk = median([_disk_seconds(folder / "plain", stored) for _ in range(repetitions)])
    for name, seen in costs.items():
        shown = ", ".join(f"{what} {_median(seen, what):.3f} s" for what in ("blocked", "lost", "durable"))
        print(f"{label}: {name}: {shown}", file=sys.stderr, flush=True)
    return _rows(label, costs, median(floors), disk)


def _rows(label: str, costs: dict[str, list[Cost]], memcpy: float, disk: float) -> list[Row]:
    def row(figure: str, what: str, peers: list[str], bar: float, mine: str = "ours") -> Row:
        ours = _median(costs[mine], what)
        name, best = min(((peer, _median(costs[peer], what)) for peer in peers), key=lambda found: found[1])
        limit, limit_name = (disk, "plain direct write") if what == "durable" else (memcpy, "memcpy")
        return Row(f"{figure}, {label}", ours, best, best / ours, bar, limit, "s", name, limit_name)

    still = _median(costs["ours"], "blocked")
    asynchronous = [name for name in costs if name.startswith("dcp.async")]
    synchronous = [name for name in costs if name.startswith("dcp.save")]
    blocked = f"loop blocked by a save, {label}"
    durable = "save to durable on local disk, with our checksums"
    copy = f"{THREADS}-thread memcpy"
    return [
        Row(blocked, still, memcpy, still / memcpy, 1.25, memcpy, "s", copy, "memcpy", at_most=True),
        row("loop blocked by a save", "blocked", ["torch.save + fsync"], 10.0),
        row("loop blocked by a save", "blocked", asynchronous, 2.0),
        row("blocked and slowed until it is durable", "lost", ["torch.save + fsync"], 1.0),
        row("blocked and slowed until it is durable", "lost", asynchronous, 1.0),
        row(f"{durable}, loop going on", "durable", asynchronous, 1.5),
        row(f"{durable}, loop waiting", "durable", ["dcp.save"], 1.5, "ours, loop waiting"),
        row(f"{durable}, loop waiting", "durable", synchronous, 1.5, "ours, loop waiting"),
    ]


def _disk_seconds(path: Path, size: int) -> float:
    """What the disk gives at best: the same bytes from one buffer, past the page cache, and a flush."""
    slice_bytes = 16 << 20
    with mmap.mmap(-1, slice_bytes) as memory:
        memory.write(os.urandom(slice_bytes))
        with memoryview(memory) as view:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
            began = time.perf_counter()
            try:
                with ThreadPoolExecutor(THREADS) as pool:
                    starts = range(0, size - size % slice_bytes, slice_bytes)
                    written = sum(pool.map(lambda start: os.pwrite(fd, view, start), starts))
                os.fsync(fd)
            finally:
                os.close(fd)
            seconds = time.perf_counter() - began
    path.unlink()
    return seconds * size / written


def _median(seen: list[Cost], what: str) -> float:
    return median([getattr(cost, what) for cost in seen])


def _ours(state: State, folder: Path, leaving: ExitStack) -> Callable[[], Started]:
    store = LocalStore(str(folder / "ours"))
    lease = Lease.acquire(store, "bench")
    lease.record_parent(None)
    ended: dict[int, Future[float]] = defaultdict(Future)

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        if kind == "checkpoint_committed":
            ended[fields["step"]].set_result(time.perf_counter())
        elif kind == "checkpoint_failed":
            ended[fields["step"]].set_exception(RuntimeError(fields["detail"]))

    saver = Checkpointer(
        store,
        StoreVotes(dist.HashStore(), 1),
        rank=0,
        mesh=[Axis("rank", 1, 0)],
        generation=lease.generation,
        lease=lease,
        options=CheckpointConfig(copy_threads=THREADS, keep_last=2),
        parent=None,
        on_event=on_event,
    )
    leaving.callback(saver.close)
    steps = iter(range(1, 10**6))

    def save() -> Started:
        saver.wait(None)
        step = next(steps)
        saver.save(step, state, {}, {})
        return Started(lambda: None, ended[step])

    return save


def _waited(started: Started) -> Started:
    started.durable.result()
    return started


def _torch_save(state: State, path: Path) -> Started:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return _ended()


def _dcp_save(state: State, path: Path, *, threads: int) -> Started:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True, thread_count=threads))
    return _ended()


def _dcp_process(
    state: State, fresh: Callable[[], Path], leaving: ExitStack, *, asynchronous: bool
) -> Callable[[], Started]:
    """The stager in shared memory is kept, without which every save pickles all tensors through a pipe."""
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=asynchronous, use_non_blocking_copy=False
    )
    stager = DefaultStager(options)
    leaving.callback(stager.close)
    return lambda: _dcp_async(state, fresh(), AsyncCheckpointerType.PROCESS, stager)


def _dcp_async(state: State, path: Path, kind: AsyncCheckpointerType, stager: DefaultStager | None) -> Started:
    writer = dcp.FileSystemWriter(path, sync_files=True)
    answer = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind, async_stager=stager)
    if isinstance(answer, AsyncSaveResponse):
        return Started(answer.staging_completion.result, _stamped(answer.upload_completion))
    return Started(lambda: None, _stamped(answer))


def _stamped(future: Future[Any]) -> Future[float]:
    """The moment at which another future ends, or its failure."""
    stamp: Future[float] = Future()

    def ended(done: Future[Any]) -> None:
        error = done.exception()
        stamp.set_result(time.perf_counter()) if error is None else stamp.set_exception(error)

    future.add_done_callback(ended)
    return stamp


def _ended() -> Started:
    stamp: Future[float] = Future()
    stamp.set_result(time.perf_counter())
    return Started(lambda: None, stamp)


@contextmanager
def _process_group() -> Iterator[None]:
    """DCP's checkpoint process needs one, even alone."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_bench(measure))
