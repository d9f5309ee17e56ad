"""Whatever process is killed at whatever moment: nothing that was committed is lost, and no loss changes by a bit."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.lab.servers import S3Place
from tests.torture.ordeal import VICTIMS, Ordeal

Say = Callable[[str], None]


@contextmanager
def repeatable(say: Say, what: str) -> Iterator[int]:
    """A seed, chosen anew or from LUSTRAIN_TORTURE_SEED, that a failure names."""
    seed = int(os.environ.get("LUSTRAIN_TORTURE_SEED", random.SystemRandom().randrange(10**6)))
    say(f"\n{what}, LUSTRAIN_TORTURE_SEED={seed}")
    try:
        yield seed
    except AssertionError as error:
        raise AssertionError(f"LUSTRAIN_TORTURE_SEED={seed}: {error}") from error


@pytest.fixture
def memory_tier() -> Iterator[Path]:
    folder = Path(f"/dev/shm/lustrain-torture-{os.getpid()}")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def torture_folder(server: ForkServer, config: Path, folder: Path, tier: Path, say: Say, kills: int) -> None:
    """Half of the kills without, half with a memory tier."""
    half = kills // 2
    shared_memory = set(os.listdir("/dev/shm"))
    for what, sets in (("", {}), (" with a memory tier", {"checkpoint.tiers": f'[{{kind="memory", path="{tier}"}}]'})):
        with repeatable(say, f"{half} kills, a run in a folder{what}") as seed:
            ordeal = Ordeal(server, config, f"{folder}/{len(sets)}", steps=80, seeds=3, seed=seed, say=say, sets=sets)
            tally = ordeal.run(half)
        assert tally.kills.keys() == VICTIMS.keys()
        assert len(tally.findings.resumed_at) >= half / 8, "most attempts died before they had anything to lose"
    left = set(os.listdir("/dev/shm")) - shared_memory - {tier.name}
    assert len(left) < kills / 20, f"shared memory is left behind: {sorted(left)}"
    runs = list(tier.iterdir())
    assert all(len(list((run / "attempts").iterdir())) <= 3 for run in runs), "old copies stay in the memory tier"


def torture_s3(server: ForkServer, config: Path, place: S3Place, say: Say, kills: int) -> None:
    with repeatable(say, f"{kills} kills, a run in SeaweedFS") as seed:
        Ordeal(server, config, place.uri("torture"), steps=40, seeds=1, seed=seed, say=say).run(kills)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_190_kills_lose_nothing_of_a_run_in_a_folder(
    fork_server: ForkServer, small_config: Path, tmp_path: Path, memory_tier: Path, say: Say
) -> None:
    torture_folder(fork_server, small_config, tmp_path, memory_tier, say, 190)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_10_kills_lose_nothing_of_a_run_in_s3(
    fork_server: ForkServer, small_config: Path, weed_s3: S3Place, say: Say
) -> None:
    torture_s3(fork_server, small_config, weed_s3, say, 10)


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_900_kills_lose_nothing_of_a_run_in_a_folder(
    fork_server: ForkServer, small_config: Path, tmp_path: Path, memory_tier: Path, say: Say
) -> None:
    torture_folder(fork_server, small_config, tmp_path, memory_tier, say, 900)


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_100_kills_lose_nothing_of_a_run_in_s3(
    fork_server: ForkServer, small_config: Path, weed_s3: S3Place, say: Say
) -> None:
    torture_s3(fork_server, small_config, weed_s3, say, 100)
