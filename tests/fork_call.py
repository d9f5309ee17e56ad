"""One rank of `ForkServer.call`: `python -m tests.fork_call FOLDER PATH…` does what the folder says and leaves the result.

The paths are the caller's `sys.path`: pytest puts folders of tests into it.
"""

from __future__ import annotations

import os
import sys

import torch

if __name__ == "__main__":
    sys.path[:] = sys.argv[2:]
    rank = int(os.environ["RANK"])
    work, args = torch.load(f"{sys.argv[1]}/call", weights_only=False)
    torch.save(work(rank, *args), f"{sys.argv[1]}/{rank}")
