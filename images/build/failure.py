"""The error of a failed build or push, with the failed step's own words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from images.build.steps import Steps
from images.model import Step
from images.plan.references import parse
from images.registry.refusals import GO_ON, refusal, without_names, without_queries
from lustrain.problem import FAILED, UserError, plain, problem

_FULL = re.compile("no space left on device|disk quota exceeded", re.IGNORECASE)
_PUSH = re.compile("failed to push|push access denied")
_LOST = re.compile("parent snapshot .* does not exist")
"""Engines with containerd's store have this race: https://github.com/moby/buildkit/issues/6521"""
_PASSING = re.compile(
    r"refused|reset|eof|broken pipe|time(d )?out|unreachable|no route|closed|server error|unavailable|too many requests"
    r"|canceled|short write|no such host|temporary failure|: (429|50[0234]) ",
    re.IGNORECASE,
)


class BuildError(UserError):
    """This is a failed build, with the steps that ended before; `again` says what is done once more, where that may help."""

    def __init__(self, lines: Sequence[str], exit_code: int, steps: Sequence[Step] = (), again: str = "") -> None:
        super().__init__(lines, exit_code)
        self.steps = steps
        self.again = again


def failure(target: str, steps: Steps, messages: Sequence[str], pushed: Sequence[str] = ()) -> BuildError:
    """Return the error of a build of `target`: a line that names the failed step and why, then the end of its log.

    `messages` are those of the engine or the CLI, for failures outside of a step. `pushed` are the tags that were pushed.
    """
    step, log = steps.failed("\n".join(messages)) or (None, [])
    last = [line for line in messages if line.startswith("ERROR:")] or [*messages] or ["failed without a message"]
    why = _why(last[-1])
    if pushed and (_PUSH.search(last[-1]) or (step and step.name.startswith("pushing "))):
        return _push_failed(pushed[0], why, steps)
    error = (step.error or "") if step else ""
    if any(_FULL.search(line) for line in (*log, *messages, error)):
        where = f" in {step.name:.200}" if step else ""
        why = f"the engine's disk is full{where}; fix: free space there, such as docker builder prune"
    elif step:
        why = f"step {step.name:.200} failed after {step.seconds:.1f} s: {_why(error)}"
    again = "the engine lost a snapshot that it was unpacking on; building" if _LOST.search(why) else ""
    lines = [plain(f"build {target}: {why}"), *(f"  | {line}" for line in log)]
    return BuildError(lines, FAILED, steps.ended(), again)


def _push_failed(ref: str, answer: str, steps: Steps) -> BuildError:
    reference, answer = parse(ref), without_queries(answer)
    if refused := refusal("push", ref, answer, reference):
        return BuildError(refused.problems, refused.exit_code)
    passing = _PASSING.search(without_names(answer, reference))
    line = problem("push", ref, answer, fix=GO_ON if passing else "")
    return BuildError([line], FAILED, steps.ended(), "the push broke off; pushing" if passing else "")


def _why(error: str) -> str:
    """Return the error without the command, which is in the step's name."""
    short = re.sub(r"^(ERROR: )?(target [\w-]+: )?(failed to solve: )?", "", " ".join(error.split()))
    ended = re.fullmatch(r'process ".*" did not complete successfully: (exit code: \d+.*)', short)
    return (ended[1].replace("exit code:", "exit code") if ended else short)[:500]
