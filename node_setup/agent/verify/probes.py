"""Checks that do something: write, read and delete a file on Lustre, in a process of their own and within a time limit.

A program that waits for a file system whose servers are away cannot be killed, and a process that waits for it hangs too. So
the probe is started in a session of its own and answers by a small local file, for which this process waits a limited time.
"""

from __future__ import annotations

import re
import time
from typing import Any

from lustrain.status import Status
from node_setup.agent.facts.lustre import parse_nets
from node_setup.agent.host import Host
from node_setup.agent.model import Facts, Request
from node_setup.agent.run import lock
from node_setup.agent.verify import lustre
from node_setup.agent.verify.expected import ExpectedHardware
from node_setup.agent.verify.result import Result, fact_at

SECONDS = 30.0
STARTS_WITHIN_S = 5.0
MIB = 64
"""A probe writes so much that direct I/O of every message size is among it, to a fresh file so that no cache answers."""
FOLDER = "/run/lustrain"
ANSWER = f"{FOLDER}/probe.txt"
LOCK = f"{FOLDER}/probe.lock"
SLOW_MB_S = 50
"""This is an order of magnitude below what a single client gets from the smallest FSx for Lustre; not a benchmark."""

SCRIPT = """
exec >"$2.tmp" 2>&1 </dev/null
mv "$2.tmp" "$2"
text() { yes "$1" | head -c $(($2 * 1048576)); }
fail() { echo "failed $1"; rm -f "$2"; exit 1; }
text "$1" "$4" | dd of="$3" bs=1M iflag=fullblock oflag=direct conv=fsync || fail write "$3"
echo "wrote"
actual=$(dd if="$3" bs=1M iflag=direct | cksum) || fail read "$3"
[ "$actual" = "$(text "$1" "$4" | cksum)" ] || fail compare "$3"
echo "read"
rm "$3" || fail delete "$3"
echo "done"
"""
"""`sh -c` runs this with host, answer file, file on Lustre, MiB. Each step prints its name when it is over."""


def write_probe(host: Host, facts: Facts, want: ExpectedHardware, request: Request) -> list[Result]:
    """Return two results: whether a file of this node can be written, read back and deleted, and over which network that
    went."""
    path = fact_at(request.document, "lustre", "path")
    if not path:
        return [Result("lustre-write", Status.SKIPPED, "the cluster has no Lustre")]
    if lustre.mount(facts, want, request).status != Status.OK:
        return [Result("lustre-write", Status.UNKNOWN, "not tried: Lustre is not mounted as it should be")]
    before = _nets(host)
    written = _write(host, str(path), str(fact_at(facts, "host", "name") or "node"))
    if written.status not in (Status.OK, Status.WARNING):
        return [written]
    return [written, lustre.transport(before, _nets(host), lustre.efa_interfaces(request, want) > 0)]


def _write(host: Host, path: str, name: str) -> Result:
    """Run one probe at a time: its lock goes to the probe and is free when that has ended, whatever became of the agent that
    started it."""
    before = host.read(LOCK)
    try:
        with lock.hold(host, SECONDS, LOCK) as held, host.lending(held):
            return _probe(host, path, name)
    except lock.NoLockError as error:
        return Result("lustre-write", Status.UNKNOWN, f"{LOCK}: {error}")
    except lock.BusyError:
        return _busy(before, host.read(LOCK))


def _busy(before: str | None, now: str | None) -> Result:
    """Judge by the lock's holder at the start and when the time is over: only a probe as old as this one hangs."""
    if not now or now != before:
        return Result("lustre-write", Status.UNKNOWN, f"not tried: other probes of this node took the {SECONDS:g} s")
    why = f"a probe started before still hangs ({now.strip()}): Lustre does not answer"
    return Result("lustre-write", Status.FAILED, why)


def _probe(host: Host, path: str, name: str) -> Result:
    plain = re.sub(r"[^\w.-]", "_", name)
    file = f"{path.rstrip('/')}/.lustrain-verify-{plain}"
    try:
        host.write(ANSWER, "")
    except OSError as error:
        return Result("lustre-write", Status.UNKNOWN, f"{ANSWER}: {error.strerror}")
    started = time.monotonic()
    answer = str(host.path(ANSWER))
    done = host.run(["setsid", "--fork", "sh", "-c", SCRIPT, "sh", plain, answer, file, str(MIB)], STARTS_WITHIN_S)
    if not done.ok:
        return Result("lustre-write", Status.UNKNOWN, f"setsid: {done.complaint}")
    printed = _wait(host, started + SECONDS)
    return judge(printed, time.monotonic() - started)


def _wait(host: Host, deadline: float) -> str:
    while True:
        printed = host.read(ANSWER) or ""
        if re.search(r"^(done|failed .*)$", printed, re.MULTILINE) or time.monotonic() > deadline:
            return printed
        time.sleep(0.02)


def judge(printed: str, seconds: float) -> Result:
    """Judge the probe by its output when it ended, or when the time was over."""
    check = "lustre-write"
    if re.search(r"^done$", printed, re.MULTILINE):
        rate = MIB * 1.048576 / max(seconds, 1e-3)
        if rate < SLOW_MB_S:
            return Result(check, Status.WARNING, "slow", actual=f"{rate:.0f} MB/s", expected=f"> {SLOW_MB_S} MB/s")
        return Result(check, Status.OK, f"{MIB} MiB written, read back and deleted", actual=f"{seconds:.1f} s")
    failed = re.search(r"^failed (\w+)$", printed, re.MULTILINE)
    if failed:
        complaints = [line for line in printed.splitlines() if line.startswith(("dd:", "rm:", "sh:"))]
        return Result(
            check, Status.FAILED, f"{failed[1]} failed: {complaints[-1] if complaints else 'other bytes came back'}"
        )
    step = "reading" if re.search(r"^wrote$", printed, re.MULTILINE) else "writing"
    return Result(check, Status.FAILED, f"{step} did not end within {SECONDS:g} s: Lustre does not answer")


def _nets(host: Host) -> list[Any] | None:
    done = host.run(["lnetctl", "net", "show", "-v"], 5.0)
    nets: list[Any] | None = parse_nets(done.out) if done.ok else None
    return nets
