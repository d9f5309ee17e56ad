"""`fab rehearse --slurm`: refused where it cannot run, and whole where it can; AWS's CLI of its nodes is a stand-in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import boto3
import numpy as np
import pytest

from lustrain.problem import UserError
from rehearsal import hold, journey, scheduled, tasks
from rehearsal.lab import aws_cli, nodes, slurm
from tests.conftest import require
from tests.lab.servers import S3Place
from trainer.tasks.language_model import LanguageModel

BY_SLURM = {
    "nodes boot by the stack's user data and register with its Slurm, without manual steps",
    "a notice reaches the run by the interruption queue, and drains its node by the metadata",
    "a notice ends in a committed checkpoint and exit 85, in time",
    "a lost node is replaced by the stack, and the job goes on by itself to its end",
    "fab report shows every launch of the run, and that it is done",
    "interrupted twice, same world size: the same losses to the last bit",
    "another world size: bit-identical weights at load",
}
WHY = "a Slurm of the lab needs sbatch; fix: apt-get install slurm-wlm"


@pytest.mark.parametrize("part", [0, 1, 2])
def test_slurm_that_cannot_run_here_is_refused_before_the_start(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = [WHY if part == number else None for number in range(3)]
    monkeypatch.setattr(scheduled, "engine_missing", lambda: reasons[0])
    monkeypatch.setattr(nodes, "why_not", lambda: reasons[1])
    monkeypatch.setattr(slurm, "why_not", lambda: reasons[2])
    monkeypatch.setattr(journey, "run_journey", lambda *_, **__: pytest.fail("it started"))
    with pytest.raises(UserError) as refused:
        tasks.rehearse.body.__wrapped__(tasks.RehearseFlags(slurm=True))
    assert str(refused.value).startswith("--slurm: ")


def test_run_too_short_to_wait_twice_is_refused() -> None:
    with pytest.raises(UserError) as refused:
        tasks.rehearse.body.__wrapped__(tasks.RehearseFlags(steps="99", slurm=True))
    assert str(refused.value).startswith("--steps ")


def test_launch_waits_in_its_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, made, waited = tmp_path / "go", list[int](), list[int]()

    def sleep(_: float) -> None:
        waited.append(len(made))
        if len(waited) == 3:
            go.touch()

    monkeypatch.setattr(hold.time, "sleep", sleep)
    monkeypatch.setattr(LanguageModel, "eval_batch", lambda self, ids: made.append(1) or {})
    options = hold.HeldOptions(data="here", seq_len=2, hold=str(go), hold_evaluation=2)
    task = hold.HeldLanguageModel(options, seed=0)
    for _ in range(3):
        for first in (0, 2):
            task.eval_batch(np.arange(first, first + 2))
    assert (len(made), waited) == (6, [2, 2, 2])


def test_nodes_get_bundle_and_secret_by_the_stand_in(
    moto_s3: S3Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_s3.endpoint)
    for key in ("lifecycle/1/node.sh", "lifecycle/1/root/etc/a", "lifecycle/12/other"):
        moto_s3.client().put_object(Bucket=moto_s3.bucket, Key=key, Body=key.encode())
    copy = ["s3", "cp", "--recursive", "--only-show-errors", f"s3://{moto_s3.bucket}/lifecycle/1", str(tmp_path)]
    assert aws_cli.main(copy) == 0
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"node.sh", "root/etc/a"}

    name = f"{moto_s3.bucket}-munge"
    boto3.client("secretsmanager").create_secret(Name=name)
    get = ["secretsmanager", "get-secret-value", "--secret-id", name, "--query", "SecretString", "--output", "text"]
    assert aws_cli.main(get) == aws_cli.FAILED
    # By these words the agent knows that there is no key yet.
    assert "staging label" in capsys.readouterr().err
    (tmp_path / "key").write_text("a2V5")
    put = ["secretsmanager", "put-secret-value", "--secret-id", name, "--client-request-token", "0" * 64]
    assert aws_cli.main([*put, "--secret-string", f"file://{tmp_path}/key"]) == 0
    assert aws_cli.main(get) == 0
    assert capsys.readouterr().out == "a2V5\n"
    assert aws_cli.main(["ec2", "describe-instances"]) == aws_cli.REFUSED


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_rehearsal_by_slurm_keeps_its_promises() -> None:
    require(scheduled.why_not() is None, str(scheduled.why_not()))
    command = [str(Path(sys.prefix, "bin/fab")), "rehearse", "--slurm", "--json"]
    done = subprocess.run(command, cwd=scheduled.ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    outcome = json.loads("{" + done.stdout.rpartition("\n{\n")[2])
    assert "error" not in outcome, outcome["error"]
    broken = [promise["claim"] for promise in outcome["promises"] if not promise["kept"]]
    assert (broken, done.returncode) == ([], 0)
    assert {promise["claim"] for promise in outcome["promises"]} >= BY_SLURM
    page = (tasks.FOLDER / "report-slurm.md").read_text(encoding="utf-8")
    assert [claim for claim in sorted(BY_SLURM) if claim not in page] == []
