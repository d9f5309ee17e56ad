"""Amazon Managed Service for Prometheus: the alert manager definition of a workspace, which moto lacks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any

import yaml
from moto.amp import urls
from moto.amp.models import amp_backends
from moto.amp.responses import PrometheusServiceResponse

from infra.local.additions.serving import Call, refuse, serve
from infra.local.additions.wrapping import get_or_create

LEFT_OUT = (
    "Prometheus workspaces: nothing is written, evaluated or sent; rules are taken as they come; of an alert manager "
    "definition only its outer form is checked"
)
_FORM = "alertmanager_config"
"""The key that holds the alert manager's own configuration, as text
(https://docs.aws.amazon.com/prometheus/latest/userguide/AMP-alertmanager-config.html)."""


@cache
def install() -> None:
    path = "workspaces/(?P<workspace_id>[^/]+)/alertmanager/definition"
    urls.url_paths[f"{{0}}/{path}$"] = PrometheusServiceResponse.dispatch
    actions = {
        "CreateAlertManagerDefinition": _create,
        "PutAlertManagerDefinition": _put,
        "DescribeAlertManagerDefinition": lambda call: {"alertManagerDefinition": _get(call)},
        "DeleteAlertManagerDefinition": _delete,
    }
    serve(PrometheusServiceResponse, "amp", actions)


def _definitions(call: Call) -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = get_or_create(amp_backends[call.account][call.region], "lustrain_alerts", dict)
    return made


def _workspace(call: Call) -> str:
    name: str = call.get("workspaceId")
    if name not in amp_backends[call.account][call.region].workspaces:
        refuse("ResourceNotFoundException", "Workspace not found", resourceId=name, resourceType="AWS::APS::Workspace")
    return name


def _get(call: Call) -> dict[str, Any]:
    name = _workspace(call)
    if name not in _definitions(call):
        refuse(
            "ResourceNotFoundException",
            "No alert manager definition",
            resourceId=name,
            resourceType="AWS::APS::AlertManagerDefinition",
        )
    return _definitions(call)[name]


def _create(call: Call) -> Mapping[str, Any]:
    if (name := _workspace(call)) in _definitions(call):
        message = "An alert manager definition exists already"
        refuse("ConflictException", message, resourceId=name, resourceType="AWS::APS::AlertManagerDefinition")
    return _store(call, datetime.now(UTC))


def _delete(call: Call) -> Mapping[str, Any]:
    _get(call)
    del _definitions(call)[_workspace(call)]
    return {}


def _put(call: Call) -> Mapping[str, Any]:
    return _store(call, _get(call)["createdAt"])


def _store(call: Call, created: datetime) -> Mapping[str, Any]:
    data = call.get("data")
    try:
        read = yaml.safe_load(data)
    except yaml.YAMLError:
        read = None
    if not isinstance(read, dict) or not isinstance(read.get(_FORM), str):
        refuse("ValidationException", f"error parsing the definition: {_FORM} must be text", reason="OTHER")
    status = {"statusCode": "ACTIVE"}
    _definitions(call)[_workspace(call)] = {
        "status": status,
        "data": data,
        "createdAt": created,
        "modifiedAt": datetime.now(UTC),
    }
    return {"status": status}
