"""The start of the agent: `python -m node_setup.agent` in a checkout, and the first file of the packed agent."""

import sys

if sys.version_info < (3, 9):  # noqa: UP036 - this file is read by whatever python3 a node has
    running = sys.version.split()[0]
    sys.stderr.write("lustrain-agent: needs Python 3.9 or later, this is " + running + "; fix: install one\n")
    sys.exit(1)

import os
from hashlib import sha256


def start() -> int:
    """Load the agent's modules as bytecode where `compiled` has stored it, otherwise from the packed agent."""
    archive = getattr(globals().get("__loader__"), "archive", None)
    path = digest = compiled = None
    if archive is not None:
        path = os.path.abspath(archive)
        with open(path, "rb") as file:
            digest = sha256(file.read()).hexdigest()
        compiled = f"/run/lustrain/agent-{digest[:16]}.{sys.implementation.cache_tag}.zip"
        if os.path.exists(compiled):
            sys.path.insert(0, compiled)
    from node_setup.agent.cli import main
    from node_setup.agent.wire.identity import Identity

    return main(sys.argv[1:], Identity(path, digest, compiled))


if __name__ == "__main__":
    sys.exit(start())
