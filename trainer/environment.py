"""What launchers and ranks tell each other in variables: which start of a job this is, how long silence may last, a last word.

The lease counts only the starts that got as far as the run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lustrain.problem import UserError, problem

ATTEMPT = "LUSTRAIN_ATTEMPT"
NODE_LIST = "LUSTRAIN_ROSTER"
"""Variable with any text that names the nodes of the attempt: the same on all of its ranks."""
ERROR_FILE = "LUSTRAIN_LAST_WORD"
"""Variable with the path of a file that a rank which fails writes one line into, for its launcher."""

SILENT = "LUSTRAIN_SILENT_S"
"""Variable with the seconds after which a rank or a launcher that others do not hear counts as lost."""
MIN_SILENT_S = 2.0


def max_silence_s(usual: float, environ: Mapping[str, str] = os.environ) -> float:
    """Return how many seconds of silence are a loss: of the variable, else `usual`. UserError for what is no such time."""
    value = environ.get(SILENT, "")
    try:
        seconds = float(value) if value else usual
    except ValueError:
        seconds = 0.0
    if not MIN_SILENT_S <= seconds < float("inf"):
        allowed = f"seconds from {MIN_SILENT_S:g}"
        raise UserError(problem(SILENT, value, "is not a time to wait", allowed=allowed, fix=f"unset {SILENT}"))
    return seconds


def launch_attempt(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the launcher's number, from 1; None where no launcher gives one. UserError for what is not a number."""
    value = environ.get(ATTEMPT, "")
    if not value:
        return None
    if not (value.isascii() and value.isdecimal() and 1 <= len(value) <= 9 and int(value)):
        fix = f"unset {ATTEMPT}: the launcher sets it"
        raise UserError(problem(ATTEMPT, value, "is not the number of an attempt", allowed="1 .. 999999999", fix=fix))
    return int(value)


def store_prefix(environ: Mapping[str, str] = os.environ) -> str:
    """Return a prefix for what ranks put into their store, so that ranks of two attempts never meet."""
    return f"{environ.get(ATTEMPT, '')}/{environ.get(NODE_LIST, '')}"


def report_error(line: str) -> None:
    """Tell the launcher, if there is one, why this rank ends."""
    if path := os.environ.get(ERROR_FILE):
        Path(path).write_text(line, encoding="utf-8", errors="replace")
