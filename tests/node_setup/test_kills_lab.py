"""`fab node-tune` and its agent are killed at random moments on real nodes: no file is half, and running it again is enough.

What is killed is the process with SIGKILL, not the machine: that a file outlives a loss of power rests on fsync and rename.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath

import pytest

from lustrain.files import UNFINISHED
from node_setup.agent import owned
from rehearsal.lab.node import Node
from rehearsal.lab.nodes import Lab
from tests.lab.nodes import StartLab
from tests.node_setup.lab_fleet import ROOT, Operator, Said
from tests.node_setup.lab_state import Files, files
from tests.processes import wait_until
from tests.seeds import chance

pytestmark = pytest.mark.slow

SIDE = 2
"""Nodes whose agent is killed in one round, and as many others whose fab is."""
FOLDERS = sorted({str(PurePosixPath(path).parent) for path in (*owned.PATHS, owned.AGENT)})
OTHER_SETTINGS = {
    "sysctl.vm.dirty_ratio": "on",
    "sysctl.net.core.somaxconn": "on",
    "slurmd-limit.nofile": "off",
    "clock.source": "off",
    "file.needrestart-slurmd": "off",
    "lustre.osc.max_dirty_mb": "on",
}
"""Of a second cluster: other lines in shared files, files that go, values that come."""


def ours(node: Node) -> Files:
    """All that is in the folders of our files; the report names its own time, and is only read."""
    found = dict(files(node, *FOLDERS))
    if report := found.pop(owned.REPORT, None):
        json.loads(report[1])
    return found


def unfinished(tree: Files) -> list[str]:
    return [path for path in tree if path.endswith(UNFINISHED) or "/.upload." in path]


def agents(node: Node) -> list[int]:
    """Processes of a tuning agent on the node, and of the timeout(1) around it."""
    found, rest = [], [node.pid]
    while rest:
        pid = rest.pop()
        with suppress(OSError):
            if b"agent.pyz\0tune" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
            rest += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return found


class Moments:
    """When to strike, in seconds after the beginning: spread over what an undisturbed one takes on such a node."""

    def __init__(self, chance: random.Random, slices: int) -> None:
        self._chance = chance
        self._slices = slices
        self._order: list[int] = []
        self.lasts: dict[str, float] = {}

    def next(self, kind: str) -> float:
        if not self._order:
            self._order = self._chance.sample(range(self._slices), self._slices)
        return self.lasts[kind] * (self._order.pop() + self._chance.random()) / self._slices

    def missed(self, kind: str, lasted: float) -> None:
        """One had ended before it was struck, and says how long they take while the others are at work."""
        self.lasts[kind] = (self.lasts[kind] + lasted) / 2


def strike_agent(node: Node, moments: Moments) -> bool:
    """SIGKILL to the agent and the timeout(1) around it, some time after they began; whether they were still at work."""
    after = moments.next(node.kind)
    wait_until(lambda: agents(node))
    began, found = time.monotonic(), agents(node)
    while time.monotonic() < began + after:
        if not any(Path(f"/proc/{pid}").exists() for pid in found):
            moments.missed(node.kind, time.monotonic() - began)
            return False
        time.sleep(0.005)
    found = agents(node)
    kill(found)
    return bool(found)


def strike_fab(command: Sequence[str], node: Node, moments: Moments) -> bool:
    """The same to a fab of its own."""
    after, began = moments.next(node.kind), time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True
    moments.missed(node.kind, time.monotonic() - began)
    return False


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Ordeal:
    """A lab that is brought from one cluster's wishes to another's and back, killed on the way each time.

    On each side one node, of GPUs and disks, is another and blank one every time; the others have what the last round left.
    """

    def __init__(self, lab: Lab, folder: Path, kills: int) -> None:
        """`kills` of the agent, and as many of fab."""
        self.lab = lab
        self.chance = chance("kills on nodes")
        self.operators = []
        for name, settings in (("one", None), ("other", OTHER_SETTINGS)):
            (folder / name).mkdir()
            self.operators.append(Operator(lab, folder / name, settings))
        self.agent_sided, self.fab_sided = lab.nodes[:SIDE], lab.nodes[SIDE:]
        self.new = {self.agent_sided[0], self.fab_sided[0]}
        self.wanted: list[dict[str, Files]] = []
        self.moments = {"agent": Moments(self.chance, kills), "fab": Moments(self.chance, kills)}
        self.struck = {"agent": 0, "fab": 0}
        self.undone = {"agent": 0, "fab": 0}
        self.left_over = 0

    def measure(self) -> None:
        """What each end state is, and how long it takes undisturbed: from nothing, and from the other one."""
        for node in self.new:
            node.set_hardware("p5")
        for number in (0, 1, 0):
            self.renew()
            began = time.monotonic()
            said = self.operators[number].fab("node-tune")
            assert said.status == 0, self.told(said)
            spent = time.monotonic() - began
            for kind in ("p5", "cpu"):
                seconds = [said.nodes[node.name]["seconds"] for node in self.lab.nodes if node.kind == kind]
                self.moments["agent"].lasts[kind] = max(seconds)
                self.moments["fab"].lasts[kind] = (
                    spent - max(one["seconds"] for one in said.nodes.values()) + max(seconds)
                )
            trees = {node.kind: ours(node) for node in self.lab.nodes}
            self.wanted = [*self.wanted, trees][:2]
            assert all(ours(node) == self.wanted[number][node.kind] for node in self.lab.nodes)

    def renew(self) -> None:
        for node in self.new:
            node.replace()

    def round(self, number: int) -> None:
        """One journey with a kill on each node; afterwards all is whole, and one more run brings all there."""
        to = number % 2
        self.renew()
        before = {node: ours(node) for node in self.lab.nodes}
        struck = self.strike(self.operators[to])
        wait_until(lambda: not any(agents(node) for node in self.lab.nodes))
        for node in self.lab.nodes:
            self.whole(node, before[node], self.wanted[to][node.kind])
        self.converges(to, struck)

    def strike(self, operator: Operator) -> dict[Node, bool]:
        command = operator.command("node-tune")
        with ThreadPoolExecutor(2 * SIDE) as pool:
            all_at_once = subprocess.Popen(
                [*command, "--limit", str(SIDE)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
            )
            strikes = {node: pool.submit(strike_agent, node, self.moments["agent"]) for node in self.agent_sided}
            for node in self.fab_sided:
                alone = [*command, "--node", node.address]
                strikes[node] = pool.submit(strike_fab, alone, node, self.moments["fab"])
            struck = {node: strike.result() for node, strike in strikes.items()}
        out, _ = all_at_once.communicate(timeout=300)
        if any(struck[node] for node in self.agent_sided):
            assert all_at_once.returncode == 1, out.decode()
        self.struck["agent"] += sum(struck[node] for node in self.agent_sided)
        self.struck["fab"] += sum(struck[node] for node in self.fab_sided)
        return struck

    def whole(self, node: Node, old: Files, new: Files) -> None:
        now = ours(node)
        strays = unfinished(now)
        self.left_over += len(strays)
        for path in {*now, *old, *new} - {*strays, owned.PENDING}:
            assert now.get(path) in (old.get(path), new.get(path)), f"{node.name}: {path} is neither old nor new"

    def converges(self, to: int, struck: Mapping[Node, bool]) -> None:
        said, again = (self.operators[to].fab("node-tune") for _ in range(2))
        assert said.status == 0, self.told(said)
        assert again.status == 0, self.told(again)
        for node in self.lab.nodes:
            side = "agent" if node in self.agent_sided else "fab"
            self.undone[side] += struck[node] and bool(said.rows(node.name, "changed", "reboot"))
            assert again.rows(node.name, "changed", "change", "failed", "unknown", "reboot") == []
            tree = ours(node)
            assert unfinished(tree) == []
            assert tree == self.wanted[to][node.kind], f"{node.name} ends otherwise than an undisturbed one"

    def told(self, said: Said) -> str:
        lines = [said.errors]
        for name, one in said.nodes.items():
            rows = (one.get("result") or {}).get("rows", [])
            bad = [row for row in rows if row["status"] in ("failed", "unknown", "conflict")]
            result = {key: (one.get("result") or {}).get(key) for key in ("refused", "unplanned", "errors")}
            lines.append(f"{name}: {one['outcome']} {one['status']} {one['why']} {result} {bad}")
        return "\n".join(lines)


def kill_again_and_again(lab: Lab, folder: Path, kills: int) -> None:
    """`kills` of the agent, and as many of fab."""
    ordeal = Ordeal(lab, folder, kills)
    ordeal.measure()
    rounds = 0
    while min(ordeal.struck.values()) < kills:
        rounds += 1
        assert rounds <= 2 * kills, f"only {ordeal.struck} struck"
        ordeal.round(rounds)
    found = f"struck {ordeal.struck}, of these left with work to do {ordeal.undone}"
    assert ordeal.undone["agent"] >= kills // 3, found
    # An agent whose fab was killed goes on, so that only what was struck before it began is left undone.
    assert ordeal.undone["fab"] >= kills // 10, found


@pytest.mark.timeout(1500)
def test_26_kills_leave_whole_files_and_the_next_run_converges(lab: StartLab, tmp_path: Path) -> None:
    kill_again_and_again(lab(2 * SIDE, "cpu"), tmp_path, 13)


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_100_kills_leave_whole_files_and_the_next_run_converges(lab: StartLab, tmp_path: Path) -> None:
    kill_again_and_again(lab(2 * SIDE, "cpu"), tmp_path, 50)


KILLER = """#!/bin/sh
case "$*" in
"{arguments}") kill -KILL $PPID ;;
*) exec /usr/local/bin/{program} "$@" ;;
esac
"""


@pytest.mark.parametrize(
    ("program", "arguments", "off", "shown", "new"),
    [
        (
            "systemctl",
            "daemon-reload",
            ("slurmd-limit.memlock", "slurmd-limit.nofile", "slurmd-limit.stack"),
            ("systemctl", "show", "slurmd.service", "-p", "LimitMEMLOCK,NeedDaemonReload"),
            "LimitMEMLOCK=infinity",
        ),
        ("chronyc", "reload sources", ("clock.source",), ("chronyc", "-c", "tracking"), "169.254.169.123"),
    ],
)
def test_next_run_loads_a_file_that_a_killed_agent_wrote(
    lab: StartLab,
    tmp_path: Path,
    program: str,
    arguments: str,
    off: Sequence[str],
    shown: Sequence[str],
    new: str,
) -> None:
    running = lab(1, "cpu")
    node = running.nodes[0]
    (tmp_path / "before").mkdir()
    before = Operator(running, tmp_path / "before", dict.fromkeys(off, "off"))
    operator = Operator(running, tmp_path)
    assert before.fab("node-tune").status == 0
    # From here on both are known to have read what there is now.
    node.exec("chronyc", "reload", "sources")
    node.exec("systemctl", "restart", "slurmd.service")
    old = node.exec(*shown).stdout
    node.write(f"/usr/local/sbin/{program}", KILLER.format(program=program, arguments=arguments), 0o755)
    assert operator.fab("node-tune").status == 1
    node.exec("rm", f"/usr/local/sbin/{program}")
    assert node.exec(*shown).stdout.replace("NeedDaemonReload=yes", "NeedDaemonReload=no") == old
    check, mended = operator.fab("node-tune", "--check"), operator.fab("node-tune")
    assert (mended.status, mended.rows("node1", "failed")) == (0, [])
    assert new in node.exec(*shown).stdout
    assert "NeedDaemonReload=yes" not in node.exec(*shown).stdout
    assert (check.status, "agent.cut-off" in check.rows("node1", "change")) == (4, True)
    assert "agent.cut-off" in mended.rows("node1", "changed")
    assert operator.fab("node-tune", "--check").status == 0
    assert not node.exists(owned.PENDING)
