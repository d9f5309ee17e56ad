"""`python -m trainer`: train, tokenize, checkpoints, plot, sample. Imports of a subcommand happen only when it runs."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import NoReturn

from lustrain.problem import UserError
from lustrain.process import die_with_launcher, ignore_closed_stdout
from trainer import __version__
from trainer.environment import report_error
from trainer.errors import EXIT_FAILURE

NOTICES = (signal.SIGTERM, signal.SIGUSR1)
COMMANDS = {
    "train": ("trainer.train", "train a model, or go on where the run stopped"),
    "tokenize": ("trainer.data.tokenize.cli", "turn text into memory-mapped token shards"),
    "checkpoints": ("trainer.checkpoint.cli", "list, verify, prune or export a run's checkpoints"),
    "plot": ("trainer.metrics.plot", "draw a run's loss, throughput and interruptions"),
    "sample": ("trainer.run.sample", "let a trained language model continue a prompt"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; a user's mistake is printed as plain lines."""
    # Else torch prints a page of C++ frames for what the trainer says in one line: that another rank is gone.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m trainer", description="Train on spot capacity and never lose work."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    try:
        for name, (module, purpose) in COMMANDS.items():
            command = commands.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
            if words[:1] == [name]:
                importlib.import_module(module).add_arguments(command)
        args = parser.parse_args(words)
        return int(importlib.import_module(COMMANDS[args.command][0]).run(args))
    except UserError as error:
        return _print_error(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _print_error(error: UserError) -> int:
    """Print it, where all ranks know it alike on one rank of a node; the exit code."""
    report_error(error.problems[0])
    if error.everywhere or os.environ.get("LOCAL_RANK", "0") == "0":
        print(error, file=sys.stderr)
    return error.exit_code


def report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's own traceback, and its last line for the launcher."""
    report_error(f"{kind.__name__}: {error}".partition("\n")[0])
    sys.__excepthook__(kind, error, trace)


def hold_notices(words: Sequence[str]) -> None:
    """Have SIGTERM and SIGUSR1 wait until training listens (`trainer.interrupt`), instead of ending it while torch is loaded:
    a launcher would take that for a failure, and the ranks that were faster would wait for this one."""
    held = words[:1] == ["train"]
    signal.pthread_sigmask(signal.SIG_BLOCK if held else signal.SIG_UNBLOCK, NOTICES)
    # The parent of this process may have blocked it (`trainer.node.launcher`).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    if held:
        # Training puts these back when it ends: a notice that comes then asks for what has just been done. Not SIG_IGN, which
        # would drop one that waits already.
        for notice in NOTICES:
            signal.signal(notice, let_pass)


def let_pass(number: int, frame: FrameType | None) -> None:
    """Do nothing about a signal."""


def exit_now(code: int) -> NoReturn:
    """End at once with this code, once everything is closed and written.

    Python's own end would first walk over all objects of torch, a second of a processor's time, in which a signal kills
    the process again.
    """
    # A second Ctrl-C asks for what has been done, too.
    signal.signal(signal.SIGINT, let_pass)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # Of a descriptor that was closed before the start there is no stream.
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    ignore_closed_stdout()
    try:
        if not die_with_launcher():
            sys.exit(EXIT_FAILURE)
    except UserError as mistake:
        sys.exit(_print_error(mistake))
    sys.excepthook = report_uncaught
    hold_notices(sys.argv[1:])
    ended = main()
    if sys.argv[1:2] == ["train"]:
        exit_now(ended)
    sys.exit(ended)
