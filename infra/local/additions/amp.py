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
from infra.local.patches.wrapping import get_or_create

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
        "CreateAlertManagerDefinition": _store,
        "PutAlertManagerDefinition": _store,
        "DescribeAlertManagerDefinition": lambda call: {"alertManagerDefinition": _get(call)},
        "DeleteAlertManagerDefinition": _delete,
    }
    serve(PrometheusServiceResponse, "amp", actions)


def _definitions(call: Call) -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = get_or_create(amp_backends[call.account][call.region], "lustrain_alerts", dict)
    return made


def _get(call: Call) -> dict[str, Any]:
    workspace: str = call.get("workspaceId")
    if workspace not in _definitions(call):
        kind = "AWS::APS::AlertManagerDefinition"
        refuse("ResourceNotFoundException", "No alert manager definition", resourceId=workspace, resourceType=kind)
    return _definitions(call)[workspace]


def _store(call: Call) -> Mapping[str, Any]:
    workspace, data = call.get("workspaceId"), call.get("data")
    if workspace not in amp_backends[call.account][call.region].workspaces:
        kind = "AWS::APS::Workspace"
        refuse("ResourceNotFoundException", "Workspace not found", resourceId=workspace, resourceType=kind)
    try:
        read = yaml.safe_load(data)
    except yaml.YAMLError:
        read = None
    if not isinstance(read, dict) or not isinstance(read.get(_FORM), str):
        refuse("ValidationException", f"error parsing the definition: {_FORM} must be text", reason="OTHER")
    status, now = {"statusCode": "ACTIVE"}, datetime.now(UTC)
    created = _definitions(call).get(workspace, {}).get("createdAt", now)
    _definitions(call)[workspace] = {"status": status, "data": data, "createdAt": created, "modifiedAt": now}
    return {"status": status}


def _delete(call: Call) -> Mapping[str, Any]:
    _get(call)
    del _definitions(call)[call.get("workspaceId")]
    return {}
