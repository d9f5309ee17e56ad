"""The steps of a running build, from what `docker buildx --progress=rawjson` prints.

Each object is a StatusResponse of
https://github.com/moby/buildkit/blob/master/api/services/control/control.proto
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from images.model import Step, Watch
from lustrain.problem import plain

LAST_LINES = 12
"""Of a failed step's log, which an error shows."""
_KEPT = 16_384


@dataclass(frozen=True)
class Vertex:
    """One node of the build's graph, as it stands now; times in seconds since 1970."""

    digest: str
    name: str
    started: float | None = None
    completed: float | None = None
    cached: bool = False
    error: str | None = None


@dataclass(frozen=True)
class Transfer:
    """Bytes that a vertex moves."""

    vertex: str
    name: str
    done: int
    total: int


@dataclass(frozen=True)
class Said:
    """A piece of a vertex's log, not always whole lines."""

    vertex: str
    text: str


@dataclass(frozen=True)
class Update:
    """One message: what changed since the last one."""

    vertexes: tuple[Vertex, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    said: tuple[Said, ...] = ()


def of_json(found: Mapping[str, Any]) -> Update:
    """A StatusResponse as `--progress=rawjson` prints it; ValueError when it is none."""
    try:
        return Update(
            tuple(_vertex_of_json(one) for one in found.get("vertexes") or ()),
            tuple(
                Transfer(
                    _digest(one["vertex"]), str(one.get("id", "")), int(one.get("current", 0)), int(one.get("total", 0))
                )
                for one in found.get("statuses") or ()
            ),
            tuple(Said(_digest(one["vertex"]), _unpacked(one.get("data") or "")) for one in found.get("logs") or ()),
        )
    except (KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise ValueError(f"no status of a build: {error!r}") from None


def _vertex_of_json(one: Mapping[str, Any]) -> Vertex:
    times = [one.get(name) for name in ("started", "completed")]
    started, completed = (datetime.fromisoformat(time).timestamp() if time else None for time in times)
    return Vertex(
        _digest(one["digest"]), one.get("name", ""), started, completed, bool(one.get("cached")), one.get("error")
    )


def _digest(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} for a digest")
    return value


def _unpacked(data: str) -> str:
    return base64.b64decode(data).decode(errors="replace")


class Steps:
    """The steps of one build, from its messages; `watch` hears of each as it begins and ends."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._vertexes: dict[str, Vertex] = {}
        # BuildKit runs some vertexes in several goes, each with times of its own.
        self._goes: dict[str, dict[float, float]] = {}
        self._logs: dict[str, str] = {}

    def take(self, update: Update) -> None:
        """The next message."""
        for vertex in update.vertexes:
            self._vertex(vertex)
        for said in update.said:
            self._logs[said.vertex] = (self._logs.get(said.vertex, "") + said.text)[-_KEPT:]
            self._watch.log(self._name(said.vertex), said.text)
        for one in update.transfers:
            if one.done or one.total:
                self._watch.moved(one.name, one.done, one.total)

    def running(self) -> str | None:
        """Name of the step that began last and has not ended."""
        open_ones = [one for one in self._vertexes.values() if one.started is not None and one.completed is None]
        return max(open_ones, key=lambda one: one.started or 0.0).name if open_ones else None

    def ended(self) -> tuple[Step, ...]:
        """What ended until now, in the order it began."""
        done = [one for one in self._vertexes.values() if one.completed is not None]
        return tuple(self._step(one) for one in sorted(done, key=lambda one: min(self._goes[one.digest])))

    def failed(self, said: str) -> tuple[Step, list[str]] | None:
        """The step that made the build fail, with the end of its log; None where no step did. `said` is the error of the
        build as a whole, which quotes that step's: others may have failed without ending it, or were ended because of it."""
        culprits = [one for one in self._vertexes.values() if one.error and one.error in said]
        if not culprits:
            return None
        first = min(culprits, key=lambda one: one.completed or one.started or 0.0)
        lines = [plain(line.rstrip()) for line in self._logs.get(first.digest, "").splitlines() if line.strip()]
        return self._step(first), lines[-LAST_LINES:]

    def _vertex(self, new: Vertex) -> None:
        old = self._vertexes.get(new.digest)
        self._vertexes[new.digest] = new
        goes = self._goes.setdefault(new.digest, {})
        if new.started is not None and (old is None or old.started is None):
            self._watch.started(new.name)
        if new.completed is not None:
            began = new.completed if new.started is None else new.started
            fresh = goes.get(began) != new.completed
            goes[began] = new.completed
            if fresh:
                self._watch.ended(self._step(new))

    def _step(self, vertex: Vertex) -> Step:
        seconds = sum(max(0.0, end - began) for began, end in self._goes[vertex.digest].items())
        return Step(vertex.name, round(seconds, 3), vertex.cached, vertex.error)

    def _name(self, digest: str) -> str:
        return self._vertexes[digest].name if digest in self._vertexes else ""
