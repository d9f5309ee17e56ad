"""`fab preflight`, `fab explain-change`, `fab deployer-policy`, `fab aws-local`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from invoke.context import Context as Invocation
from invoke.exceptions import Exit
from invoke.tasks import task

from infra.config import ClusterSpec, parse
from infra.plan import iam_deployer
from infra.plan.bundle import bundle
from infra.plan.summary import summary
from infra.preflight import report, stackfile
from infra.preflight.change import Change
from infra.preflight.explain import explain, explain_bundle, refused
from infra.preflight.finding import Finding
from infra.preflight.offline import ABOUT_SUPPRESSIONS, OFFLINE, run_in
from infra.preflight.rule import Context
from infra.problems import InfraError, problem

PULUMI_WAITS_S = 120
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
    """Find mistakes in a cluster's description before anything is created. Exit code: 1 errors, 2 nothing to check."""
    if list:
        from infra.preflight.online.running import ONLINE

        print("\n".join(report.rule_lines([*OFFLINE.values(), *ABOUT_SUPPRESSIONS.values(), *ONLINE.values()])))
        return
    found, wrong = _or_exit(lambda: _findings(stack, online))
    if json and not wrong:
        print(report.as_json([finding for _, findings in found.values() for finding in findings]))
    elif not json:
        for name, (spec, findings) in found.items():
            planned = () if report.exit_code(findings) else summary(spec)
            print(*([] if stack else [f"{name}:"]), *planned, *report.lines(findings), sep="\n")
    if wrong:
        raise Exit("\n".join(wrong), InfraError.exit_code)
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
    changes = _or_exit(lambda: _changes(stack, old))
    print(report.as_json(changes) if json else "\n".join(report.change_lines(changes, refused(changes))))
    if refused(changes):
        raise Exit(code=1)


@task(name="aws-local")
def aws_local(_context: Invocation) -> None:
    """Run the embedded AWS and instance metadata until Ctrl-C; prints what to export."""
    from infra.local.__main__ import main

    raise Exit(code=main())


def _findings(stack: str | None, online: bool) -> tuple[dict[str, tuple[ClusterSpec, list[Finding]]], list[str]]:
    """Spec and findings by stack, and the lines about stacks that cannot be read; the account is known only online."""
    if stack is None and online:
        raise InfraError("--online needs a stack: each asks its own region; fix: add --stack NAME")
    names = stackfile.stacks() if stack is None else [stack]
    if not names:
        raise InfraError(f"there is no Pulumi.<stack>.yaml in {stackfile.PROGRAM}; fix: write one, see README.md")
    look = _asked if online else _alone
    found: dict[str, tuple[ClusterSpec, list[Finding]]] = {}
    wrong: list[str] = []
    for name in names:
        try:
            read = stackfile.read(name)
            found[name] = read.spec, look(read)
        except InfraError as error:
            wrong += error.problems if stack else [f"{name}: {line}" for line in error.problems]
    return found, wrong


def _alone(stack: stackfile.Stack) -> list[Finding]:
    return run_in(stack.spec, Context.of_region(stack.region, datetime.now(UTC)))


def _asked(stack: stackfile.Stack) -> list[Finding]:
    from infra.preflight.online.running import connect, run_all

    if stack.region is None:
        raise InfraError(f"{stackfile.REGION} is missing; fix: add it to Pulumi.{stack.name}.yaml, or set AWS_REGION")
    return run_all(stack.spec, connect(stack.region))


def _changes(stack: str, old: str | None) -> list[Change]:
    """What differs from the file `old`, else from what the stack itself says of its last update."""
    after = stackfile.read(stack).spec
    if old:
        return explain(stackfile.read_spec(Path(old)), after)
    outputs = _outputs(stack)
    scripts = explain_bundle(str(outputs["bundle"]), bundle().sha) if "bundle" in outputs else []
    return [*explain(parse(outputs.get("spec")), after), *scripts]


def _outputs(stack: str) -> Mapping[str, Any]:
    if shutil.which("pulumi") is None:
        raise InfraError(
            "pulumi is not on PATH; fix: install it (https://www.pulumi.com/docs/install), or give --old FILE"
        )
    command = ["pulumi", "stack", "output", "--json", "--stack", stack, "--cwd", str(stackfile.PROGRAM)]
    try:
        done = subprocess.run(
            [*command, "--non-interactive"], capture_output=True, text=True, timeout=PULUMI_WAITS_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise InfraError(f"pulumi did not answer within {PULUMI_WAITS_S} s; fix: try `{' '.join(command)}`") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or "no word"
        raise InfraError(f"pulumi cannot tell what is deployed: {said}; fix: `pulumi up` once, or give --old FILE")
    try:
        outputs = json.loads(done.stdout)
    except ValueError:
        outputs = None
    if not isinstance(outputs, dict) or "spec" not in outputs:
        raise InfraError("the stack has no output `spec`; fix: `pulumi up` once, or give --old FILE")
    return outputs


@task(
    name="deployer-policy",
    help={"stack": "name of the stack, as in Pulumi.<stack>.yaml", "account": "number of the account to deploy to"},
)
def deployer_policy(_context: Invocation, stack: str, account: str) -> None:
    """Print what whoever runs `pulumi up` for a stack needs, as IAM policies small enough to attach."""
    read = _or_exit(lambda: stackfile.read(stack))
    if not read.region:
        raise Exit(f"{stackfile.REGION} is missing; fix: add it to Pulumi.{stack}.yaml, or set AWS_REGION", 2)
    if not re.fullmatch(r"\d{12}", account):
        raise Exit(problem("--account", account, "is no account number", allowed="12 digits"), 2)
    place = replace(Context.of_region(read.region), account=account).place
    policy = iam_deployer.deployer_policy(read.spec, place)
    print(json.dumps(list(iam_deployer.managed_policies(policy)), indent=2))


def _or_exit(ask: Callable[[], Answer]) -> Answer:
    """What `ask` gives; a user's mistake ends the task with its lines and exit code 2."""
    try:
        return ask()
    except InfraError as error:
        raise Exit(str(error), error.exit_code) from None
