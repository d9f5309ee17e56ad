"""The end of an instance in an Auto Scaling group: replacement, hook, wait, termination.

With capacity rebalancing a group acts at the recommendation or the notice: it launches a replacement and terminates the
instance through its hooks. Without, it does nothing until EC2 has taken the instance, then replaces it
(https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-capacity-rebalancing.html). A hook never keeps an
instance that EC2 takes.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any
from uuid import uuid4

from moto.autoscaling.models import AutoScalingBackend, FakeAutoScalingGroup, autoscaling_backends
from moto.ec2.models import ec2_backends

from infra.local.additions.autoscaling.groups import fill, hooks
from infra.local.additions.eventbridge import put_service_event
from infra.local.additions.serving import LOCK
from infra.local.additions.wrapping import around

LEFT_OUT = (
    "Auto Scaling sends the events of terminate hooks and of terminations, not those of launches; a group that is set to "
    "zero waits for no hook"
)
TERMINATE = "EC2 Instance-terminate Lifecycle Action"
TERMINATED = "EC2 Instance Terminate Successful"
"""https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-event-reference.html"""


@dataclass
class Action:
    """An open lifecycle action; `ends` is in the seconds of time.monotonic."""

    hook: str
    timeout: float
    token: str = field(default_factory=lambda: str(uuid4()))
    ended: threading.Event = field(default_factory=threading.Event)
    ends: float = 0.0

    def extend(self) -> None:
        """As RecordLifecycleActionHeartbeat: the timeout begins anew."""
        self.ends = time.monotonic() + self.timeout

    def wait(self) -> None:
        """Until it is completed or its time is over."""
        while not self.ended.is_set() and (left := self.ends - time.monotonic()) > 0:
            self.ended.wait(left)


@cache
def install() -> None:
    """Lets a group that does not replace unhealthy instances keep those that are gone, as Unhealthy."""

    @around(AutoScalingBackend, "notify_terminate_instances")
    def _gone(original: Any, self: Any, instance_ids: list[str]) -> None:
        kept = set()
        for group in self.autoscaling_groups.values():
            if {"ReplaceUnhealthy", "HealthCheck"} & set(group._suspended_processes):
                for state in group.instance_states:
                    if state.instance.id in instance_ids:
                        kept.add(state.instance.id)
                        if "HealthCheck" not in group._suspended_processes:
                            state.health_status = "Unhealthy"
        original(self, [item for item in instance_ids if item not in kept])

    @around(FakeAutoScalingGroup, "set_desired_capacity")
    def _resized(original: Any, self: Any, new_capacity: int | None) -> None:
        """moto would count an instance that is leaving already among those to end, and keep another in its place."""
        leaving = [state for state in self.instance_states if state.lifecycle_state.startswith("Terminating")]
        self.instance_states = [state for state in self.instance_states if state not in leaving]
        original(self, new_capacity)
        self.instance_states += leaving
        if not self.desired_capacity:
            for state in leaving:
                if action := getattr(state, "action", None):
                    action.ended.set()


def state_of(instance: Any) -> Any | None:
    """Return the instance's place in its Auto Scaling group, None when it is in none."""
    group = getattr(instance, "autoscaling_group", None)
    found = group.instance_states if group is not None else []
    return next((item for item in found if item.instance is instance), None)


def rebalance(state: Any) -> bool:
    """Replace and terminate an instance at risk; return whether that began now."""
    group = state.auto_scaling_group
    if not group.capacity_rebalance or state.lifecycle_state != "InService":
        return False
    with LOCK:
        state.lifecycle_state = "Terminating"
        fill(group, 1)
    _terminate(state)
    return True


def taken(instance: Any) -> None:
    """EC2 takes the instance now; its group follows."""
    backend = instance.ec2_backend
    with LOCK:
        state = state_of(instance)
        action = getattr(state, "action", None)
        if instance.state == "terminated":
            return
        _put_state_event(instance, "shutting-down")
        backend.terminate_instances([instance.id])
        _put_state_event(instance, "terminated")
        if action is None:
            autoscaling_backends[backend.account_id][backend.region_name].notify_terminate_instances([instance.id])
    if action is not None:
        action.ended.set()


def _terminate(state: Any) -> None:
    group = state.auto_scaling_group
    waiting = hooks(group.autoscaling_backend, group.name)
    if not waiting:
        _end(state)
        return
    hook = waiting[0]
    state.action = Action(hook.name, float(hook.heartbeat_timeout))
    state.action.extend()
    state.lifecycle_state = "Terminating:Wait"
    detail = {
        "LifecycleActionToken": state.action.token,
        "AutoScalingGroupName": group.name,
        "LifecycleHookName": hook.name,
        "EC2InstanceId": state.instance.id,
        "LifecycleTransition": hook.lifecycle_transition,
        "Origin": "AutoScalingGroup",
        "Destination": "EC2",
    }
    if metadata := getattr(hook, "notification_metadata", None):
        detail["NotificationMetadata"] = metadata
    put_service_event(group.account_id, group.region, "aws.autoscaling", TERMINATE, detail, [group.arn])

    def wait() -> None:
        state.action.wait()
        state.lifecycle_state = "Terminating:Proceed"
        _end(state)

    threading.Thread(target=wait, daemon=True).start()


def _end(state: Any) -> None:
    group, instance = state.auto_scaling_group, state.instance
    began = _now()
    with LOCK:
        if instance.state != "terminated":
            _put_state_event(instance, "shutting-down")
            ec2_backends[group.account_id][group.region].terminate_instances([instance.id])
            _put_state_event(instance, "terminated")
        group.instance_states = [item for item in group.instance_states if item is not state]
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
