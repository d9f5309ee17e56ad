"""Tiers are quicker copies: whole ones spare the run store, harmed ones are passed over and said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.loading import NEW, OLD, empty, load_alone, remove, swap, truncate, two_checkpoints
from tests.checkpoint.written import assert_same, flip_bit, sample_state
from trainer.checkpoint.format.layout import tier_root
from trainer.checkpoint.format.records import Manifest
from trainer.config import TierConfig
from trainer.storage import ObjectStore
from trainer.storage.local import LocalStore


@pytest.fixture
def tiered(store: LocalStore, tmp_path: Path) -> tuple[TierConfig, LocalStore, Manifest]:
    manifest = two_checkpoints(store)
    tier = TierConfig(kind="nvme", path=str(tmp_path / "nvme"))
    copy = LocalStore(tier_root(tier.path, store.uri))
    for part in manifest.parts:
        for key in (part.data_key, part.index_key):
            copy.put(key, store.read(key)[0])
    return tier, copy, manifest


@pytest.mark.parametrize("harm", [truncate, empty, remove, swap, lambda s, k: flip_bit(s, k, 5)])
@pytest.mark.parametrize("what", ["data_key", "index_key"])
def test_harmed_copy_in_a_tier_is_passed_over_for_the_run_store(
    store: LocalStore,
    tiered: tuple[TierConfig, LocalStore, Manifest],
    what: str,
    harm: Callable[[ObjectStore, str], None],
) -> None:
    tier, copy, manifest = tiered
    key = getattr(manifest.parts[0], what)
    if harm is swap:
        copy.put(key, store.read(key.replace("20-00000002", "10-00000001"))[0])
    else:
        harm(copy, key)
    events: list[tuple[str, dict[str, Any]]] = []
    loaded = load_alone(store, [NEW, OLD], tiers=(tier,), on_event=lambda kind, f: events.append((kind, f)))
    assert loaded.skipped == []
    assert_same(loaded.tensors, sample_state(2))
    kind, fields = events[0]
    assert len(events) == 1
    if harm is remove:
        assert (kind, fields["missing"], fields["parts"]) == ("tier_incomplete", 1, 2)
    else:
        assert (kind, fields["object"]) == ("tier_passed_over", key)


def test_tier_that_a_new_node_does_not_have_costs_only_an_event(store: LocalStore, tmp_path: Path) -> None:
    two_checkpoints(store)
    events: list[str] = []
    tier = TierConfig(kind="memory", path=str(tmp_path / "absent"))
    loaded = load_alone(store, [NEW], tiers=(tier,), on_event=lambda kind, f: events.append(kind))
    assert_same(loaded.tensors, sample_state(2))
    assert events == ["tier_passed_over"]
    assert not (tmp_path / "absent").exists()
