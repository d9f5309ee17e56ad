"""Alarms fire on what they say, and the dashboard shows what is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.loaders import Loader
from hypothesis import given
from hypothesis import strategies as st

from infra.config import ClusterSpec, parse
from infra.plan.node_policy import METRIC_NAMESPACES
from infra.plan.place import Place
from infra.plan.watch.observability import GIB, LOG_DAYS, Alarm, dashboard, log_days, observability
from tests.infra import edits
from tests.infra.specs import EXISTING, EXISTING_LUSTRE
from trainer.metrics import cloudwatch

PLACE = Place("us-east-1", "123456789012")
ALL_IDS = {"cluster": "llm", "lustre": "fs-1", "nat": "nat-1", "queue": "llm-interruptions", "group:train": "llm-train"}


def spec(backend: str = "ec2", **more: Any) -> ClusterSpec:
    group = {"name": "train", "instance_type": "g6e.48xlarge", "count": 8}
    return parse({"name": "llm", "backend": backend, "zone_id": "use1-az4", "groups": [group], **more})


def alarm(subject: str, cluster: ClusterSpec) -> Alarm | None:
    return next((one for one in observability(cluster, PLACE).alarms if one.subject == subject), None)


def fires(one: Alarm, **values: float) -> bool:
    """Whether the alarm's expression over these values is past its threshold."""
    assert set(values) == {metric.id for metric in one.metrics}
    math = {"IF": lambda case, yes, no: yes if case else no, "FILL": lambda value, otherwise: value}
    result = eval(one.expression, {"__builtins__": {}, **math}, values)
    return bool(result > one.threshold if one.comparison == "GreaterThanThreshold" else result < one.threshold)


WITH_LUSTRE = spec(storage={"lustre": {"capacity_gib": 4800, "per_tib_mb_s": 250, "efa": False}})


@given(st.integers(1, 64), st.floats(0, 1), st.floats(0.01, 0.99))
def test_the_threshold_is_a_share_of_one_target_of_any_number(targets: int, free: float, share: float) -> None:
    cluster = WITH_LUSTRE.model_copy(
        update={"alarms": WITH_LUSTRE.alarms.model_copy(update={"lustre_free_fraction": share})}
    )
    full = alarm("lustre", cluster)
    assert full is not None
    if abs(free - share) > 1e-6:
        assert fires(full, free=free * 4800 * GIB / targets, targets=targets) == (free < share)


@pytest.mark.parametrize(
    "wish",
    [
        {"type": "intelligent-tiering", "throughput_gb_s": 4},
        {"existing": EXISTING_LUSTRE},
    ],
    ids=["tiering", "existing"],
)
def test_no_alarm_about_room_with_elastic_or_unknown_capacity(wish: dict[str, Any]) -> None:
    assert alarm("lustre", spec(storage={"lustre": wish})) is None


def test_metric_of_the_boot_alarm_is_the_one_that_a_node_writes() -> None:
    boot = alarm("cluster", spec())
    assert boot is not None
    (metric,) = boot.metrics
    script = (Path("infra/plan/nodes") / "boot_steps.sh").read_text(encoding="utf-8")
    assert f"--namespace {metric.namespace} --metric-name {metric.name} " in script
    assert f'--dimensions "{metric.dimension}=$cluster"' in script
    assert metric.namespace in METRIC_NAMESPACES, "the node role allows no other"


def test_group_that_goes_to_zero_has_its_own_ways_to_stop_paying() -> None:
    """Its machines are protected from scale-in, and the controller sets its desired capacity back."""
    groups = [
        {"name": "train", "instance_type": "g6e.48xlarge", "count": 8, "min_count": 0},
        {"name": "fixed", "instance_type": "g6e.48xlarge", "count": 2},
    ]
    slurm = {"type": "slurm", "idle_minutes": 17}
    to_zero, fixed = (alarm(f"group:{name}", spec(groups=groups, scheduler=slurm)) for name in ("train", "fixed"))
    assert to_zero is not None
    assert fixed is not None
    assert "--desired-capacity 0" not in to_zero.description
    ends = "terminate-instance-in-auto-scaling-group --should-decrement-desired-capacity"
    for part in ("scancel", "17 minutes", ends):
        assert part in to_zero.description
    assert "--desired-capacity 0" in fixed.description
    assert ends not in fixed.description


@pytest.mark.parametrize("logs", [True, False])
@pytest.mark.parametrize("least", [0, 8])
def test_boot_alarm_says_where_a_failed_machine_is_ended(least: int, logs: bool) -> None:
    group = {"name": "train", "instance_type": "g6e.48xlarge", "count": 8, "min_count": least}
    boot = alarm("cluster", spec(groups=[group], scheduler={"type": "slurm"}, observability={"logs": logs}))
    assert boot is not None
    assert ("it is ended after 60 minutes" in boot.description) == (least == 0)
    assert ("/lustrain/llm/node" in boot.description) == (least == 0 and logs)


def test_run_that_stands_still_fires_and_silence_does_not() -> None:
    stalled = next(one for one in observability(spec(), PLACE).alarms if one.name == "llm-run-stalled")
    (metric,) = stalled.metrics
    assert (metric.namespace, metric.dimension) == (cloudwatch.NAMESPACE, cloudwatch.CLUSTER)
    assert metric.name in cloudwatch.ALSO_BY_CLUSTER
    assert fires(stalled, since=31 * 60)
    assert not fires(stalled, since=29 * 60)
    assert stalled.missing == "notBreaching", "no run is no fault"


@pytest.mark.parametrize(
    "network",
    [
        {"nat": False},
        {"closed": True},
        {"existing": EXISTING},
    ],
)
def test_no_alarm_on_a_nat_gateway_that_is_not_ours(network: dict[str, Any]) -> None:
    assert alarm("nat", spec(network=network)) is None


def test_traffic_by_nat_fires_above_the_wished_gigabytes_an_hour() -> None:
    nat = alarm("nat", spec(alarms={"nat_gb_per_hour": 7}))
    assert nat is not None
    assert {metric.period for metric in nat.metrics} == {3600}
    assert fires(nat, sent=1e9, got=7e9), "images and data that come in are billed as well"
    assert not fires(nat, sent=3e9, got=3e9)


READ: dict[str, Any] = {"alarms": {"unread_notices": True}}


@pytest.mark.parametrize("backend", ["ec2", "hyperpod-slurm", "hyperpod-eks"])
def test_unread_notices_send_mail_only_where_switched_on(backend: str) -> None:
    """HyperPod's states and the spot notices of the whole account lie in every queue from the first hour on."""
    assert alarm("queue", spec(backend)) is None
    assert alarm("queue", spec(backend, **READ)) is not None


def test_a_notice_that_its_reader_left_fires() -> None:
    """Notices for others are silent while this cluster has no node."""
    unread = alarm("queue", spec(**READ))
    assert unread is not None
    assert fires(unread, age=601, nodes0=1)
    assert not fires(unread, age=599, nodes0=1)
    assert not fires(unread, age=3600, nodes0=0)
    assert unread.subjects == {"queue", "group:train"}
    hyperpod = alarm("queue", spec("hyperpod-slurm", **READ))
    assert hyperpod is not None
    assert fires(hyperpod, age=601)


@pytest.mark.parametrize(("groups", "metrics"), [(9, 10), (10, 1)])
def test_no_alarm_has_more_metrics_than_cloudwatch_evaluates(groups: int, metrics: int) -> None:
    many = [{"name": f"g{number}", "instance_type": "g6e.48xlarge", "count": 1} for number in range(groups)]
    unread = alarm("queue", spec(groups=many, **READ))
    assert unread is not None
    assert len(unread.metrics) == metrics
    assert fires(unread, age=601, **{metric.id: 1 for metric in unread.metrics[1:]})


@given(st.integers(1, 3653))
def test_logs_are_kept_at_least_as_long_as_wished(wanted: int) -> None:
    days = log_days(wanted)
    assert days in LOG_DAYS
    assert days >= wanted
    assert all(shorter < wanted for shorter in LOG_DAYS if shorter < days)


def to_zero(cluster: ClusterSpec) -> ClusterSpec:
    """Return the cluster with groups that go to zero, where it has a Slurm of its own."""
    zero = [group.model_copy(update={"min_count": 0}) for group in cluster.groups]
    return cluster.model_copy(update={"groups": zero} if cluster.controller else {})


@pytest.mark.parametrize("change", [lambda cluster: cluster, to_zero], ids=["as it is", "to zero"])
@pytest.mark.parametrize("stack", edits.STACKS)
def test_every_example_stack_has_alarms_that_aws_accepts(
    stack: str, change: Callable[[ClusterSpec], ClusterSpec]
) -> None:
    cluster = change(edits.spec_of(stack, {}))
    plan = observability(cluster, PLACE)
    shapes = Loader().load_service_model("cloudwatch", "service-2")["shapes"]
    names = [one.name for one in plan.alarms]
    assert len(set(names)) == len(names)
    for one in plan.alarms:
        assert one.name.startswith(f"{cluster.name}-"), "the topic's policy goes by the prefix"
        assert len(one.name) <= shapes["AlarmName"]["max"]
        assert len(one.description) <= shapes["AlarmDescription"]["max"]
        assert ". First: " in one.description, "who is paged reads what to do"
        assert len(one.expression) <= shapes["MetricExpression"]["max"]
        # CloudWatch looks at one day at most.
        assert one.periods * max(metric.period for metric in one.metrics) <= 86400


def test_widgets_do_not_overlap_and_fit_the_grid() -> None:
    widgets = dashboard(observability(WITH_LUSTRE, PLACE), ALL_IDS)["widgets"]
    spots = {(widget["x"], widget["y"]) for widget in widgets}
    assert len(spots) == len(widgets)
    assert all(widget["x"] + widget["width"] <= 24 for widget in widgets)
