"""Recorded host keys: a new machine's key is added, a changed one is refused.

Fabric accepts every key, also a changed one (fabric/connection.py sets AutoAddPolicy and loads no file); this does not.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paramiko import MissingHostKeyPolicy, PKey, SSHClient
from paramiko.hostkeys import HostKeyEntry, HostKeys, InvalidHostKey
from paramiko.ssh_exception import BadHostKeyException, SSHException

from lustrain.problem import UserError, problem

DEFAULT = "~/.lustrain/known_hosts"


class UnknownHostKeyError(SSHException):
    """No recorded key vouches for this machine, and only machines with one are accepted."""


class UnrecordedError(SSHException):
    """A new machine's key cannot be recorded, so a changed key would go unnoticed the next time."""


class KnownHosts:
    """This is a file in OpenSSH's format, read once and appended to; threads and other processes may do so at the same time,
    and of two that meet one new machine the second believes what the first recorded."""

    def __init__(self, path: str, *, strict: bool = False) -> None:
        self.path = Path(path).expanduser()
        self.strict = strict
        self._lock = threading.Lock()
        self._keys = HostKeys()
        self._read_to = 0
        try:
            with open(self.path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                self._keys.load(str(self.path))
                self._read_to = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            if strict:
                why, fix = (
                    "there is no such file, and --strict-host-keys lets in known machines only",
                    "record their keys",
                )
                raise UserError(problem("--known-hosts", str(self.path), why, fix=fix)) from None
        except (OSError, UnicodeDecodeError, InvalidHostKey) as error:
            why = f"is not a file of host keys: {error}"
            raise UserError(
                problem("--known-hosts", str(self.path), why, fix="repair it or name another file")
            ) from None

    def trust(self, client: SSHClient, shown_as: str, recorded_as: str) -> None:
        """Have `client`, which looks for its machine under `shown_as`, accept what is recorded under `recorded_as`."""
        with self._lock:
            known = self._keys.lookup(recorded_as)
            for kind, key in dict(known or {}).items():
                client.get_host_keys().add(shown_as, kind, key)
        client.set_missing_host_key_policy(_Policy(self, recorded_as))

    def record(self, name: str, key: PKey) -> None:
        """Vouch for a new machine's key from now on. BadHostKeyException where another was recorded in the meantime,
        UnrecordedError where the file cannot be written."""
        with self._lock:
            try:
                with self._held() as descriptor:
                    self._catch_up(descriptor)
                    known = self._keys.lookup(name)
                    if known is None:
                        self._append(descriptor, f"{name} {key.get_name()} {key.get_base64()}\n")
                        self._keys.add(name, key.get_name(), key)
            except OSError as error:
                raise UnrecordedError(f"its host key cannot be recorded in {self.path}: {error.strerror}") from None
        if known is not None:
            expected = known.get(key.get_name()) or next(iter(known.values()))
            if expected != key:
                raise BadHostKeyException(name, key, expected)

    @contextmanager
    def _held(self) -> Iterator[int]:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _catch_up(self, descriptor: int) -> None:
        """Read what others have appended; lines that were removed stay removed for later runs."""
        size = os.fstat(descriptor).st_size
        text = os.pread(descriptor, max(0, size - self._read_to), self._read_to).decode(errors="replace")
        self._read_to = size
        for line in text.splitlines():
            entry = _entry(line.strip())
            for name in entry.hostnames if entry else ():
                if entry and not self._keys.lookup(name):
                    self._keys.add(name, entry.key.get_name(), entry.key)

    def _append(self, descriptor: int, line: str) -> None:
        """Append all of the line or none of it."""
        size = os.fstat(descriptor).st_size
        begun = b"" if not size or os.pread(descriptor, 1, size - 1) == b"\n" else b"\n"
        content = begun + line.encode("ascii")
        try:
            if os.write(descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(descriptor, size)
            raise
        self._read_to = size + len(content)


def _entry(line: str) -> HostKeyEntry | None:
    """Read the entry in a line; None for comments and for keys of an unknown kind."""
    try:
        return None if not line or line.startswith("#") else HostKeyEntry.from_line(line)
    except (SSHException, InvalidHostKey):
        return None


class _Policy(MissingHostKeyPolicy):
    def __init__(self, known: KnownHosts, name: str) -> None:
        self._known = known
        self._name = name

    def missing_host_key(self, client: SSHClient, hostname: str, key: PKey) -> None:
        if self._known.strict:
            raise UnknownHostKeyError(f"its host key {key.fingerprint} is not in {self._known.path}")
        self._known.record(self._name, key)
