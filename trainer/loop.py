"""The training loop, top to bottom: batches, forward and backward, one exchange, optimizer, evaluation, checkpoint.

Step s (the first is 1) consumes the run's sample positions [(s-1) x global_batch, s x global_batch), further on by what roll
backs passed over, cut into micro-batches whose content and random numbers depend on (seed, step, micro-batch number) only, and
so not on how many ranks there are.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lustrain.from_json import from_json
from lustrain.problem import UserError
from trainer import parallel
from trainer.config import Config
from trainer.data import order
from trainer.interrupt import Notice, NoticeWatcher
from trainer.metrics import Sink
from trainer.node.watchdog import StepWatchdog
from trainer.parallel.strategy import Strategy
from trainer.run.saving import Saving
from trainer.step import bad_loss, optim, precision, schedule
from trainer.step.passes import Pass, passes
from trainer.tasks import Ids, Task

Record = dict[str, Any]
"""Fields of trainer.metrics.records.StepRecord."""


class LoopEnd(Enum):
    """Why the loop returned."""

    DONE = "all steps are done"
    EARLY = "evaluation stopped improving"
    NOTICE = "a notice, or damaged data"
    LOST = "a newer job owns the run"
    ROLL_BACK = "the run goes on from an earlier checkpoint"


class BadLossError(UserError):
    """The loss or the gradient is not finite, or spikes; nothing of this step was applied or saved."""

    exit_code = 1


@dataclass
class Progress:
    """Where the run stands: all that must survive a restart and is not a tensor."""

    step: int = 0
    tokens: int = 0
    best_eval_loss: float | None = None
    last_eval_loss: float | None = None
    evals_without_gain: int = 0
    wall_s: float = 0.0
    data_offset: int = 0
    """Samples that roll backs have passed over: step s consumes those that lie so many further on."""

    def to_state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        """Read what `to_state` returned; what an older version did not store has its default."""
        return from_json(cls, state)


@dataclass
class Training:
    """Everything one attempt works with, put together by `trainer.train`."""

    config: Config
    task: Task
    world: parallel.World
    strategy: Strategy
    model: nn.Module
    wrapped: nn.Module
    """What the loss calls: `model`, or DistributedDataParallel around it."""
    optimizer: torch.optim.Optimizer
    tensors: Mapping[str, Tensor]
    """What a checkpoint holds of model and optimizer, by name; training updates it in place."""
    scaler: torch.amp.GradScaler
    watch: NoticeWatcher
    sink: Sink
    generation: int = field(init=False)
    """Of the run's lease; a roll back raises it."""
    progress: Progress = field(default_factory=Progress)
    history: bad_loss.History = field(default_factory=bad_loss.History)
    bad_step: bad_loss.BadStep | None = None
    """The step for which the loop returned LoopEnd.ROLL_BACK."""
    clock: StepWatchdog = field(default_factory=StepWatchdog.of)
    saving: Saving = field(init=False)
    """Set once the checkpoint to resume from, if any, is loaded."""

    @property
    def accumulation(self) -> int:
        """Forward passes per rank and step."""
        return -(-self.config.train.micro_batches // self.strategy.dims.data_size)

    def passes(self, micro_batches: int) -> list[Pass]:
        """Return this rank's passes over so many micro-batches, of a step or of an evaluation."""
        return passes(micro_batches, self.strategy.dims.data_rank, self.strategy.dims.data_size)


@dataclass
class StepReduction:
    """What all ranks know after a step's one exchange; the flags count the ranks that raised them."""

    loss_sum: float
    count: float
    notices: float
    saves: float
    lost: float
    digest: float


def train(training: Training) -> LoopEnd:
    """Run until the last step, early stopping, a notice, the loss of the run or a step to roll back from.

    On return the newest state is committed, except when the run was lost: then nothing of it may be; and except before a roll
    back, after which the caller loads an earlier state and calls this again.
    """
    config, progress, saving = training.config, training.progress, training.saving
    while progress.step < config.train.steps and not should_stop_early(training):
        began = time.perf_counter()
        training.clock.start_step()
        record, reduced = train_step(training, progress.step + 1)
        if reduced.lost:
            return LoopEnd.LOST
        step_seconds = time.perf_counter() - began
        training.clock.end_step(step_seconds)
        if training.bad_step is not None:
            return LoopEnd.ROLL_BACK
        saving.note_step(step_seconds)
        if config.eval.every and progress.step % config.eval.every == 0:
            record |= note_evaluation(training)
        over = progress.step == config.train.steps or should_stop_early(training)
        noticed = reduced.notices > 0 and not over
        blocked_seconds = saving.save(progress.step) if reduced.saves and not noticed else 0.0
        progress.wall_s += time.perf_counter() - began
        training.sink.step(
            record
            | {
                "tokens": progress.tokens,
                "tokens_per_second": reduced.count / step_seconds,
                "step_seconds": step_seconds,
                "blocked_seconds": blocked_seconds,
                "world_size": training.world.world_size,
                "attempt": training.generation,
            }
        )
        if noticed:
            saving.save_on_notice(progress.step, pending_notice(training), training.watch.report_notice)
            return LoopEnd.NOTICE
    saving.finish(progress.step)
    return LoopEnd.EARLY if progress.step < config.train.steps else LoopEnd.DONE


def train_step(training: Training, step: int) -> tuple[Record, StepReduction]:
    """Train on one global batch; returns the step's record and what was reduced over the ranks."""
    config, task, world = training.config, training.task, training.world
    nominal = config.train.global_batch * task.tokens_per_sample()
    # Strategies average over ranks; with this their result is the mean over the nominal tokens.
    loss_scale = training.strategy.dims.data_size / nominal
    lr = schedule.lr_at(step, config.schedule, config.train.steps, config.optimizer.lr)
    optim.set_lr(training.optimizer, lr)
    training.optimizer.zero_grad(set_to_none=True)

    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    count, digest, data_seconds = 0, 0, 0.0
    takes_count = training.strategy.dims.tensor_rank == 0
    for done, (micro, batch, seconds) in enumerate(micro_batches(training, step), start=1):
        data_seconds += seconds
        digest += digest_of(batch) if micro.counts and takes_count and config.metrics.batch_digest else 0
        on_device = {name: tensor.to(world.device, non_blocking=True) for name, tensor in batch.items()}
        last = done == training.accumulation
        with training.strategy.micro_batch(last=last):
            with precision.autocast(config.precision, world.device):
                loss = task.loss(training.wrapped, on_device)
            weight = loss_scale if micro.counts else 0.0
            training.scaler.scale(loss.total * weight).backward()  # type: ignore[no-untyped-call]
        if micro.counts:
            loss_sum += loss.total.detach()
            count += loss.count

    notice = pending_notice(training) is not None
    save = training.saving.should_save(step)
    lost = training.saving.lost() is not None
    flags = [float(notice), float(save), float(lost), float(digest)]
    counted = [float(loss_sum), float(count)] if takes_count else [0.0, 0.0]
    reduced = StepReduction(*parallel.all_reduce_stats(world, [*counted, *flags]))
    if reduced.lost:
        return {}, reduced

    training.scaler.unscale_(training.optimizer)
    norm = optim.clip_(
        list(training.model.parameters()), config.train.grad_clip, scale=nominal / max(reduced.count, 1.0)
    )
    loss_mean = reduced.loss_sum / max(reduced.count, 1.0)
    decision = bad_loss.decide_step(
        config.bad_loss, training.history, loss_mean, norm, scaled=training.scaler.is_enabled()
    )
    if decision.action is bad_loss.Action.STOP:
        other_precision = "use precision.mode = bf16 or fp32, " if config.precision.mode == "fp16" else ""
        raise BadLossError(
            f"step {step}: loss = {loss_mean}, gradient norm = {norm}: {decision.reason}; nothing of this step was applied or "
            f"saved; fix: lower optimizer.lr, {other_precision}or change bad_loss.action or its limits, then start again: the "
            "run resumes before it"
        )
    if decision.action is bad_loss.Action.ROLL_BACK:
        training.scaler.update()  # without this, the next unscale_ raises
        training.bad_step = bad_loss.BadStep(step, loss_mean, norm, decision.reason, decision.history)
        return {}, reduced
    training.history = decision.history
    if decision.action is bad_loss.Action.APPLY:
        training.scaler.step(training.optimizer)
    training.scaler.update()
    scale = training.scaler.get_scale()
    if training.scaler.is_enabled() and scale < precision.LEAST_SCALE:
        raise BadLossError(
            f"step {step}: gradient norm = {norm}, and so were those before it: fp16's loss scale has sunk to {scale:.1e}; "
            f"allowed: {precision.LEAST_SCALE:.0e} or more; nothing of these steps was applied; fix: lower optimizer.lr, or "
            "use precision.mode = bf16 or fp32, then start again: the run resumes from its newest checkpoint"
        )
    training.progress.step = step
    training.progress.tokens += int(reduced.count)
    record: Record = {"step": step, "loss": loss_mean, "lr": lr, "grad_norm": norm, "data_seconds": data_seconds}
    if decision.action is bad_loss.Action.SKIP:
        note_skip(training, record, decision.reason)
    elif not math.isfinite(norm):
        record |= {"skipped": True, "why_skipped": "gradients overflowed"}
    if config.metrics.batch_digest:
        record["batch_digest"] = int(reduced.digest)
    return record, reduced


def note_skip(training: Training, record: Record, reason: str) -> None:
    """Put into the step's record that its update was not applied, and log why."""
    record |= {"skipped": True, "why_skipped": reason}
    if training.world.rank == 0:
        fields = {name: record[name] for name in ("step", "loss", "grad_norm")}
        counts = {"in_row": training.history.skipped_in_row, "in_run": training.history.skipped}
        training.sink.event("step_skipped", fields | counts | {"detail": reason})


def pending_notice(training: Training) -> Notice | None:
    """Return why this rank wants the job to save and stop; damaged data count as a notice, which `finish` then explains."""
    notice = training.watch.notice() or training.saving.unsaved_too_long()
    if notice is None:
        try:
            training.task.check()
        except UserError:
            return Notice("data", "damaged data", None)
    return notice


def micro_batches(training: Training, step: int) -> Iterator[tuple[Pass, dict[str, Tensor], float]]:
    """Yield this rank's passes of a step, each with its batch and the seconds spent on that."""
    mine = training.passes(training.config.train.micro_batches)
    following = [*((step, later) for later in mine[1:]), (step + 1, mine[0])]
    for micro, (next_step, later) in zip(mine, following, strict=True):
        began = time.perf_counter()
        precision.seed_streams(training.config.run.seed, step, micro.number)
        batch = training.task.train_batch(sample_ids(training, step, micro.number))
        training.task.prefetch(sample_ids(training, next_step, later.number))
        yield micro, batch, time.perf_counter() - began


def sample_ids(training: Training, step: int, micro_batch: int) -> Ids:
    """Return the samples of a step's micro-batch, which is counted over all ranks."""
    config = training.config
    size = config.train.micro_batch
    start = training.progress.data_offset + (step - 1) * config.train.global_batch + micro_batch * size
    return order.sample_ids(config.run.seed, start, size, training.task.train_samples)


def digest_of(batch: Mapping[str, Tensor]) -> int:
    """Sum of the CRC-32 of every sample: the same for any split of the same samples over micro-batches and ranks."""
    samples = zip(*(batch[name].contiguous().numpy() for name in sorted(batch)), strict=True)
    return sum(zlib.crc32(b"".join(part.tobytes() for part in sample)) for sample in samples)


@torch.no_grad()
def evaluate(training: Training) -> float:
    """Mean loss over the first `eval.batches` global batches of held-out samples, each counted on one rank."""
    config, task, world = training.config, training.task, training.world
    size = config.train.micro_batch
    samples = min(config.eval.batches * config.train.global_batch, task.eval_samples)
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    count = 0
    training.model.eval()
    for micro in training.passes(-(-samples // size)):
        # No training step has the number 0: every evaluation draws the same numbers.
        precision.seed_streams(config.run.seed, 0, micro.number)
        start = micro.number * size
        ids = order.sample_ids(config.run.seed, start, min(size, samples - start), task.eval_samples)
        batch = {name: tensor.to(world.device) for name, tensor in task.eval_batch(ids).items()}
        with training.strategy.micro_batch(last=True), precision.autocast(config.precision, world.device):
            loss = task.loss(training.model, batch)
        if micro.counts and training.strategy.dims.tensor_rank == 0:
            total += loss.total
            count += loss.count
    training.model.train()
    loss_sum, tokens = parallel.all_reduce_stats(world, [float(total), float(count)])
    return loss_sum / max(tokens, 1.0)


def note_evaluation(training: Training) -> Record:
    """Evaluate, and update the best loss and the patience counter, which travel with every checkpoint.

    A loss that is not finite is no gain. Returns what the step's record says of it.
    """
    began = time.perf_counter()
    loss = evaluate(training)
    progress, limits = training.progress, training.config.eval
    progress.last_eval_loss = loss if math.isfinite(loss) else None
    best = math.inf if progress.best_eval_loss is None else progress.best_eval_loss
    if math.isfinite(loss) and loss < best - limits.min_delta:
        progress.best_eval_loss, progress.evals_without_gain = loss, 0
    else:
        progress.evals_without_gain += 1
    return {"eval_loss": loss, "eval_seconds": time.perf_counter() - began}


def should_stop_early(training: Training) -> bool:
    """Whether evaluation has failed to improve for so long that training ends, also when it is started again."""
    patience = training.config.eval.patience
    return 0 < patience <= training.progress.evals_without_gain


def warm_up(training: Training) -> None:
    """Give the strategy one forward and backward, whose gradients it drops, where it needs a warm-up."""

    def forward_and_backward() -> None:
        _, batch, _ = next(micro_batches(training, 1))
        on_device = {name: tensor.to(training.world.device) for name, tensor in batch.items()}
        with precision.autocast(training.config.precision, training.world.device):
            loss = training.task.loss(training.wrapped, on_device)
        loss.total.backward()  # type: ignore[no-untyped-call]

    training.strategy.warm_up(forward_and_backward)
