"""A node boots whatever comes late."""

from __future__ import annotations

import pytest

from rehearsal.lab.nodes import Node
from tests.lab.nodes import StartLab
from tests.processes import children_of, command_line, wait_until

pytestmark = pytest.mark.slow


def test_a_node_whose_link_comes_late_boots_and_sees_it(lab: StartLab, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(node: Node) -> None:
        """Until the node is at the wait for its link."""
        wait_until(lambda: "sleep .005" in map(command_line, children_of(node.pid)))
        connect(node)

    connect = Node._connect
    monkeypatch.setattr(Node, "_connect", late)
    assert lab(1).nodes[0].exists("/sys/class/net/eth0")
