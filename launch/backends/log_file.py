"""The log of a run that is one file of this machine, or of a file system that this machine sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launch.backends import LogLine
from launch.request import RunRequest
from lustrain.problem import UserError, problem

CHUNK = 1 << 20


def log_file(request: RunRequest, folder: Path) -> str:
    """Return the file of the run's output: in a run that is a folder, else beside the caller."""
    return f"{folder}/lustrain-{request.name}.log" if "://" in request.run else f"{request.run}/launch/log"


def read_log_file(run: str, job: Mapping[str, Any] | None, more: Callable[[], bool]) -> Iterator[LogLine]:
    """Yield the lines of the file that `job` names, as `Backend.read_log`. UserError where it is not here."""
    if not job or not job.get("log"):
        raise UserError(problem("RUN", run, "no log of it is kept", fix=f"fab status {run} shows its launches"))
    path, lines = Path(str(job["log"])), LineReader()
    offset = 0
    while True:
        goes_on = more()
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                while data := file.read(CHUNK):
                    offset += len(data)
                    yield from map(LogLine, lines.feed(data))
        except FileNotFoundError:
            if not goes_on:
                fix = "run fab logs on the machine where fab train was called, or wait until the run starts"
                raise UserError(problem("log", str(path), "there is no such file here", fix=fix)) from None
        if not goes_on:
            yield from map(LogLine, lines.unfinished_line())
            return


class LineReader:
    """Makes lines of pieces of text."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes."""
        *lines, self._held = (self._held + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def unfinished_line(self) -> list[str]:
        """Return the last line, if it has no end."""
        held, self._held = self._held, b""
        return [held.decode(errors="replace")] if held else []
