"""Component programs on a mock monitor that keeps what the engine would have been asked for, options included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pulumi
from pulumi.runtime import Mocks
from pulumi.runtime.mocks import MockMonitor
from pulumi.runtime.settings import set_root_resource

Monitor = TypeVar("Monitor", bound=MockMonitor)


class Registered(MockMonitor):
    """Keeps each request of the program: properties, dependencies, options.

    `requests` has them by name, of two resources with one name the later one; `registered` has all, by type and name.
    """

    def __init__(self, service: Mocks) -> None:
        super().__init__(service)
        self.requests: dict[str, Any] = {}
        self.registered: dict[tuple[str, str], Any] = {}

    def RegisterResource(self, request: Any) -> Any:
        self.requests[request.name] = self.registered[request.type, request.name] = request
        return super().RegisterResource(request)

    def waits_for(self, name: str) -> set[str]:
        """Names of the resources that must stand before this one."""
        return {urn.rpartition("::")[2] for urn in self.requests[name].dependencies}

    def named(self, kind: str) -> list[str]:
        return [name for name, request in self.requests.items() if request.type == kind]

    def properties(self, name: str) -> dict[str, Any]:
        return properties_of(self.requests[name])


def properties_of(request: Any) -> dict[str, Any]:
    return dict(pulumi.runtime.rpc.deserialize_properties(request.object))


def run_on(
    monitor: Monitor, service: Mocks, program: Callable[[], dict[str, pulumi.Output[Any]]]
) -> tuple[Monitor, dict[str, Any]]:
    """The monitor after `program`, and the values of the outputs that it returns."""
    values = dict[str, Any]()
    # A stack of its own: the transformations (tags) of the program before would stay on the one it leaves behind.
    set_root_resource(None)  # type: ignore[arg-type]
    pulumi.runtime.set_mocks(service, "lustrain", "test", preview=False, monitor=monitor)

    @pulumi.runtime.test
    def done() -> Any:
        return pulumi.Output.all(**program()).apply(values.update)

    done()
    return monitor, values
