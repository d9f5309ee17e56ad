"""Objects as files in a folder: whole or absent, durable when a call returns, safe against other processes on the folder."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from awscrt.checksums import crc64nvme as crc64nvme_of

from lustrain.problem import UserError, problem
from lustrain.progress import BYTES, amount_text
from trainer.storage import (
    CorruptObjectError,
    ObjectInfo,
    ObjectMissingError,
    ObjectStore,
    PreconditionError,
    RefusedError,
    StorageError,
)
from trainer.storage.direct import write_direct
from trainer.storage.folder import Folder, sync_folder
from trainer.storage.keys import PRIVATE, check_key

COPY_BYTES = 1 << 20
"""Bytes per read, checksum and write: small enough that all three find them in the cache."""
READ_SLICE_BYTES = 16 << 20
READ_THREADS = 4
HASHED_BYTES = 1 << 20
"""Objects up to this size have a content hash as etag; larger ones are immutable and known by inode, size and time."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class LocalStore(ObjectStore):
    """A folder given as a path or a `file://` URI; `create=False` never makes the folder and never asks for write access.

    `name` is as in `open_store`.
    """

    def __init__(self, uri: str, *, create: bool = True, name: str = "store") -> None:
        self.uri = uri
        self.root = _folder_of(uri, name)
        self._folder = Folder(self.root)
        if create:
            _make_root(self.root, uri, name)
        elif not self.root.is_dir():
            why = "is not a folder" if self.root.exists() else "there is no such folder"
            raise UserError(problem(name, uri, why, fix="check the path, or whether its file system is mounted"))

    def read(self, key: str) -> tuple[bytes, str]:
        with self._reading(key):
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                body = file.read()
                return body, _etag(os.fstat(fd), body)

    def read_into(self, key: str, buffer: memoryview, offset: int = 0) -> None:
        view = buffer.cast("B")
        with self._reading(key):
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.fstat(fd).st_size
                if size < offset + len(view):
                    why = f"holds {size} bytes where {offset + len(view)} were expected"
                    raise CorruptObjectError(problem("object", self._shown(key), why))
                self._fill(fd, key, view, offset)
            finally:
                os.close(fd)

    def put(self, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        target = self._path(key)
        with self._writing(key, len(body)), self._folder.unfinished() as (fd, tmp):
            _write_all(fd, memoryview(body))
            os.fsync(fd)
            etag = _etag(os.fstat(fd), body)
            if if_absent:
                self._link(tmp, target, key)
            else:
                with self._folder.locked():
                    if if_match is not None:
                        self._require(key, if_match)
                    self._folder.into_place(target, lambda: os.replace(tmp, target))
        return etag

    def put_file(self, key: str, path: str, size: int, crc64nvme: int) -> None:
        target = self._path(key)
        with self._writing(key, size):
            self._preflight(size)
            with open(path, "rb", buffering=0) as source, self._folder.unfinished() as (fd, tmp):
                copied, crc = _copy(source.fileno(), fd, size)
                if copied < size:
                    why = f"{path} ends at byte {copied}, {size} bytes were expected"
                    raise CorruptObjectError(problem("object", self._shown(key), why))
                if crc != crc64nvme:
                    why = f"{path} has checksum {crc:016x}, {crc64nvme:016x} was expected"
                    raise CorruptObjectError(problem("object", self._shown(key), why))
                os.fsync(fd)
                with self._folder.locked():
                    self._folder.into_place(target, lambda: os.replace(tmp, target))

    def stat(self, key: str) -> ObjectInfo:
        with self._reading(key):
            return _info(key, self._path(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        if folder and any(segment in ("", ".", "..") for segment in folder.split("/")):
            return
        for key in _walk(self.root / folder, f"{folder}/" if folder else "", prefix):
            try:
                with self._reading(key):
                    info = _info(key, self.root / key)
            except ObjectMissingError:
                continue
            yield info

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        target = self._path(key)
        with self._writing(key, 0), self._folder.locked():
            if if_match is not None:
                self._require(key, if_match)
            try:
                target.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            sync_folder(target.parent)
            self._folder.remove_emptied(target.parent)

    def now(self) -> float:
        with self._writing("", 0), self._folder.unfinished() as (fd, _):
            os.utime(fd)
            return os.fstat(fd).st_mtime

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _shown(self, key: str) -> str:
        return f"{self.uri.rstrip('/')}/{key}" if key else self.uri

    def _fill(self, fd: int, key: str, view: memoryview, offset: int) -> None:
        starts = range(0, len(view), READ_SLICE_BYTES)

        def fill(start: int) -> None:
            part = view[start : start + READ_SLICE_BYTES]
            done = 0
            while done < len(part):
                count = os.preadv(fd, [part[done:]], offset + start + done)
                if count == 0:
                    why = f"ended at byte {offset + start + done} while it was read"
                    raise CorruptObjectError(problem("object", self._shown(key), why))
                done += count

        if len(starts) <= 1:
            for start in starts:
                fill(start)
            return
        with ThreadPoolExecutor(min(READ_THREADS, len(starts))) as pool:
            for _ in pool.map(fill, starts):
                pass

    def _require(self, key: str, if_match: str) -> None:
        try:
            current = _info(key, self.root / key).etag
        except (FileNotFoundError, NotADirectoryError):
            current = None
        if current != if_match:
            why = "was removed since it was read" if current is None else "was replaced since it was read"
            raise PreconditionError(problem("object", self._shown(key), why))

    def _link(self, tmp: Path, target: Path, key: str) -> None:
        try:
            self._folder.into_place(target, lambda: os.link(tmp, target))
        except FileExistsError as error:
            raise PreconditionError(problem("object", self._shown(key), "exists already")) from error
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            # Every replacing call holds the lock, so looking first is as good as linking where links do not exist.
            with self._folder.locked():
                if target.exists():
                    raise PreconditionError(problem("object", self._shown(key), "exists already")) from error
                self._folder.into_place(target, lambda: os.replace(tmp, target))

    def _preflight(self, size: int) -> None:
        free = _free_bytes(self.root)
        if size > free:
            raise RefusedError(_no_space(self.root, size, free))

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectMissingError(problem("object", self._shown(key), "there is no such object")) from error
        except OSError as error:
            raise _failure(error, self._shown(key)) from error

    @contextmanager
    def _writing(self, key: str, size: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise RefusedError(_no_space(self.root, size, _free_bytes(self.root))) from error
            raise _failure(error, self._shown(key)) from error


def _folder_of(uri: str, name: str) -> Path:
    allowed = "a folder, file:///folder or s3://bucket/prefix"
    if "\0" in uri or not uri:
        raise UserError(problem(name, uri, "is not a path", allowed=allowed))
    if "://" not in uri:
        return Path(uri).expanduser().absolute()
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path:
        raise UserError(problem(name, uri, "is an unknown kind of URI", allowed=allowed))
    return Path(unquote(parts.path)).absolute()


def _make_root(root: Path, uri: str, name: str) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        at = next(p for p in (root, *root.parents) if p.exists() and not p.is_dir())
        raise UserError(
            problem(name, uri, f"{at} is a file, a folder is needed", fix="choose a different path")
        ) from error
    except OSError as error:
        why = f"cannot make the folder: {os.strerror(error.errno or errno.EIO)}"
        raise UserError(problem(name, uri, why, fix="make it, or choose a place that you may write to")) from error
    if not os.access(root, os.W_OK | os.X_OK):
        raise UserError(problem(name, uri, "the folder is not writable", fix="change its permissions or its mount"))


def _failure(error: OSError, shown: str) -> StorageError:
    why = os.strerror(error.errno) if error.errno else str(error)
    if error.filename and not shown.endswith(str(error.filename)):
        why += f" ({error.filename})"
    for_the_user = {
        errno.EACCES: "check the permissions",
        errno.EPERM: "check the permissions",
        errno.EROFS: "mount it writable or choose a different place",
        errno.ENOTDIR: "a part of the path is a file; choose a different path",
        errno.EISDIR: "a folder has the object's name; move it away",
    }
    for_the_disk = {
        errno.ESTALE: "the network file system lost the folder; mount it again",
        errno.EIO: "the disk or its server fails; see the kernel log",
    }
    number = error.errno or 0
    line = problem("object", shown, why, fix=for_the_user.get(number) or for_the_disk.get(number, ""))
    return RefusedError(line) if number in for_the_user else StorageError(line)


def _free_bytes(folder: Path) -> int:
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def _no_space(root: Path, needed: int, free: int) -> str:
    why = f"no space left: {amount_text(needed, BYTES)} needed, {amount_text(free, BYTES)} free"
    return problem("folder", str(root), why, fix="free space there, or keep fewer checkpoints")


def _etag(state: os.stat_result, body: bytes) -> str:
    if len(body) <= HASHED_BYTES:
        return hashlib.blake2b(body, digest_size=16).hexdigest()
    return f"{state.st_ino:x}-{state.st_size:x}-{state.st_mtime_ns:x}"


def _info(key: str, path: Path) -> ObjectInfo:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        state = os.fstat(fd)
        return ObjectInfo(key, state.st_size, _etag(state, file.read(HASHED_BYTES + 1)), state.st_mtime)


def _walk(folder: Path, below: str, prefix: str) -> Iterator[str]:
    """Yield keys of the files under `folder` (whose own key is `below`) that begin with `prefix`, in key order."""
    try:
        with os.scandir(folder) as entries:
            names = [(e.name, e.is_dir(follow_symlinks=False), e.is_file()) for e in entries]
    except (FileNotFoundError, NotADirectoryError):
        return
    for name, is_folder, is_file in sorted(names, key=lambda n: n[0] + "/" * n[1]):
        key = below + name
        if key == PRIVATE:
            continue
        if is_folder and (f"{key}/".startswith(prefix) or prefix.startswith(f"{key}/")):
            yield from _walk(folder / name, f"{key}/", prefix)
        elif is_file and key.startswith(prefix):
            yield key


def _copy(source: int, target: int, size: int) -> tuple[int, int]:
    """Copy up to `size` bytes; return their number and their CRC-64/NVME, computed while they are in the cache."""
    direct = write_direct(source, target, size)
    if direct is not None:
        return size, direct
    os.ftruncate(target, 0)
    chunk = memoryview(bytearray(min(COPY_BYTES, size)))
    crc = done = 0
    while done < size:
        count = os.preadv(source, [chunk[: size - done]], done)
        if count == 0:
            break
        crc = crc64nvme_of(chunk[:count], crc)
        _write_all(target, chunk[:count])
        done += count
    return done, crc


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]
