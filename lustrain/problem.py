"""A user's mistake as one line, `path = value: why; allowed: …; fix: …`, and the error that carries such lines.

Standard library and Python 3.9 only: the node agent and the trainer's image carry this file too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

DONE = 0
FAILED = 1
"""The request was right, and its work failed."""
USAGE = 2
"""The request or a configuration is wrong; nothing was done."""
UNREACHABLE = 3
"""A machine or a service does not answer."""
DIFFERS = 4
"""The actual state is not the wanted one."""

LONGEST_VALUE = 120
_CREDENTIALS = re.compile(r"://\S*@")
"""User and password in an address, which no message may hold."""


def plain(text: str) -> str:
    """Return one line that every terminal takes: control characters, line ends and lone surrogates are escaped."""
    return "".join(item if item.isprintable() else item.encode("unicode_escape").decode() for item in text)


class Problem(str):
    """One line about one mistake, which remembers its parts.

    `path` is the key, flag or file at fault; `code` is the rule, like C012; `source` is where that rule comes
    from. A line of other making has no parts.
    """

    path: str
    why: str
    allowed: str
    fix: str
    code: str
    source: str
    level: str
    """`error`, or `warning` where work goes on."""

    def __new__(
        cls,
        line: str,
        *,
        path: str = "",
        why: str = "",
        allowed: str = "",
        fix: str = "",
        code: str = "",
        source: str = "",
        level: str = "error",
    ) -> Problem:
        self = super().__new__(cls, plain(line))
        self.path, self.why, self.allowed, self.fix = path, why or str(self), allowed, fix
        self.code, self.source, self.level = code, source, level
        return self


def problem(
    path: str, value: object, why: str, allowed: str = "", fix: str = "", *, code: str = "", level: str = "error"
) -> Problem:
    """Return the line `path = value: why; allowed: …; fix: …`; a long value is cut."""
    ends = [f"allowed: {allowed}" if allowed else "", f"fix: {fix}" if fix else ""]
    line = "; ".join([f"{path} = {_shown(value)}: {why}", *filter(None, ends)])
    return Problem(line, path=path, why=why, allowed=allowed, fix=fix, code=code, level=level)


def _shown(value: object) -> str:
    try:
        shown = repr(value) if isinstance(value, (str, bytes)) else str(value)
    except (RecursionError, ValueError):
        # Python prints no whole number of more than 4,300 digits.
        return f"a value of type {type(value).__name__}, too large to show"
    shown = _CREDENTIALS.sub("://…@", shown)
    return shown if len(shown) <= LONGEST_VALUE else shown[:LONGEST_VALUE] + "…"


class UserError(Exception):
    """Something the user can mend: printed as plain lines, one a problem, never as a traceback."""

    exit_code = USAGE
    everywhere = False
    """Whether each process of a job prints its own; what all know alike is printed by one on each machine."""

    def __init__(self, problems: str | Iterable[str], exit_code: int | None = None) -> None:
        lines = [problems] if isinstance(problems, str) else problems
        self.problems = [line if isinstance(line, Problem) else Problem(line) for line in lines]
        if exit_code is not None:
            self.exit_code = exit_code
        super().__init__("\n".join(self.problems))


def did_you_mean(name: str, names: Iterable[str], *, likeness: float = 0.7) -> str:
    """Return a fix that lists up to three of the nearest names; empty where none is as near as `likeness` (0 to 1)."""
    close = difflib.get_close_matches(name, list(names), 3, likeness)
    return "did you mean " + " or ".join(close) + "?" if close else ""


_PAGE = re.compile(r"<\s*/?(!doctype|html|head|body|title)\b", re.IGNORECASE)


def is_page(text: str) -> bool:
    """Check whether this is a page for people, which a proxy, a portal or a load balancer sends in place of AWS's answer."""
    return _PAGE.search(text) is not None


def without_page(text: str) -> str:
    """Return AWS's message, or in place of an HTML page a note that it is one."""
    return "an HTML page, so that something else than AWS answers" if is_page(text) else text
