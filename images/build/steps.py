"""The steps of a running build, from what `docker buildx --progress=rawjson` prints.

Each object is a StatusResponse of
https://github.com/moby/buildkit/blob/master/api/services/control/control.proto
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Base64Bytes, BaseModel

from images.model import BuildObserver, Step
from lustrain.problem import plain

LAST_LINES = 12
"""An error shows so many lines of a failed step's log."""
_KEPT = 16_384


class Vertex(BaseModel):
    """One node of the build's graph, as it stands now."""

    digest: str
    name: str = ""
    started: datetime | None = None
    completed: datetime | None = None
    cached: bool = False
    error: str | None = None


class Transfer(BaseModel):
    """Bytes that a vertex moves."""

    vertex: str
    id: str = ""
    current: int = 0
    total: int = 0


class Log(BaseModel):
    """A piece of a vertex's log, not always whole lines."""

    vertex: str
    data: Base64Bytes = b""


class Update(BaseModel):
    """This is one message: what changed since the last one."""

    vertexes: list[Vertex] | None = None
    statuses: list[Transfer] | None = None
    logs: list[Log] | None = None


class Steps:
    """These are the steps of one build, from its messages; `watch` is called as each begins and ends."""

    def __init__(self, watch: BuildObserver) -> None:
        self._watch = watch
        self._vertexes: dict[str, Vertex] = {}
        # BuildKit runs some vertexes in several goes, each with times of its own.
        self._goes: dict[str, dict[datetime, datetime]] = {}
        self._logs: dict[str, str] = {}

    def add(self, message: Any) -> None:
        """Add the next message, an object of JSON; ValueError when it is not one of a build."""
        update = Update.model_validate(message)
        for vertex in update.vertexes or ():
            self._vertex(vertex)
        for log in update.logs or ():
            text = log.data.decode(errors="replace")
            self._logs[log.vertex] = (self._logs.get(log.vertex, "") + text)[-_KEPT:]
            self._watch.log(self._name(log.vertex), text)
        for transfer in update.statuses or ():
            if transfer.current or transfer.total:
                self._watch.moved(transfer.id, transfer.current, transfer.total)

    def running(self) -> str | None:
        """Return the name of the step that began last and has not ended."""
        running = [(vertex.started, vertex.name) for vertex in self._vertexes.values() if not vertex.completed]
        begun = [(started, name) for started, name in running if started]
        return max(begun)[1] if begun else None

    def ended(self) -> tuple[Step, ...]:
        """Return what ended until now, in the order it began."""
        done = [vertex for vertex in self._vertexes.values() if vertex.completed is not None]
        return tuple(self._step(item) for item in sorted(done, key=lambda item: min(self._goes[item.digest])))

    def failed(self, error: str) -> tuple[Step, list[str]] | None:
        """Return the step that made the build fail, with the end of its log; None where no step did. `error` is that of the
        build as a whole, which quotes that step's: others may have failed without ending it, or were ended because of it."""
        culprits = [item for item in self._vertexes.values() if item.error and item.error in error]
        if not culprits:
            return None
        first = min(culprits, key=lambda vertex: [time for time in (vertex.completed, vertex.started) if time][:1])
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
        seconds = sum(max(0.0, (end - began).total_seconds()) for began, end in self._goes[vertex.digest].items())
        return Step(vertex.name, round(seconds, 3), vertex.cached, vertex.error)

    def _name(self, digest: str) -> str:
        return self._vertexes[digest].name if digest in self._vertexes else ""
