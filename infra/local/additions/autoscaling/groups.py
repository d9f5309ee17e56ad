"""Auto Scaling groups as the service runs them: validated, with hooks, all fields, and instances of the right version.

moto overwrites a group of the same name, drops a dozen fields, launches from the default version, invents a hook's role and
queue, and records no activity; of a mixed group (https://github.com/getmoto/moto/pull/9444) it forgets the policy at an update.
The messages are quoted from reports of users, e.g.
https://github.com/hashicorp/terraform-provider-aws/issues/22035.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any
from uuid import uuid4

from botocore import xform_name
from moto.autoscaling.exceptions import AutoscalingClientError, ValidationError
from moto.autoscaling.models import (
    ASG_NAME_TAG,
    FakeAutoScalingGroup,
    InstanceState,
)
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.exceptions import ServiceException
from moto.core.responses import ActionResult, EmptyResult

from infra.local.additions.ec2.launch_rules import find_flaws
from infra.local.additions.ec2.launches import template_data
from infra.local.patches.wrapping import around, get_or_create

LEFT_OUT = (
    "Auto Scaling: terminate hooks are waited for after a played event only, never on scale-in; a mixed instances policy has "
    "no weights, percentages or gradual replacement; no health checks, metrics, scaling policies or instance refresh"
)
_STORED_MEMBERS = (
    "CapacityReservationSpecification", "AvailabilityZoneDistribution", "MaxInstanceLifetime", "DefaultInstanceWarmup",
    "DesiredCapacityType", "Context", "InstanceMaintenancePolicy", "AvailabilityZoneImpairmentPolicy",
    "CapacityRebalance", "TerminationPolicies", "DefaultCooldown", "PlacementGroup", "ServiceLinkedRoleARN",
)  # fmt: skip


@cache
def install() -> None:
    """Replace moto's handling of groups and add the actions that moto lacks."""
    around(AutoScalingResponse, "create_auto_scaling_group")(_create_group)
    around(AutoScalingResponse, "update_auto_scaling_group")(_update_group)
    around(AutoScalingResponse, "delete_auto_scaling_group")(_delete_group)
    around(AutoScalingResponse, "put_lifecycle_hook")(_put_lifecycle_hook)
    around(AutoScalingResponse, "describe_scaling_activities")(_describe_activities)
    around(FakeAutoScalingGroup, "replace_autoscaling_group_instances")(_replace_instances)
    InstanceState.launch_template = property(_get_launch_template)  # type: ignore[assignment]


def launch_instances(group: Any, count: int) -> None:
    """Launch `count` instances for the group; a launch that EC2 refuses is recorded as a failed activity."""
    if "Launch" in group._suspended_processes:
        return
    if not group.mixed_instances_policy:
        _launch(group, count, {"is_instance_type_default": True})
        return
    on_demand = sum(state.instance.lifecycle != "spot" for state in group.active_instances())
    base = int(group.mixed_instances_policy.get("InstancesDistribution", {}).get("OnDemandBaseCapacity") or 0)
    first = min(count, max(base - on_demand, 0))
    for market, wanted in ((None, first), ("spot", count - first)):
        # A type that is refused is followed by the next one.
        types = _override_types(group.mixed_instances_policy)
        any(_launch(group, wanted, {"instance_type": kind, "lifecycle": market}) for kind in types if wanted)


def _override_types(policy: Mapping[str, Any]) -> list[str]:
    return [override["InstanceType"] for override in policy["LaunchTemplate"].get("Overrides") or []]


def _launch(group: Any, count: int, request: Mapping[str, Any]) -> bool:
    """Launch instances with these arguments beside the template's; return whether EC2 took the request."""
    ec2 = group.autoscaling_backend.ec2_backend
    template = _template_version(group)
    tags = {**group.instance_tags, **group.get_propagated_tags(), ASG_NAME_TAG: group.name}
    subnet = group.vpc_zone_identifier.split(",")[0] if group.vpc_zone_identifier else None
    try:
        launched = ec2.run_instances(
            "",
            count,
            None,
            [],
            tags={"instance": tags},
            subnet_id=subnet,
            launch_config=group.launch_config,
            launch_template=template,
            **request,
        )
    except ServiceException as refusal:
        reason = f"{refusal.message} Launching EC2 instance failed."
        _record_activity(group, f"Launching {count} new EC2 instances", "Failed", reason)
        return False
    for instance in launched.instances:
        instance.autoscaling_group = group
        instance.launched_from = template
        group.instance_states.append(
            InstanceState(instance, protected_from_scale_in=group.new_instances_protected_from_scale_in)
        )
        _record_activity(group, f"Launching a new EC2 instance: {instance.id}", "Successful")
    return True


def _create_group(original: Any, self: Any) -> Any:
    _check_new(self.autoscaling_backend, self.params)
    answer = original(self)
    group = self.autoscaling_backend.autoscaling_groups[self.params["AutoScalingGroupName"]]
    _store_members(group, self.params)
    for hook in self.params.get("LifecycleHookSpecificationList") or []:
        _put_hook(self.autoscaling_backend, group.name, hook)
    return answer


def _update_group(original: Any, self: Any) -> Any:
    group = _get_group(self.autoscaling_backend, self.params["AutoScalingGroupName"])
    _check_sizes(self.params, group)
    _check_launch(
        self.autoscaling_backend, self.params, self.params.get("VPCZoneIdentifier") or group.vpc_zone_identifier
    )
    _store_members(group, self.params)
    if group.mixed_instances_policy and not self.params.get("LaunchTemplate"):
        # moto drops the policy of an update that does not repeat it, and takes no template by both its id and its name.
        self.params.setdefault("MixedInstancesPolicy", group.mixed_instances_policy)
        self.params["MixedInstancesPolicy"]["LaunchTemplate"]["LaunchTemplateSpecification"].pop(
            "LaunchTemplateName", None
        )
    return original(self)


def _delete_group(original: Any, self: Any) -> Any:
    group = _get_group(self.autoscaling_backend, self.params["AutoScalingGroupName"])
    forced = self._get_bool_param("ForceDelete", False)
    if group.instance_states and not forced:
        raise AutoscalingClientError(
            "ResourceInUse",
            "You cannot delete an AutoScalingGroup while there are instances or pending Spot instance request(s) still in "
            "the group.",
        )
    for state in group.instance_states:
        state.protected_from_scale_in, state.lifecycle_state = False, "InService"
    backend = self.autoscaling_backend
    backend.lifecycle_hooks = {
        k: v for k, v in backend.lifecycle_hooks.items() if v.auto_scaling_group_name != group.name
    }
    return original(self)


def _put_lifecycle_hook(original: Any, self: Any) -> Any:
    _get_group(self.autoscaling_backend, self.params["AutoScalingGroupName"])
    _put_hook(self.autoscaling_backend, self.params["AutoScalingGroupName"], self.params)
    return EmptyResult()


def _describe_activities(original: Any, self: Any) -> Any:
    name = self.params.get("AutoScalingGroupName")
    groups = self.autoscaling_backend.autoscaling_groups.values()
    activities = [activity for group in groups if name in (None, group.name) for activity in _activities(group)]
    return ActionResult({"Activities": list(reversed(activities))})


def _replace_instances(original: Any, self: Any, count_needed: int, propagated_tags: Any) -> None:
    if self.ec2_launch_template is None:
        original(self, count_needed, propagated_tags)
    else:
        launch_instances(self, count_needed)


def _template_version(group: Any) -> dict[str, Any] | None:
    if group.ec2_launch_template is None:
        return None
    number = group.ec2_launch_template.get_version(group.launch_template_version).number
    return {"LaunchTemplateId": group.ec2_launch_template.id, "Version": str(number)}


def _check_new(backend: Any, params: Mapping[str, Any]) -> None:
    name = params["AutoScalingGroupName"]
    if name in backend.autoscaling_groups:
        raise AutoscalingClientError(
            "AlreadyExists",
            f"AutoScalingGroup by this name already exists - A group with the name {name} already exists",
        )
    _check_sizes(params, None)
    _check_launch(backend, params, params.get("VPCZoneIdentifier"))


def _check_sizes(params: Mapping[str, Any], group: Any) -> None:
    minimum = params.get("MinSize", group.min_size if group else 0)
    maximum = params.get("MaxSize", group.max_size if group else 0)
    desired = params.get("DesiredCapacity")
    if int(minimum) > int(maximum):
        raise ValidationError("Max bound, " + f"{maximum}, must be greater than or equal to min bound, {minimum}")
    if desired is not None and not int(minimum) <= int(desired) <= int(maximum):
        raise ValidationError(
            f"Desired capacity:{desired} must be between the specified min size:{minimum} and max size:{maximum}"
        )


def _check_launch(backend: Any, params: Mapping[str, Any], zones: str | None) -> None:
    """Refuse a group whose instances EC2 would refuse to launch."""
    policy = params.get("MixedInstancesPolicy") or {}
    template = policy.get("LaunchTemplate", {}).get("LaunchTemplateSpecification") or params.get("LaunchTemplate")
    if not template:
        return
    ec2 = backend.ec2_backend
    reference = {name: template[name] for name in ("LaunchTemplateId", "LaunchTemplateName") if template.get(name)}
    try:
        exists = bool(ec2.describe_launch_templates(*_lookup_arguments(reference)))
        version = {"Version": template["Version"]} if template.get("Version") else {}
        data = template_data(ec2, {**reference, **version}) if exists else {}
    except (ServiceException, ValueError):
        exists, data = False, {}
    if not exists:
        raise ValidationError(
            f"The specified launch template, with template {next(iter(reference.values()), '')}, does not exist."
        )
    if policy and data.get("InstanceMarketOptions"):
        raise ValidationError(
            "Incompatible launch template: You cannot use a launch template that is set to request Spot Instances "
            "(InstanceMarketOptions) when you configure an Auto Scaling group with a mixed instances policy. Add a different "
            "launch template to the group and try again."
        )
    launches = [{**data, "InstanceType": kind} for kind in _override_types(policy)] if policy else [data]
    for subnet in zones.split(",") if zones else [None]:
        for flaw in (flaw for launch in launches for flaw in find_flaws(ec2, launch, subnet)):
            raise ValidationError(f"You must use a valid fully-formed launch template. {flaw.message}")
    if zones and any(interface.get("SubnetId") for interface in data.get("NetworkInterfaces") or []):
        raise ValidationError("A subnet of a network interface cannot be named together with those of the group.")


def _lookup_arguments(reference: Mapping[str, str]) -> tuple[list[str], list[str]]:
    template_name, template_id = reference.get("LaunchTemplateName"), reference.get("LaunchTemplateId")
    return ([template_name] if template_name else [], [template_id] if template_id else [])


def _store_members(group: Any, params: Mapping[str, Any]) -> None:
    for name in _STORED_MEMBERS:
        if params.get(name) is not None:
            setattr(group, xform_name(name), params[name])


def _put_hook(backend: Any, group: str, parameters: Mapping[str, Any]) -> None:
    hook = backend.create_lifecycle_hook(
        name=parameters["LifecycleHookName"],
        as_name=group,
        transition=parameters.get("LifecycleTransition"),
        timeout=parameters.get("HeartbeatTimeout"),
        result=parameters.get("DefaultResult"),
    )
    hook.role_arn, hook.notification_target_arn = parameters.get("RoleARN"), parameters.get("NotificationTargetARN")
    hook.notification_metadata = parameters.get("NotificationMetadata")
    hook.global_timeout = min(172_800, hook.heartbeat_timeout * 100)


def _activities(group: Any) -> list[dict[str, Any]]:
    activities: list[dict[str, Any]] = get_or_create(group, "activities", list)
    return activities


def _record_activity(group: Any, description: str, status: str, reason: str | None = None) -> None:
    now = datetime.now(UTC)
    _activities(group).append(
        {
            "ActivityId": str(uuid4()),
            "AutoScalingGroupName": group.name,
            "AutoScalingGroupARN": group.arn,
            "Description": description,
            "Cause": f"At {now:%Y-%m-%dT%H:%M:%SZ} the group wanted {group.desired_capacity} instances.",
            "StartTime": now,
            "EndTime": now,
            "StatusCode": status,
            "StatusMessage": reason,
            "Progress": 100,
        }
    )


def _get_launch_template(state: Any) -> dict[str, Any] | None:
    launched = getattr(state.instance, "launched_from", None)
    if launched is None:
        return None
    return {**launched, "LaunchTemplateName": state.auto_scaling_group.ec2_launch_template.name}


def _get_group(backend: Any, name: str) -> Any:
    if name not in backend.autoscaling_groups:
        raise ValidationError(f"AutoScalingGroup name not found - AutoScalingGroup '{name}' not found")
    return backend.autoscaling_groups[name]
