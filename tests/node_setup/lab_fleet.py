"""`fab` against the nodes of a lab, as an operator would call it: a process of its own, with a Cluster in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lustrain.cluster import to_json
from rehearsal.lab.cluster import cluster_of
from rehearsal.lab.nodes import Lab

ROOT = Path(__file__).parents[2]
PATIENT = {
    f"FABRIC_NODE_SETUP_{name}_S": seconds
    for name, seconds in (("CONNECT", "60"), ("LOGIN", "300"), ("CHANNEL", "300"))
}
"""Limits of a connection that no busy machine reaches; a node that is away costs its whole time."""


@dataclass(frozen=True)
class Said:
    """What one `fab` task came to; `nodes` by the name that the lab has for them."""

    status: int
    report: Mapping[str, Any]
    errors: str
    nodes: Mapping[str, Mapping[str, Any]]

    def rows(self, node: str, *statuses: str) -> list[str]:
        """Settings of a node that have one of the statuses."""
        return [row["setting"] for row in self.nodes[node]["result"]["rows"] if row["status"] in statuses]


class Operator:
    """Someone with a Cluster file and a recorded host key for each node. `settings` is the Cluster's tuning, `more` further
    keys of it."""

    def __init__(self, lab: Lab, folder: Path, settings: Mapping[str, str] | None = None, **more: Any) -> None:
        self._lab = lab
        self.cluster = folder / "cluster.json"
        self.write(to_json(cluster_of(lab, settings)) | more)
        self.known_hosts = folder / "known_hosts"

    def write(self, cluster: Mapping[str, Any]) -> None:
        self.cluster.write_text(json.dumps(cluster))

    def command(self, task: str, *flags: str) -> list[str]:
        self.known_hosts.write_text(Path(self._lab.known_hosts).read_text())
        own = ["--cluster", str(self.cluster), "--known-hosts", str(self.known_hosts), "--strict-host-keys", "--json"]
        return [sys.executable, "-m", "fabric", task, *own, *flags]

    def start(self, task: str, *flags: str) -> subprocess.Popen[str]:
        """The task as a process of its own, of whose end `said` tells."""
        return subprocess.Popen(
            self.command(task, *flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **PATIENT},
        )

    def fab(self, task: str, *flags: str) -> Said:
        return self.said(self.start(task, *flags))

    def said(self, process: subprocess.Popen[str]) -> Said:
        """What a started task came to; AssertionError with its words where that is no report."""
        try:
            out, err = process.communicate(timeout=600)
        finally:
            process.kill()
        assert out.startswith("{"), out + err
        report = json.loads(out)
        names = {node.address: node.name for node in self._lab.nodes}
        nodes = {names[one["address"]]: one for one in report["nodes"]}
        return Said(process.returncode, report, err, nodes)
