"""Compiles the modules that training imports from a folder of packages, and no others: bytecode.py FOLDER."""

from __future__ import annotations

import json
import py_compile
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

IMPORTED = ("torch", "torch.distributed", "torch.distributed.fsdp", "torch.nn.parallel", "torch.optim")
PROCESSES = 4
"""It is not the number of cores: see below."""
_LIST = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
print(json.dumps(sorted({str(getattr(module, "__file__", "")) for module in list(sys.modules.values())})))
"""


def main(folder: str) -> None:
    command = [sys.executable, "-B", "-W", "ignore", "-c", _LIST, folder, *IMPORTED]
    loaded = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    root = Path(folder)
    files = [name for name in loaded if root in Path(name).parents and name.endswith(".py")]
    # Which objects of a module are marked as shared depends on what else the compiling process holds: each has nothing but
    # its part of the files, the same part on every machine.
    parts = [files[number::PROCESSES] for number in range(PROCESSES)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(_apart, parts))


def _apart(files: list[str]) -> None:
    subprocess.run([sys.executable, "-B", __file__], input=json.dumps(files), text=True, check=True)


def compile_all(files: list[str]) -> None:
    for file in files:
        parts = Path(file).parts
        # Where it will lie in the image; unchecked, because a time stamp in the file would make every build another one.
        shown = Path("/", *parts[parts.index("opt") :])
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(file, dfile=str(shown), doraise=True, invalidation_mode=mode)


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        compile_all(json.load(sys.stdin))
