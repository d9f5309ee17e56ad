"""What a rule of preflight looks at: the spec in its context, its groups and its machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from infra.catalog.instances import Instance
from infra.config import CONTROLLER, ClusterSpec, Group
from infra.finding import Problems, RuleTable, finding
from infra.plan.nodes.machine import PATHS
from infra.plan.place import Place, partition_of
from infra.plan.stack import Plan

NO_ACCOUNT = "000000000000"
"""Stands in names and ARNs where the account is not known; as long as a real one."""


@dataclass(frozen=True)
class Context:
    """The spec, and the facts of its place that are known without asking AWS; None where they are not."""

    spec: ClusterSpec
    region: str | None = None
    account: str | None = None
    partition: str | None = None
    now: datetime | None = None
    """The time to judge by; a rule about the past is silent without it."""

    @property
    def place(self) -> Place:
        """The place for plans that name things in it, with a stand-in for what is not known."""
        return Place(self.region or "us-east-1", self.account or NO_ACCOUNT, self.partition or "aws")

    @cached_property
    def plan(self) -> Plan:
        """The plan of the spec in this place, made once for all rules."""
        return Plan(self.spec, self.place)

    @classmethod
    def at(cls, spec: ClusterSpec, place: Place | None, now: datetime | None = None) -> Context:
        if place is None:
            return cls(spec, now=now)
        return cls(spec, place.region, place.account, place.partition, now)

    @classmethod
    def of_region(cls, spec: ClusterSpec, region: str | None, now: datetime | None = None) -> Context:
        """Return what follows from a region's name: its partition, but no account."""
        if region is None:
            return cls(spec, now=now)
        return cls(spec, region, None, partition_of(region), now)


class Family(RuleTable):
    """The rules of one module of preflight: functions of the spec, its context and, for some, AWS's clients."""

    @staticmethod
    def called(look: Callable[..., Any]) -> Callable[..., Problems]:
        return lambda context, *aws: look(context.spec, context, *aws)


def groups(spec: ClusterSpec) -> Iterator[tuple[str, Group]]:
    """Yield each group with its path in the config."""
    for index, group in enumerate(spec.groups):
        yield f"groups.{index}", group


def known_groups(spec: ClusterSpec) -> Iterator[tuple[str, Group, Instance]]:
    """Yield each group whose type is known, with its path and the facts of its nodes."""
    for path, group in groups(spec):
        if facts := spec.node_of(group):
            yield path, group, facts


def machines(spec: ClusterSpec) -> Iterator[tuple[str, Group]]:
    """Yield Slurm's controller on EC2 and the monitor, each with its path in the config."""
    for machine in filter(None, (spec.controller, spec.monitor)):
        yield PATHS[machine.name], machine


def known_machines(spec: ClusterSpec) -> Iterator[tuple[str, Group, Instance]]:
    """Yield the groups of `known_groups`, and the machines of `machines`, each as one more."""
    for path, group in (*groups(spec), *machines(spec)):
        if facts := spec.node_of(group):
            yield path, group, facts


@dataclass(frozen=True)
class GroupType:
    """A type that nodes of a group may have: the group's path, the path of the type's name, the group as it is with that type
    alone, and what is known of its nodes."""

    path: str
    key: str
    group: Group
    facts: Instance | None


def group_types(spec: ClusterSpec) -> Iterator[GroupType]:
    """Yield every type that nodes may have, Slurm's controller on EC2 and the monitor too; HyperPod's groups have one."""
    for path, group in groups(spec):
        others = {} if spec.hyperpod else {f"other_types.{index}": kind for index, kind in enumerate(group.other_types)}
        for key, kind in {"instance_type": group.instance_type, **others}.items():
            alone = group.of_type(kind)
            yield GroupType(path, f"{path}.{key}", alone, spec.node_of(alone))
    for path, machine in machines(spec):
        yield GroupType(path, f"{path}.type", machine, spec.node_of(machine))


def named_twice(path: str, values: Sequence[object], fix: str = "keep one", code: str = "") -> Problems:
    """Yield each value of the list at `path` that stands before already."""
    for index, value in enumerate(values):
        if value in values[:index]:
            yield finding(f"{path}.{index}", f"{value} stands twice", fix, code=code)


def listed(values: Iterable[object]) -> str:
    """Return `a, b and c`, in the order given and each once."""
    words = [str(value) for value in dict.fromkeys(values)]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1] if words else ""]))


def named_images(spec: ClusterSpec) -> dict[str, str | None]:
    """Return the image that each group and Slurm's controller name, by the key's path."""
    images = {f"{path}.image_id": group.image_id for path, group in groups(spec)}
    return {**images, f"{PATHS[CONTROLLER]}.image_id": spec.controller.image_id} if spec.controller else images
