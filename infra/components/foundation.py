"""The parts of a cluster that every backend needs: network, roles, storage, and the interruption channel."""

from __future__ import annotations

import pulumi

from infra.components.buckets import Buckets, ImageRepository
from infra.components.bundle import LifecycleBundle
from infra.components.file_systems import EfsHome, ExistingHome, LustreSystem, OpenZfsHome
from infra.components.interruptions import Interruptions
from infra.components.network import Endpoints, Network
from infra.components.roles import Roles
from infra.components.security import SecurityGroups
from infra.plan.nodes.bundle import HOME_DNS
from infra.plan.stack import Plan
from infra.plan.storage.home import EfsPlan


class Foundation:
    """The parts, in the order in which they come up; a part that the spec does not ask for is None."""

    def __init__(self, plan: Plan) -> None:
        name = plan.spec.name
        self.network = Network(name, plan.network)
        self.security = SecurityGroups(name, plan.security, self.network.vpc_id)
        self.endpoints = Endpoints(name, plan.network, self.network, self.security.ids.get("endpoints"))
        self.roles = Roles(name, plan.roles)
        self.buckets = Buckets(name, plan.buckets)
        self.lustre = self._lustre(plan)
        self.home = self._home(plan)
        later = {HOME_DNS: self.home.dns_name} if self.home else {}
        self.bundle = LifecycleBundle(name, plan.bundle, self.buckets.names["lifecycle"], later=later)
        self.channel = Interruptions(name, plan.channel)
        self.repository = ImageRepository(name, plan.repository)

    @property
    def ready(self) -> list[pulumi.Resource]:
        """What a node needs from its first minute: a rule or a route that comes later would make its boot fail."""
        resources = [self.security, self.endpoints, self.roles, self.bundle, self.network]
        return [*resources, *(part for part in (self.lustre, self.home) if isinstance(part, pulumi.Resource))]

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

    def _home(self, plan: Plan) -> OpenZfsHome | EfsHome | ExistingHome | None:
        config = plan.spec.storage.home
        if config and config.existing:
            found = config.existing
            return ExistingHome(pulumi.Output.from_input(found.id), pulumi.Output.from_input(found.dns_name))
        if plan.home is None:
            return None
        if isinstance(plan.home, EfsPlan):
            # By the rules too: a client that comes before them hangs until it gives up.
            opts = pulumi.ResourceOptions(depends_on=[self.security])
            subnets = {**self.network.zone_subnet_ids, plan.spec.zone_id: self.network.compute_subnet_id}
            groups = [self.security.ids["efs"]]
            return EfsHome(plan.spec.name, plan.home, subnet_ids=subnets, security_group_ids=groups, opts=opts)
        return OpenZfsHome(
            plan.spec.name,
            plan.home,
            subnet_id=self.network.compute_subnet_id,
            security_group_ids=[self.security.ids["home"]],
        )
