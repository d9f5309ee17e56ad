"""Secrets in what goes into an image: in files, in its settings, in the commands of its history.

A finding never repeats the secret. Standard library only: the check that runs in the image carries this file too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_BODY = rb"(?:(?:\\r)?(?:\\n)|\s)+(?:[A-Za-z-]+: [^\n]*\n)*\s*[A-Za-z0-9+/=]{40}"
_LOGIN = rb"://[^/\s:@]+:[^/\s@]+@|^\s*password\s*=\s*\S"
_RULES: tuple[tuple[str, tuple[bytes, ...], re.Pattern[bytes]], ...] = (
    (
        # Code names the armour; a key is the armour with a key in it.
        "a private key",
        (b"PRIVATE KEY",),
        re.compile(rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----" + _BODY),
    ),
    (
        # https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html#identifiers-unique-ids ; keys of AWS's
        # documentation contain EXAMPLE.
        "an AWS access key",
        (b"AKIA", b"ASIA"),
        re.compile(rb"(?<![A-Za-z0-9/+_])(?:AKIA|ASIA)(?![A-Z0-9]*EXAMPLE)[A-Z2-7]{16}(?![A-Za-z0-9/+=_])"),
    ),
    (
        "a GitHub token",
        (b"ghp_", b"gho_", b"ghs_", b"ghu_", b"github_pat_"),
        re.compile(rb"(?<![A-Za-z0-9_])(?:gh[posu]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{60,})(?![A-Za-z0-9_])"),
    ),
    (
        "a Hugging Face token",
        (b"hf_",),
        re.compile(rb"(?<![A-Za-z0-9_])hf_(?=[A-Za-z]*[0-9])(?=[a-z0-9]*[A-Z])[A-Za-z0-9]{34,40}(?![A-Za-z0-9_])"),
    ),
)
"""Kind of secret, texts of which one is in every such secret, and its pattern: searching the texts first is faster."""
_FILES: tuple[tuple[str, re.Pattern[str], re.Pattern[bytes]], ...] = (
    (
        "a registry's credentials",
        re.compile(r"(^|/)(\.docker/config\.json|\.dockercfg)$"),
        re.compile(rb'"(?:auth|identitytoken|registrytoken|password)"\s*:\s*"[^"]+"'),
    ),
    (
        "a package index's credentials",
        re.compile(r"(^|/)(pip\.conf|\.?pypirc|uv\.toml)$"),
        re.compile(_LOGIN, re.MULTILINE),
    ),
    ("git's credentials", re.compile(r"(^|/)(\.git-credentials|\.git/config)$"), re.compile(_LOGIN, re.MULTILINE)),
    ("passwords of hosts", re.compile(r"(^|/)[._]?netrc$"), re.compile(rb"\bpassword\s+\S+")),
    (
        "AWS credentials",
        re.compile(r"(^|/)\.aws/(credentials|config)$"),
        re.compile(rb"aws_(?:secret_access_key|session_token)\s*=\s*\S+"),
    ),
    ("a host's private key", re.compile(r"(^|/)etc/ssh/ssh_host_[^/]*_key$"), re.compile(rb"\S")),
)
_ASSIGNED = re.compile(r"""([A-Za-z][A-Za-z0-9_.-]*)=("[^"]*"|'[^']*'|[^\s;&|]+)""")
_SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:password|passwd|secret|token|apikey|api[_-]key|access[_-]?key|private[_-]key|credentials?)(?:$|[_.-])",
    re.IGNORECASE,
)
_URL_LOGIN = re.compile(r"://[^/\s:@]+:(?!\$)[^/\s@]+@")
_SHORTEST = 8


@dataclass(frozen=True)
class Leak:
    """Where a secret lies, without the secret."""

    where: str
    what: str


def secrets_in(files: Iterable[tuple[str, bytes]]) -> list[Leak]:
    """Return every secret in files, in their order."""
    return [Leak(path, what) for path, data in files for what in _in_file(path, data)]


def secrets_of(config: Mapping[str, Any]) -> list[Leak]:
    """Return every secret that the configuration carries: environment, labels, commands, and the history with its build
    arguments."""
    return [Leak(where, what) for where, text in _texts(config) for what in _in_text(text)]


def _forms(data: bytes) -> dict[str, None]:
    matches = (what for what, marks, form in _RULES if any(mark in data for mark in marks) and form.search(data))
    return dict.fromkeys(matches)


def _in_file(path: str, data: bytes) -> Iterator[str]:
    files = (what for what, name, form in _FILES if name.search(path) and form.search(data))
    yield from _forms(data) | dict.fromkeys(files)


def _texts(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    inner = config.get("config") or {}
    for number, line in enumerate(inner.get("Env") or (), 1):
        yield f"Env {number} ({line.partition('=')[0]})", line
    for key, value in (inner.get("Labels") or {}).items():
        yield f"label {key}", f"{key}={value!r}" if " " in str(value) else f"{key}={value}"
    for key in ("Entrypoint", "Cmd"):
        yield key, " ".join(inner.get(key) or ())
    for number, step in enumerate(config.get("history") or (), 1):
        for key in ("created_by", "comment"):
            yield f"history {number}", str(step.get(key) or "")


def _in_text(text: str) -> Iterator[str]:
    leaks = _forms(text.encode("utf-8", "surrogatepass"))
    if _URL_LOGIN.search(text):
        leaks["an address with a password"] = None
    for name, value in _ASSIGNED.findall(text):
        if _SECRET_NAME.search(name) and _looks_like_secret(value.strip("\"'")):
            leaks[f"a value for {name}"] = None
    yield from leaks


def _looks_like_secret(value: str) -> bool:
    """Leave out a variable, a path to a mounted secret, a number or a switch."""
    return len(value) >= _SHORTEST and value[0] not in "$/" and not value.isdigit()
