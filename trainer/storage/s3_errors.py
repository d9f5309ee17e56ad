"""Errors of S3 and its clients, each as one line that names the object, the cause and the fix."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from botocore import exceptions as boto

from lustrain.problem import problem
from trainer.storage import (
    ArchivedError,
    CorruptObjectError,
    ObjectMissingError,
    PassingError,
    PreconditionError,
    RefusedError,
    StorageError,
)

LEAST_SKEW_SHOWN = 60.0
"""Seconds; S3 refuses signatures more than 15 minutes off, so a smaller difference is never the cause."""

_WRONG_BYTES = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
_REFUSED_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidClientTokenId", "AuthFailure"}
_EXPIRED_KEY = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_WRONG_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_BUSY = {
    *("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "ServiceUnavailable", "InternalError"),
    "RequestTimeout",
}


class UnreadableAnswerError(boto.BotoCoreError):
    """Every attempt got an answer, and none of them could be read."""

    fmt = "{operation}: {why}"


@dataclass(frozen=True)
class ErrorContext:
    """What an error line names: the object or store, its bucket, the endpoint and the number of attempts."""

    shown: str
    bucket: str
    endpoint: str
    attempts: int
    store: str
    """The key or flag by which the user gave the store's URI."""


@dataclass(frozen=True)
class Refusal:
    """An error answer of the server."""

    status: int
    code: str
    message: str = ""
    date: str = ""


def of_boto(error: Exception, context: ErrorContext) -> StorageError:
    """Return the error for anything that botocore raises."""
    if isinstance(error, boto.ClientError):
        return of_refusal(_refusal(error), context)
    if isinstance(error, boto.FlexibleChecksumError):
        return CorruptObjectError(problem("object", context.shown, f"arrived with a wrong checksum: {error}"))
    if isinstance(error, (boto.IncompleteReadError, boto.ResponseStreamingError)):
        return of_cut(context)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return RefusedError(_no_credentials(error, context))
    if isinstance(error, boto.CredentialRetrievalError):
        return StorageError(_no_credentials(error, context))
    if isinstance(error, boto.ProfileNotFound):
        fix = "check AWS_PROFILE and ~/.aws/config"
        return RefusedError(problem(context.store, context.shown, f"no credentials ({error})", fix=fix))
    if isinstance(error, UnreadableAnswerError):
        why = f"the answers of {context.endpoint} cannot be read ({error}; {context.attempts} attempts)"
        fix = "check the network to the store, or use an https endpoint, then try again"
        return PassingError(problem("object", context.shown, why, fix=fix))
    if isinstance(error, boto.HTTPClientError | boto.ConnectionError):
        return StorageError(unreachable(str(error), context))
    return StorageError(problem(context.store, context.shown, " ".join(str(error).split())))


def of_refusal(refusal: Refusal, context: ErrorContext) -> StorageError:
    """Return the error for an error answer, whichever client received it."""
    code, status = refusal.code, refusal.status
    if code == "NoSuchBucket":
        why = f"there is no bucket {context.bucket} at {context.endpoint}"
        return RefusedError(
            problem(context.store, context.shown, why, fix="create it, or correct the name or the endpoint")
        )
    if code == "PreconditionFailed" or status == 412:
        return PreconditionError(problem("object", context.shown, "exists already, or was replaced since it was read"))
    if code == "InvalidObjectState":
        why, fix = "lies in an archive storage class and cannot be read", "aws s3api restore-object, or copy it back"
        return ArchivedError(problem("object", context.shown, why, fix=fix))
    if code == "NoSuchAccessPoint":
        return RefusedError(problem(context.store, context.shown, "there is no such access point", fix="see its name"))
    if code in _WRONG_BYTES:
        return CorruptObjectError(
            problem("object", context.shown, f"the server did not receive the bytes that were sent ({code})")
        )
    if code == "RequestTimeTooSkewed":
        why, fix = f"refused: {_skew(refusal.date)}", "start chrony (`chronyc makestep`)"
        return RefusedError(problem(context.store, context.shown, why, fix=fix))
    if code in _EXPIRED_KEY:
        return RefusedError(
            problem(context.store, context.shown, f"the credentials have expired ({code})", fix="renew them")
        )
    if code in _REFUSED_KEY:
        fix = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or AWS_PROFILE"
        return RefusedError(
            problem(context.store, context.shown, f"{context.endpoint} refuses the credentials ({code})", fix=fix)
        )
    if code in _WRONG_REGION or status == 301:
        return RefusedError(
            problem(context.store, context.shown, "the bucket is in another region", fix="set AWS_REGION to it")
        )
    if code in _BUSY or status >= 500 or status == 429:
        why = f"{context.endpoint} still answers {status} {code} after {context.attempts} attempts"
        return PassingError(problem("object", context.shown, why, fix="wait and try again, or raise AWS_MAX_ATTEMPTS"))
    if code in ("AccessDenied", "AllAccessDisabled") or status == 403:
        why = f"{context.endpoint} refuses: {refusal.message or code or status}"
        fix = "compare the role's and the bucket's (and the key's) policies with the permissions in docs/checkpoints.md"
        return RefusedError(problem("object", context.shown, " ".join(why.split()), fix=fix))
    if status == 404:
        return ObjectMissingError(problem("object", context.shown, "there is no such object"))
    why = f"{context.endpoint} answers {status} {code} {refusal.message}".strip()
    return RefusedError(problem("object", context.shown, " ".join(why.split())))


def unreachable(reason: str, context: ErrorContext) -> str:
    why = f"cannot reach {context.endpoint} ({' '.join(reason.split())}; {context.attempts} attempts)"
    return problem(
        context.store, context.shown, why, fix="check AWS_ENDPOINT_URL, AWS_REGION, the network and its proxy"
    )


def of_cut(context: ErrorContext) -> StorageError:
    """Return the error for bodies that end early at every attempt: a fault of the network, and not a proof of damage."""
    return PassingError(_cut(context))


def of_short(total: int | str, wanted: int, context: ErrorContext) -> CorruptObjectError:
    """Return the error for an object that ends before the bytes that are wanted."""
    return CorruptObjectError(problem("object", context.shown, f"holds {total} bytes where {wanted} were expected"))


def server_time(headers: Mapping[str, str]) -> float | None:
    """Return the Unix seconds of an answer's Date header; None where it is absent or cannot be read."""
    try:
        return parsedate_to_datetime(headers.get("date", "")).timestamp()
    except (ValueError, OverflowError):
        return None


def _refusal(error: boto.ClientError) -> Refusal:
    body = error.response.get("Error", {})
    metadata = error.response.get("ResponseMetadata", {})
    status = int(metadata.get("HTTPStatusCode", 0))
    headers = metadata.get("HTTPHeaders", {})
    return Refusal(status, str(body.get("Code", "")), str(body.get("Message", "")), headers.get("date", ""))


def _cut(context: ErrorContext) -> str:
    why = f"arrived cut short {context.attempts} times from {context.endpoint}"
    return problem("object", context.shown, why, fix="check the network to the store, then try again")


def _no_credentials(error: Exception, context: ErrorContext) -> str:
    why = f"no credentials ({' '.join(str(error).split())})"
    return problem(
        context.store, context.shown, why, fix="set AWS_PROFILE or AWS_ACCESS_KEY_ID and its secret, or attach a role"
    )


def _skew(date: str) -> str:
    theirs = server_time({"date": date})
    off = time.time() - theirs if theirs is not None else 0.0
    if abs(off) < LEAST_SKEW_SHOWN:
        return "this machine's clock and the store's differ too much"
    amount = f"{abs(off) / 3600:.1f} h" if abs(off) >= 5400 else f"{abs(off) / 60:.0f} min"
    return f"this machine's clock is {amount} {'ahead of' if off > 0 else 'behind'} the store's"
