"""AWS on loopback: moto, mended by `additions`, behind a real threaded HTTP server in its own process.

Every region is there, and every service that moto knows. `LEFT_OUT` says what it leaves out, so that nobody takes it for
more, and `additions.left_out()` the rest, service by service. Checksums being among it, integrity is tested against a real
S3 server as well (tests/lab/servers.py).
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
START_SECONDS = 60.0
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
        """Plays what AWS does to machines: spot notices, ends of capacity blocks, faults of nodes."""
        return Events(self.control)

    def start(self) -> LocalAws:
        """Return once the server answers; RuntimeError with its own words when it does not come up."""
        command = [sys.executable, "-m", "infra.local.aws"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        # A server that hangs while it starts is ended, which ends the wait for its first line as well.
        watchdog = threading.Timer(START_SECONDS, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline() if self._process.stdout else ""
        finally:
            watchdog.cancel()
        if not line.startswith(_READY):
            self.stop()
            raise RuntimeError(f"the local AWS server did not start: {line.strip() or 'it ended and printed nothing'}")
        self.endpoint, self.control = line.removeprefix(_READY).split()
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
    """Serve until standard input ends or SIGTERM comes; the kernel chooses the ports, the first line says them."""
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
        # The end of standard input sends a second one, which would be a traceback in the midst of the first one's exit.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=stop_with_parent, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    serve()
