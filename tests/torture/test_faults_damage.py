"""Damage to a finished run's newest checkpoint: found, said, passed over, and the training stays the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.written import flip_bit
from tests.lab.servers import S3Place
from tests.torture.conftest import ONE_MESH, Bench
from tests.torture.small_run import assert_same_training, committed, events
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.format.records import Manifest, Part
from trainer.checkpoint.load.parts import read_manifest
from trainer.storage import ObjectStore, open_store

pytestmark = pytest.mark.slow

RANKS = 2
OLDER, NEWEST = 15, 20


def flipped_bit_in_data(store: ObjectStore, part: Part, _manifest: Manifest) -> None:
    flip_bit(store, part.data_key, part.data_size // 2)


def truncated_data(store: ObjectStore, part: Part, _manifest: Manifest) -> None:
    store.put(part.data_key, store.read(part.data_key)[0][: part.data_size - 1])


def truncated_manifest(store: ObjectStore, _part: Part, manifest: Manifest) -> None:
    store.put(manifest.id.key, store.read(manifest.id.key)[0][:-50])


def missing_data(store: ObjectStore, part: Part, _manifest: Manifest) -> None:
    store.delete(part.data_key)


def another_ranks_data(store: ObjectStore, part: Part, manifest: Manifest) -> None:
    other = next(one for one in manifest.parts if one.rank != part.rank)
    store.put(part.data_key, store.read(other.data_key)[0])


IN_S3 = [truncated_data, missing_data]
"""What an S3 client could take for an answer; whose bytes are wrong, a reader finds the same way everywhere."""
IN_A_FOLDER = [flipped_bit_in_data, truncated_manifest, another_ranks_data]
"""One for each kind of object and way to find it; `tests/checkpoint/test_read_load.py` has all kinds."""


@ONE_MESH
def test_damage_to_the_newest_checkpoint_in_s3_costs_one_save(bench: Bench, weed_s3: S3Place) -> None:
    """One finished run, a copy of it for each kind of damage, and an attempt on each copy."""
    train_twice(bench, weed_s3.uri("whole"))
    client = weed_s3.client()
    objects = {
        found["Key"]: client.get_object(Bucket=weed_s3.bucket, Key=found["Key"])["Body"].read()
        for found in client.list_objects_v2(Bucket=weed_s3.bucket)["Contents"]
    }
    for damage in IN_S3:
        for key, body in objects.items():
            client.put_object(Bucket=weed_s3.bucket, Key=damage.__name__ + key.removeprefix("whole"), Body=body)
        check(bench, weed_s3.uri(damage.__name__), damage)


def test_damage_to_newest_checkpoint_in_a_folder_costs_one_save(bench: Bench, tmp_path: Path) -> None:
    train_twice(bench, f"{tmp_path}/whole")
    for damage in IN_A_FOLDER:
        shutil.copytree(tmp_path / "whole", tmp_path / damage.__name__)
        check(bench, f"{tmp_path}/{damage.__name__}", damage)


def train_twice(bench: Bench, uri: str) -> None:
    """A run with a checkpoint of an older and one of a newer attempt."""
    for steps in (OLDER, NEWEST):
        job = bench.start(uri, {"train.steps": steps}, ranks=RANKS)
        assert job.wait() == [0] * RANKS, job.said()


def check(bench: Bench, uri: str, damage: Callable[[ObjectStore, Part, Manifest], None]) -> None:
    name = damage.__name__
    store = open_store(uri)
    newest = committed(store)[-1]
    assert newest == ManifestId(2, NEWEST)
    manifest = read_manifest(store, newest)
    damage(store, manifest.parts[1], manifest)
    job = bench.start(uri, {"train.steps": NEWEST + 5}, ranks=RANKS)
    assert job.wait() == [0] * RANKS, f"{name}: {job.said()}"
    (skipped,) = events(store, "checkpoint_skipped")
    assert (skipped["generation"], skipped["step"]) == (2, NEWEST), f"{name}: {skipped}"
    assert "\n" not in skipped["why"]
    assert events(store, "resumed")[-1]["step"] == OLDER, name
    assert_same_training(store, bench.reference(RANKS), NEWEST + 5)
