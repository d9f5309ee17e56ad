"""AWS on loopback: moto, with `additions` and `patches`, behind a real threaded HTTP server in its own process.

It offers every region and every service of moto. `LEFT_OUT` lists its general limits, and `additions.left_out()` the limits
of each service. Checksums are among them, so integrity is also tested against a real S3 server (tests/lab/servers.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import TracebackType

from infra.local.events import Events

LEFT_OUT = (
    "emulated by moto: checks no credentials and no signatures, accepts a body whose checksum header is wrong, never "
    "throttles, never fails, keeps everything in the memory and temporary files of one process, and forgets all of it on stop"
)
START_SECONDS = 300.0
REGION = "us-east-1"
_READY = "listening on "


class LocalAws:
    """A context manager around the server process; it also ends when the process that started it dies."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.endpoint = ""
        self.control = ""
        """Base address for commands of the event player, `events.Events`."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that send every AWS client to this server, and none to a real account or to a metadata address."""
        return {**client_environment(), "AWS_ENDPOINT_URL": self.endpoint}

    @property
    def events(self) -> Events:
        """The event player: spot notices, recommendations to rebalance, faults of nodes."""
        return Events(self.control)

    def start(self) -> LocalAws:
        """Start the server and wait until it listens; RuntimeError with the server's output when it does not start."""
        command = [sys.executable, "-m", "infra.local.aws"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        # Killing a server that hangs at its start also ends the wait for its first line.
        patience = threading.Timer(START_SECONDS, self._process.kill)
        patience.start()
        try:
            first_line = self._process.stdout.readline() if self._process.stdout else ""
        finally:
            patience.cancel()
        if not first_line.startswith(_READY):
            self.stop()
            raise RuntimeError(
                f"the local AWS server did not start: {first_line.strip() or 'it ended and printed nothing'}"
            )
        self.endpoint, self.control = first_line.removeprefix(_READY).split()
        return self

    def stop(self) -> None:
        if self._process is None:
            return
        if self._process.stdin:
            self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._process = None

    def __enter__(self) -> LocalAws:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def client_environment() -> dict[str, str]:
    """Return dummy credentials and a region, with every other source of credentials switched off."""
    return {
        "AWS_ACCESS_KEY_ID": "local",
        "AWS_SECRET_ACCESS_KEY": "local-only-not-a-secret",
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


def serve() -> None:
    """Serve until standard input ends or SIGTERM arrives; the kernel chooses the ports, and the first line prints them."""
    import logging

    from werkzeug.serving import make_server

    from infra.local import player
    from infra.local.additions import install
    from infra.local.errors import application

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    install()
    server = make_server("127.0.0.1", 0, application(), threaded=True)
    print(f"{_READY}http://127.0.0.1:{server.server_port} {player.listen()}", flush=True)

    def stop_with_parent() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)
        # moto's request threads may hold the interpreter; the emulation has nothing to save.
        time.sleep(5)
        os._exit(0)

    def stop(*_: object) -> None:
        # The end of standard input sends a second SIGTERM, which would print a traceback during the exit.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=stop_with_parent, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    serve()
