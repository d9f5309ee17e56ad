"""`fab node-tune` against Ansible and pyinfra: the same settings on the same nodes of a lab, whole commands as users run them.

Nodes are real ones as far as that goes (`rehearsal.lab`): their own sshd, files and processes, on the same cores as the tool
that tunes them. systemctl, chronyc and lctl are stand-ins there, which take some 25 ms of CPU a call, several times what the
real ones take; the tool that calls them oftener is at a disadvantage by that, and `note` says how often each did.

The peers are installed into `.work/peers` once; LUSTRAIN_PEERS names an environment where they are already. Needs root.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lustrain.cluster import to_json
from rehearsal.lab.cluster import cluster_of
from rehearsal.lab.hardware import KINDS
from rehearsal.lab.node import Node
from rehearsal.lab.nodes import Lab, why_not
from tests.bench.harness import Row, interleaved, median, run_bench, timed
from tests.bench.peers import Ansible, PeerError, Pyinfra, Target, installed
from tests.bench.same_settings import SETTINGS, SWITCHED_ON, Wanted, derived
from tests.lab.faults import calls

ROOT = Path(__file__).parents[2]
WORK = Path(__file__).with_name(".work")
KIND = "bench"
FEW, MANY = 8, 64
AT_ONCE = 4
CALLED = ("systemctl", "chronyc", "lctl")


@dataclass
class Pass:
    """What one run of ours came to: seconds and CPU seconds of `fab`, and what it reported."""

    seconds: float
    cpu_s: float
    report: dict[str, Any]

    @property
    def changed(self) -> int:
        return sum(row["status"] == "changed" for node in self.report["nodes"] for row in node["result"]["rows"])

    def each(self, name: str) -> list[int]:
        """A figure of every node's traffic."""
        return [node[name] for node in self.report["nodes"]]


class Ours:
    """`fab node-tune` as a process, over the first `count` nodes of the lab."""

    def __init__(self, lab: Lab, folder: Path, count: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        cluster = folder / "cluster.json"
        whole = cluster_of(lab, dict.fromkeys(SWITCHED_ON, "on"))
        nodes = whole.nodes.model_copy(update={"addresses": whole.nodes.addresses[:count]})
        cluster.write_text(json.dumps(to_json(whole.model_copy(update={"nodes": nodes}))))
        only = ["--only", ",".join(SETTINGS)]
        where = [
            "--cluster",
            str(cluster),
            "--known-hosts",
            lab.known_hosts,
            "--strict-host-keys",
            "--max-parallel",
            "32",
        ]
        self.command = [str(Path(sys.executable).with_name("fab")), "node-tune", *where, *only, "--json"]
        self.last: Pass | None = None

    def __call__(self) -> int:
        """Run once; how many settings changed, of all nodes together."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        said: list[subprocess.CompletedProcess[str]] = []
        seconds = timed(lambda: said.append(subprocess.run(self.command, cwd=ROOT, capture_output=True, text=True)))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if said[0].returncode:
            raise PeerError(f"fab ended with {said[0].returncode}: {said[0].stdout[-2000:]}{said[0].stderr[-2000:]}")
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.last = Pass(seconds, cpu, json.loads(said[0].stdout))
        return self.last.changed


class Bench:
    """A lab, and the three tools that shall bring its nodes to the same state."""

    def __init__(self, lab: Lab, folder: Path, programs: Path) -> None:
        self.lab = lab
        self.ours = Ours(lab, folder / "ours", FEW)
        self.wanted = self._derive()
        targets = [Target(node.address, lab.key) for node in lab.nodes]
        python = lab.nodes[0].exec("sh", "-c", "command -v python3").stdout.strip()
        self.ansible = Ansible(programs, folder / "ansible", self.wanted, targets, lab.known_hosts, python)
        self.pyinfra = Pyinfra(programs, folder / "pyinfra", self.wanted, targets, lab.known_hosts)
        self.tools: dict[str, Callable[[], int]] = {
            "ours": self.ours,
            "Ansible": self.ansible,
            "pyinfra": self.pyinfra,
        }
        self.calls: dict[str, dict[str, int]] = {}

    def _derive(self) -> Wanted:
        node = self.lab.nodes[0]
        folders = set(node.exec("find", "/etc", "-type", "d").stdout.splitlines())
        self.ours()
        assert self.ours.last is not None
        found = derived(self.ours.last.report["nodes"][0]["result"]["rows"], node, folders.__contains__)
        self._check("ours", found)
        return found

    def _check(self, name: str, wanted: Wanted) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for node, wrong in zip(self.lab.nodes, pool.map(wanted.missing, self.lab.nodes), strict=True):
                if wrong:
                    raise PeerError(f"{name} left {node.name} without what it was told: {'; '.join(wrong)}")

    def renew(self) -> None:
        """Nodes as they come from the image: nothing that any tool brought is left."""
        self.ansible.disconnect()
        renew(self.lab)

    def first(self, name: str) -> float:
        """Seconds of a first pass over nodes that are as their image is. PeerError unless they are then as wanted."""
        self.renew()
        changed: list[int] = []
        seconds = timed(lambda: changed.append(self.tools[name]()))
        if changed[0] < self.wanted.tasks:
            raise PeerError(f"{name} found nodes that were tuned already: {changed[0]} changes")
        self._check(name, self.wanted)
        return seconds

    def settle(self) -> None:
        """Bring what each tool keeps for itself to all nodes, so that none of them has anything left to change."""
        for name, tool in self.tools.items():
            tool()
            self._check(name, self.wanted)

    def again(self, name: str) -> float:
        """Seconds of a pass that finds everything in order. PeerError if it changed something."""
        before = called(self.lab.nodes)
        changed: list[int] = []
        seconds = timed(lambda: changed.append(self.tools[name]()))
        if changed[0]:
            raise PeerError(f"{name} changes {changed[0]} things on nodes that it had brought in order")
        self.calls[name] = {program: count - before[program] for program, count in called(self.lab.nodes).items()}
        return seconds


def renew(lab: Lab) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(Node.replace, lab.nodes))
    # Their keys are new as well: asked for, the lab writes the file that all tools read.
    assert lab.known_hosts


def called(nodes: Iterable[Node]) -> dict[str, int]:
    """How often stand-ins were called on all nodes since they booted."""
    nodes = list(nodes)
    return {program: sum(len(calls(node, program)) for node in nodes) for program in CALLED}


def bare_ssh(lab: Lab) -> float:
    """Seconds until OpenSSH has run `true` on all nodes at once."""
    options = ["-o", f"UserKnownHostsFile={lab.known_hosts}", "-o", "BatchMode=yes", "-i", lab.key]

    def once() -> None:
        started = [subprocess.Popen(["ssh", *options, f"root@{node.address}", "true"]) for node in lab.nodes]
        if any(process.wait() for process in started):
            raise PeerError("OpenSSH reached not all nodes")

    return timed(once)


def nodes_cpu_s(nodes: Iterable[Node]) -> float:
    """CPU seconds of all that the nodes' sshd has started and that has ended (proc(5): cutime and cstime)."""
    ticks = 0
    for node in nodes:
        for child in Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split():
            name, _, rest = Path(f"/proc/{child}/stat").read_text().partition("(")[2].rpartition(")")
            if name == "sshd":
                ticks += sum(map(int, rest.split()[13:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(repetitions: int = 5) -> list[dict[str, Any]]:
    if missing := why_not():
        sys.exit(f"bench_nodes: {missing}")
    # A machine with this much memory is tuned in its limits of dirty pages as well.
    KINDS[KIND] = replace(KINDS["cpu"], type="r7i.48xlarge", cpus=192, memory_gib=1536)
    programs = installed(WORK / "peers")
    # Sockets of kept connections lie below it, and their paths may have no more than 104 characters.
    with tempfile.TemporaryDirectory(prefix="lustrain-") as name:
        folder = Path(name)
        print(f"booting {FEW} nodes", file=sys.stderr, flush=True)
        with Lab(FEW, KIND) as lab:
            rows = few(Bench(lab, folder, programs), repetitions)
        print(f"booting {MANY} nodes", file=sys.stderr, flush=True)
        with Lab(MANY, KIND) as lab:
            rows += many(lab, folder, repetitions)
    return [row.as_dict() for row in rows]


def few(bench: Bench, repetitions: int) -> list[Row]:
    wanted, lab = bench.wanted, bench.lab
    what = f"{wanted.tasks} settings ({wanted.states} values, files and switches)"
    print(f"compared: {what}", file=sys.stderr, flush=True)
    try:
        first = interleaved({name: lambda name=name: bench.first(name) for name in bench.tools}, repetitions)
        trips = {"first": traffic(bench.ours.last)} if bench.ours.last else {}
        bench.settle()
        cases = {name: lambda name=name: bench.again(name) for name in bench.tools}
        again = interleaved({**cases, "bare ssh": lambda: bare_ssh(lab)}, repetitions)
        trips["again"] = traffic(bench.ours.last) if bench.ours.last else (0, 0, 0)
    finally:
        bench.ansible.disconnect()
    calls = {name: sum(found.values()) / FEW for name, found in bench.calls.items()}
    rows = []
    for head, took, bars in (("no change", again, (10, 3)), ("first pass", first, (5, 2))):
        for peer, bar in zip(("Ansible", "pyinfra"), bars, strict=True):
            note = f"{what}; stand-ins called per node: ours {calls['ours']:g}, {peer} {calls[peer]:g}"
            rows.append(
                _faster(
                    f"{head} over {FEW} nodes, against {peer}",
                    took["ours"],
                    took[peer],
                    bar,
                    median(again["bare ssh"]),
                    peer,
                    note if head == "no change" else what,
                )
            )
    return [*rows, _round_trips("no change", trips["again"], 1), _round_trips("first pass", trips["first"], 2)]


def many(lab: Lab, folder: Path, repetitions: int) -> list[Row]:
    """A pass without changes over all nodes of a larger lab against one over a single one: seconds, and CPU of fab alone."""
    tools = {count: Ours(lab, folder / str(count), count) for count in (1, MANY)}
    tools[MANY]()
    fab: dict[int, list[float]] = {1: [], MANY: []}
    nodes: dict[int, list[float]] = {1: [], MANY: []}

    def again(count: int) -> float:
        before = nodes_cpu_s(lab.nodes)
        if changed := tools[count]():
            raise PeerError(f"a pass over tuned nodes changed {changed} settings")
        last = tools[count].last
        assert last is not None
        fab[count].append(last.cpu_s)
        nodes[count].append(nodes_cpu_s(lab.nodes) - before)
        return last.seconds

    cases: dict[str, Callable[[], float]] = {
        "1 node": lambda: again(1),
        f"{MANY} nodes": lambda: again(MANY),
        "bare ssh": lambda: bare_ssh(lab),
    }
    took = {name: median(values) for name, values in interleaved(cases, repetitions).items()}
    ours, one = took[f"{MANY} nodes"], took["1 node"]
    theirs, own = median(nodes[MANY]), median(fab[MANY])
    cores = len(os.sched_getaffinity(0))
    binds = (
        f"CPU binds: the nodes' own {theirs:.1f} s ({1000 * theirs / MANY:.0f} ms a node) and fab's {own:.1f} s share "
        f"{cores} cores and keep {(theirs + own) / cores / ours:.0%} of them busy; nodes of a real fleet bring their own"
    )
    return [
        _at_most(f"no change, {MANY} nodes against 1", ours, one, took["bare ssh"], binds),
        _at_most(f"no change, {MANY} nodes against 1, CPU of fab alone", own, median(fab[1]), None, ""),
    ]


def _at_most(figure: str, ours: float, one: float, limit: float | None, note: str) -> Row:
    return Row(
        figure=figure,
        ours=ours,
        baseline=one,
        ratio=ours / one,
        bar=3,
        limit=limit,
        unit="s",
        baseline_name="1 node",
        limit_name=f"ssh node true, {MANY} at once",
        at_most=True,
        note=note,
    )


def traffic(one: Pass) -> tuple[int, int, int]:
    """The most round trips, bytes sent and bytes received that any node took."""
    return max(one.each("round_trips")), max(one.each("sent")), max(one.each("received"))


def _faster(
    figure: str, ours: Sequence[float], theirs: Sequence[float], bar: float, limit: float, peer: str, note: str
) -> Row:
    return Row(
        figure=figure,
        ours=median(ours),
        baseline=median(theirs),
        ratio=median(theirs) / median(ours),
        bar=bar,
        limit=limit,
        unit="s",
        baseline_name=peer,
        limit_name=f"ssh node true, {FEW} at once",
        note=note,
    )


def _round_trips(head: str, found: tuple[int, int, int], bar: int) -> Row:
    trips, sent, received = found
    return Row(
        figure=f"round trips per node, {head}",
        ours=trips,
        baseline=bar,
        ratio=trips / bar,
        bar=1,
        limit=None,
        unit="",
        baseline_name="allowed",
        at_most=True,
        note=f"{sent} bytes out and {received} back, before SSH's own",
    )


if __name__ == "__main__":
    sys.exit(run_bench(measure))
