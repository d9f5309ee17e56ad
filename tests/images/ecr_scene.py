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
from images.registry import ecr, http
from images.registry.client import connect
from infra.local.aws import LocalAws
from lustrain.problem import UserError
from rehearsal.lab.containers import registry as lab
from rehearsal.lab.containers.engine import Engine
from tests.images.builds import Silent, context, plan
from tests.images.certificates import certify

HOST = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
HELD = f"{HOST}/team/trainer:1"
ADDRESS = "127.83.0.1"


def play(folder: Path) -> dict[str, Any]:
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS} {HOST}\n")
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    ca = certify(folder / "registry", HOST, ADDRESS)
    os.environ["SSL_CERT_FILE"] = str(ca)
    http.TRIES, http.FIRST_PAUSE_S = 3, 0.2
    _, password = ecr.token(HOST)
    told: dict[str, Any] = {"token": password}
    with lab.Registry(folder / "registry", {"AWS": password}, tls=True, address=ADDRESS, port=443) as registry:
        engine = Engine(folder / "engine")
        engine.trust(HOST, ca)
        with engine:
            told["digest"] = _push(engine, folder / "image", 1)
            told["held"] = connect(HELD).digest_of(HELD)

            # The token that the client has is refused; AWS still gives the one that was right before.
            there = connect(HELD)
            stale = there.transport.credentials
            assert stale is not None
            object.__setattr__(stale, "password", "an ended token")
            told["refreshed"] = there.digest_of(HELD)

            registry.set_users({"AWS": "a later token"})
            before = len(registry.requests())
            try:
                _push(engine, folder / "image", 2)
            except UserError as error:
                told["refused"] = error.problems
            told["statuses"] = sorted({status for _, path, status in registry.requests()[before:] if path != "/v2/"})
    return told


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
