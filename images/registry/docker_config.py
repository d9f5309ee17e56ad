"""A docker configuration with ECR tokens, for as long as one buildx command runs."""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from images.registry import credentials, ecr

CONFIG = "config.json"


@contextmanager
def of_ecr(hosts: Iterable[str], environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Variables for a docker command that shall reach `hosts`; none where no ECR is among them.

    The user's own configuration stays in force beside the tokens: everything but its file is there by symbolic links.
    """
    ours = sorted(host for host in hosts if ecr.region_of(host) is not None)
    if not ours:
        yield {}
        return
    home = Path(environment.get("DOCKER_CONFIG") or Path(environment.get("HOME") or Path.home(), ".docker"))
    with tempfile.TemporaryDirectory(prefix="lustrain-login-") as name:
        folder = Path(name)
        for one in home.iterdir() if home.is_dir() else ():
            if one.name != CONFIG:
                (folder / one.name).symlink_to(one.absolute())
        with os.fdopen(os.open(folder / CONFIG, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            json.dump(_with_tokens(credentials.read_config(home / CONFIG), ours), file)
        yield {"DOCKER_CONFIG": name}


def _with_tokens(config: Mapping[str, Any], hosts: Iterable[str]) -> dict[str, Any]:
    auths, helpers = (
        dict(found) if isinstance(found := config.get(name), dict) else {} for name in ("auths", "credHelpers")
    )
    for host in hosts:
        if host in helpers or (found := credentials.for_registry(host)) is None:
            continue
        auths[host] = {"auth": base64.b64encode(f"{found.username}:{found.password}".encode()).decode()}
        # A store for all registries would be asked in place of the token; an empty helper is none.
        helpers[host] = ""
    return {**config, "auths": auths, "credHelpers": helpers}
