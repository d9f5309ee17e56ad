"""Files that one setting fills: `options.path`, `options.lines`, and `options.after`, the programs to run afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from node_setup.agent import owned
from node_setup.agent.kinds.files.owned_lines import OwnedLines
from node_setup.agent.kinds.verdict import with_ok
from node_setup.agent.model import Facts, Remark, Request, Run, Setting, Step

PATHS = (owned.NEEDRESTART,)
"""These files are this kind's even when no setting fills them any more: they are removed then."""


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    planned: list[Step | Remark] = []
    for path in dict.fromkeys((*PATHS, *(setting.options["path"] for setting in chosen))):
        fill = [setting for setting in chosen if setting.options["path"] == path]
        after = dict.fromkeys(Run(tuple(command)) for setting in fill for command in setting.options.get("after", ()))
        lines = {setting.id: "\n".join(setting.options["lines"]) for setting in fill}
        planned += OwnedLines(path, after=tuple(after)).plan(lines, selected, facts, request)
    return with_ok(planned, chosen, selected, {})
