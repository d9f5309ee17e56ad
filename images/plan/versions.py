"""`versions.toml`, read strictly: the one place for versions of what goes into an image."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import packaging.version
from pydantic import Field, ValidationError, ValidationInfo, field_validator

from lustrain.problem import UserError, plain, problem
from lustrain.schema import Section, like, problems_of

PATH = Path(__file__).parents[1] / "versions.toml"

_DIGEST = "sha256:[0-9a-f]{64}"
_REPOSITORY = r"[a-z0-9.-]+(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+"
Version = Annotated[str, like(r"\d+(\.\d+)+", "a version", "2.9.1")]
Minor = Annotated[str, like(r"\d+\.\d+", "a version of two numbers", "3.11")]
Package = Annotated[str, like(r"\d[A-Za-z0-9.+~-]*", "the version of a package", "57.0-1")]
Https = Annotated[str, like(r"https://[\w.-]+(:\d+)?/[\w./+%-]*", "an https address", "https://example.com/a.tar.gz")]
Sha256 = Annotated[str, like("[0-9a-f]{64}", "a SHA-256 sum", "64 hexadecimal digits")]
Digest = Annotated[str, like(f"({_DIGEST})?", "a digest or empty", "sha256:… with 64 hexadecimal digits")]
Repository = Annotated[str, like(_REPOSITORY, "a repository with its registry", "docker.io/library/debian")]
Pinned = Annotated[str, like(f"{_REPOSITORY}@{_DIGEST}", "an image by digest", "docker.io/library/debian@sha256:…")]
Tag = Annotated[str, like(r"\w[\w.-]{0,127}", "a tag", "bookworm-20250407-slim")]
Mebibytes = Annotated[int, Field(gt=0, strict=True)]


class Efa(Section):
    """AWS's installer of EFA, and what that version of it installs."""

    version: Version
    sha256: Sha256
    url: Https
    libfabric: Package
    rdma_core: Package
    plugin: Version
    """aws-ofi-nccl."""

    @field_validator("url")
    @classmethod
    def _of_this_version(cls, url: str, info: ValidationInfo) -> str:
        version = info.data.get("version")
        if version and not url.endswith(f"/aws-efa-installer-{version}.tar.gz"):
            raise ValueError(f"is not of version {version}; fix: change version, url and sha256 together")
        return url


class Minimum(Section):
    """Below these nothing of AWS's is tested any more."""

    efa: Version
    nccl: Version


class Gaudi(Section):
    """The vendor's image, with its own Python and torch."""

    release: Version
    python: Minor
    torch: Version
    image: Repository
    digest: Digest
    """Empty: not known."""

    @property
    def pinned(self) -> str:
        """Return image@digest; UserError until the digest is filled in."""
        if not self.digest:
            why = "unknown, and an image is not built from what may change"
            fix = f"put the digest of {self.image} there, or give --base {self.image}@sha256:…"
            raise UserError(problem("images/versions.toml gaudi.digest", self.digest, why, fix=fix))
        return f"{self.image}@{self.digest}"


class Budget(Section):
    """The most that the files of an image may take, by target."""

    cpu: Mebibytes
    cuda: Mebibytes


class Versions(Section):
    """All of `versions.toml`; sizes in MiB (2**20 bytes), unpacked."""

    minimum: Minimum
    python: Minor
    torch: Version
    torch_cpu_links: Https
    cuda: Minor
    nccl: Version
    uv: Version
    base: Pinned
    base_tag: Tag
    tools: Pinned
    tools_tag: Tag
    efa: Efa
    gaudi: Gaudi
    budget_mb: Budget

    @field_validator("nccl", "efa")
    @classmethod
    def _not_too_old(cls, value: str | Efa, info: ValidationInfo) -> str | Efa:
        version = value.version if isinstance(value, Efa) else value
        least = getattr(info.data.get("minimum"), str(info.field_name), version)
        if packaging.version.parse(version) < packaging.version.parse(least):
            raise ValueError(f"{version} is older than minimum.{info.field_name}, {least}; fix: a newer one")
        return value

    @property
    def budgets(self) -> dict[str, int]:
        """Return MiB by target; gaudi has none."""
        return self.budget_mb.model_dump()

    def of(self, target: str) -> dict[str, str]:
        """Return what is in an image of `target`, for its labels and `image.json`."""
        if target == "gaudi":
            return {"python": self.gaudi.python, "torch": self.gaudi.torch, "gaudi": self.gaudi.release}
        held = {"python": self.python, "torch": self.torch}
        if target == "cuda":
            held |= {"cuda": self.cuda, "nccl": self.nccl, "efa": self.efa.version}
            held |= {"libfabric": self.efa.libfabric, "rdma-core": self.efa.rdma_core, "aws-ofi-nccl": self.efa.plugin}
        return held


def load(path: Path = PATH) -> Versions:
    """Read `path`; UserError with one line a problem, exit code 2."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(plain(f"{path}: cannot be read: {error}")) from None
    try:
        return Versions.model_validate(table)
    except ValidationError as error:
        raise UserError([f"{path.name}: {line}" for line in problems_of(error, Versions)]) from None
