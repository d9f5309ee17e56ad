"""Next-token prediction on a tokenized text with the Llama-style decoder of `trainer.tasks.models.llama`."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from lustrain.problem import UserError, problem
from trainer.config import FP32_SMALLEST, Fraction, Section
from trainer.data.index import TOKENIZER, read_index
from trainer.data.shards import TokenSet
from trainer.data.tokenizer import HuggingFaceTokenizer
from trainer.data.verified import WAIT_S, Ranks
from trainer.storage import open_store
from trainer.tasks import Batch, Footprint, Ids, LossSum, Task, field_defaults
from trainer.tasks.models import llama

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

FORMER_PRESETS = {"gpt2-124m": "llama-124m"}
"""Names of earlier versions, which stored configs and users' files hold: it always was a Llama of GPT-2's size."""

LOGIT_BYTES = 12
"""Of one token and one word at the peak, whatever is computed with: the loss is fp32, and its backward pass holds the
logarithms, their gradient and that of the logits at once (`tests/trainer/test_task_language_model.py` counts them)."""


class ModelOptions(Section):
    """A preset, and whatever of it shall be different."""

    preset: Literal["tiny", "llama-124m", "1b", "8b"] = "tiny"
    """The size of a Llama; `gpt2-124m`, as llama-124m was called, is read too."""
    width: Annotated[int, Field(gt=0, le=2**17)] | None = None
    layers: Annotated[int, Field(gt=0, le=4096)] | None = None
    heads: Annotated[int, Field(gt=0, le=2**14)] | None = None
    kv_heads: Annotated[int, Field(gt=0, le=2**14)] | None = None
    hidden: Annotated[int, Field(gt=0, le=2**20)] | None = None
    """Width inside the feed-forward part."""
    vocab_size: Annotated[int, Field(gt=0, le=2**31)] | None = None
    """None: the tokenizer's; a larger one leaves room for padding or later tokens."""
    tied: bool | None = None
    """Whether the output layer uses the embedding's weights."""
    rope_theta: Annotated[float, Field(ge=1, le=1e15, allow_inf_nan=False)] | None = None
    norm_eps: Annotated[float, Field(ge=FP32_SMALLEST, le=1, allow_inf_nan=False)] | None = None
    dropout: Fraction | None = None

    @field_validator("preset", mode="before")
    @classmethod
    def _under_its_name_of_today(cls, value: object) -> object:
        return FORMER_PRESETS.get(value, value) if isinstance(value, str) else value

    def shape(self) -> llama.LlamaShape:
        """Return the preset with these overrides; the vocabulary is still 0 when it is left to the data."""
        return dataclasses.replace(llama.PRESETS[self.preset], **self.model_dump(exclude={"preset"}, exclude_none=True))


class LanguageModelOptions(Section):
    """What `[task]` may hold for a language model."""

    data: Annotated[str, Field(min_length=1)]
    """Folder or `s3://…` that `tokenize` wrote."""
    seq_len: Annotated[int, Field(gt=0, le=2**24)]
    """Tokens per sample that the model sees and predicts."""
    model: ModelOptions = ModelOptions()
    cache_bytes: Annotated[int, Field(gt=0, le=2**60)] = 8 << 30
    """Local disk that shards streamed from S3 may take."""
    verify: Literal["start", "background", "off"] = "start"
    """Whether the start waits for the checksums of local shards, up to a minute, or training begins at once."""
    loss_chunk: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Tokens whose logits exist at a time, recomputed in backward: less memory where the vocabulary is large. 0: all."""


class LanguageModel(Task):
    """A decoder trained on windows of seq_len + 1 tokens; the loss is cross-entropy in nats, counted in tokens."""

    Options = LanguageModelOptions
    options: LanguageModelOptions

    @classmethod
    def problems(cls, options: LanguageModelOptions) -> Sequence[str]:
        return llama.shape_problems(options.model.shape(), "task.model")

    def open(self, cache_dir: Path) -> None:
        options = self.options
        self._train = self._open_split("train", cache_dir)
        held_out = "val" in read_index(open_store(options.data, create=False, name="task.data")).splits
        self._eval = self._open_split("val", cache_dir) if held_out else None
        wanted, least = options.model.vocab_size, self._train.index.vocab_size
        self._shape = dataclasses.replace(options.model.shape(), vocab_size=wanted or least)
        problems = []
        if wanted is not None and wanted < least:
            why, fix = f"is smaller than the tokenizer's {least} tokens", "leave it out, or raise it"
            problems.append(problem("task.model.vocab_size", wanted, why, allowed=f">= {least}", fix=fix))
        if not self.train_samples:
            why = f"the training set has {self._train.tokens} tokens, less than one window of seq_len + 1"
            allowed, fix = f"< {self._train.tokens}", "lower it, or tokenize more text"
            problems.append(problem("task.seq_len", options.seq_len, why, allowed=allowed, fix=fix))
        if problems:
            raise UserError(problems)

    def verify(self, cache_dir: Path, ranks: Ranks) -> None:
        if self.options.verify == "off":
            return
        deadline = time.monotonic() + (WAIT_S if self.options.verify == "start" else 0.0)
        for token_set in (self._train, self._eval):
            if token_set is not None:
                token_set.verify(cache_dir, max(0.0, deadline - time.monotonic()), ranks)

    def check(self) -> None:
        for token_set in (self._train, self._eval):
            if token_set is not None:
                token_set.check()

    @property
    def train_samples(self) -> int:
        return self._train.windows(self.options.seq_len)

    @property
    def eval_samples(self) -> int:
        return self._eval.windows(self.options.seq_len) if self._eval else 0

    def _open_split(self, split: str, cache_dir: Path) -> TokenSet:
        options = self.options
        return TokenSet.open(
            options.data, split, cache_dir=cache_dir, cache_bytes=options.cache_bytes, name="task.data"
        )

    def build_model(self) -> llama.Llama:
        options = self.options
        return llama.build(self._shape, length=options.seq_len, seed=self.seed, loss_chunk=options.loss_chunk)

    def empty_model(self) -> llama.Llama:
        return llama.empty(self._shape, length=self.options.seq_len, loss_chunk=self.options.loss_chunk)

    def initialise(self, model: nn.Module) -> None:
        _llama(model).initialise(self.seed)

    def train_batch(self, ids: Ids) -> Batch:
        """{"tokens": [B, seq_len + 1]} in the stored dtype: two bytes a token to the device instead of sixteen."""
        return {"tokens": torch.from_numpy(self._train.gather(ids, self.options.seq_len))}

    def eval_batch(self, ids: Ids) -> Batch:
        if self._eval is None:
            raise ValueError("this token set has no val split: eval_samples is 0")
        return {"tokens": torch.from_numpy(self._eval.gather(ids, self.options.seq_len))}

    def prefetch(self, ids: Ids) -> None:
        self._train.prefetch(ids, self.options.seq_len)

    def close(self) -> None:
        for token_set in (self._train, self._eval):
            if token_set is not None:
                token_set.close()

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> LossSum:
        tokens = batch["tokens"].long()
        targets = tokens[:, 1:]
        return LossSum(model(tokens[:, :-1], targets), targets.numel())

    def tokens_per_sample(self) -> int:
        return self.options.seq_len

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(_llama(model).blocks)

    def embeddings(self, model: nn.Module) -> list[nn.Module]:
        return llama.embeddings(_llama(model))

    def tensor_plan(self, model: nn.Module) -> Mapping[str, ParallelStyle]:
        return llama.tensor_plan(_llama(model))

    def tensor_problems(self, tensor: int) -> Sequence[str]:
        shape, seq_len = self.options.model.shape(), self.options.seq_len
        return llama.tensor_problems(shape, tensor, length=seq_len, prefix="task")

    def flops_per_token(self, model: nn.Module) -> float:
        return llama.flops_per_token(_llama(model).shape, self.options.seq_len)

    def footprint(self, micro_batch: int) -> Footprint:
        shape, options = self._shape, self.options
        tokens = micro_batch * options.seq_len
        # Even with all recomputed, each block's input lives until backward, in bf16 at best.
        logits = min(tokens, options.loss_chunk or tokens) * shape.vocab_size * LOGIT_BYTES
        activations = tokens * shape.layers * shape.width * 2 + logits
        remedy = "shorten task.seq_len" if options.loss_chunk else "set task.loss_chunk, or shorten task.seq_len"
        return Footprint(llama.parameters(shape), activations, "task.model", remedy)

    def fingerprint_defaults(self) -> dict[str, Any]:
        return {"model": field_defaults(llama.LlamaShape)}

    def fingerprint(self) -> dict[str, Any]:
        return {
            "model": dataclasses.asdict(self._shape),
            "seq_len": self.options.seq_len,
            "data": self._train.index.checksum,
            "tokenizer": self._train.index.tokenizer_hash,
        }

    def export_names(self, model: nn.Module) -> dict[str, str]:
        return llama.huggingface_names(_llama(model))

    def export_config(self, model: nn.Module) -> dict[str, Any]:
        return llama.huggingface_config(_llama(model)) | self._special_ids()

    def export_files(self) -> dict[str, str]:
        tokenizer = self._train.tokenizer()
        files = {"generation_config.json": json.dumps(self._special_ids(), indent=2) + "\n"}
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            return files
        end = tokenizer.decode([tokenizer.eos_id])
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end}
        about_length = {"model_max_length": self.options.seq_len}
        files["tokenizer_config.json"] = json.dumps(about | about_length, indent=2) + "\n"
        return files | {TOKENIZER: tokenizer.text}

    def _special_ids(self) -> dict[str, int]:
        """Return the ids of begin and end, which transformers would take from Llama 2: one token is both, as in GPT-2."""
        eos_id = self._train.index.eos_id
        return {"bos_token_id": eos_id, "eos_token_id": eos_id}


def _llama(model: nn.Module) -> llama.Llama:
    if not isinstance(model, llama.Llama):
        raise TypeError(f"a language model's model is a Llama, not a {type(model).__name__}")
    return model
