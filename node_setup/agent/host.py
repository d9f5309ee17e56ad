"""The agent's only access to its machine: files, programs and time. Tests pass another root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lustrain.files import sync_folder, write_whole

NO_PROGRAM = 127
TIMED_OUT = 124
DIES_WITHIN_S = 5.0
PATHS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/amazon/efa/bin:/opt/habanalabs/bin:/snap/bin"
"""Programs are searched here: Slurm's prolog and a unit at boot have no PATH worth the name."""


@dataclass(frozen=True)
class Done:
    """This is a program that ended; `status` is 127 where there is no such program and 124 where it took too long."""

    status: int
    out: str
    err: str

    @property
    def ok(self) -> bool:
        return self.status == 0

    @property
    def complaint(self) -> str:
        """Return one line for a person: the last line of its complaint, else its exit status."""
        lines = (self.err or self.out).strip().splitlines()
        return lines[-1].strip() if lines else f"exit status {self.status}"


class Host:
    """This is the machine under `root`. Nothing here raises for a file that is not there or not readable."""

    def __init__(self, root: str = "/") -> None:
        self.root = Path(root)
        self._lent: tuple[int, ...] = ()

    @contextmanager
    def lending(self, descriptor: int) -> Iterator[None]:
        """Let programs that are run inside keep this descriptor open until they end, also when the agent is killed before."""
        self._lent = (descriptor,)
        try:
            yield
        finally:
            self._lent = ()

    def path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str | None:
        """Return the file's text, undecodable bytes replaced; None where it cannot be read."""
        try:
            return self.path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """List a folder, sorted; empty where there is no such folder."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.path(path))

    def link(self, path: str) -> str | None:
        """Return where a symbolic link points, unresolved; None where it is not a link."""
        try:
            return os.readlink(self.path(path))
        except OSError:
            return None

    def which(self, program: str) -> str | None:
        candidates = (f"{folder}/{program}" for folder in PATHS.split(":"))
        return next((path for path in candidates if os.path.isfile(path) and os.access(path, os.X_OK)), None)

    def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "", keep: Sequence[str] = ()) -> Done:
        """Run a program in the C locale, without a shell; it and all it started are gone when this returns.

        It gets the variables in `keep` as this process has them, and no other."""
        kept = {name: os.environ[name] for name in keep if name in os.environ}
        environment = {**kept, "PATH": PATHS, "LC_ALL": "C", "HOME": "/root"}
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
                encoding="utf-8",
                errors="replace",
                pass_fds=self._lent,
            )
        except OSError as error:
            return Done(NO_PROGRAM, "", f"{command[0]}: {error.strerror}")
        try:
            out, err = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired:
            _kill_group(process.pid)
            _reap(process)
            return Done(TIMED_OUT, "", f"{command[0]} did not end within {timeout:g} s")
        except BaseException:
            _kill_group(process.pid)
            _reap(process)
            raise
        return Done(process.returncode, out, err)

    def write(self, path: str, content: str, mode: int = 0o644) -> None:
        """Replace a file whole: a reader sees the old one or the new one, also after a crash. OSError."""
        self.write_bytes(path, content.encode("utf-8"), mode)

    def copy(self, source: str, path: str, mode: int = 0o644) -> None:
        """Do as `write` does with the bytes of `source`, which is a path of this process and not below the root. OSError."""
        self.write_bytes(path, Path(source).read_bytes(), mode)

    def write_bytes(self, path: str, content: bytes, mode: int) -> None:
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, content, mode)

    def put(self, path: str, value: str) -> None:
        """Write a value into a file of the kernel, which takes it in one write. OSError says why it does not."""
        # Not created where it is missing: a parameter that the kernel does not have must not become a file.
        descriptor = os.open(self.path(path), os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(descriptor, value.encode("ascii"))
        finally:
            os.close(descriptor)

    def remove(self, path: str) -> None:
        self.path(path).unlink()
        sync_folder(self.path(path).parent)


def _reap(process: subprocess.Popen[str]) -> None:
    """Wait for a killed program, but not for one that left its group with our pipes open, as daemons do, nor for one that
    hangs in the kernel, as on a file system whose server is gone, and cannot die."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(DIES_WITHIN_S)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with suppress(OSError):
                stream.close()


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, 9)
    except ProcessLookupError:
        return
