"""The error of a failed build, in the words of the step that failed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from images.build.steps import Steps
from lustrain.problem import FAILED, UserError, plain

_LONGEST_STEP = 200
_FULL = re.compile("no space left on device|disk quota exceeded", re.IGNORECASE)


def failure(target: str, steps: Steps, prose: Sequence[str]) -> UserError:
    """The error of a build of `target`: a line that names the failed step and why, then the end of its log. `prose`: what the
    engine or the CLI said last, for failures that are no step's."""
    found = steps.failed("\n".join(prose))
    log = found[1] if found else []
    if any(_FULL.search(line) for line in (*log, *prose, (found[0].error or "") if found else "")):
        where = f" in {_cut(found[0].name)}" if found else ""
        first = f"build {target}: the engine's disk is full{where}; fix: free space there, such as docker builder prune"
    elif found:
        step = found[0]
        first = f"build {target}: step {_cut(step.name)} failed after {step.seconds:.1f} s: {_why(step.error or '')}"
    else:
        said = [line for line in prose if line.startswith("ERROR:")] or list(prose)
        first = f"build {target}: {_why(said[-1]) if said else 'failed without a message'}"
    return UserError([plain(first), *(f"  | {line}" for line in log)], FAILED)


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST_STEP else name[:_LONGEST_STEP] + "…"


def _why(error: str) -> str:
    """Without the command, which the step's name has already."""
    short = re.sub(r"^(ERROR: )?(target [\w-]+: )?(failed to solve: )?", "", " ".join(error.split()))
    ended = re.fullmatch(r'process ".*" did not complete successfully: (exit code: \d+.*)', short)
    return (ended[1].replace("exit code:", "exit code") if ended else short)[:500]
