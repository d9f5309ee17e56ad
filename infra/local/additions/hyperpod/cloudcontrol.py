"""Cloud Control, and CloudFormation's DescribeType beside it, for the resource types that have a backend here.

A desired state is held against the type's schema before anything happens, as the service does; what the service behind it
refuses fails the request instead.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    "cancelling or listing of requests, roles to act with, or pages of long listings"
)
TYPES = {hyperpod_resource.TYPE: hyperpod_resource}
FAILURES = {
    "ValidationException": "InvalidRequest",
    "ResourceInUse": "AlreadyExists",
    "ResourceNotFound": "NotFound",
    "ConflictException": "ResourceConflict",
    "ResourceLimitExceeded": "ServiceLimitExceeded",
}


@dataclass
class Request:
    """One operation on a resource; `event` is its ProgressEvent, less the status while it is under way."""

    event: dict[str, Any]
    params: dict[str, Any]


class CloudControlResponse(BaseResponse):
    def __init__(self) -> None:
        super().__init__(service_name="cloudcontrol")


class CloudControlBackend(BaseBackend):
    """moto derives a service's URLs from the module its backend is in, which is not one of moto's here."""

    def __init__(self, region_name: str, account_id: str) -> None:
        super().__init__(region_name, account_id)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, str] = {}

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
            "CreateResource": lambda call: _once(call, "CREATE", _create),
            "UpdateResource": lambda call: _once(call, "UPDATE", _update),
            "DeleteResource": lambda call: _once(call, "DELETE", _delete),
            "GetResource": _get,
            "ListResources": _list,
            "GetResourceRequestStatus": _status,
        },
    )
    serve(CloudFormationResponse, "cloudformation", {"DescribeType": _describe_type})


def _backend(call: Call) -> CloudControlBackend:
    return cloudcontrol_backends[call.account][call.region]


def _type(call: Call) -> Any:
    name = call.params["TypeName"]
    if resource_types.schema(name) is None:
        refuse("TypeNotFoundException", f"The type '{name}' cannot be found.")
    if name not in TYPES:
        refuse("UnsupportedActionException", f"Resource type {name} is not emulated here.")
    return TYPES[name]


def _once(call: Call, operation: str, act: Callable[[Call, Any], str]) -> Mapping[str, Any]:
    """Act unless the client token was seen before; a failure behind Cloud Control ends up in the event, not in the answer."""
    backend, token = _backend(call), call.get("ClientToken", "")
    if token in backend.tokens:
        earlier = backend.requests[backend.tokens[token]]
        if earlier.params != call.params:
            refuse("ClientTokenConflictException", "The client token was used before with other parameters.")
        return {"ProgressEvent": _progress(call, earlier)}
    event = {
        "TypeName": call.params["TypeName"],
        "RequestToken": str(uuid4()),
        "Operation": operation,
        "EventTime": datetime.now(UTC),
        "OperationStatus": "SUCCESS",
    }
    kind = _type(call)
    try:
        event["Identifier"] = act(call, kind)
    except _Failed as failed:
        event |= {"OperationStatus": "FAILED", "ErrorCode": failed.code, "StatusMessage": failed.message}
        event["Identifier"] = call.get("Identifier", "")
    made = backend.requests[event["RequestToken"]] = Request(event, call.params)
    if token:
        backend.tokens[token] = event["RequestToken"]
    return {"ProgressEvent": _progress(call, made) | {"OperationStatus": "IN_PROGRESS"}}


class _Failed(Exception):
    """A refusal by the service behind Cloud Control."""

    def __init__(self, refusal: ServiceException) -> None:
        super().__init__(refusal.message)
        self.code = FAILURES.get(refusal.code, "GeneralServiceException")
        self.message = refusal.message


def _handled(act: Callable[..., Any], *words: Any) -> Any:
    try:
        return act(*words)
    except ServiceException as refusal:
        raise _Failed(refusal) from refusal


def _create(call: Call, kind: Any) -> str:
    model = _json(call.params["DesiredState"], "DesiredState")
    given = resource_types.given_read_only(kind.TYPE, model)
    if given:
        _invalid(f"Encountered unsupported property in DesiredState: readOnlyProperties [{', '.join(given)}]")
    _check(kind.TYPE, model)
    return str(_handled(kind.create, call, model))


def _update(call: Call, kind: Any) -> str:
    identifier = call.params["Identifier"]
    before = _model(call, kind, identifier)
    operations = _json(call.params["PatchDocument"], "PatchDocument")
    try:
        after = jsonpatch.apply_patch(before, operations)
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException) as error:
        _invalid(f"Invalid patch update: {error}")
    fixed = resource_types.changed(kind.TYPE, "createOnlyProperties", before, after)
    if fixed:
        refuse(
            "NotUpdatableException",
            f"Invalid patch update: createOnlyProperties [{', '.join(fixed)}] cannot be updated",
        )
    given = resource_types.changed(kind.TYPE, "readOnlyProperties", _named_only(before), _named_only(after))
    if given:
        _invalid(f"Invalid patch update: readOnlyProperties [{', '.join(given)}] cannot be updated")
    model = resource_types.without_read_only(kind.TYPE, after)
    _check(kind.TYPE, model)
    _handled(kind.update, call, identifier, model)
    return str(identifier)


def _named_only(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model less its lists, where a patch that adds or removes an element changes read-only values without
    meaning to."""
    return {name: value for name, value in model.items() if not isinstance(value, list)}


def _delete(call: Call, kind: Any) -> str:
    identifier = call.params["Identifier"]
    _handled(kind.delete, call, identifier)
    return str(identifier)


def _check(type_name: str, model: Mapping[str, Any]) -> None:
    found = resource_types.violations(type_name, model)
    if found:
        _invalid(f"Model validation failed ({'; '.join(found)})")


def _json(text: str, member: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        _invalid(f"{member} is not JSON: {error}")


def _invalid(message: str) -> NoReturn:
    refuse("ValidationException", message)


def _model(call: Call, kind: Any, identifier: str) -> dict[str, Any]:
    found: dict[str, Any] | None = kind.read(call, identifier)
    if found is None:
        message = f"Resource of type '{kind.TYPE}' with identifier '{identifier}' was not found."
        refuse("ResourceNotFoundException", message)
    return found


def _progress(call: Call, request: Request) -> dict[str, Any]:
    event = dict(request.event)
    kind = TYPES[event["TypeName"]]
    stays = event["OperationStatus"] == "SUCCESS" and event["Operation"] != "DELETE"
    if stays and not kind.settled(call, event["Identifier"]):
        event["OperationStatus"] = "IN_PROGRESS"
    return event


def _status(call: Call) -> Mapping[str, Any]:
    token = call.params["RequestToken"]
    request = _backend(call).requests.get(token)
    if request is None:
        refuse("RequestTokenNotFoundException", f"Request with token {token} was not found.")
    return {"ProgressEvent": _progress(call, request)}


def _get(call: Call) -> Mapping[str, Any]:
    return {
        "TypeName": call.params["TypeName"],
        "ResourceDescription": _description(call, _type(call), call.params["Identifier"]),
    }


def _list(call: Call) -> Mapping[str, Any]:
    kind = _type(call)
    found = [_description(call, kind, identifier) for identifier in kind.identifiers(call)]
    return {"TypeName": kind.TYPE, "ResourceDescriptions": found}


def _description(call: Call, kind: Any, identifier: str) -> dict[str, str]:
    return {"Identifier": identifier, "Properties": json.dumps(_model(call, kind, identifier))}


def _describe_type(call: Call) -> Mapping[str, Any]:
    name = call.get("TypeName") or call.get("Arn", "").rpartition("/")[2].replace("-", "::")
    found = resource_types.schema(name)
    if found is None:
        refuse("TypeNotFoundException", f"The type '{name}' cannot be found.")
    return {
        "Arn": f"arn:{call.partition}:cloudformation:{call.region}::type/resource/{name.replace('::', '-')}",
        "Type": "RESOURCE",
        "TypeName": name,
        "IsDefaultVersion": True,
        "Schema": json.dumps(found),
        "ProvisioningType": "FULLY_MUTABLE",
        "DeprecatedStatus": "LIVE",
        "Visibility": "PUBLIC",
        "Description": found.get("description", ""),
    }
