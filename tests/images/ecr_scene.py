"""A push to an ECR by its real host name, in a mount namespace in which that name is an address of this machine.

Run as `unshare -m python -m tests.images.ecr_scene FOLDER`; prints one JSON object. The token is moto's, the registry
behind the name is docker-registry with TLS on port 443 whose one user has that token as its password, the engine runs in
the same namespace. What it leaves out: ECR's own rules for tags and repositories.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import docker

from images.model import Silent
from images.registry import credentials, ecr
from images.registry.client import Registry
from images.registry.push import push
from images.registry.retry import Patience
from infra.local.aws import LocalAws
from lustrain.problem import UserError
from rehearsal.lab import registry as lab
from rehearsal.lab.engine import Engine
from tests.images.certificates import certify

HOST = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
ADDRESS = "127.83.0.1"
QUICK = Patience(tries=3, first_s=0.2, longest_s=1)


class Logs(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, name: str, text: str) -> None:
        self.lines.append(text)


def play(folder: Path) -> dict[str, Any]:
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS} {HOST}\n")
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    ca = certify(folder / "registry", HOST, ADDRESS)
    password = ecr.token(HOST).password
    users, other = {"AWS": password}, {"AWS": "a later token"}
    told: dict[str, Any] = {"token": password}
    with lab.Registry(folder / "registry", users, tls=True, address=ADDRESS, port=443) as registry:
        engine = Engine(folder / "engine")
        engine.trust(HOST, ca)
        with engine:
            ref = _build(engine, folder / "image", 1)
            client = docker.DockerClient(base_url=f"unix://{engine.socket}")
            told["digest"] = push(ref, client, to=registry_with(ca))
            told["held"] = registry_with(ca).digest_of(ref)

            # The token that the client has is refused; AWS still gives the one that was right before.
            there = registry_with(ca)
            stale = there.transport.credentials
            assert stale is not None
            object.__setattr__(stale, "password", "an ended token")
            logs = Logs()
            told["refreshed"] = push(_build(engine, folder / "image", 2), client, logs, to=there)

            registry.set_users(other)
            told["refused"] = _refusal(lambda: push(_build(engine, folder / "image", 3), client, to=registry_with(ca)))
            before = len(registry.requests())
            tokens: list[str] = []
            plain = ecr.token

            def counted(host: str) -> ecr.Token:
                tokens.append(host)
                return plain(host)

            ecr.token = counted
            try:
                registry_client = registry_with(ca)
                _refusal(lambda: registry_client.digest_of(ref))
            finally:
                ecr.token = plain
            told["tokens"] = len(tokens)
            told["statuses"] = [status for _, path, status in registry.requests()[before:] if path != "/v2/"]

            registry.set_users(users)
            mid = _MidPush(registry, other)
            told["mid_push"] = _refusal(
                lambda: push(_build(engine, folder / "image", 4, 48 << 20), client, mid, to=registry_with(ca))
            )
            told["changed"] = mid.changed
            told["went_on"] = "fresh credentials" in str(mid.lines)
    return told


class _MidPush(Logs):
    """Takes the token away when a layer is on its way."""

    def __init__(self, registry: lab.Registry, users: dict[str, str]) -> None:
        super().__init__()
        self._registry, self._users, self.changed = registry, users, False

    def moved(self, name: str, done: int, total: int) -> None:
        if not self.changed and done > 1 << 20:
            self.changed = True
            self._registry.set_users(self._users)


def registry_with(ca: Path) -> Registry:
    """The ECR as `connect` has it, with the CA of this scene and less patience."""
    return Registry(HOST, credentials.for_registry(HOST), ca, QUICK)


def _refusal(act: Any) -> str:
    try:
        act()
    except UserError as error:
        (line,) = error.problems
        return line
    return "not refused"


def _build(engine: Engine, folder: Path, tag: int, size: int = 1000) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "file").write_bytes(os.urandom(size))
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY file /\n")
    ref = f"{HOST}/team/trainer:{tag}"
    engine.docker("buildx", "build", "--provenance=false", "--load", "-t", ref, folder)
    return ref


def main() -> None:
    with LocalAws() as aws:
        os.environ.update(aws.environment)
        print(json.dumps(play(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
