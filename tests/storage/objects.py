"""What a store holds."""

from __future__ import annotations

from trainer.storage import ObjectStore


def objects(store: ObjectStore) -> dict[str, bytes]:
    """Every object by its key."""
    return {info.key: store.read(info.key)[0] for info in store.list("")}
