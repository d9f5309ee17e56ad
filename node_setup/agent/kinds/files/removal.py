"""The removal of a whole file with the one setting that wanted it: a replaced node never had that file."""

from __future__ import annotations

from collections.abc import Sequence

from lustrain.status import Status
from node_setup.agent.kinds.files.owned_lines import unwritable
from node_setup.agent.model import PERSISTED, Action, Facts, Remark, Remove, Request, Setting, Step


def plan_removal(
    path: str,
    chosen: Sequence[Setting],
    facts: Facts,
    request: Request,
    before: tuple[Action, ...] = (),
    after: tuple[Action, ...] = (),
) -> list[Step | Remark]:
    """Plan to remove the file; no step where a setting wants it, where it is not there, or where the run is about single
    settings."""
    if chosen or request.only or not (facts.get("files") or {}).get(path):
        return []
    refused = unwritable(facts, path)
    if refused:
        return [Remark(path, Status.FAILED, refused, "in place", "no file")]
    return [Step(path, PERSISTED, path, "in place, not wanted", "no file", (*before, Remove(path), *after))]
