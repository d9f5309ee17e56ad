"""The plan of a stack: each part of what its program declares, made once from the spec and the place."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from infra.clock import now
from infra.config import ClusterSpec
from infra.plan.network.security import Rule, rules
from infra.plan.network.vpc import NetworkPlan, network
from infra.plan.nodes.auto_scaling import NodeGroupPlan, node_groups
from infra.plan.nodes.bundle import Bundle, bundle, with_names
from infra.plan.nodes.capacity import ReservationPlan, reservations
from infra.plan.nodes.controller import ControllerPlan, controller
from infra.plan.nodes.eks import EksPlan, eks_plan
from infra.plan.place import BucketNames, Place, bucket_names, runs_uri, tags
from infra.plan.roles import RolePlan, roles
from infra.plan.storage.associations import AssociationPlan, associations
from infra.plan.storage.buckets import BucketPlan, buckets
from infra.plan.storage.home import EfsPlan, OpenZfsPlan, home
from infra.plan.storage.lustre import LustrePlan, lustre_plan
from infra.plan.storage.repository import RepositoryPlan, repository
from infra.plan.storage.s3_mounts import S3MountPlan, s3_mounts
from infra.plan.watch.budget import BudgetPlan, budget
from infra.plan.watch.interruptions import ChannelPlan, channel
from infra.plan.watch.machine import MonitorPlan, monitor
from infra.plan.watch.observability import ObservabilityPlan, observability


@dataclass(frozen=True)
class Plan:
    """A part is made when it is first read, so that a part can be read while another one cannot be planned.

    UserError where AWS could not make a part (network, node groups, bundle); preflight reports those mistakes before. A part
    that the spec does not ask for is None or empty.
    """

    spec: ClusterSpec
    place: Place
    now: datetime = field(default_factory=now)
    """A capacity block has begun by then, or is still to begin."""

    @cached_property
    def tags(self) -> dict[str, str]:
        return tags(self.spec)

    @cached_property
    def bucket_names(self) -> BucketNames:
        return bucket_names(self.spec, self.place)

    @cached_property
    def runs_uri(self) -> str:
        return runs_uri(self.spec, self.place)

    @cached_property
    def network(self) -> NetworkPlan:
        return network(self.spec, self.place)

    @cached_property
    def security(self) -> tuple[Rule, ...]:
        return rules(self.spec)

    @cached_property
    def roles(self) -> tuple[RolePlan, ...]:
        return roles(self.spec, self.place)

    @cached_property
    def buckets(self) -> tuple[BucketPlan, ...]:
        return buckets(self.spec, self.place)

    @cached_property
    def bundle(self) -> Bundle:
        return with_names(bundle(self.spec, region=self.place.region), self.bucket_names)

    @cached_property
    def lustre(self) -> LustrePlan | None:
        return lustre_plan(self.spec)

    @cached_property
    def associations(self) -> tuple[AssociationPlan, ...]:
        return associations(self.spec, self.place)

    @cached_property
    def s3_mounts(self) -> tuple[S3MountPlan, ...]:
        return s3_mounts(self.spec, self.place)

    @cached_property
    def home(self) -> OpenZfsPlan | EfsPlan | None:
        """The file system for homes that is made; None also where there is one already."""
        return home(self.spec)

    @cached_property
    def repository(self) -> RepositoryPlan:
        return repository(self.spec)

    @cached_property
    def node_groups(self) -> tuple[NodeGroupPlan, ...]:
        """Of the `ec2` backend."""
        return () if self.spec.hyperpod else node_groups(self.spec, self.place, self.now)

    @cached_property
    def controller(self) -> ControllerPlan | None:
        """Of Slurm, on EC2."""
        return controller(self.spec)

    @cached_property
    def monitor(self) -> MonitorPlan | None:
        return monitor(self.spec, self.place)

    @cached_property
    def reservations(self) -> tuple[ReservationPlan, ...]:
        return reservations(self.spec)

    @cached_property
    def eks(self) -> EksPlan | None:
        return eks_plan(self.spec, self.place) if self.spec.backend == "hyperpod-eks" else None

    @cached_property
    def channel(self) -> ChannelPlan:
        return channel(self.spec, self.place)

    @cached_property
    def observability(self) -> ObservabilityPlan:
        return observability(self.spec, self.place)

    @cached_property
    def budget(self) -> BudgetPlan | None:
        return budget(self.spec, self.place)
