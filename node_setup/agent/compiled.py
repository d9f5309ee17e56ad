"""The agent's modules compiled for one Python, kept until the next boot: compiling is a third of a pass without changes.

Python keeps no bytecode of what it imports from an archive. So this is a second archive, of bytecode, that `__main__` puts
first on the path. Its name holds the digest of the agent that it was made of and the Python that it is for: no other agent and
no other Python looks at it. As it can be made again at any time it lies below /run, and no state of the node depends on it.
"""

from __future__ import annotations

import io
import os
from importlib.util import MAGIC_NUMBER, source_hash
from marshal import dumps

from node_setup.agent.host import Host
from node_setup.agent.wire.identity import Identity

_UNCHECKED = (1).to_bytes(4, "little")
"""These flags mark bytecode that Python does not check against its source (PEP 552)."""


def keep(identity: Identity) -> str | None:
    """Store the archive unless it is there, and return its name if it is new. OSError where it cannot be stored."""
    if identity.path is None or identity.compiled is None or os.path.exists(identity.compiled):
        return None
    Host().write_bytes(identity.compiled, _archive(identity.path), 0o644)
    return identity.compiled


def _archive(path: str) -> bytes:
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith(".py"):
                code = compile(content, f"{path}/{name}", "exec", dont_inherit=True)
                target.writestr(f"{name}c", MAGIC_NUMBER + _UNCHECKED + source_hash(content) + dumps(code))
            else:
                target.writestr(name, content)
    return buffer.getvalue()
