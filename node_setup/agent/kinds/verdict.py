"""The `ok` of each setting for which a kind planned no step and made no remark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lustrain.status import Status
from node_setup.agent.model import Remark, Setting, Step


def with_ok(
    planned: Sequence[Step | Remark],
    chosen: Sequence[Setting],
    selected: frozenset[str],
    current: Mapping[str, str | None],
    why: str = "as it should be",
) -> list[Step | Remark]:
    """Add `ok` for each selected setting that has no step and no remark; a conflict alone does not count as a remark."""
    named = {line.setting for line in planned if isinstance(line, Step) or line.status != Status.CONFLICT}
    quiet = [setting for setting in chosen if setting.id in selected and setting.id not in named]
    return [
        *planned,
        *(Remark(setting.id, Status.OK, why, current.get(setting.id), setting.value) for setting in quiet),
    ]
