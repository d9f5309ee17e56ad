"""Flags of the tasks that plan, build or push an image. Every `fab` loads this file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lustrain.flags import CLUSTER, JSON, STACK, flag

LOCAL = "lustrain/trainer"
"""An image that is not pushed has this name."""
IMAGE_FILE = "where the image that was pushed is recorded (image.json)"


@dataclass(frozen=True)
class ImageFlags:
    """These flags name the image and the repository it goes to; without one it stays in the engine."""

    target: str = flag("cpu", "cpu, cuda or gaudi (cpu)")
    repository: str | None = flag(None, "registry/repository to push to; else the Cluster's")
    cluster: str | None = flag(None, CLUSTER)
    stack: str | None = flag(None, STACK)
    base: str | None = flag(None, "image by digest to run on, in place of the one in images/versions.toml")
    tools: str | None = flag(None, "image by digest to build in, in place of the one in images/versions.toml")
    arg: tuple[str, ...] = flag(
        (), "NAME=VALUE for the Dockerfile, like EFA_VERSION= to leave EFA out; may be given again"
    )
    unpinned: bool = flag(False, "take --base and --tools without a digest")
    suffix: str = flag("", "end of the tag, like r2: the same commit once more, with newer packages of the system")
    image_file: str = flag("image.json", IMAGE_FILE)
    json: bool = flag(False, JSON)

    @property
    def file(self) -> Path:
        return Path(self.image_file)

    @property
    def name(self) -> str:
        """registry/repository of the image."""
        return LOCAL if self.repository is None else self.repository

    @property
    def arguments(self) -> dict[str, str]:
        """Build arguments by name."""
        return dict(word.partition("=")[::2] for word in self.arg)


@dataclass(frozen=True)
class BuildFlags(ImageFlags):
    """These flags say how the image is built."""

    push: bool = flag(False, "push it as well, and write image.json")
    cache_from: tuple[str, ...] = flag(
        (), "registry/name:tag with layers of earlier builds, for a builder that has none; may be given again"
    )
    cache_to: str | None = flag(None, "registry/name:tag to keep all layers of this build in")
    no_cache: bool = flag(False, "run every step again")
    no_verify: bool = flag(False, "do not run images/verify.py in the image before it leaves the builder")
    attest: bool = flag(False, "push provenance and SBOM with it; enroot and pyxis read no such image")
    ca: str | None = flag(
        None, "certificates of a proxy before the package index, a file; else SSL_CERT_FILE in the environment"
    )
    netrc: str | None = flag(None, "file with the credentials of a package index; it is in no layer and no history")

    @property
    def secrets(self) -> dict[str, Path]:
        """Return the files of build secrets by their id."""
        files = {"ca": self.ca or os.environ.get("SSL_CERT_FILE"), "netrc": self.netrc}
        return {name: Path(file) for name, file in files.items() if file}
