"""The pack as the engine runs it: `pulumi preview --policy-pack infra/policy`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pulumi_policy import (
    EnforcementLevel,
    Policy,
    PolicyPack,
    PolicyResource,
    ReportViolation,
    ResourceValidationArgs,
    ResourceValidationPolicy,
    StackValidationArgs,
    StackValidationPolicy,
)
from pulumi_policy.proxy import UnknownValueError

from infra.finding import Rule
from infra.policy import checks, relations
from infra.policy.declared import UNKNOWN, Resource


def policies() -> list[Policy]:
    return [*map(_resource_policy, checks.RULES), *map(_stack_policy, relations.RULES)]


def _resource_policy(rule: Rule) -> Policy:
    def validate(args: ResourceValidationArgs, report: ReportViolation) -> None:
        for problem in rule.check(_resource(args)):
            report(f"{problem.why}; fix: {problem.fix}", None)

    return ResourceValidationPolicy(rule.code, rule.checks, validate, url=rule.source, remediation_steps=rule.fix)


def _stack_policy(rule: Rule) -> Policy:
    def validate(args: StackValidationArgs, report: ReportViolation) -> None:
        for problem in rule.check([_resource(item) for item in args.resources]):
            report(f"{problem.why}; fix: {problem.fix}", problem.path)

    return StackValidationPolicy(rule.code, rule.checks, validate, url=rule.source, remediation_steps=rule.fix)


def _resource(args: ResourceValidationArgs | PolicyResource) -> Resource:
    uses = args.property_dependencies if isinstance(args, PolicyResource) else {}
    return Resource(
        type=args.resource_type,
        props=_plain(args.props),
        name=args.name,
        urn=args.urn,
        protect=args.opts.protect,
        ignore_changes=tuple(args.opts.ignore_changes),
        uses={prop: frozenset(item.urn for item in used) for prop, used in uses.items()},
    )


def _plain(value: Any) -> Any:
    """Return the engine's values as plain data: its own tables raise on a value that a preview does not know."""
    if isinstance(value, Mapping):
        return {key: _known(value, key) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_known(value, index) for index in range(len(value))]
    return value


def _known(holder: Any, key: Any) -> Any:
    try:
        return _plain(holder[key])
    except UnknownValueError:
        return UNKNOWN


if __name__ == "__main__":
    PolicyPack("lustrain", policies(), EnforcementLevel.MANDATORY)
