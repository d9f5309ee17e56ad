"""Image references, `registry/repository:tag@digest`, as docker reads them.

The grammar is https://github.com/distribution/reference/blob/main/reference.go; a first part counts as a registry where it has
a dot, a colon or a capital letter, or is `localhost`.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from images.model import DOCKER_HUB
from lustrain.problem import UserError, problem

LONGEST_NAME = 255
_PART = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST = re.compile(rf"(?:{_PART}(?:\.{_PART})*|\[[a-fA-F0-9:]+\])(?::[0-9]{{1,5}})?")
_PATH_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH = re.compile(rf"{_PATH_PART}(?:/{_PATH_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[a-f0-9]{64}|sha512:[a-f0-9]{128}")
_IDENTIFIER = re.compile(r"[a-f0-9]{64}")
_FORM = "registry/repository:tag or registry/repository@sha256:…"


@dataclass(frozen=True)
class Reference:
    """An image in a registry; `docker.io` stands for Docker Hub."""

    registry: str
    """Host, with its port where it has one."""
    repository: str
    tag: str | None = None
    digest: str | None = None

    @property
    def name(self) -> str:
        """registry/repository"""
        return f"{self.registry}/{self.repository}"

    @property
    def wanted(self) -> str:
        """Return what a request to a registry names: the digest where there is one, else the tag, else `latest`."""
        return self.digest or self.tag or "latest"

    def at(self, digest: str) -> Reference:
        """Return the same repository's image of this digest, without a tag."""
        return Reference(self.registry, self.repository, None, digest)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.name}{tag}{f'@{self.digest}' if self.digest else ''}"


def parse(text: str, path: str = "image") -> Reference:
    """Read a reference; UserError (exit code 2) in one line that names `path` where `text` is not a reference."""
    if "://" in text:
        raise _wrong(path, text, "an address", f"{_FORM}, without {text.partition('//')[0]}//")
    rest, at, digest = text.partition("@")
    if at and not is_digest(digest):
        raise _wrong(path, text, "what follows @ is not a digest", "sha256: and 64 hexadecimal digits")
    head, colon, tail = rest.rpartition(":")
    tag = tail if colon and "/" not in tail else None
    if tag is not None and not _TAG.fullmatch(tag):
        raise _wrong(path, text, "not a tag", "up to 128 of A-Z a-z 0-9 _ . -, the first none of . -")
    name = rest if tag is None else head
    if _IDENTIFIER.fullmatch(name):
        raise _wrong(path, text, "an image's id names no registry", _FORM)
    registry, repository = _split(name)
    if not is_host(registry):
        raise _wrong(path, text, "not a registry's host name", "name or name:port")
    if not _PATH.fullmatch(repository):
        allowed = "lower case letters, digits, and . _ - between them, parts with /"
        raise _wrong(path, text, "not a repository's name", allowed)
    if len(repository) > LONGEST_NAME:
        raise _wrong(path, text, f"a repository's name of {len(repository)} characters", f"up to {LONGEST_NAME}")
    return Reference(registry, repository, tag, digest or None)


def is_digest(text: str) -> bool:
    """Check whether it is a digest of a kind that we know."""
    return bool(_DIGEST.fullmatch(text))


def is_host(text: str) -> bool:
    """Check whether it is a registry's host name, with or without a port."""
    if not _HOST.fullmatch(text):
        return False
    port = text.rpartition(":")[2] if ":" in text and not text.endswith("]") else ""
    return not port or 0 < int(port) < 65536


def is_loopback(host: str) -> bool:
    """Check whether a registry's host, with or without a port, is this machine: 127.0.0.0/8 or localhost, and nothing else."""
    name = host.rpartition(":")[0] if re.search(r":[0-9]+$", host) else host
    if name == "localhost":
        return True
    try:
        return ipaddress.IPv4Address(name).is_loopback
    except ValueError:
        return False


def _split(name: str) -> tuple[str, str]:
    first, slash, rest = name.partition("/")
    named = slash and (any(item in first for item in ".:") or first == "localhost" or first.lower() != first)
    if not named:
        first, rest = DOCKER_HUB, name
    if first == f"index.{DOCKER_HUB}":
        first = DOCKER_HUB
    if first == DOCKER_HUB and "/" not in rest:
        rest = f"library/{rest}"
    return first, rest


def _wrong(path: str, text: str, why: str, allowed: str) -> UserError:
    return UserError(problem(path, text, why, allowed=allowed))
