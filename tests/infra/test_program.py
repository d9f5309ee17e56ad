"""The program itself: a mistake stops `pulumi up` with its lines before anything is made, and it builds without an engine."""

from __future__ import annotations

import os
from pathlib import Path

import boto3
import pytest

from infra.local.aws import LocalAws
from infra.local.engine import Engine, EngineError
from rehearsal import provision
from tests.infra.stacks import EXAMPLES, example

OTHER_IMAGE = {"name": "train", "instance_type": "g6e.8xlarge", "count": 2, "image_id": "ami-0123456789abcdef0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "line"),
    [
        ({"grups": []}, "lustrain:cluster.grups = []: unknown key; fix: did you mean groups?"),
        ({"zone_id": "usw2-az1"}, "error: zone_id: "),
        ({"groups": [OTHER_IMAGE]}, "image_id of group train = 'ami-0123456789abcdef0': "),
    ],
    ids=["unknown key", "zone of another region", "image that is not there"],
)
def test_a_mistake_stops_the_update_in_lines_and_nothing_is_made(
    engine_aws: LocalAws, tmp_path: Path, edit: dict[str, object], line: str
) -> None:
    engine = Engine(tmp_path / "pulumi", "rehearsal", engine_aws.environment)
    engine.change({**engine.spec, **edit})
    with pytest.raises(EngineError) as refused:
        engine.up()
    said = str(refused.value)
    assert line in said
    assert "Traceback" not in said
    assert engine.resources() == []


@pytest.mark.slow
def test_a_stack_without_a_cluster_is_told_where_to_begin(engine_aws: LocalAws, tmp_path: Path) -> None:
    engine = Engine(tmp_path / "pulumi", "rehearsal", engine_aws.environment)
    engine.config_file.write_text("config:\n  aws:region: us-east-1\n", encoding="utf-8")
    with pytest.raises(EngineError) as refused:
        engine.up()
    assert "lustrain:cluster is missing" in str(refused.value)
    assert "Traceback" not in str(refused.value)


@pytest.mark.slow
def test_without_an_engine_the_rehearsal_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(provision, "engine_missing", lambda: "pulumi is not on PATH")
    with LocalAws() as aws:
        for name, value in aws.environment.items():
            monkeypatch.setenv(name, value)
        made = provision.provision(Path("unused"), dict(os.environ))
        names = {one["Name"] for one in boto3.client("s3").list_buckets()["Buckets"]}
        queue = boto3.client("sqs").get_queue_url(QueueName="rehearsal-interruptions")["QueueUrl"]
    assert made.outcome.startswith("pulumi is not on PATH: the program declares ")
    assert {made.cluster.buckets.data, made.cluster.buckets.checkpoints} <= names
    assert made.cluster.interruption_queue == queue
    assert "mock monitor" in provision.what_is_real()[1]
    assert (made.engine, made.stable) == (None, False)


def test_every_example_has_a_backend_and_all_three_are_shown() -> None:
    assert {example(stack).backend for stack in EXAMPLES} == {"ec2", "hyperpod-slurm", "hyperpod-eks"}
