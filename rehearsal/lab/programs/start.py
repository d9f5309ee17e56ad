"""The start of every stand-in program: finds the one by whose name it was called."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from .state import VOLATILE, Refusal

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./-_")
"""What a word may be made of that a shell reads as it stands (shlex.quote)."""


def run() -> None:
    """Run the module named as the program: `nvidia-smi` is nvidia_smi.main(arguments)."""
    name = Path(sys.argv[0]).name
    calls = VOLATILE / "calls"
    calls.mkdir(parents=True, exist_ok=True)
    with open(calls / name, "a") as log:
        log.write(" ".join(map(_quoted, [name, *sys.argv[1:]])) + "\n")
    module = import_module(f".{name.replace('-', '_').replace('.', '_')}", __package__)
    _end(module.main)


def _quoted(word: str) -> str:
    if word and not set(word) - _PLAIN:
        return word
    # Takes longer to import than most programs here run.
    from shlex import quote

    return quote(word)


def boot() -> None:
    _end(import_module(".boot", __package__).main)


def _end(main: object) -> None:
    assert callable(main)
    try:
        sys.exit(main(sys.argv[1:]))
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        sys.exit(refusal.status)
    except BrokenPipeError:
        sys.exit(1)
