"""Export of a checkpoint's weights as safetensors files that Hugging Face libraries read: verified, whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from lustrain.problem import UserError, problem
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.load.parts import ITEM_BYTES, Places, read_manifest
from trainer.checkpoint.load.stored import StoredCheckpoint
from trainer.storage import ObjectStore

MODEL = "model/"
SHARD_BYTES = 5_000_000_000
"""The shard size that Hugging Face's `save_pretrained` had for years, and that every reader takes."""
INDEX = "model.safetensors.index.json"
_UNSUPPORTED = {"complex32", "complex128", "float4_e2m1fn_x2"}
"""Dtypes that safetensors has no name for."""


@dataclass(frozen=True)
class Weight:
    """One tensor to export: its name in the checkpoint and in the export, dtype, and bytes."""

    stored: str
    name: str
    dtype: str
    size: int


@dataclass(frozen=True)
class Exported:
    """What was written: the files' names in `folder`, and the bytes of the tensors in them."""

    folder: Path
    files: list[str]
    bytes: int


def export(
    store: ObjectStore,
    manifest_id: ManifestId,
    out_dir: str | Path,
    names: Mapping[str, str],
    *,
    config: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Exported:
    """Write one checkpoint's weights into the new folder `out_dir`, in shards, one of them in memory at a time.

    `names` maps parameter names to exported ones (absent: kept); `config` becomes `config.json`, and
    `files` are written beside it. UserError when the folder
    is not empty, when names collide or a dtype cannot be exported; CorruptObjectError when the checkpoint is damaged.
    """
    out = Path(out_dir).absolute()
    _require_free(out)
    checkpoint = StoredCheckpoint(Places(store), read_manifest(store, manifest_id))
    stored = [(each.name, each.dtype, prod(each.shape) * ITEM_BYTES[each.dtype]) for each in checkpoint.tensors()]
    weights = renamed(stored, names)
    shards = plan_shards(weights, shard_bytes)
    names_of_shards = shard_names(len(shards))
    with _appearing(out) as partial:
        for file, shard in zip(names_of_shards, shards, strict=True):
            wanted = {weight.stored: weight.name for weight in shard}
            tensors = checkpoint.read(wanted.__contains__)
            about = {"format": "pt", "lustrain_step": str(manifest_id.step)}
            save_file({wanted[name]: tensor for name, tensor in tensors.items()}, partial / file, metadata=about)
            on_bytes(sum(weight.size for weight in shard))
        _write_json(partial, INDEX, weight_map(names_of_shards, shards) if len(shards) > 1 else None)
        _write_json(partial, "config.json", config)
        for name, text in (files or {}).items():
            (partial / name).write_text(text, encoding="utf-8")
    return Exported(out, names_of_shards, sum(weight.size for weight in weights))


def renamed(stored: Sequence[tuple[str, str, int]], names: Mapping[str, str]) -> list[Weight]:
    """Pick the model's tensors from (name, dtype, bytes), by their exported names; UserError where one cannot be exported."""
    weights = []
    for name, dtype, size in stored:
        if name.startswith(MODEL):
            parameter = name.removeprefix(MODEL)
            weights.append(Weight(name, names.get(parameter, parameter), dtype, size))
    weights.sort(key=lambda weight: weight.name)
    problems = [
        problem(weight.stored, weight.dtype, "safetensors cannot hold this dtype")
        for weight in weights
        if weight.dtype in _UNSUPPORTED
    ]
    problems += [
        problem(first.stored, first.name, f"would be exported under the same name as {second.stored}")
        for first, second in pairwise(weights)
        if first.name == second.name
    ]
    if not weights:
        problems.append(problem("checkpoint", MODEL, "holds no tensors under this name"))
    if problems:
        raise UserError(problems)
    return weights


def plan_shards(weights: Sequence[Weight], limit: int) -> list[list[Weight]]:
    """Cut the weights, in order, into shards of at most `limit` bytes; a larger tensor has a shard of its own."""
    shards: list[list[Weight]] = [[]]
    filled = 0
    for weight in weights:
        if shards[-1] and filled + weight.size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += weight.size
    return shards


def shard_names(count: int) -> list[str]:
    """Return the file names that Hugging Face's `from_pretrained` looks for."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def weight_map(files: Sequence[str], shards: Sequence[Sequence[Weight]]) -> dict[str, Any]:
    """Build the content of `model.safetensors.index.json`: which file holds which tensor."""
    return {
        "metadata": {"total_size": sum(weight.size for shard in shards for weight in shard)},
        "weight_map": {weight.name: file for file, shard in zip(files, shards, strict=True) for weight in shard},
    }


def _require_free(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(problem("--out", str(out), "exists and is not an empty folder", fix="give a new folder"))


def _write_json(folder: Path, name: str, content: Mapping[str, Any] | None) -> None:
    if content:
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """Yield a folder to fill: on success it becomes `out`, durable and at once, and otherwise it is removed."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.parent / f".{out.name}.partial-{secrets.token_hex(8)}"
        partial.mkdir()
        try:
            yield partial
            # safetensors makes its files readable to their owner alone; the folder's mode shows what the umask allows.
            readable = partial.stat().st_mode & 0o666
            for path in partial.iterdir():
                path.chmod(readable)
                _sync(path)
            _sync(partial)
            os.replace(partial, out)
            _sync(out.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except (OSError, SafetensorError) as error:
        fix = "free space there, or give a folder on a different disk"
        raise UserError(problem("--out", str(out), f"cannot be written: {error}", fix=fix)) from error


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
