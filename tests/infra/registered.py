"""A cluster's program on a mock monitor that keeps what the engine would have been asked for, options included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi.runtime import Mocks
from pulumi.runtime.mocks import MockMonitor
from pulumi.runtime.settings import set_root_resource

from infra.components.stack import declare
from infra.local.mocks import Recorder
from tests.infra.edits import place, spec_of


class Registered(MockMonitor):
    """Keeps each request of the program: properties, dependencies, options."""

    def __init__(self, service: Mocks) -> None:
        super().__init__(service)
        self.registered: dict[tuple[str, str], Any] = {}

    def RegisterResource(self, request: Any) -> Any:
        self.registered[request.type, request.name] = request
        return super().RegisterResource(request)  # type: ignore[no-untyped-call]

    @property
    def kinds(self) -> set[str]:
        """Types of AWS that were asked for."""
        return {kind for kind, _ in self.registered if kind.startswith("aws:")}

    def requests(self, kind: str) -> dict[str, Any]:
        """All requests of a type by name, in their order."""
        return {name: request for (typ, name), request in self.registered.items() if typ == kind}

    def only(self, kind: str) -> Any:
        """The one request of a type."""
        (request,) = self.requests(kind).values()
        return request

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        """Arguments of all resources of a type by name."""
        return {name: properties_of(request) for name, request in self.requests(kind).items()}


def properties_of(request: Any) -> dict[str, Any]:
    return dict(pulumi.runtime.rpc.deserialize_properties(request.object))


def waits_for(request: Any) -> set[str]:
    """Names of the resources that must stand before this one."""
    return {urn.rpartition("::")[2] for urn in request.dependencies}


def built(stack: str, edits: Mapping[str, Any], service: Mocks | None = None) -> tuple[Registered, dict[str, Any]]:
    """What the program of an edited example stack asks for, and the values of its outputs."""
    spec, where, values = spec_of(stack, edits), place(stack), dict[str, Any]()
    monitor = Registered(service or Recorder(where.region))
    # A stack of its own: the transformations (tags) of the program before would stay on the one it leaves behind.
    set_root_resource(None)  # type: ignore[arg-type]
    pulumi.runtime.set_mocks(service or Recorder(where.region), "lustrain", "test", preview=False, monitor=monitor)

    @pulumi.runtime.test  # type: ignore[untyped-decorator]
    def done() -> Any:
        return pulumi.Output.all(**declare(spec, where)).apply(values.update)

    done()
    return monitor, values
