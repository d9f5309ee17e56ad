"""`fab preflight`, `fab explain-change`, `fab deployer-policy`, `fab aws-local`.

Imports of what a task does stand in it: every `fab` loads this file, and a cluster's description takes longer to load than
nodes that are in order take to be looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from invoke.context import Context as Invocation
from invoke.exceptions import Exit
from invoke.tasks import task

from lustrain.problem import UserError

Answer = TypeVar("Answer")


@task(
    help={
        "stack": "name of the stack, as in Pulumi.<stack>.yaml; all of them by default",
        "online": "ask AWS too: offerings, quotas, reservations, subnets, buckets (read-only)",
        "json": "print a list of findings; a stack that cannot be read is told on stderr instead, with exit code 2",
        "list": "print every rule: code, level, what must hold",
    }
)
def preflight(
    _context: Invocation,
    stack: str | None = None,
    online: bool = False,
    json: bool = False,
    list: bool = False,
) -> None:
    """Find mistakes in a cluster's description before it is created. Exit code: 1 errors, 2 nothing to check or to ask."""
    from infra.plan.eks import first_up
    from infra.plan.summary import summary
    from infra.preflight import commands, report

    if list:
        print("\n".join(commands.rules()))
        return
    found, wrong = _or_exit(lambda: commands.findings(stack, online))
    if json and not wrong:
        print(report.as_json([finding for _, findings in found.values() for finding in findings]))
    elif not json:
        for name, (spec, findings) in found.items():
            planned, then = ((), ()) if report.exit_code(findings) else (summary(spec), first_up(spec))
            print(*([] if stack else [f"{name}:"]), *planned, *report.lines(findings), *then, sep="\n")
    if wrong:
        raise Exit("\n".join(wrong), UserError.exit_code)
    if code := max(report.exit_code(findings) for _, findings in found.values()):
        raise Exit(code=code)


@task(
    name="explain-change",
    help={
        "stack": "name of the stack, as in Pulumi.<stack>.yaml",
        "old": "file with the spec that is deployed; the stack's output `spec` by default",
        "json": "print a list of changes",
    },
)
def explain_change(_context: Invocation, stack: str, old: str | None = None, json: bool = False) -> None:
    """Tell what `pulumi up` would replace, re-image or wipe. Exit code: 1 where it must not be asked, 2 cannot tell."""
    from infra.preflight import commands, report
    from infra.preflight.explain import refused

    changes = _or_exit(lambda: commands.changes(stack, old))
    print(report.as_json(changes) if json else "\n".join(report.change_lines(changes, refused(changes))))
    if refused(changes):
        raise Exit(code=1)


@task(name="aws-local")
def aws_local(_context: Invocation) -> None:
    """Run the embedded AWS and instance metadata until Ctrl-C; prints what to export."""
    from infra.local.__main__ import main

    raise Exit(code=main())


@task(
    name="deployer-policy",
    help={"stack": "name of the stack, as in Pulumi.<stack>.yaml", "account": "number of the account to deploy to"},
)
def deployer_policy(_context: Invocation, stack: str, account: str) -> None:
    """Print what whoever runs `pulumi up` for a stack needs, as IAM policies small enough to attach."""
    from infra.preflight import commands

    print(json.dumps(_or_exit(lambda: commands.policies(stack, account)), indent=2))


def _or_exit(ask: Callable[[], Answer]) -> Answer:
    """What `ask` gives; a user's mistake ends the task with its lines and exit code 2."""
    try:
        return ask()
    except UserError as error:
        raise Exit(str(error), error.exit_code) from None
