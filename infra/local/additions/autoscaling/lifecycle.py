"""The end of an instance in an Auto Scaling group: replacement, hook, wait, termination.

With capacity rebalancing a group acts at the recommendation or the notice: it launches a replacement and terminates the
instance through its hooks. Without it, the group waits until EC2 has reclaimed the instance and then replaces it
(https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-capacity-rebalancing.html). A hook never retains
an instance that EC2 reclaims.
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from functools import cache
from typing import Any
from uuid import uuid4

from moto.autoscaling.models import AutoScalingBackend, FakeAutoScalingGroup, autoscaling_backends
from moto.ec2.models import ec2_backends

from infra.local.additions.autoscaling.groups import launch_instances
from infra.local.additions.serving import LOCK
from infra.local.patches.eventbridge import put_service_event
from infra.local.patches.wrapping import around

LEFT_OUT = (
    "Auto Scaling sends the events of terminate hooks and of terminations, not those of launches; a hook cannot be completed "
    "or prolonged, and a group that is set to zero waits for none"
)
TERMINATING = "autoscaling:EC2_INSTANCE_TERMINATING"
TERMINATE = "EC2 Instance-terminate Lifecycle Action"
TERMINATED = "EC2 Instance Terminate Successful"
"""https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-event-reference.html"""


@cache
def install() -> None:
    """Let groups with suspended replacement list terminated instances as Unhealthy, and resize around leaving instances."""

    @around(AutoScalingBackend, "notify_terminate_instances")
    def _remove_instances(original: Any, self: Any, instance_ids: list[str]) -> None:
        retained_ids = set()
        for group in self.autoscaling_groups.values():
            if {"ReplaceUnhealthy", "HealthCheck"} & set(group._suspended_processes):
                for state in group.instance_states:
                    if state.instance.id in instance_ids:
                        retained_ids.add(state.instance.id)
                        if "HealthCheck" not in group._suspended_processes:
                            state.health_status = "Unhealthy"
        original(self, [instance_id for instance_id in instance_ids if instance_id not in retained_ids])

    @around(FakeAutoScalingGroup, "set_desired_capacity")
    def _set_capacity(original: Any, self: Any, new_capacity: int | None) -> None:
        """Hide leaving instances from moto, which would count them and terminate one instance too few."""
        leaving = [state for state in self.instance_states if state.lifecycle_state.startswith("Terminating")]
        self.instance_states = [state for state in self.instance_states if state not in leaving]
        original(self, new_capacity)
        self.instance_states += leaving
        if not self.desired_capacity:
            for state in leaving:
                if hook_ended := getattr(state, "hook_ended", None):
                    hook_ended.set()


def find_state(instance: Any) -> Any | None:
    """Return the state of an instance in its Auto Scaling group, None when it belongs to no group."""
    group = getattr(instance, "autoscaling_group", None)
    states = group.instance_states if group is not None else []
    return next((state for state in states if state.instance is instance), None)


def rebalance(state: Any) -> bool:
    """Replace and terminate an instance at risk; return False when the group does not rebalance or has begun already."""
    group = state.auto_scaling_group
    if not group.capacity_rebalance or state.lifecycle_state != "InService":
        return False
    with LOCK:
        state.lifecycle_state = "Terminating"
        launch_instances(group, 1)
    _start_termination(state)
    return True


def reclaim_instance(instance: Any) -> None:
    """Terminate an instance as EC2 does when it needs the capacity; its group is notified."""
    backend = instance.ec2_backend
    with LOCK:
        hook_ended = getattr(find_state(instance), "hook_ended", None)
        if instance.state == "terminated":
            return
        _put_state_event(instance, "shutting-down")
        backend.terminate_instances([instance.id])
        _put_state_event(instance, "terminated")
        if hook_ended is None:
            autoscaling_backends[backend.account_id][backend.region_name].notify_terminate_instances([instance.id])
    if hook_ended is not None:
        hook_ended.set()


def _start_termination(state: Any) -> None:
    group = state.auto_scaling_group
    hooks = group.autoscaling_backend.describe_lifecycle_hooks(group.name)
    hook = next((hook for hook in hooks if hook.lifecycle_transition == TERMINATING), None)
    if hook is None:
        _finish_termination(state)
        return
    state.hook_ended = threading.Event()
    state.lifecycle_state = "Terminating:Wait"
    detail = {
        "LifecycleActionToken": str(uuid4()),
        "AutoScalingGroupName": group.name,
        "LifecycleHookName": hook.name,
        "EC2InstanceId": state.instance.id,
        "LifecycleTransition": hook.lifecycle_transition,
        "Origin": "AutoScalingGroup",
        "Destination": "EC2",
    }
    put_service_event(group.account_id, group.region, "aws.autoscaling", TERMINATE, detail, [group.arn])

    def wait() -> None:
        state.hook_ended.wait(float(hook.heartbeat_timeout))
        state.lifecycle_state = "Terminating:Proceed"
        _finish_termination(state)

    threading.Thread(target=wait, daemon=True).start()


def _finish_termination(state: Any) -> None:
    group, instance = state.auto_scaling_group, state.instance
    began = _now()
    with LOCK:
        if instance.state != "terminated":
            _put_state_event(instance, "shutting-down")
            ec2_backends[group.account_id][group.region].terminate_instances([instance.id])
            _put_state_event(instance, "terminated")
        group.instance_states = [other for other in group.instance_states if other is not state]
    detail = {
        "StatusCode": "InProgress",
        "AutoScalingGroupName": group.name,
        "ActivityId": str(uuid4()),
        "Description": f"Terminating EC2 instance: {instance.id}",
        "Details": {"Availability Zone": instance.placement.zone, "Subnet ID": instance.subnet_id},
        "RequestId": str(uuid4()),
        "StatusMessage": "",
        "StartTime": began,
        "EndTime": _now(),
        "EC2InstanceId": instance.id,
        "Cause": f"At {began} an instance was taken out of service in response to an EC2 instance rebalance recommendation.",
        "Origin": "AutoScalingGroup",
        "Destination": "EC2",
    }
    resources = [group.arn, _arn(instance)]
    put_service_event(group.account_id, group.region, "aws.autoscaling", TERMINATED, detail, resources)


def _put_state_event(instance: Any, state: str) -> None:
    backend, detail = instance.ec2_backend, {"instance-id": instance.id, "state": state}
    kind = "EC2 Instance State-change Notification"
    put_service_event(backend.account_id, backend.region_name, "aws.ec2", kind, detail, [_arn(instance)])


def _arn(instance: Any) -> str:
    backend = instance.ec2_backend
    return f"arn:{backend.partition}:ec2:{backend.region_name}:{backend.account_id}:instance/{instance.id}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
