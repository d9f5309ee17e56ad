"""Signals in real processes: they set the flag, they do not kill, and afterwards everything is as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import pending, wait_until

HEAD = """
import os, select, signal, sys, time
from trainer.config import InterruptConfig
from trainer.interrupt import Watch

def say(*words):
    print(*words, flush=True)

def wait_for_notice(watch):
    ends = time.monotonic() + 20
    while watch.notice() is None and time.monotonic() < ends:
        time.sleep(0.01)
    return watch.notice()
"""


@contextmanager
def child(body: str) -> Iterator[subprocess.Popen[str]]:
    """A process running HEAD and `body`, once it has printed `ready`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + body], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_becomes_a_notice_with_the_configured_grace(sent: signal.Signals) -> None:
    body = """
watch = Watch(InterruptConfig(poll_s=0.05, signal_grace_s=77.0))
watch.start()
say("ready")
notice = wait_for_notice(watch)
say(notice.source, notice.detail, 70 < notice.remaining(time.monotonic()) <= 77)
"""
    with child(body) as process:
        process.send_signal(sent)
        assert line(process) == f"signal {sent.name} True"
        assert process.wait(10) == 0


@pytest.mark.slow
def test_a_second_sigterm_during_the_save_neither_kills_nor_changes_the_notice() -> None:
    body = """
watch = Watch(InterruptConfig(poll_s=0.05))
watch.start()
say("ready")
first = wait_for_notice(watch)
say("saving")
sys.stdin.readline()
say(watch.notice() is first)
watch.close()
"""
    with child(body) as process:
        process.send_signal(signal.SIGTERM)
        assert line(process) == "saving"
        for sent in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            process.send_signal(sent)
            wait_until(lambda number=sent: not pending(process.pid, number))
        assert process.stdin is not None
        process.stdin.write("saved\n")
        process.stdin.flush()
        assert line(process) == "True"
        assert process.wait(10) == 0


def test_closing_restores_the_previous_handlers() -> None:
    body = """
signal.signal(signal.SIGUSR1, lambda number, frame: say("the previous handler"))
with Watch(InterruptConfig(poll_s=0.05)) as watch:
    os.kill(os.getpid(), signal.SIGUSR1)
    say("ready")
    assert watch.notice() is not None
os.kill(os.getpid(), signal.SIGUSR1)
say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.set_wakeup_fd(-1) == -1)
sys.stdin.readline()
"""
    with child(body) as process:
        assert line(process) == "the previous handler"
        assert line(process) == "True True"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM


@pytest.mark.slow
def test_the_grace_counts_from_the_arrival_even_if_the_main_thread_is_deep_in_native_code() -> None:
    body = """
import ctypes, threading
libc = ctypes.CDLL(None, use_errno=True)
class Span(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]
watch = Watch(InterruptConfig(poll_s=5.0, signal_grace_s=100.0))
watch.start()
# The signal lands on the helper thread: the main thread, where Python runs handlers, stays in its native call.
helper = threading.Thread(target=time.sleep, args=(30,), daemon=True)
helper.start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
say("ready")
libc.nanosleep(ctypes.byref(Span(1, 0)), None)
left = watch.notice().remaining(time.monotonic())
say(left < 99.6)
"""
    with child(body) as process:
        # clock_nanosleep(2), which nanosleep(3) calls, on x86-64 and on arm64.
        wait_until(lambda: Path(f"/proc/{process.pid}/syscall").read_text().split()[0] in ("230", "115"))
        os.kill(process.pid, signal.SIGTERM)
        assert line(process) == "True"


def test_reading_the_flag_is_cheap() -> None:
    from trainer.config import InterruptConfig
    from trainer.interrupt import Watch

    watch = Watch(InterruptConfig(poll_s=60.0))
    best = min(_seconds_per_read(watch) for _ in range(5))
    watch.close()
    assert best < 20e-6


def _seconds_per_read(watch: object) -> float:
    began = time.perf_counter()
    for _ in range(1000):
        watch.notice()  # type: ignore[attr-defined]
    return (time.perf_counter() - began) / 1000


@pytest.mark.slow
def test_a_signal_is_heard_by_a_process_with_thousands_of_open_files() -> None:
    body = """
import resource, threading
threading.excepthook = lambda what: say("a thread ended:", what.exc_value)
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
with Watch(InterruptConfig()) as watch:
    say("ready")
    say(wait_for_notice(watch).detail)
"""
    with child(body) as process:
        process.send_signal(signal.SIGTERM)
        assert line(process) == "SIGTERM"
