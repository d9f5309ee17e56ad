"""Errors that are the user's to mend, and the exit codes a launcher acts on (README.md has them in a table)."""

from __future__ import annotations

import re
from collections.abc import Sequence

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_CONFIG = 2
EXIT_REQUEUE = 85
EXIT_LOST_RUN = 86


def problem(path: str, value: object, why: str, *, allowed: str = "", fix: str = "") -> str:
    """One line in the house form `path = value: why; allowed: …; fix: …`."""
    shown = repr(value) if isinstance(value, str) else str(value)
    line = f"{path} = {shown[:200]}: {why}"
    if allowed:
        line += f"; allowed: {allowed}"
    if fix:
        line += f"; fix: {fix}"
    return line


_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""What would break a line or a terminal when somebody else's text (a key, a server's answer) is quoted."""


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


class UserError(Exception):
    """Something the user can mend: printed as plain lines, one per problem, never as a traceback."""

    exit_code = EXIT_CONFIG
    everywhere = False
    """Whether each rank has its own to say; what all ranks know alike is printed by one per node."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        lines = [problems] if isinstance(problems, str) else list(problems)
        self.problems = [_UNPRINTABLE.sub(_escaped, line) for line in lines]
        super().__init__("\n".join(self.problems))


class LostRunError(UserError):
    """A newer job owns this run; this one must stop and must not commit anything any more."""

    exit_code = EXIT_LOST_RUN
