"""Today's code reads the run, journal and job of an earlier version: `earlier_run/README.md` says how they were made."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from launch import report, runs, status
from launch.flags import TrainFlags
from tests.launch.test_request import config, resolve
from trainer.errors import EXIT_REQUEUE
from trainer.run import journal
from trainer.storage import ObjectStore, open_store


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    folder = tmp_path / "run"
    shutil.copytree(Path(__file__).parent / "earlier_run", folder)
    for path in folder.rglob("*.json"):
        path.write_text(path.read_text().replace("/home/me", str(tmp_path)))
    return open_store(str(folder))


def test_status_shows_its_launch_and_job(store: ObjectStore) -> None:
    state = status.read(store, runs.read_record(store, journal.REQUEST))
    assert (state["on"], state["state"], state["step"], state["committed_step"]) == ("slurm", status.STOPPED, 25, 25)
    assert [(one["code"], one["gained"]) for one in state["attempts"]] == [(EXIT_REQUEUE, 25)]
    assert "job 7 of Slurm" in status.lines(state)
    assert state["submitted"]["slurm"]["log"].endswith("/run/launch/log")


def test_report_accounts_for_its_time(store: ObjectStore, tmp_path: Path) -> None:
    _, data = report.make(store, tmp_path / "report.md")
    (launch,) = data["attempts"]
    assert sum(data["seconds"].values()) == pytest.approx(launch["ended"] - launch["started"])
    assert (tmp_path / "report.md").exists()


def test_resume_registers_it_anew_and_its_launches_bind_nothing(store: ObjectStore, tmp_path: Path) -> None:
    request = resolve(TrainFlags("config.toml", nproc="1"), config(tmp_path), None, tmp_path)
    request = replace(request, run=str(tmp_path / "run"))
    runs.register_run(request, resume=True, files={})
    assert (journal.load_and_close_stale(store), journal.stopped(store)) == ([], False)
    assert journal.begin(store, ["n1"], "me") == 2
