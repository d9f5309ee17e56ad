"""A parser of our Dockerfiles: stages, what each reads of the context, and what a target needs. Pure.

Reads the part of https://docs.docker.com/reference/dockerfile/ that our files are written in: no heredocs, no ONBUILD.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256

PATHS = {
    "cpu": "images/trainer.Dockerfile",
    "cuda": "images/trainer.Dockerfile",
    "gaudi": "images/gaudi.Dockerfile",
}


@dataclass(frozen=True)
class Stage:
    """One stage, from its FROM to the next."""

    name: str
    origin: str
    """Another stage, or what FROM says: `${BASE_IMAGE}`."""
    instructions: tuple[str, ...]
    """Each on one line, without comments."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the paths of the context that are copied or mounted, in order, each once."""
        return tuple(dict.fromkeys(path for path, stage, _ in self._sources() if not stage))

    @property
    def uses(self) -> tuple[str, ...]:
        """Return the stages and images that something is copied or mounted from."""
        return tuple(dict.fromkeys(stage for _, stage, _ in self._sources() if stage))

    @property
    def made_on(self) -> tuple[str, ...]:
        """Return the stages without which nothing here is what it was: not those that `COPY --link` puts beside it."""
        return tuple(
            dict.fromkeys([self.origin, *(stage for _, stage, linked in self._sources() if stage and not linked)])
        )

    @property
    def runs(self) -> bool:
        """Check whether it makes layers of its own."""
        return any(one.upper().startswith("RUN ") for one in self.instructions)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the names that ARG declares here."""
        return tuple(_argument(one)[0] for one in self.instructions if one.upper().startswith("ARG "))

    @property
    def image_argument(self) -> str | None:
        """Return the argument that names the image it starts from, if one does."""
        match = re.fullmatch(r"\$\{?(\w+)\}?", self.origin)
        return match[1] if match else None

    @property
    def sum(self) -> str:
        """Return sha256 over what it says; comments and line ends do not count."""
        return sha256("\n".join((self.origin, *self.instructions)).encode()).hexdigest()

    def _sources(self) -> Iterator[tuple[str, str, bool]]:
        """Return path, stage (empty: the context), and whether it is linked."""
        for instruction in self.instructions:
            word, _, rest = instruction.partition(" ")
            if word.upper() in ("COPY", "ADD"):
                flags, words = _flags(rest)
                stage = dict(flag.partition("=")[::2] for flag in flags).get("--from", "")
                yield from ((_path(one), stage, "--link" in flags) for one in shlex.split(words)[:-1])
            elif word.upper() == "RUN":
                yield from _mounted(_flags(rest)[0])


@dataclass(frozen=True)
class Dockerfile:
    """A file of stages; `arguments` are those above the first FROM, with their defaults."""

    arguments: Mapping[str, str]
    stages: tuple[Stage, ...]

    def for_image(self, target: str) -> tuple[Stage, ...]:
        """Return the stages that an image and the stage that verifies it run or copy from, in the file's order; none where
        the file has no stage `target`."""
        by_name = {stage.name: stage for stage in self.stages}
        needed: set[str] = set()
        waiting = [target, f"{target}-verify"]
        while waiting:
            name = waiting.pop()
            if name in by_name and name not in needed:
                needed.add(name)
                waiting += [by_name[name].origin, *by_name[name].uses]
        return tuple(stage for stage in self.stages if stage.name in needed)


def parse(text: str) -> Dockerfile:
    """Read a Dockerfile's text."""
    arguments: dict[str, str] = {}
    stages: list[tuple[str, str, list[str]]] = []
    for line in _logical_lines(text):
        word, _, rest = line.partition(" ")
        if word.upper() == "FROM":
            words = [one for one in rest.split() if not one.startswith("--")]
            name = words[2] if len(words) == 3 else str(len(stages))
            stages.append((name, words[0], []))
        elif stages:
            stages[-1][2].append(line)
        elif word.upper() == "ARG":
            name, default = _argument(line)
            arguments[name] = default
    return Dockerfile(arguments, tuple(Stage(name, origin, tuple(lines)) for name, origin, lines in stages))


def _logical_lines(text: str) -> Iterator[str]:
    joined: list[str] = []
    for line in text.splitlines():
        bare = line.strip()
        if not bare or bare.startswith("#"):
            continue
        joined.append(bare.removesuffix("\\").strip())
        if not bare.endswith("\\"):
            yield " ".join(filter(None, joined))
            joined = []


def _argument(line: str) -> tuple[str, str]:
    name, _, default = line.partition(" ")[2].strip().partition("=")
    return name, "".join(shlex.split(default))


def _flags(rest: str) -> tuple[list[str], str]:
    flags = []
    while match := re.match(r"\s*(--\S+)\s*", rest):
        flags.append(match[1])
        rest = rest[match.end() :]
    return flags, rest


def _mounted(flags: list[str]) -> Iterator[tuple[str, str, bool]]:
    for flag in flags:
        kind, _, options = flag.partition("=")
        values = dict(one.partition("=")[::2] for one in options.split(","))
        if kind == "--mount" and values.get("type", "bind") == "bind":
            source = values.get("source", values.get("src", "."))
            yield _path(source), values.get("from", ""), False


def _path(source: str) -> str:
    return source.strip("/").removeprefix("./") or "."
