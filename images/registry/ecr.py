"""Tokens of Amazon's private registries, and what their host names say.

https://docs.aws.amazon.com/AmazonECR/latest/userguide/Registries.html names the hosts.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from lustrain.problem import FAILED, UserError, problem

if TYPE_CHECKING:
    from mypy_boto3_ecr import ECRClient

_HOST = re.compile(
    r"(?P<account>[0-9]{12})\.dkr"
    r"(?:\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?"
    r"|-ecr(?:-fips)?\.(?P<dual>[a-z0-9-]+)\.on\.(?:aws|amazonwebservices\.com\.cn))"
)
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "InvalidClientTokenId"}
_UNKNOWN = {"UnrecognizedClientException", "InvalidSignatureException", "SignatureDoesNotMatch"}
_SECONDS, _TRIES = 10, 4
LIFE = timedelta(hours=12)
"""https://docs.aws.amazon.com/AmazonECR/latest/APIReference/API_GetAuthorizationToken.html"""


@dataclass(frozen=True)
class Token:
    """A user name and a password for 12 hours."""

    username: str
    password: str = field(repr=False)
    ends: datetime


def region_of(host: str) -> str | None:
    """The region of an ECR's host name; None where it is another registry."""
    found = _HOST.fullmatch(host)
    return (found["region"] or found["dual"]) if found else None


def token(host: str) -> Token:
    """A new token for the registry `host`, from the region in its name; UserError in one line where AWS gives none."""
    from botocore.exceptions import BotoCoreError, ClientError

    region = str(region_of(host))
    try:
        answer = _client(region).get_authorization_token()
        given = answer["authorizationData"][0]
        username, _, password = base64.b64decode(given["authorizationToken"]).decode().partition(":")
        return Token(username, password, _end(given["expiresAt"].astimezone(UTC)))
    except ClientError as error:
        raise _refused(host, region, str(error.response.get("Error", {}).get("Code", "")), str(error)) from None
    except BotoCoreError as error:
        raise _failed(host, region, error) from None
    except (LookupError, ValueError):
        why = f"ECR in {region} answered with no token"
        raise UserError(problem("registry", host, why, fix="see what AWS_ENDPOINT_URL points to"), FAILED) from None


def missing(host: str, repository: str) -> str:
    """The command that makes a repository which an ECR says it does not have."""
    return (
        f"aws ecr create-repository --region {region_of(host)} --repository-name {repository}"
        " --image-tag-mutability IMMUTABLE, or the repository of the Cluster (imageRepository)"
    )


def _end(told: datetime) -> datetime:
    """By this machine's clock: where that is off, a token would seem to have ended when it was given, and each after it."""
    now = datetime.now(UTC)
    return told if now < told else now + LIFE


def _client(region: str) -> ECRClient:
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=_SECONDS,
        read_timeout=_SECONDS,
        retries={"mode": "standard", "total_max_attempts": _TRIES},
    )
    client: ECRClient = boto3.session.Session().client("ecr", region_name=region, config=config)
    return client


def _refused(host: str, region: str, code: str, said: str) -> UserError:
    if code in _EXPIRED:
        return UserError(
            problem("registry", host, f"the AWS credentials have expired ({code})", fix="log in to AWS again"), FAILED
        )
    if code in _UNKNOWN:
        fix = "see which account `aws sts get-caller-identity` names"
        return UserError(problem("registry", host, f"AWS does not know the credentials ({code})", fix=fix), FAILED)
    if code.startswith("AccessDenied"):
        fix = "allow ecr:GetAuthorizationToken on *"
        return UserError(problem("registry", host, f"AWS gives this user no token ({code})", fix=fix), FAILED)
    return UserError(problem("registry", host, f"ECR in {region} gave no token: {said}"), FAILED)


def _failed(host: str, region: str, error: Exception) -> UserError:
    kind = type(error).__name__
    if kind in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        fix = "log in to AWS (AWS_PROFILE, aws sso login), or `docker login` with a token"
        return UserError(problem("registry", host, "no AWS credentials were found", fix=fix), FAILED)
    if "SSO" in kind or "Token" in kind or "Login" in kind:
        return UserError(
            problem("registry", host, f"the AWS credentials have expired ({kind})", fix="log in to AWS again"), FAILED
        )
    return UserError(
        problem("registry", host, f"ECR in {region} gave no token: {error}", fix="see the network"), FAILED
    )
