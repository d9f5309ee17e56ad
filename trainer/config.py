"""The trainer's configuration: strict typed TOML, every problem reported at once, one line each.

`load(path, sets)` reads the file, applies `--set key=value` on top and validates. A Task's own options live under `[task]`
beside `name` and are validated by the Task (`trainer.tasks`). Times are seconds, sizes bytes unless the name says otherwise.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lustrain import schema
from lustrain.problem import Problem, UserError, problem

LONGEST_S = 7 * 86_400.0
"""A week. Python's waits end in OverflowError beyond 2^63 ns, and torch's timeouts are counted in milliseconds."""
MOST_STEPS = 10**11
MOST_SAMPLES = 2**24
"""Per step; a sample's position in the run, at most MOST_STEPS x MOST_SAMPLES, stays below 2^63."""
FP32_LARGEST = 3.4e38
"""What is larger becomes infinite in fp32 (IEEE 754 binary32)."""
FP32_SMALLEST = 1.2e-38
"""What is smaller loses digits or becomes 0 in fp32."""

Seconds = Annotated[float, Field(ge=0.001, le=LONGEST_S, allow_inf_nan=False)]
Steps = Annotated[int, Field(gt=0, le=MOST_STEPS)]
EverySteps = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Samples = Annotated[int, Field(gt=0, le=MOST_SAMPLES)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Magnitude = Annotated[float, Field(ge=0, le=FP32_LARGEST, allow_inf_nan=False)]


DEEPEST = 32
"""Levels of tables and lists in a config; the deepest setting of a shipped Task lies four deep."""
_TOO_DEEP = f"tables and lists are nested more than {DEEPEST} levels deep"


class Section(schema.Section):
    """Base of every table: also, no value is coerced from another type, since TOML has types of its own."""

    model_config = ConfigDict(strict=True)
    # A Task's text may have lines. What no file can hold is a NUL, and half of a surrogate pair.
    unprintable = re.compile(r"[\x00\ud800-\udfff]")


class RunConfig(Section):
    """Where the run lives and what it is called."""

    uri: Annotated[str, Field(min_length=1)]
    """Folder or `s3://bucket/prefix`: checkpoints, metrics, events and the resolved config."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    resume: bool = True
    """False refuses to start when the run already holds a checkpoint."""


class TaskConfig(Section):
    """`name` picks the Task (a shipped one, or `package.module:Class`); every other key is one of that Task's Options."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1)]

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class TrainConfig(Section):
    """How much to train on, and the arithmetic of one step."""

    steps: Steps
    global_batch: Samples
    """Samples per optimizer step over all ranks; changing it changes the training, so a run keeps it."""
    micro_batch: Samples
    """Samples per forward pass on one rank, a divisor of global_batch. The ranks share the micro-batches of a step in turn."""
    grad_clip: Magnitude = 1.0
    """Largest global gradient norm; 0 measures it without clipping."""
    deterministic: bool = False
    """Only deterministic kernels: needed for bit-identical resumes on CUDA, where it costs some speed."""
    compile: bool = False
    """`torch.compile` each block of the Task."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs"] = "default"
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """`selective` runs a policy in Python for each operation, which a small model waits for unless `compile` is on."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step over all ranks: no more ranks than that can be used."""
        return self.global_batch // self.micro_batch

    def division_problems(self) -> list[Problem]:
        """Return a line where a step's samples do not divide into micro-batches."""
        batch, micro = self.global_batch, self.micro_batch
        if batch % micro == 0:
            return []
        why, fix = f"is not a multiple of micro_batch = {micro}", f"a micro_batch that divides {batch}"
        return [problem("train.global_batch", batch, why, allowed=f"multiples of {micro}", fix=fix)]


class EvalConfig(Section):
    """Evaluation on the Task's held-out data, and when to give up."""

    every: EverySteps = 0
    """Steps between evaluations; 0 never evaluates."""
    batches: Annotated[int, Field(gt=0, le=10**9)] = 8
    """Global batches per evaluation, always the same ones."""
    patience: EverySteps = 0
    """Stop after this many evaluations without improvement; 0 never stops early."""
    min_delta: Magnitude = 0.0


class OptimizerConfig(Section):
    """AdamW (https://arxiv.org/abs/1711.05101); decay applies to matrices only."""

    lr: Annotated[float, Field(ge=FP32_SMALLEST, le=FP32_LARGEST, allow_inf_nan=False)] = 3e-4
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Annotated[float, Field(ge=FP32_SMALLEST, le=1, allow_inf_nan=False)] = 1e-8
    weight_decay: Magnitude = 0.1
    fused: bool | None = None
    """None: fused where torch offers it for the device."""


class ScheduleConfig(Section):
    """Learning rate by global step; past its end it stays at the last value, so a run may be prolonged."""

    kind: Literal["constant", "cosine", "linear", "wsd", "onecycle"] = "cosine"
    warmup_steps: EverySteps = 0
    min_lr_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.1
    total_steps: Steps | None = None
    """Steps until the end of the schedule; None means train.steps as it was when the run began."""
    decay_fraction: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.2
    """wsd: the last part of the steps in which the rate falls."""
    peak_fraction: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.3
    """onecycle: where the peak lies."""
    initial_lr_ratio: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.04
    """onecycle: rate at step 0 as a part of the peak (1/25, the paper's and torch's div_factor)."""


class BadLossConfig(Section):
    """What to do with a step whose loss or gradient is not finite, or spikes; bounded, so that no run skips to its end."""

    action: Literal["stop", "skip", "roll_back"] = "stop"
    """`skip` does not apply the update; `roll_back` goes on from an earlier checkpoint with later samples."""
    spike_deviations: Magnitude = 0.0
    """Standard deviations above the mean of the last steps from which a loss or norm counts as bad; 0: only what is not finite.
    OLMo takes 6 (sigma_factor, with a window of 128:
    https://github.com/allenai/OLMo-core/blob/main/src/olmo_core/optim/skip_step_optimizer.py)."""
    spike_window: Annotated[int, Field(ge=2, le=10_000)] = 128
    """Applied steps that a spike is measured against; none is seen before half of them are known."""
    max_skipped_in_row: Annotated[int, Field(gt=0, le=10**6)] = 10
    """The next bad step ends the attempt with exit code 1; so do the two limits below."""
    max_skipped: Annotated[int, Field(gt=0, le=10**9)] = 100
    """Since the run began."""
    rollback_steps: Annotated[int, Field(gt=0, le=MOST_STEPS)] = 100
    """Roll back to the newest checkpoint that is at least so many steps old, or else to the oldest. PaLM went back about 100
    steps and passed over 200 to 500 batches, those before and during the spike (section 5.1, https://arxiv.org/abs/2204.02311)."""
    skip_batches: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 100
    """Global batches passed over beyond those that were trained on since that checkpoint and the bad one."""
    max_rollbacks: Annotated[int, Field(gt=0, le=10**6)] = 3
    """Since the run began."""


class PrecisionConfig(Section):
    """Number formats: autocast for bf16 and fp16 (fp16 with a loss scaler), and TF32 by its torch name."""

    mode: Literal["fp32", "bf16", "fp16"] = "fp32"
    matmul: Literal["highest", "high", "medium"] = "highest"
    """torch.set_float32_matmul_precision: `high` allows TF32, which torch leaves off by default."""
    fp16_initial_scale: Annotated[float, Field(ge=FP32_SMALLEST, le=FP32_LARGEST, allow_inf_nan=False)] = 65536.0

    @property
    def dtype(self) -> str:
        """torch's name of the format that forward and backward compute in."""
        return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[self.mode]


DDP_ONLY = ("bucket_mb", "gradient_as_bucket_view", "static_graph", "comm_hook")
FSDP_ONLY = ("reshard", "offload")


class ParallelConfig(Section):
    """How the ranks share the model: whole on each (DistributedDataParallel), sharded (FSDP2), each product split (tensor)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    shard: Annotated[int, Field(ge=0, le=2**20)] = 1
    """Ranks over which each parameter, its gradient and its optimizer state are sharded; 1 keeps them whole on every rank,
    0 shards over all ranks, or all groups of `tensor` ranks, however many there are."""
    tensor: Annotated[int, Field(ge=1, le=2**20)] = 1
    """Ranks that compute each micro-batch together: every matrix product is split over them. Replicas x shard x tensor are
    all ranks."""
    reshard: bool = True
    """With FSDP2: free a block's gathered weights after forward, and gather them again for backward."""
    offload: Literal["none", "states"] = "none"
    """With FSDP2 on GPUs: `states` keeps sharded weights, gradients and optimizer state in host memory, and steps there."""
    timeout_s: Annotated[float, Field(ge=1, le=LONGEST_S, allow_inf_nan=False)] = 600.0
    """How long ranks wait for each other, at the start and in each exchange."""
    allow_sockets: bool = False
    """Train over several nodes although NCCL uses none of the EFA devices of one of them."""
    bucket_mb: Annotated[float, Field(ge=0.001, le=2**20, allow_inf_nan=False)] = 25.0
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    comm_hook: Literal["none", "bf16", "fp16"] = "none"

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP2 averages gradients, also where it has nothing to shard: with tensor parallelism DDP does not."""
        return self.shard != 1 or self.tensor > 1

    @property
    def states_on_host(self) -> bool:
        """Whether weights, gradients and optimizer state lie in host memory also where a GPU computes."""
        return self.offload == "states"

    def unused(self) -> list[Problem]:
        """Return a problem for each setting of the way to share the model that `shard` and `tensor` do not choose."""
        owner, keys = ("DistributedDataParallel", DDP_ONLY) if self.uses_fsdp else ("FSDP2", FSDP_ONLY)
        chosen = f"parallel.shard = {self.shard}" + (f", parallel.tensor = {self.tensor}" if self.tensor > 1 else "")
        why = f"belongs to {owner}, which {chosen} does not use"
        changed = [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]
        return [problem(f"parallel.{key}", getattr(self, key), why, fix="leave it out") for key in changed]


class TierConfig(Section):
    """A fast local copy of each rank's part; it is never the truth, only a quicker way to read what was committed."""

    kind: Literal["memory", "nvme"]
    path: Annotated[str, Field(min_length=1)]
    """A tmpfs folder such as /dev/shm/lustrain for memory, a folder on local disk for nvme."""


class CheckpointConfig(Section):
    """When to save, what to keep, and where fast copies go."""

    every_steps: EverySteps = 0
    """Save every N steps; 0 derives the interval from the measured stall and `mtbf_hours` (Young-Daly)."""
    least_seconds: Annotated[float, Field(ge=0, le=LONGEST_S, allow_inf_nan=False)] = 60.0
    """Shortest derived interval: a small stall alone would ask for saves every few seconds, and each costs requests to S3."""
    mtbf_hours: Annotated[float, Field(gt=0, le=10**6, allow_inf_nan=False)] = 4.0
    """Expected hours between interruptions of the whole job."""
    keep_last: Annotated[int, Field(ge=2, le=10**6)] = 3
    keep_every_steps: EverySteps = 0
    """Also keep one checkpoint every N steps for good; 0 keeps none."""
    keep_best: bool = True
    vote_timeout_s: Seconds = 600.0
    """How long rank 0 waits for every rank's part before it abandons an attempt."""
    longest_failing_s: Seconds = 3600.0
    """How long saves may fail one after the other before the job stops with exit code 1: all it trains meanwhile is lost if
    they never succeed."""
    lease_poll_s: Seconds = 10.0
    """Between two looks at who owns the run; a job that lost it wastes at most this long, for six small reads a minute."""
    copy_threads: Annotated[int, Field(gt=0, le=256)] = 2
    tiers: Annotated[tuple[TierConfig, ...], Field(strict=False)] = ()


def parse_time(text: str) -> float:
    """Unix seconds of a time with its zone, RFC 3339 or another form of ISO 8601; ValueError says what is wrong."""
    allowed = "allowed: a time with its zone (RFC 3339), like 2026-12-01T11:30:00Z"
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"is not a time; {allowed}") from None
    if moment.tzinfo is None:
        raise ValueError(f"has no time zone; {allowed}; fix: append Z for UTC")
    return moment.timestamp()


class InterruptConfig(Section):
    """What may tell us that the capacity goes away. SIGTERM and SIGUSR1 always do."""

    metadata: bool = False
    """Poll the EC2 instance metadata service (IMDSv2) for spot, rebalance and Auto Scaling notices."""
    rebalance: bool = False
    """Treat a rebalance recommendation as a notice."""
    queue: str | None = None
    """URL of the cluster's interruption queue (SQS), read by rank 0: notices about nodes of this run; empty for none."""
    poll_s: Seconds = 2.0
    deadline: str | None = None
    """RFC 3339 time at which the instances go, e.g. 2026-12-01T11:00:00Z: for a capacity block 30 minutes before its end."""
    deadline_margin_s: Seconds = 300.0
    """Stop this long before `deadline`."""

    @field_validator("deadline", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        """TOML has times of its own; both spellings mean the same."""
        return value.isoformat() if isinstance(value, datetime) else value

    @field_validator("deadline")
    @classmethod
    def _is_rfc3339(cls, value: str | None) -> str | None:
        if value is not None:
            parse_time(value)
        return value

    stop_uri: str | None = None
    """A file or s3:// object; when it appears, the run saves and stops."""
    signal_grace_s: Seconds = 110.0
    """Seconds assumed left after a signal (torchrun --shutdown-timeout, terminationGracePeriodSeconds)."""


class CloudWatchConfig(Section):
    """A CloudWatch agent that takes the run's progress once a minute, as logs that CloudWatch makes metrics of. `fab train`
    fills this in where the Cluster carries logs."""

    agent: Annotated[str, Field(pattern=r"^([A-Za-z0-9.-]+:[0-9]{1,5})?$")] = ""
    """HOST:PORT, over TCP; empty: off. One that does not answer is a warning."""
    log_group: str = ""
    """The log group, which is there already."""
    cluster: str = ""
    """Beside the run's name, the dimension of the metrics."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if int(self.agent.rpartition(":")[2] or 0) > 65535:
            raise ValueError(f"agent = {self.agent!r} names no port; allowed: 1 to 65535")
        if self.agent and not (self.log_group and self.cluster):
            raise ValueError("has an agent but no log_group or cluster; fix: name both, or set agent to ''")
        return self


class MetricsConfig(Section):
    """One record per step into the run; the rest is for eyes."""

    flush_s: Seconds = 30.0
    """Longest time a record waits before it is durable in the run."""
    tensorboard: str | None = None
    """A folder for TensorBoard event files (needs the `tensorboard` extra)."""
    batch_digest: bool = False
    """Add a checksum of each global batch's samples to its record, independent of how ranks split it."""
    prometheus_port: Annotated[int, Field(ge=0, le=65_000)] = 0
    """Serve metrics to Prometheus over HTTP, each rank at this port plus its local rank (needs the `metrics` extra); 0: do not.
    A port that is taken is a warning, and that rank trains on without."""
    prometheus_address: Annotated[str, Field(min_length=1)] = "0.0.0.0"
    """Address of this node to serve them on; the default is all of them, as of other exporters."""
    cloudwatch: CloudWatchConfig = CloudWatchConfig()


class Config(Section):
    """The whole file."""

    run: RunConfig
    task: TaskConfig
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    bad_loss: BadLossConfig = BadLossConfig()
    precision: PrecisionConfig = PrecisionConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    interrupt: InterruptConfig = InterruptConfig()
    metrics: MetricsConfig = MetricsConfig()

    def with_schedule(self, total_steps: int) -> Config:
        """Return the config with a learning-rate schedule of this length."""
        return self.model_copy(update={"schedule": self.schedule.model_copy(update={"total_steps": total_steps})})


def load(
    path: Path, sets: Sequence[str] = (), *, also: Callable[[Mapping[str, Any]], Sequence[str]] | None = None
) -> Config:
    """Return the configuration in `path` with each `key.path=value` of `sets` on top; UserError lists all problems at once.

    `also` finds further problems in the raw table: a Task's options are judged by the Task.
    """
    table = _read(path)
    table.pop(RECORDED, None)
    problems = [line for text in sets if (line := _apply_set(table, text))]
    problems += _drop_removed(table)
    config = None
    try:
        config = Config.model_validate(table)
    except ValidationError as error:
        problems += schema.problems_of(error, Config, words=schema.TOML)
    problems += also(table) if also else []
    if problems or config is None:
        raise UserError(problems)
    return config


_POWERSGD = "was removed: its error feedback is not in a checkpoint, so a resume was not bit-identical"
REMOVED: Mapping[tuple[str, str], tuple[Any, str]] = {
    ("checkpoint", "compression"): ("planes-zstd", "was removed: it saved a sixth of the bytes and cost a core"),
    ("parallel", "comm_hook"): ("powersgd", _POWERSGD),
    ("parallel", "powersgd_rank"): (None, _POWERSGD),
    ("parallel", "powersgd_start_step"): (None, _POWERSGD),
}
"""Keys of earlier versions: the value that asks for what was removed, and why it was. Any other value means nothing now."""


def _drop_removed(table: Mapping[str, Any]) -> list[str]:
    """Take keys of earlier versions out of `table`, which older runs stored; return a line for each that asks for something."""
    lines: list[str] = []
    for (section, key), (asks, why) in REMOVED.items():
        settings = table.get(section)
        if not isinstance(settings, dict) or key not in settings:
            continue
        if settings[key] == asks:
            lines.append(problem(f"{section}.{key}", asks, why, fix="remove the key"))
        if settings[key] == asks or key not in ParallelConfig.model_fields:
            del settings[key]
    return lines


def default_settings(section: type[BaseModel] = Config, prefix: str = "") -> dict[str, Any]:
    """Return every setting that has a default as flat `path -> value`, as TOML gives it back: None is left out."""
    flat: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            flat |= default_settings(kind, f"{prefix}{name}.")
        elif not field.is_required() and field.default is not None:
            flat[f"{prefix}{name}"] = list(field.default) if isinstance(field.default, tuple) else field.default
    return flat


RECORDED = "recorded"
"""Table that a stored config carries beside the settings: what the Task saw (model shape, data). Ignored as input."""


def to_toml(config: Config, recorded: Mapping[str, Any] | None = None) -> str:
    """Return the configuration as TOML that `load` reads back; unset options are left out, since TOML has no null."""
    table = config.model_dump(mode="json", exclude_none=True)
    if recorded is not None:
        table[RECORDED] = dict(recorded)
    return tomli_w.dumps(table)


def _read(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            problem("CONFIG", str(path), error.strerror or "cannot be read", fix="name a readable TOML file")
        ) from None
    except ValueError as error:
        raise UserError(problem("CONFIG", str(path), f"is not TOML: {error}")) from None


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table in `text`; ValueError when it is not TOML or is nested deeper than any configuration."""
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if _is_deeper(table, DEEPEST):
        raise ValueError(_TOO_DEEP)
    return table


def _is_deeper(value: object, levels: int) -> bool:
    """Return whether tables and lists are nested more than `levels` deep."""
    inner = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []
    return bool(inner) and (not levels or any(_is_deeper(item, levels - 1) for item in inner))


def _apply_set(table: dict[str, Any], text: str) -> str | None:
    """Put one `--set` into `table`; returns the problem line, if any. What is not a TOML value is taken as a string."""
    name, equals, raw = text.partition("=")
    keys = name.strip().split(".")
    if len(keys) > DEEPEST:
        return problem("--set", text, "the key has too many parts", allowed=f"at most {DEEPEST}")
    if not equals or not all(keys):
        return problem("--set", text, "is not of the form key.path=value", allowed="e.g. train.steps=200")
    try:
        value = parse_toml(f"value = {raw}")["value"]
    except ValueError:
        value = raw
    for key in keys[:-1]:
        child = table.setdefault(key, {})
        if not isinstance(child, dict):
            return problem("--set", text, f"{key} is a value, not a table", fix=f"set {key} itself")
        table = child
    table[keys[-1]] = value
    return None
