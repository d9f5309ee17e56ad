"""The channel, alarms, budget and repository as the real engine and provider make them in the embedded AWS.

What they are asked for is pinned by tests/test_golden.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import boto3
import pytest

from infra.local.aws import LocalAws
from infra.local.engine import Engine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(engine_aws: LocalAws, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("channel") / "stack"
    made = Engine(folder, "test", engine_aws.environment, program=Path(__file__).parent / "well_made")
    made.up()
    return made


def client(aws: LocalAws, service: str) -> Any:
    return boto3.client(service, endpoint_url=aws.endpoint, region_name="us-east-1")  # type: ignore[call-overload]


def test_nothing_is_left_to_do_after_up_and_after_a_refresh(engine: Engine) -> None:
    engine("preview", "--expect-no-changes")
    engine("refresh", "--yes", "--skip-preview", "--expect-no-changes")


def test_alarms_watch_the_things_of_the_stack(engine_aws: LocalAws, engine: Engine) -> None:
    watched = {
        alarm["AlarmName"]: {
            one["Value"]
            for query in alarm["Metrics"]
            for one in query.get("MetricStat", {}).get("Metric", {}).get("Dimensions", [])
        }
        for alarm in client(engine_aws, "cloudwatch").describe_alarms()["MetricAlarms"]
    }
    group = "llm-train-gang-1a2b3c4"
    assert watched == {
        "llm-lustre-full": {"fs-0123456789abcdef0"},
        "llm-home-full": {"fs-0fedcba9876543210"},
        "llm-train-incomplete": {group},
        "llm-boot-failed": {"llm"},
        "llm-run-stalled": {"llm"},
        "llm-nat-traffic": {"nat-0123456789abcdef0"},
        "llm-notices-lost": {"llm-interruptions-dead"},
        "llm-notices-unread": {"llm-interruptions", group},
    }


def test_a_destroy_takes_all_but_the_images(engine_aws: LocalAws, engine: Engine) -> None:
    engine("destroy", "--yes", "--skip-preview")
    assert client(engine_aws, "events").list_rules(NamePrefix="llm-")["Rules"] == []
    assert client(engine_aws, "sqs").list_queues().get("QueueUrls", []) == []
    assert client(engine_aws, "cloudwatch").describe_alarms()["MetricAlarms"] == []
    assert len(client(engine_aws, "ecr").describe_repositories()["repositories"]) == 1
