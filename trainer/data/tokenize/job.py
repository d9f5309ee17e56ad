"""The course of a job: chunks and shards that are done, what an earlier call left, and worker processes for the rest."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from awscrt.checksums import crc64nvme

from lustrain.problem import UserError, problem
from lustrain.progress import BYTES, Progress, amount_text
from trainer.data.index import DTYPES, Shard, dtype_for
from trainer.data.tokenize.assembly import SPLITS, ChunkRecord, Output, SplitPlan, WorkFolder
from trainer.data.tokenize.chunks import Job, assemble_shard, encode_chunk, start_worker
from trainer.data.tokenize.inputs import Span
from trainer.data.tokenizer import build
from trainer.storage import ObjectMissingError, ObjectStore


class Run:
    """The chunks and shards of one job, and how far they are."""

    def __init__(
        self,
        job: Job,
        plan: Sequence[tuple[Span, ...]],
        folder: WorkFolder,
        store: ObjectStore,
        shard_bytes: int,
    ) -> None:
        self.job = job
        self.plan = plan
        self.folder = folder
        self.store = store
        self.itemsize = DTYPES[dtype_for(build(job.tokenizer).vocab_size)].itemsize
        self.shard_tokens = max(1, shard_bytes // self.itemsize)
        self.records: dict[int, ChunkRecord] = {}
        self.splits = {split: SplitPlan(self.shard_tokens, len(plan)) for split in SPLITS}

    def resume(self) -> int:
        """Take over what an earlier call left whole; return how many chunks that is."""
        records = [record for n in range(len(self.plan)) if (record := self.folder.read_chunk(n)) is not None]
        done = {split: self._stored(split) for split in SPLITS}
        claimed = self._plans(records, done)
        whole = [record for record in records if self._is_whole(record, claimed)]
        self.splits = self._plans(whole, done)
        self.records = {record.number: record for record in whole}
        return len(whole)

    def finish(self, workers: int) -> None:
        """Encode the missing chunks and store the missing shards."""
        missing = iter([number for number in range(len(self.plan)) if number not in self.records])
        weights = [sum(span.weight for span in spans) for spans in self.plan]
        before = sum(weights[number] for number in self.records)
        tokens = 0
        with Progress("tokenize", sum(weights), BYTES, initial=before) as progress, _pool(workers, self.job) as submit:
            began = time.monotonic()
            running: dict[Future[Any], str | None] = {}
            while True:
                for split, number in self._ready():
                    pieces = self.splits[split].pieces_of(number)
                    running[submit(assemble_shard, split, number, pieces)] = split
                for number in islice(missing, max(0, 2 * workers - len(running))):
                    running[submit(encode_chunk, number, self.plan[number])] = None
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    split_done = running.pop(future)
                    if split_done is not None:
                        self._shard_done(split_done, future.result())
                        continue
                    record: ChunkRecord = future.result()
                    self._chunk_done(record)
                    tokens += sum(output.tokens for output in record.outputs.values())
                    rate = tokens / max(time.monotonic() - began, 1e-9)
                    progress.advance(weights[record.number], note=f"{amount_text(rate, 'tokens')}/s")

    def _plans(self, records: Sequence[ChunkRecord], done: dict[str, dict[int, Shard]]) -> dict[str, SplitPlan]:
        plans = {split: SplitPlan(self.shard_tokens, len(self.plan), done[split]) for split in SPLITS}
        for record in records:
            _note(record, plans)
        return plans

    def _ready(self) -> Iterator[tuple[str, int]]:
        for split, plan in self.splits.items():
            for number in plan.start_ready():
                yield split, number

    def _chunk_done(self, record: ChunkRecord) -> None:
        self.records[record.number] = record
        _note(record, self.splits)

    def _shard_done(self, split: str, shard: Shard) -> None:
        plan = self.splits[split]
        number = int(shard.name.rpartition("-")[2])
        plan.done[number] = shard
        for piece in plan.pieces_of(number):
            if plan.is_spent(piece.chunk):
                self.folder.drop_chunk(piece.chunk, split)

    def _stored(self, split: str) -> dict[int, Shard]:
        """Shards that an earlier call recorded and that the store still has."""
        stored = {}
        for number, shard in self.folder.read_shards(split).items():
            with suppress(ObjectMissingError):
                ids, ends = self.store.stat(shard.tokens_key), self.store.stat(shard.ends_key)
                same = ids.crc64nvme in (None, shard.crc64nvme) and ends.crc64nvme in (None, shard.doc_crc64nvme)
                if same and (ids.size, ends.size) == (shard.tokens * self.itemsize, shard.documents * 8):
                    stored[number] = shard
        return stored

    def _is_whole(self, record: ChunkRecord, claimed: dict[str, SplitPlan]) -> bool:
        """Return whether the chunk's files are as recorded, or not needed any more: a power cut may have lost them."""
        for split, output in record.outputs.items():
            if claimed[split].is_spent(record.number):
                continue
            files = self.folder.tokens(record.number, split), self.folder.ends(record.number, split)
            if not _is_output(output, *files):
                return False
        return True


def _note(record: ChunkRecord, plans: dict[str, SplitPlan]) -> None:
    for split, plan in plans.items():
        plan.record(record.number, record.outputs[split].tokens if split in record.outputs else 0)


def _is_output(output: Output, tokens: Path, ends: Path) -> bool:
    try:
        checksums = int(crc64nvme(tokens.read_bytes())), int(crc64nvme(ends.read_bytes()))
    except FileNotFoundError:
        return False
    return checksums == (output.crc64nvme, output.doc_crc64nvme)


@contextmanager
def _pool(workers: int, job: Job) -> Iterator[Callable[..., Future[Any]]]:
    """Start `workers` processes and yield the function that submits a task; tasks under way are always finished."""
    pool = ProcessPoolExecutor(workers, get_context("spawn"), start_worker, (job,))

    def submit(task: Callable[..., Any], *arguments: Any) -> Future[Any]:
        # Workers are started in here and inherit the mask: Ctrl-C reaches all processes of a terminal, but only this
        # one acts on it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return pool.submit(task, *arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    try:
        yield submit
    except BrokenProcessPool as error:
        why = "a worker process died, killed from outside or for lack of memory"
        fix = "run the same command again to go on, with fewer --workers if memory is short"
        raise UserError(problem("--workers", workers, why, fix=fix)) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
