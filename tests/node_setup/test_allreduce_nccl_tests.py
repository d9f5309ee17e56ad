"""All-reduce: commands, real outputs of nccl-tests and NCCL, floors from published figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_setup.agent.settings import data
from node_setup.allreduce import nccl_tests
from node_setup.allreduce.nccl_tests import Bandwidth, Output, floor, judge, not_over_efa, parse

RECORDED = Path(__file__).parent / "recorded" / "nccl"


def text(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


def recorded(*names: str) -> Output:
    return parse("".join(map(text, names)))


SRUN, TAGGED = recorded("p5-2-nodes-srun.txt"), recorded("p5-2-nodes-mpirun-tagged.txt")
OLD, UNCHECKED = recorded("p4d-2-nodes-2021-error-column.txt"), recorded("256-gpus-unchecked.txt")
EFA, OLDER_EFA = recorded("nccl-2.27-efa.log"), recorded("nccl-2.23-p5en-efa.log")
SOCKETS = recorded("p5-2-nodes-srun.txt", "nccl-2.20-sockets.log")


def test_rows_are_read_despite_labels_and_gaps() -> None:
    assert (SRUN.at(8589934592), len(SRUN.rows)) == (Bandwidth(8589934592, 479.28, 478.95, 0), 8)
    assert [row.bytes for row in TAGGED.rows] == [0, *(2**exponent for exponent in range(26, 32))]
    assert recorded("2.20-two-nodes.txt").at(65536) == Bandwidth(65536, 0.96, 1.01, 0)


@pytest.mark.parametrize(
    ("output", "wrong"),
    [(OLD, [None] * 6), (UNCHECKED, [None] * 3), (recorded("alltoall-in-place-unchecked.txt"), [0, 0, 0])],
    ids=["a deviation of old versions", "not checked", "one way was checked"],
)
def test_what_was_not_checked_is_not_called_right(output: Output, wrong: list[int | None]) -> None:
    assert [row.wrong for row in output.rows] == wrong
    assert output.out_of_bounds in (None, 0)


def test_network_is_read_from_older_nccl_output_too() -> None:
    assert EFA.networks == {"llama-3-8b-node-0-0": {"Libfabric"}}
    assert EFA.providers == {"llama-3-8b-node-0-0": {("efa", 1)}}
    assert OLDER_EFA.providers == {"8h200-3": {("efa", 16)}}
    assert not_over_efa(EFA, 1) is None
    assert not_over_efa(OLDER_EFA, 16) is None
    assert not_over_efa(OLDER_EFA, 32) == "8h200-3 found 16 EFA devices, it has 32"


def one_row(kind: str) -> Output:
    return Output((Bandwidth(floor(kind).bytes, 1.0, 1.0, 0),))


FAST_BUT_WRONG = parse(text("p5-2-nodes-srun.txt").replace("478.95      0", "478.95      7"))
OUT_OF_BOUNDS = parse(text("p4d-2-nodes-2021-error-column.txt").replace(": 0 OK", ": 50 FAILED"))
LARGER = Output(tuple(Bandwidth(UNCHECKED.rows[-1].bytes * 2, row.busbw, None, None) for row in UNCHECKED.rows))
EARLY = "it ended before 8589934592 bytes, after 2147483648"


@pytest.mark.parametrize(
    ("output", "kind", "nodes", "efa", "status", "why"),
    [
        (SRUN, "p5.48xlarge", 2, 0, "ok", ""),
        (recorded("p4de-2-nodes-srun.txt"), "ml.p4de.24xlarge", 2, 0, "ok", ""),
        (SOCKETS, "p5.48xlarge", 2, 32, "not-efa", "3767c65d25c4 used network Socket"),
        (SRUN, "p5.48xlarge", 2, 32, "not-efa", ""),
        (recorded("h100-2-nodes-mpirun.txt"), "p5.48xlarge", 2, 0, "slow", "339 GB/s, floor 383"),
        (TAGGED, "p5.48xlarge", 2, 0, "failed", EARLY),
        (LARGER, "p4de.24xlarge", 2, 0, "failed", ""),
        (parse("srun: error: Unable to allocate resources"), "p5.48xlarge", 2, 0, "failed", ""),
        (FAST_BUT_WRONG, "p5.48xlarge", 2, 0, "wrong", ""),
        (OUT_OF_BOUNDS, "p4d.24xlarge", 2, 0, "wrong", ""),
        (one_row("p5en.48xlarge"), "p5en.48xlarge", 2, 0, "unmeasured", ""),
        (one_row("x9.48xlarge"), "x9.48xlarge", 2, 0, "unmeasured", ""),
        (SRUN, "p5.48xlarge", 16, 0, "unmeasured", ""),
    ],
)
def test_run_is_judged_by_results_network_and_floor(
    output: Output, kind: str, nodes: int, efa: int, status: str, why: str
) -> None:
    verdict = judge(output, kind, nodes, efa)
    assert (verdict.status, verdict.why[: len(why)]) == (status, why)
    if status == "ok":
        assert verdict.floor == pytest.approx(0.8 * (verdict.busbw or 0), rel=0.001)


def test_devices_are_told_by_their_hosts() -> None:
    devices = recorded("h100-2-nodes-mpirun.txt").devices
    assert len(devices) == 16
    assert {host for host, _ in devices} == {"ztan-mig-235z", "ztan-mig-gq73"}
    assert devices[0][1] == "NVIDIA H100 80GB HBM3"


def test_every_floor_names_its_source() -> None:
    for row in data.tables()["floors"]["floor"]:
        assert row["source"]
        assert ("measured_gb_s" in row) == ("nodes" in row)


def test_srun_gets_one_rank_a_gpu_and_pins_the_network_to_efa() -> None:
    command = nccl_tests.by_srun(["n1", "n2"], 8, 2**33, efa=True)
    assert command[:3] == ["srun", "--nodes=2", "--nodelist=n1,n2"]
    assert {"--ntasks-per-node=8", "--export=ALL,NCCL_DEBUG=INFO,NCCL_NET=AWS Libfabric"} <= set(command)
    assert " ".join(command[-11:]) == "all_reduce_perf -b 8 -e 8589934592 -f 2 -g 1 -c 1"


def test_mpirun_gets_explicit_hosts() -> None:
    command = nccl_tests.by_mpirun(["10.0.0.1", "10.0.0.2"], 4, 2**30, efa=False)
    assert command[:5] == ["mpirun", "--host", "10.0.0.1:4,10.0.0.2:4", "-np", "8"]
    assert not any("NCCL_NET" in word for word in command)


@pytest.mark.parametrize("nodes", [[], ["n1"], ["n1", "n1"]])
def test_one_node_is_no_all_reduce_between_nodes(nodes: list[str]) -> None:
    with pytest.raises(ValueError, match="two or more"):
        nccl_tests.by_srun(nodes, 8, 2**30, efa=True)


@given(st.text())
def test_any_output_is_read_without_an_error(text: str) -> None:
    assert all(row.bytes >= 0 for row in parse(text).rows)
