"""Auto Scaling groups as the service keeps them: validated, with hooks, all fields, and instances from the right version.

moto overwrites a group of the same name, drops a dozen fields, launches one interface from the default
version, invents a hook's role and queue, and knows no lifecycle actions. Messages are those that users reported, e.g.
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
    AutoScalingBackend,
    FakeAutoScalingGroup,
    InstanceState,
    autoscaling_backends,
)
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.exceptions import ServiceException
from moto.core.responses import ActionResult, EmptyResult

from infra.local.additions.ec2.launch_rules import flaws
from infra.local.additions.ec2.launches import template_data
from infra.local.additions.serving import Call, refuse, serve
from infra.local.additions.wrapping import around, kept_by

LEFT_OUT = (
    "Auto Scaling: terminate hooks are waited for after a played event only, never on scale-in; no mixed instances policies, "
    "health checks, metrics, scaling policies or instance refresh"
)
_KEPT = (
    "CapacityReservationSpecification", "AvailabilityZoneDistribution", "MaxInstanceLifetime", "DefaultInstanceWarmup",
    "DesiredCapacityType", "Context", "InstanceMaintenancePolicy", "AvailabilityZoneImpairmentPolicy",
    "CapacityRebalance", "TerminationPolicies", "DefaultCooldown", "PlacementGroup", "ServiceLinkedRoleARN",
)  # fmt: skip
METRICS = (
    "GroupMinSize", "GroupMaxSize", "GroupDesiredCapacity", "GroupInServiceInstances", "GroupPendingInstances",
    "GroupStandbyInstances", "GroupTerminatingInstances", "GroupTotalInstances", "GroupInServiceCapacity",
    "GroupPendingCapacity", "GroupStandbyCapacity", "GroupTerminatingCapacity", "GroupTotalCapacity",
    "WarmPoolDesiredCapacity", "WarmPoolWarmedCapacity", "WarmPoolPendingCapacity", "WarmPoolTerminatingCapacity",
    "WarmPoolTotalCapacity", "WarmPoolMinSize", "GroupAndWarmPoolDesiredCapacity", "GroupAndWarmPoolTotalCapacity",
)  # fmt: skip
"""What EnableMetricsCollection turns on when the request names none (its API reference)."""
_TERMINATING = "autoscaling:EC2_INSTANCE_TERMINATING"


@cache
def install() -> None:
    """Put itself around moto's groups and adds the actions that moto lacks."""
    around(AutoScalingResponse, "create_auto_scaling_group")(_create_group)
    around(AutoScalingResponse, "update_auto_scaling_group")(_update_group)
    around(AutoScalingResponse, "delete_auto_scaling_group")(_delete_group)
    around(AutoScalingResponse, "put_lifecycle_hook")(_put_lifecycle_hook)
    around(AutoScalingResponse, "describe_scaling_activities")(_describe_activities)
    around(AutoScalingBackend, "enable_metrics_collection")(_enable_metrics)
    around(FakeAutoScalingGroup, "replace_autoscaling_group_instances")(_replace_instances)
    InstanceState.launch_template = property(_launched_from)  # type: ignore[assignment]
    actions = {
        "CompleteLifecycleAction": _complete_action,
        "RecordLifecycleActionHeartbeat": _heartbeat,
        "DisableMetricsCollection": _disable_metrics,
    }
    serve(AutoScalingResponse, "autoscaling", actions, "ValidationError")


def hooks(backend: Any, group: str, transition: str = _TERMINATING) -> list[Any]:
    """Return the hooks of a group for one transition."""
    return [hook for hook in backend.describe_lifecycle_hooks(group) if hook.lifecycle_transition == transition]


def fill(group: Any, count: int) -> None:
    """Launch `count` instances for the group; what EC2 refuses becomes a failed activity, as in the service."""
    if "Launch" in group._suspended_processes:
        return
    ec2 = group.autoscaling_backend.ec2_backend
    template = _template(group)
    tags = {**group.instance_tags, **group.get_propagated_tags(), ASG_NAME_TAG: group.name}
    subnet = group.vpc_zone_identifier.split(",")[0] if group.vpc_zone_identifier else None
    try:
        made = ec2.run_instances(
            "",
            count,
            None,
            [],
            tags={"instance": tags},
            subnet_id=subnet,
            launch_config=group.launch_config,
            launch_template=template,
            is_instance_type_default=True,
        )
    except ServiceException as refusal:
        why = f"{refusal.message} Launching EC2 instance failed."
        _record(group, f"Launching {count} new EC2 instances", "Failed", why)
        return
    for instance in made.instances:
        instance.autoscaling_group = group
        instance.launched_from = template
        group.instance_states.append(
            InstanceState(instance, protected_from_scale_in=group.new_instances_protected_from_scale_in)
        )
        _record(group, f"Launching a new EC2 instance: {instance.id}", "Successful")


def _create_group(original: Any, self: Any) -> Any:
    _check_new(self.autoscaling_backend, self.params)
    answer = original(self)
    group = self.autoscaling_backend.autoscaling_groups[self.params["AutoScalingGroupName"]]
    _keep(group, self.params)
    for hook in self.params.get("LifecycleHookSpecificationList") or []:
        _put_hook(self.autoscaling_backend, group.name, hook)
    return answer


def _update_group(original: Any, self: Any) -> Any:
    group = _group(self.autoscaling_backend, self.params["AutoScalingGroupName"])
    _check_sizes(self.params, group)
    _check_launch(
        self.autoscaling_backend, self.params, self.params.get("VPCZoneIdentifier") or group.vpc_zone_identifier
    )
    _keep(group, self.params)
    return original(self)


def _delete_group(original: Any, self: Any) -> Any:
    group = _group(self.autoscaling_backend, self.params["AutoScalingGroupName"])
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
    _group(self.autoscaling_backend, self.params["AutoScalingGroupName"])
    _put_hook(self.autoscaling_backend, self.params["AutoScalingGroupName"], self.params)
    return EmptyResult()


def _describe_activities(original: Any, self: Any) -> Any:
    name = self.params.get("AutoScalingGroupName")
    groups = self.autoscaling_backend.autoscaling_groups.values()
    found = [activity for group in groups if name in (None, group.name) for activity in _activities(group)]
    return ActionResult({"Activities": list(reversed(found))})


def _enable_metrics(original: Any, self: Any, group_name: str, metrics: Any) -> None:
    group = _group(self, group_name)
    group.metrics = sorted({*group.metrics, *(metrics or METRICS)})


def _replace_instances(original: Any, self: Any, count_needed: int, propagated_tags: Any) -> None:
    if self.ec2_launch_template is None:
        original(self, count_needed, propagated_tags)
    else:
        fill(self, count_needed)


def _template(group: Any) -> dict[str, Any] | None:
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
    least = params.get("MinSize", group.min_size if group else 0)
    most = params.get("MaxSize", group.max_size if group else 0)
    desired = params.get("DesiredCapacity")
    if int(least) > int(most):
        raise ValidationError("Max bound, " + f"{most}, must be greater than or equal to min bound, {least}")
    if desired is not None and not int(least) <= int(desired) <= int(most):
        raise ValidationError(
            f"Desired capacity:{desired} must be between the specified min size:{least} and max size:{most}"
        )


def _check_launch(backend: Any, params: Mapping[str, Any], zones: str | None) -> None:
    """Refuses a group whose instances EC2 would refuse."""
    if params.get("MixedInstancesPolicy"):
        raise ValidationError("The embedded AWS takes no mixed instances policy: name a launch template.")
    chosen = params.get("LaunchTemplate")
    if not chosen:
        return
    ec2 = backend.ec2_backend
    which = {name: chosen[name] for name in ("LaunchTemplateId", "LaunchTemplateName") if chosen.get(name)}
    try:
        known = bool(ec2.describe_launch_templates(*_wanted(which)))
        version = {"Version": chosen["Version"]} if chosen.get("Version") else {}
        data = template_data(ec2, {**which, **version}) if known else {}
    except (ServiceException, ValueError):
        known, data = False, {}
    if not known:
        raise ValidationError(
            f"The specified launch template, with template {next(iter(which.values()), '')}, does not exist."
        )
    for subnet in zones.split(",") if zones else [None]:
        for flaw in flaws(ec2, data, subnet):
            raise ValidationError(f"You must use a valid fully-formed launch template. {flaw.message}")
    if zones and any(interface.get("SubnetId") for interface in data.get("NetworkInterfaces") or []):
        raise ValidationError("A subnet of a network interface cannot be named together with those of the group.")


def _wanted(which: Mapping[str, str]) -> tuple[list[str], list[str]]:
    name, found = which.get("LaunchTemplateName"), which.get("LaunchTemplateId")
    return ([name] if name else [], [found] if found else [])


def _keep(group: Any, params: Mapping[str, Any]) -> None:
    for name in _KEPT:
        if params.get(name) is not None:
            setattr(group, xform_name(name), params[name])


def _put_hook(backend: Any, group: str, asked: Mapping[str, Any]) -> None:
    made = backend.create_lifecycle_hook(
        name=asked["LifecycleHookName"],
        as_name=group,
        transition=asked.get("LifecycleTransition"),
        timeout=asked.get("HeartbeatTimeout"),
        result=asked.get("DefaultResult"),
    )
    made.role_arn, made.notification_target_arn = asked.get("RoleARN"), asked.get("NotificationTargetARN")
    made.notification_metadata = asked.get("NotificationMetadata")
    made.global_timeout = min(172_800, made.heartbeat_timeout * 100)


def _activities(group: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kept_by(group, "activities", list)
    return found


def _record(group: Any, description: str, status: str, why: str | None = None) -> None:
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
            "StatusMessage": why,
            "Progress": 100,
        }
    )


def _launched_from(state: Any) -> dict[str, Any] | None:
    launched = getattr(state.instance, "launched_from", None)
    if launched is None:
        return None
    return {**launched, "LaunchTemplateName": state.auto_scaling_group.ec2_launch_template.name}


def _group(backend: Any, name: str) -> Any:
    if name not in backend.autoscaling_groups:
        raise ValidationError(f"AutoScalingGroup name not found - AutoScalingGroup '{name}' not found")
    return backend.autoscaling_groups[name]


def _waiting(call: Call) -> Any:
    """Return the instance of the call whose lifecycle action is open."""
    group = _group(autoscaling_backends[call.account][call.region], call.get("AutoScalingGroupName"))
    wanted = (call.get("LifecycleHookName"), call.get("InstanceId"), call.get("LifecycleActionToken"))
    for state in group.instance_states:
        action = getattr(state, "action", None)
        if action and action.hook == wanted[0] and (state.instance.id == wanted[1] or action.token == wanted[2]):
            return state
    raise ValidationError(f"No active Lifecycle Action found with instance ID {wanted[1]}")


def _complete_action(call: Call) -> Mapping[str, Any]:
    state = _waiting(call)
    if call.get("LifecycleActionResult") not in ("CONTINUE", "ABANDON"):
        refuse("ValidationError", "Lifecycle action result must be CONTINUE or ABANDON")
    state.action.ended.set()
    return {}


def _heartbeat(call: Call) -> Mapping[str, Any]:
    _waiting(call).action.extend()
    return {}


def _disable_metrics(call: Call) -> Mapping[str, Any]:
    group = _group(autoscaling_backends[call.account][call.region], call.get("AutoScalingGroupName"))
    off = call.get("Metrics") or METRICS
    group.metrics = [metric for metric in group.metrics if metric not in off]
    return {}
