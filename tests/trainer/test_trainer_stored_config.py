"""Resuming: what would make it another run is refused by name, anything else is accepted and recorded."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lustrain.problem import UserError
from tests.checkpoint.stores import Stuttering
from trainer.checkpoint import stored_config
from trainer.config import REMOVED, Config
from trainer.storage import ObjectStore, PreconditionError, open_store
from trainer.storage.local import LocalStore

SHAPE: dict[str, Any] = {"model": {"layers": 2, "width": 64, "vocab_size": 256}, "seq_len": 16, "data": "89abcdef"}
"""What the Task saw: `width` is a setting of [task] itself, as image_classification has it, `vocab_size` no setting."""


def model(**changes: int) -> dict[str, Any]:
    return {**SHAPE, "model": {**SHAPE["model"], **changes}}


def config(**changes: Any) -> Config:
    table: dict[str, Any] = {
        "run": {"uri": "x", "seed": 7},
        "task": {"name": "language_model", "data": "tokens", "seq_len": 16, "width": 64, "model": {"layers": 2}},
        "train": {"steps": 10, "global_batch": 8, "micro_batch": 2},
    }
    for path, value in changes.items():
        section, key = path.split("__")
        table.setdefault(section, {})[key] = value
    return Config.model_validate(table)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    store = open_store(str(tmp_path / "run"))
    stored_config.record(store, None, config(), SHAPE, {})
    return store


@pytest.mark.parametrize(
    ("changes", "shape", "named"),
    [
        ({"train__global_batch": 16}, SHAPE, "train.global_batch = 16"),
        ({"run__seed": 8}, SHAPE, "run.seed = 8"),
        ({"optimizer__beta1": 0.5}, SHAPE, "optimizer.beta1 = 0.5: the run was trained with 0.9, and"),
        ({"task__name": "image_classification"}, SHAPE, "task.name = 'image_classification'"),
        ({"task__seq_len": 32}, {**SHAPE, "seq_len": 32}, "task.seq_len = 32: the run was trained with 16, and"),
        ({"task__width": 32}, model(width=32), "task.width = 32: the run was trained with 64, and"),
        ({"task__model": {"layers": 3}}, model(layers=3), "task.model.layers = 3: the run was trained with 2, and"),
        ({"task__model": {}}, model(layers=3), "task.model.layers = 3: the run was trained with 2, and"),
        ({}, {**SHAPE, "data": "other"}, "task.data = 'tokens': holds 'other', the run was trained with '89abcdef'"),
        ({}, model(vocab_size=512), "[task] model.vocab_size = 512: the run was trained with 256, and"),
    ],
)
def test_what_makes_it_another_run_is_refused_by_name(
    store: ObjectStore, changes: dict[str, Any], shape: dict[str, Any], named: str
) -> None:
    before = store.read("config.toml")
    with pytest.raises(UserError) as caught:
        stored_config.check(store, config(**changes), shape, {})
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(named)
    assert store.read("config.toml") == before


def test_run_from_days_of_powersgd_goes_on_and_records_change(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    line = b'comm_hook = "none"\n'
    raw = stored_config.encode(config(), SHAPE).rpartition(b"# record_crc64nvme")[0]
    store.put("config.toml", raw.replace(line, b'comm_hook = "powersgd"\npowersgd_rank = 1\n'))
    stored = stored_config.check(store, config(), SHAPE, {})
    assert stored_config.record(store, stored, config(), SHAPE, {}) == {
        "parallel.comm_hook": ("powersgd", "none"),
        "parallel.powersgd_rank": (1, None),
    }


def test_what_may_change_is_accepted_and_recorded(store: ObjectStore) -> None:
    wanted = config(
        train__steps=20,
        train__micro_batch=4,
        train__grad_clip=0.5,
        metrics__flush_s=1.0,
        schedule__kind="wsd",
        optimizer__lr=1e-4,
        optimizer__fused=False,
    )
    stored = stored_config.check(store, wanted, SHAPE, {})
    assert stored_config.record(store, stored, wanted, SHAPE, {}) == {
        "metrics.flush_s": (30.0, 1.0),
        "optimizer.fused": (None, False),
        "optimizer.lr": (3e-4, 1e-4),
        "schedule.kind": ("cosine", "wsd"),
        "train.grad_clip": (1.0, 0.5),
        "train.micro_batch": (2, 4),
        "train.steps": (10, 20),
    }
    assert stored_config.record(store, stored_config.check(store, wanted, SHAPE, {}), wanted, SHAPE, {}) == {}


def stored_without(store: ObjectStore, line: str) -> bytes:
    """Store what a version without a setting, or without an entry of the fingerprint, had stored; returns the whole file."""
    raw, etag = store.read("config.toml")
    body = raw.rpartition(b"# record_crc64nvme")[0]
    assert body.count(line.encode()) == 1
    store.put("config.toml", body.replace(line.encode(), b""), if_match=etag)
    return raw


def test_key_of_a_later_version_counts_as_its_default(store: ObjectStore) -> None:
    whole = stored_without(store, "eps = 1e-08\n")
    stored = stored_config.check(store, config(), SHAPE, {})
    assert stored_config.record(store, stored, config(), SHAPE, {}) == {}
    assert store.read("config.toml")[0] == whole, "a default of a still later version is another value"
    stored_without(store, "eps = 1e-08\n")
    with pytest.raises(UserError) as caught:
        stored_config.check(store, config(optimizer__eps=1e-6), SHAPE, {})
    assert [line.partition(", and")[0] for line in caught.value.problems] == [
        "optimizer.eps = 1e-06: the run was trained with 1e-08"
    ]


def test_entry_of_a_later_fingerprint_counts_as_its_default(store: ObjectStore) -> None:
    stored_without(store, "vocab_size = 256\n")
    known = {"model": {"vocab_size": 256}}
    assert stored_config.check(store, config(), SHAPE, known) is not None
    for defaults in ({"model": {"vocab_size": 512}}, {}):
        with pytest.raises(UserError) as caught:
            stored_config.check(store, config(), SHAPE, defaults)
        assert [line.partition(":")[0] for line in caught.value.problems] == ["[task] model.vocab_size = 256"]


def test_entry_that_later_version_removed_counts_as_its_default(store: ObjectStore) -> None:
    shape = {**SHAPE, "model": {key: value for key, value in SHAPE["model"].items() if key != "vocab_size"}}
    assert stored_config.check(store, config(), shape, {"model": {"vocab_size": 256}}) is not None
    with pytest.raises(UserError) as caught:
        stored_config.check(store, config(), shape, {})
    (line,) = caught.value.problems
    assert line.startswith("[task] model.vocab_size = 256: ")


def test_null_in_a_fingerprint_is_the_same_as_no_entry(store: ObjectStore) -> None:
    shape = {**SHAPE, "model": {**SHAPE["model"], "scaling": None}}
    stored = stored_config.check(store, config(train__steps=20), shape, {})
    assert stored_config.record(store, stored, config(train__steps=20), shape, {}) == {"train.steps": (10, 20)}


@pytest.mark.parametrize(("asks", "lines"), [(False, []), (True, ["optimizer.amsgrad = True"])])
def test_removed_setting_is_refused_only_where_it_was_used(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, asks: bool, lines: list[str]
) -> None:
    raw, etag = store.read("config.toml")
    body = raw.rpartition(b"# record_crc64nvme")[0]
    line = f"amsgrad = {str(asks).lower()}"
    store.put("config.toml", body.replace(b"[optimizer]", f"[optimizer]\n{line}".encode()), if_match=etag)
    monkeypatch.setitem(REMOVED, ("optimizer", "amsgrad"), (True, "was removed"))  # type: ignore[misc]
    refused: list[str] = []
    try:
        stored_config.check(store, config(), SHAPE, {})
    except UserError as error:
        refused = error.problems
    assert [line.partition(":")[0] for line in refused] == lines


def test_two_attempts_cannot_both_replace_the_config(store: ObjectStore) -> None:
    stored = stored_config.check(store, config(), SHAPE, {})
    stored_config.record(store, stored, config(train__steps=11), SHAPE, {})
    with pytest.raises(PreconditionError):
        stored_config.record(store, stored, config(train__steps=12), SHAPE, {})


def test_replacement_with_a_lost_answer_is_seen_as_own_success(store: ObjectStore) -> None:
    wanted = config(train__steps=20)
    stored = stored_config.check(store, wanted, SHAPE, {})
    assert stored_config.record(Stuttering(store.uri), stored, wanted, SHAPE, {}) == {"train.steps": (10, 20)}


def test_a_run_of_a_newer_format_is_refused_in_one_line(store: ObjectStore) -> None:
    raw, etag = store.read("config.toml")
    store.put("config.toml", raw.replace(b"format = 1", b"format = 2"), if_match=etag)
    with pytest.raises(UserError, match="upgrade lustrain"):
        stored_config.check(store, config(), SHAPE, {})


class Wire(LocalStore):
    """Delivers other bytes than are stored, the first `lies` times."""

    def __init__(self, stored: bytes, harmed: bytes, lies: int) -> None:
        self.uri, self.stored, self.harmed, self.lies = "run", stored, harmed, lies

    def read(self, key: str) -> tuple[bytes, str]:
        self.lies -= 1
        return (self.harmed if self.lies >= 0 else self.stored), "etag"


@pytest.mark.slow
@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_one_flipped_bit_never_passes_for_another_setting(position: int, bit: int) -> None:
    raw = stored_config.encode(config(), SHAPE)
    harmed = bytearray(raw)
    harmed[position % len(raw)] ^= 1 << bit
    whole = stored_config.read_stored(Wire(raw, raw, 0))
    assert stored_config.read_stored(Wire(raw, bytes(harmed), 1)) == whole
    in_checksum = position % len(raw) >= raw.index(b"# record_crc64nvme")
    with suppress(UserError):
        assert stored_config.read_stored(Wire(raw, bytes(harmed), 2)) == whole
        assert in_checksum, "a damaged setting went unseen"


def test_a_config_without_a_checksum_is_read_as_before(store: ObjectStore) -> None:
    before, (raw, etag) = stored_config.read_stored(store), store.read("config.toml")
    store.put("config.toml", raw.rpartition(b"# record_crc64nvme")[0], if_match=etag)
    after = stored_config.read_stored(store)
    assert before is not None
    assert after is not None
    assert after.settings == before.settings
