"""The `ok` of each setting for which a kind planned no step and made no remark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lustrain.status import Status
from node_setup.agent.model import Remark, Setting, Step


def with_ok(
    planned: Sequence[Step | Remark],
    chosen: Sequence[Setting],
    selected: frozenset[str],
    found: Mapping[str, str | None],
    why: str = "as it should be",
) -> list[Step | Remark]:
    """All that was said, and `ok` for each selected setting of which nothing was; a conflict goes beside either."""
    named = {one.setting for one in planned if isinstance(one, Step) or one.status != Status.CONFLICT}
    quiet = [one for one in chosen if one.id in selected and one.id not in named]
    return [*planned, *(Remark(one.id, Status.OK, why, found.get(one.id), one.value) for one in quiet)]
