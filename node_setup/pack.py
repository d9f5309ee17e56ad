"""The packed agent: one file with the agent and its settings for any Python since 3.9, the same bytes on every machine.

`python -m node_setup.pack [TARGET]` packs by hand and prints the path and its SHA-256.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
import zipfile
from pathlib import Path

from lustrain.files import write_whole
from lustrain.problem import FAILED, UserError
from node_setup.agent.settings import catalog, data

FOLDER = Path(__file__).resolve().parent
BUILD = FOLDER.parent / ".build"
NAME = "node_setup.pyz"
GROUND = tuple(f"lustrain/{name}.py" for name in ("__init__", "files", "problem", "status"))
"""The agent needs these files of the ground floor."""
LARGEST = 200_000
"""The packed agent has at most so many bytes. It goes to every node over SSH in one round trip, and into the lifecycle
bundle."""

_DOCSTRING = re.compile(rb'^( *)"""[^"\n][^"]*"""$', re.MULTILINE)
"""A string that is a statement of its own. One that only ends in such a line has nothing behind its first quotes there."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
_UNIX = 3


def content() -> dict[str, bytes]:
    """Return every file of the archive by its name in it. UserError where the settings are not right."""
    sources = sorted((FOLDER / "agent").rglob("*.py"))
    files = {f"node_setup/{path.relative_to(FOLDER).as_posix()}": path.read_bytes() for path in sources}
    files["__main__.py"] = files.pop("node_setup/agent/__main__.py")
    files["node_setup/__init__.py"] = (FOLDER / "__init__.py").read_bytes()
    for name in GROUND:
        files[name] = (FOLDER.parent / name).read_bytes()
    files = {name: without_docstrings(text) for name, text in files.items()}
    tables = data.tables()
    catalog.parse(tables)
    files[f"node_setup/{data.PACKED}"] = json.dumps(tables, sort_keys=True, separators=(",", ":")).encode()
    return files


def without_docstrings(source: bytes) -> bytes:
    """Return the source with empty docstrings, which are a fifth of it; its lines keep their numbers."""
    return _DOCSTRING.sub(lambda match: match[1] + b'""' + b"\n" * match[0].count(b"\n"), source)


def archive() -> bytes:
    """Return the packed agent; UserError. Its bytes follow from the sources alone: names sorted, times and modes fixed.

    It is compressed by zlib at its best level; a Python that is built with another library than zlib may compress otherwise.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, text in sorted(content().items()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system = _UNIX
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(entry, text, compresslevel=9)
    packed = buffer.getvalue()
    if len(packed) > LARGEST:
        raise UserError(
            f"the packed agent has {len(packed)} bytes; allowed: {LARGEST}; fix: take something out of it", FAILED
        )
    return packed


def pack(target: Path) -> str:
    """Write the packed agent, unless it is there already, and return its SHA-256 in hexadecimal. OSError."""
    packed = archive()
    if not target.exists() or target.read_bytes() != packed:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, packed)
    return hashlib.sha256(packed).hexdigest()


def pack_checkout() -> Path:
    """Return the packed agent of this checkout, as new as its sources, in a folder that git ignores."""
    target = BUILD / NAME
    pack(target)
    return target


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else BUILD / NAME
    print(f"{pack(where)}  {where}")
