"""AWS's clients and the codes of its errors, for what asks AWS beside the engine: online rules and today's prices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.model import OperationModel

from lustrain.problem import UserError, is_page

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ecr import ECRClient
    from mypy_boto3_eks import EKSClient
    from mypy_boto3_fsx import FSxClient
    from mypy_boto3_iam import IAMClient
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_sagemaker import SageMakerClient
    from mypy_boto3_service_quotas import ServiceQuotasClient
    from mypy_boto3_sqs import SQSClient
    from mypy_boto3_sts import STSClient

PATIENCE = Config(connect_timeout=3, read_timeout=10, retries={"total_max_attempts": 3, "mode": "standard"})
"""Seconds for one question; ours: users do not wait for a preflight that hangs."""
DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "UnauthorizedException", "403"})
EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired"})
NO_ONE = frozenset({"InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch", "AuthFailure"})

NOT_IMPLEMENTED = "NotImplemented"
"""What an emulation answers to a question that it leaves out (infra.local.errors.py)."""


Answer = TypeVar("Answer")
Given = ParamSpec("Given")


class NotAwsError(BotoCoreError):
    """A page for people came where AWS answers in XML or JSON: a proxy's, a portal's, or a load balancer's."""

    fmt = (
        "an HTML page (status {status_code}) came in place of an answer to {operation}: something else than AWS answers"
    )


def _no_pages(response_dict: Mapping[str, Any], operation_model: OperationModel, **_: Any) -> None:
    """Stop botocore at a page: its parsers take a page for an empty answer, or hand it on as the message of an error.

    A page with a status of 500 and more is left to botocore, which asks again.
    """
    status, kind = response_dict["status_code"], str(response_dict["headers"].get("content-type", ""))
    body = bytes(response_dict["body"] or b"")[:2000].decode("latin-1")
    if status < 500 and (kind.startswith("text/html") or is_page(body)):
        raise NotAwsError(status_code=status, operation=operation_model.name)


def _client_of(service: str) -> Any:
    return property(lambda aws: aws._client(service))


class Aws:
    """Clients of one region, made at their first use; rules in many threads share them.

    `make` gives a client by its service's name, boto3's own by default.
    """

    ec2: EC2Client = _client_of("ec2")
    ecr: ECRClient = _client_of("ecr")
    eks: EKSClient = _client_of("eks")
    efs: Any = _client_of("efs")
    fsx: FSxClient = _client_of("fsx")
    iam: IAMClient = _client_of("iam")
    identity_center: Any = _client_of("sso-admin")
    logs: Any = _client_of("logs")
    pricing: Any = _client_of("pricing")
    quotas: ServiceQuotasClient = _client_of("service-quotas")
    s3: S3Client = _client_of("s3")
    sagemaker: SageMakerClient = _client_of("sagemaker")
    sqs: SQSClient = _client_of("sqs")
    ssm: Any = _client_of("ssm")
    sts: STSClient = _client_of("sts")

    def __init__(self, region: str, make: Callable[[str], Any] | None = None) -> None:
        self.region = region
        self._make: Any = make or boto3.Session(region_name=region).client
        self._configured = make is None
        self._lock = threading.RLock()
        self._clients: dict[str, Any] = {}
        self._answers: dict[tuple[str, ...], Any] = {}

    def once(self, key: tuple[str, ...], ask: Callable[[], Any]) -> Any:
        """Return the answer to a request that several rules share. It is sent once, and again after an error."""
        with self._lock:
            if key not in self._answers:
                self._answers[key] = ask()
            return self._answers[key]

    def _client(self, service: str) -> Any:
        # A boto3 session is not for several threads at once, a client is.
        with self._lock:
            if service not in self._clients:
                client = self._make(service, **({"config": PATIENCE} if self._configured else {}))
                if self._configured:
                    client.meta.events.register("before-parse", _no_pages)
                self._clients[service] = client
            return self._clients[service]


def connect(region: str) -> Aws:
    """Return clients of the region; UserError when the named profile does not exist or is broken."""
    try:
        return Aws(region)
    except BotoCoreError as error:
        raise UserError(f"AWS profile: {error}; fix: set AWS_PROFILE to a profile of ~/.aws/config") from None


def answered(
    absent: str | tuple[str, ...], call: Callable[Given, Answer], *args: Given.args, **kwargs: Given.kwargs
) -> Answer | None:
    """Return AWS's answer; None where the code of its error begins with `absent`: the thing does not exist."""
    try:
        return call(*args, **kwargs)
    except ClientError as error:
        if not code_of(error).startswith(absent):
            raise
        return None


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "")).removeprefix("Client.")
