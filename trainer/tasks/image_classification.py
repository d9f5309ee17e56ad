"""Classification of characters: small images drawn from the machine's fonts, classified by a convolutional network."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from lustrain.problem import UserError, problem
from trainer.config import Section
from trainer.tasks import Batch, Footprint, Ids, LossSum, Task, field_defaults
from trainer.tasks.models import patchnet

try:
    from trainer.tasks import glyphs
except ImportError as missing:
    raise UserError(
        problem(
            "task.name",
            "image_classification",
            f"needs Pillow ({missing})",
            fix="pip install 'lustrain[image-classification]'",
        )
    ) from missing

HELD_OUT = 5
"""Every fifth font is held out for evaluation, so that it measures characters in fonts never seen."""


class ImageClassificationOptions(Section):
    """What `[task]` may hold for image classification."""

    characters: Annotated[str, Field(min_length=2)] = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    """The classes, one character each."""
    fonts: Annotated[list[str], Field(default_factory=list)]
    """Font files or folders; empty: those of matplotlib and the system, and Pillow's own."""
    max_fonts: Annotated[int, Field(gt=0, le=100_000)] = 40
    variants: Annotated[int, Field(gt=0, le=2**20)] = 64
    """Jittered images of each character in each font."""
    width: Annotated[int, Field(gt=0, le=2**14)] = 64
    layers: Annotated[int, Field(gt=0, le=4096)] = 3
    kernel: Annotated[int, Field(gt=0, le=2 * glyphs.SIZE + 1)] = 5
    patch: Annotated[int, Field(gt=0, le=glyphs.SIZE)] = 4
    """Side of a patch in pixels."""


class ImageClassification(Task):
    """Cross-entropy in nats, counted in images."""

    Options = ImageClassificationOptions
    options: ImageClassificationOptions

    @classmethod
    def problems(cls, options: ImageClassificationOptions) -> Sequence[str]:
        lines = []
        if len(set(options.characters)) < len(options.characters) or any(c.isspace() for c in options.characters):
            why = "a class is named twice or is a blank"
            lines.append(problem("task.characters", options.characters, why, fix="name each visible character once"))
        if glyphs.SIZE % options.patch:
            why = f"does not divide the image's {glyphs.SIZE} pixels"
            lines.append(problem("task.patch", options.patch, why, allowed="1, 2, 4, 8, 16, 32", fix="task.patch = 4"))
        if options.kernel % 2 == 0:
            why = "an even kernel has no centre"
            lines.append(
                problem("task.kernel", options.kernel, why, allowed="odd", fix=f"task.kernel = {options.kernel + 1}")
            )
        return lines

    def open(self, cache_dir: Path) -> None:
        """Draw every character in every usable font once; the cache is not needed."""
        options = self.options
        named = [Path(font) for font in options.fonts]
        if absent := [str(place) for place in named if not place.exists()]:
            raise UserError(
                [problem("task.fonts", place, "does not exist", fix="name a font file or folder") for place in absent]
            )
        files: list[Path | None] = [*glyphs.font_files(named or glyphs.default_folders())]
        drawn = (glyphs.draw_glyphs(file, options.characters) for file in ([*files] if named else [None, *files]))
        fonts = [font for font in drawn if font is not None][: options.max_fonts]
        if not fonts:
            why = f"none of {len(files)} fonts has all of {options.characters!r}"
            raise UserError(
                problem("task.fonts", options.fonts, why, fix="name a folder with text fonts, or other characters")
            )
        held_out = fonts[HELD_OUT - 1 :: HELD_OUT] or fonts
        seen = [font for i, font in enumerate(fonts) if (i + 1) % HELD_OUT]
        self._train, self._eval = np.concatenate(seen), np.concatenate(held_out)
        self._identity = glyphs.checksum(np.concatenate(fonts))

    @property
    def train_samples(self) -> int:
        return len(self._train) * self.options.variants

    @property
    def eval_samples(self) -> int:
        return len(self._eval) * self.options.variants

    @property
    def shape(self) -> patchnet.PatchNetShape:
        options = self.options
        return patchnet.PatchNetShape(
            image=glyphs.SIZE,
            patch=options.patch,
            width=options.width,
            layers=options.layers,
            kernel=options.kernel,
            classes=len(options.characters),
        )

    def build_model(self) -> patchnet.PatchNet:
        return patchnet.build(self.shape, seed=self.seed)

    def empty_model(self) -> patchnet.PatchNet:
        return patchnet.empty(self.shape)

    def initialise(self, model: nn.Module) -> None:
        if not isinstance(model, patchnet.PatchNet):
            raise TypeError(f"an image classifier's model is a PatchNet, not a {type(model).__name__}")
        model.initialise(self.seed)

    def train_batch(self, ids: Ids) -> Batch:
        """{"images": [B, 1, S, S] uint8, "labels": [B] int64}; each id is one character, font and jitter."""
        return self._batch(self._train, ids, self.seed)

    def eval_batch(self, ids: Ids) -> Batch:
        """Like `train_batch`, in held-out fonts (with fewer than five fonts: the same ones) and with another jitter."""
        return self._batch(self._eval, ids, self.seed + 1)

    def _batch(self, source: glyphs.Glyphs, ids: Ids, seed: int) -> Batch:
        labels = torch.from_numpy(ids % len(source) % len(self.options.characters))
        return {"images": glyphs.jittered(source, ids, seed), "labels": labels}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> LossSum:
        labels = batch["labels"]
        logits = model(batch["images"].float() / 255)
        return LossSum(F.cross_entropy(logits.float(), labels, reduction="sum"), len(labels))

    def tokens_per_sample(self) -> int:
        return 1

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule("blocks").children())

    def flops_per_token(self, model: nn.Module) -> float:
        return patchnet.flops_per_image(self.shape)

    def footprint(self, micro_batch: int) -> Footprint:
        shape = self.shape
        # The images in fp32, and each block's input, in bf16 at best.
        image = shape.image**2 * 4 + shape.layers * shape.places * shape.width * 2
        return Footprint(patchnet.parameters(shape), micro_batch * image, "task.width and task.layers")

    def fingerprint_defaults(self) -> dict[str, Any]:
        return {"model": field_defaults(patchnet.PatchNetShape)}

    def fingerprint(self) -> dict[str, Any]:
        options = self.options
        return {
            "model": dataclasses.asdict(self.shape),
            "characters": options.characters,
            "variants": options.variants,
            "data": self._identity,
        }
