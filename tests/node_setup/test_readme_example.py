"""The Cluster that README writes by hand is one that is read."""

from __future__ import annotations

import re
from pathlib import Path

from lustrain.cluster import read
from node_setup.agent.verify.expected import type_table

README = Path(__file__).parents[2] / "README.md"


def test_the_machines_of_the_readme_are_a_cluster_and_of_a_type_as_it_is(tmp_path: Path) -> None:
    (example,) = re.findall(r"```json\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    file = tmp_path / "machines.json"
    file.write_text(example, encoding="utf-8")
    cluster = read(file)
    group = cluster.groups["train"]
    known = type_table(group.type)
    assert known is not None
    assert (group.gpus, group.efa, group.nvme) == (known["gpus"], known["efa"], known["nvme"])
    assert len(cluster.nodes.addresses) == group.count
