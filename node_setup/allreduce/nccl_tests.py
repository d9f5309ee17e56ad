"""nccl-tests' all-reduce over two or more nodes: its command, its output, and whether the bandwidth is enough.

Pure: the caller runs the command and hands its output back. The figure is the bus bandwidth out of place, as published.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from node_setup.agent.settings import data

PROGRAM = "all_reduce_perf"
SMALLEST_BYTES = 8
WAIT_S = 60
"""srun gives up after so long where the nodes are busy."""
DEFAULT_BYTES = 2**30
"""This size is for a type whose own is untested; it fits any GPU that has EFA."""
ENVIRONMENT = {"NCCL_DEBUG": "INFO"}
"""NCCL then prints which network it took."""
OVER_EFA = {"NCCL_NET": "AWS Libfabric"}
"""NCCL then ends with an error where its plugin does not load, instead of going over TCP (NVIDIA/nccl src/plugin/net.cc); the
plugin still answers to this older name of its own (aws/aws-ofi-nccl src/nccl_ofi_interface_nvidia.cpp)."""


@dataclass(frozen=True)
class Floor:
    """This is the size to run to, and the bus bandwidth in GB/s to reach there; None where no figure is published. It was
    measured on `nodes` nodes: more nodes reach less, so it says nothing of them."""

    bytes: int
    busbw: float | None
    nodes: int
    source: str


@dataclass(frozen=True)
class Bandwidth:
    """This is one size, out of place: bandwidths in GB/s; `wrong` counts wrong elements of both ways, None where not
    checked."""

    bytes: int
    busbw: float
    busbw_in_place: float | None
    wrong: int | None


@dataclass(frozen=True)
class Output:
    """This is what a run printed: `out_of_bounds` is nccl-tests' own count of wrong results, `devices` the (host, GPU) of each
    rank, both as printed.

    `networks` are the networks that NCCL says it uses, by host; `efa` the (provider, devices) that the plugin chose.
    """

    rows: tuple[Bandwidth, ...]
    out_of_bounds: int | None = None
    devices: tuple[tuple[str, str], ...] = ()
    networks: Mapping[str, frozenset[str]] = field(default_factory=dict)
    providers: Mapping[str, frozenset[tuple[str, int | None]]] = field(default_factory=dict)

    def at(self, size: int) -> Bandwidth | None:
        return next((row for row in self.rows if row.bytes == size), None)


@dataclass(frozen=True)
class Judgement:
    """This is a run's verdict; bandwidths are in GB/s."""

    status: Literal["ok", "slow", "wrong", "not-efa", "failed", "unmeasured"]
    why: str
    busbw: float | None = None
    floor: float | None = None


@cache
def floor(instance_type: str) -> Floor:
    """Return the floor of a type, with or without HyperPod's prefix."""
    table = data.tables()["floors"]
    name = instance_type.removeprefix("ml.")
    for row in table["floor"]:
        if name in row["types"]:
            measured = row.get("measured_gb_s")
            reach = None if measured is None else measured * table["all_reduce"]["share"]
            return Floor(row["bytes"], reach, row.get("nodes", 2), row["source"])
    return Floor(DEFAULT_BYTES, None, 2, "no figure is published")


def by_srun(
    nodes: Sequence[str],
    gpus: int,
    size: int,
    *,
    efa: bool,
    program: str = PROGRAM,
) -> list[str]:
    """Return the command on a Slurm login node: one rank a GPU, exclusive nodes, given up after `WAIT_S` where they are busy.

    ValueError for fewer than two nodes or no GPU.
    """
    _check(nodes, gpus)
    exported = ",".join(["ALL", *(f"{name}={value}" for name, value in _environment(efa).items())])
    return [
        *("srun", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", "--exclusive", f"--immediate={WAIT_S}"),
        *(f"--ntasks-per-node={gpus}", f"--gpus-per-node={gpus}", "--mpi=pmix", "--cpu-bind=none", "--label"),
        *("--kill-on-bad-exit=1", f"--export={exported}"),
        *_test(program, size),
    ]


def by_mpirun(
    nodes: Sequence[str], gpus: int, size: int, *, efa: bool, program: str = PROGRAM, mpirun: str = "mpirun"
) -> list[str]:
    """Return the command on a node that reaches the others by ssh: Open MPI, explicit hosts, one rank a GPU. ValueError.

    MPI itself goes over TCP, so that it starts whatever state EFA is in.
    """
    _check(nodes, gpus)
    exported = [word for name, value in _environment(efa).items() for word in ("-x", f"{name}={value}")]
    return [
        *(mpirun, "--host", ",".join(f"{node}:{gpus}" for node in nodes), "-np", str(len(nodes) * gpus)),
        *("--map-by", f"ppr:{gpus}:node", "--bind-to", "none", "--tag-output", "-x", "LD_LIBRARY_PATH", *exported),
        *("--mca", "pml", "^cm", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_exclude", "lo,docker0"),
        *_test(program, size),
    ]


def _check(nodes: Sequence[str], gpus: int) -> None:
    if len(set(nodes)) < 2 or len(set(nodes)) != len(nodes):
        raise ValueError(f"nodes = {', '.join(nodes)}: an all-reduce between nodes takes two or more different ones")
    if gpus < 1:
        raise ValueError(f"gpus = {gpus}: no GPU to reduce on")


def _environment(efa: bool) -> dict[str, str]:
    return {**ENVIRONMENT, **(OVER_EFA if efa else {})}


def _test(program: str, size: int) -> list[str]:
    return [program, "-b", str(SMALLEST_BYTES), "-e", str(size), "-f", "2", "-g", "1", "-c", "1"]


_LABEL = re.compile(r"^\s*(?:\[\d+,\d+\]<std(?:out|err)>:|\d+: ?)")
"""mpirun --tag-output and srun --label put this before each line."""
_DEVICE = re.compile(r"^#\s+Rank\s+\d+\s.*?\bon\s+(\S+)\s+device\s+\d+\s+\[\S+\]\s+(.+?)\s*$")
_BOUNDS = re.compile(r"^#\s*Out of bounds values\s*:\s*(\d+)")
_NETWORK = re.compile(r"(\S+):\d+:\d+ \[\d+\] NCCL INFO Using network (.+?)\s*$")
_PROVIDER = re.compile(
    r"(\S+):\d+:\d+ \[\d+\] NCCL INFO NET/OFI Selected [Pp]rovider is ([\w;-]+)(?:.*?\(found (\d+) nics\))?"
)


def parse(text: str) -> Output:
    """Read what a run printed, lines of NCCL among it; rows are those of any nccl-tests since 2019."""
    lines = [_LABEL.sub("", line) for line in text.splitlines()]
    networks: dict[str, set[str]] = {}
    providers: dict[str, set[tuple[str, int | None]]] = {}
    for line in lines:
        if network := _NETWORK.search(line):
            networks.setdefault(network[1], set()).add(network[2])
        elif provider := _PROVIDER.search(line):
            nics = int(provider[3]) if provider[3] else None
            providers.setdefault(provider[1], set()).add((provider[2], nics))
    bounds = [int(match[1]) for line in lines if (match := _BOUNDS.match(line))]
    return Output(
        rows=tuple(_rows(lines)),
        out_of_bounds=bounds[-1] if bounds else None,
        devices=tuple((match[1], match[2]) for line in lines if (match := _DEVICE.match(line))),
        networks={host: frozenset(names) for host, names in networks.items()},
        providers={host: frozenset(names) for host, names in providers.items()},
    )


def _rows(lines: Sequence[str]) -> Iterator[Bandwidth]:
    counted = False
    for line in lines:
        words = line.split()
        if words[:1] == ["#"] and "busbw" in words:
            counted = "#wrong" in words
        elif row := _row(words, counted):
            yield row


def _row(words: Sequence[str], counted: bool) -> Bandwidth | None:
    """Parse a row: size, count, type, operation and root where the version prints them, then twice time, algbw, busbw and
    check."""
    if not 11 <= len(words) <= 13 or not (words[0].isdigit() and words[1].isdigit()):
        return None
    out, inside = words[-8:-4], words[-4:]
    values = [_number(word) for word in (*out[:3], *inside[:3])]
    if None in values[:3] or values[2] is None:
        return None
    checks = [int(way[3]) for way in (out, inside) if counted and way[3].isdigit()]
    return Bandwidth(int(words[0]), values[2], values[5], sum(checks) if checks else None)


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def not_over_efa(output: Output, efa: int) -> str | None:
    """Return why NCCL did not use EFA as it should have; None where its own lines say that it did. `efa` counts devices a
    node."""
    if not output.networks and not output.providers:
        return "NCCL did not print which network it uses"
    for host, names in sorted(output.networks.items()):
        others = sorted(name for name in names if "Libfabric" not in name)
        if others:
            return f"{host} used network {', '.join(others)}"
    for host, chosen in sorted(output.providers.items()):
        for provider, nics in sorted(chosen, key=str):
            if not provider.startswith("efa"):
                return f"{host} chose libfabric's provider {provider}"
            if nics is not None and nics != efa:
                return f"{host} found {nics} EFA devices, it has {efa}"
    if not output.providers:
        return "NCCL's plugin did not print that it uses EFA"
    return None


def judge(output: Output, instance_type: str, nodes: int, efa: int) -> Judgement:
    """Judge a run; `efa` is how many devices each node has, 0 where the run is not meant to go over EFA."""
    wanted = floor(instance_type)
    if not output.rows:
        return Judgement("failed", "its output has no result")
    wrong = [row for row in output.rows if row.wrong]
    if wrong or output.out_of_bounds:
        sizes = ", ".join(str(row.bytes) for row in wrong) or "some size"
        return Judgement("wrong", f"wrong results at {sizes} bytes")
    row = output.at(wanted.bytes)
    if row is None:
        return Judgement("failed", f"it ended before {wanted.bytes} bytes, after {output.rows[-1].bytes}")
    elsewhere = not_over_efa(output, efa) if efa else None
    if elsewhere:
        return Judgement("not-efa", elsewhere, row.busbw, wanted.busbw)
    if row.wrong is None and output.out_of_bounds is None:
        return Judgement("failed", "nccl-tests did not check the results", row.busbw, wanted.busbw)
    if wanted.busbw is None or nodes > wanted.nodes:
        why = wanted.source if wanted.busbw is None else f"measured on {wanted.nodes} nodes, this is {nodes}"
        return Judgement("unmeasured", why, row.busbw)
    if row.busbw < wanted.busbw:
        return Judgement(
            "slow", f"{row.busbw:.0f} GB/s, floor {wanted.busbw:.0f} ({wanted.source})", row.busbw, wanted.busbw
        )
    return Judgement("ok", f"{row.busbw:.0f} GB/s, floor {wanted.busbw:.0f}", row.busbw, wanted.busbw)
