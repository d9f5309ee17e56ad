"""All rules that need nothing but the spec, and the running of them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from infra import clock
from infra.config import ClusterSpec
from infra.finding import LEVELS, Problems, Rule, finding
from infra.plan.place import Place
from infra.preflight.rule import Context, Family
from infra.preflight.rules import (
    access,
    associations,
    buckets,
    capacity,
    configuration,
    hyperpod,
    instances,
    kubernetes,
    monitor,
    network,
    offerings,
    scheduler,
    spending,
    storage,
    tuning,
    zones,
)
from lustrain.problem import Problem

UNUSED = Rule("CFG-090", "Every suppression silences something.", "infra/config.py", level="warning")
NOT_SUPPRESSIBLE = Rule(
    "CFG-091",
    "No suppression names a code that does not exist, or one without which no plan can be built.",
    "infra/config.py",
    level="warning",
)
REFUSED_ANYWAY = Rule(
    "CFG-092",
    "No suppression silences what AWS refuses all the same.",
    "infra/preflight/rule.py",
    level="warning",
)
SUPPRESSIONS: Mapping[str, Rule] = {rule.code: rule for rule in (UNUSED, NOT_SUPPRESSIBLE, REFUSED_ANYWAY)}
"""Rules about the list of suppressions itself; `suppress` applies them."""
LAST_OFFLINE = 100
"""In each family the rules that ask AWS have numbers above this."""
FAMILIES: tuple[Family, ...] = (
    configuration.RULES,
    network.RULES,
    offerings.RULES,
    zones.RULES,
    capacity.RULES,
    instances.RULES,
    scheduler.RULES,
    monitor.RULES,
    hyperpod.RULES,
    kubernetes.RULES,
    storage.RULES,
    associations.RULES,
    buckets.RULES,
    access.RULES,
    spending.RULES,
    tuning.RULES,
)
OFFLINE: Mapping[str, Rule] = {
    rule.code: rule for family in FAMILIES for rule in sorted(family, key=lambda rule: rule.code)
}


def run_offline(spec: ClusterSpec, place: Place | None, now: datetime | None = None) -> list[Problem]:
    """Return what is wrong with `spec`, errors first, suppressed findings left out; `now` defaults to that of infra/clock.py.

    Without a place the rules about region, account and partition are silent, and one warning says so.
    """
    return run_in(Context.at(spec, place, now or clock.now()))


def run_in(context: Context) -> list[Problem]:
    """Return what is wrong in `context`, which may know less than a place."""
    return suppress(context.spec, check_offline(context), {**OFFLINE, **SUPPRESSIONS})


def check_offline(context: Context) -> list[Problem]:
    """Return every finding, suppressed ones too."""
    return [finding for rule in OFFLINE.values() for finding in rule.check(context)]


def suppress(spec: ClusterSpec, findings: Problems, rules: Mapping[str, Rule]) -> list[Problem]:
    """Return findings less the suppressed ones, plus what is wrong with the suppressions, errors first.

    `rules` are those that ran; a suppression of an online rule that did not run is neither used nor unused.
    """
    every = list(dict.fromkeys(findings))
    codes = {finding.code: finding for finding in reversed(every)}
    silenced = {item.code for item in spec.suppress if item.code in rules and not rules[item.code].essential}
    kept = [finding for finding in every if finding.code not in silenced]
    for index, one in enumerate(spec.suppress):
        kept += _about(f"suppress.{index}", one.code, codes, rules)
    return sorted(kept, key=lambda finding: LEVELS.index(finding.level))


def _about(path: str, code: str, first: Mapping[str, Problem], rules: Mapping[str, Rule]) -> Problems:
    """Judge one suppression; `first` has the first finding of each code."""
    rule = rules.get(code)
    if rule is None:
        if int(code[-3:]) <= LAST_OFFLINE:
            yield NOT_SUPPRESSIBLE.label(finding(path, f"{code} is not a rule", "see `fab preflight --list`"))
    elif rule.essential:
        why = f"{code} cannot be suppressed: no plan can be built on such a spec"
        yield NOT_SUPPRESSIBLE.label(finding(path, why, "remove it"))
    elif code not in first:
        yield UNUSED.label(finding(path, f"{code} finds nothing here", "remove it"))
    elif rule.refused_by_aws and first[code].level == "error":
        message = (
            f"{code} is suppressed, but AWS refuses the update all the same: {first[code].path}: {first[code].why}"
        )
        yield REFUSED_ANYWAY.label(finding(path, message, "correct the key; keep this only if AWS accepts it now"))
