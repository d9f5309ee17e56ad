"""`python -m trainer sample RUN_URI --prompt TEXT`: let the newest whole checkpoint of a language model continue a text."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lustrain.problem import UserError, problem
from trainer.checkpoint.lineage.lease import committed, live_manifests, read_lease
from trainer.checkpoint.load.latest import load_latest
from trainer.checkpoint.stored_config import read_stored
from trainer.data.shards import TokenSet
from trainer.data.tokenizer import Tokenizer
from trainer.metrics.terminal import event_line
from trainer.parallel.shards import local_shard
from trainer.parallel.votes import StoreVotes
from trainer.step import optim
from trainer.storage import ObjectStore, open_store
from trainer.tasks import resolve
from trainer.tasks.language_model import LanguageModel
from trainer.tasks.models import llama

Choose = Callable[[Tensor], int]
"""From the logits [V] of the next token to its id."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What decoding puts for bytes that are not a whole character yet."""


@dataclass(frozen=True)
class Stored:
    """What a run's stored config says about its model and its text."""

    shape: llama.LlamaShape
    seq_len: int
    data: str
    tokenizer_hash: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_URI", help="a run's folder or s3:// address")
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="what the text begins with")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="write at most N tokens (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token (%(default)s)"
    )
    parser.add_argument(
        "--top-k", type=int, default=50, metavar="K", help="only among the K likeliest; 0: all (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="the same seed writes the same text (%(default)s)")
    parser.add_argument("--data", metavar="URI", help="where the token set is now, if it was moved")


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation as it is made; UserError when the run has nothing to continue it with."""
    problems = argument_problems(args)
    if problems:
        raise UserError(problems)
    store = open_store(args.run, create=False, name="RUN_URI")
    stored = read_shape(store)
    tokenizer = read_tokenizer(stored, args.data or stored.data)
    model, step = load_model(store, stored)
    print(f"step {step} of {store.uri}", file=sys.stderr)
    choose = chooser(args.temperature, args.top_k, args.seed, tokenizer.vocab_size)
    prompt = tokenizer.encode(args.prompt)
    drawn = continuation(model, [tokenizer.eos_id, *prompt], args.tokens, choose, tokenizer.eos_id)
    print(args.prompt, end="", flush=True)
    for text in decoded(prompt, drawn, tokenizer):
        print(text, end="", flush=True)
    print()
    return 0


def argument_problems(args: argparse.Namespace) -> Sequence[str]:
    """Everything wrong with the arguments, one line each."""
    problems = []
    if not args.prompt:
        problems.append(problem("--prompt", args.prompt, "is empty", fix="give the model a word to begin with"))
    elif not _is_unicode(args.prompt):
        problems.append(problem("--prompt", args.prompt, "is not valid UTF-8"))
    if args.tokens < 1:
        problems.append(problem("--tokens", args.tokens, "is out of range", allowed=">= 1"))
    if not (math.isfinite(args.temperature) and args.temperature >= 0):
        problems.append(problem("--temperature", args.temperature, "is out of range", allowed=">= 0, finite"))
    if args.top_k < 0:
        problems.append(problem("--top-k", args.top_k, "is negative", allowed=">= 0; 0 takes all tokens"))
    if not 0 <= args.seed < 2**63:
        problems.append(problem("--seed", args.seed, "is out of range", allowed="0 to 2^63 - 1"))
    return problems


def read_shape(store: ObjectStore) -> Stored:
    """Return the model and the data of the run's training; UserError for a folder without a run or an unfit Task."""
    config = read_stored(store)
    if config is None:
        raise UserError(problem("RUN_URI", store.uri, "holds no run", fix="give the run.uri of a training"))
    settings = config.settings
    name = str(settings.get("task.name"))
    if not issubclass(resolve(name), LanguageModel):
        raise UserError(
            problem("task.name", name, "does not generate text", allowed="a run of the Task language_model")
        )
    prefix = "fingerprint.model."
    shape: dict[str, Any] = {k.removeprefix(prefix): v for k, v in settings.items() if k.startswith(prefix)}
    return Stored(
        shape=llama.LlamaShape(**shape),
        seq_len=int(settings["task.seq_len"]),
        data=str(settings["task.data"]),
        tokenizer_hash=str(settings["fingerprint.tokenizer"]),
    )


def read_tokenizer(stored: Stored, uri: str) -> Tokenizer:
    """Return the tokenizer beside the token set at `uri`; UserError unless the run was trained with it."""
    with tempfile.TemporaryDirectory(prefix="lustrain-sample-") as folder:
        tokens = TokenSet.open(uri, "train", cache_dir=Path(folder), cache_bytes=0, name="task.data")
        try:
            tokenizer = tokens.tokenizer()
        finally:
            tokens.close()
    if tokenizer.hash != stored.tokenizer_hash:
        why = f"has tokenizer {tokenizer.hash[:16]}…, the run was trained with {stored.tokenizer_hash[:16]}…"
        raise UserError(problem("task.data", uri, why, fix="give the run's own token set with --data"))
    return tokenizer


def load_model(store: ObjectStore, stored: Stored) -> tuple[llama.Llama, int]:
    """Return the run's model and the step of its newest checkpoint that verifies; print which are passed over.

    The model is in fp32 and evaluation mode, on a GPU where there is one.
    """
    model = llama.build(stored.shape, length=stored.seq_len, seed=0)
    shards = {name: local_shard(name, weight, ()) for name, weight in optim.model_tensors(model).items()}
    lease = read_lease(store)
    candidates = live_manifests(committed(store), lease.lineage, lease.generation) if lease else []
    loaded = load_latest(
        store,
        StoreVotes(HashStore(), 1),
        rank=0,
        world_size=1,
        candidates=candidates,
        read=lambda checkpoint: checkpoint.fill_shards(shards),
        on_event=lambda kind, fields: print(event_line(kind, fields), file=sys.stderr),
    )
    if loaded is None:
        fix = "train until the first save"
        raise UserError(problem("RUN_URI", store.uri, "holds no committed checkpoint", fix=fix))
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), loaded.manifest.step


def chooser(temperature: float, top_k: int, seed: int, vocab_size: int) -> Choose:
    """How the next token is drawn: a function of the arguments alone, the same on every device.

    Ids from `vocab_size` on (padding of the output layer) are never drawn. UserError when a logit is not finite.
    """
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> int:
        known = logits[:vocab_size].double().cpu()
        if not bool(torch.isfinite(known).all()):
            raise UserError("the model's output is not finite: its training has diverged; fix: sample an earlier run")
        if temperature == 0:
            return int(known.argmax())
        if 0 < top_k < len(known):
            known = known.masked_fill(known < known.topk(top_k).values[-1], -math.inf)
        scaled = (known - known.max()) / temperature
        return int(torch.multinomial(scaled.softmax(0), 1, generator=generator))

    return choose


@torch.no_grad()
def continuation(model: llama.Llama, ids: list[int], count: int, choose: Choose, end: int) -> Iterator[int]:
    """Up to `count` new ids after `ids`, until `end` is drawn; the model sees the last `model.length` ids."""
    device = next(model.parameters()).device
    seen = list(ids)
    for _ in range(count):
        window = torch.tensor([seen[-model.length :]], device=device)
        drawn = choose(model(window)[0, -1])
        if drawn == end:
            return
        seen.append(drawn)
        yield drawn


def decoded(prompt: list[int], drawn: Iterator[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of the drawn ids piece by piece; bytes of an unfinished character wait for the rest."""
    every = list(prompt)
    shown = tokenizer.decode(every)
    for number in drawn:
        every.append(number)
        text = tokenizer.decode(every)
        if not text.endswith(UNFINISHED):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(every)[len(shown) :]


def _is_unicode(text: str) -> bool:
    """Return False for what Python makes of command-line bytes that are not UTF-8 (lone surrogates)."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
