"""What the tasks print: findings of stacks, effects of a change, permissions to deploy. All functions raise UserError."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from infra.clock import now
from infra.config import ClusterSpec, parse
from infra.plan import deployer_policy as iam_deployer
from infra.plan.cost import Cost, cost, machine_types
from infra.plan.nodes.bundle import bundle
from infra.plan.nodes.eks import first_up
from infra.plan.place import Place
from infra.plan.roles import roles
from infra.preflight import stackfile
from infra.preflight.change import Change, Effect
from infra.preflight.explain import explain, explain_bundle
from infra.preflight.explain_monitor import ANEW as MONITOR_ANEW
from infra.preflight.explain_monitor import newer_lustrain, workspace_alone
from infra.preflight.offline import OFFLINE, SUPPRESSIONS, run_in
from infra.preflight.report import rule_lines
from infra.preflight.rule import Context
from lustrain import deployed
from lustrain.problem import Problem, UserError, problem


def rules() -> list[str]:
    """Return a line for every rule, offline and online."""
    from infra.preflight.online.run import ONLINE

    return list(rule_lines([*OFFLINE.values(), *SUPPRESSIONS.values(), *ONLINE.values()]))


def findings(stack: str | None, online: bool) -> tuple[dict[str, tuple[stackfile.Stack, list[Problem]]], list[str]]:
    """Stacks and their findings by name, and the lines about stacks that cannot be read; the account is known only online."""
    if stack is None and online:
        raise UserError("--online needs a stack: each asks its own region; fix: add --stack NAME")
    names = stackfile.stacks() if stack is None else [stack]
    if not names:
        raise UserError(f"there is no Pulumi.<stack>.yaml in {stackfile.PROGRAM}; fix: write one, see docs/cluster.md")
    look, moment = _findings_online if online else _findings_offline, now()
    by_stack: dict[str, tuple[stackfile.Stack, list[Problem]]] = {}
    wrong: list[str] = []
    for name in names:
        try:
            read = stackfile.read(name)
            by_stack[name] = read, look(read, moment)
        except UserError as error:
            wrong += error.problems if stack is not None else [f"{name}: {line}" for line in error.problems]
    return by_stack, wrong


def _findings_offline(stack: stackfile.Stack, moment: datetime) -> list[Problem]:
    return run_in(Context.of_region(stack.spec, stack.region, moment))


def _findings_online(stack: stackfile.Stack, moment: datetime) -> list[Problem]:
    from infra.aws import connect
    from infra.preflight.online.run import run_all

    if stack.region is None:
        raise UserError(f"{stackfile.REGION} is missing; fix: add it to Pulumi.{stack.name}.yaml, or set AWS_REGION")
    return run_all(stack.spec, connect(stack.region), moment)


def changes(stack: str, old: str | None) -> list[Change]:
    """Return what differs from the file `old`, by default from the spec in the stack's outputs."""
    read = stackfile.read(stack)
    after, region = read.spec, read.region or ""
    sha = bundle(after, region=region).sha
    alone: list[Change] = []
    booted: str | None = None
    if old:
        before = stackfile.read_spec(Path(old))
        was = bundle(before, region=region).sha
    else:
        outputs = deployed.outputs(stack, "spec", "--old FILE")
        before = parse(_as_deployed(outputs["spec"]))
        alone = [workspace_alone(after)] if _switch(outputs["spec"]) else []
        # Rules and dashboards have changed since there was no such output.
        was, booted = str(outputs.get("bundle", sha)), outputs.get("monitorBoot", "")
    differences = explain(before, after, now())
    if not any(change.message.endswith(MONITOR_ANEW.message) for change in differences):
        differences += newer_lustrain(before, after, booted)
    stays = before.controller is not None and after.controller is not None
    # One line about the controller is enough, however many causes it has.
    anew = any(
        change.path.startswith("scheduler.controller") and change.effect == Effect.REPLACES_NODES
        for change in differences
    )
    return [*differences, *alone, *explain_bundle(was, sha, controller=stays and not anew)]


BEFORE = {"version": "1.34", "upgrade_policy": "EXTENDED"}
"""Of stacks whose outputs leave defaults out: our version then, and EKS's own policy
(https://docs.aws.amazon.com/eks/latest/APIReference/API_UpgradePolicyRequest.html)."""


def _as_deployed(spec: Any) -> Any:
    """Return an output `spec` in today's form: with the defaults of its time for `eks`, which differ today, and without a
    monitor where `observability.prometheus` was a switch."""
    if not isinstance(spec, Mapping):
        return spec
    values, eks = dict(spec), spec.get("eks", {})
    if isinstance(eks, Mapping):
        values["eks"] = {**BEFORE, **eks}
    if _switch(spec) is not None:
        values["observability"] = {**spec["observability"], "prometheus": "none"}
    return values


def _switch(spec: Any) -> bool | None:
    """Return what `observability.prometheus` was while it was a switch, which made a workspace alone; None for a later spec."""
    watch = spec.get("observability") if isinstance(spec, Mapping) else None
    value = watch.get("prometheus") if isinstance(watch, Mapping) else None
    return value if isinstance(value, bool) else None


def before_first_up(stack: stackfile.Stack) -> list[str]:
    """Return what a person has to know, and do, before the first `pulumi up` of a stack."""
    return list(first_up(stack.spec, Context.of_region(stack.spec, stack.region).place))


NO_REGION = "the stack names no aws:region: these are the prices of us-east-1"


def costs(stack: stackfile.Stack, *, online: bool = False) -> Cost:
    """Return what a stack costs; one without a region at the prices of us-east-1. `online` asks AWS for those of machines;
    UserError where it does not answer."""
    plan = Context.of_region(stack.spec, stack.region, now()).plan
    if online:
        from infra.prices_online import on_demand_prices

        total = cost(plan, on_demand_prices(machine_types(stack.spec), plan.place.region, now()))
    else:
        total = cost(plan)
    return total if stack.region else replace(total, remarks=(*total.remarks, NO_REGION))


def policies(stack: str, account: str) -> list[Any]:
    """Return the IAM policies that a person needs to run `pulumi up` for a stack, each small enough to attach."""
    spec, place = _placed(stack, account)
    return list(iam_deployer.managed_policies(iam_deployer.deployer_policy(spec, place)))


def role_policy(stack: str, account: str, role: str) -> dict[str, Any]:
    """Return what a role must trust, which of AWS's policies it must hold, and what else it must allow. UserError lists the
    stack's roles where there is no such one."""
    plans = {plan.key: plan for plan in roles(*_placed(stack, account))}
    if role not in plans:
        raise UserError(problem("--role", role, "is not a role of this stack", allowed=", ".join(plans)))
    plan = plans[role]
    return {"trust": plan.trust, "managed": list(plan.managed), "policy": plan.policy}


def _placed(stack: str, account: str) -> tuple[ClusterSpec, Place]:
    read = stackfile.read(stack)
    if not read.region:
        raise UserError(f"{stackfile.REGION} is missing; fix: add it to Pulumi.{stack}.yaml, or set AWS_REGION")
    if not re.fullmatch(r"\d{12}", account):
        raise UserError(problem("--account", account, "must be an account number", allowed="12 digits"))
    return read.spec, replace(Context.of_region(read.spec, read.region), account=account).place
