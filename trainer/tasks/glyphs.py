"""Small real images: characters drawn in the fonts that the machine has, turned, scaled and shifted by a counter-based jitter.

The image of a sample is a pure function of (glyphs, seed, sample id), so nothing about the data needs to be stored or resumed.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from awscrt.checksums import crc64nvme
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from trainer.data.order import GOLDEN, mixed
from trainer.step.precision import stream_seed

SIZE = 32
"""Pixels per side of an image."""
_POINTS = 22
"""Font size that leaves room for the largest jitter inside SIZE pixels."""
_TURN = math.radians(15)
_SCALE = 0.2
_SHIFT = 0.15
"""Largest jitter: rotation in radians, relative size, and shift as a part of half the image."""
_ABSENT = "\U0010fffd"
"""A private character that no text font has: what a font draws for it, it draws for whatever it lacks."""

Glyphs = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float64]]


def default_folders() -> list[Path]:
    """Where fonts lie on most machines: matplotlib's own (it ships DejaVu and others) and the system's TrueType fonts."""
    spec = importlib.util.find_spec("matplotlib")
    folders = [Path(spec.origin).parent / "mpl-data/fonts/ttf"] if spec and spec.origin else []
    return [*folders, Path("/usr/share/fonts/truetype")]


def font_files(places: Sequence[Path]) -> list[Path]:
    """Find the TrueType and OpenType files in these places, equal contents once, ordered by name whatever their folder."""
    files = [f for place in places for f in ([place] if place.is_file() else place.rglob("*.[to]tf"))]
    by_content = {crc64nvme(file.read_bytes()): file for file in sorted(files, reverse=True)}
    return [file for _, file in sorted((file.name, file) for file in by_content.values())]


def draw_glyphs(file: Path | None, characters: str) -> Glyphs | None:
    """Draw the characters as [len(characters), SIZE, SIZE], ink 255, in a font, None: Pillow's own; None if unusable.

    A font is unusable when it lacks one of the characters or draws two of them alike, as a fallback font does.
    """
    try:
        font = ImageFont.load_default(_POINTS) if file is None else ImageFont.truetype(str(file), _POINTS)
    except OSError:
        return None
    absent = _draw_one(font, _ABSENT)
    glyphs = np.stack([_draw_one(font, character) for character in characters])
    pictures = {glyph.tobytes() for glyph in glyphs} - {absent.tobytes(), bytes(SIZE * SIZE)}
    return glyphs if len(pictures) == len(characters) else None


def checksum(glyphs: Glyphs) -> str:
    """Identity of the drawn characters: fonts, their order, and the renderer's version all count."""
    return f"{crc64nvme(glyphs.tobytes()):016x}"


def jittered(glyphs: Glyphs, ids: np.ndarray[Any, np.dtype[np.int64]], seed: int) -> Tensor:
    """Images [len(ids), 1, SIZE, SIZE] uint8: sample id shows glyph id % len(glyphs), moved as (seed, id) says."""
    turn, size, right, down = (uniform(ids, stream_seed(seed, axis)) * 2 - 1 for axis in range(4))
    angle, scale = turn * _TURN, 1 + size * _SCALE
    cos, sin = np.cos(angle) / scale, np.sin(angle) / scale
    affine = np.stack([np.stack([cos, -sin, right * _SHIFT], -1), np.stack([sin, cos, down * _SHIFT], -1)], -2)
    images = torch.from_numpy(glyphs[ids % len(glyphs)]).unsqueeze(1).float()
    grid = F.affine_grid(torch.from_numpy(affine).float(), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False).round().to(torch.uint8)


def uniform(counters: np.ndarray[Any, np.dtype[np.int64]], seed: int) -> Floats:
    """One number in [0, 1) for each counter: splitmix64's output at (seed, counter), in 64-bit arithmetic that wraps."""
    words = mixed(counters.astype(np.uint64) * GOLDEN + np.uint64(seed))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _draw_one(font: Any, character: str) -> Glyphs:
    image = Image.new("L", (SIZE, SIZE))
    ImageDraw.Draw(image).text((SIZE / 2, SIZE / 2), character, fill=255, font=font, anchor="mm")
    return np.asarray(image)
