"""Loading as every rank does it, and the harm that may come to what is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch

from tests.checkpoint.written import sample_state, split_state, write_checkpoint
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.format.records import Manifest
from trainer.checkpoint.load.assemble import Region
from trainer.checkpoint.load.latest import Loaded, load_latest
from trainer.config import TierConfig
from trainer.parallel.votes import StoreVotes
from trainer.storage import ObjectStore, StorageError
from trainer.storage.local import LocalStore

OLD, NEW = ManifestId(1, 10), ManifestId(1, 20)


def load_on(
    stores: list[ObjectStore],
    candidates: list[ManifestId],
    want: Callable[[int, str], Region | bool] = lambda rank, name: True,
    tiers: tuple[TierConfig, ...] = (),
    on_event: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None,
) -> list[Loaded | None]:
    """What every rank gets when one thread per rank loads with its own view of the store; the first rank's error otherwise."""
    board = torch.distributed.HashStore()
    board.set_timeout(timedelta(seconds=300))

    def one(rank: int) -> Loaded | None:
        return load_latest(
            stores[rank],
            StoreVotes(board, len(stores)),
            rank=rank,
            world_size=len(stores),
            candidates=candidates if rank == 0 else [],
            tiers=tiers,
            read=lambda checkpoint: checkpoint.read(lambda name: want(rank, name)),
            on_event=on_event,
            timeout_s=300,
        )

    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(one, range(len(stores))))


def load_alone(store: ObjectStore, candidates: list[ManifestId], **options: Any) -> Loaded:
    loaded = load_on([store], candidates, **options)[0]
    assert loaded is not None
    return loaded


def two_checkpoints(store: ObjectStore) -> Manifest:
    """An older and a newer one on two ranks; returns the newer one's manifest."""
    write_checkpoint(store, OLD.step, split_state(sample_state(1), 2), nonce="00000001")
    return write_checkpoint(store, NEW.step, split_state(sample_state(2), 2), nonce="00000002")


def truncate(store: ObjectStore, key: str) -> None:
    store.put(key, store.read(key)[0][:-1])


def prolong(store: ObjectStore, key: str) -> None:
    store.put(key, store.read(key)[0] + b"\0")


def empty(store: ObjectStore, key: str) -> None:
    store.put(key, b"")


def remove(store: ObjectStore, key: str) -> None:
    store.delete(key)


def swap(store: ObjectStore, key: str) -> None:
    """Another attempt's object of the same kind and size."""
    store.put(key, store.read(key.replace("20-00000002", "10-00000001").replace("00020.json", "00010.json"))[0])


class Counting(LocalStore):
    """Notes from where on data objects are read, and how many bytes of each object."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.offsets: list[int] = []
        self.bytes: Counter[str] = Counter()

    def read(self, key: str) -> tuple[bytes, str]:
        body, version = super().read(key)
        self.bytes[key] += len(body)
        return body, version

    def read_into(self, key: str, buffer: memoryview, offset: int = 0) -> None:
        self.offsets.append(offset)
        self.bytes[key] += len(buffer)
        super().read_into(key, buffer, offset)


class Unreachable(LocalStore):
    """Serves small objects, then says for every data object that the network is down."""

    def read_into(self, key: str, buffer: memoryview, offset: int = 0) -> None:
        raise StorageError("s3://run: connection refused after 5 attempts; fix: check the endpoint")
