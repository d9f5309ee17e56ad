"""Flags, settings and Cluster to the request of a plan: all reading happens here, and every mistake is found here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infra.catalog.prices import HOME
from infra.catalog.regions import ZONES
from launch.request import uri_of
from launch.runs import open_existing_run
from lustrain import deployed
from lustrain.cluster import Cluster, NodeGroup
from lustrain.flags import number
from lustrain.problem import UserError, did_you_mean, problem
from planner import measured
from planner.flags import PlanFlags
from planner.hardware import Node, node_of
from planner.plan import ASSUMED_EFFICIENCY, Assumptions, Request
from planner.price import LUSTRE_RATES, MODES
from planner.work import Work
from trainer import config as settings
from trainer.config import Config
from trainer.data.index import read_index
from trainer.parallel.mesh import mesh_problems
from trainer.storage import open_store
from trainer.tasks import make_task, problems_in
from trainer.tasks.language_model import LanguageModel
from trainer.tasks.models.llama import LlamaShape, tensor_problems

SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
MOST_TOKENS = 1e16


def resolve_request(flags: PlanFlags) -> Request:
    """Return what the flags and the files that they name ask for. UserError."""
    cluster = deployed.cluster(flags.cluster, flags.stack)
    config = settings.load(Path(flags.config), flags.set, also=problems_in)
    work = work_of(config)
    node, nodes = _nodes(flags, cluster)
    _require_division(config, work, nodes * node.gpus)
    _require_peak(node, config)
    assumptions = _assumptions(flags)
    request = Request(
        work,
        node,
        nodes,
        tokens_of(flags.tokens),
        config.checkpoint,
        configured=(
            config.parallel.shard or nodes * node.gpus // config.parallel.tensor,
            config.parallel.tensor,
            config.train.activation_checkpointing,
        ),
        assumptions=assumptions,
        region=region_of(flags.region, cluster),
        prices=prices_of(flags.price),
        lustre_gib=int(number("--lustre-gib", flags.lustre_gib, 0, 10**8)),
        lustre_rate=_lustre_rate(flags.lustre_rate),
    )
    return _with_efficiency(request, flags, cluster)


def work_of(config: Config) -> Work:
    """Return the work of a configuration. UserError where its Task is no language model, or its vocabulary is unknown."""
    task = make_task(config.task, seed=config.run.seed)
    if not isinstance(task, LanguageModel):
        why = "is not a model whose memory the planner knows"
        raise UserError(problem("task.name", config.task.name, why, allowed="language_model"))
    options = task.options
    shape = _with_vocabulary(options.model.shape(), options.data)
    train, parallel = config.train, config.parallel
    return Work(
        shape,
        options.seq_len,
        train.global_batch,
        train.micro_batch,
        options.loss_chunk,
        config.precision,
        parallel.gradient_as_bucket_view,
        parallel.reshard,
        parallel.states_on_host,
        train.compile,
    )


def _with_vocabulary(shape: LlamaShape, data: str) -> LlamaShape:
    if shape.vocab_size:
        return shape
    try:
        index = read_index(open_store(data, create=False, name="task.data"))
    except UserError as error:
        why = f"comes from the data, which cannot be read ({error.problems[0].why})"
        fix = "--set task.model.vocab_size=128256, or make the data first"
        raise UserError(problem("task.model.vocab_size", None, why, fix=fix)) from None
    return replace(shape, vocab_size=index.vocab_size)


def tokens_of(text: str) -> float:
    """Return the number in a text like `15T`. UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE | re.ASCII)
    value = float(match[1]) * SUFFIXES[match[2].upper()] if match else 0.0
    if not 1 <= value <= MOST_TOKENS:
        raise UserError(problem("--tokens", text, "is no number of tokens", allowed="1 to 1e16", fix="like 15T or 2e9"))
    return value


def prices_of(texts: Sequence[str]) -> dict[str, float]:
    """Return the rates that the user gave. UserError."""
    prices: dict[str, float] = {}
    for text in texts:
        mode, equals, figure = text.partition("=")
        if not equals or mode not in MODES:
            allowed = ", ".join(f"{mode}=USD" for mode in MODES)
            raise UserError(problem("--price", text, "names no way to pay for nodes", allowed=allowed))
        if mode in prices:
            why = f"gives a second price of {mode}, beside {prices[mode]:g}"
            raise UserError(problem("--price", text, why, fix="give each one once"))
        prices[mode] = number(f"--price {mode}", figure, 0.001, 10_000, whole=False)
    return prices


def _nodes(flags: PlanFlags, cluster: Cluster | None) -> tuple[Node, int]:
    """Return the type and number of nodes, of the flags before those of the Cluster."""
    group = None if flags.instance_type and flags.nodes and not flags.group else group_of(flags.group, cluster)
    type_name = type_of(flags.instance_type, group)
    count = flags.nodes or str(group.count if group and not flags.instance_type else 1)
    return node_of(type_name), int(number("--nodes", count, 1, 4096))


def type_of(name: str | None, group: NodeGroup | None) -> str:
    """Return the type of the nodes, the flag's before the group's. UserError where neither names one."""
    type_name = name or (group.type if group else None)
    if type_name is None:
        why, fix = "is given neither by a flag nor by a Cluster", "--instance-type p5.48xlarge, or --cluster FILE"
        raise UserError(problem("--instance-type", None, why, fix=fix))
    return type_name


def group_of(name: str | None, cluster: Cluster | None) -> NodeGroup | None:
    """Return the Cluster's group of workers with GPUs, of this name or the only one; None without. UserError."""
    if cluster is None:
        if name is not None:
            raise UserError(
                problem("--group", name, "needs a Cluster that it is of", fix="--cluster FILE, or leave it out")
            )
        return None
    workers = {key: group for key, group in cluster.groups.items() if group.role == "worker" and group.gpus}
    if name is not None and name not in workers:
        raise UserError(problem("--group", name, "is not a worker group with GPUs", allowed=", ".join(workers)))
    if name is None and len(workers) > 1:
        raise UserError(problem("--group", None, "the Cluster has several worker groups", allowed=", ".join(workers)))
    return workers[name] if name is not None else next(iter(workers.values()), None)


def region_of(name: str | None, cluster: Cluster | None) -> str:
    """Return the region whose prices count. UserError where the name is of none."""
    if name is not None and name not in ZONES:
        fix = did_you_mean(name, ZONES) or "the code of a region, like us-east-1"
        raise UserError(problem("--region", name, "is not a region of AWS", fix=fix))
    return name or (cluster.region if cluster else None) or HOME


def _require_division(config: Config, work: Work, gpus: int) -> None:
    """UserError for what the trainer would refuse on so many GPUs."""
    tensor = config.parallel.tensor
    lines = list(mesh_problems(config.parallel, gpus))
    if tensor > 1:
        lines += tensor_problems(work.shape, tensor, length=work.seq_len, prefix="task")
    lines += config.train.division_problems()
    if lines:
        raise UserError(lines)


def _require_peak(node: Node, config: Config) -> None:
    if not node.flops(config.precision):
        why = f"{node.gpu} of {node.type} has no {config.precision.mode} units"
        raise UserError(
            problem("precision.mode", config.precision.mode, why, fix="precision.mode=fp16, or another type")
        )


def _assumptions(flags: PlanFlags) -> Assumptions:
    assumed = Assumptions()
    given = {name for name in ("restart_s", "store_gb_s", "mtbf_hours") if getattr(flags, name) is not None}
    if flags.restart_s is not None:
        assumed = replace(assumed, restart_s=number("--restart-s", flags.restart_s, 0, 7 * 86_400, whole=False))
    if flags.store_gb_s is not None:
        assumed = replace(assumed, store_gb_s=number("--store-gb-s", flags.store_gb_s, 0.001, 10_000, whole=False))
    if flags.mtbf_hours is not None:
        assumed = replace(assumed, mtbf_s=3600 * number("--mtbf-hours", flags.mtbf_hours, 0.01, 10**6, whole=False))
    return replace(assumed, given=frozenset(given))


def _lustre_rate(text: str) -> int:
    if text not in map(str, LUSTRE_RATES):
        allowed = ", ".join(map(str, LUSTRE_RATES))
        raise UserError(problem("--lustre-rate", text, "is no rate of FSx for Lustre on SSD", allowed=allowed))
    return int(text)


def _with_efficiency(request: Request, flags: PlanFlags, cluster: Cluster | None) -> Request:
    if flags.mfu is not None and flags.run is not None:
        raise UserError("--mfu and --run both say how fast a GPU computes; fix: give one of them")
    if flags.mfu is not None:
        share = number("--mfu", flags.mfu, 0.001, 1, whole=False)
        return replace(request, efficiency=share, efficiency_origin="as given")
    if flags.run is None:
        return replace(request, efficiency=ASSUMED_EFFICIENCY)
    store = open_existing_run(uri_of(flags.run, cluster, Path.cwd()))
    speed = measured.measure(store, request.work)
    share = measured.efficiency(speed, request.work, request.node, store.uri)
    origin = f"measured: {speed.steps} steps of {store.uri} on {speed.ranks} GPUs, {speed.step_s:.4g} s each"
    return replace(request, efficiency=share, efficiency_origin=origin)
