"""Alarms fire on what they say, and the dashboard shows what is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.loaders import Loader
from hypothesis import given
from hypothesis import strategies as st

from infra.config import ClusterSpec, parse
from infra.plan.node_policy import METRIC_NAMESPACES
from infra.plan.place import Place
from infra.plan.storage.lustre import efa_wanted, lustre
from infra.plan.watch.observability import GIB, LOG_DAYS, Alarm, dashboard, log_days, observability
from tests.infra import edits

PLACE = Place("us-east-1", "123456789012")
STACKS = [Path(f"infra/Pulumi.{name}.yaml") for name in edits.STACKS]
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


def test_one_full_storage_target_fires_though_the_file_system_has_room() -> None:
    full = alarm("lustre", WITH_LUSTRE)
    assert full is not None
    each = 1200 * GIB
    assert not fires(full, free=0.16 * each, targets=4)
    assert fires(full, free=0.14 * each, targets=4)


@given(st.integers(1, 64), st.floats(0, 1), st.floats(0.01, 0.99))
def test_the_threshold_is_a_share_of_one_target_however_many_there_are(targets: int, free: float, share: float) -> None:
    cluster = WITH_LUSTRE.model_copy(
        update={"alarms": WITH_LUSTRE.alarms.model_copy(update={"lustre_free_fraction": share})}
    )
    full = alarm("lustre", cluster)
    assert full is not None
    if abs(free - share) > 1e-6:
        assert fires(full, free=free * 4800 * GIB / targets, targets=targets) == (free < share)


def test_both_statistics_of_the_free_capacity_are_those_that_name_target_and_count() -> None:
    full = alarm("lustre", WITH_LUSTRE)
    assert full is not None
    assert {metric.id: metric.statistic for metric in full.metrics} == {"free": "Minimum", "targets": "SampleCount"}
    assert {metric.period for metric in full.metrics} == {60}, "a longer period counts each target several times"


@pytest.mark.parametrize(
    "wish",
    [
        {"type": "intelligent-tiering", "throughput_gb_s": 4},
        {
            "existing": {
                "id": "fs-0123456789abcdef0",
                "dns_name": "fs.example",
                "mount_name": "abcd",
                "security_group_id": "sg-0123456789abcdef0",
            }
        },
    ],
    ids=["tiering", "existing"],
)
def test_no_alarm_about_room_where_capacity_is_elastic_or_unknown(wish: dict[str, Any]) -> None:
    assert alarm("lustre", spec(storage={"lustre": wish})) is None


def test_a_gang_with_a_node_missing_fires_and_one_scaled_to_nothing_is_silent() -> None:
    gang = alarm("group:train", spec())
    assert gang is not None
    assert fires(gang, wanted=8, there=7)
    assert not fires(gang, wanted=8, there=8)
    assert not fires(gang, wanted=0, there=0)
    assert gang.missing == "breaching"


def test_the_mail_about_a_gang_says_how_to_stop_paying_for_half_of_it() -> None:
    gang = alarm("group:train", spec())
    assert gang is not None
    assert "--auto-scaling-group-name {id} --min-size 0 --desired-capacity 0" in gang.description


def test_a_block_that_has_not_begun_is_silent_and_one_with_a_node_missing_fires() -> None:
    block = {"mode": "capacity-block", "reservation": "cr-0123456789abcdef0"}
    group = {"name": "train", "instance_type": "p5.48xlarge", "count": 8, "capacity": block}
    gang = alarm("group:train", spec(groups=[group]))
    assert gang is not None
    assert not fires(gang, wanted=8, there=0)
    assert fires(gang, wanted=8, there=7)
    assert not fires(gang, wanted=8, there=8)
    assert "silent while there is none" in gang.description
    usual = alarm("group:train", spec())
    assert usual is not None
    assert fires(usual, wanted=8, there=0)


def test_a_boot_that_failed_fires_and_no_boot_is_silent() -> None:
    boot = alarm("cluster", spec())
    assert boot is not None
    assert fires(boot, failed=1)
    assert not fires(boot, failed=0)
    assert (boot.missing, boot.mails_end) == ("notBreaching", False)
    assert alarm("cluster", spec("hyperpod-slurm")) is None, "HyperPod tells of it by events, which are mailed"


def test_the_metric_of_the_boot_alarm_is_the_one_that_a_node_writes() -> None:
    boot = alarm("cluster", spec())
    assert boot is not None
    (metric,) = boot.metrics
    script = (Path("infra/plan/nodes") / "first_boot.sh").read_text(encoding="utf-8")
    assert f"--namespace {metric.namespace} --metric-name {metric.name} " in script
    assert f'--dimensions "{metric.dimension}=$cluster"' in script
    assert metric.namespace in METRIC_NAMESPACES, "the node role allows no other"


def test_the_mail_about_a_boot_names_the_command_that_finds_the_node() -> None:
    boot = alarm("cluster", spec())
    assert boot is not None
    assert "`fab node-verify` says which" in boot.description


def test_hyperpod_has_no_auto_scaling_groups_to_watch() -> None:
    assert alarm("group:train", spec("hyperpod-slurm")) is None
    assert observability(spec("hyperpod-slurm"), PLACE).groups == ()


def test_traffic_by_nat_fires_above_the_wished_gigabytes_an_hour() -> None:
    nat = alarm("nat", spec(alarms={"nat_gb_per_hour": 50}))
    assert nat is not None
    assert {metric.period for metric in nat.metrics} == {3600}
    assert fires(nat, sent=1e9, got=50e9), "images and data that come in are billed as well"
    assert not fires(nat, sent=25e9, got=24e9)


def test_home_folders_that_are_nearly_full_fire_before_jobs_fail() -> None:
    home = alarm("home", spec(storage={"home": {}}))
    assert home is not None
    assert fires(home, used=86, capacity=100)
    assert not fires(home, used=84, capacity=100)
    assert "storage.home.capacity_gib" in home.description
    assert alarm("home", spec()) is None


def test_a_notice_that_nobody_got_fires() -> None:
    lost = alarm("dead letters", spec())
    assert lost is not None
    assert fires(lost, lost=1)
    assert not fires(lost, lost=0)


@pytest.mark.parametrize(
    "network",
    [
        {"nat": False},
        {"closed": True},
        {"existing": {"vpc_id": "vpc-0123456789abcdef0", "compute_subnet_id": "subnet-0123456789abcdef0"}},
    ],
)
def test_no_alarm_on_a_nat_gateway_that_is_not_ours(network: dict[str, Any]) -> None:
    assert alarm("nat", spec(network=network)) is None


READ = {"alarms": {"unread_notices": True}}


@pytest.mark.parametrize("backend", ["ec2", "hyperpod-slurm", "hyperpod-eks"])
def test_nobody_is_mailed_about_unread_notices_where_nothing_reads_them(backend: str) -> None:
    """HyperPod's states and the spot notices of the whole account lie in every queue from the first hour on."""
    assert alarm("queue", spec(backend)) is None
    assert alarm("queue", spec(backend, **READ)) is not None


def test_a_notice_that_its_reader_left_fires() -> None:
    unread = alarm("queue", spec(**READ))
    assert unread is not None
    assert fires(unread, age=601, nodes0=1)
    assert not fires(unread, age=599, nodes0=1)


def test_notices_for_others_are_silent_while_this_cluster_has_no_node() -> None:
    unread = alarm("queue", spec(**READ))
    assert unread is not None
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


@pytest.mark.parametrize("stack", STACKS, ids=lambda path: path.stem)
def test_every_example_stack_has_alarms_that_aws_accepts(stack: Path) -> None:
    cluster = parse(yaml.safe_load(stack.read_text(encoding="utf-8"))["config"]["lustrain:cluster"])
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
    wish = cluster.storage.lustre
    made = wish is not None and not wish.existing and wish.type == "ssd"
    assert ("lustre" in {one.subject for one in plan.alarms}) == made
    if wish is not None and made:
        assert lustre(wish, efa_wanted(cluster)).capacity_gib


def test_two_clusters_of_one_name_in_two_regions_have_a_dashboard_each() -> None:
    boards = [observability(spec(), Place(region, "123456789012")).board for region in ("us-east-1", "eu-west-1")]
    assert boards == ["llm-us-east-1", "llm-eu-west-1"]


def test_the_dashboard_shows_what_is_there_and_nothing_else() -> None:
    body = json.dumps(dashboard(observability(spec(), PLACE), ALL_IDS))
    assert all(name in body for name in ("fs-1", "nat-1", "llm-train", "llm-checkpoints-123456789012-us-east-1"))
    less = json.dumps(dashboard(observability(spec(), PLACE), {"queue": "llm-interruptions"}))
    assert "AWS/FSx" not in less
    assert "AWS/NATGateway" not in less
    assert "AWS/AutoScaling" not in less


def test_the_dashboard_of_hyperpod_shows_what_its_nodes_report() -> None:
    body = json.dumps(dashboard(observability(spec("hyperpod-slurm"), PLACE), {"queue": "llm-interruptions"}))
    assert "/aws/sagemaker/Clusters" in body


def test_widgets_do_not_overlap_and_fit_the_grid() -> None:
    widgets = dashboard(observability(WITH_LUSTRE, PLACE), ALL_IDS)["widgets"]
    spots = {(widget["x"], widget["y"]) for widget in widgets}
    assert len(spots) == len(widgets)
    assert all(widget["x"] + widget["width"] <= 24 for widget in widgets)
