"""What becomes of a process whose parent dies without a word: killed, or out of memory. Linux only, like the trainer."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import MutableMapping

from lustrain.problem import UserError, problem

LAUNCHER = "LUSTRAIN_LAUNCHER"
"""Variable with the process id of the launcher that a rank must not outlive; the rank takes it out of its environment."""

_PR_SET_PDEATHSIG = 1
"""https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html: the parent is the *thread* that started the process."""
_POLL_S = 0.5
_launcher: int | None = None


def end_with(parent: int) -> bool:
    """Have the kernel kill this process when `parent` ends; False when it has ended already, and the caller must end itself.

    Call it on the main thread: the kernel keeps the wish for the calling thread.
    """
    _at_parents_end(signal.SIGKILL)
    return os.getppid() == parent


def end_with_launcher(environ: MutableMapping[str, str] = os.environ) -> bool:
    """The same for the launcher in the environment; True where there is none. UserError."""
    global _launcher
    said = environ.pop(LAUNCHER, None)
    if said and not said.isdecimal():
        raise UserError(problem(LAUNCHER, said, "is not a process id", fix=f"unset {LAUNCHER}: the launcher sets it"))
    _launcher = int(said) if said else None
    return _launcher is None or end_with(_launcher)


def save_when_alone(grace_s: float) -> None:
    """From now on the launcher's end is a SIGTERM, on which training saves and stops; SIGKILL follows `grace_s` seconds later.

    Call it on the main thread, once this process listens for SIGTERM. The end is needed since a rank may wait for another for
    ever. Does nothing without a launcher.
    """
    if _launcher is not None:
        _at_parents_end(signal.SIGTERM)
        watch = threading.Thread(target=_end_when_alone, args=(_launcher, grace_s), name="launcher-watch", daemon=True)
        watch.start()


def _end_when_alone(parent: int, grace_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)


def _at_parents_end(number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
