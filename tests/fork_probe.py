"""`python -m tests.fork_probe CODE` runs a few lines as its own: `tests.test_fork_server` compares two ways to start it."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    exec(sys.argv[1])
