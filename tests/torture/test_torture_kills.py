"""Whatever process is killed at whatever moment: nothing that was committed is lost, and no loss changes by a bit."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.lab.servers import S3Place
from tests.torture.ordeal import VICTIMS, Ordeal

Say = Callable[[str], None]


@pytest.fixture
def memory_tier() -> Iterator[Path]:
    folder = Path(f"/dev/shm/lustrain-torture-{os.getpid()}")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def torture_folder(server: ForkServer, config: Path, folder: Path, tier: Path, say: Say, kills: int) -> None:
    """A third of the kills each: of plain runs, of runs with a memory tier, and of sharded runs with one."""
    third, left = divmod(kills, 3)
    struck: Counter[str] = Counter()
    tiers = {"checkpoint.tiers": f'[{{kind="memory", path="{tier}"}}]'}
    ways = {"": {}, " with a memory tier": tiers, " with a memory tier and shards": tiers | {"parallel.shard": 2}}
    for what, sets in ways.items():
        share = third if what else third + left
        say(f"\n{share} kills, a run in a folder{what}")
        ordeal = Ordeal(server, config, f"{folder}/{len(sets)}", steps=80, seeds=3, say=say, sets=sets)
        tally = ordeal.run(share)
        struck += tally.kills
        assert tally.resumed >= share / 8, "most attempts died before they had anything to lose"
    assert struck.keys() == VICTIMS.keys()
    runs = list(tier.iterdir())
    assert all(len(list((run / "attempts").iterdir())) <= 3 for run in runs), "old copies stay in the memory tier"


def torture_s3(server: ForkServer, config: Path, place: S3Place, say: Say, kills: int) -> None:
    """Half of the kills each: of plain and of sharded runs."""
    for what, sets in {"": {}, " with shards": {"parallel.shard": 2}}.items():
        share = kills // 2
        say(f"\n{share} kills, a run in SeaweedFS{what}")
        Ordeal(server, config, place.uri(f"torture{len(sets)}"), steps=40, seeds=1, say=say, sets=sets).run(share)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_50_kills_lose_nothing_of_a_run_in_a_folder(
    fork_server: ForkServer, small_config: Path, tmp_path: Path, memory_tier: Path, say: Say
) -> None:
    torture_folder(fork_server, small_config, tmp_path, memory_tier, say, 50)


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
