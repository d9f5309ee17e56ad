"""Which start of a job this is, as its launcher counts, and a rank's last word to its launcher.

The lease counts only the starts that got as far as the run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lustrain.problem import UserError, problem

ATTEMPT = "LUSTRAIN_ATTEMPT"
ROSTER = "LUSTRAIN_ROSTER"
"""Variable with any text that names the nodes of the attempt: the same on all of its ranks."""
LAST_WORD = "LUSTRAIN_LAST_WORD"
"""Variable with the path of a file that a rank which fails writes one line into, for its launcher."""


def launch_attempt(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the launcher's number, from 1; None where no launcher gives one. UserError for what is not a number."""
    value = environ.get(ATTEMPT, "")
    if not value:
        return None
    if not (value.isascii() and value.isdecimal() and 1 <= len(value) <= 9 and int(value)):
        fix = f"unset {ATTEMPT}: the launcher sets it"
        raise UserError(problem(ATTEMPT, value, "is not the number of an attempt", allowed="1 .. 999999999", fix=fix))
    return int(value)


def meeting(environ: Mapping[str, str] = os.environ) -> str:
    """Return a prefix for what ranks put into their store, so that ranks of two attempts never meet."""
    return f"{environ.get(ATTEMPT, '')}/{environ.get(ROSTER, '')}"


def leave_word(line: str, environ: Mapping[str, str] = os.environ) -> None:
    """Tell the launcher, if there is one, why this rank ends."""
    if path := environ.get(LAST_WORD):
        Path(path).write_text(line, encoding="utf-8", errors="replace")
