"""Promises of the writer process: small, quick to start, never in the way of a signal, and gone when its trainer is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saving import JOB_SIGNALS, PATIENCE_S, Events, checkpointer, stopped, writer_pid
from tests.processes import alive, wait_until
from trainer.storage import open_store

PARENT = """
import sys, time
from trainer.checkpoint.save.child import WriterProcess
writer = WriterProcess()
writer.start()
print(writer.pid, flush=True)
time.sleep(600)
"""


def test_the_writer_loads_neither_torch_nor_pydantic() -> None:
    names = "[name for name in sys.modules if name.partition('.')[0] in ('torch', 'pydantic', 'numpy', 'boto3')]"
    run = [sys.executable, "-c", f"import trainer.checkpoint.save.writer, sys; print({names})"]
    assert subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip() == "[]"


def test_the_writer_is_ready_in_half_a_second_of_processor_time() -> None:
    before = os.times()
    subprocess.run([sys.executable, "-m", "trainer.checkpoint.save.writer", "0", "0"], check=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert 0 < used < 0.5


def test_writer_ends_with_its_trainer_even_when_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not alive(pid))


def test_signals_for_the_job_do_not_end_a_save(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    with checkpointer(store, Events()) as saver:
        pid = writer_pid()
        assert os.getpgid(pid) != os.getpgid(0), "Ctrl-C goes to the group of the trainer"
        with stopped(pid):
            saver.save(1, {"x": torch.ones(10)}, {}, {})
            for number in JOB_SIGNALS:
                os.kill(pid, number)
        assert [outcome.committed for outcome in saver.wait(PATIENCE_S)] == [True]
        assert writer_pid() == pid


@pytest.mark.slow
def test_writer_that_hangs_is_killed_after_its_time_and_replaced(tmp_path: Path) -> None:
    store, events = open_store(str(tmp_path / "run")), Events()
    with checkpointer(store, events, vote_timeout_s=0.2) as saver:
        pid = writer_pid()
        os.kill(pid, signal.SIGSTOP)
        saver.save(1, {"x": torch.ones(10)}, {}, {})
        (hung,) = saver.wait(PATIENCE_S)
        assert not hung.committed
        assert "no answer" in hung.detail
        wait_until(lambda: writer_pid() != pid)
        assert not alive(pid)
    assert len(events.of("writer_restarted")) == 1
