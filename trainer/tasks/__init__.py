"""Tasks, the things to train: a Task brings the model, the batches and the loss; the loop knows nothing else of them.

A Task is named in the config by a shipped name or as `package.module:Class`, so that a Task of your own needs no change here.
"""

from __future__ import annotations

import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import ValidationError
from torch import Tensor, nn

from lustrain.problem import UserError, problem
from lustrain.schema import TOML, problems_of
from trainer.config import Section, TaskConfig
from trainer.data.verified import Ranks

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

Batch = dict[str, Tensor]
Ids = np.ndarray[Any, np.dtype[np.int64]]

SHIPPED = {
    "language_model": "trainer.tasks.language_model:LanguageModel",
    "image_classification": "trainer.tasks.image_classification:ImageClassification",
}


@dataclass(frozen=True)
class LossSum:
    """A loss that adds up over micro-batches and ranks: `total`, a differentiable fp32 scalar, is a sum over `count` items."""

    total: Tensor
    count: int


@dataclass(frozen=True)
class Footprint:
    """A Task's least needs: `parameters` of the model, and `activations`, bytes that one micro-batch takes beside them."""

    parameters: int
    activations: int
    model_keys: str
    """Settings that decide about `parameters`, for people."""
    remedy: str = "make samples smaller"
    """What makes `activations` smaller beside a smaller micro-batch, for people."""


class Task(ABC):
    """A kind of training. Construction is cheap and touches nothing; `open` reads the data sets.

    The loop seeds the global random streams of torch, Python and NumPy before it makes each micro-batch. So `train_batch`,
    `eval_batch` and `loss` may draw from them: the numbers do not depend on how many ranks there are. Threads of a Task and
    `prefetch` may not: they would change the numbers of whichever micro-batch is being made meanwhile.
    """

    Options: ClassVar[type[Section]]

    def __init__(self, options: Any, *, seed: int) -> None:
        self.options = options
        self.seed = seed

    @classmethod
    def problems(cls, options: Any) -> Sequence[str]:
        """Impossible combinations of well-formed options, one line each; [] when there are none."""
        return []

    @abstractmethod
    def open(self, cache_dir: Path) -> None:
        """Open the data sets; UserError when they are missing or do not fit the options."""

    def verify(self, cache_dir: Path, ranks: Ranks) -> None:  # noqa: B027 -- optional: not all data have checksums
        """Find damage in the data before training does; UserError names it. Called after `open`, with the same folder."""

    def check(self) -> None:  # noqa: B027 -- optional: as `verify`
        """UserError for damage found since `verify`; the loop asks at every step, then saves and ends all ranks with it."""

    @property
    @abstractmethod
    def train_samples(self) -> int:
        """Samples in the training set; valid after `open`."""

    @property
    @abstractmethod
    def eval_samples(self) -> int:
        """Samples held out for evaluation; 0 when there are none."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the model on the CPU in fp32, its weights a function of the options and the seed alone; valid after `open`."""

    def empty_model(self) -> nn.Module | None:
        """Return the model of `build_model` on torch's meta device, without memory; None: it can only be built whole.

        With it a sharded model is never whole on any rank. `initialise` then gives it its weights.
        """
        return None

    def initialise(self, model: nn.Module) -> None:
        """Fill parameters and buffers of `empty_model`, which may be sharded by now, as `build_model` does.

        `trainer.tasks.models.init.fill_normal` draws a shard's own numbers.
        """
        raise NotImplementedError(f"{type(self).__name__} has an empty_model, and so needs an initialise")

    @abstractmethod
    def train_batch(self, ids: Ids) -> Batch:
        """CPU tensors whose first dimension is len(ids); ids lie in [0, train_samples), already shuffled by the caller."""

    @abstractmethod
    def eval_batch(self, ids: Ids) -> Batch:
        """Like `train_batch`, from the held-out set."""

    def prefetch(self, ids: Ids) -> None:  # noqa: B027 -- optional: data in memory or on local disk needs none
        """Prepare for `train_batch(ids)`, which will be called soon; return at once, and draw from no global random stream."""

    def close(self) -> None:  # noqa: B027 -- optional: most Tasks hold nothing that needs it
        """End background reading, if there is any."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> LossSum:
        """Return the summed loss of a batch on the model's device; must call `model(...)`, which may be wrapped or sharded."""

    @abstractmethod
    def tokens_per_sample(self) -> int:
        """Nominal count that `loss` reports per sample, for throughput and a constant loss scale."""

    @abstractmethod
    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the repeated parts, in forward order: the units of compilation, recomputation and sharding."""

    def embeddings(self, model: nn.Module) -> list[nn.Module]:
        """Return look-up tables outside of the blocks, to be sharded as units that are whole in their own forward only.

        Each is called as a module, is tied to nothing, and backward does not need its weights.
        """
        return []

    def tensor_plan(self, model: nn.Module) -> Mapping[str, ParallelStyle] | None:
        """Return how to split each layer over tensor ranks, as torch's `parallelize_module` takes it; None: it cannot be split.

        Every parameter needs a style. `loss` runs inside torch's `loss_parallel`, and returns a plain tensor.
        """
        return None

    def tensor_problems(self, tensor: int) -> Sequence[str]:
        """Return one line for each option that forbids to split the model over `tensor` ranks; called before `open`."""
        if type(self).tensor_plan is not Task.tensor_plan:
            return []
        why = f"the Task {type(self).__name__} has no tensor_plan"
        return [problem("parallel.tensor", tensor, why, allowed="1", fix="parallel.shard, or another Task")]

    @abstractmethod
    def flops_per_token(self, model: nn.Module) -> float:
        """Floating-point operations of forward and backward for one counted token or item, without recomputation."""

    def footprint(self, micro_batch: int) -> Footprint | None:
        """Return the least memory that training with such micro-batches takes; None: not known. Valid after `open`."""
        return None

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return what must not change on resume: the model's shape, the data's identity, as JSON values; valid after `open`.

        A null is the same as no entry.
        """

    def fingerprint_defaults(self) -> dict[str, Any]:
        """Return what an entry of the fingerprint stood for before it existed, or stands for since it was removed.

        With it an entry that a later version adds, such as a new field of the model's shape, refuses no earlier run.
        """
        return {}

    def export_names(self, model: nn.Module) -> dict[str, str]:
        """Our parameter name to the exported one; names that are left out are kept."""
        return {}

    def export_config(self, model: nn.Module) -> dict[str, Any]:
        """Return an exported model's `config.json`, for the library that shall read it; {} writes none."""
        return {}

    def export_files(self) -> dict[str, str]:
        """Return other texts that belong beside an exported model, like its tokenizer, by file name. Valid after `open`."""
        return {}


def field_defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of a dataclass's fields by name; a field without one is left out."""
    return {field.name: field.default for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING}


def resolve(name: str) -> type[Task]:
    """Return the Task class of a shipped name or of `package.module:Class`; UserError when there is none."""
    target = SHIPPED.get(name, name)
    module_name, colon, class_name = target.partition(":")
    if not (module_name and colon and class_name):
        raise UserError(_unknown(name, "is not a shipped Task"))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(_unknown(name, f"cannot be imported ({error})")) from error
    kind = getattr(module, class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise UserError(_unknown(name, f"{module_name} has no Task of the name {class_name!r}"))
    return kind


def make_task(config: TaskConfig, *, seed: int) -> Task:
    """Validate a Task's own options and construct it; every problem is reported at once as `task.<path> = …`."""
    kind = resolve(config.name)
    try:
        options = kind.Options.model_validate(config.options)
    except ValidationError as error:
        raise UserError(problems_of(error, kind.Options, "task", words=TOML)) from error
    if problems := kind.problems(options):
        raise UserError(problems)
    return kind(options, seed=seed)


def problems_in(table: Mapping[str, Any]) -> Sequence[str]:
    """Return what is wrong with the `[task]` of a raw config, as far as it shows without the rest of it."""
    try:
        config = TaskConfig.model_validate(table.get("task"))
    except ValidationError:
        return []  # the config's own validation says so
    try:
        make_task(config, seed=0)
    except UserError as error:
        return error.problems
    return []


def _unknown(name: str, why: str) -> str:
    allowed = f"{', '.join(sorted(SHIPPED))}, or package.module:Class of a trainer.tasks.Task"
    return problem(
        "task.name", name, why, allowed=allowed, fix="check the spelling and that the package is on PYTHONPATH"
    )
