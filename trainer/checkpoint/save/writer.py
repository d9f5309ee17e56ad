"""The process beside the trainer that turns staged bytes into stored objects: `python -m trainer.checkpoint.save.writer`.

Torch-free, so that it starts at once and stays small. It speaks lines of JSON over one Unix socket, through which
shared memory arrives as descriptors, and does one save at a time. It never outlives its parent, and signals meant for
the job do not end it: a save in flight is worth finishing.
"""

from __future__ import annotations

import array
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

from awscrt.checksums import combine_crc64nvme, crc64nvme

from lustrain.from_json import from_json
from lustrain.problem import UserError
from lustrain.process import die_with_parent
from trainer.checkpoint.format.layout import ATTEMPTS, ManifestId, attempt_commit, data_key, index_key
from trainer.checkpoint.format.records import BLOCK_BYTES, CODEC, Block, Entry, RankIndex, encode
from trainer.storage import ObjectStore, open_store

MOST_THREADS = 4
_CRASHED = 70
"""EX_SOFTWARE of sysexits.h."""


@dataclass(frozen=True)
class Job:
    """One save of one rank: `size` logical bytes in the shared memory called `buffer`."""

    save: int
    buffer: int
    size: int
    attempt: str
    rank: int
    store: str
    tiers: tuple[str, ...]
    """Root folders of the fast copies, in the order in which they are written; none for an urgent save."""
    keep: tuple[ManifestId, ...]
    """Commits whose fast copies must stay."""
    urgent: bool


@dataclass(frozen=True)
class Stored:
    """Sizes in bytes and checksums of the two objects that were stored."""

    data_size: int
    data_crc64nvme: int
    index_size: int
    index_crc64nvme: int


@dataclass(frozen=True)
class StoreResult:
    """How a job went: `stored`, or `error` in one line. `tiers` maps each tier that failed to the reason."""

    save: int
    stored: Stored | None = None
    error: str = ""
    tiers: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """Bytes ready to be stored, in the file behind `fd`, and their sums."""

    fd: int
    size: int
    blocks: tuple[Block, ...]

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.fd}"

    @property
    def crc64nvme(self) -> int:
        total = 0
        for block in self.blocks:
            total = combine_crc64nvme(total, block.crc64nvme, block.size)
        return total


class Memory:
    """The parent's shared memory, mapped for reading."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ)

    def blocks(self, size: int) -> list[memoryview]:
        view = memoryview(self._map)
        return [view[start : min(start + BLOCK_BYTES, size)] for start in range(0, size, BLOCK_BYTES)]

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)


def summed(memory: Memory, size: int, threads: int) -> Contents:
    """Return the staged bytes as they are, with their sums."""
    with ThreadPoolExecutor(threads) as pool:
        sums = list(pool.map(crc64nvme, memory.blocks(size)))
    starts = range(0, size, BLOCK_BYTES)
    blocks = (Block(at, min(BLOCK_BYTES, size - at), crc) for at, crc in zip(starts, sums, strict=True))
    return Contents(memory.fd, size, tuple(blocks))


def store_rank(job: Job, entries: tuple[Entry, ...], memory: Memory, store: ObjectStore) -> StoreResult:
    """Write tiers, then the run: data before index. A tier that fails is reported and passed over.

    Raises UserError (StorageError among them) or OSError when the run itself cannot be written.
    """
    clock = _Laps()
    contents = summed(memory, job.size, _threads(job))
    crc = contents.crc64nvme
    index = encode(RankIndex(job.attempt, job.rank, job.size, job.size, CODEC, entries, contents.blocks))
    clock.lap("sums")
    failed = {}
    for root in job.tiers:
        try:
            _write_tier(root, job, contents, index)
        except (UserError, OSError) as error:
            failed[root] = str(error)
    clock.lap("tiers")
    _put_both(store, job, contents, index)
    clock.lap("store")
    return StoreResult(job.save, Stored(job.size, crc, len(index), crc64nvme(index)), tiers=failed, seconds=clock.laps)


def _put_both(store: ObjectStore, job: Job, contents: Contents, index: bytes) -> None:
    store.put_file(data_key(job.attempt, job.rank), contents.path, contents.size, contents.crc64nvme)
    store.put(index_key(job.attempt, job.rank), index)


def _write_tier(root: str, job: Job, contents: Contents, index: bytes) -> None:
    """Write one fast copy; older ones are removed first, so that a tier never holds more than `keep` and this one."""
    tier = open_store(root)
    new = attempt_commit(job.attempt)
    for info in list(tier.list(ATTEMPTS)):
        old = attempt_commit(info.key.removeprefix(ATTEMPTS).partition("/")[0])
        if old and new and old < new and old not in job.keep:
            tier.delete(info.key)
    _put_both(tier, job, contents, index)


class _Laps:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._at = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name], self._at = now - self._at, now


class Server:
    """Answers the trainer until it ends."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._memories: dict[int, Memory] = {}
        self._entries: tuple[Entry, ...] = ()
        self._stores: dict[str, ObjectStore] = {}
        self._working: threading.Thread | None = None

    def serve(self) -> None:
        """Handle lines until the other end closes."""
        fds: list[int] = []
        for line in _lines(self._control, fds):
            message = json.loads(line)
            match message.pop("op"):
                case "memory":
                    self._memories[message["number"]] = Memory(fds.pop(0), message["size"])
                case "forget":
                    self._memories.pop(message["number"]).close()
                case "entries":
                    self._entries = tuple(from_json(Entry, entry) for entry in message["entries"])
                case "save":
                    self._start(from_json(Job, message))
                case other:
                    raise ValueError(f"unknown message from the trainer: {other!r}")

    def _start(self, job: Job) -> None:
        if self._working:
            self._working.join()
        self._working = threading.Thread(target=self._work, args=(job,), name="save")
        self._working.start()

    def _work(self, job: Job) -> None:
        try:
            if job.store not in self._stores:
                self._stores[job.store] = open_store(job.store, name="run.uri")
            reply = store_rank(job, self._entries, self._memories[job.buffer], self._stores[job.store])
        except (UserError, OSError) as error:
            reply = StoreResult(job.save, error=str(error))
        self._answer(reply)

    def _answer(self, reply: StoreResult) -> None:
        try:
            self._control.sendall(json.dumps(asdict(reply)).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            # A trainer that was killed closes its end a moment before the kernel ends this process.
            os._exit(0)


def main() -> int:
    """Run `writer PARENT_PID CONTROL_FD`; the descriptor is one end of a Unix stream socket."""
    parent, control = int(sys.argv[1]), int(sys.argv[2])
    if not die_with_parent(parent):
        return 0
    # Schedulers signal every process of a job, not only its group; the trainer alone decides what a signal means.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    threading.excepthook = _die
    with socket.socket(fileno=control) as connection:
        Server(connection).serve()
    # The trainer, which a save still under way would be reported to, has ended.
    os._exit(0)


def decode_result(line: bytes) -> StoreResult:
    """Decode, on the parent's end, what `Server._answer` sent."""
    return from_json(StoreResult, json.loads(line))


def _die(args: threading.ExceptHookArgs) -> None:
    """End the process when a thread has a defect, so that the trainer reads an end of file."""
    sys.excepthook(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
    os._exit(_CRASHED)


def _lines(control: socket.socket, fds: list[int]) -> Iterator[bytes]:
    """Yield lines as they come; descriptors that came with a line are appended to `fds` before it is yielded."""
    pending = bytearray()
    while True:
        try:
            body, ancillary, _, _ = control.recvmsg(1 << 16, socket.CMSG_SPACE(4 * array.array("i").itemsize))
        except ConnectionResetError:
            return
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.extend(array.array("i", data))
        if not body:
            return
        pending += body
        *whole, rest = pending.split(b"\n")
        pending = bytearray(rest)
        yield from (bytes(line) for line in whole)


def _threads(job: Job) -> int:
    """Return how many threads take sums (10 GB/s each): half of the cores, which training shares, or all in a hurry."""
    cores = len(os.sched_getaffinity(0))
    return min(MOST_THREADS, cores if job.urgent else max(1, cores // 2))


if __name__ == "__main__":
    sys.exit(main())
