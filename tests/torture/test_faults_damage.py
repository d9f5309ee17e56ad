"""Damage to a finished run's newest checkpoint, in a real S3: found, said, passed over, and the training stays the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lab.servers import S3Place
from tests.torture.conftest import Bench
from tests.torture.small_run import assert_same_training, committed, events
from trainer.checkpoint.layout import ManifestId
from trainer.checkpoint.parts import read_manifest
from trainer.checkpoint.records import Manifest, Part
from trainer.storage import ObjectStore, open_store

pytestmark = pytest.mark.slow

RANKS = 2
OLDER, NEWEST = 15, 20


def flip(store: ObjectStore, key: str, at: int) -> None:
    body = bytearray(store.read(key)[0])
    body[at] ^= 1
    store.put(key, bytes(body))


def flipped_bit_in_data(store: ObjectStore, part: Part, _manifest: Manifest) -> None:
    flip(store, part.data_key, part.data_size // 2)


def flipped_bit_in_index(store: ObjectStore, part: Part, _manifest: Manifest) -> None:
    flip(store, part.index_key, part.index_size // 2)


def flipped_bit_in_manifest(store: ObjectStore, _part: Part, manifest: Manifest) -> None:
    flip(store, manifest.id.key, 200)


def truncated_data(store: ObjectStore, part: Part, _manifest: Manifest) -> None:
    store.put(part.data_key, store.read(part.data_key)[0][: part.data_size - 1])


def truncated_manifest(store: ObjectStore, _part: Part, manifest: Manifest) -> None:
    store.put(manifest.id.key, store.read(manifest.id.key)[0][:-50])


def missing_data(store: ObjectStore, part: Part, _manifest: Manifest) -> None:
    store.delete(part.data_key)


def missing_index(store: ObjectStore, part: Part, _manifest: Manifest) -> None:
    store.delete(part.index_key)


def another_ranks_data(store: ObjectStore, part: Part, manifest: Manifest) -> None:
    other = next(one for one in manifest.parts if one.rank != part.rank)
    store.put(part.data_key, store.read(other.data_key)[0])


def an_older_saves_data_and_index(store: ObjectStore, part: Part, _manifest: Manifest) -> None:
    older = read_manifest(store, committed(store)[0]).parts[part.rank]
    store.put(part.data_key, store.read(older.data_key)[0])
    store.put(part.index_key, store.read(older.index_key)[0])


def an_older_manifest_under_the_newest_name(store: ObjectStore, _part: Part, manifest: Manifest) -> None:
    store.put(manifest.id.key, store.read(committed(store)[0].key)[0])


def a_manifest_that_points_nowhere(store: ObjectStore, _part: Part, manifest: Manifest) -> None:
    for part in manifest.parts:
        store.delete(part.data_key)
        store.delete(part.index_key)


DAMAGES = [
    flipped_bit_in_data,
    flipped_bit_in_index,
    flipped_bit_in_manifest,
    truncated_data,
    truncated_manifest,
    missing_data,
    missing_index,
    another_ranks_data,
    an_older_saves_data_and_index,
    an_older_manifest_under_the_newest_name,
    a_manifest_that_points_nowhere,
]


def copy_run(place: S3Place, source: str, target: str) -> None:
    client = place.client()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=f"{source}/"):
        for found in page["Contents"]:
            key = found["Key"]
            body = client.get_object(Bucket=place.bucket, Key=key)["Body"].read()
            client.put_object(Bucket=place.bucket, Key=target + key.removeprefix(source), Body=body)


def test_any_damage_to_the_newest_checkpoint_is_said_and_costs_one_interval(bench: Bench, weed_s3: S3Place) -> None:
    """One finished run, a copy of it for each kind of damage, and an attempt on each copy."""
    first = bench.start(weed_s3.uri("whole"), {"train.steps": OLDER}, ranks=RANKS)
    assert first.wait() == [0] * RANKS, first.said()
    second = bench.start(weed_s3.uri("whole"), {"train.steps": NEWEST}, ranks=RANKS)
    assert second.wait() == [0] * RANKS, second.said()
    for damage in DAMAGES:
        check(bench, weed_s3, damage)


def check(bench: Bench, place: S3Place, damage: Callable[[ObjectStore, Part, Manifest], None]) -> None:
    name = damage.__name__
    copy_run(place, "whole", name)
    store = open_store(place.uri(name))
    newest = committed(store)[-1]
    assert newest == ManifestId(2, NEWEST)
    manifest = read_manifest(store, newest)
    damage(store, manifest.parts[1], manifest)
    job = bench.start(place.uri(name), {"train.steps": NEWEST + 5}, ranks=RANKS)
    assert job.wait() == [0] * RANKS, f"{name}: {job.said()}"
    (skipped,) = events(store, "checkpoint_skipped")
    assert (skipped["generation"], skipped["step"]) == (2, NEWEST), f"{name}: {skipped}"
    assert "\n" not in skipped["why"]
    assert events(store, "resumed")[-1]["step"] == OLDER, name
    assert_same_training(store, bench.reference(RANKS), NEWEST + 5)
