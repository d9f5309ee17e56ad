"""What a plan chooses, how its parts hang together, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fabric.main import program

import fabfile
from infra.catalog.price_answers import PRICE_LIST, SPOT_HISTORY
from infra.catalog.prices import Price
from lustrain.problem import UserError
from planner import report
from planner.goodput import Losses, goodput
from planner.hardware import FRAGMENTATION, RESERVED_BYTES, node_of
from planner.plan import MOST_NODES, NODE_MTBF_S, mtbf_s, options_of, plan
from planner.request import resolve_request, tokens_of
from planner.step import COPY_BYTES_S, HOST_BYTES_S, efficiency_of, mfu, recomputed_share, step_time
from planner.strategy import Strategy
from planner.work import Work
from tests.planner.fake_training import shape_of
from tests.planner.requests import Files
from trainer.checkpoint.stored_config import encode as encode_config
from trainer.config import PrecisionConfig, load
from trainer.metrics.records import STEPS, PartName, encode

BF16 = PrecisionConfig(mode="bf16")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_fastest_strategy_that_fits_is_chosen(files: Files) -> None:
    made = files.plan()
    allowed = [option for option in made.options if option.fits and option.step]
    assert made.best.tokens_per_s == max(option.tokens_per_s for option in allowed)
    assert not next(option for option in made.options if option.strategy.kind == "DDP").fits
    assert {option.strategy.kind for option in made.options} == {"DDP", "FSDP2", "HSDP", "TP+FSDP2"}
    assert not made.best.strategy.tensor > 1


def test_small_model_is_not_sharded(files: Files) -> None:
    made = files.plan(set=("task.model.preset=llama-124m", "task.model.vocab_size=50304", "train.micro_batch=8"))
    assert made.best.strategy.kind == "DDP"


@pytest.mark.parametrize(
    ("given", "best"),
    [
        (("parallel.shard=8", "parallel.reshard=false", "parallel.offload=states"), Strategy(8, 1)),
        (("parallel.gradient_as_bucket_view=false",), Strategy(1, 8)),
    ],
)
def test_printed_settings_are_taken_beside_those_given(files: Files, given: tuple[str, ...], best: Strategy) -> None:
    made = files.plan(set=given)
    printed = [f"{key}={value}" for key, value in report.settings_of(made.request.work, best).items()]
    config = load(files.config, sets=[*given, *printed])
    assert config.parallel.unused() == []


def test_offloaded_model_fits_where_its_node_has_the_memory(files: Files) -> None:
    sets = ("task.model.width=8192", "task.model.layers=80", "task.model.heads=64", "task.model.hidden=28672")
    offload = (*sets, "parallel.offload=states")
    assert not any(
        option.fits
        for option in options_of(resolve_request(files.flags(nodes="1", set=sets)))
        if option.strategy.tensor == 1
    )
    made = files.plan(nodes="1", set=offload)
    states = made.best.memory.host * made.request.node.gpus
    needed = states + made.request.work.checkpoint_bytes
    for bytes_there, fits in ((needed, True), (needed - 1, False)):
        request = replace(made.request, node=replace(made.request.node, host_bytes=bytes_there))
        assert any(option.fits for option in options_of(request) if option.memory.host == made.best.memory.host) == fits


def test_offloaded_step_waits_for_the_hosts_cores_and_for_copies() -> None:
    node, work = node_of("p5.48xlarge"), Work(shape_of("8b"), 16_384, 64, 1, 0, BF16)
    offloaded, plain = (step_time(replace(work, offload=each), Strategy(1, 8), node, 1, 0.4) for each in (True, False))
    held = 4 * work.parameters / 8
    assert offloaded.exposed - plain.exposed == pytest.approx(8 * 7 * held / HOST_BYTES_S, rel=1e-6)
    short = step_time(replace(work, seq_len=16, offload=True), Strategy(1, 8), node, 1, 0.4)
    assert short.total > 3 * 8 * held / COPY_BYTES_S


def test_step_time_is_computation_and_what_waits() -> None:
    work, node = Work(shape_of("8b"), 4096, 64, 1, 0, BF16), node_of("p5.48xlarge")
    one = step_time(work, Strategy(1, 1), node, 1, 0.5)
    assert one.exposed == 0
    assert mfu(work, node, 1, one.total) == pytest.approx(0.5)
    full = step_time(work, Strategy(1, 1, recompute="full"), node, 1, 0.5)
    assert full.total / one.total == pytest.approx(1 + recomputed_share(work, Strategy(1, 1, recompute="full")))
    assert 0.25 < full.total / one.total - 1 < 1 / 3
    _, key, _, output, _, up, _ = work.block_matrices
    half = 2 * work.shape.layers * (key + output + up) / work.flops_per_token
    assert recomputed_share(work, Strategy(1, 1, recompute="selective")) == pytest.approx(half)
    slow = replace(node, network_gb_s=node.network_gb_s / 100)
    eight, slower = (step_time(work, Strategy(1, 64), each, 8, 0.5) for each in (node, slow))
    assert slower.compute == eight.compute
    assert slower.exposed > 10 * eight.exposed > 0


def test_tensor_ranks_of_two_nodes_wait_for_the_network() -> None:
    work, node = Work(shape_of("8b"), 4096, 64, 1, 0, BF16), node_of("p5.48xlarge")
    slow = replace(node, network_gb_s=node.network_gb_s / 100)
    eight, sixteen = (
        [step_time(work, Strategy(1, 1, ranks), each, nodes, 0.5).exposed for each in (node, slow)]
        for ranks, nodes in ((8, 1), (16, 2))
    )
    assert eight[0] == eight[1]
    assert sixteen[1] > 10 * sixteen[0] > 0


def test_sharding_within_nodes_spares_a_slow_network() -> None:
    work, node = Work(shape_of("1b"), 2048, 512, 1, 0, BF16), node_of("g5.48xlarge")
    ddp, hsdp, fsdp = (step_time(work, one, node, 8, 0.5) for one in (Strategy(64, 1), Strategy(8, 8), Strategy(1, 64)))
    assert 0 < ddp.exposed < hsdp.exposed < fsdp.exposed
    slower = replace(node, network_gb_s=node.network_gb_s / 10)
    assert step_time(work, Strategy(8, 8), slower, 8, 0.5).exposed > hsdp.exposed
    assert step_time(work, Strategy(64, 1), slower, 8, 0.5).exposed > ddp.exposed


def test_configured_number_of_shards_is_planned_too(files: Files) -> None:
    made = files.plan(set=("parallel.shard=16",))
    assert {(one.strategy.replicate, one.strategy.shard) for one in made.options if one.strategy.tensor == 1} == {
        *((32, 1), (4, 8), (2, 16), (1, 32))
    }
    assert "configured" in "\n".join(report.lines(made))


def test_tensor_ranks_are_planned_where_the_model_can_be_split(files: Files) -> None:
    def tensor_ranks(*settings: str) -> set[int]:
        return {option.strategy.tensor for option in files.plan(set=settings).options}

    assert tensor_ranks() == {1, 8}
    assert tensor_ranks("parallel.tensor=2") == {1, 2, 8}
    assert tensor_ranks("train.compile=true") == tensor_ranks("task.seq_len=4097") == {1}
    made = files.plan(nodes="1", instance_type="p4d.24xlarge", set=("train.micro_batch=16",))
    assert (made.best.strategy.settings["parallel.tensor"], made.best.strategy.shard) == (8, 1)
    assert refused(files, set=("parallel.tensor=16", "parallel.shard=1"))[0] == "task.model.kv_heads"


@pytest.mark.parametrize(
    ("strategy", "kind", "shard"),
    [
        (Strategy(16, 1), "DDP", 1),
        (Strategy(1, 16), "FSDP2", 0),
        (Strategy(2, 8), "HSDP", 8),
        (Strategy(1, 1, 8), "TP", 1),
        (Strategy(2, 1, 8), "TP+DDP", 1),
        (Strategy(1, 2, 8), "TP+FSDP2", 0),
        (Strategy(2, 2, 4), "TP+HSDP", 2),
    ],
)
def test_strategy_is_named_by_what_is_sharded(strategy: Strategy, kind: str, shard: int) -> None:
    """All data ranks are `parallel.shard = 0`, which holds on other numbers of nodes too."""
    assert (strategy.kind, strategy.settings["parallel.shard"]) == (kind, shard)


def test_too_few_micro_batches_names_tensor_ranks(files: Files) -> None:
    few = {"nodes": "1", "set": ("train.global_batch=2", "task.model.kv_heads=4")}
    path, fix = refused(files, **few)
    assert path == "--nodes"
    assert "--set parallel.tensor=4" in fix
    assert "fewer nodes" not in fix
    made = files.plan(**few | {"set": (*few["set"], "parallel.tensor=4", "parallel.shard=1")})
    assert made.best.strategy.tensor == 4
    assert "too few micro-batches" in "\n".join(report.lines(made))


def test_efficiency_explains_the_time_that_it_gives() -> None:
    work, node = Work(shape_of("8b"), 4096, 512, 1, 0, BF16), node_of("p4d.24xlarge")
    for strategy in (Strategy(32, 1), Strategy(1, 32), Strategy(4, 8, recompute="full")):
        seconds = step_time(work, strategy, node, 4, 0.37).total
        assert efficiency_of(work, strategy, node, 4, seconds) == pytest.approx(0.37, rel=1e-6)
    assert efficiency_of(work, Strategy(1, 32), node, 4, 1e-9) is None


def test_scaling_stands_beside_the_targets(files: Files) -> None:
    made = files.plan(nodes="8")
    assert [(row.nodes, row.target) for row in made.scaling] == [(1, None), (2, 0.92), (4, 0.86), (8, 0.75)]
    assert made.scaling[0].efficiency == 1.0
    assert made.scaling[-1].option == made.best


def test_cost_is_time_by_rate_and_storage(files: Files) -> None:
    made = files.plan(lustre_gib="4800", price=("spot=20",))
    on_demand, spot, block, training = made.outcomes
    hours = on_demand.wall_s / 3600
    assert on_demand.wall_s == pytest.approx(1e12 / made.best.tokens_per_s / on_demand.goodput)
    assert on_demand.usd == pytest.approx(hours * (4 * 55.04 + 4800 * 0.21 / 730) + hours * made.storage.s3_usd_hour)
    assert spot.rate.usd_hour == 20
    assert spot.goodput < on_demand.goodput
    assert block.rate.usd_hour == 31.464
    # AWS's own list, the user's figure, and what a blog reports.
    assert [outcome.rate.origin.split()[0] for outcome in (on_demand, spot, block)] == ["list", "as", "reported"]
    assert training.usd is training.rate.usd_hour is None
    per_million = on_demand.usd_per_million(1e12)
    assert per_million is not None
    assert per_million == pytest.approx((on_demand.usd or 0) / 1e6)
    more = files.plan(set=("checkpoint.keep_last=9",)).storage.s3_usd_hour / made.storage.s3_usd_hour
    assert more == pytest.approx(9 / made.request.checkpoint.keep_last)


def test_prices_of_today_stand_before_the_dated_ones(files: Files) -> None:
    """The user's own go first; a price that AWS was asked for and does not have is unknown."""
    today = {
        "p5.48xlarge": Price(60.0, "hour", "us-east-1", "2026-11-26", PRICE_LIST),
        "spot:p5.48xlarge": Price(20.0, "hour", "us-east-1b", "2026-11-26", SPOT_HISTORY),
    }
    request = files.plan().request
    on_demand, spot, block, _ = plan(replace(request, today=today)).outcomes
    assert [(one.rate.usd_hour, one.rate.origin) for one in (on_demand, spot)] == [
        (60.0, "list of 2026-11-26"),
        (20.0, "list of 2026-11-26, us-east-1b's"),
    ]
    assert block.rate.usd_hour == 31.464
    given = plan(replace(request, today=today, prices={"spot": 9.0})).outcomes
    assert given[1].rate.usd_hour == 9.0
    assert plan(replace(request, today=dict.fromkeys(today))).outcomes[0].rate.usd_hour is None


def test_checkpoint_follows_from_parameters_and_rates(files: Files) -> None:
    made = files.plan(store_gb_s="4")
    size = 12 * made.request.work.parameters
    saves = made.checkpoints
    assert (saves.bytes, saves.stall_s) == (size, pytest.approx(size / 32 / 20e9))
    assert saves.commit_s == pytest.approx(saves.stall_s + size / 4 / 4e9)
    # A node that has a whole replica reads all of it.
    assert made.best.strategy.kind == "HSDP"
    assert saves.restore_s == pytest.approx(size / 4e9)
    sharded = files.plan(store_gb_s="4", set=("train.micro_batch=2",))
    assert sharded.best.strategy.kind == "FSDP2"
    assert sharded.checkpoints.restore_s == pytest.approx(size / 4 / 4e9)


def test_goodput_counts_the_restore_as_part_of_a_restart(files: Files) -> None:
    slow = files.plan(mtbf_hours="1", store_gb_s="0.2", restart_s="0")
    losses = Losses(3600, slow.checkpoints.restore_s, slow.checkpoints.stall_s, slow.checkpoints.commit_s)
    assert slow.outcomes[0].goodput == pytest.approx(goodput(slow.outcomes[0].trainers_interval_s, losses))


def test_part_of_a_gpus_memory_is_not_for_tensors() -> None:
    node = node_of("p5.48xlarge")
    assert node.usable_bytes == int((node.gpu_bytes - RESERVED_BYTES) * (1 - FRAGMENTATION)) < 0.94 * node.gpu_bytes


def test_nodes_fail_and_spot_is_taken_away_as_well(files: Files) -> None:
    request = files.plan(set=("checkpoint.mtbf_hours=2.0",)).request
    failures = NODE_MTBF_S / 4
    assert mtbf_s(request, "on-demand") == pytest.approx(failures)
    assert mtbf_s(request, "spot") == pytest.approx(1 / (1 / failures + 1 / 7200))
    assert {outcome.mtbf_s for outcome in files.plan(mtbf_hours="3").outcomes} == {3 * 3600}


def test_everything_assumed_is_named_until_it_is_given(files: Files) -> None:
    assumed = set(report.data(files.plan())["assumed"])
    given = set(report.data(files.plan(mfu="0.5", store_gb_s="4", restart_s="60", mtbf_hours="9"))["assumed"])
    assert assumed - given == {"efficiency", "store_gb_s", "restart_s", "node_mtbf_hours", "spot_mtbf_hours"}
    assert given == {"copy_gb_s", "reserved_bytes", "fragmentation", "link_share", "pcie_share"}
    assert "\n".join(report.lines(files.plan())).count("assumed") == 5


def test_cluster_gives_type_number_and_region(files: Files) -> None:
    made = files.plan(cluster=files.cluster(), instance_type=None, nodes=None)
    assert (made.request.node.type, made.request.nodes, made.request.region) == ("p5en.48xlarge", 4, "us-east-2")
    assert made.outcomes[1].rate.usd_hour == 26.5714


def write_run(files: Files, seconds: float, ranks: int, steps: int = 40, **settings: Any) -> str:
    """Write the records of a run of this configuration, whose first steps were slow."""
    sets = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    config = load(files.config, sets)
    shape = asdict(resolve_request(files.flags()).work.shape)
    run = files.folder / "run"
    (run / "metrics").mkdir(parents=True)
    (run / "config.toml").write_bytes(encode_config(config, {"model": shape, "seq_len": 4096}))
    part = run / PartName(1, 0).key(STEPS)
    (run / "events").mkdir()
    (run / "events/000001-00000.jsonl").write_bytes(encode({"event": "started"}))
    part.write_bytes(
        b"".join(
            encode({"step": step, "attempt": 1, "world_size": ranks, "step_seconds": seconds if step > 10 else 99.0})
            for step in range(1, steps + 1)
        )
    )
    return str(run)


def test_measured_run_gives_its_own_step_time_back(files: Files) -> None:
    run = write_run(files, 21.5, 16, train__activation_checkpointing="full")
    request = resolve_request(files.flags(run=run))
    strategy = Strategy(1, 16, recompute="full")
    again = step_time(request.work, strategy, request.node, 2, request.efficiency)
    assert again.total == pytest.approx(21.5, rel=1e-6)
    assert request.efficiency_origin.startswith("measured")


def test_steps_of_the_last_start_alone_are_measured(files: Files) -> None:
    run = Path(write_run(files, 5.0, 16, steps=80, train__activation_checkpointing="full"))
    later = [{"step": step, "attempt": 2, "world_size": 16, "step_seconds": 21.5} for step in range(81, 111)]
    (run / PartName(2, 0).key(STEPS)).write_bytes(b"".join(map(encode, later)))
    request = resolve_request(files.flags(run=str(run)))
    again = step_time(request.work, Strategy(1, 16, recompute="full"), request.node, 2, request.efficiency)
    assert again.total == pytest.approx(21.5, rel=1e-6)


def test_json_holds_the_plan(files: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(fabfile.__file__).parent)
    words = ["plan-training", str(files.config), "2B", "--instance-type", "p5.48xlarge", "--nodes", "2", "--json"]
    program.run(["fab", *words], exit=False)
    printed = json.loads(capsys.readouterr().out)
    assert (printed["gpus"], printed["tokens"], printed["efficiency_origin"]) == (16, 2e9, "assumed")
    assert printed["best"]["memory"]["total"] <= printed["usable_bytes"]
    assert printed["outcomes"][3]["usd"] is None


def refused(files: Files, **more: Any) -> tuple[str, str]:
    with pytest.raises(UserError) as error:
        files.plan(**more)
    (line,) = error.value.problems
    assert error.value.exit_code == 2
    return line.path, line.fix


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ({"instance_type": "p5.48xlrge"}, "--instance-type"),
        ({"instance_type": "trn1.32xlarge"}, "--instance-type"),
        ({"instance_type": "m5.large"}, "--instance-type"),
        ({"instance_type": None}, "--instance-type"),
        ({"nodes": "-1"}, "--nodes"),
        ({"nodes": "0"}, "--nodes"),
        ({"nodes": str(MOST_NODES + 1)}, "--nodes"),
        ({"nodes": "1024"}, "--nodes"),
        ({"tokens": "-5B"}, "--tokens"),
        ({"tokens": "many"}, "--tokens"),
        ({"tokens": "1e99"}, "--tokens"),
        ({"mfu": "1.2"}, "--mfu"),
        ({"mfu": "0"}, "--mfu"),
        ({"mtbf_hours": "-4"}, "--mtbf-hours"),
        ({"restart_s": "nan"}, "--restart-s"),
        ({"store_gb_s": "0"}, "--store-gb-s"),
        ({"price": ("spot=-1",)}, "--price spot"),
        ({"price": ("weekly=3",)}, "--price"),
        ({"price": ("spot=3", "spot=4")}, "--price"),
        ({"group": "train"}, "--group"),
        ({"lustre_rate": "300"}, "--lustre-rate"),
        ({"lustre_gib": "-1"}, "--lustre-gib"),
        ({"region": "us-esat-1"}, "--region"),
        ({"run": "nowhere"}, "RUN"),
        ({"set": ("train.micro_batch=3",)}, "train.global_batch"),
        ({"set": ("parallel.shard=3",)}, "parallel.shard"),
        ({"set": ("precision.mode=bf16",), "instance_type": "p3dn.24xlarge"}, "precision.mode"),
        ({"set": ('task={name = "image_classification"}',)}, "task.name"),
    ],
)
def test_bad_figure_is_one_line(files: Files, flags: dict[str, Any], path: str) -> None:
    assert refused(files, **flags)[0] == path


def test_vocabulary_without_data_is_asked_for(files: Files) -> None:
    files.config.write_text(files.config.read_text().replace("vocab_size = 128256", ""))
    path, fix = refused(files)
    assert path == "task.model.vocab_size"
    assert "--set" in fix


LONG = ("task.seq_len=262144", "task.loss_chunk=4096")


@pytest.mark.parametrize(
    ("change", "unit"),
    [
        ({"instance_type": "p4d.24xlarge", "nodes": "1", "set": ("train.micro_batch=64",)}, "train.micro_batch"),
        ({"instance_type": "g5.12xlarge", "nodes": "1"}, "nodes"),
        ({"instance_type": "g5.12xlarge", "nodes": "16", "set": LONG}, "x"),
    ],
)
def test_model_that_fits_nowhere_names_the_nearest_that_does(files: Files, change: dict[str, Any], unit: str) -> None:
    path, fix = refused(files, **change)
    assert path == "task.model"
    words = fix.rpartition(": ")[2].split()
    assert unit in words
    mended = {
        "train.micro_batch": change | {"set": (*change.get("set", ()), "".join(words))},
        "nodes": change | {"nodes": words[0]},
        "x": change | {"instance_type": words[-1]},
    }
    assert files.plan(**mended[unit]).best.fits


def test_model_that_no_change_helps_is_refused(files: Files) -> None:
    _, fix = refused(files, set=("task.model.layers=4096", "task.model.hidden=1048576"))
    assert "smaller model" in fix


def test_run_of_something_else_is_refused(files: Files) -> None:
    assert refused(files, run=write_run(files, 5.0, 16, train__global_batch=256))[0] == "train.global_batch"


def test_run_that_lacks_a_setting_is_refused(files: Files) -> None:
    run = Path(write_run(files, 21.5, 16))
    (run / "config.toml").write_bytes(encode_config(load(files.config, []), {"seq_len": 4096}))
    with pytest.raises(UserError) as error:
        files.plan(run=str(run))
    assert "fingerprint.model.layers" in {line.path for line in error.value.problems}
    (run / "config.toml").unlink()
    assert refused(files, run=str(run))[0] == "--run"


def test_first_steps_of_a_run_measure_nothing(files: Files) -> None:
    assert refused(files, run=write_run(files, 21.5, 16, steps=19))[0] == "--run"


def test_run_that_no_such_gpu_explains_is_refused(files: Files) -> None:
    assert refused(files, run=write_run(files, 1e-6, 16))[0] == "--run"


@pytest.mark.parametrize(("text", "tokens"), [("15T", 15e12), ("2e9", 2e9), ("1.5b", 1.5e9), ("700", 700)])
def test_tokens_are_read_with_their_unit(text: str, tokens: float) -> None:
    assert tokens_of(text) == tokens


def test_other_groups_have_to_be_named(files: Files) -> None:
    cluster = files.cluster(more={"type": "g6e.12xlarge", "count": 2, "gpus": 4})
    flags = {"cluster": cluster, "instance_type": None, "nodes": None}
    assert refused(files, **flags)[0] == "--group"
    assert plan(resolve_request(files.flags(**flags, group="train"))).request.nodes == 4
