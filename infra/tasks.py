"""`fab preflight`, `fab cost`, `fab explain-change`, `fab deployer-policy`, `fab node-policy`, `fab alert-rules`,
`fab dashboards`, `fab aws-local`.

Imports of what a task does stand in it: every `fab` loads this file, and a cluster's description takes longer to load than
nodes that are in order take to be looked at.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lustrain.files import write_whole
from lustrain.flags import flag
from lustrain.problem import FAILED, USAGE, UserError, problem
from lustrain.task import TaskResult, task

STACK = "name of the stack, as in Pulumi.<stack>.yaml"


@dataclass(frozen=True)
class Preflight:
    stack: str | None = flag(None, f"{STACK}; all of them by default")
    online: bool = flag(False, "ask AWS too: offerings, quotas, reservations, subnets, buckets (read-only)")
    json: bool = flag(False, "print a list of findings")
    list: bool = flag(False, "print every rule: code, level, what must hold")


@task("preflight")
def preflight(flags: Preflight) -> TaskResult:
    """Find mistakes in a cluster's description before it is created. Exit code: 1 errors, 2 nothing to check, 3 no AWS."""
    from infra.plan.summary import summary
    from infra.preflight import commands, report

    if flags.list:
        rules = commands.rules()
        return TaskResult(rules, rules)
    by_stack, wrong = commands.findings(flags.stack, flags.online)
    lines: list[str] = []
    for name, (stack, findings) in by_stack.items():
        lines += [] if flags.stack else [f"{name}:"]
        if report.exit_code(findings):
            lines += report.lines(findings)
        else:
            lines += [*summary(stack.spec), *report.lines(findings)]
            lines += [*report.cost_lines(commands.costs(stack)), *commands.before_first_up(stack)]
    every = [finding for _, findings in by_stack.values() for finding in findings]
    data = [{"stack": name} | row for name, (_, findings) in by_stack.items() for row in report.as_data(findings)]
    return TaskResult(lines, data, USAGE if wrong else report.exit_code(every), wrong)


@dataclass(frozen=True)
class Cost:
    stack: str = flag(help=STACK)
    online: bool = flag(False, "ask AWS's price list what machines cost today (read-only)")
    json: bool = flag(False, "print a table of the parts, the sums, and the prices with their dates and sources")


@task("cost")
def cost(flags: Cost) -> TaskResult:
    """Show what a stack costs an hour and a month, part by part, at list prices."""
    from infra.preflight import commands, report, stackfile

    cost = commands.costs(stackfile.read(flags.stack), online=flags.online)
    return TaskResult(list(report.cost_lines(cost)), report.cost_data(cost))


@dataclass(frozen=True)
class ExplainChange:
    stack: str = flag(help=STACK)
    old: str | None = flag(None, "file with the spec that is deployed; the stack's output `spec` by default")
    json: bool = flag(False, "print a list of changes")


@task("explain-change")
def explain_change(flags: ExplainChange) -> TaskResult:
    """Show what `pulumi up` would replace, re-image or wipe. Exit code: 1 where it must not run, 2 where it cannot be known."""
    from infra.preflight import commands, report
    from infra.preflight.explain import refused

    changes = commands.changes(flags.stack, flags.old)
    forbidden = refused(changes)
    lines = list(report.change_lines(changes, forbidden))
    return TaskResult(lines, [asdict(change) for change in changes], FAILED if forbidden else 0)


@dataclass(frozen=True)
class AwsLocal:
    """No flags."""


@task("aws-local")
def aws_local(flags: AwsLocal) -> TaskResult:
    """Run the embedded AWS and instance metadata until Ctrl-C; prints what to export."""
    from infra.local.__main__ import main

    return TaskResult((), code=main())


@dataclass(frozen=True)
class InAccount:
    stack: str = flag(help=STACK)
    account: str = flag(help="number of the account that the cluster is, or will be, in")


@task("deployer-policy")
def deployer_policy(flags: InAccount) -> TaskResult:
    """Print the IAM policies that a person needs to run `pulumi up` for a stack, each small enough to attach."""
    from infra.preflight import commands

    return TaskResult(json.dumps(commands.policies(flags.stack, flags.account), indent=2).splitlines())


@dataclass(frozen=True)
class NodePolicy(InAccount):
    role: str = flag(
        "node",
        "whose: node, monitor, or on EKS eks-cluster, fsx-csi, train-operator, hyperpod-metrics, logs or karpenter",
    )


@task("node-policy")
def node_policy(flags: NodePolicy) -> TaskResult:
    """Print what an existing role (access.node_role, or one of eks) must trust, hold and allow."""
    from infra.preflight import commands

    policy = commands.role_policy(flags.stack, flags.account, flags.role)
    return TaskResult(json.dumps(policy, indent=2).splitlines())


@dataclass(frozen=True)
class AlertRules:
    json: bool = flag(False, "print the rules as JSON instead of YAML")


@task("alert-rules")
def alert_rules(flags: AlertRules) -> TaskResult:
    """Print the alert rules of runs and nodes as a rule file for Prometheus."""
    from infra.plan.watch import alert_rules as rules

    return TaskResult(rules.render().splitlines(), rules.rule_file())


@dataclass(frozen=True)
class Dashboards:
    output: str = flag("dashboards", "folder to write the files to")
    runbook: str | None = flag(None, "address at which docs/runbook.md is served, for links from panels")
    gpu_hour_usd: str | None = flag(None, "price of a GPU-hour on the page of costs; a list price by default")
    json: bool = flag(False, "print the files' paths as JSON")


@task("dashboards")
def dashboards(flags: Dashboards) -> TaskResult:
    """Write Grafana dashboards of runs and nodes, and the file that has Grafana load them."""
    from infra.plan.watch.dashboards import files

    folder = Path(flags.output).absolute()
    texts = files(str(folder), flags.runbook, flags.gpu_hour_usd)
    fix = "name a folder that is there, or can be made"
    if not flags.output:
        raise UserError(problem("--output", flags.output, "is no folder", fix=fix))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_whole(folder / name, text.encode())
    except OSError as error:
        raise UserError(problem("--output", flags.output, f"cannot be written to: {error.strerror}", fix=fix)) from None
    paths = [str(folder / name) for name in texts]
    return TaskResult([f"wrote {path}" for path in paths], {"files": paths})


TASKS = (preflight, cost, explain_change, deployer_policy, node_policy, alert_rules, dashboards, aws_local)
