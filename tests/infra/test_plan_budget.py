"""The budget counts what carries the cluster's tag; the repository keeps the images that were pushed last."""

from __future__ import annotations

from typing import Any

from botocore.loaders import Loader
from hypothesis import given
from hypothesis import strategies as st

from infra.config import ClusterSpec, parse
from infra.plan.place import COST_TAG, Place, tags
from infra.plan.storage.repository import keep_last, repository
from infra.plan.watch.budget import Notice, budget

PLACE = Place("us-east-1", "123456789012")


def spec(**more: Any) -> ClusterSpec:
    group = {"name": "train", "instance_type": "p5.48xlarge", "count": 2}
    return parse({"name": "llm", "backend": "ec2", "zone_id": "use1-az4", "groups": [group], **more})


def test_no_budget_is_made_where_none_is_wished() -> None:
    assert budget(spec(), PLACE) is None


def test_the_budget_filters_by_the_tag_that_everything_gets() -> None:
    cluster = spec(budget={"monthly_usd": 30000, "emails": ["leads@example.com"]})
    plan = budget(cluster, PLACE)
    assert plan is not None
    assert plan.tag_value == f"user:{COST_TAG}$llm"
    assert tags(cluster)[COST_TAG] == "llm"


def test_mails_go_out_at_half_at_80_percent_at_the_limit_and_when_the_forecast_passes_it() -> None:
    plan = budget(spec(budget={"monthly_usd": 100, "emails": ["a@example.com", "b@example.com"]}), PLACE)
    assert plan is not None
    actual = [Notice("ACTUAL", percent) for percent in (50.0, 80.0, 100.0)]
    assert list(plan.notices) == [*actual, Notice("FORECASTED", 100.0)]
    assert plan.emails == ("a@example.com", "b@example.com")


def test_two_clusters_of_one_name_in_two_regions_have_a_budget_each() -> None:
    cluster = spec(budget={"monthly_usd": 100, "emails": ["a@example.com"]})
    here, there = budget(cluster, PLACE), budget(cluster, Place("eu-west-1", "123456789012"))
    assert here is not None
    assert there is not None
    assert (here.name, there.name) == ("llm-us-east-1-monthly", "llm-eu-west-1-monthly")


@given(st.floats(min_value=0.01, max_value=1e9))
def test_the_limit_is_written_as_a_number_that_aws_reads(limit: float) -> None:
    plan = budget(spec(budget={"monthly_usd": limit, "emails": ["a@example.com"]}), PLACE)
    assert plan is not None
    assert abs(float(plan.limit_usd) - limit) <= 0.005 + 1e-6 * limit
    assert "e" not in plan.limit_usd


def test_the_repository_is_the_clusters_own_unless_one_is_named() -> None:
    assert repository(spec()).name == "llm/trainer"
    assert repository(spec()).existing is None
    url = "123456789012.dkr.ecr.us-east-1.amazonaws.com/mine"
    assert repository(spec(repository={"existing": url})).existing == url


def test_a_repository_keeps_as_many_images_as_wished() -> None:
    (rule,) = repository(spec(repository={"keep_last": 7})).lifecycle["rules"]
    assert rule["selection"] == {"tagStatus": "any", "countType": "imageCountMoreThan", "countNumber": 7}
    assert rule["action"] == {"type": "expire"}


def test_the_lifecycle_policy_is_short_enough_for_ecr() -> None:
    shape = Loader().load_service_model("ecr", "service-2")["shapes"]["LifecyclePolicyText"]
    assert shape["min"] <= len(str(keep_last(10**6))) <= shape["max"]
