"""The local launcher hands on what a scheduler needs: one exit code that means something."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lustrain.problem import UserError
from tests.fork_server import PATIENT
from tests.processes import alive, children_of, wait_until
from tests.trainer.tiny_runs import write_config
from trainer.checkpoint.lineage.lease import committed, read_lease
from trainer.errors import EXIT_DONE, EXIT_PEERS, EXIT_REQUEUE, job_exit_code
from trainer.metrics.reader import read_events
from trainer.node import launcher
from trainer.node.launcher import LOOPBACK, Placement, main
from trainer.storage import open_store


@pytest.mark.parametrize(
    ("codes", "job"),
    [
        ([0, 0], 0),
        ([85, 85], 85),
        ([0, 85], 85),
        ([86, 86], 86),
        ([-9, 86], 86),
        ([2, -15], 2),
        ([-9, -9], 1),
        ([-9, 85], 1),
        ([1, -15], 1),
        ([3, 85], 3),
        ([0, 75], 75),
        ([85, 75], 75),
        ([75, 3], 3),
        ([75, -9], 1),
        ([75, 2], 2),
        ([75, 86], 86),
    ],
)
def test_the_job_ends_with_the_most_telling_code(codes: list[int], job: int) -> None:
    assert job_exit_code(codes) == job


def test_ranks_meet_on_loopback_and_the_users_thread_count_wins() -> None:
    environment = Placement(2, (LOOPBACK, 1234)).environments({"OMP_NUM_THREADS": "7"})[1]
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("1", "2")
    assert environment["OMP_NUM_THREADS"] == "7"


@pytest.mark.slow
def test_a_rank_that_the_launcher_kills_is_not_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "GRACE_S", 0.1)
    job = launcher.LocalJob(["--version"], 2)
    assert [rank.wait() for rank in job.ranks] == [0, 0]
    job.ranks = [subprocess.Popen(["sh", "-c", line]) for line in ("exit 75", "sleep 600")]
    assert job.wait() == EXIT_PEERS


def test_no_ranks_is_a_mistake_in_one_line() -> None:
    with pytest.raises(UserError, match="--nproc = 0"):
        main(["--nproc", "0", "--", "train", "x.toml"])


CHILD = """
import signal, sys, threading, time, types
from lustrain import process
assert process.die_with_launcher()
told = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: (print("told to stop", flush=True), told.set()))
if sys.argv[1] == "training":
    # Its grace lasts until it has heard.
    process.time = types.SimpleNamespace(sleep=lambda seconds: told.wait() if seconds == 0.1 else time.sleep(seconds))
    process.signal_when_orphaned(0.1)
print("listening", flush=True)
while True:
    time.sleep(0.05)
"""
LAUNCHER = """
import os, subprocess, sys, time
environment = {**os.environ, "LUSTRAIN_LAUNCHER": str(os.getpid())}
print(subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env=environment).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "last_words"), [("starting", ""), ("training", "told to stop\n")])
def test_rank_left_alone_ends_and_hears_of_it_where_it_can_save(phase: str, last_words: str) -> None:
    """This one does not stop when it is told to, as one that waits for a peer."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, CHILD, phase], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    try:
        assert launcher.stdout.readline() == "listening\n"
        launcher.kill()
        wait_until(lambda: not alive(rank))
        assert launcher.stdout.read() == last_words
    finally:
        end([launcher.pid, rank])
        launcher.communicate()


@pytest.mark.parametrize("parent", [os.getppid(), os.getpid()], ids=["another", "this"])
def test_rank_whose_launcher_was_gone_at_its_start_ends(parent: int) -> None:
    environment = {**os.environ, "LUSTRAIN_LAUNCHER": str(parent)}
    done = subprocess.run([sys.executable, "-m", "trainer", "--version"], env=environment, check=False)
    assert done.returncode == (0 if parent == os.getpid() else 1)


def test_a_launcher_that_is_no_process_id_is_one_line() -> None:
    environment = {**os.environ, "LUSTRAIN_LAUNCHER": "abc"}
    command = [sys.executable, "-m", "trainer", "--version"]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("LUSTRAIN_LAUNCHER = 'abc': is not a process id; fix: ")


ROOT = Path(__file__).parents[2]
PATIENT_ENVIRONMENT = {**os.environ, **PATIENT}
ENDLESS_START = """
import os, pathlib, time
pathlib.Path(__file__).with_name(f"{os.getpid()}.starts").touch()
time.sleep(6000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["starting", "training"])
def test_killed_launcher_takes_its_ranks_and_writers_with_it(tmp_path: Path, phase: str) -> None:
    """Ranks that train save first; ranks that start must not claim the run, which the next job may own by then."""
    sets = ["checkpoint.every_steps=50", "interrupt.signal_grace_s=600"]
    if phase == "starting":
        (tmp_path / "endless.py").write_text(ENDLESS_START)
        sets.append("task.name=endless:Task")
    environment = {**PATIENT_ENVIRONMENT, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    launcher = subprocess.Popen(launch(tmp_path, *sets), env=environment)
    store = open_store(f"{tmp_path}/run")
    family: list[int] = []
    try:
        if phase == "training":
            wait_until(lambda: committed(store) or launcher.poll() is not None)
        else:
            wait_until(lambda: len(list(tmp_path.glob("*.starts"))) == 2)
        family = descendants(launcher.pid)
        assert len(family) == (2 if phase == "starting" else 4), "ranks and writers"
        launcher.kill()
        launcher.wait()
        wait_until(lambda: not any(map(alive, family)))
    finally:
        end([launcher.pid, *family])
    if phase == "training":
        assert [event["exit_code"] for event in read_events(store) if event["event"] == "stopped"] == [EXIT_REQUEUE]
    else:
        assert read_lease(store) is None


def descendants(pid: int) -> list[int]:
    """Children of the process, and theirs."""
    children = children_of(pid)
    return children + [grandchild for child in children for grandchild in children_of(child)]


def end(pids: list[int]) -> None:
    """What a test that failed has left running."""
    for pid in filter(alive, pids):
        os.kill(pid, signal.SIGKILL)


def endless(folder: Path) -> Path:
    """Settings of a run in `folder` that trains until it is told to stop."""
    return write_config(folder, 1_000_000, 2)


def launch(folder: Path, *sets: str) -> list[str]:
    """A command that trains two ranks until they are told to stop."""
    words = [word for one in sets for word in ("--set", one)]
    return [sys.executable, "-m", "trainer.node.launcher", "--nproc", "2", "--", "train", str(endless(folder)), *words]


def ends_with_a_checkpoint(job: subprocess.Popen[str], run: Path) -> None:
    job.send_signal(signal.SIGTERM)
    said = job.communicate(timeout=300)[1]
    assert job.returncode == EXIT_REQUEUE, said
    assert committed(open_store(str(run))), said


@pytest.mark.slow
def test_notice_before_ranks_listen_ends_in_checkpoint_and_85(tmp_path: Path) -> None:
    """`docker stop` of a container that has just begun; a rank that dies of it looks like a failure to every launcher."""
    job = subprocess.Popen(launch(tmp_path), env=PATIENT_ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: children_of(job.pid))
    ends_with_a_checkpoint(job, tmp_path / "run")


@pytest.mark.slow
def test_notice_while_rank_loads_torch_ends_in_checkpoint_and_85(tmp_path: Path) -> None:
    """Under a launcher that passes signals on and holds none, as torchrun."""
    command = [sys.executable, "-m", "trainer", "train", str(endless(tmp_path))]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: "/libtorch" in Path(f"/proc/{job.pid}/maps").read_text())
    ends_with_a_checkpoint(job, tmp_path / "run")


@pytest.mark.slow
def test_notices_while_a_rank_leaves_change_nothing(tmp_path: Path) -> None:
    """`fab stop --now` makes ranks save and leave, and then the scheduler's SIGTERM comes when it comes."""
    command = [sys.executable, "-m", "trainer", "train", str(endless(tmp_path)), "--set", "train.steps=3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert any("stopped" in line for line in job.stdout)

        def ended() -> bool:
            job.send_signal(signal.SIGTERM)
            job.send_signal(signal.SIGUSR1)
            return job.poll() is not None

        wait_until(ended)
    assert job.returncode == EXIT_DONE
