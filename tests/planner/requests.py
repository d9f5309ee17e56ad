"""A configuration, a Cluster and a run for the planner, as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tomli_w

from planner.flags import PlanFlags
from planner.plan import Plan, plan
from planner.request import resolve_request

SETTINGS: dict[str, Any] = {
    "run": {"uri": "runs/8b"},
    "task": {
        "name": "language_model",
        "data": "tokens",
        "seq_len": 4096,
        "model": {"preset": "8b", "vocab_size": 128_256},
    },
    "train": {"steps": 100, "global_batch": 512, "micro_batch": 1},
    "precision": {"mode": "bf16"},
    "parallel": {"shard": 0},
}
CLUSTER: dict[str, Any] = {
    "name": "llm",
    "backend": "machines",
    "region": "us-east-2",
    "nodes": {"addresses": ["10.0.0.1"]},
    "reach": {"via": "ssh"},
    "groups": {
        "login": {"type": "m5.large", "count": 1, "role": "login"},
        "train": {"type": "p5en.48xlarge", "count": 4, "gpus": 8, "efa": 16},
    },
    "runs_uri": "s3://team/runs/",
    "capacity": {"mode": "spot"},
}


class Files:
    """Writes into a folder and plans from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.toml"
        self.config.write_text(tomli_w.dumps(SETTINGS))

    def cluster(self, **groups: Any) -> str:
        path = self.folder / "cluster.json"
        path.write_text(json.dumps(CLUSTER | {"groups": CLUSTER["groups"] | groups}))
        return str(path)

    def flags(self, **more: Any) -> PlanFlags:
        own: dict[str, Any] = {"instance_type": "p5.48xlarge", "nodes": "4", "tokens": "1T"}
        return PlanFlags(config=str(self.config), **own | more)

    def plan(self, **more: Any) -> Plan:
        return plan(resolve_request(self.flags(**more)))
