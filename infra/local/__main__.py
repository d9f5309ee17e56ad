"""`python -m infra.local`: S3, STS and instance metadata on loopback until SIGTERM or SIGINT; prints what to export."""

from __future__ import annotations

import signal
import threading

from infra.local.aws import LEFT_OUT, LocalAws
from infra.local.metadata import LocalMetadata


def main() -> int:
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with LocalAws() as aws, LocalMetadata() as metadata:
        print(f"# S3 and STS at {aws.endpoint} ({LEFT_OUT})")
        print(f"# instance metadata at {metadata.endpoint}, commands to {metadata.control}/control/…")
        for name, value in {**aws.environment, **metadata.environment}.items():
            print(f"export {name}={value}")
        print(f"export LUSTRAIN_LOCAL_METADATA_CONTROL={metadata.control}", flush=True)
        ended.wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
