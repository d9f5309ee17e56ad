"""A thread that the training relies on does not die in silence: its defect is raised where the training asks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.stores import Asking
from trainer.checkpoint.lineage.fence import Fence
from trainer.checkpoint.lineage.lease import Lease
from trainer.config import InterruptConfig
from trainer.interrupt import NoticeWatcher
from trainer.metrics import RunLog


class Defect(Exception):
    """What nobody foresaw."""


@pytest.fixture
def met() -> threading.Event:
    return threading.Event()


def broken(met: threading.Event) -> Callable[..., None]:
    """What ends whoever calls it with a defect, after it has set `met`."""

    def fail(*_: object) -> None:
        met.set()
        raise Defect("broken")

    return fail


def test_defect_of_the_lease_watcher_is_raised_in_the_loop(tmp_path: Path, met: threading.Event) -> None:
    store = Asking(str(tmp_path), lambda request, key: None)
    lease = Lease.acquire(store, "me")
    store.before = broken(met)
    fence = Fence(lease, 0.001, lambda kind, fields: None)
    assert met.wait(300)
    fence.close()
    with pytest.raises(Defect):
        _ = fence.lost


def test_defect_of_the_notice_watcher_is_raised_in_the_loop(met: threading.Event) -> None:
    config = InterruptConfig(deadline="2100-01-01T00:00:00Z", poll_s=0.001)
    with NoticeWatcher(config, wall_clock=broken(met)) as watch:
        assert met.wait(300)
    with pytest.raises(Defect):
        watch.notice()


def test_defect_of_log_thread_ends_the_next_step_records_stay(tmp_path: Path, met: threading.Event) -> None:
    store = Asking(str(tmp_path), broken(met))
    told: list[str] = []
    log = RunLog(store, 1, 60.0, on_trouble=told.append)
    log.step({"step": 1, "loss": 0.5})
    assert not log.flush(timeout=600.0), "it waits for nobody"
    assert not log.flush_step(2, timeout=600.0), "that is to come neither"
    with pytest.raises(Defect):
        log.step({"step": 2, "loss": 0.5})
    log.close(timeout=600.0)
    (line,) = told
    assert "1 log records are not in" in line
    assert "Defect('broken')" in line
    folder = Path(line.rpartition("they are kept in ")[2])
    assert b'"step":1' in b"".join(path.read_bytes() for path in folder.iterdir())
