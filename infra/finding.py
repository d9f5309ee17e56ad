"""The rules over a cluster, and what they find: one form for preflight, which judges a description, and for the policy pack,
which judges what a program declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from lustrain.problem import Problem

Problems = Iterable[Problem]
Look = TypeVar("Look", bound=Callable[..., Iterable[str]])
Level = Literal["error", "warning", "unknown"]
"""`unknown`: an online rule could not look (no permission, no network); that is never `ok`."""
LEVELS: tuple[Level, ...] = ("error", "unknown", "warning")
"""In the order in which they are shown."""


def finding(path: str, why: str, fix: str = "", *, code: str = "", level: str = "", source: str = "") -> Problem:
    """Return the line `CODE level: path: why; fix: …`; the level of a line with a code is `error` where none is given.

    A rule adds its own code, level and source to what it finds (`Rule.label`).
    """
    shown = level or ("error" if code else "")
    return Problem(
        f"{code} {shown}: {path}: {why}; fix: {fix}", path=path, why=why, fix=fix, code=code, level=shown, source=source
    )


@dataclass(frozen=True)
class Rule:
    """One check: `code` is stable, `checks` says in a sentence what must hold, `source` where AWS says so.

    `look` yields what is wrong in what it is called with: for preflight a context, and AWS's clients too where the rule has a
    `permission`, the action that it asks AWS with; for the policy pack one resource, or all of a stack. `fix` is for problems
    that name none.

    A problem of an `essential` rule cannot be suppressed: no plan can be built on such a spec. Every other one can, with a
    reason, since facts about AWS age; CFG-092 warns where AWS would refuse the update all the same. A `judgement` is ours: AWS
    accepts what breaks the rule, and the harm comes later.
    """

    code: str
    checks: str
    source: str
    look: Callable[..., Problems] = lambda *facts: ()
    level: Level = "error"
    essential: bool = False
    judgement: bool = False
    permission: str = ""
    fix: str = ""

    @property
    def refused_by_aws(self) -> bool:
        """Whether AWS itself refuses what breaks this rule, as far as its source is AWS's own."""
        return self.level == "error" and self.source.startswith("https://") and not self.judgement

    def check(self, *facts: object) -> Iterator[Problem]:
        """Yield what `look` finds wrong in `facts`; of problems to which the plan gave a code, this rule's own."""
        for problem in self.look(*facts):
            if problem.code in ("", self.code):
                yield self.label(problem)

    def label(self, problem: Problem) -> Problem:
        """Return the problem with this rule's code, and its fix, level and source where it has none of its own."""
        fix, level, source = problem.fix or self.fix, problem.level or self.level, problem.source or self.source
        return finding(problem.path, problem.why, fix, code=self.code, level=level, source=source)


class RuleTable(list[Rule]):
    """The rules of one module, in the order in which they look."""

    def add(
        self,
        code: str,
        checks: str,
        source: str,
        *,
        level: Level = "error",
        essential: bool = False,
        judgement: bool = False,
        permission: str = "",
        fix: str = "",
    ) -> Callable[[Look], Look]:
        """Add a row of the table whose function is the decorated one; a function of several rules has a row for each."""

        def keep(look: Look) -> Look:
            self.append(Rule(code, checks, source, self.called(look), level, essential, judgement, permission, fix))
            return look

        return keep

    @staticmethod
    def called(look: Callable[..., Any]) -> Callable[..., Problems]:
        """Return the function as `Rule.check` calls it."""
        return look
