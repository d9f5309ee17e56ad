"""What every backend stands on: network, roles, storage, and the channel that interruptions come through."""

from __future__ import annotations

import pulumi

from infra.components.buckets import Buckets
from infra.components.bundle import LifecycleBundle
from infra.components.endpoints import Endpoints
from infra.components.home import OpenZfsHome
from infra.components.interruptions import Interruptions
from infra.components.lustre import LustreSystem
from infra.components.network import Network
from infra.components.repository import ImageRepository
from infra.components.roles import Roles
from infra.components.security import SecurityGroups
from infra.config import ClusterSpec
from infra.plan.associations import associations
from infra.plan.buckets import buckets
from infra.plan.bundle import bundle
from infra.plan.events import channel
from infra.plan.home import home
from infra.plan.iam import roles
from infra.plan.network import network
from infra.plan.observability import log_days
from infra.plan.place import Place
from infra.plan.repository import repository
from infra.plan.security import rules
from infra.plan.storage import lustre_plan


class Foundation:
    """The parts, in the order in which they come up; a part that the spec does not ask for is None."""

    def __init__(self, spec: ClusterSpec, place: Place) -> None:
        name = spec.name
        plan = network(spec, place)
        self.network = Network(name, plan)
        self.security = SecurityGroups(name, rules(spec), self.network.vpc_id)
        self.endpoints = Endpoints(name, plan, self.network, self.security.ids.get("endpoints"))
        self.roles = Roles(name, roles(spec, place))
        self.buckets = Buckets(name, buckets(spec, place))
        self.bundle = LifecycleBundle(name, bundle(spec), self.buckets.names["lifecycle"])
        self.lustre = self._lustre(spec, place)
        self.home = self._home(spec)
        self.channel = Interruptions(name, channel(spec, place))
        self.repository = ImageRepository(name, repository(spec))

    @property
    def ready(self) -> list[pulumi.Resource]:
        """What nodes need when they boot: a rule or a route that comes later makes their first minutes fail."""
        found = [self.security, self.endpoints, self.roles, self.bundle, self.network]
        return [*found, *(part for part in (self.lustre, self.home) if part is not None)]

    def _lustre(self, spec: ClusterSpec, place: Place) -> LustreSystem | None:
        plan = lustre_plan(spec)
        if plan is None:
            return None
        groups = self.security.ids
        return LustreSystem(
            spec.name,
            plan,
            associations(spec, place),
            subnet_id=self.network.compute_subnet_id,
            security_group_ids=[groups.get("lustre", groups["cluster"])],
            bucket_names={str(key): name for key, name in self.buckets.names.items()},
            log_days=log_days(spec.observability.log_days),
            opts=pulumi.ResourceOptions(depends_on=[self.security, *self.buckets.ready]),
        )

    def _home(self, spec: ClusterSpec) -> OpenZfsHome | None:
        wish = spec.storage.home
        if wish is None:
            return None
        return OpenZfsHome(
            spec.name,
            home(wish),
            subnet_id=self.network.compute_subnet_id,
            security_group_ids=[self.security.ids["home"]],
        )
