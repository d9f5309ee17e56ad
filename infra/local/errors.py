"""Errors of the embedded AWS in the form that AWS clients read; where moto is to blame, a line in the terminal as well.

moto answers what it does not implement with a page in HTML and a traceback. No client of AWS can read the page, and the
traceback says no more than the action's name.
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
from flask import Flask, Response, request
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
"""The code of S3 for what it does not do (https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html); other
services have none."""
BROKEN = "InternalFailure"
"""https://docs.aws.amazon.com/AWSEC2/latest/APIReference/CommonErrors.html"""

Wsgi = Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]


class Unanswered(ServiceException):
    """moto's own exception looks for its error's model in the module of its class, which must be outside moto then."""


class Terminal:
    """Prints each thing once, whatever thread it comes from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._printed: set[str] = set()

    def once(self, key: str, text: str) -> None:
        with self._lock:
            if key not in self._printed:
                self._printed.add(key)
                print(text, file=sys.stderr, flush=True)


TERMINAL = Terminal()


def application() -> Wsgi:
    """moto's server for all services, in a process that serves nothing else."""
    # The code is ours, so that no service's model has it; moto would say that each time.
    warnings.filterwarnings("ignore", message=r"Exception\(Unanswered\)")
    # moto leaves the type of many an answer out, and Flask calls those pages.
    Response.default_mimetype = None
    server: Wsgi = DomainDispatcherApplication(_app_of)  # type: ignore[arg-type]
    return server


def _app_of(service: str | None) -> Wsgi:
    """Return the application for one service, mended; for a service that moto does not have, one that says so."""
    if service is None:
        return _no_such_service
    app: Flask = create_backend_app(service)  # type: ignore[arg-type]

    def model_of(asked: Request) -> ServiceModel | None:
        return _model(service) or _model(_scope(asked))

    def left_out(error: Exception) -> Response:
        asked = cast("Request", request)
        return _left_out(asked, model_of(asked), str(error))

    def failed(error: Exception) -> Response | HTTPException:
        asked = cast("Request", request)
        return error if isinstance(error, HTTPException) else _failed(asked, model_of(asked), error)

    # A path that no action of the service has here; moto's own "not found" are errors of AWS, of other classes.
    app.register_error_handler(NotFound, left_out)
    app.register_error_handler(MethodNotAllowed, left_out)
    app.register_error_handler(NotImplementedError, left_out)
    app.register_error_handler(Exception, failed)
    return app


def _no_such_service(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    asked = Request(environ)
    return _left_out(asked, _model(_scope(asked)), "the service is not there")(environ, start_response)


def _left_out(asked: Request, model: ServiceModel | None, why: str) -> Response:
    name = str(model.service_name) if model else _scope(asked) or asked.host
    action = _action(asked, model) or why
    TERMINAL.once(f"{name} {action}", f"left out: {name} {action}")
    return _error(asked, model, 501, NOT_IMPLEMENTED, f"the embedded AWS does not implement {name} {action}")


def _failed(asked: Request, model: ServiceModel | None, error: Exception) -> Response:
    places = traceback.extract_tb(error.__traceback__)
    where = f"{places[-1].filename}:{places[-1].lineno}" if places else ""
    TERMINAL.once(f"{type(error).__name__} {where}", "".join(traceback.format_exception(error)).rstrip())
    return _error(asked, model, 500, BROKEN, f"the embedded AWS failed: {type(error).__name__}: {error}")


def _error(asked: Request, model: ServiceModel | None, status: int, code: str, message: str) -> Response:
    """Return an error in the protocol of the service; JSON where nobody knows the service."""
    if model is None:
        body = json.dumps({"__type": code, "message": message})
        return Response(body, status, {"X-Amzn-Errortype": code, "Content-Type": "application/json"})
    protocol = determine_request_protocol(model, asked.content_type)
    serializer = get_serializer_class(str(model.service_name), protocol)(OperationModel({}, model))
    answer = serializer.serialize(Unanswered(code, message))
    return Response(answer["body"], status, answer["headers"])


def _action(asked: Request, model: ServiceModel | None) -> str:
    """Return the API's name of what is asked; empty where the request does not say."""
    named = asked.values.get("Action") or asked.headers.get("X-Amz-Target", "").rpartition(".")[2]
    if named or model is None:
        return str(named)
    try:
        operation, _ = get_service_router(str(model.service_name)).match(asked)
    except (NotFound, NotImplementedError):
        return ""
    return str(operation.name)


def _scope(asked: Request) -> str | None:
    """Return the service's name in the signature: the fourth part of the credential
    (https://docs.aws.amazon.com/IAM/latest/UserGuide/create-signed-request.html)."""
    found = re.search(r"Credential=[^/,]+/\d+/[^/,]+/([^/,]+)/", asked.headers.get("Authorization", ""))
    return found[1] if found else None


def _model(service: str | None) -> ServiceModel | None:
    """botocore's model of a service, which moto writes without hyphens; None where it has none of the name."""
    known = _services().get(boto3_service_name.get(service, service).replace("-", "")) if service else None
    return get_service_model(known) if known else None


@cache
def _services() -> dict[str, str]:
    return {name.replace("-", ""): name for name in Session().get_available_services()}
