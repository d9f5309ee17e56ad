"""What the training loop needs of a way to use several ranks, and what such a way needs of a Task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from torch import nn

from trainer.parallel.mesh import ParallelDims

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class ModelSource(Protocol):
    """The part of a Task that makes its model (`trainer.tasks.Task` describes each method)."""

    def build_model(self) -> nn.Module: ...
    def empty_model(self) -> nn.Module | None: ...
    def initialise(self, model: nn.Module) -> None: ...
    def blocks(self, model: nn.Module) -> Sequence[nn.Module]: ...
    def embeddings(self, model: nn.Module) -> Sequence[nn.Module]: ...
    def tensor_plan(self, model: nn.Module) -> Mapping[str, ParallelStyle] | None: ...


def makes_empty_models(kind: type) -> bool:
    """Whether a class's `empty_model` makes what it builds: it does not where a nearer class overrides `build_model` alone."""
    nearest = next((one for one in kind.__mro__ if {"build_model", "empty_model"} & vars(one).keys()), kind)
    return "empty_model" in vars(nearest)


class Strategy(Protocol):
    """One way to train on all ranks. Gradients come out averaged over `dims.data_size` batches, whatever the way."""

    @property
    def dims(self) -> ParallelDims:
        """Which ranks hold which part of the model, and which take batches of their own."""

    def build(self, source: ModelSource) -> nn.Module:
        """Return the model, its layers split over tensor ranks; sharding may leave it without weights until `wrap`."""

    def wrap(self, model: nn.Module, source: ModelSource) -> nn.Module:
        """Return what the loss calls. Recomputation and compilation come before, the optimizer after: it needs the shards."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch's forward and backward, or of an evaluation's forward.

        The `last` of a step ends the exchange of gradients.
        """

    def warm_up(self, run_backward: Callable[[], None]) -> None:
        """Do once, before the first step that counts, what would make it round unlike a later one."""
