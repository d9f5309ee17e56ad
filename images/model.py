"""Plans, contexts, build results, images and layers: the data that the parts of image building exchange.

Pure data; nothing here touches disk, network or an engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

DOCKER_HUB = "docker.io"


class Output(Enum):
    """This is where a build's outcome goes."""

    CHECK = "check"
    """Nowhere: the steps run, for what they check."""
    LOAD = "load"
    """Into the engine."""
    PUSH = "push"
    """To the registry, under every tag of the plan."""
    PUSH_BY_DIGEST = "push-by-digest"
    """To the registry without a tag, which is put on afterwards."""


@dataclass(frozen=True)
class Plan:
    """This is everything a build needs to know; paths are relative to the root of the context."""

    target: str
    """cpu, cuda or gaudi; `<target>-verify` is the stage that checks it."""
    platform: str
    """linux/amd64 or linux/arm64."""
    dockerfile: str
    tags: tuple[str, ...]
    """Full references, registry/repository:tag."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    cache_from: tuple[str, ...] = ()
    cache_to: str | None = None
    secrets: Mapping[str, Path] = field(default_factory=dict)
    """Id of a build secret (ca, netrc) → file that holds it; never an argument, never in a layer."""
    attestations: bool = False
    """Provenance and SBOM beside the image."""
    no_cache: bool = False
    epoch: int = 0
    """Seconds since 1970 that an image says it was made at: not now, so that two builders make one image of one commit
    (https://reproducible-builds.org/specs/source-date-epoch/)."""

    @property
    def build_arguments(self) -> dict[str, str]:
        """Return the arguments with the one that BuildKit takes for itself."""
        return {**self.arguments, "SOURCE_DATE_EPOCH": str(self.epoch)}

    @property
    def repository(self) -> str:
        """Return the first reference without its tag."""
        head, _, _ = self.tags[0].rpartition(":")
        return head


@dataclass(frozen=True)
class Context:
    """This is a folder with exactly the files that may enter the image or its build, each with the same time stamp."""

    folder: Path
    inputs: Mapping[str, Mapping[str, str]]
    """Layer (one of `plan.changes.LAYERS`) → what decides it, a path or an argument → its sha256 or its value."""


def without_mounts(name: str) -> str:
    """Return a step's name without the mounts of a RUN, which are longer than what it does."""
    return re.sub(r"\s+--(mount|network|security)=\S+", "", name)


@dataclass(frozen=True)
class Step:
    """One instruction of a build, as it ended."""

    name: str
    """`[torch-cpu 1/1] RUN …`, as BuildKit words it."""
    seconds: float
    cached: bool
    error: str | None = None

    @property
    def shown(self) -> str:
        return without_mounts(self.name)

    @property
    def stage(self) -> str:
        """Return the stage it belongs to, `internal` for BuildKit's own."""
        return self.name[1:].split("]")[0].split()[0] if self.name.startswith("[") else "internal"


@dataclass(frozen=True)
class Built:
    """The result of building one target."""

    steps: tuple[Step, ...]
    seconds: float
    digest: str | None
    """Of the manifest, `sha256:…`; None where nothing left the builder, or where only a push tells it."""
    image_id: str | None = None
    """What the engine calls it, where it was loaded."""


@dataclass(frozen=True)
class Layer:
    """One layer of an image in a registry."""

    digest: str
    size: int
    """Bytes, compressed: what a node pulls."""
    diff_id: str
    """sha256 of the layer's tar: the same for the same content and time stamps, however it was compressed."""
    created_by: str


@dataclass(frozen=True)
class Image:
    """An image as its registry describes it, read without pulling it."""

    ref: str
    digest: str
    platform: str
    layers: tuple[Layer, ...]
    config: Mapping[str, object]
    """The config blob, as OCI defines it: https://github.com/opencontainers/image-spec/blob/main/config.md"""

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)


class BuildObserver(Protocol):
    """It follows a build or a push while it runs; one thread at a time calls it."""

    def started(self, name: str) -> None:
        """Note that a step began."""

    def ended(self, step: Step) -> None:
        """Note that a step ended: done, cached or failed."""

    def log(self, name: str, text: str) -> None:
        """Note what a step printed."""

    def moved(self, name: str, done: int, total: int) -> None:
        """Note that bytes of a layer went up or down; `total` is 0 where it is not known."""
