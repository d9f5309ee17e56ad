"""Containers of a run: their words, whether an image may run on the nodes, and what follows where no container starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.backends import slurm, slurm_executor
from launch.backends.ranks import ranks_environment
from launch.backends.slurm_executor import Allocation, Runtime
from launch.container import Container, Engine, enroot_reference, pyxis_options, replacing, run_words, trial_script
from launch.flags import TrainFlags
from launch.image import outermost
from launch.request import RunRequest
from launch.supervisor.policy import PEERS, USAGE
from lustrain.cluster import Cluster
from lustrain.problem import UserError
from tests.launch.test_launch_command import plant
from tests.launch.test_request import EC2, IMAGE, cluster, resolve
from tests.launch.test_request import config as settings
from trainer.config import load

REF = IMAGE[0]
ALL = Container(REF, ("/fsx", "/data/tokens"), gpus=True, efa=True)
INSIDE = ["--env=HOME=/tmp", "--env=LUSTRAIN_CACHE=/tmp/lustrain", "--workdir=/tmp", REF]
MOUNTS = ["--mount=type=bind,source=/fsx,target=/fsx", "--mount=type=bind,source=/data/tokens,target=/data/tokens"]


def test_words_of_docker() -> None:
    engine = Engine("docker", "/usr/bin/docker", "1000:100", ("100", "44"))
    assert run_words(engine, ALL, ["PATH", "AWS_REGION"], "one") == [
        *("/usr/bin/docker", "run", "--rm", "--name=one", "--log-driver=none", "--network=host", "--ipc=host"),
        *("--user=1000:100", "--group-add=100", "--group-add=44", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
        *("--ulimit=stack=-1:-1", "--ulimit=nofile=131072:131072", "--ulimit=memlock=-1:-1", "--gpus=all"),
        *("--device=/dev/infiniband", *MOUNTS, "--env=AWS_REGION", *INSIDE),
    ]


def test_words_of_podman_without_root() -> None:
    engine = Engine("podman", "podman", "1000:100", ("100", "44"), rootless=True)
    assert run_words(engine, ALL, [], interactive=True) == [
        *(
            "podman",
            "run",
            "--rm",
            "--interactive",
            "--log-driver=none",
            "--network=host",
            "--ipc=host",
            "--user=1000:100",
        ),
        *("--userns=keep-id", "--group-add=keep-groups", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
        *(
            "--ulimit=host",
            "--pids-limit=-1",
            "--security-opt=label=disable",
            "--device=nvidia.com/gpu=all",
            "--device=/dev/infiniband",
            *MOUNTS,
            *INSIDE,
        ),
    ]


def test_options_of_pyxis() -> None:
    assert pyxis_options(ALL, "one") == [
        f"--container-image=example.com#trainer:sha256:{'0' * 64}",
        "--container-name=one",
        "--container-mounts=/fsx:/fsx,/data/tokens:/data/tokens,/dev/infiniband:/dev/infiniband",
        *("--container-workdir=/tmp", "--no-container-mount-home", "--no-container-remap-root"),
    ]
    for name in ("docker.io/team/a", "team/a"):
        assert enroot_reference(f"{name}@sha256:1") == "registry-1.docker.io#team/a:sha256:1"


def test_folder_below_another_is_mounted_with_it() -> None:
    assert outermost(["/fsx/runs/a", "/fsx/", "/fsx2", "/data/a"]) == ("/data/a", "/fsx", "/fsx2")


def request_of(
    tmp_path: Path, where: Cluster | None, found: tuple[str, str] = IMAGE, sets: tuple[str, ...] = (), **flags: Any
) -> RunRequest:
    settings(tmp_path, global_batch=64)
    given = TrainFlags("config.toml", **{"name": "first", "image": "image.json", **flags})
    return resolve(given, load(tmp_path / "config.toml", sets), where, image=found)


LUSTRE = {"id": "fs", "dns_name": "fs.example", "mount_name": "m", "path": "/fsx"}


@pytest.mark.parametrize("where", [{}, EC2])
def test_container_has_devices_and_folders_of_its_node(tmp_path: Path, where: dict[str, Any]) -> None:
    worker = {"type": "p5.48xlarge", "count": 4, "gpus": 8, "efa": 32, "partition": "train"}
    on = cluster(**where, lustre=LUSTRE, groups={"train": worker})
    tier = 'checkpoint.tiers=[{kind="nvme",path="/opt/dlami/nvme/tier"}, {kind="memory",path="/dev/shm/tier"}]'
    paths = (
        "task.data=/fsx/tokens",
        "task.vocabulary=file:///data/words",
        "task.hold=",
        "interrupt.stop_uri=/shared/stops/a",
    )
    request = request_of(tmp_path, on, sets=(*paths, tier))
    assert request.options.container == Container(
        REF, ("/data/words", "/fsx", "/opt/dlami/nvme", "/shared/stops"), gpus=True, efa=True
    )


@pytest.mark.parametrize(
    ("image", "sets", "flags", "line"),
    [
        (("", ""), (), {"image": "a/b:1"}, "--image = 'a/b:1': names no image by its digest; fix: fab image-build"),
        ((REF, "gaudi"), (), {}, "--image = 'image.json': is built for gaudi, whose containers start on no node yet"),
        ((REF, "cpu"), (), {}, "--image = 'image.json': is built for cpu, and the group has nodes with 8 GPUs"),
        (
            (REF, ""),
            (),
            {"on": "slurm", "nproc": "8", "name": None},
            "--image = 'image.json': without a Cluster it is not",
        ),
        (IMAGE, ("task.data=tokens",), {}, "task.data = 'tokens': is relative, and containers have no such folder"),
        (IMAGE, ("task.data=/a,b",), {}, "task.data = '/a,b': cannot be mounted in a container; allowed: letters"),
        (IMAGE, (), {"on": "local"}, "--image = 'image.json': only valid with --on slurm or kubernetes or ssh"),
    ],
)
def test_image_that_cannot_run_is_one_line(
    tmp_path: Path, image: tuple[str, str], sets: tuple[str, ...], flags: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError) as error:
        request_of(tmp_path, cluster() if flags.get("name", "") is not None else None, image, sets, **flags)
    (only,) = error.value.problems
    assert only.startswith(line)


def test_without_the_flag_ranks_run_on_the_nodes(tmp_path: Path) -> None:
    for where in ({}, EC2):
        assert request_of(tmp_path, cluster(**where), image=None).options.container is None


def test_batch_script_keeps_modules_of_the_node_away(tmp_path: Path) -> None:
    request = request_of(tmp_path, cluster())
    environ = {"PATH": "/bin", "PYTHONPATH": "/home/me", "AWS_REGION": "x"}
    plan = slurm.BACKEND.plan(request, tmp_path, environ).files[slurm.SCRIPT]
    assert ("'/home/me'" in plan, "'python': 'python3'" in plan) == (False, True)
    bare = slurm.BACKEND.plan(request_of(tmp_path, cluster(), image=None), tmp_path, environ).files[slurm.SCRIPT]
    assert ("'/home/me'" in bare, repr(sys.executable) in bare) == (True, True)
    assert slurm.script_plan(request, "log", ranks_environment(environ))["container"]["image"] == REF


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder before all others on PATH, in a job of Slurm on nodes a, which this is, and b. srun prints what STARTS holds."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(slurm_executor, "AGAIN_S", (0.0,))
    for name, value in {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "a", "STARTS": "a b", "SRUN_HELP": ""}.items():
        monkeypatch.setenv(name, value)
    plant(folder, "squeue", 'case "$*" in *%x*) echo z ;; *) echo a,b ;; esac')
    plant(folder, "scontrol", f'[ "$1" != show ] && echo "$*" >>{folder}/calls || {{ echo a; echo b; }}')
    plant(folder, "sinfo", 'echo "a mixed 127.0.0.1"; echo "b mixed 127.0.0.2"')
    plant(folder, "srun", f'[ "$*" = --help ] && echo "$SRUN_HELP" && exit; echo $* >>{folder}/calls; echo $STARTS')
    for program in ("docker", "podman"):
        plant(folder, program, "exit 1")
    return folder


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


PLAN: dict[str, Any] = {
    "run": "/fsx/first",
    "config": "/fsx/first/config.toml",
    "python": "python3",
    "ranks": 1,
    "port": 20_000,
    "late_s": 77,
    "log": "/fsx/first/launch/log",
    "max_wait_s": 1,
    "policy": {},
    "environment": {"PATH": "/bin", "AWS_REGION": "x"},
    "container": {"image": REF, "mounts": ("/fsx",), "gpus": True, "efa": False},
}


@pytest.mark.parametrize(
    ("help_text", "docker", "podman", "first_words"),
    [
        ("--container-image=IMAGE", "exit 0", "exit 0", ["env", "HOME=/tmp"]),
        ("", 'echo "Docker version 26"', "exit 0", ["/bin/sh", "-c"]),
        ("", "exit 1", "echo podman version 5", ["/bin/sh", "-c"]),
        ("", 'echo "podman version 5"', "exit 1", ["/bin/sh", "-c"]),
    ],
)
def test_what_starts_containers_is_found_on_the_batch_host(
    planted: Path, monkeypatch: pytest.MonkeyPatch, help_text: str, docker: str, podman: str, first_words: list[str]
) -> None:
    monkeypatch.setenv("SRUN_HELP", help_text)
    plant(planted, "docker", docker)
    plant(planted, "podman", podman)
    runtime = slurm_executor.runtime_of(PLAN)
    assert runtime is not None
    words = runtime.launch_words(["python3"])
    assert (words[:2], words[-1]) == (first_words, "python3")
    assert bool(runtime.options()) is bool(help_text)
    assert ("--gpus=all" in words) is ("Docker" in docker)
    assert ("--device=nvidia.com/gpu=all" in words) is ("podman" in docker + podman)
    assert "--interactive" in runtime.host_words(["python3"]) or help_text


def test_node_without_a_container_is_tried_again_and_left_out(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARTS", "a")
    engine = Engine("docker", "docker", "0:0")
    allocation = Allocation(PLAN, Runtime(Container(REF), engine, ["AWS_REGION"]))
    assert allocation.healthy_nodes() == allocation.healthy_nodes() == ["a"]
    assert allocation.unfit_nodes == ["b"]
    trial, again = calls(planted)
    assert ("--nodelist a,b" in trial, "--nodelist b" in again) == (True, True)
    assert allocation.run_launch(3, ["a"], lambda: False) == 0
    launch = calls(planted)[2]
    assert "--name=lustrain-job-7-0" in launch
    assert {"--env=AWS_REGION", "--env=LUSTRAIN_ATTEMPT", "--env=SLURM_NODEID"} <= set(launch.split())
    allocation.close()
    assert calls(planted)[-1].endswith("lustrain docker lustrain-job- true")


LEFT_OUT = ["requeue 7", "update JobId=7 ExcNodeList=a,z"]
"""z was left out before."""


@pytest.mark.parametrize(
    ("restarts", "docker", "starts", "code", "said", "requeued"),
    [
        ("0", "exit 1", "a b", USAGE, "nothing on ", []),
        ("1", "exit 1", "a b", 0, "nothing on ", LEFT_OUT),
        ("0", "echo 26", "", USAGE, "a is left out: no container of ", []),
        ("1", "echo 26", "", PEERS, "a is left out: no container of ", []),
        ("0", "echo 26", "b", 0, "a is left out: no container of ", LEFT_OUT),
    ],
)
def test_batch_host_that_starts_no_container_ends_the_job(
    planted: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    restarts: str,
    docker: str,
    starts: str,
    code: int,
    said: str,
    requeued: list[str],
) -> None:
    monkeypatch.setenv("STARTS", starts)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    monkeypatch.setenv("AWS_REGION", "")
    plant(planted, "docker", docker)
    assert slurm_executor.main({**PLAN, "environment": {"AWS_REGION": "x"}}) == code
    assert f"lustrain: {said}" in capfd.readouterr().out
    assert [call for call in calls(planted) if call.startswith(("requeue", "update"))] == requeued


def test_output_of_a_job_is_copied_to_where_logs_are_carried(planted: Path, tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "jobs"
    log.write_text("of an earlier job\n")
    slurm_executor.OutputCopy(str(log), str(folder)).close()
    folder.mkdir()
    copy = slurm_executor.OutputCopy(str(log), str(folder))
    with log.open("a") as output:
        output.write("step 1\n")
    copy.close()
    (copied,) = folder.iterdir()
    assert (copied.suffix, copied.read_text()) == (".log", "step 1\n")
    assert copied.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_output_of_a_job_goes_into_nothing_planted(planted: Path, tmp_path: Path, kind: str) -> None:
    log, folder, others = tmp_path / "log", tmp_path / "jobs", tmp_path / "others"
    log.touch()
    folder.mkdir()
    others.touch()
    name = folder / f"{os.environ['SLURM_JOB_ID']}.log"
    if kind == "link":
        name.symlink_to(others)
    else:
        os.mkfifo(name)
    copy = slurm_executor.OutputCopy(str(log), str(folder))
    log.write_text("step 1\n")
    copy.close()
    assert not others.read_text()


ECR = "1.dkr.ecr.us-west-2.amazonaws.com"
DOCKER = """echo "$*" >>"$0.calls"
case "$1 $2" in
    "image inspect") exit "${ABSENT:-0}" ;;
    "pull "*) [ -e "$DOCKER_CONFIG" ] && [ -z "$DENIED" ] && exit
        echo "docker: denied" >&2
        echo "Run 'docker run --help' for more" >&2
        exit 1 ;;
    "login "*) cat >"$0.password" ;;
    --version*) echo Docker version 26 ;;
esac"""


@pytest.mark.parametrize(
    ("absent", "denied", "host", "code", "out", "error", "asked"),
    [
        ("0", "", ECR, 0, "docker ", "", []),
        ("1", "", ECR, 0, "docker ", "", ["pull", "login", "pull"]),
        ("1", "yes", ECR, 1, "", "docker: denied\n", ["pull", "login", "pull"]),
        # It would get a login of the node's role.
        ("1", "yes", f"{ECR}.example.org", 1, "", "docker: denied\n", ["pull"]),
    ],
)
def test_node_fetches_an_absent_image_by_its_own_role(
    planted: Path, absent: str, denied: str, host: str, code: int, out: str, error: str, asked: list[str]
) -> None:
    plant(planted, "docker", DOCKER)
    plant(planted, "aws", f'echo "$https_proxy $*" >>{planted}/aws.calls; echo secret')
    script = trial_script(Container(f"{host}/team/a@sha256:1"), ["AWS_REGION"], "1:1", ("1",), "python3")
    (planted / "proxy.env").write_text("https_proxy=http://proxy:3128\n")
    script = script.replace("/etc/lustrain/proxy.env", f"{planted}/proxy.env")
    logins = planted / "logins"
    logins.mkdir()
    environ = {**os.environ, "ABSENT": absent, "DENIED": denied, "TMPDIR": str(logins)}
    done = subprocess.run(["sh", "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.startswith(out), done.stderr) == (code, True, error)
    said = (planted / "docker.calls").read_text()
    assert [line.split()[0] for line in said.splitlines() if line.startswith(("login", "pull"))] == asked
    assert "secret" not in said
    assert not list(logins.iterdir())
    if "login" in asked:
        assert (planted / "docker.password").read_text() == "secret"
        assert (planted / "aws.calls").read_text() == "http://proxy:3128 ecr get-login-password --region us-west-2\n"


@pytest.mark.parametrize(("removal", "code", "calls"), [("rm -f", 0, "ps rm ps up"), ("false", 125, "ps rm " * 5)])
def test_nothing_starts_beside_what_an_earlier_launch_left(planted: Path, removal: str, code: int, calls: str) -> None:
    plant(planted, "sleep", "")
    left = planted / "left"
    left.write_text("1\n")
    plant(
        planted, "docker", f"echo $1 >>$0.calls; case $1 in ps) cat {left} 2>&- ; true ;; rm) {removal} {left} ;; esac"
    )
    command = replacing(Engine("docker", "docker", "0:0"), "lustrain-job-", ["docker", "up"])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, (planted / "docker.calls").read_text().split()) == (code, calls.split())
    assert ("fix: docker rm --force 1\n" in done.stderr) is bool(code)
