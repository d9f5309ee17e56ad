"""The parts of a cluster that every backend needs: network, roles, storage, and the interruption channel."""

from __future__ import annotations

import pulumi

from infra.components.buckets import Buckets, ImageRepository
from infra.components.bundle import LifecycleBundle
from infra.components.file_systems import LustreSystem, OpenZfsHome
from infra.components.interruptions import Interruptions
from infra.components.network import Endpoints, Network
from infra.components.roles import Roles
from infra.components.security import SecurityGroups
from infra.plan.stack import Plan


class Foundation:
    """The parts, in the order in which they come up; a part that the spec does not ask for is None."""

    def __init__(self, plan: Plan) -> None:
        name = plan.spec.name
        self.network = Network(name, plan.network)
        self.security = SecurityGroups(name, plan.security, self.network.vpc_id)
        self.endpoints = Endpoints(name, plan.network, self.network, self.security.ids.get("endpoints"))
        self.roles = Roles(name, plan.roles)
        self.buckets = Buckets(name, plan.buckets)
        self.bundle = LifecycleBundle(name, plan.bundle, self.buckets.names["lifecycle"])
        self.lustre = self._lustre(plan)
        self.home = self._home(plan)
        self.channel = Interruptions(name, plan.channel)
        self.repository = ImageRepository(name, plan.repository)

    @property
    def ready(self) -> list[pulumi.Resource]:
        """What a node needs from its first minute: a rule or a route that comes later would make its boot fail."""
        resources = [self.security, self.endpoints, self.roles, self.bundle, self.network]
        return [*resources, *(part for part in (self.lustre, self.home) if part is not None)]

    def _lustre(self, plan: Plan) -> LustreSystem | None:
        if plan.lustre is None:
            return None
        groups = self.security.ids
        return LustreSystem(
            plan.spec.name,
            plan.lustre,
            plan.associations,
            subnet_id=self.network.compute_subnet_id,
            security_group_ids=[groups.get("lustre", groups["cluster"])],
            bucket_names={str(key): name for key, name in self.buckets.names.items()},
            log_days=plan.observability.log_days,
            opts=pulumi.ResourceOptions(depends_on=[self.security, *self.buckets.ready]),
        )

    def _home(self, plan: Plan) -> OpenZfsHome | None:
        if plan.home is None:
            return None
        return OpenZfsHome(
            plan.spec.name,
            plan.home,
            subnet_id=self.network.compute_subnet_id,
            security_group_ids=[self.security.ids["home"]],
        )
