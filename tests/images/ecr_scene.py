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

from images.build.bake import Bake
from images.model import Output
from images.registry import credentials, ecr
from images.registry.client import Registry
from images.registry.retry import Patience
from infra.local.aws import LocalAws
from lustrain.problem import UserError
from rehearsal.lab.containers import registry as lab
from rehearsal.lab.containers.engine import Engine
from tests.images.builds import Silent, context, plan
from tests.images.certificates import certify

HOST = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
ADDRESS = "127.83.0.1"
QUICK = Patience(tries=3, first_s=0.2, longest_s=1)


def play(folder: Path) -> dict[str, Any]:
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS} {HOST}\n")
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    ca = certify(folder / "registry", HOST, ADDRESS)
    os.environ["SSL_CERT_FILE"] = str(ca)
    password = ecr.token(HOST).password
    told: dict[str, Any] = {"token": password}
    with lab.Registry(folder / "registry", {"AWS": password}, tls=True, address=ADDRESS, port=443) as registry:
        engine = Engine(folder / "engine")
        engine.trust(HOST, ca)
        with engine:
            told["digest"] = _push(engine, folder / "image", 1)
            told["held"] = registry_with(ca).digest_of(f"{HOST}/team/trainer:1")

            # The token that the client has is refused; AWS still gives the one that was right before.
            there = registry_with(ca)
            stale = there.transport.credentials
            assert stale is not None
            object.__setattr__(stale, "password", "an ended token")
            told["refreshed"] = there.digest_of(f"{HOST}/team/trainer:1")

            registry.set_users({"AWS": "a later token"})
            told["refused"] = _refusal(lambda: _push(engine, folder / "image", 2))
            before = len(registry.requests())
            tokens: list[str] = []
            plain = ecr.token

            def counted(host: str) -> ecr.Token:
                tokens.append(host)
                return plain(host)

            ecr.token = counted
            try:
                registry_client = registry_with(ca)
                _refusal(lambda: registry_client.digest_of(f"{HOST}/team/trainer:1"))
            finally:
                ecr.token = plain
            told["tokens"] = len(tokens)
            told["statuses"] = [status for _, path, status in registry.requests()[before:] if path != "/v2/"]
    return told


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


def _push(engine: Engine, folder: Path, tag: int) -> str:
    made = context(folder, "FROM scratch AS small\nCOPY file /\n", file=str(tag))
    wish = plan(f"{HOST}/team/trainer:{tag}")
    return str(Bake({**os.environ, **engine.environment}).build(wish, made, "small", Output.PUSH, Silent()).digest)


def main() -> None:
    with LocalAws() as aws:
        os.environ.update(aws.environment)
        print(json.dumps(play(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
