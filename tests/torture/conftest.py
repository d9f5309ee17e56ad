"""One small token set for all fault tests, and what starts trainings of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fork_server import ForkServer, Job
from tests.lab.faulty_proxy import FaultyProxy
from tests.lab.servers import S3Place
from tests.torture.small_run import history, train_words, write_config
from tests.trainer.token_sets import write_token_set
from trainer.storage import open_store

REFERENCE_STEPS = 150


@dataclass
class Bench:
    """Where small trainings are started and compared; their learning rate does not depend on how long they are."""

    server: ForkServer
    config: Path
    folder: Path
    sharded: bool = False
    """Ranks share the model by FSDP2, at least two of them."""
    jobs: list[Job] = field(default_factory=list)
    references: dict[int, list[bytes]] = field(default_factory=dict)

    def start(
        self,
        uri: str,
        sets: Mapping[str, object] | None = None,
        *,
        ranks: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> Job:
        # Three ranks share four micro-batches, and buckets are small for the model to have several.
        mesh = {"parallel.shard": 0} if self.sharded else {"parallel.bucket_mb": 0.01}
        wishes = {"schedule.kind": "constant", **mesh, **(sets or {})}
        job = self.server.start(train_words(self.config, uri, wishes), self.least(ranks), environment)
        self.jobs.append(job)
        return job

    def least(self, ranks: int) -> int:
        return max(ranks, 2) if self.sharded else ranks

    def reference(self, ranks: int = 1) -> list[bytes]:
        """The records of an uninterrupted training of REFERENCE_STEPS steps."""
        ranks = self.least(ranks)
        if ranks not in self.references:
            uri = f"{self.folder}/reference-{ranks}"
            job = self.start(uri, {"train.steps": REFERENCE_STEPS}, ranks=ranks)
            assert job.wait() == [0] * ranks, job.said()
            self.references[ranks] = history(open_store(uri))
        return self.references[ranks]


@pytest.fixture
def proxy(weed_s3: S3Place) -> Iterator[FaultyProxy]:
    with FaultyProxy(weed_s3.endpoint) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def small_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config whose run.uri is still to be set."""
    folder = tmp_path_factory.mktemp("small-run")
    text = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))).encode()
    return write_config(folder / "config.toml", write_token_set(folder / "tokens", {"train": text}))


@pytest.fixture(scope="session")
def benches(fork_server: ForkServer, small_config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bench]:
    """One for each way in which ranks share a model; their references are made once."""
    folder = tmp_path_factory.mktemp("references")
    return {
        "ddp": Bench(fork_server, small_config, folder / "ddp"),
        "fsdp": Bench(fork_server, small_config, folder / "fsdp", sharded=True),
    }


@pytest.fixture(params=["ddp", "fsdp"])
def bench(benches: dict[str, Bench], request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Starts trainings on one of the meshes; what still runs when the test ends is ended."""
    bench = benches[request.param]
    yield bench
    for job in bench.jobs:
        job.send(signal.SIGKILL)
        job.wait()
    bench.jobs.clear()


ONE_MESH = pytest.mark.parametrize("bench", ["ddp"], indirect=True)
"""For what does not depend on how ranks share a model."""


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints a line now, past pytest's capturing: the long tests show that they are alive."""

    def say(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    return say


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUSTRAIN_CACHE", str(tmp_path / "cache"))
