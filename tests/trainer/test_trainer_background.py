"""A thread that the training relies on does not die in silence: its defect is raised where the training asks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from trainer.checkpoint.lineage.fence import Fence
from trainer.checkpoint.lineage.lease import Lease
from trainer.config import InterruptConfig
from trainer.interrupt import Watch
from trainer.metrics import RunLog
from trainer.storage.local import LocalStore


class Defect(Exception):
    """What nobody foresaw."""


class Defective(LocalStore):
    """A store whose every request ends with a defect once `broken` is set; `met` is set by the first."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.broken = False
        self.met = threading.Event()

    def put(self, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        self._fail()
        return super().put(key, body, if_absent=if_absent, if_match=if_match)

    def read(self, key: str) -> tuple[bytes, str]:
        self._fail()
        return super().read(key)

    def _fail(self) -> None:
        if self.broken:
            self.met.set()
            raise Defect("broken")


def test_a_defect_of_the_thread_that_watches_the_lease_is_raised_where_the_loop_asks(tmp_path: Path) -> None:
    store = Defective(str(tmp_path))
    lease = Lease.take(store, "me")
    store.broken = True
    fence = Fence(lease, 0.001, lambda kind, fields: None)
    assert store.met.wait(300)
    fence.close()
    with pytest.raises(Defect):
        _ = fence.lost


def test_a_defect_of_the_thread_that_looks_for_notices_is_raised_where_the_loop_asks() -> None:
    met = threading.Event()

    def clock() -> float:
        met.set()
        raise Defect("broken")

    watch = Watch(InterruptConfig(deadline="2100-01-01T00:00:00Z", poll_s=0.001), wall_clock=clock)
    with watch:
        assert met.wait(300)
    with pytest.raises(Defect):
        watch.notice()


def test_a_defect_of_the_thread_that_stores_the_log_ends_the_next_step_and_leaves_the_records(tmp_path: Path) -> None:
    store = Defective(str(tmp_path))
    told: list[str] = []
    log = RunLog(store, 1, 60.0, on_trouble=told.append)
    store.broken = True
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
