"""`fab train` on this machine: supervised, recorded in the run, and bit-identical to a run that nothing happened to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import PATIENT
from tests.lab.servers import S3Place
from tests.lab.training import ROOT, assert_equals_an_undisturbed_run, config
from tests.processes import children_of, wait_until
from tests.trainer.test_node_local import descendants, end
from trainer.checkpoint.lineage.lease import committed
from trainer.errors import EXIT_CONFIG, EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE
from trainer.run import journal
from trainer.storage import open_store

FAB = [f"{sys.prefix}/bin/fab", "-r", str(ROOT)]


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "LUSTRAIN_CLUSTER"}
    return {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **PATIENT}


def fab(folder: Path, *words: str, code: int = 0) -> Any:
    """What fab prints as JSON."""
    command = [*FAB, *words, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == code, (done.stdout, done.stderr)
    return json.loads(done.stdout)


def train(folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder / "config.toml").write_text(config("run", hold=f"{folder}/go"))
    command = [*FAB, "train", "config.toml", "--nproc", "2", *words]
    return subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)


def ranks_of(job: subprocess.Popen[str]) -> list[int]:
    return [rank for launcher in children_of(job.pid) for rank in children_of(launcher)]


@pytest.mark.slow
def test_a_killed_rank_costs_a_new_attempt_and_nothing_else(tmp_path: Path) -> None:
    job = train(tmp_path)
    store = open_store(f"{tmp_path}/run")
    try:
        wait_until(lambda: committed(store))
        os.kill(ranks_of(job)[1], signal.SIGKILL)
        (tmp_path / "go").touch()
        said = job.communicate(timeout=500)[1]
    finally:
        end([*descendants(job.pid), job.pid])
    assert job.returncode == 0, said
    assert "lustrain: the last launch ended with 1: starting again in" in said
    records = journal.read(store)
    first, second, last = records[0], records[1], records[-1]
    assert (first["code"], first["said"], first["blamed"]) == (1, "a rank was killed by SIGKILL", [])
    assert (last["code"], second["from_step"]) == (0, first["gained"])
    assert fab(tmp_path, "status", "run")["state"] == "done"
    assert {1, last["attempt"]} <= {line["launch"] for line in fab(tmp_path, "logs", "run", "--rank", "0")["lines"]}
    report = fab(tmp_path, "report", "run")
    seconds = report["seconds"]
    assert report["goodput"] == pytest.approx(seconds["progress"] / sum(seconds.values()), abs=1e-3)
    assert sum(seconds.values()) == pytest.approx(last["ended"] - first["started"], abs=0.01)
    assert seconds["progress"] > 0
    between = sum(after["started"] - before["ended"] for before, after in pairwise(records))
    assert seconds["between launches, after a failure"] == pytest.approx(between)
    page = (tmp_path / "report.md").read_text()
    assert "| between launches, after a failure | " in page
    assert "(report.png)" in page
    assert (tmp_path / "report.png").stat().st_size > 10_000
    assert_equals_an_undisturbed_run(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fab stop", "SIGINT"])
def test_stopped_run_commits_and_stays_stopped_until_resumed(tmp_path: Path, how: str) -> None:
    job = train(tmp_path, "--set", "train.steps=1000000")
    store = open_store(f"{tmp_path}/run")
    try:
        wait_until(lambda: committed(store))
        if how == "SIGINT":
            job.send_signal(signal.SIGINT)
        else:
            fab(tmp_path, "stop", "run")
        (tmp_path / "go").touch()
        assert job.wait(timeout=500) != EXIT_DONE
    finally:
        end([*descendants(job.pid), job.pid])
        job.communicate()
    found = fab(tmp_path, "status", "run")
    record = journal.read(store)[-1]
    if record["code"] == EXIT_REQUEUE:
        # A rank that is told once more while it leaves ends otherwise, though it has committed.
        assert found["state"] == ("stopped" if how == "fab stop" else "interrupted, with a checkpoint")
        assert found["step"] == found["committed_step"]
    taken = fab(tmp_path, "train", "config.toml", code=2)
    assert taken["error"][0].endswith("or go on with this run: --resume")
    steps = found["committed_step"] + 10
    more = ["train", "config.toml", "--nproc", "2", "--resume", "--set", f"train.steps={steps}"]
    assert fab(tmp_path, *more)["why"] == "all steps are done"
    assert journal.read(store)[-1]["code"] == EXIT_DONE


@pytest.mark.slow
def test_interrupted_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(config("sweep", hold=f"{tmp_path}/go", steps=120) + "[eval]\nevery = 60\n")
    words = ["sweep", "config.toml", "--nproc", "1", "--grid", "optimizer.lr=0.0001,0.1"]
    job = subprocess.Popen([*FAB, *words], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: list((tmp_path / "sweep").glob("*/manifests/*")))
        job.send_signal(signal.SIGINT)
        (tmp_path / "go").touch()
        said = job.communicate(timeout=500)[1]
    finally:
        end([*descendants(job.pid), job.pid])
    assert job.returncode == EXIT_REQUEUE, said
    state = {
        point["values"]["optimizer.lr"]: point["outcome"] for point in fab(tmp_path, "sweep-status", "sweep")["points"]
    }
    assert state == {"0.0001": "unfinished", "0.1": "not started"}
    done = fab(tmp_path, *words)
    best, other = done["points"]
    assert [(point["values"]["optimizer.lr"], point["state"], point["step"]) for point in (best, other)] == [
        ("0.1", "done", 120),
        ("0.0001", "done", 120),
    ]
    assert best["best_validation_loss"] < other["best_validation_loss"]
    assert [len(journal.read(open_store(point["run"]))) for point in (best, other)] == [1, 2]
    assert fab(tmp_path, *words) == done
    assert [len(journal.read(open_store(point["run"]))) for point in (best, other)] == [1, 2]


@pytest.mark.slow
def test_a_wrong_setting_is_one_attempt(tmp_path: Path) -> None:
    job = train(tmp_path, "--set", "task.nothing=1")
    said = job.communicate(timeout=500)[1]
    assert job.returncode == EXIT_CONFIG, said
    (record,) = journal.read(open_store(f"{tmp_path}/run"))
    assert record["said"].startswith("task.nothing = 1: unknown")


@pytest.mark.slow
def test_a_run_that_fails_at_once_is_tried_three_times(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no such device')\n")
    (tmp_path / "config.toml").write_text(config("run"))
    command = [*FAB, "train", "config.toml", "--set", "task.name=broken:Task", "--nproc", "1"]
    variables = {**environment(), "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=variables, timeout=500, check=False
    )
    records = journal.read(open_store(f"{tmp_path}/run"))
    assert done.returncode == records[-1]["code"] == EXIT_FAILURE, done.stderr
    assert len(records) == 3
    assert "3 launches in a row committed no more than their own start cost; the last error: " in done.stdout
    assert "no such device" in done.stdout


@pytest.mark.slow
def test_a_dry_run_shows_what_would_be_done_and_does_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(config("run"))
    shown = fab(tmp_path, "train", "config.toml", "--dry", "--nproc", "2")
    assert shown["commands"][0][1:4] == ["-m", "trainer.node.launcher", "--nproc"]
    assert list(shown["files"]) == [f"{tmp_path}/run/launch/config.toml"]
    slurm = fab(tmp_path, "train", "config.toml", "--dry", "--on", "slurm", "--nproc", "2")
    assert slurm["commands"] == [["sbatch", "--parsable", f"--chdir={tmp_path}"]]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train", "none.toml"], "CONFIG = 'none.toml': No such file or directory"),
        (["train", "config.toml", "--resume"], "--resume = '"),
        (["train", "config.toml", "--on", "slurm", "--nproc", "1"], "--on = 'slurm': there is no sbatch"),
        (["status", "nothing"], "RUN = '"),
        (["sweep", "config.toml", "--grid", "optimizer.lrr=1,2"], "optimizer.lrr = 1: unknown key"),
        (["sweep", "config.toml", "--grid", "optimizer.lr=1,2", "--at-once", "1"], "--at-once = 1: only valid with"),
        (["sweep-status", "nothing"], "SWEEP = '"),
        (["stop", "nothing"], "RUN = '"),
        (["report", "nothing"], "RUN = '"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path: Path, words: list[str], line: str) -> None:
    (tmp_path / "config.toml").write_text(config("run"))
    variables = {**environment(), "PATH": f"{sys.prefix}/bin"}
    command = [*FAB, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=variables, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (only,) = done.stderr.splitlines()
    assert only.startswith(line)
    files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert not [name for name in files if name != "config.toml" and ".lock" not in name]


@pytest.mark.slow
def test_a_run_in_s3_is_asked_for_trained_and_told_of_there(weed_s3: S3Place, tmp_path: Path) -> None:
    uri = f"s3://{weed_s3.bucket}/runs/first"
    (tmp_path / "config.toml").write_text(config(uri, steps=20))
    answer = fab(tmp_path, "train", "config.toml", "--nproc", "1")
    assert (answer["run"], answer["why"]) == (uri, "all steps are done")
    found = fab(tmp_path, "status", uri)
    assert (found["state"], found["step"], found["attempts"][0]["gained"]) == ("done", 20, 20)
    assert fab(tmp_path, "train", "config.toml", code=2)["error"][0].startswith("run.uri = 's3://")
