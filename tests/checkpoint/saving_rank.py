"""One rank of a job that does nothing but save: `python -m tests.checkpoint.saving_rank PORT URI STEPS`, with torchrun's RANK.

Prints one line per outcome. After each save the tensors are overwritten with the next step's, as training would.
`--dies RANK STEP` kills that rank right after that save began.
"""

from __future__ import annotations

import argparse
import os
import signal
from datetime import timedelta

from torch.distributed import TCPStore

from tests.checkpoint.saving import PATIENCE_S, VotesWithout, sample_tensors
from trainer.checkpoint.lineage.lease import Lease
from trainer.checkpoint.save.saver import Checkpointer
from trainer.config import CheckpointConfig
from trainer.parallel.shards import Axis
from trainer.storage import open_store


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("uri")
    parser.add_argument("steps", type=int)
    parser.add_argument("--dies", type=int, nargs=2)
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    board = TCPStore("127.0.0.1", args.port, timeout=timedelta(seconds=PATIENCE_S))
    store, votes = open_store(args.uri), VotesWithout(board, world)
    lease = None
    if rank == 0:
        lease = Lease.acquire(store, "rank 0 of this test")
        lease.record_parent(None)
        votes.post("generation", 0, {"generation": lease.generation})
    saver = Checkpointer(
        store,
        votes,
        rank=rank,
        mesh=[Axis("rank", world, rank)],
        generation=votes.gather("generation", PATIENCE_S, ranks=[0])[0]["generation"],
        lease=lease,
        options=CheckpointConfig(vote_timeout_s=PATIENCE_S),
        parent=None,
        on_event=lambda kind, fields: None,
    )
    shared = sample_tensors(0)
    for step in range(1, args.steps + 1):
        for name, tensor in sample_tensors(step).items():
            shared[name].copy_(tensor)
        if args.dies and step == args.dies[1]:
            votes.lost = args.dies[0]
        saver.save(step, shared, {"step": step}, {})
        if args.dies == [rank, step]:
            os.kill(os.getpid(), signal.SIGKILL)
        for outcome in saver.wait(PATIENCE_S):
            print(outcome.step, outcome.committed, outcome.detail, flush=True)
    saver.close()


if __name__ == "__main__":
    main()
