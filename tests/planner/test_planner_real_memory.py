"""The memory that a plan says is what real ranks hold, without and with shards and replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.memory import CPU, memory
from planner.strategy import Strategy
from tests.fork_server import ForkServer
from tests.planner.real_ranks import STRATEGIES, label, measured_peaks, work_of


@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
def test_peak_of_real_ranks_is_the_planned_one(strategy: Strategy, fork_server: ForkServer, tmp_path: Path) -> None:
    planned = memory(work_of(strategy), strategy, CPU)
    for peak in measured_peaks(fork_server, tmp_path, strategy):
        assert planned.total == pytest.approx(peak.total, rel=0.1)
