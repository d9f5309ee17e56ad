"""Registry credentials: the docker configuration of this user, or AWS for an ECR.

Amazon's public registry (public.ecr.aws) is a registry like others here: without `docker login` it is read anonymously.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from docker import errors
from docker.auth import AuthConfig
from docker.utils.config import find_config_file

from images.registry import ecr
from lustrain.problem import FAILED, UserError, problem

MARGIN = timedelta(minutes=15)
"""Renewed this long before the end: a layer's upload outlasts the check before it."""


@dataclass(frozen=True)
class Credentials:
    """A user and a password, or an identity token; neither is ever shown."""

    username: str
    password: str = field(repr=False)
    identity_token: str | None = field(default=None, repr=False)
    ends: datetime | None = None
    source: Callable[[], Credentials | None] | None = field(default=None, repr=False, compare=False)
    """Where they come from; asked again when they end or are refused."""

    @property
    def stale(self) -> bool:
        return self.ends is not None and datetime.now(UTC) > self.ends - MARGIN

    def renewed(self) -> Credentials:
        """Return what their source says now; these where it says nothing else."""
        return (self.source and self.source()) or self

    def hide(self, text: str) -> str:
        """Return a text from elsewhere, without the secret."""
        for secret in filter(None, (self.password, self.identity_token)):
            text = text.replace(secret, "***")
        return text


def for_registry(host: str) -> Credentials | None:
    """Return what opens `host`; None where nothing is known, and it is asked anonymously.

    An ECR's token comes from AWS, and where that gives none, from a `docker login` if there was one. UserError where the
    configuration cannot be read, its credential helper fails, or AWS gives no token.
    """
    if ecr.region_of(host) is None:
        return _configured(host)
    try:
        token = ecr.token(host)
    except UserError:
        if found := _configured(host):
            return found
        raise
    return Credentials(token.username, token.password, None, token.ends, source=lambda: for_registry(host))


def _configured(host: str) -> Credentials | None:
    config = _config()
    helper = config.get_credential_store(host) if config.creds_store or config.cred_helpers else None
    try:
        with warnings.catch_warnings():
            # It warns of a helper that is not there, and then fails because of it.
            warnings.simplefilter("ignore")
            found = config.resolve_authconfig(host)
    except (errors.DockerException, OSError, ValueError, LookupError, TypeError) as error:
        program = f"docker-credential-{helper}"
        why = "is not on PATH" if "not installed" in str(error) else f"failed for {host}"
        fix = f"see whether `{program} list` works, or `docker login {host}` without it"
        raise UserError(problem("docker config", program, f"the credential helper {why}", fix=fix), FAILED) from None
    return _credentials(host, {str(name).lower(): value for name, value in (found or {}).items()})


def _credentials(host: str, found: Mapping[str, object]) -> Credentials | None:
    token = found.get("identitytoken")
    if not token and not found.get("username"):
        return None
    return Credentials(
        str(found.get("username") or ""),
        str(found.get("password") or ""),
        str(token) if token else None,
        source=lambda: _configured(host),
    )


def _config() -> AuthConfig:
    path = find_config_file()
    config = read_config(Path(path)) if path else {}
    # Without one of these docker's library would take the file for the old format, in which every key is a registry.
    known = {name: config[name] for name in ("auths", "credsStore", "credHelpers") if config.get(name)}
    try:
        return AuthConfig.load_config(None, known) if known else AuthConfig({})
    except (AttributeError, ValueError, errors.DockerException):
        raise _unreadable(Path(str(path))) from None


def read_config(path: Path) -> dict[str, Any]:
    """Read docker's config.json; empty where there is none. UserError where it is something else."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise _unreadable(path) from None
    if not isinstance(config, dict):
        raise _unreadable(path)
    return config


def _unreadable(path: Path) -> UserError:
    # Not what the parser says: that may quote a password.
    fix = "mend it, or move it away and `docker login` again"
    return UserError(problem("docker config", str(path), "cannot be read as docker's config.json", fix=fix))
