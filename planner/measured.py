"""How fast a run of the same model was, from its own records."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median

from lustrain.problem import Problem, UserError, problem
from planner.hardware import Node
from planner.step import efficiency_of
from planner.strategy import Strategy
from planner.work import Work
from trainer.checkpoint.stored_config import read_stored
from trainer.metrics.reader import read_steps
from trainer.storage import ObjectStore

LEAST_STEPS = 10
"""The first steps of a start compile, warm up and fill caches."""
WINDOW = 200


@dataclass(frozen=True)
class Measured:
    """Median seconds of a run's last steps, all of one start, and how it was divided."""

    step_s: float
    steps: int
    ranks: int
    shard: int
    tensor: int
    recompute: str


def measure(store: ObjectStore, work: Work) -> Measured:
    """Return what a run measured. UserError where it has too few steps, or trained something else."""
    stored = read_stored(store)
    if stored is None:
        why, fix = "has no stored configuration to compare", "plan with --mfu instead"
        raise UserError(problem("--run", store.uri, why, fix=fix))
    settings = stored.settings
    if problems := _differences(settings, work):
        raise UserError(problems)
    records = [record for record in read_steps(store) if not record.get("skipped")]
    start = records[-1]["attempt"] if records else None
    same = [record for record in records if record["attempt"] == start][LEAST_STEPS:][-WINDOW:]
    if len(same) < LEAST_STEPS:
        why = f"has {len(same)} steps of one start after its first {LEAST_STEPS}"
        raise UserError(problem("--run", store.uri, why, allowed=f"at least {LEAST_STEPS}", fix="train it for longer"))
    ranks, tensor = int(same[-1]["world_size"]), int(settings.get("parallel.tensor", 1))
    return Measured(
        median(float(record["step_seconds"]) for record in same),
        len(same),
        ranks,
        int(settings.get("parallel.shard", 1)) or ranks // tensor,
        tensor,
        str(settings.get("train.activation_checkpointing", "none")),
    )


def _differences(settings: dict[str, object], work: Work) -> list[Problem]:
    """Return a line for each setting of the run that decides a step's operations and that the plan has otherwise."""
    planned: dict[str, object] = {f"fingerprint.model.{key}": value for key, value in asdict(work.shape).items()}
    planned |= {
        "fingerprint.seq_len": work.seq_len,
        "train.global_batch": work.global_batch,
        "train.micro_batch": work.micro_batch,
        "precision.mode": work.precision.mode,
    }
    fix = "plan with the run's configuration, or leave --run out"
    return [
        problem(key, value, f"the run was trained with {settings.get(key, 'an unknown value')}", fix=fix)
        for key, value in planned.items()
        if key not in settings or settings[key] != value
    ]


def efficiency(measured: Measured, work: Work, node: Node, uri: str) -> float:
    """Return the share of the GPU's peak that explains the run's step time on nodes of this type. UserError where none
    does."""
    nodes = max(1, -(-measured.ranks // node.gpus))
    shard, tensor, recompute = measured.shard, measured.tensor, measured.recompute
    strategy = Strategy(measured.ranks // (shard * tensor), shard, tensor, recompute)  # type: ignore[arg-type]
    share = efficiency_of(work, strategy, node, nodes, measured.step_s)
    if share is None:
        why = f"took {measured.step_s:.4g} s a step on {measured.ranks} ranks, which no {node.gpu} explains"
        fix = "name the instance type that it ran on"
        raise UserError(problem("--run", uri, why, fix=fix))
    return share
