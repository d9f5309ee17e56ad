"""FORMAT.md's promise: a stranger can read a checkpoint with what is written there and nothing of ours."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from awscrt.checksums import crc64nvme

from tests.checkpoint.saving import PATIENCE_S, Events, checkpointer, own_tensors, raw_bytes, sample_tensors
from tests.checkpoint.test_read_prune import put_lease
from tests.checkpoint.written import flip_bit, sample_state, split_state, write_checkpoint
from trainer import checkpoint
from trainer.checkpoint.layout import ManifestId
from trainer.checkpoint.records import FORMAT, Block, Entry, Manifest, Part, RankIndex, encode
from trainer.storage.local import LocalStore

TEXT = Path(checkpoint.__file__).with_name("FORMAT.md").read_text()
SNIPPET = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]


@pytest.fixture
def reader(tmp_path: Path) -> ModuleType:
    """The snippet of FORMAT.md as a module."""
    module = ModuleType("stranger")
    exec(compile(SNIPPET, "FORMAT.md", "exec"), module.__dict__)
    return module


def test_the_snippets_checksum_is_the_one_that_the_text_and_s3_mean(reader: ModuleType) -> None:
    check = re.search(r"check value \(of `123456789`\) `0x([0-9a-f]{16})`", TEXT)
    assert check is not None
    assert check[1] == reader.crc64nvme(b"123456789") == f"{crc64nvme(b'123456789'):016x}"


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "planes-zstd"])
def test_the_snippet_reads_what_a_real_save_stored_without_any_of_our_code(tmp_path: Path, compression: str) -> None:
    store = LocalStore(str(tmp_path / "run"))
    shared, own = sample_tensors(5, rows=40), own_tensors()
    with checkpointer(store, Events(), compression=compression) as saver:
        saver.save(5, shared, own, {"cursor": 1.5e-7}, {"name": "ü"})
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
    import numpy as np

    found = {name.replace("|", "/"): tensor for name, tensor in np.load(tmp_path / "out.npz").items()}
    assert found.keys() == {*shared, *own}
    for name, tensor in {**shared, **own}.items():
        assert found[name].tobytes() == raw_bytes(tensor), name


def test_the_snippet_follows_the_lineage_and_puts_cut_tensors_together(reader: ModuleType, tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "run"))
    for step in (10, 20, 30):
        write_checkpoint(store, step, split_state(sample_state(step, 20), 3))
    put_lease(store, 3, (1, None), (2, ManifestId(1, 20)))
    manifest, tensors = reader.load(Path(store.uri))
    assert manifest["step"] == 20
    for name, tensor in sample_state(20, 20).items():
        assert tensors[name].tobytes() == raw_bytes(tensor), name


@pytest.mark.parametrize("region", ["data", "index", "manifest"])
def test_the_snippet_notices_a_flipped_bit(reader: ModuleType, tmp_path: Path, region: str) -> None:
    store = LocalStore(str(tmp_path / "run"))
    manifest = write_checkpoint(store, 10, split_state(sample_state(10, 20), 2))
    put_lease(store, 1, (1, None))
    part = manifest.parts[1]
    key = {"data": part.data_key, "index": part.index_key, "manifest": manifest.id.key}[region]
    flip_bit(store, key, 50)
    with pytest.raises((AssertionError, ValueError)):
        reader.load(Path(store.uri))


@pytest.mark.parametrize("record", [Manifest, Part, RankIndex, Entry, Block])
def test_every_field_of_the_records_is_in_the_text(record: type) -> None:
    for name in record.__dataclass_fields__:  # type: ignore[attr-defined]
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", TEXT), f"{record.__name__}.{name} is not described"


def test_the_text_is_about_the_format_that_is_written() -> None:
    assert TEXT.startswith(f"# The layout of a run, format {FORMAT}\n")
    empty = Manifest(1, 1, "a", None, 0, "", ())
    assert b'"kind":"manifest"' in encode(empty)
