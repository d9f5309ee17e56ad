"""Auto Scaling of the embedded AWS: groups that are refused where the service refuses, and kept whole otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from infra.catalog.instances import instance
from infra.local.aws import LocalAws
from infra.plan.nodes.nics import nics
from tests.infra.local_network import Network, client, refusal

pytestmark = pytest.mark.slow

IMAGE = "ami-0123456789abcdef0"


@pytest.fixture(scope="module")
def scaling(aws: LocalAws) -> Any:
    return client(aws, "autoscaling")


def template(network: Network, name: str, **data: Any) -> dict[str, str]:
    given = {"ImageId": IMAGE, "InstanceType": "g6e.8xlarge", "SecurityGroupIds": [network.group], **data}
    kept = {key: value for key, value in given.items() if value is not None}
    made = network.ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=kept)["LaunchTemplate"]
    return {"LaunchTemplateId": made["LaunchTemplateId"], "Version": "1"}


def gang(network: Network, name: str, launch: dict[str, str], count: int = 2, **more: Any) -> dict[str, Any]:
    sizes = {"MinSize": count, "MaxSize": count, "DesiredCapacity": count}
    return {
        "AutoScalingGroupName": name,
        "LaunchTemplate": launch,
        "VPCZoneIdentifier": network.subnet,
        **sizes,
        **more,
    }


def group(scaling: Any, name: str) -> dict[str, Any]:
    found = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"]
    return dict(found[0])


def test_a_gang_gets_all_interfaces_of_its_version_in_its_one_subnet(network: Network, scaling: Any) -> None:
    facts = instance("p5.48xlarge")
    assert facts is not None
    wanted = [
        {"NetworkCardIndex": nic.card, "DeviceIndex": nic.device, "InterfaceType": nic.kind, "Groups": [network.group]}
        for nic in nics(facts)
    ]
    launch = template(network, "p5", InstanceType="p5.48xlarge", NetworkInterfaces=wanted, SecurityGroupIds=None)
    network.ec2.create_launch_template_version(
        LaunchTemplateId=launch["LaunchTemplateId"], LaunchTemplateData={"ImageId": IMAGE, "InstanceType": "m5.large"}
    )
    scaling.create_auto_scaling_group(
        **gang(network, "p5", launch, Tags=[{"Key": "k", "Value": "v", "PropagateAtLaunch": True}])
    )
    shown = group(scaling, "p5")
    assert {one["LifecycleState"] for one in shown["Instances"]} == {"InService"}
    assert {one["LaunchTemplate"]["Version"] for one in shown["Instances"]} == {"1"}
    ids = [one["InstanceId"] for one in shown["Instances"]]
    for reservation in network.ec2.describe_instances(InstanceIds=ids)["Reservations"]:
        for one in reservation["Instances"]:
            assert (one["InstanceType"], one["SubnetId"]) == ("p5.48xlarge", network.subnet)
            assert sum(nic["InterfaceType"] == "efa-only" for nic in one["NetworkInterfaces"]) == 32
            assert {"Key": "k", "Value": "v"} in one["Tags"]
    scaling.delete_auto_scaling_group(AutoScalingGroupName="p5", ForceDelete=True)


def test_what_ec2_would_not_launch_makes_no_group(network: Network, scaling: Any) -> None:
    two = [{"NetworkCardIndex": 0, "DeviceIndex": 0}, {"NetworkCardIndex": 0, "DeviceIndex": 0}]
    launch = template(network, "twice", NetworkInterfaces=two, SecurityGroupIds=None)
    code, message = refusal(scaling.create_auto_scaling_group, **gang(network, "g", launch))
    assert code == "ValidationError"
    assert message.startswith("You must use a valid fully-formed launch template. Each network interface")
    unknown = {"LaunchTemplateId": "lt-0123456789abcdef0", "Version": "1"}
    assert refusal(scaling.create_auto_scaling_group, **gang(network, "g", unknown))[0] == "ValidationError"
    newer = {**template(network, "newer"), "Version": "7"}
    assert refusal(scaling.create_auto_scaling_group, **gang(network, "g", newer))[0] == "ValidationError"
    good = template(network, "good")
    nowhere = gang(network, "g", good, VPCZoneIdentifier="subnet-0123456789abcdef0")
    assert refusal(scaling.create_auto_scaling_group, **nowhere)[0] == "ValidationError"
    too_many = gang(network, "g", good, DesiredCapacity=3)
    assert refusal(scaling.create_auto_scaling_group, **too_many)[0] == "ValidationError"


def test_a_name_is_taken_once_and_a_group_with_instances_stays(network: Network, scaling: Any) -> None:
    launch = template(network, "once")
    scaling.create_auto_scaling_group(**gang(network, "once", launch))
    assert refusal(scaling.create_auto_scaling_group, **gang(network, "once", launch))[0] == "AlreadyExists"
    assert refusal(scaling.delete_auto_scaling_group, AutoScalingGroupName="once")[0] == "ResourceInUse"
    scaling.update_auto_scaling_group(AutoScalingGroupName="once", MinSize=0, MaxSize=0, DesiredCapacity=0)
    scaling.delete_auto_scaling_group(AutoScalingGroupName="once")
    assert scaling.describe_auto_scaling_groups(AutoScalingGroupNames=["once"])["AutoScalingGroups"] == []


def test_fields_hooks_metrics_and_processes_read_back_as_they_were_set(network: Network, scaling: Any) -> None:
    launch = template(network, "whole", InstanceMarketOptions={"MarketType": "spot"})
    scaling.create_auto_scaling_group(
        **gang(network, "whole", launch, CapacityRebalance=True, MaxInstanceLifetime=864_000, DefaultInstanceWarmup=60),
        LifecycleHookSpecificationList=[
            {
                "LifecycleHookName": "save", "LifecycleTransition": "autoscaling:EC2_INSTANCE_TERMINATING",
                "HeartbeatTimeout": 300, "DefaultResult": "CONTINUE", "NotificationMetadata": "lustrain",
            }
        ],
    )  # fmt: skip
    scaling.suspend_processes(AutoScalingGroupName="whole", ScalingProcesses=["AZRebalance"])
    scaling.enable_metrics_collection(
        AutoScalingGroupName="whole", Granularity="1Minute", Metrics=["GroupDesiredCapacity", "GroupInServiceInstances"]
    )
    scaling.update_auto_scaling_group(
        AutoScalingGroupName="whole", MaxSize=3, DesiredCapacity=3, CapacityRebalance=False
    )
    shown = group(scaling, "whole")
    assert (shown["CapacityRebalance"], shown["MaxInstanceLifetime"], shown["DefaultInstanceWarmup"]) == (
        False,
        864_000,
        60,
    )
    assert [one["ProcessName"] for one in shown["SuspendedProcesses"]] == ["AZRebalance"]
    assert [one["Metric"] for one in shown["EnabledMetrics"]] == ["GroupDesiredCapacity", "GroupInServiceInstances"]
    assert len(shown["Instances"]) == 3
    (hook,) = scaling.describe_lifecycle_hooks(AutoScalingGroupName="whole")["LifecycleHooks"]
    assert (hook["HeartbeatTimeout"], hook["DefaultResult"], hook["NotificationMetadata"]) == (
        300,
        "CONTINUE",
        "lustrain",
    )
    assert "RoleARN" not in hook
    scaling.disable_metrics_collection(AutoScalingGroupName="whole")
    assert group(scaling, "whole")["EnabledMetrics"] == []


def test_a_reservation_that_is_not_there_leaves_the_group_empty_and_says_why(network: Network, scaling: Any) -> None:
    target = {"CapacityReservationTarget": {"CapacityReservationId": "cr-0123456789abcdef0"}}
    launch = template(network, "reserved", InstanceType="p5.48xlarge", CapacityReservationSpecification=target)
    scaling.create_auto_scaling_group(**gang(network, "reserved", launch))
    assert group(scaling, "reserved")["Instances"] == []
    activity = scaling.describe_scaling_activities(AutoScalingGroupName="reserved")["Activities"][0]
    assert (activity["StatusCode"], "cr-0123456789abcdef0" in activity["StatusMessage"]) == ("Failed", True)


def test_a_terminated_instance_is_replaced_unless_that_is_suspended(network: Network, scaling: Any) -> None:
    scaling.create_auto_scaling_group(**gang(network, "heals", template(network, "heals")))
    before = {one["InstanceId"] for one in group(scaling, "heals")["Instances"]}
    network.ec2.terminate_instances(InstanceIds=[min(before)])
    after = {one["InstanceId"] for one in group(scaling, "heals")["Instances"]}
    assert (len(after), len(after & before)) == (2, 1)
    scaling.suspend_processes(AutoScalingGroupName="heals", ScalingProcesses=["ReplaceUnhealthy"])
    network.ec2.terminate_instances(InstanceIds=[min(after)])
    shown = {one["InstanceId"]: one["HealthStatus"] for one in group(scaling, "heals")["Instances"]}
    assert shown == {min(after): "Unhealthy", max(after): "Healthy"}
