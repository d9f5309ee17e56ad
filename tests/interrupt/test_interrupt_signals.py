"""Signals in real processes: they set the flag, they do not kill, and afterwards everything is as it was."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.processes import pending, wait_until
from trainer.interrupt import Notice
from trainer.interrupt.signals import SignalFlag

HEAD = """
import os, select, signal, sys, time
from trainer.config import InterruptConfig
from trainer.interrupt import NoticeWatcher

def say(*words):
    print(*words, flush=True)

def wait_for_notice(watch):
    while watch.notice() is None:
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
watch = NoticeWatcher(InterruptConfig(poll_s=0.05, signal_grace_s=77.0))
watch.start()
began = time.monotonic()
say("ready")
notice = wait_for_notice(watch)
say(notice.source, notice.detail, began + 77 <= notice.deadline <= time.monotonic() + 77)
"""
    with child(body) as process:
        process.send_signal(sent)
        assert line(process) == f"signal {sent.name} True"
        assert process.wait(300) == 0


@pytest.mark.slow
def test_second_sigterm_in_a_save_kills_and_changes_nothing() -> None:
    body = """
watch = NoticeWatcher(InterruptConfig(poll_s=0.05))
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
        assert process.wait(300) == 0


def test_closing_restores_the_previous_handlers() -> None:
    body = """
signal.signal(signal.SIGUSR1, lambda number, frame: say("the previous handler"))
with NoticeWatcher(InterruptConfig(poll_s=0.05)) as watch:
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
        assert process.wait(300) == -signal.SIGTERM


@pytest.mark.slow
def test_the_grace_counts_from_the_arrival_even_in_native_code() -> None:
    body = """
import ctypes, threading
libc = ctypes.CDLL(None)
watch = NoticeWatcher(
    InterruptConfig(poll_s=3600.0, signal_grace_s=100.0),
    on_event=lambda kind, fields: say("heard", fields["detail"].partition(":")[0]),
)
watch.start()
# The signal lands on the helper thread: the main thread, where Python runs handlers, stays in its native call.
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
say("ready")
libc.read(0, ctypes.create_string_buffer(1), 1)
say(watch.notice().deadline <= time.monotonic() + 100)
"""
    with child(body) as process:
        process.send_signal(signal.SIGTERM)
        assert line(process) == "heard SIGTERM", "while the main thread reads"
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
        assert line(process) == "True"


def test_early_second_ctrl_c_is_same_a_later_one_skips_the_save() -> None:
    times = [100.0, 100.0, 100.5, 101.0, 101.1]
    flag = SignalFlag(60.0, lambda: times.pop(0))
    flag.install()
    try:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        assert flag.notice == Notice("signal", "SIGINT", 160.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        flag.close()


@pytest.mark.slow
def test_process_with_thousands_of_open_files_hears_a_signal() -> None:
    body = """
import resource, threading
threading.excepthook = lambda what: say("a thread ended:", what.exc_value)
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
with NoticeWatcher(InterruptConfig()) as watch:
    say("ready")
    say(wait_for_notice(watch).detail)
"""
    with child(body) as process:
        process.send_signal(signal.SIGTERM)
        assert line(process) == "SIGTERM"
