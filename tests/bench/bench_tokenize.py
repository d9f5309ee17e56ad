"""Tokenization with two processes and one tokenizer: ours against datatrove, `datasets.map`, and the bare tokenizer.

The corpus is real: Python sources that this machine has, as JSONL. The tokenizer is a byte-level BPE trained on a part of it.
Ours is timed from the start of the command to its exit. The peers are timed in their favour: without start and imports,
datatrove also without shuffling. The bare tokenizer is two processes that encode texts in memory, at
the same time, and keep nothing; it is compared with what our command does per second once it runs, which is the difference
between the whole corpus and a quarter of it, so that the second of starting up, the same for a terabyte, does not count.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import tiktoken
from tokenizers import Tokenizer

from tests.bench.harness import Row, interleaved, median, run_bench, timed
from trainer.data.byte_pairs import convert
from trainer.data.tokenizer import train

CORPUS_BYTES = 96_000_000
TRAINING_CHARACTERS = 20_000_000
VOCABULARY = 16_384
FILES = 8
PROCESSES = 2
BARS = {"datatrove": 2.0, "datasets": 3.0, "bare": 0.9}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}


def measure(repetitions: int = 5) -> list[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="lustrain-bench-tokenize-", dir=os.environ.get("LUSTRAIN_BENCH_DIR")))
    try:
        characters = write_corpus(folder)
        tokens, quarter = run_ours(folder, FILES)[1], run_ours(folder, FILES // 4)[1]
        seconds = interleaved(
            {
                "ours": lambda: run_ours(folder, FILES)[0],
                "ours, a quarter": lambda: run_ours(folder, FILES // 4)[0],
                "bare": lambda: run_bare(folder),
                "datatrove": lambda: run_peer("datatrove", folder, tokens),
                "datasets": lambda: run_peer("datasets", folder, tokens),
            },
            repetitions,
        )
    finally:
        shutil.rmtree(folder)
    took = {name: median(values) for name, values in seconds.items()}
    rate = {name: tokens / value / 1e6 for name, value in took.items()}
    running = (tokens - quarter) / (took["ours"] - took["ours, a quarter"]) / 1e6
    ours = {"datatrove": rate["ours"], "datasets": rate["ours"], "bare": running}
    names = {
        "datatrove": "datatrove DocumentTokenizer, 2 tasks",
        "datasets": "datasets.map(batched, num_proc=2) + .bin",
        "bare": "tiktoken alone, 2 processes at once",
    }
    return [
        Row(
            figure=f"tokenize {characters / 1e6:.0f} MB of text, {PROCESSES} processes, {VOCABULARY} ids",
            ours=ours[peer],
            baseline=rate[peer],
            ratio=ours[peer] / rate[peer],
            bar=BARS[peer],
            limit=rate["bare"],
            unit="Mtok/s",
            baseline_name=names[peer],
            limit_name=names["bare"],
            note=f"the whole command, start included, makes {rate['ours']:.3g} Mtok/s" if peer == "bare" else "",
        ).as_dict()
        for peer in BARS
    ]


def write_corpus(folder: Path) -> int:
    """JSONL files and a tokenizer in `folder`; returns how many characters of text there are."""
    (folder / "corpus").mkdir()
    texts = []
    size = 0
    for path in _sources():
        text = path.read_bytes().decode("utf-8", "replace")
        texts.append(text)
        size += len(text)
        if size >= CORPUS_BYTES:
            break
    for number in range(FILES):
        with (folder / "corpus" / f"{number}.jsonl").open("w") as file:
            for text in texts[number::FILES]:
                file.write(json.dumps({"text": text}) + "\n")
    share = max(1, size // TRAINING_CHARACTERS)
    (folder / "tokenizer.json").write_text(train(VOCABULARY, texts[::share]).text)
    return size


def _sources() -> Iterator[Path]:
    for name in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_paths()[name]).rglob("*.py")):
            if path.stat().st_size > 200 and (name != "stdlib" or "site-packages" not in path.parts):
                yield path


def run_ours(folder: Path, files: int) -> tuple[float, int]:
    """Seconds of the whole command on the first `files` files, and tokens made."""
    out = folder / "ours"
    shutil.rmtree(out, ignore_errors=True)
    words = [sys.executable, "-m", "trainer", "tokenize", "--out", out, "--val-fraction", "0"]
    words += [folder / "corpus" / f"{number}.jsonl" for number in range(files)]
    words += ["--tokenizer", folder / "tokenizer.json", "--workers", str(PROCESSES), "--json"]
    start = time.perf_counter()
    done = subprocess.run(list(map(str, words)), check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start, int(json.loads(done.stdout)["splits"]["train"]["tokens"])


def run_bare(folder: Path) -> float:
    """Seconds in which two processes, started together, encode half of the texts each."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(PROCESSES), context.SimpleQueue()
    workers = [context.Process(target=_bare, args=(folder, part, barrier, results)) for part in range(PROCESSES)]
    for worker in workers:
        worker.start()
    seconds = [float(results.get()) for _ in workers]
    for worker in workers:
        worker.join()
    return max(seconds)


def _bare(folder: Path, part: int, barrier: Barrier, results: Any) -> None:
    texts = [text for number in range(part, FILES, PROCESSES) for text in _texts(folder, number)]
    body = json.loads((folder / "tokenizer.json").read_text())
    pairs = convert(body, Tokenizer.from_str(json.dumps(body)))
    encoding = tiktoken.Encoding("bare", pat_str=pairs.words, mergeable_ranks=pairs.ranks, special_tokens={})
    barrier.wait()
    results.put(timed(lambda: [encoding.encode_ordinary(text) and None for text in texts]))


def _texts(folder: Path, number: int) -> Iterator[str]:
    with (folder / "corpus" / f"{number}.jsonl").open() as file:
        for line in file:
            yield json.loads(line)["text"]


def run_peer(name: str, folder: Path, tokens: int) -> float:
    """Seconds that the peer reports from a process of its own; it must do our work.

    A few texts spell special tokens; a tokenizer at its defaults takes them for those, so the counts differ by some dozens.
    """
    work = folder / name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    environment = {**os.environ, **OFFLINE, "HF_HOME": str(work / "home")}
    words = [sys.executable, "-m", "tests.bench.bench_tokenize", name, str(folder), str(work)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    if abs(result["tokens"] - tokens) > tokens / 10_000:
        raise RuntimeError(f"{name} made {result['tokens']} tokens of the same text, we made {tokens}")
    return float(result["seconds"])


def datatrove_peer(folder: Path, work: Path) -> dict[str, float]:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    def run() -> None:
        tokenizer = DocumentTokenizer(
            str(work / "out"),
            str(folder / "tokenizer.json"),
            eos_token="<|endoftext|>",
            shuffle_documents=False,
        )
        reader = JsonlReader(str(folder / "corpus"))
        LocalPipelineExecutor(
            [reader, tokenizer], tasks=PROCESSES, workers=PROCESSES, logging_dir=str(work / "logs")
        ).run()

    seconds = timed(run)
    return {"seconds": seconds, "tokens": sum(path.stat().st_size for path in (work / "out").rglob("*.ds")) // 2}


def datasets_peer(folder: Path, work: Path) -> dict[str, float]:
    import numpy as np
    from datasets import load_dataset

    files = sorted(str(path) for path in (folder / "corpus").iterdir())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")

    def encode(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        ids = [[*encoding.ids, end] for encoding in tokenizer.encode_batch_fast(batch["text"])]
        return {"ids": ids, "length": [len(row) for row in ids]}

    def run() -> int:
        data = load_dataset("json", data_files=files, split="train", cache_dir=str(work / "cache"))
        mapped = data.map(
            encode, batched=True, num_proc=PROCESSES, remove_columns=data.column_names, load_from_cache_file=False
        )
        total = int(np.sum(mapped["length"], dtype=np.int64))
        array = np.memmap(work / "train.bin", dtype=np.uint16, mode="w+", shape=(total,))
        position, parts = 0, 64
        for part in range(parts):
            batch = mapped.shard(num_shards=parts, index=part, contiguous=True).with_format("numpy")
            ids = np.concatenate(batch["ids"])
            array[position : position + len(ids)] = ids
            position += len(ids)
        array.flush()
        return total

    start = time.perf_counter()
    total = run()
    return {"seconds": time.perf_counter() - start, "tokens": total}


PEERS = {"datatrove": datatrove_peer, "datasets": datasets_peer}

if __name__ == "__main__":
    if len(sys.argv) > 3 and sys.argv[1] in PEERS:
        print(json.dumps(PEERS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))))
        sys.exit(0)
    sys.exit(run_bench(measure))
