"""FORMAT.md's promise: a stranger can read a checkpoint with what is written there and nothing of ours."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from awscrt.checksums import crc64nvme
from torch import Tensor

from tests.checkpoint.loading import remove, truncate
from tests.checkpoint.saving import PATIENCE_S, Events, checkpointer, sample_tensors
from tests.checkpoint.written import (
    flip_bit,
    put_lease,
    raw_bytes,
    sample_state,
    split_state,
    write_checkpoint,
    write_sharded,
    write_steps,
)
from trainer import checkpoint
from trainer.checkpoint import stored_config
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.format.records import (
    FORMAT,
    Block,
    Entry,
    Manifest,
    MeshAxis,
    MeshLayout,
    Part,
    RankIndex,
    StoredTensor,
    TensorGroup,
    decode_manifest,
    encode,
)
from trainer.checkpoint.load.parts import read_manifest
from trainer.config import Config
from trainer.metrics import RunLog
from trainer.sealed import DamagedRecordError, seal, unseal
from trainer.storage import ObjectStore
from trainer.storage.local import LocalStore

TEXT = Path(checkpoint.__file__).with_name("FORMAT.md").read_text()
SNIPPET = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]
READER = ModuleType("the snippet")
exec(compile(SNIPPET, "FORMAT.md", "exec"), READER.__dict__)


@pytest.fixture
def newest(store: LocalStore) -> Manifest:
    """Of a run with two checkpoints of two ranks."""
    put_lease(store, 1, (1, None))
    write_steps(store, [10, 20])
    return read_manifest(store, ManifestId(1, 20))


def assert_are(found: Mapping[str, Any], expected: Mapping[str, Tensor]) -> None:
    assert {name: array.tobytes() for name, array in found.items()} == {n: raw_bytes(t) for n, t in expected.items()}


def test_the_snippets_checksum_is_that_of_the_text_and_of_s3() -> None:
    check = re.search(r"check value \(of `123456789`\) `0x([0-9a-f]{16})`", TEXT)
    assert check is not None
    assert check[1] == READER.crc64nvme(b"123456789") == f"{crc64nvme(b'123456789'):016x}"


@pytest.mark.slow
def test_the_snippet_reads_a_real_save_without_any_of_our_code(store: LocalStore, tmp_path: Path) -> None:
    saved = sample_tensors(5, rows=40)
    with checkpointer(store, Events()) as saver:
        saver.save(5, saved, {"cursor": 1.5e-7}, {"name": "ü"})
        assert [outcome.committed for outcome in saver.wait(PATIENCE_S)] == [True]
    check = """
import sys
assert not any(name.split(".")[0] in ("trainer", "torch", "awscrt") for name in sys.modules)
np.savez(sys.argv[2], **{name.replace("/", "|"): tensor for name, tensor in tensors.items()})
"""
    body = "".join(f"    {line}\n" for line in check.strip().splitlines())
    (tmp_path / "reader.py").write_text(SNIPPET + body)
    command = [sys.executable, "-I", str(tmp_path / "reader.py"), store.uri, str(tmp_path / "out.npz")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("step 5 ")
    found = {name.replace("|", "/"): tensor for name, tensor in np.load(tmp_path / "out.npz").items()}
    assert_are(found, saved)


def test_the_snippet_follows_the_lineage_and_joins_cut_tensors(store: LocalStore) -> None:
    for step in (10, 20, 30):
        write_checkpoint(store, step, split_state(sample_state(step, 20), 3))
    put_lease(store, 3, (1, None), (2, ManifestId(1, 20)))
    manifest, tensors = READER.load(Path(store.uri))
    assert manifest["step"] == 20
    assert_are(tensors, sample_state(20, 20))


def test_the_snippet_reads_a_sharded_run_without_its_layout(store: LocalStore) -> None:
    state = {name: (tensor, ((0, "shard"),) if tensor.dim() else ()) for name, tensor in sample_state(3, 20).items()}
    write_sharded(store, 10, {"shard": 3}, state)
    put_lease(store, 1, (1, None))
    assert_are(READER.load(Path(store.uri))[1], sample_state(3, 20))


@pytest.mark.parametrize("harm", [truncate, remove, lambda store, key: flip_bit(store, key, 50)])
@pytest.mark.parametrize("region", ["data", "index", "manifest"])
def test_the_snippet_passes_a_damaged_checkpoint_over(
    store: LocalStore,
    newest: Manifest,
    capsys: pytest.CaptureFixture[str],
    region: str,
    harm: Callable[[ObjectStore, str], None],
) -> None:
    part = newest.parts[1]
    harm(store, {"data": part.data_key, "index": part.index_key, "manifest": newest.id.key}[region])
    manifest, tensors = READER.load(Path(store.uri))
    assert manifest["step"] == 10
    assert_are(tensors, sample_state(10))
    passed_over = [line.partition(" is passed over: ")[0] for line in capsys.readouterr().err.splitlines()]
    assert passed_over == ([] if (region, harm) == ("manifest", remove) else [newest.id.key])


def test_the_snippet_says_so_when_no_checkpoint_is_whole(store: LocalStore) -> None:
    for lineage in ((), ((1, None),)):
        put_lease(store, 1, *lineage)
        with pytest.raises(LookupError, match="holds no whole checkpoint"):
            READER.load(Path(store.uri))
    manifest = write_checkpoint(store, 10, split_state(sample_state(10, 20), 2))
    flip_bit(store, manifest.parts[0].data_key, 50)
    with pytest.raises(LookupError, match="holds no whole checkpoint"):
        READER.load(Path(store.uri))


def test_snippet_refuses_a_newer_format_and_does_not_fall_back(store: LocalStore, newest: Manifest) -> None:
    store.put(newest.id.key, seal({**unseal(store.read(newest.id.key)[0]), "format": FORMAT + 1}))
    with pytest.raises(NotImplementedError, match="newer"):
        READER.load(Path(store.uri))


def test_documented_numbers_that_json_lacks_are_what_is_logged(store: LocalStore) -> None:
    with closing(RunLog(store, 1, 60.0)) as log:
        log.step({"step": 1, "loss": math.nan, "extra": {"bounds": [-math.inf, math.inf]}})
    (part,) = store.list("metrics/")
    written = json.loads(store.read(part.key)[0])
    said = [written["loss"], written["extra"]["bounds"][1], written["extra"]["bounds"][0]]
    assert all(f'`"{word}"`' in TEXT for word in said)


def test_what_text_says_of_the_recorded_table_is_what_is_stored(store: LocalStore) -> None:
    config = Config.model_validate(
        {"run": {"uri": store.uri}, "task": {"name": "x"}, "train": {"steps": 1, "global_batch": 1, "micro_batch": 1}}
    )
    stored_config.record(store, None, config, {"model": {"layers": 2}}, {})
    recorded = tomllib.loads(store.read("config.toml")[0].decode())["recorded"]
    assert recorded["format"] == 1
    assert all(f"`{name}`" in TEXT for name in recorded)
    assert recorded.keys() == {"format", "lustrain", "fingerprint"}


@pytest.mark.parametrize(
    "record", [Manifest, Part, RankIndex, Entry, Block, MeshLayout, MeshAxis, TensorGroup, StoredTensor]
)
def test_every_field_of_the_records_is_in_the_text(record: type) -> None:
    for name in record.__dataclass_fields__:  # type: ignore[attr-defined]
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", TEXT), f"{record.__name__}.{name} is not described"


def test_the_text_is_about_the_format_that_is_written() -> None:
    assert TEXT.startswith(f"# The layout of a run, format {FORMAT}\n")
    empty = Manifest(1, 1, "a", None, 0, "", (), {}, {})
    assert b'"kind":"manifest"' in encode(empty)


def test_state_comes_back_as_it_was_whatever_its_keys() -> None:
    manifest = Manifest(1, 1, "a", None, 0, "", (), {"seen_crc64nvme": 7, "text_crc64nvme": "7"}, {})
    assert decode_manifest(encode(manifest)) == manifest


@pytest.mark.parametrize(
    "change",
    [
        {"step": True},
        {"step": 1.0},
        {"step": "1"},
        {"parent": []},
        {"state": None},
        {"kind": "rank-index"},
        {"layout": {"axes": [{"name": "shard", "size": 0}], "groups": []}},
        {"layout": {"axes": [], "groups": [{"cuts": [[0, "shard"]], "stored_by": 1, "tensors": []}]}},
    ],
    ids=str,
)
def test_sealed_manifest_with_a_field_of_another_form_is_damaged(change: dict[str, Any]) -> None:
    body = unseal(encode(Manifest(1, 1, "a", None, 0, "", (), {}, {})))
    with pytest.raises(DamagedRecordError):
        decode_manifest(seal(body | change))


def test_sealed_manifest_with_parts_nested_too_deep_is_damaged() -> None:
    parts: Any = []
    # JSON's own limit is the stack's too, and lies deeper than this.
    for _ in range(sys.getrecursionlimit() // 2):
        parts = [parts]
    with pytest.raises(DamagedRecordError):
        decode_manifest(seal({"format": FORMAT, "kind": "manifest", "parts": parts}))
