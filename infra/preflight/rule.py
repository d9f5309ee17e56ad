"""The form of a rule of preflight, and the context in which it looks at a spec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TypeVar

from infra.catalog.instances import Instance
from infra.config import ClusterSpec, Group
from infra.finding import Level, finding
from infra.plan.place import Place, partition_of
from infra.plan.stack import Plan
from lustrain.problem import Problem

NO_ACCOUNT = "000000000000"
"""Stands in names and ARNs where the account is not known; as long as a real one."""
CONTROLLER_PATH = "scheduler.controller"
"""In the config, where groups have `groups.0` and so on."""
MONITOR_PATH = "observability.monitor"
Problems = Iterable[Problem]
Look = TypeVar("Look", bound=Callable[..., Problems])


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


@dataclass(frozen=True)
class Rule:
    """One check: `code` is stable, `checks` says in a sentence what must hold, `source` where AWS says so.

    `look` is called with spec and context, and with AWS's clients too where the rule has a `permission`, the action that it
    asks AWS with.

    A problem of an `essential` rule cannot be suppressed: no plan can be built on such a spec. Every other one can, with a
    reason, since facts about AWS age; CFG-092 warns where AWS would refuse the update all the same. A `judgement` is ours: AWS
    accepts what breaks the rule, and the harm comes later.
    """

    code: str
    checks: str
    source: str
    look: Callable[..., Problems] = lambda spec, context: ()
    level: Level = "error"
    essential: bool = False
    judgement: bool = False
    permission: str = ""

    @property
    def refused_by_aws(self) -> bool:
        """Whether AWS itself refuses what breaks this rule, as far as its source is AWS's own."""
        return self.level == "error" and self.source.startswith("https://") and not self.judgement

    def check(self, context: Context, *aws: object) -> Iterator[Problem]:
        """Yield what `look` finds wrong; of problems to which the plan gave a code, this rule's own."""
        for problem in self.look(context.spec, context, *aws):
            if problem.code in ("", self.code):
                yield self.own(problem)

    def own(self, problem: Problem) -> Problem:
        """Return the problem with this rule's code, and its level and source where it has none of its own."""
        level, source = problem.level or self.level, problem.source or self.source
        return finding(problem.path, problem.why, problem.fix, code=self.code, level=level, source=source)


class Family(list[Rule]):
    """The rules of one module, in the order in which they look."""

    def add(
        self,
        code: str,
        checks: str,
        source: str,
        *,
        level: Level = "error",
        essential: bool = False,
        judgement: bool = False,
        permission: str = "",
    ) -> Callable[[Look], Look]:
        """Add a row of the table whose function is the decorated one; a function of several rules has a row for each."""

        def keep(look: Look) -> Look:
            self.append(Rule(code, checks, source, look, level, essential, judgement, permission))
            return look

        return keep


def groups(spec: ClusterSpec) -> Iterator[tuple[str, Group]]:
    """Yield each group with its path in the config."""
    for index, group in enumerate(spec.groups):
        yield f"groups.{index}", group


def known_groups(spec: ClusterSpec) -> Iterator[tuple[str, Group, Instance]]:
    """Yield each group whose type is known, with its path and the facts of its nodes."""
    for path, group in groups(spec):
        if facts := spec.node_of(group):
            yield path, group, facts


def known_machines(spec: ClusterSpec) -> Iterator[tuple[str, Group, Instance]]:
    """Yield the groups of `known_groups`, and Slurm's controller on EC2 and the monitor, each as one more."""
    yield from known_groups(spec)
    for path, machine in ((CONTROLLER_PATH, spec.controller), (MONITOR_PATH, spec.monitor)):
        if machine and (facts := spec.node_of(machine)):
            yield path, machine, facts


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
    if controller := spec.controller:
        yield GroupType(CONTROLLER_PATH, f"{CONTROLLER_PATH}.type", controller, spec.node_of(controller))
    if monitor := spec.monitor:
        yield GroupType(MONITOR_PATH, f"{MONITOR_PATH}.type", monitor, spec.node_of(monitor))


def listed(values: Iterable[object]) -> str:
    """Return `a, b and c`, in the order given and each once."""
    words = [str(value) for value in dict.fromkeys(values)]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1] if words else ""]))


def named_images(spec: ClusterSpec) -> dict[str, str | None]:
    """Return the image that each group and Slurm's controller name, by the key's path."""
    images = {f"{path}.image_id": group.image_id for path, group in groups(spec)}
    return {**images, f"{CONTROLLER_PATH}.image_id": spec.controller.image_id} if spec.controller else images
