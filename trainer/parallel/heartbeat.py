"""Ranks that still run say so once in a while, so that a notice does not make one wait for a peer that is gone.

A machine that is lost closes no connection: a collective with it ends at its time-out, minutes later. A rank that has to
stop by then has nothing to save, since a commit needs all ranks. Its launcher would kill it anyway, later: Slurm after
KillWait (https://slurm.schedmd.com/slurm.conf.html#OPT_KillWait), torchrun after 30 s.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Self

from torch.distributed import DistError

from lustrain.background import BackgroundThread
from trainer.errors import EXIT_PEERS
from trainer.parallel.world import World

BEAT_S = 0.5
"""512 ranks are about a thousand small requests a second to the store of rank 0."""
SILENT_S = 4.0
"""A process that is alive can miss some beats, since Python lets only one of its threads run."""


class Silence:
    """For how many looks in a row each rank's count has not changed; `longest` of them are too many."""

    def __init__(self, ranks: int, longest: int) -> None:
        self._longest = longest
        self._silent = [0] * ranks
        self._before: Sequence[bytes] = []

    def update(self, counts: Sequence[bytes]) -> list[int]:
        """Return the ranks that have been silent for too long; none before the first counts have arrived."""
        for rank in range(len(self._silent)):
            heard = counts[rank : rank + 1] != self._before[rank : rank + 1]
            self._silent[rank] = 0 if heard else self._silent[rank] + 1
        self._before = counts
        return [rank for rank, looks in enumerate(self._silent) if looks >= self._longest]


class Heartbeat:
    """Beats in the ranks' store and, from the first notice on, listens to the others; harmless on a rank that is alone.

    A peer that is silent for `silent_s`, counted in looks, ends this process with EXIT_PEERS: the main thread may sit in a
    collective that nothing else can end. `leave` is called with that code in the end, and must not return.
    """

    def __init__(
        self,
        world: World,
        noticed: Callable[[], bool],
        *,
        beat_s: float = BEAT_S,
        silent_s: float = SILENT_S,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._world, self._noticed, self._leave = world, noticed, leave
        self._beat_s, self._silent_s = beat_s, silent_s
        self._closing = threading.Event()
        self._counts: list[bytes] = []
        """Of all ranks, as last read; the thread that reads may hang with the store."""

    def __enter__(self) -> Self:
        """Beat once at once, then regularly; raises DistError where the store does not answer."""
        if self._world.world_size > 1:
            self._start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop listening: from here on every rank may leave when it likes."""
        self._closing.set()

    def _start(self) -> None:
        # Calls of other threads may hold the connection of the ranks' own store.
        self._store = self._world.store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self._keys = [f"beats/{rank}" for rank in range(self._world.world_size)]
        self._beat(0)
        for work, name in ((self._beat_on, "heartbeat"), (self._listen, "heartbeat-listener")):
            BackgroundThread(work, name).start()

    def _beat(self, count: int) -> None:
        self._store.set(self._keys[self._world.rank], str(count))

    def _beat_on(self) -> None:
        count = 0
        while not self._closing.wait(self._beat_s):
            count += 1
            try:
                self._beat(count)
                if self._noticed() and self._store.check(self._keys):
                    self._counts = self._store.multi_get(self._keys)
            except DistError:
                # Rank 0 is gone, whom the listener then does not hear any more either.
                return

    def _listen(self) -> None:
        silence = Silence(self._world.world_size, math.ceil(self._silent_s / self._beat_s))
        while not self._closing.wait(self._beat_s):
            if not self._noticed():
                continue
            if gone := silence.update(self._counts):
                # A rank that does not hear itself does not reach the store, which rank 0 has.
                self._end([0] if self._world.rank in gone else gone)
                return

    def _end(self, gone: list[int]) -> None:
        shown = f"rank {gone[0]}" + (f" and {len(gone) - 1} more" if len(gone) > 1 else "")
        line = (
            f"rank {self._world.rank} of {self._world.world_size}: told to stop, but {shown} has been silent for "
            f"{self._silent_s:g} s, and without it nothing can be saved; what is committed is intact; "
            "fix: start the job again: it goes on from the newest checkpoint"
        )
        # In one write: print() writes the line's end by itself, and ranks of a node share the terminal.
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
        self._leave(EXIT_PEERS)
