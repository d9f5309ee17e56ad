"""Flags of the tasks that plan, build, push or merge an image. Every `fab` loads this file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lustrain.problem import UserError, problem
from lustrain.task import flag


@dataclass(frozen=True)
class Wish:
    """The image that a user asks for, and where it goes; without a place it stays in the engine."""

    target: str = flag("cpu", "cpu, cuda or gaudi (cpu)")
    repository: str | None = flag(None, "registry/repository to push to; else the Cluster's")
    cluster: str | None = flag(None, "file with a Cluster; else LUSTRAIN_CLUSTER in the environment")
    stack: str | None = flag(
        None, "take the Cluster from the output of the Pulumi stack of this name, like org/project/prod"
    )
    base: str | None = flag(None, "image by digest to run on, in place of the one in images/versions.toml")
    tools: str | None = flag(None, "image by digest to build in, likewise")
    arg: tuple[str, ...] = flag(
        (), "NAME=VALUE for the Dockerfile, like EFA_VERSION= to leave EFA out; may be given again"
    )
    unpinned: bool = flag(False, "take --base and --tools without a digest")
    suffix: str = flag("", "end of the tag, like r2: the same commit once more, with newer packages of the system")
    image_file: str = flag("image.json", "where the image that was pushed is recorded (image.json)")
    json: bool = flag(False, "print one JSON object")

    @property
    def file(self) -> Path:
        return Path(self.image_file)

    @property
    def arguments(self) -> dict[str, str]:
        """Build arguments by name. UserError with one line for each without a value."""
        if wrong := [word for word in self.arg if "=" not in word]:
            raise UserError([problem("--arg", word, "has no value", allowed="NAME=VALUE") for word in wrong])
        return dict(word.split("=", 1) for word in self.arg)

    def options(self) -> Mapping[str, Any]:
        """Return how it is built, as keywords of `images.plan.plan.make`; for an image that is only planned, its secrets."""
        return {"secrets": _secrets(None, None)}


@dataclass(frozen=True)
class BuildWish(Wish):
    """An image that is built, and how."""

    platform: str = flag("linux/amd64", "linux/amd64 or linux/arm64 (linux/amd64)")
    push: bool = flag(False, "push it as well, and write image.json")
    by_digest: bool = flag(False, "push it without a tag, for `fab image-merge`")
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

    def options(self) -> Mapping[str, Any]:
        return {
            "platform": self.platform,
            "cache_from": self.cache_from,
            "cache_to": self.cache_to,
            "no_cache": self.no_cache,
            "attestations": self.attest,
            "secrets": _secrets(self.ca, self.netrc),
        }


@dataclass(frozen=True)
class MergeWish(Wish):
    """Images of several platforms that become one."""

    digest: tuple[str, ...] = flag((), "sha256:… of an image that was pushed --by-digest; once for each platform")


def _secrets(ca: str | None, netrc: str | None) -> dict[str, Path]:
    files = {"ca": ca or os.environ.get("SSL_CERT_FILE"), "netrc": netrc}
    return {name: Path(file) for name, file in files.items() if file}
