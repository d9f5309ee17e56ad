"""The BuildKit inside an engine as a builder of its own for buildx, as a build machine has one in a container.

buildx lets an engine's own builder do less than BuildKit can: it fetches every layer of an image before it pushes it, and
pushes nothing by digest (https://github.com/docker/buildx/blob/v0.13.1/build/build.go). The usual way out, a builder in a
container, is an image to be pulled. But its BuildKit is in the engine as well, under /grpc, where buildx itself talks to it.
Left out is what that container would be: a cache apart from the engine's.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from rehearsal.lab.containers.engine import Engine

NAME = "lustrain-lab"
_ASK = b"POST /grpc HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
_CHUNK = 1 << 16


class BuildKit:
    """This is a builder named in `.environment`; it lives as long as the block, its cache as long as the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._socket = engine.folder / "buildkit.sock"
        self._listener = socket.socket(socket.AF_UNIX)

    @property
    def environment(self) -> dict[str, str]:
        return {**self._engine.environment, "BUILDX_BUILDER": NAME}

    def __enter__(self) -> BuildKit:
        self._listener.bind(str(self._socket))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()
        self._engine.docker("buildx", "create", "--name", NAME, "--driver", "remote", f"unix://{self._socket}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._engine.docker("buildx", "rm", NAME, check=False)
        # A listener that waits in another thread is woken by this and not by close.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._socket.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                ours, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=_join, args=(ours, self._engine.socket), daemon=True).start()


def _join(ours: socket.socket, engine: Path) -> None:
    with ours, socket.socket(socket.AF_UNIX) as theirs:
        theirs.connect(str(engine))
        theirs.sendall(_ASK)
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            if not (one := theirs.recv(1)):
                return
            answer += one
        back = threading.Thread(target=_pass, args=(theirs, ours), daemon=True)
        back.start()
        _pass(ours, theirs)
        back.join()


def _pass(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
