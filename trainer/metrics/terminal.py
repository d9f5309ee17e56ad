"""Progress on the terminal: a bar, or a line now and then where output goes to a file."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from lustrain.progress import amount_text, duration_text

EVERY_S = 10.0
"""Between two lines where there is no terminal: a log stays readable, and still shows that the run is alive."""
SMOOTHING = 0.1
"""Weight of the newest step in the running mean that the remaining time is computed from."""
QUIET = frozenset({"checkpoint_started", "checkpoints_pruned"})
"""Routine that only the stored log needs: what a person wants to see is that a checkpoint is committed."""
LOUD = {"warning": "yellow", "notice": "bold yellow", "lost": "bold red", "error": "bold red"}

_AMOUNT = re.compile(r"[\d.]+ (bytes|[kMGTP]?B)\b")
"""Of a full disk: the space left changes a little from one try to the next."""


class TerminalSink:
    """A Sink that shows where the run stands; events appear above the bar, or as lines of their own.

    `total` is the last step of the run. Without a terminal a line is printed for the first step, then every
    `every_s`, then for the last step. A save that is tried again and fails alike is shown once.
    """

    def __init__(
        self,
        total: int,
        *,
        stream: TextIO | None = None,
        every_s: float = EVERY_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._stream = stream or sys.stdout
        self._every_s = every_s
        self._monotonic = monotonic
        self._next_line = -float("inf")
        self._mean_step_s: float | None = None
        self._blocked_s = 0.0
        self._shown_step = 0
        self._last: Mapping[str, Any] | None = None
        self._failure: tuple[object, str] | None = None
        console = Console(file=self._stream, highlight=False)
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(None),
                TextColumn("{task.fields[text]}"),
            )
            self._progress = Progress(*columns, console=console, refresh_per_second=4, expand=True)
            self._bar = self._progress.add_task("steps", total=total, text="", start=True)
            self._progress.start()

    def step(self, record: Mapping[str, Any]) -> None:
        seconds = float(record["step_seconds"])
        previous = self._mean_step_s
        self._mean_step_s = seconds if previous is None else previous + SMOOTHING * (seconds - previous)
        self._blocked_s += float(record["blocked_seconds"])
        self._last = record
        if self._progress is not None:
            self._progress.update(self._bar, completed=int(record["step"]), text=self._text(record))
        elif self._monotonic() >= self._next_line or record["step"] >= self._total or "eval_loss" in record:
            self._print_step(record)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind in QUIET or (kind == "checkpoint_failed" and self._is_repetition(fields)):
            return
        line = event_line(kind, fields)
        if self._progress is None:
            if kind == "stopped":
                self._print_last()
            print(line, file=self._stream, flush=True)
            return
        style = LOUD.get(kind, "green")
        self._progress.console.print(f"[{style}]{escape(line)}[/]", soft_wrap=True)

    def _is_repetition(self, fields: Mapping[str, Any]) -> bool:
        """Whether the save before failed too, of the same step and for the same reason; the log has them all."""
        reason = _AMOUNT.sub("", str(fields.get("detail", "")).replace(str(fields.get("attempt")), ""))
        before, self._failure = self._failure, (fields.get("step"), reason)
        return before == self._failure

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        else:
            self._print_last()

    def _print_last(self) -> None:
        if self._last is not None and self._last["step"] != self._shown_step:
            self._print_step(self._last)

    def _print_step(self, record: Mapping[str, Any]) -> None:
        self._shown_step = int(record["step"])
        self._next_line = self._monotonic() + self._every_s
        width = len(str(self._total))
        print(f"step {record['step']:>{width}}/{self._total}  {self._text(record)}", file=self._stream, flush=True)

    def _text(self, record: Mapping[str, Any]) -> str:
        left = max(0, self._total - int(record["step"])) * (self._mean_step_s or 0.0)
        return step_text(record, blocked_s=self._blocked_s, left_s=left)


def step_text(record: Mapping[str, Any], *, blocked_s: float, left_s: float) -> str:
    """Return a step's text for line or bar; `blocked_s` counts all saves so far, `left_s` estimates what is to come."""
    parts = [f"loss {record['loss']:.4f}"]
    if record.get("skipped"):
        parts.append(f"skipped: {record.get('why_skipped', 'gradients overflowed')}")
    if "eval_loss" in record:
        parts.append(f"eval {record['eval_loss']:.4f}")
    parts += [
        f"lr {record['lr']:.2e}",
        f"{amount_text(record['tokens_per_second'], 'tok')}/s",
        f"blocked {blocked_s:.2f} s",
    ]
    if left_s > 0:
        parts.append(f"ETA {duration_text(left_s)}")
    return "  ".join(parts)


def event_line(kind: str, fields: Mapping[str, Any]) -> str:
    """`kind: name value, …`; the field `detail` comes last and without its name, numbers are shortened for reading."""
    if kind == "checkpoint_committed":
        size = amount_text(fields["bytes"], "B")
        return f"checkpoint committed: step {fields['step']}, {size} in {fields['seconds']:.2f} s"
    if kind == "notice":
        return f"notice: {fields['detail']}"
    if kind == "config_changed":
        pairs = (f"{path} {_short(old)} → {_short(new)}" for path, (old, new) in fields["changes"].items())
        return f"config changed: {', '.join(pairs)}"
    parts = [f"{name} {_short(value)}" for name, value in fields.items() if name != "detail" and value is not None]
    detail = [str(fields["detail"])] if fields.get("detail") else []
    text = ", ".join(parts + detail).replace("\n", " ")
    name = kind.replace("_", " ")
    return f"{name}: {text}" if text else name


def _short(value: Any) -> str:
    if value is None:
        return "unset"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
