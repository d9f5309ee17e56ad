"""The image that a registry hands out trains: on an engine that never saw it, read-only, without root, to 85 and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import boto3
import pytest

from infra.local.aws import LocalAws
from rehearsal.corpus import standard_library_sources
from rehearsal.journey import CONFIG
from rehearsal.lab.containers.container import Container
from rehearsal.lab.containers.engine import Engine
from rehearsal.lab.containers.registry import Registry
from tests.images.workshop import Made
from tests.processes import wait_until
from trainer.checkpoint.lineage.lease import committed, read_lease
from trainer.checkpoint.load.verify import verify_checkpoint
from trainer.errors import EXIT_DONE, EXIT_REQUEUE
from trainer.metrics.reader import read_steps
from trainer.node.launcher import LocalJob
from trainer.storage import open_store

pytestmark = pytest.mark.slow

USER, PASSWORD = "ada", "of-the-proofs"
Start = Callable[..., Container]


@pytest.fixture(scope="module")
def delivered(
    cpu_image: Made, engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, str]]:
    """An engine that was empty, and the reference by digest that it pulled from a registry with TLS and a password."""
    folder = tmp_path_factory.mktemp("delivered")
    # On 127.0.0.1 an engine would do without TLS.
    with Registry(folder / "registry", {USER: PASSWORD}, tls=True, address=engine.address) as registry:
        tag = f"{registry.host}/team/trainer:1"
        engine.docker("pull", "--quiet", cpu_image.ref)
        engine.docker("tag", cpu_image.ref, tag)
        with Engine(folder) as empty:
            for one in (engine, empty):
                one.trust(registry.host, registry.ca)
                one.docker("login", "--username", USER, "--password-stdin", registry.host, input=PASSWORD)
            engine.docker("push", "--quiet", tag)
            ref = f"{registry.host}/team/trainer@{cpu_image.image.digest}"
            assert not empty.docker("images", "--quiet").stdout
            empty.docker("pull", "--quiet", ref)
            engine.docker("image", "rm", tag)
            yield empty, ref


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """The environment of clients of an S3 that holds tokens."""
    with LocalAws() as aws, pytest.MonkeyPatch.context() as patch:
        for name, value in aws.environment.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="proof")
        files = map(str, standard_library_sources()[:40])
        words = ["tokenize", *files, "--out", "s3://proof/data", "--tokenizer", "train:512", "--val-fraction", "0.05"]
        assert LocalJob(words, 1).wait() == EXIT_DONE
        yield aws.environment


@pytest.fixture
def start(delivered: tuple[Engine, str], s3: dict[str, str]) -> Iterator[Start]:
    """Starts attempts of a run by its name."""
    engine, ref = delivered
    with ExitStack() as running:

        def begin(run: str, steps: int) -> Container:
            sets = {"run.uri": f"s3://proof/{run}", "task.data": "s3://proof/data", "train.steps": str(steps)}
            words = ["python3", "-m", "trainer.node.launcher", "--nproc", "2", "--", "train", "/config.toml"]
            words += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
            words += ["--set", "interrupt.metadata=false", "--set", "eval.every=0"]
            inside = {**s3, "OMP_NUM_THREADS": "1"}
            container = Container(
                ref, words, environment=engine.environment, inside=inside, files={CONFIG: "/config.toml"}
            )
            running.callback(container.remove)
            return container

        yield begin


def wait_for_step(run: str, step: int, container: Container) -> None:
    def reached() -> bool:
        seen = read_steps(open_store(f"s3://proof/{run}"))
        return bool(seen) and seen[-1]["step"] >= step

    wait_until(lambda: reached() or not container.running())
    assert reached(), f"no step {step}: {container.output()[-2000:]}"


def test_docker_stop_ends_in_checkpoint_and_it_goes_on_elsewhere(start: Start) -> None:
    first = start("stopped", steps=10_000)
    wait_for_step("stopped", 3, first)
    assert first.stop() == EXIT_REQUEUE, first.output()
    store = open_store("s3://proof/stopped")
    saved = committed(store)[-1]
    assert saved.step >= 3
    assert verify_checkpoint(store, saved).ok
    second = start("stopped", steps=saved.step + 10)
    assert second.wait() == EXIT_DONE, second.output()
    seen = read_steps(store)
    assert [record["step"] for record in seen] == list(range(1, saved.step + 11))
    assert {record["attempt"] for record in seen if record["step"] > saved.step} == {2}
    assert verify_checkpoint(store, committed(store)[-1]).ok


@pytest.mark.parametrize("until", ["ranks-run", "run-is-theirs"])
def test_stop_during_the_start_ends_in_85_and_in_no_kill(
    start: Start, delivered: tuple[Engine, str], until: str
) -> None:
    container, store = start(until, steps=10_000), open_store(f"s3://proof/{until}")
    if until == "ranks-run":
        # A headline, the launcher and its two ranks.
        wait_until(lambda: len(delivered[0].docker("top", container.id).stdout.splitlines()) >= 4)
    else:
        wait_until(lambda: read_lease(store))
    assert container.stop() == EXIT_REQUEUE, container.output()
    assert verify_checkpoint(store, committed(store)[-1]).ok


def test_a_mistake_of_the_user_is_one_line_and_exit_2(start: Start) -> None:
    container = start("mistaken", steps=-1)
    assert container.wait() == 2
    (line,) = container.output().strip().splitlines()
    assert "train.steps" in line
