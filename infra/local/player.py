"""The server of the event player, which runs each command of `events.Events` on moto's backends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from moto.autoscaling.models import autoscaling_backends
from moto.core.exceptions import ServiceException
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.events.models import events_backends

from infra.local.additions.autoscaling import lifecycle
from infra.local.additions.hyperpod.nodes import fail_node
from infra.local.events import FAULT, NOTICE_SECONDS, send
from infra.local.patches.eventbridge import put_service_event, undelivered

ACCOUNT = DEFAULT_ACCOUNT_ID


def spot(
    instance: str, in_s: float = NOTICE_SECONDS, action: str = "terminate", metadata: str | None = None
) -> dict[str, Any]:
    """Send the interruption notice and end the instance `in_s` seconds later; metadata and group change with it."""
    if action not in ("terminate", "stop", "hibernate"):
        raise ValueError(f"EC2 has no spot action {action!r}")
    moto_instance = _find_running_instance(instance)
    if moto_instance.lifecycle != "spot":
        raise ValueError(f"{instance} is not a spot instance: EC2 sends it no interruption notice")
    if metadata:
        send(f"{metadata}/control/spot", {"action": action, "in_s": in_s})
    zone = moto_instance.placement.zone
    _put_ec2_event(
        moto_instance.ec2_backend,
        "EC2 Spot Instance Interruption Warning",
        {"instance-id": instance, "instance-action": action},
        # Unlike all other events of EC2, the notice names its instance by the zone and without the account.
        [f"arn:{moto_instance.ec2_backend.partition}:ec2:{zone}:instance/{instance}"],
    )
    _rebalance_group(moto_instance, metadata)
    if action == "terminate":
        _run_later(in_s, lambda: lifecycle.reclaim_instance(moto_instance))
    return _describe_instance(moto_instance)


def rebalance(instance: str, metadata: str | None = None) -> dict[str, Any]:
    """Send the rebalance recommendation; a group with capacity rebalancing replaces the instance."""
    moto_instance = _find_running_instance(instance)
    if metadata:
        send(f"{metadata}/control/rebalance", {})
    kind = "EC2 Instance Rebalance Recommendation"
    _put_ec2_event(
        moto_instance.ec2_backend,
        kind,
        {"instance-id": instance},
        [_arn(moto_instance.ec2_backend, f"instance/{instance}")],
    )
    _rebalance_group(moto_instance, metadata)
    return _describe_instance(moto_instance)


def node_fault(cluster: str, instance: str, region: str, fault: str = FAULT) -> dict[str, Any]:
    return {"instance": fail_node(ACCOUNT, region, cluster, instance, fault)}


def state() -> dict[str, Any]:
    """Return the state that `Events.state` shows."""
    groups = {
        group.name: {state.instance.id: state.lifecycle_state for state in group.instance_states}
        for backend in list(autoscaling_backends[ACCOUNT].values())
        for group in backend.autoscaling_groups.values()
    }
    regions = list(events_backends[ACCOUNT])
    return {"groups": groups, "undelivered": [event for region in regions for event in undelivered(ACCOUNT, region)]}


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "spot": spot,
    "rebalance": rebalance,
    "node-fault": node_fault,
}


def listen() -> str:
    """Serve commands on a loopback port in a daemon thread; return the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Control)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


class _Control(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        command = COMMANDS.get(self.path.removeprefix("/control/"))
        if command is None:
            return self._answer(404, f"no such command; there are {', '.join(COMMANDS)}")
        try:
            return self._answer(200, json.dumps(command(**json.loads(raw or b"{}"))))
        except (TypeError, ValueError, ServiceException) as error:
            return self._answer(400, str(error))

    def do_GET(self) -> None:
        if self.path == "/control/state":
            self._answer(200, json.dumps(state()))
        else:
            self._answer(404, "")

    def _answer(self, status: int, body: str) -> None:
        raw = body.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing; the state shows which events were played."""


def _find_running_instance(instance_id: str) -> Any:
    for backend in list(ec2_backends[ACCOUNT].values()):
        instance = backend.get_instance_by_id(instance_id)
        if instance is not None and instance.state == "running":
            return instance
    raise ValueError(f"no running instance {instance_id} in any region")


def _rebalance_group(instance: Any, metadata: str | None) -> None:
    group_state = lifecycle.find_state(instance)
    if group_state is not None and lifecycle.rebalance(group_state) and metadata:
        send(f"{metadata}/control/lifecycle", {"state": "Terminated"})


def _describe_instance(instance: Any) -> dict[str, Any]:
    group_state = lifecycle.find_state(instance)
    return {
        "instance": instance.id,
        "group": group_state.auto_scaling_group.name if group_state else None,
        "lifecycle_state": group_state.lifecycle_state if group_state else None,
    }


def _put_ec2_event(backend: Any, kind: str, detail: dict[str, Any], resources: list[str]) -> None:
    put_service_event(backend.account_id, backend.region_name, "aws.ec2", kind, detail, resources)


def _arn(backend: Any, resource: str) -> str:
    return f"arn:{backend.partition}:ec2:{backend.region_name}:{backend.account_id}:{resource}"


def _run_later(seconds: float, action: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
