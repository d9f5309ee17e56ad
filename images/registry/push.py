"""Pushes from an engine to a registry, under a tag that never moves, checked afterwards.

An engine answers 200 and says what failed in a line of the answer, https://docs.docker.com/reference/api/engine/version/v1.44/
under ImagePush; so every line is read. What a registry has already got is not sent again, which is why a push that
is tried again goes on where it ended.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import requests
from docker.client import DockerClient
from docker.errors import APIError, DockerException, ImageNotFound
from urllib3.exceptions import HTTPError

from images.model import Silent, Step, Watch
from images.plan.references import Reference, parse
from images.registry import ecr
from images.registry.client import Registry, connect, taken
from images.registry.http import without_queries
from lustrain.problem import FAILED, UserError, problem

SILENCE_S = 600.0
"""The longest an engine may say nothing: a registry takes minutes to put a layer of gigabytes into S3."""
_LONGEST_WORDS = 300
_DIGEST = re.compile(r"digest: (sha256:[0-9a-f]{64})")
_DONE = ("Pushed", "Layer already exists", "Mounted from", "Already exists")
_AUTH = ("no basic auth", "unauthorized", "authentication required", "denied", "401", "403", "authorization failed")
_IMMUTABLE = ("immutable", "imagetagalreadyexists", "tag invalid", "tag_invalid")
_MISSING = ("name unknown", "name_unknown", "repositorynotfound", "repository does not exist")
# Engines with containerd's store keep the registry's words to themselves and tell the status only.
_MISSING_STATUS = re.compile(r"POST request to \S+/blobs/uploads/\S*: 404")
_TAG_STATUS = re.compile(r"PUT request to \S+/manifests/\S+: 4(?:00|05|09)")
# Ports, names of repositories, digests and ids would be taken for statuses and for what they are called.
_NO_WORDS = re.compile(r"https?://[^\s\"]+|(?:\.\w+|\]|localhost):\d+|[0-9a-f]{12,}")
_UNTRUSTED = ("x509:", "certificate")
_FULL = ("no space left", "disk quota")
# fmt: off
_PASSING = (
    "refused", "reset", "eof", "broken pipe", "timeout", "timed out", "unreachable", "no route", "closed",
    "server error", "500", "502", "503", "504", "429", "too many requests", "toomanyrequests", "unavailable",
    "canceled", "unknown blob", "blob upload", "short write", "no such host", "temporary failure",
)
# fmt: on


class _PushFailed(Exception):
    """What the engine said in its answer."""


@dataclass
class _Told:
    digest: str | None = None
    totals: dict[str, int] = field(default_factory=dict)
    retrying: set[str] = field(default_factory=set)


def push(
    ref: str,
    engine: DockerClient,
    watch: Watch | None = None,
    *,
    to: Registry | None = None,
) -> str:
    """Push what the engine calls `ref` and return its digest, `sha256:…`, as the registry holds it.

    Nothing is pushed where the tag is there already: with the same image that is well, with another it is refused
    (exit code 2). Everything that goes wrong is a UserError in one line. `to` is for callers that have the registry open.
    """
    reference = parse(ref)
    if reference.digest or not reference.tag:
        why = "an image is pushed under a tag"
        raise UserError(problem("image", ref, why, allowed="registry/repository:tag"))
    watch, begun, name = watch or Silent(), time.monotonic(), f"push {reference}"
    there = to or connect(reference)
    local = _local(engine, reference)
    watch.started(name)
    try:
        found = there.digest_of(reference)
        if found is not None:
            _must_be_same(there, reference, found, local)
            watch.log(name, "already there, nothing pushed")
        told = found or _pushed(engine, reference, there, watch, name)
        held = there.manifest(reference).digest
        if told != held:
            why = "the registry holds a different digest than the engine pushed: the tag was pushed meanwhile, or a proxy lies"
            raise UserError(problem(f"{reference} digest", held, why, allowed=told, fix="choose another tag"), FAILED)
    except UserError as error:
        watch.ended(Step(name, time.monotonic() - begun, False, error.problems[0]))
        raise
    watch.ended(Step(name, time.monotonic() - begun, found is not None))
    return held


def _local(engine: DockerClient, reference: Reference) -> str:
    """The engine's id of the image: the digest of its manifest or, in engines with the older store, of its configuration."""
    try:
        return str(engine.api.inspect_image(str(reference))["Id"])
    except ImageNotFound:
        fix = "build it first: `fab image-build`"
        raise UserError(problem("image", str(reference), "the engine has no such image", fix=fix)) from None
    except (DockerException, requests.RequestException) as error:
        raise _no_engine(error) from None


def _must_be_same(there: Registry, reference: Reference, found: str, local: str) -> None:
    if found == local:
        return
    try:
        config = there.config_digest(reference)
    except UserError:
        config = None
    if config != local:
        raise taken(reference, found)


def _pushed(engine: DockerClient, reference: Reference, there: Registry, watch: Watch, name: str) -> str:
    patience, tried, renewed = there.transport.patience, 0, False
    while True:
        tried += 1
        credentials = there.transport.credentials
        if credentials is not None and credentials.stale:
            there.transport.renew()
            credentials = there.transport.credentials
        try:
            return _once(engine, reference, credentials.for_engine() if credentials else {}, watch, name)
        except _PushFailed as error:
            said = credentials.hide(str(error)) if credentials else str(error)
        said = without_queries(said)[:_LONGEST_WORDS]
        if _any(_AUTH, said) and not _any(_IMMUTABLE + _MISSING, said) and not renewed and there.transport.renew():
            renewed = True
            watch.log(name, "the registry refused the credentials; going on with fresh credentials")
            continue
        if (final := _final(reference, said, credentials.username if credentials else None)) is not None:
            raise final
        if tried >= patience.tries:
            fix = (
                "see that the registry runs and can be reached from the engine; pushed again it goes on where it ended"
            )
            raise UserError(problem("push", str(reference), f"gave up after {tried} tries: {said}", fix=fix), FAILED)
        watch.log(name, f"{said}; trying again ({tried} of {patience.tries})")
        time.sleep(patience.pause(tried))


def _once(engine: DockerClient, reference: Reference, auth: Mapping[str, str], watch: Watch, name: str) -> str:
    told = _Told()
    try:
        with _patient(engine):
            lines = engine.api.push(reference.name, reference.tag, stream=True, decode=True, auth_config=dict(auth))
            for line in lines:
                _read(line, told, watch, name)
    except APIError as error:
        raise _PushFailed(str(error.explanation or error)) from None
    except (requests.RequestException, HTTPError) as error:
        if not _answers(engine):
            raise _no_engine(error) from None
        raise _PushFailed("the engine ended its answer early") from None
    if told.digest is None:
        raise _PushFailed("the engine ended the push without a digest (eof)")
    # Of a layer that went up quickly the last word may be an early one.
    for layer, total in told.totals.items():
        watch.moved(f"layer {layer}", total, total)
    return told.digest


def _read(line: Mapping[str, Any], told: _Told, watch: Watch, name: str) -> None:
    if line.get("errorDetail") or line.get("error"):
        detail = line.get("errorDetail") or {}
        raise _PushFailed(str(detail.get("message") or line.get("error")))
    status, layer = str(line.get("status") or ""), line.get("id")
    progress = line.get("progressDetail") or {}
    # Engines with the older store say it in a field of its own, those with containerd's in words only.
    if found := (line.get("aux") or {}).get("Digest") or (None if layer else _DIGEST.search(status)):
        told.digest = found if isinstance(found, str) else found[1]
    if layer and progress.get("current") is not None:
        told.totals[layer] = int(progress.get("total") or 0)
        told.retrying.discard(layer)
        watch.moved(f"layer {layer}", int(progress["current"]), told.totals[layer])
    elif layer and status.startswith("Retrying"):
        # Engines with the older store try by themselves too, and count down the seconds, a line each.
        if layer not in told.retrying:
            watch.log(name, f"{layer}: the engine is trying again")
        told.retrying.add(layer)
    elif layer and status.startswith(_DONE):
        watch.log(name, f"{layer}: {status}")
        if total := told.totals.pop(layer, 0):
            watch.moved(f"layer {layer}", total, total)


def _final(reference: Reference, said: str, user: str | None) -> UserError | None:
    """What no second try mends, with the way out; None where one may."""
    host, image = reference.registry, str(reference)
    if _any(_IMMUTABLE, said):
        fix = "commit, which makes a new tag, or --suffix r2"
        return UserError(problem("image", image, f"the tag is taken and the registry keeps it: {said}", fix=fix))
    if _TAG_STATUS.search(said):
        why = f"the registry refuses this tag, as one does whose tags are immutable where it is taken: {said}"
        return UserError(problem("image", image, why, fix="commit, which makes a new tag, or --suffix r2"))
    if _any(_MISSING, said) or _MISSING_STATUS.search(said):
        ours = ecr.region_of(host) is not None
        fix = ecr.missing(host, reference.repository) if ours else "make the repository, or see its spelling"
        return UserError(problem("image", image, f"the registry has no such repository: {said}", fix=fix), FAILED)
    if _any(_AUTH, said):
        why = f"the registry refuses user {user!r}: {said}" if user else f"no credentials were found: {said}"
        fix = f"docker login {host}, or ask for the right to push to {reference.repository}"
        return UserError(problem("push", image, why, fix=fix), FAILED)
    if _any(_UNTRUSTED, said):
        fix = f"put its CA into /etc/docker/certs.d/{host}/ca.crt on the engine's machine"
        return UserError(problem("push", image, f"the engine does not trust the registry: {said}", fix=fix), FAILED)
    if "http response to https" in said.lower():
        fix = "give the registry TLS; without, engines take only registries on their own machine"
        return UserError(problem("push", image, "the registry does not speak TLS", fix=fix), FAILED)
    if _any(_FULL, said):
        fix = "make room where the registry or the engine keeps its data (`docker system df`)"
        return UserError(problem("push", image, f"a disk is full: {said}", fix=fix), FAILED)
    if _any(_PASSING, said):
        return None
    return UserError(problem("push", image, said or "failed without a message"), FAILED)


@contextmanager
def _patient(engine: DockerClient) -> Iterator[None]:
    """The SDK waits for a minute at most, between two lines too."""
    before = engine.api.timeout
    engine.api.timeout = SILENCE_S
    try:
        yield
    finally:
        engine.api.timeout = before


def _answers(engine: DockerClient) -> bool:
    try:
        return bool(engine.ping())
    except (DockerException, requests.RequestException, HTTPError):
        return False


def _no_engine(error: Exception) -> UserError:
    fix = "start it, or point DOCKER_HOST to one that runs"
    return UserError(problem("engine", type(error).__name__, "does not answer", fix=fix), FAILED)


def _any(signs: Iterable[str], said: str) -> bool:
    words = _NO_WORDS.sub("", said.lower())
    return any(re.search(rf"\b{sign}\b", words) if sign.isdigit() else sign in words for sign in signs)
