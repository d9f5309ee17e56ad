"""All rules that need nothing but the spec, and the running of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from infra import clock
from infra.config import ClusterSpec
from infra.plan.place import Place
from infra.preflight import (
    access,
    associations,
    buckets,
    capacity,
    configuration,
    hyperpod,
    images,
    instances,
    kubernetes,
    kubernetes_options,
    network,
    offerings,
    region,
    spending,
    storage,
    tuning,
    zones,
)
from infra.preflight.finding import Finding
from infra.preflight.rule import Context, OfflineRule, Rule


class NothingSuppressed(Rule):
    code = "CFG-090"
    level = "warning"
    checks = "Every suppression silences something."
    source = "infra/config.py"


class NotSuppressible(Rule):
    code = "CFG-091"
    level = "warning"
    checks = "No suppression names a code that does not exist, or one without which no plan can be built."
    source = "infra/config.py"


class RefusedAnyway(Rule):
    code = "CFG-092"
    level = "warning"
    checks = "No suppression silences what AWS refuses all the same."
    source = "infra/preflight/rule.py"


LAST_OFFLINE = 100
"""In each family the rules that ask AWS have numbers above this."""
_FAMILIES: tuple[Sequence[OfflineRule], ...] = (
    configuration.RULES,
    region.RULES,
    network.RULES,
    offerings.RULES,
    zones.RULES,
    capacity.RULES,
    instances.RULES,
    images.RULES,
    hyperpod.RULES,
    kubernetes.RULES,
    kubernetes_options.RULES,
    storage.RULES,
    associations.RULES,
    buckets.RULES,
    access.RULES,
    spending.RULES,
    tuning.RULES,
)
OFFLINE: Mapping[str, OfflineRule] = {rule.code: rule for family in _FAMILIES for rule in family}
ABOUT_SUPPRESSIONS: Mapping[str, Rule] = {
    rule.code: rule for rule in (NothingSuppressed(), NotSuppressible(), RefusedAnyway())
}


def run_offline(spec: ClusterSpec, place: Place | None, now: datetime | None = None) -> list[Finding]:
    """What is wrong with `spec`, errors first, suppressed findings left out; `now` defaults to that of infra/clock.py.

    Without a place the rules about region, account and partition are silent, and one warning says so.
    """
    return run_in(spec, Context.at(place, now or clock.now()))


def run_in(spec: ClusterSpec, context: Context) -> list[Finding]:
    """The same, where less than a place is known."""
    found = check_offline(spec, context)
    return settle(spec, found, {**OFFLINE, **ABOUT_SUPPRESSIONS})


def check_offline(spec: ClusterSpec, context: Context) -> list[Finding]:
    """Every finding, suppressed ones too."""
    return [finding for rule in OFFLINE.values() for finding in rule.check(spec, context)]


def settle(spec: ClusterSpec, found: Iterable[Finding], asked: Mapping[str, Rule]) -> list[Finding]:
    """Findings less the suppressed ones, plus what is wrong with the suppressions, errors first.

    `asked` are the rules that looked; a suppression of an online rule that nobody asked is neither used nor unused.
    """
    findings = list(dict.fromkeys(found))
    codes = {finding.code: finding for finding in reversed(findings)}
    silenced = {one.code for one in spec.suppress if one.code in asked and not asked[one.code].essential}
    kept = [finding for finding in findings if finding.code not in silenced]
    for index, one in enumerate(spec.suppress):
        kept += _about(f"suppress.{index}", one.code, codes, asked)
    return sorted(kept, key=lambda finding: ("error", "unknown", "warning").index(finding.level))


def _about(path: str, code: str, found: Mapping[str, Finding], asked: Mapping[str, Rule]) -> Iterable[Finding]:
    """`found` has the first finding of each code."""
    rule = asked.get(code)
    unused, wrong, refused = (ABOUT_SUPPRESSIONS[about] for about in ("CFG-090", "CFG-091", "CFG-092"))
    if rule is None:
        if int(code[-3:]) <= LAST_OFFLINE:
            yield wrong.finding(path, f"{code} is no rule", "see `fab preflight --list`")
    elif rule.essential:
        yield wrong.finding(path, f"{code} cannot be suppressed: no plan can be built on that", "remove it")
    elif code not in found:
        yield unused.finding(path, f"{code} finds nothing here", "remove it")
    elif rule.refused_by_aws and found[code].level == "error":
        message = (
            f"{code} is silenced, and AWS refuses the update all the same: {found[code].path}: {found[code].message}"
        )
        yield refused.finding(path, message, "mend the key; keep this only if AWS takes it by now")
