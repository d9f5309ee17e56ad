"""Upload data path, 512 MB from memory into an S3 that discards: ours against boto3 and s3torchconnector, interleaved.

Ours is what a save does: CRC-64/NVME of all bytes, `put_file` from a memory file, and the check of the stored object.
boto3 is `upload_file` of the same memory file with 8 MiB parts at several thread counts, the best of which is the
baseline. s3torchconnector is its writer for torch.distributed.checkpoint, saving tensors of the same size. Client and
sink share the machine.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any, cast

import boto3
import torch
from awscrt.checksums import crc64nvme
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from s3torchconnector._s3client import S3Client
from s3torchconnector.dcp import S3StorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from infra.local.aws import REGION, client_environment
from tests.bench.harness import Row, interleaved, median, memcpy_seconds, run_bench, timed
from tests.lab.null_s3 import NullS3
from trainer.storage import open_store

SIZE = 512 << 20
TENSORS = 64
BOTO_THREADS = (1, 4, 10)
DCP_THREADS = (1, 2)
PART_BYTES = 8 << 20


class Meter:
    """Wraps an upload: MB/s of wall clock, and the CPU seconds that this process spent, kept per name."""

    def __init__(self) -> None:
        self.cpu: dict[str, list[float]] = {}

    def of(self, name: str, upload: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            before = _cpu_seconds()
            seconds = timed(upload)
            self.cpu.setdefault(name, []).append((_cpu_seconds() - before) / (SIZE / 1e9))
            return SIZE / 1e6 / seconds

        return run


def measure(repetitions: int = 5) -> list[dict[str, Any]]:
    """Two rows: against the best boto3 and against the best s3torchconnector setting of the same run."""
    torch.set_num_threads(1)
    os.environ.update(client_environment())
    state = {f"layer.{i}": torch.full((SIZE // TENSORS // 4,), float(i)) for i in range(TENSORS)}
    source = _memory_file(state)
    meter = Meter()
    with NullS3() as sink:
        os.environ["AWS_ENDPOINT_URL"] = sink.endpoint
        cases = {name: meter.of(name, upload) for name, upload in _uploads(sink.endpoint, source, state).items()}
        for warm_up in cases.values():
            warm_up()
        meter.cpu.clear()
        speeds = {name: median(values) for name, values in interleaved(cases, repetitions).items()}
        copy = SIZE / 1e6 / median([memcpy_seconds(SIZE) for _ in range(repetitions)])
    ours = speeds.pop("ours")
    rows = []
    for peer, bar in (("boto3", 3.0), ("s3torchconnector DCP", 1.3)):
        best = max((name for name in speeds if name.startswith(peer)), key=speeds.__getitem__)
        cpu = f"client CPU {median(meter.cpu['ours']):.2f} against {median(meter.cpu[best]):.2f} s/GB"
        others = ", ".join(
            f"{name} {speed:.0f}" for name, speed in speeds.items() if name != best and name.startswith(peer)
        )
        rows.append(
            Row(
                figure="upload, data path against a null sink, 512 MB",
                ours=ours,
                baseline=speeds[best],
                ratio=ours / speeds[best],
                bar=bar,
                limit=copy,
                unit="MB/s",
                baseline_name=best,
                limit_name="2-thread memcpy",
                note=f"{cpu}; {others}",
            ).as_dict()
        )
    return rows


def _uploads(endpoint: str, source: str, state: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    store = open_store("s3://bench-bucket/run")
    uploads: dict[str, Callable[[], object]] = {
        "ours": lambda: store.put_file("attempts/a/rank-00000.bin", source, SIZE, _checksum(source))
    }
    for threads in BOTO_THREADS:
        uploads[f"boto3 {threads} threads"] = _boto_upload(source, threads)
    for threads in DCP_THREADS:
        uploads[f"s3torchconnector DCP {threads} threads"] = _dcp_upload(endpoint, state, threads)
    return uploads


def _checksum(source: str) -> int:
    total, chunk = 0, memoryview(bytearray(1 << 20))
    fd = os.open(source, os.O_RDONLY)
    try:
        for offset in range(0, SIZE, len(chunk)):
            count = os.preadv(fd, [chunk], offset)
            total = crc64nvme(chunk[:count], total)
    finally:
        os.close(fd)
    return total


def _boto_upload(source: str, threads: int) -> Callable[[], object]:
    client = boto3.client("s3", config=Config(max_pool_connections=threads + 2))
    transfer = TransferConfig(
        multipart_chunksize=PART_BYTES,
        max_concurrency=threads,
        use_threads=threads > 1,
        preferred_transfer_client="classic",
    )
    return lambda: client.upload_file(source, "bench-bucket", "boto", Config=transfer)


def _dcp_upload(endpoint: str, state: dict[str, torch.Tensor], threads: int) -> Callable[[], object]:
    def save() -> object:
        writer = S3StorageWriter(REGION, "s3://bench-bucket/dcp", thread_count=threads, overwrite=True)
        # The writer offers no endpoint; its client is made the way it makes it, but for that.
        cast("Any", writer.fs)._client = S3Client(region=REGION, endpoint=endpoint)
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            return dcp_save(state, storage_writer=writer, no_dist=True)

    return save


def _memory_file(state: dict[str, torch.Tensor]) -> str:
    fd = os.memfd_create("bench")
    for tensor in state.values():
        os.write(fd, tensor.numpy().tobytes())
    return f"/proc/self/fd/{fd}"


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    sys.exit(run_bench(measure))


if __name__ == "__main__":
    main()
