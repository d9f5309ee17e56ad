"""Promises of loading from an S3 that misbehaves: what passes costs nothing, what stays is never taken for damage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint.loading import NEW, OLD, load_alone
from tests.checkpoint.written import assert_same, sample_state, split_state, write_checkpoint
from tests.lab.faulty_proxy import Answer, Cut, Fault, FaultyProxy, Reset, Swap, shorten_throttling
from tests.lab.servers import S3Place
from trainer.storage import CorruptObjectError, ObjectMissingError, ObjectStore, StorageError, open_store

pytestmark = pytest.mark.slow

DATA = r"0000000020-.*\.bin"


@pytest.fixture
def faulty(moto_s3: S3Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FaultyProxy, ObjectStore]]:
    """A run with two checkpoints on S3, and the proxy that everything to it goes through."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    shorten_throttling(monkeypatch)
    with FaultyProxy(moto_s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = open_store(moto_s3.uri())
        for step in (10, 20):
            write_checkpoint(store, step, split_state(sample_state(step), 2))
        yield proxy, store


@pytest.mark.parametrize("fault", [Answer(), Answer(500, "InternalError"), Reset(), Cut(), Swap()], ids=str)
@pytest.mark.parametrize("key", [DATA, r"0000000020-.*\.json", r"manifests/"])
def test_fault_that_passes_costs_neither_checkpoint_nor_a_bit(
    faulty: tuple[FaultyProxy, ObjectStore], fault: Fault, key: str
) -> None:
    proxy, store = faulty
    proxy.inject(fault, times=1, method="GET", key=key)
    loaded = load_alone(store, [NEW, OLD])
    assert proxy.did[type(fault).__name__] == 1
    assert (loaded.manifest.step, loaded.skipped) == (20, [])
    assert_same(loaded.tensors, sample_state(20))


@pytest.mark.parametrize("fault", [Answer(), Reset(), Answer(403, "AccessDenied")], ids=str)
def test_fault_that_stays_ends_the_load_with_its_own_error(
    faulty: tuple[FaultyProxy, ObjectStore], fault: Fault
) -> None:
    proxy, store = faulty
    proxy.inject(fault, method="GET", key=DATA)
    with pytest.raises(StorageError) as caught:
        load_alone(store, [NEW, OLD])
    assert not isinstance(caught.value, (CorruptObjectError, ObjectMissingError))
    assert len(caught.value.problems) == 1
    proxy.heal()
    assert load_alone(store, [NEW, OLD]).manifest.id == NEW


def test_bits_that_flip_on_every_read_are_damage(faulty: tuple[FaultyProxy, ObjectStore]) -> None:
    proxy, store = faulty
    proxy.inject(Swap(), method="GET", key=DATA)
    loaded = load_alone(store, [NEW, OLD])
    assert loaded.manifest.id == OLD
    assert "block 0" in loaded.skipped[0]
    assert_same(loaded.tensors, sample_state(10))
