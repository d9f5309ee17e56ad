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


def recorded(*names: str) -> Output:
    return parse("".join((RECORDED / name).read_text(encoding="utf-8") for name in names))


def test_labels_of_srun_are_no_part_of_a_row() -> None:
    output = recorded("p5-2-nodes-srun.txt")
    assert output.at(8589934592) == Bandwidth(8589934592, 479.28, 478.95, 0)
    assert len(output.rows) == 8


def test_labels_of_mpirun_are_no_part_of_a_row_and_a_gap_is_no_row() -> None:
    output = recorded("p5-2-nodes-mpirun-tagged.txt")
    assert [row.bytes for row in output.rows] == [0, *(2**exponent for exponent in range(26, 32))]
    assert output.out_of_bounds == 0


def test_devices_are_told_by_their_hosts() -> None:
    devices = recorded("h100-2-nodes-mpirun.txt").devices
    assert len(devices) == 16
    assert {host for host, _ in devices} == {"ztan-mig-235z", "ztan-mig-gq73"}
    assert devices[0][1] == "NVIDIA H100 80GB HBM3"


def test_a_deviation_of_old_versions_is_not_taken_for_a_count_of_wrong_results() -> None:
    output = recorded("p4d-2-nodes-2021-error-column.txt")
    assert [row.wrong for row in output.rows] == [None] * 6
    assert output.out_of_bounds == 0
    assert output.rows[-1].busbw == 42.61


def test_what_was_not_checked_is_not_called_right() -> None:
    output = recorded("256-gpus-unchecked.txt")
    assert [row.wrong for row in output.rows] == [None] * 3
    size = output.rows[-1].bytes
    assert (
        judge(
            Output(tuple(Bandwidth(size * 2, row.busbw, None, None) for row in output.rows)), "p4de.24xlarge", 2, 0
        ).status
        == "failed"
    )


def test_a_way_that_was_checked_counts_where_the_other_was_not() -> None:
    assert [row.wrong for row in recorded("alltoall-in-place-unchecked.txt").rows] == [0, 0, 0]


def test_rows_of_the_newest_version_are_read() -> None:
    assert recorded("2.20-two-nodes.txt").at(65536) == Bandwidth(65536, 0.96, 1.01, 0)


def test_nccl_says_which_network_it_took() -> None:
    output = recorded("nccl-2.27-efa.log")
    assert output.networks == {"llama-3-8b-node-0-0": {"Libfabric"}}
    assert output.providers == {"llama-3-8b-node-0-0": {("efa", 1)}}
    assert not_over_efa(output, 1) is None


def test_the_older_wording_of_the_plugin_is_read_too() -> None:
    output = recorded("nccl-2.23-p5en-efa.log")
    assert output.providers == {"8h200-3": {("efa", 16)}}
    assert not_over_efa(output, 16) is None


def test_fewer_devices_than_the_node_has_are_not_its_efa() -> None:
    assert not_over_efa(recorded("nccl-2.23-p5en-efa.log"), 32) == "8h200-3 found 16 EFA devices, it has 32"


def test_sockets_are_not_efa_however_fast() -> None:
    output = recorded("p5-2-nodes-srun.txt", "nccl-2.20-sockets.log")
    verdict = judge(output, "p5.48xlarge", 2, 32)
    assert (verdict.status, verdict.why) == ("not-efa", "3767c65d25c4 used network Socket")


def test_a_run_without_nccls_lines_proves_no_efa() -> None:
    assert judge(recorded("p5-2-nodes-srun.txt"), "p5.48xlarge", 2, 32).status == "not-efa"


@pytest.mark.parametrize(
    ("kind", "file"), [("p5.48xlarge", "p5-2-nodes-srun.txt"), ("ml.p4de.24xlarge", "p4de-2-nodes-srun.txt")]
)
def test_the_published_runs_pass_their_own_floors(kind: str, file: str) -> None:
    verdict = judge(recorded(file), kind, 2, 0)
    assert verdict.status == "ok"
    assert verdict.floor == pytest.approx(0.8 * (verdict.busbw or 0), rel=0.001)


def test_h100_nodes_on_a_slower_network_miss_the_floor_of_p5() -> None:
    verdict = judge(recorded("h100-2-nodes-mpirun.txt"), "p5.48xlarge", 2, 0)
    assert verdict.status == "slow"
    assert verdict.why.startswith("339 GB/s, floor 383")


def test_a_run_that_ended_early_is_no_result() -> None:
    verdict = judge(recorded("p5-2-nodes-mpirun-tagged.txt"), "p5.48xlarge", 2, 0)
    assert (verdict.status, verdict.why) == ("failed", "it ended before 8589934592 bytes, after 2147483648")


def test_an_output_without_rows_is_a_failure() -> None:
    assert judge(parse("srun: error: Unable to allocate resources"), "p5.48xlarge", 2, 0).status == "failed"


def test_wrong_results_fail_whatever_the_speed() -> None:
    text = (RECORDED / "p5-2-nodes-srun.txt").read_text(encoding="utf-8").replace("478.95      0", "478.95      7")
    assert judge(parse(text), "p5.48xlarge", 2, 0).status == "wrong"


def test_results_out_of_bounds_fail_where_rows_have_no_counts() -> None:
    text = (RECORDED / "p4d-2-nodes-2021-error-column.txt").read_text(encoding="utf-8").replace(": 0 OK", ": 50 FAILED")
    assert judge(parse(text), "p4d.24xlarge", 2, 0).status == "wrong"


@pytest.mark.parametrize("kind", ["p5en.48xlarge", "x9.48xlarge"])
def test_a_type_without_a_published_figure_is_unmeasured_neither_ok_nor_slow(kind: str) -> None:
    output = Output((Bandwidth(floor(kind).bytes, 1.0, 1.0, 0),))
    assert judge(output, kind, 2, 0).status == "unmeasured"


def test_a_floor_of_two_nodes_says_nothing_of_more() -> None:
    assert judge(recorded("p5-2-nodes-srun.txt"), "p5.48xlarge", 16, 0).status == "unmeasured"


def test_every_floor_names_its_source() -> None:
    for row in data.tables()["floors"]["floor"]:
        assert row["source"]
        assert ("measured_gb_s" in row) == ("nodes" in row)


def test_srun_gets_one_rank_a_gpu_and_pins_the_network_to_efa() -> None:
    command = nccl_tests.by_srun(["n1", "n2"], 8, 2**33, efa=True)
    assert command[:3] == ["srun", "--nodes=2", "--nodelist=n1,n2"]
    assert "--ntasks-per-node=8" in command
    assert "--export=ALL,NCCL_DEBUG=INFO,NCCL_NET=AWS Libfabric" in command
    assert command[-11:] == ["all_reduce_perf", "-b", "8", "-e", "8589934592", "-f", "2", "-g", "1", "-c", "1"]
    assert "--export=ALL,NCCL_DEBUG=INFO,NCCL_NET=AWS Libfabric" in command


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
