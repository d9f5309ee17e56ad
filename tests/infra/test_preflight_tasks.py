"""The commands: all findings, one a line, exit code 0, 1 or 2, and one line with the fix where nothing can be checked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.exceptions import EndpointConnectionError
from invoke.context import Context as Invocation
from invoke.exceptions import Exit

from infra import tasks
from infra.config import parse
from infra.finding import finding
from infra.plan.nodes.bundle import bundle
from infra.preflight import report, stackfile
from infra.preflight.offline import OFFLINE
from infra.preflight.online import running
from infra.preflight.online.asking import Aws
from infra.preflight.online.running import ONLINE
from lustrain import deployed as deployment
from lustrain.problem import UserError
from tests.infra.edits import STACKS, config, spec_of

pytestmark = pytest.mark.slow

HOUSE = Path(__file__).parents[2]


def fab(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("fab")), *words]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PULUMI_"))}
    clean["PULUMI_BACKEND_URL"] = "file://~"
    return subprocess.run(
        command, cwd=HOUSE, env={**clean, **environment}, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program folder of the test, without a region in the environment."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write(folder: Path, stack: str, values: dict[str, Any]) -> None:
    (folder / f"Pulumi.{stack}.yaml").write_text(yaml.safe_dump({"config": values}), encoding="utf-8")


def test_all_example_stacks_pass() -> None:
    done = fab("preflight")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{stack}:" in done.stdout for stack in STACKS)


def test_a_stack_that_cannot_be_read_hides_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, "bad", {**config("rehearsal"), "lustrain:cluster": {"nme": "x"}})
    write(folder, "good", config("rehearsal"))
    read = stackfile.read
    monkeypatch.setattr(stackfile, "stacks", lambda: ["bad", "good"])
    monkeypatch.setattr(stackfile, "read", lambda stack: read(stack, folder))
    with pytest.raises(Exit) as ended:
        tasks.preflight(Invocation())
    assert ended.value.code == 2
    said = capsys.readouterr().out
    assert said.startswith("good:\ntrain: 2 x g6e.8xlarge, spot")
    assert "no errors" in said
    assert all(line.startswith("bad: lustrain:cluster.") for line in str(ended.value.message).splitlines())


def test_what_is_planned_comes_with_the_rule_that_decided_it_unless_it_cannot_be() -> None:
    done = fab("preflight", "--stack", "hyperpod-slurm-p5")
    planned = "Lustre: 9,600 GiB at 1000 MB/s per TiB, 9,600 MB/s in all, with EFA: EFA at 1000 MB/s/TiB comes in steps of 4800"
    assert planned in done.stdout
    assert "train: 4 x p5.48xlarge, training-plan, EFA interfaces: 32 each" in done.stdout


def test_preflight_ends_with_the_first_command_where_a_plain_update_would_fail(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for stack, there in (("hyperpod-eks-g6e-spot", True), ("rehearsal", False)):
        tasks.preflight(Invocation(), stack=stack)
        *_, last = capsys.readouterr().out.splitlines()
        assert last.endswith(": pulumi up --exclude '**lustrain:infra:HyperPod**' --exclude-dependents") is there, last


def test_findings_as_json_are_a_list() -> None:
    done = fab("preflight", "--stack", "rehearsal", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, [])


def test_an_unknown_stack_is_one_line_with_what_was_meant() -> None:
    done = fab("preflight", "--stack", "reharsal")
    assert done.returncode == 2
    assert "did you mean rehearsal?" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_no_credentials_is_one_line_before_anything_is_asked() -> None:
    nothing = {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    done = fab("preflight", "--stack", "rehearsal", "--online", **nothing)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "credentials" in done.stderr
    assert "fix: " in done.stderr


def test_a_profile_that_does_not_exist_is_one_line() -> None:
    done = fab("preflight", "--stack", "rehearsal", "--online", AWS_PROFILE="nobody", AWS_CONFIG_FILE=os.devnull)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "nobody" in done.stderr


def test_online_wants_one_stack() -> None:
    done = fab("preflight", "--online")
    assert done.returncode == 2
    assert "--stack" in done.stderr


def test_without_pulumi_what_is_deployed_cannot_be_told() -> None:
    done = fab("explain-change", "--stack", "rehearsal", PATH=str(HOUSE / "nowhere"))
    assert done.returncode == 2
    assert done.stderr.startswith("pulumi is not on PATH; fix: ")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_without_a_login_pulumi_is_not_even_run(tmp_path: Path) -> None:
    path = deployed(tmp_path, {"spec": config("rehearsal")["lustrain:cluster"]})
    done = fab("explain-change", "--stack", "rehearsal", PATH=path, PULUMI_BACKEND_URL="", PULUMI_HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("there is no login to Pulumi's state, ")
    assert "fix: `pulumi login` " in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


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


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_a_pulumi_that_fails_is_quoted_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "pulumi"
    broken.write_text("#!/bin/sh\necho 'error: no stack' >&2\necho 'named so' >&2\nexit 255\n", encoding="utf-8")
    broken.chmod(0o755)
    done = fab("explain-change", "--stack", "rehearsal", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 2
    assert "error: no stack named so" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def deployed(tmp_path: Path, outputs: dict[str, Any]) -> str:
    """A PATH with a pulumi that knows the outputs of the stack `rehearsal`, and answers no other question."""
    (tmp_path / "outputs.json").write_text(json.dumps(outputs), encoding="utf-8")
    pulumi = tmp_path / "pulumi"
    question = f"stack output --json --stack rehearsal --cwd {stackfile.PROGRAM} --non-interactive"
    answer = f'[ "$*" = "{question}" ] || {{ echo "what is $*?" >&2; exit 1; }}\ncat {tmp_path}/outputs.json'
    pulumi.write_text(f"#!/bin/sh\n{answer}\n", encoding="utf-8")
    pulumi.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_the_deployed_spec_comes_from_the_stacks_outputs(tmp_path: Path) -> None:
    outputs = {"spec": config("rehearsal")["lustrain:cluster"], "bundle": bundle(spec_of("rehearsal", {})).sha}
    done = fab("explain-change", "--stack", "rehearsal", PATH=deployed(tmp_path, outputs))
    assert (done.returncode, done.stdout.strip()) == (0, "nothing changes")


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_edited_lifecycle_scripts_are_announced(tmp_path: Path) -> None:
    outputs = {"spec": config("rehearsal")["lustrain:cluster"], "bundle": "0123456789ab"}
    done = fab("explain-change", "--stack", "rehearsal", PATH=deployed(tmp_path, outputs))
    assert done.returncode == 0
    assert f"for new nodes only: lifecycle: 0123456789ab becomes {bundle(spec_of('rehearsal', {})).sha}" in done.stdout


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_a_stack_that_was_never_up_cannot_be_compared(tmp_path: Path) -> None:
    done = fab("explain-change", "--stack", "rehearsal", PATH=deployed(tmp_path, {}))
    assert (done.returncode, done.stderr.strip().count("\n")) == (2, 0)
    assert "no output `spec`" in done.stderr


def test_what_a_deployer_needs_comes_in_policies_that_iam_takes() -> None:
    done = fab("deployer-policy", "--stack", "ec2-spot-g6e", "--account", "123456789012")
    policies = json.loads(done.stdout)
    assert done.returncode == 0
    assert all(policy["Version"] == "2012-10-17" and policy["Statement"] for policy in policies)
    assert "ec2:RunInstances" in done.stdout
    wrong = fab("deployer-policy", "--stack", "ec2-spot-g6e", "--account", "12345")
    assert (wrong.returncode, "allowed: 12 digits" in wrong.stderr) == (2, True)


def test_a_refused_change_ends_with_1_and_a_harmless_one_with_0(tmp_path: Path) -> None:
    for stack, key, value, code in (("ec2-spot-g6e", "zone_id", "use1-az5", 1), ("rehearsal", "budget", None, 0)):
        spec = {**config(stack)["lustrain:cluster"], key: value}
        before = tmp_path / "before.yaml"
        before.write_text(yaml.safe_dump(spec), encoding="utf-8")
        done = fab("explain-change", "--stack", stack, "--old", str(before))
        assert done.returncode == code, done.stdout + done.stderr
        assert key in done.stdout


def test_the_list_names_every_rule() -> None:
    done = fab("preflight", "--list")
    codes = [line.split()[0] for line in done.stdout.splitlines()]
    assert set(codes) >= set(OFFLINE) | set(ONLINE)
    assert codes == sorted(codes)


def test_region_and_cluster_are_read_as_pulumi_reads_them(folder: Path) -> None:
    write(folder, "mine", config("rehearsal"))
    stack = stackfile.read("mine", folder)
    assert (stack.region, stack.spec.name, stackfile.stacks(folder)) == ("us-east-1", "rehearsal", ["mine"])


def test_the_environment_names_the_region_where_the_file_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = config("rehearsal")
    del values["aws:region"]
    write(folder, "mine", values)
    assert stackfile.read("mine", folder).region is None
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert stackfile.read("mine", folder).region == "eu-west-1"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("config: [", "is not YAML"),
        ("- a", "holds no table"),
        ("other: 1", "config is missing"),
        ("config: {}", "lustrain:cluster is missing"),
        ("config: " + "[" * 3000, "nested too deep"),
        ("when: 2026-13-45T00:00:00Z", "month"),
        ("config:\n  aws:region: {a: 1}", "aws:region = {'a': 1}: is not text; allowed: like us-east-1"),
        ("config:\n  aws:region: 7", "is not text"),
        ('config:\n  aws:region: "us-east-1\\n"', "is no region's name"),
        ('config:\n  aws:region: "\\uDC80"', "is no region's name"),
        ("config:\n  a: {b: [{c: 1,\n    d: 2, c: 3}]}", r"config\.a\.b\.0\.c stands twice, again in line 3; fix: "),
        ("config:\n  ? 'a\\e'\n  : &x {z: 1, z: 1}\n  b: *x", "config.a.*z stands twice"),
    ],
)
def test_a_broken_file_is_one_line(folder: Path, text: str, word: str) -> None:
    (folder / "Pulumi.mine.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=word) as caught:
        stackfile.read("mine", folder)
    assert "\n" not in str(caught.value)


def test_keys_that_stand_in_several_tables_or_come_from_an_anchor_are_not_twice(folder: Path) -> None:
    text = "lustrain:cluster: {a: &x {b: 1, c: 2}, d: [{b: 1}, {<<: *x, b: 3}, *x], e: &loop [*loop]}"
    (folder / "spec.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        stackfile.read_spec(folder / "spec.yaml")
    assert "unknown key" in str(caught.value)
    assert "twice" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "x\ny", "x" * 5000, "../mine", "a b", "\udc80", "é", "x" * 101])
def test_what_is_no_stacks_name_is_one_printable_line(folder: Path, name: str) -> None:
    with pytest.raises(UserError, match="is no stack's name; allowed: ") as caught:
        stackfile.read(name, folder)
    assert str(caught.value).isprintable()


def test_an_empty_name_is_not_all_stacks() -> None:
    done = fab("preflight", "--stack", "", "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]) == (2, done.stderr.splitlines())
    assert done.stderr.startswith("stack = ''")


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("nowhere"), os.mkfifo])
def test_what_is_no_file_is_said_to_be_none(folder: Path, make: Callable[[Path], None]) -> None:
    make(folder / "Pulumi.zz.yaml")
    assert stackfile.stacks(folder) == ["zz"]
    with pytest.raises(UserError, match=r"Pulumi\.zz\.yaml is not a file") as caught:
        stackfile.read("zz", folder)
    assert "did you mean" not in str(caught.value)


def test_a_key_with_a_line_end_is_told_in_one_line() -> None:
    with pytest.raises(UserError) as caught:
        parse({**config("rehearsal")["lustrain:cluster"], "a\nb": 1})
    assert len(caught.value.problems) == 1
    assert str(caught.value).isprintable()
    assert "a\\nb = 1: unknown key" in str(caught.value)


def test_every_mistake_of_the_form_is_a_line_with_what_was_meant(folder: Path) -> None:
    values = config("rehearsal")
    values["lustrain:cluster"] |= {"bugdet": {}, "zone_id": "us-east-1a"}
    write(folder, "mine", values)
    with pytest.raises(UserError) as caught:
        stackfile.read("mine", folder)
    assert len(caught.value.problems) == 2
    assert "did you mean budget?" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("aws:regio", "did you mean aws:region?"),
        ("AWS:Region", "did you mean aws:region?"),
        ("lustrain:clustr", "did you mean lustrain:cluster?"),
        ("lustrian:cluster", "did you mean lustrain:cluster?"),
        ("lustrain:budget", "remove it; known here: lustrain:cluster"),
        ("aws:profile", ""),
        ("gcp:region", ""),
        ("aws-native:region", ""),
    ],
)
def test_a_key_that_nothing_reads_is_told_and_those_of_other_providers_are_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, key: str, fix: str
) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    write(folder, "mine", {**config("rehearsal"), key: "us-east-1"})
    try:
        stackfile.read("mine", folder)
        told = []
    except UserError as error:
        told = error.problems
    assert told == ([f"Pulumi.mine.yaml: {key}: unknown key, which nothing reads; fix: {fix}"] if fix else [])


def test_without_an_endpoint_all_questions_are_one_line_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    down = EndpointConnectionError(endpoint_url="http://127.0.0.1:1")
    monkeypatch.setattr(running, "connect", lambda region: Aws(region, lambda service: Unreachable(down)))
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
