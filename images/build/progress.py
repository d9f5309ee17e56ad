"""Progress of a build or a push on standard error."""

from __future__ import annotations

from typing import Any

from images.model import Step, without_mounts
from lustrain.problem import plain
from lustrain.progress import BYTES, Progress, amount_text

SLOW_S = 2.0
"""Each step that took longer has a line."""
LONGEST_NAME = 110
_LEAST_BYTES = 100_000


class Live(Progress):
    """It prints a line for each step that took more than 2 s or failed, and in between how far the build is."""

    def __init__(self, label: str, *, interval_s: float = 10.0, **more: Any) -> None:
        super().__init__(label, brief=True, interval_s=interval_s, **more)
        self._running: dict[str, float] = {}
        self._printed: dict[str, str] = {}
        self._moved: dict[str, tuple[int, int]] = {}
        self._moving_since: float | None = None
        # By name: what the check made is cached for the image after it, and is no second step.
        self._ended: dict[str, bool] = {}

    def started(self, name: str) -> None:
        self._running.setdefault(name, self._clock())

    def ended(self, step: Step) -> None:
        self._running.pop(step.name, None)
        self._printed.pop(step.name, None)
        self._ended.setdefault(step.name, step.cached)
        if step.error:
            self.say(f"failed after {step.seconds:.1f} s: {_short(step.name)}")
        elif step.seconds > SLOW_S:
            self.say(f"{step.seconds:.1f} s: {_short(step.name)}")

    def log(self, name: str, text: str) -> None:
        if lines := [line for line in text.splitlines() if line.strip()]:
            self._printed[name] = plain(lines[-1].strip())
        self.tick()

    def moved(self, name: str, done: int, total: int) -> None:
        if self._moving_since is None:
            self._moving_since = self._clock()
        self._moved[name] = (done, max(done, total))
        self.tick()

    def status(self) -> str:
        """Return the text behind the label: steps, the step that has run longest with its last line, and bytes."""
        # Each dictionary in one step of its own, so that the terminal's thread sees it whole.
        ended, running = list(self._ended.values()), sorted(self._running.items(), key=lambda step: step[1])[:1]
        cached = f" ({sum(ended)} cached)" if any(ended) else ""
        parts = [f"{len(ended)} step{'s' * (len(ended) != 1)} done{cached}"]
        for name, since in running:
            parts += [f"{_short(name)} for {self._clock() - since:.0f} s", _short(self._printed.get(name, ""))]
        return ", ".join(filter(None, [*parts, self._bytes()]))

    def _bytes(self) -> str:
        moved = list(self._moved.values())
        done, total = sum(done for done, _ in moved), sum(total for _, total in moved)
        if done < _LEAST_BYTES or self._moving_since is None:
            return ""
        rate = done / max(self._clock() - self._moving_since, 1e-3)
        return f"{amount_text(done, BYTES)} of {amount_text(total, BYTES)}, {amount_text(rate, BYTES)}/s"


def _short(text: str) -> str:
    shown = plain(without_mounts(text))
    return shown if len(shown) <= LONGEST_NAME else shown[: LONGEST_NAME - 1] + "…"
