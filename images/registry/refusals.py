"""What registries refuse: the signs of each refusal, its cause, its fix and its exit code."""

from __future__ import annotations

import re

from images.plan.references import Reference
from images.registry import ecr
from lustrain.problem import FAILED, USAGE, UserError, problem

NEW_TAG = "commit, which makes a new tag, or --suffix r2"
GO_ON = "see that the registry runs, has its data and can be reached, then try again: a push goes on where it broke off"
_MAKE_IN_ECR = (
    "aws ecr create-repository --region {region} --repository-name {repository} --image-tag-mutability IMMUTABLE, or take the "
    "repository of the Cluster (imageRepository)"
)
_KEPT_TAG = "the registry keeps the tag for the image that has it"
_REFUSALS = (
    (r"immutable|tag.?invalid", _KEPT_TAG, NEW_TAG, USAGE),
    (
        "pull rate limit",
        "the registry's limit of pulls is reached",
        "docker login {host}, or wait: anonymous pulls have the lowest limit",
        FAILED,
    ),
    (
        r"manifest.?invalid|unsupported|PUT request to \S+/manifests/: 405",
        "the registry does not take a manifest of this form",
        "use an engine with containerd's image store, which pushes OCI manifests, or a registry that takes docker's form",
        FAILED,
    ),
    (r"layers? with digests? .*not exist|manifest.?blob.?unknown", "the registry lacks layers of it", GO_ON, FAILED),
    # Engines with containerd's store show the status of an immutable tag alone.
    (r"PUT request to \S+/manifests/: 4(00|09)", _KEPT_TAG, NEW_TAG, USAGE),
    (
        r"name.?unknown|repository.?not.?found|not known to registry|POST request to \S+/blobs/uploads/\S*: 404",
        "the registry has no such repository",
        "see its spelling, or {make}",
        FAILED,
    ),
    (
        "(manifest|blob).?unknown|request to .*: 404",
        "the registry does not have it",
        "see the spelling of repository and tag, and whether it was pushed",
        FAILED,
    ),
    (
        r"unauthorized|no basic auth|authentication required|denied|authoriz\w+ failed|: 40[13]\b",
        "the registry refuses {who}",
        "docker login {host}, renew what its credential helper or AWS profile uses, or ask for the right to pull from and "
        "push to {repository}",
        FAILED,
    ),
    (
        "x509:|certificate",
        "the registry's certificate is not signed by a known CA, or is for a different name",
        "SSL_CERT_FILE=FILE with its CA here, and /etc/docker/certs.d/{host}/ca.crt on the engine's machine",
        FAILED,
    ),
    (
        "http response to https|wrong.version.number|record.layer",
        "the registry does not speak TLS",
        "give it TLS; without, only a registry on the same machine is used",
        FAILED,
    ),
)
"""For answers that no second try changes, of a registry, Python's TLS or the engine: signs, cause, fix, exit code."""
_NAMES = re.compile(r"(?<=://)[^\s/\"]+|(?<=/manifests/)[^\s:\"]+|[0-9a-f]{12,}")


def refusal(path: str, value: str, answer: str, reference: Reference, who: str = "the credentials") -> UserError | None:
    """Return the error, `path = value: cause: answer; fix: …`, for the answer to a request about `reference`.

    None where a second try may help. `who` sent the request.
    """
    words = without_names(answer, reference)
    host, repository = reference.registry, reference.repository
    region = ecr.region_of(host)
    make = _MAKE_IN_ECR.format(region=region, repository=repository) if region else "make it"
    for signs, why, fix, code in _REFUSALS:
        if re.search(signs, words, re.IGNORECASE):
            fix = fix.format(host=host, repository=repository, make=make)
            return UserError(problem(path, value, f"{why.format(who=who)}: {answer}", fix=fix), code)
    return None


def without_names(answer: str, reference: Reference) -> str:
    """Return an answer without names of hosts, repositories and tags, and without digests: they can look like a refusal."""
    for name, short in ((str(reference), ""), (reference.name, ""), (f"/v2/{reference.repository}/", "/v2/")):
        answer = answer.replace(name, short)
    return _NAMES.sub("", answer)


def without_queries(text: str) -> str:
    """Return a text without the queries of its addresses: a signed address is as good as a password."""
    return re.sub(r"(https?://[^\s\"'?]+)\?[^\s\"']*", r"\1?…", text)
