"""The commands: all findings, one a line, exit code 0, 1 or 2, and one line with the fix where nothing can be checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.exceptions import EndpointConnectionError
from invoke.context import Context as Invocation
from invoke.exceptions import Exit

from infra import aws as aws_clients
from infra import tasks
from infra.aws import Aws
from infra.finding import finding
from infra.plan.nodes.bundle import bundle
from infra.preflight import report, stackfile
from infra.preflight.offline import OFFLINE
from infra.preflight.online.run import ONLINE
from lustrain import deployed as deployment
from tests.fab import Fab
from tests.infra.edits import STACKS, config, spec_of

pytestmark = pytest.mark.slow

HOUSE = Path(__file__).parents[2]


def variables(**more: str) -> dict[str, str]:
    """No credentials of whoever runs the tests, and a login of Pulumi."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PULUMI_"))}
    return {**kept, "PULUMI_BACKEND_URL": "file://~", **more}


def test_all_example_stacks_pass() -> None:
    """The one command that starts here as its user starts it."""
    command = [str(Path(sys.executable).with_name("fab")), "preflight"]
    done = subprocess.run(command, cwd=HOUSE, env=variables(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{stack}:" in done.stdout for stack in STACKS)


@pytest.fixture
def fab(fab: Fab) -> Fab:
    """Takes variables of its environment by name."""
    return lambda *words, **more: fab(*words, environment=variables(**more))


def test_what_is_planned_comes_with_the_rule_that_decided_it(fab: Fab) -> None:
    done = fab("preflight", "--stack", "hyperpod-slurm-p5")
    planned = "Lustre: 9,600 GiB at 1000 MB/s per TiB, 9,600 MB/s in all, with EFA: EFA at 1000 MB/s/TiB comes in steps of 4800"
    assert planned in done.out
    assert "train: 4 x p5.48xlarge, training-plan, EFA interfaces: 32 each" in done.out


def test_preflight_ends_with_first_command_where_up_would_fail(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for stack, there in (("hyperpod-eks-g6e-spot", True), ("rehearsal", False)):
        tasks.preflight(Invocation(), stack=stack)
        *_, last = capsys.readouterr().out.splitlines()
        assert last.endswith(": pulumi up --exclude '**lustrain:infra:HyperPod**' --exclude-dependents") is there, last


def test_preflight_shows_what_a_stack_costs_and_cost_has_sources(capsys: pytest.CaptureFixture[str]) -> None:
    tasks.preflight(Invocation(), stack="rehearsal")
    shown = capsys.readouterr().out
    tasks.cost(Invocation(), stack="rehearsal")
    table = capsys.readouterr().out
    assert table in shown
    assert "always on" in table
    tasks.cost(Invocation(), stack="rehearsal", json=True)
    data = json.loads(capsys.readouterr().out)
    assert sum(part["usd_month"] for part in data["parts"]) == pytest.approx(data["usd_month"], abs=0.1)
    assert all(price["source"].startswith("https://") for part in data["parts"] for price in part["prices"])


def test_findings_as_json_are_a_list_and_a_refusal_is_a_table(fab: Fab) -> None:
    done = fab("preflight", "--stack", "rehearsal", "--json")
    assert (done.code, json.loads(done.out)) == (0, [])
    done = fab("preflight", "--stack", "", "--json")
    assert (done.code, json.loads(done.out)["error"]) == (2, done.err.splitlines())


NOTHING = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
ONLINE_ONE = ["preflight", "--stack", "rehearsal", "--online"]
EXPLAIN = ["explain-change", "--stack", "rehearsal"]
POLICY = ["deployer-policy", "--stack", "ec2-spot-g6e", "--account"]


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (["preflight", "--stack", "reharsal"], {}, "did you mean rehearsal?"),
        (["preflight", "--stack", ""], {}, "stack = ''"),
        (["preflight", "--online"], {}, "--stack"),
        (ONLINE_ONE, NOTHING, "credentials"),
        (ONLINE_ONE, {"AWS_PROFILE": "nobody", "AWS_CONFIG_FILE": os.devnull}, "nobody"),
        (EXPLAIN, {"PATH": str(HOUSE / "nowhere")}, "pulumi is not on PATH; fix: "),
        ([*POLICY, "12345"], {}, "allowed: 12 digits"),
    ],
)
def test_what_cannot_be_done_is_one_line_with_what_to_do(
    fab: Fab, words: list[str], environment: dict[str, str], said: str
) -> None:
    done = fab(*words, **environment)
    assert (done.code, len(done.err.strip().splitlines())) == (2, 1)
    assert said in done.err


def test_without_a_login_pulumi_is_not_even_run(fab: Fab, tmp_path: Path) -> None:
    path = deployed(tmp_path, {"spec": config("rehearsal")["lustrain:cluster"]})
    done = fab(*EXPLAIN, PATH=path, PULUMI_BACKEND_URL="", PULUMI_HOME=str(tmp_path))
    assert (done.code, done.out, len(done.err.strip().splitlines())) == (2, "", 1)
    assert "fix: `pulumi login` " in done.err


@pytest.mark.parametrize(
    ("environment", "credentials", "there"),
    [
        ({}, None, False),
        ({}, '{"current": "", "accounts": {"file://~": {}}}', False),
        ({}, '{"current": "s3://state"}', True),
        ({}, "{", True),
        ({"PULUMI_ACCESS_TOKEN": "x"}, None, True),
        ({"PULUMI_BACKEND_URL": "s3://state"}, None, True),
    ],
)
def test_a_login_is_where_pulumi_looks_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    credentials: str | None,
    there: bool,
) -> None:
    for name in [name for name in os.environ if name.startswith("PULUMI_")]:
        monkeypatch.delenv(name)
    for name, value in {"PULUMI_HOME": str(tmp_path), **environment}.items():
        monkeypatch.setenv(name, value)
    if credentials:
        (tmp_path / "credentials.json").write_text(credentials, encoding="utf-8")
    assert deployment.logged_in() is there


def test_a_pulumi_that_fails_is_quoted_in_one_line(fab: Fab, tmp_path: Path) -> None:
    broken = tmp_path / "pulumi"
    broken.write_text("#!/bin/sh\necho 'error: no stack' >&2\necho 'named so' >&2\nexit 255\n", encoding="utf-8")
    broken.chmod(0o755)
    done = fab(*EXPLAIN, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.code, len(done.err.strip().splitlines())) == (2, 1)
    assert "error: no stack named so" in done.err


def deployed(tmp_path: Path, outputs: dict[str, Any]) -> str:
    """A PATH with a pulumi that knows the outputs of the stack `rehearsal`, and answers no other question."""
    (tmp_path / "outputs.json").write_text(json.dumps(outputs), encoding="utf-8")
    pulumi = tmp_path / "pulumi"
    question = f"stack output --json --stack rehearsal --cwd {stackfile.PROGRAM} --non-interactive"
    answer = f'[ "$*" = "{question}" ] || {{ echo "what is $*?" >&2; exit 1; }}\ncat {tmp_path}/outputs.json'
    pulumi.write_text(f"#!/bin/sh\n{answer}\n", encoding="utf-8")
    pulumi.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def test_deployed_spec_comes_from_outputs_with_edited_scripts(fab: Fab, tmp_path: Path) -> None:
    spec, sha = config("rehearsal")["lustrain:cluster"], bundle(spec_of("rehearsal", {})).sha
    outputs = {"spec": spec, "bundle": sha}
    done = fab(*EXPLAIN, PATH=deployed(tmp_path, outputs))
    assert (done.code, done.out.strip()) == (0, "nothing changes")
    done = fab(*EXPLAIN, PATH=deployed(tmp_path, {"spec": spec, "bundle": "0123456789ab"}))
    assert done.code == 0
    assert f"for new nodes only: lifecycle: 0123456789ab becomes {sha}" in done.out


def test_a_stack_that_was_never_up_cannot_be_compared(fab: Fab, tmp_path: Path) -> None:
    done = fab(*EXPLAIN, PATH=deployed(tmp_path, {}))
    assert (done.code, done.err.strip().count("\n")) == (2, 0)
    assert "no output `spec`" in done.err


def test_what_a_deployer_needs_comes_in_policies_that_iam_takes(fab: Fab) -> None:
    done = fab(*POLICY, "123456789012")
    policies = json.loads(done.out)
    assert done.code == 0
    assert all(policy["Version"] == "2012-10-17" and policy["Statement"] for policy in policies)
    assert "ec2:RunInstances" in done.out


def test_what_an_existing_role_of_the_nodes_needs_is_printed(fab: Fab) -> None:
    done = fab("node-policy", *POLICY[1:], "123456789012")
    needed = json.loads(done.out)
    assert done.code == 0
    assert needed["trust"]["Statement"][0]["Principal"] == {"Service": "ec2.amazonaws.com"}
    assert needed["managed"] == ["arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"]
    assert "RunsReadWrite" in {one["Sid"] for one in needed["policy"]["Statement"]}


def test_policy_of_another_role_is_printed_a_wrong_one_lists(fab: Fab) -> None:
    asked = ("node-policy", "--stack", "hyperpod-eks-g6e-spot", "--account", "123456789012", "--role")
    needed = json.loads(fab(*asked, "eks-cluster").out)
    assert needed["managed"] == ["arn:aws:iam::aws:policy/AmazonEKSClusterPolicy"]
    wrong = fab(*asked, "karpenter")
    assert (wrong.code, "allowed: node, eks-cluster" in wrong.err) == (2, True), wrong.err


def test_a_refused_change_ends_with_1_and_a_harmless_one_with_0(fab: Fab, tmp_path: Path) -> None:
    for stack, key, value, code in (("ec2-spot-g6e", "zone_id", "use1-az5", 1), ("rehearsal", "budget", None, 0)):
        spec = {**config(stack)["lustrain:cluster"], key: value}
        before = tmp_path / "before.yaml"
        before.write_text(yaml.safe_dump(spec), encoding="utf-8")
        done = fab("explain-change", "--stack", stack, "--old", str(before))
        assert done.code == code, done.out + done.err
        assert key in done.out


def test_the_list_names_every_rule(fab: Fab) -> None:
    done = fab("preflight", "--list")
    codes = [line.split()[0] for line in done.out.splitlines()]
    assert set(codes) >= set(OFFLINE) | set(ONLINE)
    assert codes == sorted(codes)


def test_without_an_endpoint_all_questions_are_one_line_and_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    down = EndpointConnectionError(endpoint_url="http://127.0.0.1:1")
    monkeypatch.setattr(aws_clients, "connect", lambda region: Aws(region, lambda service: Unreachable(down)))
    with pytest.raises(Exit) as ended:
        tasks.preflight(Invocation(), stack="rehearsal", online=True)
    assert ended.value.code == 3
    line, counts = capsys.readouterr().out.splitlines()[-2:]
    assert line.startswith(", ".join(ONLINE))
    assert f"unknown: aws: {len(ONLINE)} questions could not be checked: AWS cannot be reached; fix: " in line
    assert counts == f"no errors, {len(ONLINE)} unknown, no warnings"
    with pytest.raises(Exit) as ended:
        tasks.preflight(Invocation(), stack="rehearsal", online=True, json=True)
    assert ended.value.code == 3
    assert len(json.loads(capsys.readouterr().out)) == len(ONLINE)


class Unreachable:
    """A client whose every question ends with this error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


def test_errors_alone_decide_the_exit_code_and_unknown_is_said() -> None:
    findings = [finding("p", "m", "f", code="A-001", level=level) for level in ("warning", "unknown")]
    assert report.exit_code(findings) == 0
    assert list(report.lines(findings))[-1] == "no errors, 1 unknown, 1 warning"
    error = finding("p", "m", "f", code="A-001", level="error")
    assert report.exit_code([*findings, error]) == 1
    assert next(iter(report.lines([*findings, error]))) == error
