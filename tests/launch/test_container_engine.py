"""A real docker and the words of a run's containers: what has to pass in and out, and what a killed client leaves."""

from __future__ import annotations

import resource
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch.container import DOCKER, Container, prepared, replacing, run_words
from launch.container import Engine as ContainerEngine
from rehearsal.lab.containers.engine import Engine
from tests.processes import wait_until
from trainer.errors import EXIT_PEERS, EXIT_REQUEUE

pytestmark = pytest.mark.slow
USER = ContainerEngine(DOCKER, "docker", "1234:1234", ("44",))
NAME = "lustrain-run-1"


def words(container: Container, variables: Sequence[str] = (), *, interactive: bool = False) -> list[str]:
    """The words of a container, without a limit that this machine may not raise."""
    given = run_words(USER, container, variables, NAME, interactive=interactive)
    enough = resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 131072
    return [word for word in given if enough or not word.startswith("--ulimit=nofile")]


def test_container_has_what_a_launcher_needs(engine: Engine, base_image: str, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    script = f'read line; echo "$line $(id -u) $(id -G) $TOKEN $HOME ${{PATH%%/games*}}"; touch {shared}/a; exit {EXIT_PEERS}'
    run = [
        *words(Container(base_image, (str(shared),)), ["TOKEN", "PATH", "ABSENT"], interactive=True),
        "sh",
        "-c",
        script,
    ]
    environ = {**engine.environment, "TOKEN": "secret"}
    done = subprocess.run(
        prepared(USER, Container(base_image), run),
        input="in\n",
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (EXIT_PEERS, "")
    assert done.stdout.startswith("in 1234 1234 44 secret /tmp /usr/local/sbin:/usr/local/bin:")
    assert (shared / "a").stat().st_uid == 1234
    absent = [*words(Container(base_image, (str(tmp_path / "absent"),))), "true"]
    done = subprocess.run(absent, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, "bind source path does not exist" in done.stderr) == (125, True)


def test_signals_reach_it_and_a_killed_client_leaves_none(engine: Engine, base_image: str) -> None:
    script = f"trap 'echo USR1' USR1; trap 'exit {EXIT_REQUEUE}' TERM; echo up; while :; do sleep 0.1; done"
    command = replacing(USER, NAME, [*words(Container(base_image)), "sh", "-c", script])

    def listed(*which: str) -> list[str]:
        return engine.docker("ps", "--quiet", "--filter", f"name={NAME}", *which).stdout.split()

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(command, env=engine.environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        # It prints before docker counts it as running, and until then signals are dropped.
        wait_until(listed)
        return process

    first = start()
    first.kill()
    first.wait()
    (left,) = listed()
    second = start()
    assert left not in listed()
    second.send_signal(signal.SIGUSR1)
    assert second.stdout is not None
    assert second.stdout.readline() == "USR1\n"
    second.terminate()
    assert second.wait(60) == EXIT_REQUEUE
    second.stdout.close()
    wait_until(lambda: not listed("--all"))
