"""Trainings that are killed again and again, and what must hold after every single kill.

Two ranks train small runs. Each round `tests.seeds` picks a victim (one rank, all ranks, a writer process) and a moment:
anywhere in the attempt's life, or just when a save has begun. A run that is done is compared with the uninterrupted one of
the same seed, and the next begins with another.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.fork_server import PATIENCE_S, POLL_S, ForkServer, Job
from tests.processes import wait_until
from tests.seeds import chance
from tests.torture import inquest
from tests.torture.inquest import Death, Standing
from tests.torture.small_run import began_at, committed_lines, saves_begun, train_words
from trainer.storage import ObjectStore, open_store

RANKS = 2
SAY_EVERY_S = 10.0
IN_LOOP_GRACE_S = PATIENCE_S
"""A rank that trains notices a dead peer in its next exchange, that is within a step."""
OUTSIDE_GRACE_S = 0.3
"""Before and after the loop it may wait for the peer for long, and a launcher ends it (trainer.node.launcher.GRACE_S)."""
SAVE_SPAN_S = 0.08
"""About as long as a save takes from its first object to its commit and pruning."""
GROW, SHRINK = 1.05, 0.8
"""Of the attempts' longest life: after one that was killed before it trained, and after one that reached the end."""
VICTIMS = {"one rank": 4, "all ranks": 3, "a writer": 3}


@dataclass(frozen=True)
class Blow:
    """Whom to kill, and when: `delay` seconds from now, or from the beginning of the next save."""

    victim: str
    rank: int
    aimed: bool
    delay: float


@dataclass
class Tally:
    """What a torture has done so far."""

    kills: Counter[str] = field(default_factory=Counter)
    aimed: int = 0
    attempts: int = 0
    runs: int = 0
    resumed: int = 0
    """Attempts that went on from a checkpoint."""

    def __str__(self) -> str:
        parts = ", ".join(f"{victim} {count}" for victim, count in sorted(self.kills.items()))
        kills = f"{self.kills.total()} kills ({parts}; {self.aimed} aimed at saves)"
        return f"{kills}, {self.attempts} attempts, {self.resumed} resumed, {self.runs} runs done"


class Ordeal:
    """Kills until `kills` are used up, then lets the last run finish.

    Runs take `seeds` training seeds in turn, so that a reference serves several of them.
    """

    def __init__(
        self,
        server: ForkServer,
        config: Path,
        root: str,
        *,
        steps: int,
        seeds: int,
        say: Callable[[str], None],
        sets: Mapping[str, object] | None = None,
    ) -> None:
        self.tally = Tally()
        self._server, self._config, self._root, self._say = server, config, root, say
        self._steps, self._seeds = steps, seeds
        self._sets = {"train.steps": steps, **(sets or {})}
        self._rng = chance(f"ordeal {sorted(self._sets)} {steps}")
        self._began = self._said = time.monotonic()
        self._life_s = 0.0
        """The longest that an attempt is left alone; follows the machine's speed, so that most get some steps done."""

    def run(self, kills: int) -> Tally:
        while self.tally.kills.total() < kills:
            number = self.tally.runs + 1
            seed = 1 + self.tally.runs % self._seeds
            if number == seed:
                self._reference(seed)
            self._tortured(number, seed, kills)
            self.tally.runs += 1
        self._say(f"  {time.monotonic() - self._began:.0f} s: {self.tally}")
        return self.tally

    def _reference(self, seed: int) -> None:
        """The same training, left alone."""
        began = time.monotonic()
        job = self._start(f"reference-{seed}", seed)
        assert job.wait() == [0] * RANKS, job.said()
        self._life_s = self._life_s or 0.5 * (time.monotonic() - began)

    def _tortured(self, number: int, seed: int, kills: int) -> None:
        store = open_store(f"{self._root}/run-{number}")
        before = self.tally.kills.total()
        standing = Standing()
        spared = False
        while True:
            job = self._start(f"run-{number}", seed)
            if spared:
                self._wait_for_a_commit(job)
            finished, killed_writers = self._attempt(job, store, kills)
            self.tally.attempts += 1
            inquest.nobody_left_behind(self._server)
            standing = inquest.after(Death(store, job, standing, killed_writers))
            self.tally.resumed += bool(began_at(job.ranks[0].said()))
            if finished:
                self._life_s *= SHRINK
                break
            # However slow the machine is, every second attempt comes to a commit.
            spared = not committed_lines(job.ranks[0].said())
            if began_at(job.ranks[0].said()) is None:
                self._life_s *= GROW
        kills_here = self.tally.kills.total() - before
        reference = open_store(f"{self._root}/reference-{seed}")
        inquest.equal_to_reference(store, reference, self._steps)
        inquest.nothing_piles_up(store, kills_here, killed_writers)

    def _wait_for_a_commit(self, job: Job) -> None:
        wait_until(lambda: committed_lines(job.ranks[0].said()) or not job.running())

    def _start(self, name: str, seed: int) -> Job:
        words = train_words(self._config, f"{self._root}/{name}", {"run.seed": seed, **self._sets})
        return self._server.start(words, RANKS)

    def _attempt(self, job: Job, store: ObjectStore, kills: int) -> tuple[bool, int]:
        """Strike until the attempt ends, by a blow (False) or because its training is done (True); and the writers killed."""
        killed_writers = 0
        while self.tally.kills.total() < kills:
            blow = self._draw()
            if not self._wait_for_the_moment(job, store, blow):
                break
            struck = self._strike(job, blow)
            if not struck:
                continue
            self.tally.kills[blow.victim] += 1
            self.tally.aimed += blow.aimed
            self._tell()
            if blow.victim != "a writer":
                self._survivors_end(job)
                return False, killed_writers
            killed_writers += 1
        codes = job.wait()
        # A save that loses its writer fails; a run whose last save fails three times says so and stops.
        if killed_writers >= 3 and set(codes) == {1}:
            assert "could not be saved in 3 tries" in job.said(), job.said()
            return False, killed_writers
        assert codes == [0] * RANKS, f"ended with {codes} though no rank was killed:\n{job.said()}"
        return True, killed_writers

    def _draw(self) -> Blow:
        victim = self._rng.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        aimed = self._rng.random() < 0.4
        longest = SAVE_SPAN_S if aimed else self._life_s
        return Blow(victim, self._rng.randrange(RANKS), aimed, self._rng.uniform(0.0, longest))

    def _wait_for_the_moment(self, job: Job, store: ObjectStore, blow: Blow) -> bool:
        """False when the attempt ended before."""
        if blow.aimed:
            there = saves_begun(store)
            while saves_begun(store) <= there:
                if not job.running():
                    return False
                time.sleep(POLL_S)
        end = time.monotonic() + blow.delay
        while (left := end - time.monotonic()) > 0:
            if len(job.running()) < RANKS:
                return False
            time.sleep(min(left, 0.02))
        return len(job.running()) == RANKS

    def _strike(self, job: Job, blow: Blow) -> bool:
        """False when the victim is not there, e.g. a writer that has not started yet."""
        if blow.victim == "a writer":
            writers = job.writers().get(blow.rank, [])
            for pid in writers:
                os.kill(pid, signal.SIGKILL)
            return bool(writers)
        ranks = [blow.rank] if blow.victim == "one rank" else list(range(RANKS))
        job.send(signal.SIGKILL, ranks)
        return True

    def _survivors_end(self, job: Job) -> None:
        """After one rank was killed the others must end by themselves if they were training; else a launcher ends them."""
        began = began_at(job.ranks[0].said()) is not None
        end = time.monotonic() + (IN_LOOP_GRACE_S if began and not self._left_loop(job) else OUTSIDE_GRACE_S)
        while job.running() and time.monotonic() < end:
            self._server.listen(0.02)
        unaware = began and job.running() and not self._left_loop(job)
        assert not unaware, f"does not notice that a rank is dead:\n{job.said()}"
        job.send(signal.SIGKILL)
        job.wait()
        assert "Traceback" not in job.said(), job.said()

    def _left_loop(self, job: Job) -> bool:
        """Whether the last step is done, and only its save may be missing; a job that resumes at the end has no step to do."""
        said = job.ranks[0].said()
        return f"step {self._steps}/{self._steps}" in said or f"resumed: step {self._steps}," in said

    def _tell(self) -> None:
        if time.monotonic() - self._said >= SAY_EVERY_S:
            self._said = time.monotonic()
            self._say(f"  {self._said - self._began:.0f} s: {self.tally}")
