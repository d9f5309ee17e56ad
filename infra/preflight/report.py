"""What the tasks print: findings, rules and changes, one a line or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from infra.preflight.change import Change
from infra.preflight.finding import Finding
from infra.preflight.rule import Rule

LEVELS = ("error", "unknown", "warning")


def lines(findings: Sequence[Finding]) -> Iterator[str]:
    """All findings, errors first, and how many there are of each level."""
    for level in LEVELS:
        yield from (finding.line() for finding in findings if finding.level == level)
    yield ", ".join(f"{_counted(sum(one.level == level for one in findings), level)}" for level in LEVELS)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 where something would fail; what could not be checked is said, and is no failure."""
    return int(any(finding.level == "error" for finding in findings))


def as_json(findings: Sequence[Finding] | Sequence[Change]) -> str:
    return json.dumps([asdict(one) for one in findings], indent=2, ensure_ascii=False)


def rule_lines(rules: Iterable[Rule]) -> Iterator[str]:
    """Every rule by its code: level, where it looks, what must hold, and the source."""
    for rule in sorted(rules, key=lambda rule: rule.code):
        marks = [mark for mark, there in (("online", rule.online), ("essential", rule.essential)) if there]
        about = f" ({', '.join(marks)})" if marks else ""
        yield f"{rule.code} {rule.level}{about}: {rule.checks} [{rule.source}]"


def change_lines(changes: Sequence[Change], refused: Sequence[Change]) -> Iterator[str]:
    yield from (change.line() for change in changes)
    if not changes:
        yield "nothing changes"
    elif refused:
        yield f"{len(changes)} changes, {len(refused)} refused: `pulumi up` must not be asked for this"
    else:
        yield f"{_counted(len(changes), 'change')}"


def _counted(count: int, what: str) -> str:
    plural = what if count == 1 or what == "unknown" else f"{what}s"
    return f"{count or 'no'} {plural}"
