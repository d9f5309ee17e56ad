"""A small convolutional classifier on patches: ConvMixer (https://arxiv.org/abs/2201.09792) with group normalisation.

Group instead of batch normalisation, because the latter's statistics would depend on how a batch is split over ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.tasks.models.init import fill_normal


@dataclass(frozen=True)
class PatchNetShape:
    """All that decides the function the model computes, but its weights; images are square with one channel."""

    image: int
    patch: int
    width: int
    layers: int
    kernel: int
    classes: int

    @property
    def places(self) -> int:
        """Patches per image."""
        return (self.image // self.patch) ** 2


class MixBlock(nn.Module):
    """Mix over space (depthwise, with a residual), then over channels."""

    def __init__(self, shape: PatchNetShape) -> None:
        super().__init__()
        width = shape.width
        self.space = nn.Conv2d(width, width, shape.kernel, groups=width, padding="same")
        self.space_norm = nn.GroupNorm(1, width)
        self.channels = nn.Conv2d(width, width, 1)
        self.channels_norm = nn.GroupNorm(1, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.space_norm(F.gelu(self.space(x)))
        y: Tensor = self.channels_norm(F.gelu(self.channels(x)))
        return y


class PatchNet(nn.Module):
    """Images [N, 1, S, S] with values in [0, 1] to logits [N, classes]."""

    def __init__(self, shape: PatchNetShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Conv2d(1, shape.width, shape.patch, stride=shape.patch)
        self.embed_norm = nn.GroupNorm(1, shape.width)
        self.blocks = nn.ModuleList(MixBlock(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, shape.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed_norm(F.gelu(self.embed(images)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill weights, from the seed alone, with variance 1 / fan-in (LeCun 1998), biases 0, gains 1."""
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                fan_in = math.prod(parameter.shape[1:])
                fill_normal(name, parameter, std=fan_in**-0.5, seed=seed)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)


def empty(shape: PatchNetShape) -> PatchNet:
    """Make the model without weights, on torch's meta device."""
    with torch.device("meta"):
        return PatchNet(shape)


def build(shape: PatchNetShape, *, seed: int) -> PatchNet:
    """Build the model on the CPU in fp32 from shape and seed alone; torch's global generator is not touched."""
    model = empty(shape)
    model.to_empty(device="cpu")
    model.initialise(seed)
    return model


def parameters(shape: PatchNetShape) -> int:
    """How many numbers are trained, without making the model."""
    c = shape.width
    block = c * (shape.kernel**2 + 1) + c * (c + 1) + 4 * c
    return c * (shape.patch**2 + 1) + 2 * c + shape.layers * block + shape.classes * (c + 1)


def flops_per_image(shape: PatchNetShape) -> float:
    """Forward and backward: 6 FLOPs for each multiplication of a weight, at every place where the weight is used."""
    per_place = shape.width * (shape.patch**2 + shape.layers * (shape.kernel**2 + shape.width))
    return 6.0 * (shape.places * per_place + shape.width * shape.classes)
