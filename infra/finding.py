"""A mistake in a cluster's description, as preflight prints it."""

from __future__ import annotations

from typing import Literal

from lustrain.problem import Problem

Level = Literal["error", "warning", "unknown"]
"""`unknown`: an online rule could not look (no permission, no network); that is never `ok`."""


def finding(path: str, why: str, fix: str, *, code: str = "", level: str = "", source: str = "") -> Problem:
    """Return the line `CODE level: path: why; fix: …`; the level of a line with a code is `error` where none is given.

    A rule of preflight adds its own code, level and source to what it finds (`Rule.own`).
    """
    shown = level or ("error" if code else "")
    return Problem(
        f"{code} {shown}: {path}: {why}; fix: {fix}", path=path, why=why, fix=fix, code=code, level=shown, source=source
    )
