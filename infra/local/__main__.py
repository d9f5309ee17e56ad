"""`python -m infra.local`: AWS and instance metadata on loopback until SIGTERM or SIGINT; prints the variables to export.

With arguments it plays an event in the running server that LUSTRAIN_LOCAL_AWS_CONTROL addresses: `python -m infra.local spot
instance=i-0123456789abcdef0 in_s=30`. The commands are those of `player.COMMANDS`; values are JSON or plain text.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from infra.local.aws import LEFT_OUT, LocalAws
from infra.local.events import Events, send
from infra.local.metadata import LEFT_OUT as METADATA_LEFT_OUT
from infra.local.metadata import LocalMetadata

CONTROL = "LUSTRAIN_LOCAL_AWS_CONTROL"


def main(arguments: Sequence[str] = ()) -> int:
    if arguments and arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    return _play(*arguments) if arguments else _serve()


def _serve() -> int:
    from infra.local.additions import left_out
    from infra.local.errors import LEFT_OUT as UNIMPLEMENTED

    stop_requested = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop_requested.set())
    with LocalAws() as aws, LocalMetadata() as metadata:
        print(f"# AWS at {aws.endpoint}, all regions")
        print("# left out:")
        for line in (LEFT_OUT, UNIMPLEMENTED, *left_out(), METADATA_LEFT_OUT):
            print(f"#   {line}")
        print(f"# events to {aws.control}/control/…")
        print(f"# instance metadata at {metadata.endpoint}, commands to {metadata.control}/control/…")
        for name, value in {**aws.environment, **metadata.environment}.items():
            print(f"export {name}={value}")
        print(f"export {CONTROL}={aws.control}")
        print(f"export LUSTRAIN_LOCAL_METADATA_CONTROL={metadata.control}", flush=True)
        stop_requested.wait()
    return 0


def _play(command: str, *details: str) -> int:
    control = os.environ.get(CONTROL)
    if not control:
        print(f"{CONTROL} is not set: it holds the address of a running `python -m infra.local`, which prints it")
        return 2
    try:
        reply = (
            Events(control).state()
            if command == "state"
            else send(f"{control}/control/{command}", _parse_details(details))
        )
    except (OSError, ValueError) as error:
        print(f"{command}: {error}")
        return 2
    print(json.dumps(reply, indent=2))
    return 0


def _parse_details(details: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for argument in details:
        name, separator, value = argument.partition("=")
        if not separator:
            raise ValueError(f"{argument}: must have the form name=value")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
