"""Cloud Control and CloudFormation's DescribeType for the resource types of `TYPES`.

A desired state is checked against the type's schema before anything happens, as AWS does. When the service behind the type
refuses the state, the request fails later and its event names the reason.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NoReturn
from uuid import uuid4

import jsonpatch
from moto import backend_index
from moto.cloudformation.responses import CloudFormationResponse
from moto.core.base_backend import BackendDict, BaseBackend
from moto.core.exceptions import ServiceException
from moto.core.responses import BaseResponse

from infra.local.additions.hyperpod import resource as hyperpod_resource
from infra.local.additions.hyperpod import resource_types
from infra.local.additions.serving import Call, refuse, serve

LEFT_OUT = (
    "cloudcontrol: AWS::SageMaker::Cluster only, the other types have resources of their own in the AWS provider; no hooks, "
    "listings, cancelling or repeating of requests, or roles to act with; read-only properties are dropped, not refused"
)
TYPES = {hyperpod_resource.TYPE: hyperpod_resource}
FAILURES = {
    "ValidationException": "InvalidRequest",
    "ResourceInUse": "AlreadyExists",
    "ResourceNotFound": "NotFound",
    "ConflictException": "ResourceConflict",
    "ResourceLimitExceeded": "ServiceLimitExceeded",
}


class CloudControlResponse(BaseResponse):
    def __init__(self) -> None:
        super().__init__(service_name="cloudcontrol")


class CloudControlBackend(BaseBackend):
    """A backend with URLs of its own, since moto derives them from the name of the backend's module."""

    def __init__(self, region_name: str, account_id: str) -> None:
        super().__init__(region_name, account_id)
        self.events: dict[str, dict[str, Any]] = {}
        """ProgressEvents by the token of their request, each with the status that it ends with."""

    @property
    def url_bases(self) -> list[str]:
        return [r"https?://cloudcontrolapi\.(.+)\.amazonaws\.com"]

    @property
    def url_paths(self) -> dict[str, Callable[..., Any]]:
        return {"/$": CloudControlResponse.dispatch}


cloudcontrol_backends = BackendDict(CloudControlBackend, "cloudcontrol")


def install() -> None:
    # moto imports moto.<service> for the service whose pattern fits the host.
    sys.modules["moto.cloudcontrol"] = sys.modules[__name__]
    pattern = re.compile(r"https?://cloudcontrolapi\.(.+)\.amazonaws\.com")
    backend_index.backend_url_patterns.append(("cloudcontrol", pattern))
    serve(
        CloudControlResponse,
        "cloudcontrol",
        {
            "CreateResource": lambda call: _run(call, "CREATE", _create),
            "UpdateResource": lambda call: _run(call, "UPDATE", _update),
            "DeleteResource": lambda call: _run(call, "DELETE", _delete),
            "GetResource": _get,
            "GetResourceRequestStatus": _status,
        },
    )
    serve(CloudFormationResponse, "cloudformation", {"DescribeType": _describe_type})


def _backend(call: Call) -> CloudControlBackend:
    return cloudcontrol_backends[call.account][call.region]


def _get_type(call: Call) -> Any:
    name = call.params["TypeName"]
    if resource_types.schema(name) is None:
        refuse("TypeNotFoundException", f"The type '{name}' cannot be found.")
    if name not in TYPES:
        refuse("UnsupportedActionException", f"Resource type {name} is not emulated here.")
    return TYPES[name]


def _run(call: Call, operation: str, act: Callable[[Call, Any], str]) -> Mapping[str, Any]:
    """Act; a refusal by the service is reported in the event of the request, not as an error."""
    event = {
        "TypeName": call.params["TypeName"],
        "RequestToken": str(uuid4()),
        "Operation": operation,
        "EventTime": datetime.now(UTC),
        "OperationStatus": "SUCCESS",
    }
    kind = _get_type(call)
    try:
        event["Identifier"] = act(call, kind)
    except _ServiceRefusal as refusal:
        event |= {"OperationStatus": "FAILED", "ErrorCode": refusal.code, "StatusMessage": refusal.message}
        event["Identifier"] = call.get("Identifier", "")
    _backend(call).events[str(event["RequestToken"])] = event
    return {"ProgressEvent": event | {"OperationStatus": "IN_PROGRESS"}}


class _ServiceRefusal(Exception):
    """A refusal by the service behind Cloud Control."""

    def __init__(self, refusal: ServiceException) -> None:
        super().__init__(refusal.message)
        self.code = FAILURES.get(refusal.code, "GeneralServiceException")
        self.message = refusal.message


def _call_service(act: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return act(*arguments)
    except ServiceException as refusal:
        raise _ServiceRefusal(refusal) from refusal


def _create(call: Call, kind: Any) -> str:
    model = _parse_json(call.params["DesiredState"], "DesiredState")
    _check(kind.TYPE, model)
    return str(_call_service(kind.create, call, model))


def _update(call: Call, kind: Any) -> str:
    identifier = call.params["Identifier"]
    current = _read_model(call, kind, identifier)
    patch = _parse_json(call.params["PatchDocument"], "PatchDocument")
    try:
        patched = jsonpatch.apply_patch(current, patch)
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException) as error:
        _refuse_invalid(f"Invalid patch update: {error}")
    create_only = resource_types.changed_create_only(kind.TYPE, current, patched)
    if create_only:
        refuse(
            "NotUpdatableException",
            f"Invalid patch update: createOnlyProperties [{', '.join(create_only)}] cannot be updated",
        )
    model = resource_types.drop_read_only(kind.TYPE, patched)
    _check(kind.TYPE, model)
    _call_service(kind.update, call, identifier, model)
    return str(identifier)


def _delete(call: Call, kind: Any) -> str:
    identifier = call.params["Identifier"]
    _call_service(kind.delete, call, identifier)
    return str(identifier)


def _check(type_name: str, model: Mapping[str, Any]) -> None:
    violations = resource_types.schema_violations(type_name, model)
    if violations:
        _refuse_invalid(f"Model validation failed ({'; '.join(violations)})")


def _parse_json(text: str, member: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        _refuse_invalid(f"{member} is not JSON: {error}")


def _refuse_invalid(message: str) -> NoReturn:
    refuse("ValidationException", message)


def _read_model(call: Call, kind: Any, identifier: str) -> dict[str, Any]:
    model: dict[str, Any] | None = kind.read(call, identifier)
    if model is None:
        message = f"Resource of type '{kind.TYPE}' with identifier '{identifier}' was not found."
        refuse("ResourceNotFoundException", message)
    return model


def _status(call: Call) -> Mapping[str, Any]:
    event = _backend(call).events.get(call.params["RequestToken"])
    if event is None:
        refuse("RequestTokenNotFoundException", f"Request with token {call.params['RequestToken']} was not found.")
    exists_after = event["OperationStatus"] == "SUCCESS" and event["Operation"] != "DELETE"
    if exists_after and not TYPES[event["TypeName"]].is_settled(call, event["Identifier"]):
        return {"ProgressEvent": event | {"OperationStatus": "IN_PROGRESS"}}
    return {"ProgressEvent": event}


def _get(call: Call) -> Mapping[str, Any]:
    identifier = call.params["Identifier"]
    model = _read_model(call, _get_type(call), identifier)
    return {
        "TypeName": call.params["TypeName"],
        "ResourceDescription": {"Identifier": identifier, "Properties": json.dumps(model)},
    }


def _describe_type(call: Call) -> Mapping[str, Any]:
    name = call.get("TypeName") or call.get("Arn", "").rpartition("/")[2].replace("-", "::")
    schema = resource_types.schema(name)
    if schema is None:
        refuse("TypeNotFoundException", f"The type '{name}' cannot be found.")
    return {
        "Arn": f"arn:{call.partition}:cloudformation:{call.region}::type/resource/{name.replace('::', '-')}",
        "Type": "RESOURCE",
        "TypeName": name,
        "IsDefaultVersion": True,
        "Schema": json.dumps(schema),
        "ProvisioningType": "FULLY_MUTABLE",
        "DeprecatedStatus": "LIVE",
        "Visibility": "PUBLIC",
        "Description": schema.get("description", ""),
    }
