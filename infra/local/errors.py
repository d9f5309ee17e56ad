"""Errors of the embedded AWS in the form that AWS clients read; gaps and failures of moto are printed as well.

moto answers unimplemented actions with an HTML page and a traceback. No AWS client can read the page, and the traceback
contains no more than the action's name.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import cast
from wsgiref.types import StartResponse, WSGIEnvironment

from botocore.session import Session
from flask import Flask, Response
from flask import request as flask_request
from moto.core.exceptions import ServiceException
from moto.core.model import OperationModel, ServiceModel
from moto.core.request import Request, determine_request_protocol
from moto.core.responses import boto3_service_name
from moto.core.routing import get_service_router
from moto.core.serialize import get_serializer_class
from moto.core.utils import get_service_model
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound

LEFT_OUT = (
    "every action that moto does not implement: answered with the error NotImplemented (status 501), and printed here once. "
    "Service Quotas answers no ListServiceQuotas, SSM no StartSession; its SendCommand says Success and runs nothing"
)
NOT_IMPLEMENTED = "NotImplemented"
"""The code that S3 uses for unimplemented features (https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html); other
services have none."""
INTERNAL_FAILURE = "InternalFailure"
"""https://docs.aws.amazon.com/AWSEC2/latest/APIReference/CommonErrors.html"""

Wsgi = Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]


class EmulationError(ServiceException):
    """An error without a model; the class is outside moto because moto looks up models by the module of the class."""


class Terminal:
    """Prints each message once, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._printed: set[str] = set()

    def print_once(self, key: str, text: str) -> None:
        with self._lock:
            if key not in self._printed:
                self._printed.add(key)
                print(text, file=sys.stderr, flush=True)


TERMINAL = Terminal()


def application() -> Wsgi:
    """Return moto's server for all services, for a process that serves nothing else."""
    # No service's model has this project's error code, and moto would warn each time.
    warnings.filterwarnings("ignore", message=r"Exception\(EmulationError\)")
    # moto sends many responses without a content type, and Flask would label them HTML.
    Response.default_mimetype = None
    server: Wsgi = DomainDispatcherApplication(_app_of)  # type: ignore[arg-type]
    return server


def _app_of(service: str | None) -> Wsgi:
    """Return the application of a service with error handlers; a service that moto lacks gets an error response."""
    if service is None:
        return _unknown_service
    app: Flask = create_backend_app(service)  # type: ignore[arg-type]

    def model_of(request: Request) -> ServiceModel | None:
        return _find_model(service) or _find_model(_signed_service(request))

    def not_implemented(error: Exception) -> Response:
        request = cast("Request", flask_request)
        return _not_implemented(request, model_of(request), str(error))

    def internal_failure(error: Exception) -> Response | HTTPException:
        request = cast("Request", flask_request)
        return error if isinstance(error, HTTPException) else _internal_failure(request, model_of(request), error)

    # NotFound means that no action has this path; missing resources are errors of AWS, of other classes.
    app.register_error_handler(NotFound, not_implemented)
    app.register_error_handler(MethodNotAllowed, not_implemented)
    app.register_error_handler(NotImplementedError, not_implemented)
    app.register_error_handler(Exception, internal_failure)
    return app


def _unknown_service(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    request = Request(environ)
    return _not_implemented(request, _find_model(_signed_service(request)), "the service is not there")(
        environ, start_response
    )


def _not_implemented(request: Request, model: ServiceModel | None, reason: str) -> Response:
    name = str(model.service_name) if model else _signed_service(request) or request.host
    action = _action_name(request, model) or reason
    TERMINAL.print_once(f"{name} {action}", f"left out: {name} {action}")
    return _error_response(request, model, 501, NOT_IMPLEMENTED, f"the embedded AWS does not implement {name} {action}")


def _internal_failure(request: Request, model: ServiceModel | None, error: Exception) -> Response:
    frames = traceback.extract_tb(error.__traceback__)
    location = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    TERMINAL.print_once(f"{type(error).__name__} {location}", "".join(traceback.format_exception(error)).rstrip())
    return _error_response(
        request, model, 500, INTERNAL_FAILURE, f"the embedded AWS failed: {type(error).__name__}: {error}"
    )


def _error_response(request: Request, model: ServiceModel | None, status: int, code: str, message: str) -> Response:
    """Return an error in the protocol of the service, or JSON when the service is unknown."""
    if model is None:
        body = json.dumps({"__type": code, "message": message})
        return Response(body, status, {"X-Amzn-Errortype": code, "Content-Type": "application/json"})
    protocol = determine_request_protocol(model, request.content_type)
    serializer = get_serializer_class(str(model.service_name), protocol)(OperationModel({}, model))
    serialized = serializer.serialize(EmulationError(code, message))
    return Response(serialized["body"], status, serialized["headers"])


def _action_name(request: Request, model: ServiceModel | None) -> str:
    """Return the API name of the requested action, empty when the request does not contain it."""
    name = request.values.get("Action") or request.headers.get("X-Amz-Target", "").rpartition(".")[2]
    if name or model is None:
        return str(name)
    try:
        operation, _ = get_service_router(str(model.service_name)).match(request)
    except (NotFound, NotImplementedError):
        return ""
    return str(operation.name)


def _signed_service(request: Request) -> str | None:
    """Return the service's name in the signature: the fourth part of the credential
    (https://docs.aws.amazon.com/IAM/latest/UserGuide/create-signed-request.html)."""
    match = re.search(r"Credential=[^/,]+/\d+/[^/,]+/([^/,]+)/", request.headers.get("Authorization", ""))
    return match[1] if match else None


def _find_model(service: str | None) -> ServiceModel | None:
    """Return botocore's model of a service, whose name moto writes without hyphens; None when botocore has no such service."""
    service_name = _services().get(boto3_service_name.get(service, service).replace("-", "")) if service else None
    return get_service_model(service_name) if service_name else None


@cache
def _services() -> dict[str, str]:
    return {name.replace("-", ""): name for name in Session().get_available_services()}
