"""The plan of a training: every strategy's memory and step time, the best one's scaling, checkpoints, goodput and cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from infra.catalog.prices import HOME, Price
from lustrain.problem import UserError, problem
from planner.goodput import Losses, best_interval_s, goodput, trainers_interval_s
from planner.hardware import Node, nodes_for
from planner.memory import Memory, memory
from planner.price import Rate, Storage, rates, storage
from planner.step import StepTime, mfu, step_time
from planner.strategy import Strategy, strategies
from planner.units import parameters_text
from planner.work import Work
from trainer.config import CheckpointConfig

ASSUMED_EFFICIENCY = 0.4
"""Share of a GPU's peak while nothing waits for the network: torchtitan reports 33 to 39 % on H100 and 52 to 58 % on A100
(https://github.com/pytorch/torchtitan/blob/31a17bfdb70bab6f62a13d21816a5339b911d6e3/benchmarks/llama3_h100_202412_torchtitan.md)."""
NODE_MTBF_S = 54 * 86_400 * 2_048 / 419
"""Seconds between failures of one node: 419 unexpected interruptions in 54 days on 16,384 GPUs, eight a node, make 6,334 hours
(Llama 3, section 3.3.4, https://arxiv.org/abs/2407.21783)."""
TARGETS: Mapping[int, float] = {2: 0.92, 4: 0.86, 8: 0.75}
"""Scaling efficiency that this project set itself, by nodes."""
MOST_NODES = 4096
"""Where the search for a number of nodes that fits ends."""


@dataclass(frozen=True)
class Assumptions:
    """Figures that were neither measured nor computed; `given` names those that the user gave."""

    restart_s: float = 300.0
    """Seconds from an interruption to the new start's first read: noticed, nodes replaced, ranks started."""
    copy_gb_s: float = 20.0
    """Rate from a GPU to the host, while the loop stands still: half of what PCIe 5.0 x16 carries."""
    store_gb_s: float = 2.0
    """Rate between a node and where checkpoints lie."""
    mtbf_s: float | None = None
    """Seconds between interruptions of the job, however it is paid; None: by `mtbf_s` below."""
    given: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Request:
    """All that a plan follows from. `efficiency_origin` is `assumed`, or says what was measured or given."""

    work: Work
    node: Node
    nodes: int
    tokens: float
    checkpoint: CheckpointConfig
    efficiency: float = ASSUMED_EFFICIENCY
    efficiency_origin: str = "assumed"
    configured: tuple[int, int, str] = (1, 1, "none")
    """`parallel.shard`, `parallel.tensor` and `train.activation_checkpointing` of the configuration."""
    assumptions: Assumptions = Assumptions()
    region: str = HOME
    prices: Mapping[str, float] = field(default_factory=dict)
    today: Mapping[str, Price | None] = field(default_factory=dict)
    """What AWS gave now, by the names of `infra.catalog.prices`."""
    lustre_gib: int = 0
    lustre_rate: int = 250

    @property
    def gpus(self) -> int:
        return self.nodes * self.node.gpus


@dataclass(frozen=True)
class Option:
    """A strategy with what it takes; `step` None where it has more ranks than a step has micro-batches."""

    strategy: Strategy
    memory: Memory
    fits: bool
    step: StepTime | None
    mfu: float
    tokens_per_s: float

    @property
    def runnable(self) -> bool:
        return self.fits and self.step is not None


@dataclass(frozen=True)
class Scaling:
    """`efficiency` is speed-up by nodes, beside the fewest nodes that fit; None where nothing does."""

    nodes: int
    option: Option | None
    efficiency: float | None
    target: float | None


@dataclass(frozen=True)
class Checkpoints:
    """Seconds of a save and of a restore by the assumed rates."""

    bytes: int
    stall_s: float
    commit_s: float
    restore_s: float


@dataclass(frozen=True)
class Outcome:
    """The whole training, paid in one way; costs are None where the rate is unknown."""

    rate: Rate
    mtbf_s: float
    best_interval_s: float
    trainers_interval_s: float
    goodput: float
    """Share of time that counts with the interval that the trainer chooses."""
    best_goodput: float
    wall_s: float
    usd: float | None
    storage_usd: float

    def usd_per_million(self, tokens: float) -> float | None:
        return None if self.usd is None else self.usd / tokens * 1e6


@dataclass(frozen=True)
class Plan:
    request: Request
    options: tuple[Option, ...]
    best: Option
    scaling: tuple[Scaling, ...]
    checkpoints: Checkpoints
    storage: Storage
    outcomes: tuple[Outcome, ...]


def plan(request: Request) -> Plan:
    """Return the plan. UserError where no strategy fits, naming the nearest that does."""
    options = tuple(options_of(request))
    best = fastest(options)
    if best is None:
        raise UserError(_nothing_fits(request, options))
    saves = _checkpoints(request, best.strategy)
    store = storage(saves.bytes, request.checkpoint.keep_last, request.lustre_gib, request.lustre_rate, request.region)
    outcomes = tuple(
        _outcome(request, best, saves, store, rate)
        for rate in rates(request.node.type, request.region, request.prices, request.today)
    )
    return Plan(request, options, best, tuple(_scaling(request)), saves, store, outcomes)


def options_of(request: Request) -> Iterator[Option]:
    """Yield every strategy on the request's nodes."""
    work, node, (shard, tensor, _) = request.work, request.node, request.configured
    for strategy in strategies(request.nodes, node.gpus, split=work.can_split, shard=shard, tensor=tensor):
        needs = memory(work, strategy)
        fits = needs.total <= node.usable_bytes and host_bytes(request, needs) <= node.host_bytes
        if strategy.data_ranks > work.micro_batches:
            yield Option(strategy, needs, fits, None, 0.0, 0.0)
            continue
        step = step_time(work, strategy, node, request.nodes, request.efficiency)
        yield Option(
            strategy,
            needs,
            fits,
            step,
            mfu(work, node, request.gpus, step.total),
            work.tokens_per_step / step.total,
        )


def host_bytes(request: Request, needs: Memory) -> int:
    """Return what offloaded states take of a node's own memory, with the copy of them that a save writes from."""
    return needs.host * request.node.gpus + request.work.checkpoint_bytes // request.nodes if needs.host else 0


def fastest(options: tuple[Option, ...]) -> Option | None:
    """Return the option with the shortest step of those that fit; on the same nodes it is the
    cheapest too. Of equal ones the one that takes less memory."""
    runnable = [option for option in options if option.runnable]
    return min(
        runnable, key=lambda option: (option.step.total if option.step else 0.0, option.memory.total), default=None
    )


def _scaling(request: Request) -> Iterator[Scaling]:
    """Yield powers of two and the request's own number; the global batch stays the same, as in the trainer."""
    counts = sorted({2**power for power in range(13) if 2**power < request.nodes} | {request.nodes})
    first: tuple[int, float] | None = None
    for nodes in counts:
        best = fastest(tuple(options_of(replace(request, nodes=nodes))))
        if best is None:
            yield Scaling(nodes, None, None, TARGETS.get(nodes))
            continue
        first = first or (nodes, best.tokens_per_s)
        ideal = first[1] * nodes / first[0]
        yield Scaling(nodes, best, best.tokens_per_s / ideal, TARGETS.get(nodes))


def _checkpoints(request: Request, strategy: Strategy) -> Checkpoints:
    """All ranks save parts of equal size; on a start each node reads what its ranks hold, once."""
    size, assumed = request.work.checkpoint_bytes, request.assumptions
    stall = size / request.gpus / (assumed.copy_gb_s * 1e9)
    commit = size / request.nodes / (assumed.store_gb_s * 1e9)
    of_node = size * min(1.0, request.node.gpus / (strategy.shard * strategy.tensor))
    return Checkpoints(size, stall, stall + commit, of_node / (assumed.store_gb_s * 1e9))


def mtbf_s(request: Request, mode: str) -> float:
    """Return the mean time between interruptions of the job: nodes fail, and spot is taken away as the configuration says."""
    if request.assumptions.mtbf_s is not None:
        return request.assumptions.mtbf_s
    failures = request.nodes / NODE_MTBF_S
    taken = 1 / (request.checkpoint.mtbf_hours * 3600) if mode == "spot" else 0.0
    return 1 / (failures + taken)


def _outcome(request: Request, best: Option, saves: Checkpoints, store: Storage, rate: Rate) -> Outcome:
    assert best.step is not None
    restart = request.assumptions.restart_s + saves.restore_s
    losses = Losses(mtbf_s(request, rate.mode), restart, saves.stall_s, saves.commit_s)
    best_interval = best_interval_s(losses)
    trainers_interval = trainers_interval_s(request.checkpoint, losses, best.step.total)
    share, at_best = goodput(trainers_interval, losses), goodput(best_interval, losses)
    wall = request.tokens / best.tokens_per_s / share if share > 0 else float("inf")
    hours = wall / 3600
    by_hour = store.lustre_usd_hour + store.s3_usd_hour
    usd = None if rate.usd_hour is None else hours * (request.nodes * rate.usd_hour + by_hour)
    return Outcome(rate, losses.mtbf_s, best_interval, trainers_interval, share, at_best, wall, usd, hours * by_hour)


def _nothing_fits(request: Request, options: tuple[Option, ...]) -> str:
    """Return the line that says why, and names the nearest change that would fit."""
    work, node = request.work, request.node
    ranks = {option.strategy.data_ranks for option in options}
    if min(ranks) > work.micro_batches:
        why = f"a step has {work.micro_batches} micro-batches, fewer than the {min(ranks)} groups of GPUs that take their own"
        most = work.micro_batches * max(option.strategy.tensor for option in options) // node.gpus
        allowed = f"at most {most}" if most else ""
        return problem("--nodes", request.nodes, why, allowed=allowed, fix=_fix_of_few_micro_batches(request))
    least = min(options, key=lambda option: option.memory.total)
    gib = least.memory.total / 2**30
    name = f"{least.strategy.kind}, recomputation {least.strategy.recompute}"
    why = (
        f"no strategy fits: {name} takes the least, {gib:,.1f} GiB of {node.usable_bytes / 2**30:,.1f} usable on a GPU"
    )
    if least.memory.total <= node.usable_bytes:
        host = host_bytes(request, least.memory) / 2**30
        of = node.host_bytes / 2**30
        why = f"no strategy fits: {name} takes {host:,.1f} of a node's {of:,.1f} GiB for offloaded states and a save's copy"
    near = _nearest(request)
    fix = f"the nearest that fits: {near}" if near else "a smaller model or shorter samples"
    return problem("task.model", f"{parameters_text(work.parameters)} parameters", why, fix=fix)


def _fix_of_few_micro_batches(request: Request) -> str:
    work, gpus = request.work, request.node.gpus
    fixes = ["raise train.global_batch"] + (["lower train.micro_batch"] if work.micro_batch > 1 else [])
    enough = (
        ranks
        for ranks in range(2, gpus + 1)
        if gpus % ranks == 0 and request.gpus // ranks <= work.micro_batches and work.can_split(ranks)
    )
    if (ranks := next(enough, None)) is not None:
        fixes.append(f"--set parallel.tensor={ranks} --set parallel.shard=1")
    if request.nodes > 1:
        fixes.append("take fewer nodes")
    return ", or ".join(fixes)


def _nearest(request: Request) -> str:
    """Return the smallest change that fits: of the micro-batch, of the number of nodes, or of the type."""
    work = request.work
    for micro in range(work.micro_batch - 1, 0, -1):
        if work.global_batch % micro == 0 and _best(replace(request, work=replace(work, micro_batch=micro))):
            return f"train.micro_batch = {micro}"
    nodes = request.nodes * 2
    while nodes <= MOST_NODES:
        if _best(replace(request, nodes=nodes)):
            return f"{nodes} nodes"
        nodes *= 2
    larger = sorted(nodes_for(work.precision), key=lambda node: (node.gpus * node.gpu_bytes, node.type))
    for node in larger:
        if _best(replace(request, node=node)):
            return f"{request.nodes} x {node.type}"
    return ""


def _best(request: Request) -> Option | None:
    return fastest(tuple(options_of(request)))
