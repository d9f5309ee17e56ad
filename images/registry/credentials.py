"""Registry credentials: the docker configuration of this user, or AWS for an ECR.

Amazon's public registry (public.ecr.aws) is a registry like others here: without `docker login` it is read anonymously.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docker import errors
from docker.auth import AuthConfig

from images.registry import ecr
from lustrain.problem import FAILED, UserError, problem

CONFIG = "config.json"


@dataclass(frozen=True)
class Credentials:
    """A user and a password, or an identity token; neither is ever shown."""

    username: str
    password: str = field(repr=False)
    identity_token: str | None = field(default=None, repr=False)

    @property
    def basic(self) -> str:
        """User and password as RFC 7617 and docker's config.json have them."""
        return b64encode(f"{self.username}:{self.password}".encode()).decode()

    def hide(self, text: str) -> str:
        """Return a text from elsewhere, without the secret."""
        for secret in filter(None, (self.password, self.identity_token)):
            text = text.replace(secret, "***")
        return text


def for_registry(host: str) -> Credentials | None:
    """Return the credentials for `host`; None where there are none, and requests are anonymous.

    An ECR's token comes from AWS, and where that gives none, from a `docker login` if there was one. UserError where the
    configuration cannot be read, its credential helper fails, or AWS gives no token.
    """
    if ecr.region_of(host) is None:
        return _configured(host)
    try:
        return Credentials(*ecr.token(host))
    except UserError:
        if credentials := _configured(host):
            return credentials
        raise


@contextmanager
def docker_config(hosts: Iterable[str], environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield variables for a docker command that shall reach `hosts`: a configuration with tokens for the ECRs among them.

    The user's own configuration stays in force beside the tokens: everything but its file is there by symbolic links.
    """
    ours = sorted(host for host in hosts if ecr.region_of(host) is not None)
    if not ours:
        yield {}
        return
    home = _folder(environment)
    with tempfile.TemporaryDirectory(prefix="lustrain-login-") as name:
        folder = Path(name)
        for path in home.iterdir() if home.is_dir() else ():
            if path.name != CONFIG:
                (folder / path.name).symlink_to(path.absolute())
        with os.fdopen(os.open(folder / CONFIG, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            json.dump(_with_tokens(_read(home / CONFIG), ours), file)
        yield {"DOCKER_CONFIG": name}


def _with_tokens(config: Mapping[str, Any], hosts: Iterable[str]) -> dict[str, Any]:
    auths, helpers = (
        dict(table) if isinstance(table := config.get(name), dict) else {} for name in ("auths", "credHelpers")
    )
    for host in hosts:
        if host not in helpers and (credentials := for_registry(host)):
            auths[host] = {"auth": credentials.basic}
            # Without this, docker would ask the user's store for all registries instead. An empty name means no helper.
            helpers[host] = ""
    return {**config, "auths": auths, "credHelpers": helpers}


def _configured(host: str) -> Credentials | None:
    path = _folder(os.environ) / CONFIG
    config = _read(path)
    # Without one of these docker's library would take the file for the old format, in which every key is a registry.
    known = {name: config[name] for name in ("auths", "credsStore", "credHelpers") if config.get(name)}
    if not known:
        return None
    if isinstance(known.get("auths"), dict):
        known["auths"] = {name: _with_auth(entry) for name, entry in known["auths"].items()}
    try:
        docker = AuthConfig.load_config(None, known)
    except (AttributeError, ValueError, errors.DockerException):
        raise _unreadable(path) from None
    try:
        with warnings.catch_warnings():
            # It warns of a missing helper, and then fails because of it.
            warnings.simplefilter("ignore")
            entry = docker.resolve_authconfig(host) or {}
            values = {str(name).lower(): str(value or "") for name, value in entry.items()}
    except (errors.DockerException, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        program = f"docker-credential-{docker.get_credential_store(host)}"
        why = "is not on PATH" if "not installed" in str(error) else f"failed for {host}"
        fix = f"see whether `{program} list` works, or `docker login {host}` without it"
        raise UserError(problem("docker config", program, f"the credential helper {why}", fix=fix), FAILED) from None
    username, token = values.get("username", ""), values.get("identitytoken")
    return Credentials(username, values.get("password", ""), token or None) if username or token else None


def _with_auth(entry: Any) -> Any:
    """Return an entry of `auths` with user and password in the form that docker's library reads; docker itself reads both."""
    if isinstance(entry, dict) and not entry.get("auth") and entry.get("username") and entry.get("password"):
        return {**entry, "auth": Credentials(str(entry["username"]), str(entry["password"])).basic}
    return entry


def _folder(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("DOCKER_CONFIG") or Path(environment.get("HOME") or Path.home(), ".docker"))


def _read(path: Path) -> dict[str, Any]:
    """Return docker's config.json; empty where there is none. UserError where it is something else."""
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
    fix = "correct it, or move it away and `docker login` again"
    return UserError(problem("docker config", str(path), "cannot be read as docker's config.json", fix=fix))
