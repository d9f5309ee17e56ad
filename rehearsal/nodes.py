"""The journey's nodes: three are tuned over SSH, one is lost and its blank successor tunes itself, all are judged.

Real here, where this process is root: sshd and SSH, `fab` and the agent as an operator and a first boot call them, every
file, the sysctls that belong to a network namespace. Simulated: the hardware and what drives it (`lab.hardware.LEFT_OUT`).
Without root the agent only looks at this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from posixpath import dirname
from threading import Event
from typing import Any

from infra.plan.nodes.bundle import AGENT, DOCUMENT, FOLDER, gathered
from lustrain.cluster import node_document, to_json
from lustrain.problem import DIFFERS, DONE
from lustrain.status import Status
from node_setup.agent import owned
from node_setup.pack import archive
from rehearsal.lab.cluster import GROUP, MOUNT, cluster_of
from rehearsal.lab.hardware import KINDS
from rehearsal.lab.node import Node
from rehearsal.lab.nodes import Lab, why_not
from rehearsal.proof import Promise

ROOT = Path(__file__).parents[1]
NODES, KIND = 3, "p5"
REAL = "sshd, SSH, fab, agent, files, network sysctls"
SIMULATED = f"{KINDS[KIND].type} with GPUs, EFA and NVMe; Lustre, systemd, other sysctls"
OURS = (*owned.PATHS, owned.AGENT)
FOLDERS = tuple(sorted({dirname(path) for path in OURS}))
"""A file is compared together with all its neighbours."""
BUNDLE = "/opt/lustrain/bundle"
FIRST_BOOT = ("env", "LUSTRAIN_FLUSH_SECONDS=0", "bash", "-c", 'source "$1/node.sh" && boot "$2" ec2', "boot")
"""User data runs this once the bundle is there (infra/plan/nodes/first_boot.sh); here no log of a failure is shipped."""

Tree = dict[str, tuple[str, str]]


Judging = Generator[Promise, None, str]
"""Yields promises as they are judged, and returns the outcome: one that fails midway has told what it judged before."""


@dataclass(frozen=True)
class Scenario:
    """A stage."""

    name: str
    real: str
    emulated: str
    run: Callable[[], Judging]


def collect(judging: Judging, promises: list[Promise]) -> str:
    """Add promises as they are judged, and return the outcome."""
    while True:
        try:
            promises.append(next(judging))
        except StopIteration as end:
            return str(end.value)


def at_end(work: Callable[[], tuple[str, list[Promise]]]) -> Callable[[], Judging]:
    """Return the `run` of a scenario that judges all promises in its end."""

    def run() -> Judging:
        outcome, promises = work()
        yield from promises
        return outcome

    return run


@dataclass(frozen=True)
class NodeTaskResult:
    """This is the result of one `fab` task on the nodes: exit status, and by node name the agent's report, or why there is
    none."""

    status: int
    seconds: float
    nodes: Mapping[str, Mapping[str, Any]]

    def settings(self, node: str, status: str) -> set[str]:
        return {row["setting"] for row in self.nodes[node].get("rows", ()) if row["status"] == status}

    def total(self, status: str) -> int:
        return sum(len(self.settings(node, status)) for node in self.nodes)

    def verdicts(self, node: str) -> dict[str, str]:
        """Return the status of each check."""
        return {result["check"]: result["status"] for result in self.nodes[node].get("results", ())}

    @property
    def ready(self) -> list[str]:
        return [name for name, result in self.nodes.items() if result.get("ready")]

    def __str__(self) -> str:
        silent = [f"{name}: {result['why']}" for name, result in self.nodes.items() if "why" in result]
        failed = [f"{name}: {setting}" for name in self.nodes for setting in sorted(self.settings(name, Status.FAILED))]
        return "; ".join([f"exit {self.status} after {self.seconds:.1f} s", *silent, *failed])


@contextmanager
def begun(folder: Path) -> Iterator[Future[list[Scenario]]]:
    """Run all scenarios in the background, beside stages that wait for AWS; those of the future tell what came out. The context
    ends once they are over, or, where it fails, once the one under way is."""
    stopped = Event()
    with ThreadPoolExecutor(1, "nodes") as pool:
        try:
            yield pool.submit(_run_all, folder, stopped)
        except BaseException:
            stopped.set()
            raise


@contextmanager
def scenarios(folder: Path) -> Iterator[list[Scenario]]:
    """Yield the stages that this machine can run; the nodes end with the context."""
    folder.mkdir()
    reason = why_not()
    if reason is not None:
        name = "facts and plan of this machine by the packed agent"
        yield [
            Scenario(
                name, "fab, agent, facts", "no nodes to tune", at_end(lambda: inspect_this_machine(folder, reason))
            )
        ]
        return
    with Lab(NODES, KIND, metadata=True) as lab:
        fleet = Fleet(lab, folder)
        yield [
            Scenario(f"fab node-tune of {NODES} nodes, twice", REAL, SIMULATED, fleet.tune),
            Scenario("a node is lost; the blank one in its place tunes itself", REAL, SIMULATED, fleet.replace),
            Scenario("fab node-verify, and again once a node has lost its Lustre", REAL, SIMULATED, fleet.verify),
        ]


def _run_all(folder: Path, stopped: Event) -> list[Scenario]:
    """Run them until one fails. The error of that one, or of the nodes themselves, comes where its stage is told."""
    over: list[Scenario] = []
    try:
        with scenarios(folder) as found:
            for scenario in found:
                if stopped.is_set():
                    break
                done, failed = _run(scenario)
                over.append(done)
                if failed:
                    break
    except Exception as error:  # noqa: BLE001 -- it is raised where its stage is told
        over.append(Scenario("nodes made of namespaces", REAL, SIMULATED, partial(_tell, [], error)))
    return over


def _run(scenario: Scenario) -> tuple[Scenario, bool]:
    """Run it, and return the same that only tells what came out, and whether it failed."""
    began = time.monotonic()
    promises: list[Promise] = []
    try:
        outcome = collect(scenario.run(), promises)
    except Exception as error:  # noqa: BLE001 -- it is raised where its stage is told
        return replace(scenario, run=partial(_tell, promises, error)), True
    took = f"{outcome}; {time.monotonic() - began:.0f} s, beside the first stage"
    return replace(scenario, run=partial(_tell, promises, took)), False


def _tell(promises: Sequence[Promise], end: str | Exception) -> Judging:
    yield from promises
    if isinstance(end, Exception):
        raise end
    return end


class Fleet:
    """These are the lab's nodes as an operator reaches them: a Cluster in a file, and recorded host keys."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.cluster = cluster_of(lab)
        self.file = folder / "cluster.json"
        self.file.write_text(json.dumps(to_json(self.cluster)))
        for node in lab.nodes:
            write_group(node)

    def tune(self) -> Judging:
        """Tune the nodes: the first pass changes them, the second has nothing to do."""
        first = self.fab("node-tune")
        changed = [len(first.settings(name, Status.CHANGED)) for name in first.nodes]
        yield Promise(
            "node-tune brings every node to its wanted state", not first.status and min(changed) > 0, str(first)
        )
        tuned = self.trees()
        second = self.fab("node-tune")
        left = second.total(Status.CHANGED)
        untouched = self.trees() == tuned
        amount = "–".join(map(str, sorted({min(changed), max(changed)})))
        files = "no file changed" if untouched else "files changed"
        yield Promise(
            "node-tune: a second pass changes nothing",
            not second.status and not left and untouched,
            f"{second}, {files}",
        )
        return f"{amount} settings changed on each of {len(changed)} nodes; in the second pass {left}"

    def replace(self) -> Judging:
        """Boot a node with a new disk, a new host key and its user data for the first time, then again."""
        node, like = self.lab.nodes[-1], self.lab.nodes[0]
        node.replace()
        had = [path for path in OURS if node.exists(path)]
        write_group(node)
        self.copy_bundle(node)
        booted = node.exec(*FIRST_BOOT, BUNDLE, f"{BUNDLE}/{AGENT}", check=False)
        own, theirs = tree(node), tree(like)
        differ = sorted(path for path in own.keys() | theirs.keys() if own.get(path) != theirs.get(path))
        yield Promise(
            "a replaced node ends byte-identical to a tuned one, without manual steps",
            not booted.returncode and not differ and not had and owned.AGENT in own,
            f"differ: {', '.join(differ)}" if differ else f"{len(own)} files, links and folders",
        )
        node.reboot()
        check = self.fab("node-tune", "--check")
        yield Promise("node-tune --check finds nothing to do on it, also after a reboot", not check.status, str(check))
        ended = f"its first boot ends with {booted.returncode}"
        return f"{node.name}: {ended}; after a reboot {check.total(Status.CHANGE)} settings are to change"

    def verify(self) -> Judging:
        """Verify all nodes; then one of them loses its file system, and only that one may fail."""
        before = self.fab("node-verify")
        checks = before.verdicts(self.lab.nodes[-1].name)
        amiss = [f"{check} {status}" for check, status in checks.items() if status not in (Status.OK, Status.SKIPPED)]
        ready = f"{len(before.ready)} of {len(before.nodes)} ready"
        yield Promise(
            "node-verify finds every node ready, the replaced one too",
            not before.status and len(before.ready) == len(self.lab.nodes),
            f"{ready}, {before}",
        )
        lost = self.lab.nodes[1]
        lost.exec("umount", MOUNT, check=False)
        after = self.fab("node-verify")
        out = sorted(set(before.ready) - set(after.ready))
        yield Promise(
            "node-verify tells the node that lost its Lustre from the others",
            out == [lost.name],
            str(after.nodes[lost.name].get("drain")),
        )
        unlike = ", ".join(amiss) or "nothing"
        return f"{ready}; of {len(checks)} checks not passed: {unlike}; without {MOUNT} not ready: {', '.join(out)}"

    def fab(self, task: str, *flags: str) -> NodeTaskResult:
        known = self.folder / "known_hosts"
        known.write_text(Path(self.lab.known_hosts).read_text())
        connection = ["--cluster", str(self.file), "--known-hosts", str(known), "--strict-host-keys"]
        began = time.monotonic()
        status, report = fab(self.folder, task, *connection, *flags)
        names = {node.address: node.name for node in self.lab.nodes}
        nodes = {names[item["address"]]: item["result"] or {"why": item["why"]} for item in report["nodes"]}
        return NodeTaskResult(status, time.monotonic() - began, nodes)

    def trees(self) -> list[Tree]:
        return [tree(node) for node in self.lab.nodes]

    def copy_bundle(self, node: Node) -> None:
        """Write the files that `aws s3 cp --recursive` of the cluster's lifecycle bundle puts on a node."""
        document = json.dumps(node_document(self.cluster), sort_keys=True, indent=1) + "\n"
        bundle = gathered(FOLDER, generated={AGENT: archive(), DOCUMENT: document.encode("ascii")})
        folder = Path(f"/proc/{node.pid}/root{BUNDLE}")
        folder.mkdir(parents=True)
        for file in bundle.files:
            (folder / file.path).write_bytes(file.content)


def inspect_this_machine(folder: Path, reason: str) -> tuple[str, list[Promise]]:
    """Read facts and plan of this machine as an ordinary user."""
    before = file_stamps()
    _, facts = fab(folder, "node-facts", "--local")
    status, plan = fab(folder, "node-tune", "--check", "--local")
    rows = plan["nodes"][0]["result"]["rows"]
    would = len({row["setting"] for row in rows if row["status"] == Status.CHANGE})
    cpus = facts["nodes"][0]["result"]["cpu"]["count"]
    promises = [
        Promise(
            "looking at this machine changes nothing of it",
            status in (DONE, DIFFERS) and file_stamps() == before,
            f"exit {status}, {would} of {len(rows)} rows would change",
        )
    ]
    if os.environ.get("LUSTRAIN_REQUIRE") == "all":
        promises.append(Promise("nodes can be rehearsed here (LUSTRAIN_REQUIRE=all)", False, reason))
    return f"{reason}; {cpus} CPUs, {would} settings would change, none was", promises


def fab(folder: Path, task: str, *flags: str) -> tuple[int, dict[str, Any]]:
    """Run a task and return its exit status and report; its progress goes to our stderr. The caller's home is not touched.

    RuntimeError where it printed no report; its error is on stderr.
    """
    command = [sys.executable, "-m", "fabric", task, *flags, "--json"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"fab {task} ended with {done.returncode} and no report")
    return done.returncode, json.loads(done.stdout)


def write_group(node: Node) -> None:
    """Write the node's group where user data writes it at a first boot."""
    node.write("/etc/lustrain/node.json", json.dumps({"group": GROUP}) + "\n")


def tree(node: Node) -> Tree:
    """Return all files that tuning wrote on a node, except for its report, which holds times."""
    files = node.tree(*FOLDERS)
    files.pop(owned.REPORT, None)
    return files


def file_stamps() -> dict[str, tuple[int, int] | None]:
    """Return size and time of the last change of our files on this machine."""

    def stamp(path: str) -> tuple[int, int] | None:
        try:
            status = os.stat(path)
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns

    return {path: stamp(path) for path in (*OURS, owned.REPORT, owned.LOCK)}
