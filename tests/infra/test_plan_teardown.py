"""What a person reads around a teardown: nothing unsaved is lost, nothing costs on unseen, what stayed is used again."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from infra.config import ClusterSpec, parse
from infra.local.engine import PROGRAM
from infra.plan.place import Place, bucket_names
from infra.plan.stack import Plan
from infra.plan.storage.repository import url
from infra.plan.teardown import first_steps, teardown, unprotect
from tests.infra.edits import spec_of
from tests.infra.stacks import EXAMPLES, example

PLACE = Place("us-west-2", "123456789012")
DESTROY = "pulumi destroy --exclude-protected"


def position(lines: tuple[str, ...], text: str) -> int:
    """Where the one line with `text` stands; -1 without one."""
    found = [number for number, line in enumerate(lines) if text in line]
    assert len(found) <= 1
    return found[0] if found else -1


def with_export() -> ClusterSpec:
    link = {"path": "/out", "bucket": "checkpoints", "prefix": "out", "export_events": ["NEW", "CHANGED"]}
    return spec_of("ec2-spot-g6e", {"storage.lustre.associations": [link]})


@pytest.mark.parametrize("stack", EXAMPLES)
def test_jobs_stop_before_anything_is_taken_down(stack: str) -> None:
    lines = teardown(Plan(example(stack), PLACE))
    assert 0 == position(lines, "Stop the jobs") < position(lines, DESTROY)


def test_exports_are_waited_for_before_the_destroy_where_there_are_any() -> None:
    lines = teardown(Plan(with_export(), PLACE))
    assert 0 < position(lines, "AgeOfOldestQueuedMessage") < position(lines, DESTROY)
    imports = spec_of("ec2-spot-g6e", {"storage.lustre.associations.0.export_events": []})
    assert position(teardown(Plan(imports, PLACE)), "AgeOfOldestQueuedMessage") == -1


def test_what_a_teardown_would_lose_for_good_is_said_before_it_and_homes_leave_a_backup() -> None:
    lines = teardown(Plan(with_export(), PLACE))
    assert 0 < position(lines, "what lies outside /out on Lustre is in no bucket") < position(lines, DESTROY)
    imports = spec_of("ec2-spot-g6e", {"storage.lustre.associations.0.export_events": [], "storage.home": {}})
    lines = teardown(Plan(imports, PLACE))
    assert 0 < position(lines, "what lies on Lustre is in no bucket") < position(lines, DESTROY)
    assert "SkipFinalBackup=false" in lines[position(lines, "FSx for OpenZFS")]
    last = max(number for number, line in enumerate(lines) if "boto3" in line or " delete-" in line)
    assert last == position(lines, "  ALL CHECKPOINTS, bucket")


def test_a_cluster_on_a_training_plan_is_let_go_before_the_destroy() -> None:
    spec = example("hyperpod-slurm-p5")
    lines = teardown(Plan(spec, PLACE))
    assert 0 < position(lines, "pulumi state unprotect --yes") < position(lines, DESTROY)
    assert position(teardown(Plan(example("hyperpod-eks-g6e-spot"), PLACE)), "unprotect --yes") == -1
    project = yaml.safe_load((PROGRAM / "Pulumi.yaml").read_text(encoding="utf-8"))["name"]
    assert f"::{project}::lustrain:infra:HyperPod" in unprotect(spec)


@pytest.mark.parametrize("stack", EXAMPLES)
def test_what_stayed_is_used_again_when_the_lines_are_pasted_into_the_description(stack: str) -> None:
    spec = example(stack)
    pasted = yaml.safe_load(
        "\n".join(line for line in teardown(Plan(spec, PLACE)) if line.startswith(("  buckets: ", "  repo")))
    )
    again: dict[str, Any] = {**spec.model_dump(mode="json")}
    for key, values in pasted.items():
        again[key] = {**again[key], **values}
    kept = parse(again)
    assert bucket_names(kept, PLACE) == bucket_names(spec, PLACE)
    assert kept.repository.existing == url(spec, PLACE)
    assert not any(line.startswith(("  buckets: ", "  repository: ")) for line in teardown(Plan(kept, PLACE)))


@pytest.mark.parametrize("stack", EXAMPLES)
def test_the_budget_is_said_not_to_see_what_was_bought_by_hand(stack: str) -> None:
    spec = example(stack)
    by_hand = any(group.capacity.reservation or group.capacity.training_plan for group in spec.groups)
    assert any("does not see" in line for line in first_steps(Plan(spec, PLACE))) is by_hand
