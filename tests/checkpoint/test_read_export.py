"""Promises of the safetensors export: what Hugging Face's readers expect, bit for bit, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lustrain.problem import UserError
from tests.checkpoint.written import assert_same, flip_bit, sample_state, split_state, whole, write_checkpoint
from trainer.checkpoint.load.export import export, plan_shards, renamed, shard_names
from trainer.storage import CorruptObjectError
from trainer.storage.local import LocalStore


def model_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model/"): tensor for name, tensor in state.items() if name.startswith("model/")}


@pytest.mark.parametrize("world", [1, 3])
def test_the_models_weights_alone_come_out_under_the_given_names(store: LocalStore, tmp_path: Path, world: int) -> None:
    manifest = write_checkpoint(store, 7, split_state(sample_state(7), world))
    out = tmp_path / "out"
    done = export(store, manifest.id, out, {"embed.weight": "model.embed_tokens.weight"}, config={"model_type": "x"})
    expected = model_of(sample_state(7))
    expected["model.embed_tokens.weight"] = expected.pop("embed.weight")
    assert_same(load_file(out / "model.safetensors"), expected)
    assert json.loads((out / "config.json").read_text()) == {"model_type": "x"}
    assert done.files == ["model.safetensors"]
    assert done.bytes == sum(tensor.nbytes for tensor in expected.values())
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "lustrain_step": "7"}


@pytest.mark.parametrize(("umask", "folder_mode", "file_mode"), [(0o022, 0o755, 0o644), (0o027, 0o750, 0o640)])
def test_the_umask_alone_decides_who_may_read_an_export(
    store: LocalStore, tmp_path: Path, umask: int, folder_mode: int, file_mode: int
) -> None:
    manifest = write_checkpoint(store, 7, split_state(sample_state(7), 1))
    before = os.umask(umask)
    try:
        export(store, manifest.id, tmp_path / "out", {}, config={"model_type": "x"}, shard_bytes=900)
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == folder_mode
    files = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert len(files) > 3
    assert set(files.values()) == {file_mode}, files


def test_large_model_is_cut_into_shards_that_index_file_names(store: LocalStore, tmp_path: Path) -> None:
    state = {f"model/layer{i}.weight": torch.full((100,), float(i)) for i in range(5)}
    manifest = write_checkpoint(store, 7, split_state(state, 2))
    done = export(store, manifest.id, tmp_path / "out", {}, shard_bytes=900)
    assert done.files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 2000}
    found = {name: load_file(tmp_path / "out" / file)[name] for name, file in index["weight_map"].items()}
    assert_same(found, model_of(state))


def test_shards_keep_to_the_limit_unless_one_tensor_is_larger() -> None:
    sizes = [4, 4, 4, 20, 1, 9, 1]
    weights = renamed([(f"model/{i}", "uint8", size) for i, size in enumerate(sizes)], {})
    assert [[w.size for w in shard] for shard in plan_shards(weights, 10)] == [[4, 4], [4], [20], [1, 9], [1]]
    assert shard_names(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_what_cannot_be_exported_is_named_before_writing(store: LocalStore, tmp_path: Path) -> None:
    state = {"model/a": torch.ones(2), "model/b": torch.ones(2), "model/c": torch.ones(2, dtype=torch.complex128)}
    manifest = write_checkpoint(store, 7, [{name: whole(tensor) for name, tensor in state.items()}])
    with pytest.raises(UserError) as caught:
        export(store, manifest.id, tmp_path / "out", {"a": "same", "b": "same"})
    assert len(caught.value.problems) == 2
    assert not (tmp_path / "out").exists()


def test_a_run_without_model_weights_says_so(store: LocalStore, tmp_path: Path) -> None:
    manifest = write_checkpoint(store, 7, [{"optim/step": whole(torch.ones(1))}])
    with pytest.raises(UserError, match="holds no tensors under this name"):
        export(store, manifest.id, tmp_path / "out", {})


def test_a_damaged_checkpoint_leaves_no_folder_behind(store: LocalStore, tmp_path: Path) -> None:
    manifest = write_checkpoint(store, 7, split_state(sample_state(7), 2))
    flip_bit(store, manifest.parts[0].data_key, 10)
    with pytest.raises(CorruptObjectError, match="rank 0"):
        export(store, manifest.id, tmp_path / "out", {})
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_folder_with_anything_in_it_is_never_written_to(store: LocalStore, tmp_path: Path) -> None:
    manifest = write_checkpoint(store, 7, split_state(sample_state(7), 2))
    out = tmp_path / "out"
    out.mkdir()
    export(store, manifest.id, out, {})
    before = sorted(p.name for p in out.iterdir())
    with pytest.raises(UserError, match="not an empty folder"):
        export(store, manifest.id, out, {})
    assert sorted(p.name for p in out.iterdir()) == before


def test_a_place_that_cannot_be_written_is_one_line(store: LocalStore, tmp_path: Path) -> None:
    manifest = write_checkpoint(store, 7, split_state(sample_state(7), 2))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out = .*cannot be written"):
        export(store, manifest.id, tmp_path / "file" / "out", {})
