"""What a cluster does not ask for, or has already, is not made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pulumi
from pulumi.runtime import MockResourceArgs

from infra.components.buckets import ImageRepository
from infra.components.observability import Observability
from infra.components.stack import build
from infra.config import ClusterSpec, parse
from infra.local.mocks import Recorder
from infra.plan.place import Place
from infra.plan.stack import Plan
from infra.plan.storage.repository import repository
from infra.plan.watch.observability import observability
from tests.infra.edits import GONE
from tests.infra.edits import spec_of as edited

PLACE = Place("us-east-1", "123456789012")


def spec(**more: Any) -> ClusterSpec:
    group = {"name": "train", "instance_type": "g6e.48xlarge", "count": 8}
    lustre = {"capacity_gib": 1200, "per_tib_mb_s": 250, "efa": False}
    base = {"name": "llm", "backend": "ec2", "zone_id": "use1-az4", "groups": [group], "storage": {"lustre": lustre}}
    return parse({**base, **more})


def made_by(program: Callable[[], pulumi.Output[Any]]) -> tuple[list[tuple[str, dict[str, Any]]], Any]:
    """Type and arguments of everything the program asks for, and the value of what it returns."""
    recorder, values = Recorder("us-east-1"), list[Any]()
    pulumi.runtime.set_mocks(recorder, "lustrain", "test", preview=False)

    @pulumi.runtime.test  # type: ignore[untyped-decorator]
    def run() -> Any:
        return program().apply(values.append)

    run()
    return [(kind, inputs) for kind, _, inputs in recorder.resources], values[0]


def watched(cluster: ClusterSpec, *, there: bool = True) -> list[tuple[str, dict[str, Any]]]:
    def program() -> pulumi.Output[Any]:
        thing = pulumi.Output.from_input("fs-0123456789abcdef0") if there else None
        found = Observability(
            "llm",
            observability(cluster, PLACE),
            file_system_id=thing,
            home_id=thing,
            auto_scaling_groups=[pulumi.Output.from_input("llm-train-gang-1a2b3c4")],
            nat_gateway_id=thing,
            topic_arn="arn:aws:sns:us-east-1:123456789012:llm-alarms",
        )
        return found.log_group

    return made_by(program)[0]


class Running(Recorder):
    """An AWS whose control plane runs another version than today's default."""

    def new_resource(self, args: MockResourceArgs) -> tuple[str | None, dict[str, Any]]:
        made, state = super().new_resource(args)
        return made, {**state, "version": "1.33"} if args.typ == "aws:eks/cluster:Cluster" else state


def test_a_default_version_leaves_a_running_control_plane_alone_and_the_stack_tells_what_runs() -> None:
    ignored, told = list[str](), list[Any]()

    def look(args: pulumi.ResourceTransformationArgs) -> None:
        if args.type_ == "aws:eks/cluster:Cluster":
            ignored.extend(args.opts.ignore_changes or [])

    pulumi.runtime.set_mocks(Running("us-east-2"), "lustrain", "test", preview=False)

    @pulumi.runtime.test  # type: ignore[untyped-decorator]
    def run() -> Any:
        pulumi.runtime.register_stack_transformation(look)
        outputs = build(
            Plan(edited("hyperpod-eks-g6e-spot", {"eks.version": GONE}), Place("us-east-2", "123456789012"))
        )
        return pulumi.Output.from_input(outputs["spec"]).apply(told.append)

    run()
    assert "version" in ignored
    assert told[0]["eks"]["version"] == "1.33"
    assert told[0]["eks"]["upgrade_policy"] == "STANDARD"


def kinds(resources: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [kind for kind, _ in resources]


def test_prometheus_and_the_dashboard_are_made_where_they_are_wished() -> None:
    default = kinds(watched(spec()))
    assert "aws:cloudwatch/dashboard:Dashboard" in default
    assert "aws:amp/workspace:Workspace" not in default
    other = kinds(watched(spec(observability={"dashboard": False, "prometheus": True})))
    assert "aws:cloudwatch/dashboard:Dashboard" not in other
    assert "aws:amp/workspace:Workspace" in other


def test_no_alarm_watches_what_is_not_there() -> None:
    def names(there: bool) -> set[str]:
        return {inputs["name"] for kind, inputs in watched(spec(), there=there) if kind.endswith(":MetricAlarm")}

    always = {"llm-train-incomplete", "llm-boot-failed", "llm-notices-lost"}
    assert names(True) == {"llm-lustre-full", "llm-nat-traffic"} | always
    assert names(False) == always


def test_a_mailed_command_names_the_group_that_was_made() -> None:
    (gang,) = [inputs for _, inputs in watched(spec()) if inputs.get("name") == "llm-train-incomplete"]
    assert "--auto-scaling-group-name llm-train-gang-1a2b3c4 --min-size 0" in gang["alarmDescription"]


def test_a_repository_of_the_users_is_passed_on_and_none_is_made() -> None:
    url = "123456789012.dkr.ecr.us-east-1.amazonaws.com/mine"
    resources, found = made_by(lambda: ImageRepository("llm", repository(spec(repository={"existing": url}))).url)
    assert found == url
    assert kinds(resources) == ["lustrain:infra:ImageRepository"]
    resources, found = made_by(lambda: ImageRepository("llm", repository(spec())).url)
    assert found.endswith("/llm/trainer")
    assert "aws:ecr/repository:Repository" in kinds(resources)
