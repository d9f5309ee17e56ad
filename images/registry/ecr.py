"""Tokens of Amazon's private registries, and what their host names say.

https://docs.aws.amazon.com/AmazonECR/latest/userguide/Registries.html names the hosts.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING

from lustrain.problem import FAILED, UserError, problem

if TYPE_CHECKING:
    from mypy_boto3_ecr import ECRClient

_HOST = re.compile(
    r"(?P<account>[0-9]{12})\.dkr"
    r"(?:\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.amazonaws\.(?:com(?:\.cn)?|eu)"
    r"|-ecr(?:-fips)?\.(?P<dual>[a-z0-9-]+)\.on\.(?:aws|amazonwebservices\.(?:com\.cn|eu)))"
)
_REFUSALS = (
    (
        "NoCredentials|PartialCredentials|CredentialRetrieval",
        "no AWS credentials were found",
        "log in to AWS (AWS_PROFILE, aws sso login), or `docker login` with a token",
    ),
    ("Expired|InvalidClientTokenId|SSO|Token.*Error|Login", "the AWS credentials have expired", "log in to AWS again"),
    (
        "UnrecognizedClient|InvalidSignature|SignatureDoesNotMatch",
        "AWS does not know the credentials",
        "see which account `aws sts get-caller-identity` names",
    ),
    ("^AccessDenied", "AWS gives this user no token", "allow ecr:GetAuthorizationToken on *"),
)
"""Codes of ECR's refusals and names of botocore's errors, what they mean, and what to do."""
_SECONDS, _TRIES = 10, 4


def region_of(host: str) -> str | None:
    """Return the region of an ECR's host name; None where it is another registry."""
    match = _HOST.fullmatch(host)
    return (match["region"] or match["dual"]) if match else None


def client(region: str) -> ECRClient:
    """Return boto3's client with bounded time-outs and retries; UserError where it cannot be made, as for a missing profile."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    limits = Config(
        connect_timeout=_SECONDS, read_timeout=_SECONDS, retries={"mode": "standard", "total_max_attempts": _TRIES}
    )
    try:
        return boto3.session.Session().client("ecr", region_name=region, config=limits)
    except BotoCoreError as error:
        raise _refused(f"ECR in {region}", error) from None


def token(host: str) -> tuple[str, str]:
    """Return a user name and a new password for the registry `host`, from AWS in the region of its name.

    It is good for 12 hours. UserError in one line where AWS gives none.
    https://docs.aws.amazon.com/AmazonECR/latest/APIReference/API_GetAuthorizationToken.html
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        answer = client(str(region_of(host))).get_authorization_token()
        pair = base64.b64decode(answer["authorizationData"][0]["authorizationToken"]).decode()
    except (ClientError, BotoCoreError) as error:
        raise _refused(host, error) from None
    except (LookupError, ValueError):
        why = "AWS answered with no token"
        raise UserError(problem("registry", host, why, fix="see what AWS_ENDPOINT_URL points to"), FAILED) from None
    username, _, password = pair.partition(":")
    return username, password


def _refused(host: str, error: Exception) -> UserError:
    answer = getattr(error, "response", {}).get("Error", {})
    code = str(answer.get("Code") or type(error).__name__)
    for codes, why, fix in _REFUSALS:
        if re.search(codes, code):
            return UserError(problem("registry", host, f"{why} ({code})", fix=fix), FAILED)
    fix = "" if answer else "see the network"
    return UserError(problem("registry", host, f"AWS gave no token: {error}", fix=fix), FAILED)
