"""The plan of a stack: each part of what its program declares, made once from the spec and the place."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from infra.clock import now
from infra.config import ClusterSpec
from infra.plan.network.security import rules
from infra.plan.network.vpc import network
from infra.plan.nodes.auto_scaling import node_groups
from infra.plan.nodes.bundle import bundle, with_names
from infra.plan.nodes.capacity import reservations
from infra.plan.nodes.controller import controller
from infra.plan.nodes.eks import eks_plan
from infra.plan.place import Place, bucket_names, runs_uri, tags
from infra.plan.roles import roles
from infra.plan.storage.associations import associations
from infra.plan.storage.buckets import buckets
from infra.plan.storage.home import home
from infra.plan.storage.lustre import lustre_plan
from infra.plan.storage.repository import repository
from infra.plan.storage.s3_mounts import s3_mounts
from infra.plan.watch.budget import budget
from infra.plan.watch.grafana import grafana
from infra.plan.watch.interruptions import channel
from infra.plan.watch.machine import monitor
from infra.plan.watch.observability import observability


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

    tags = cached_property(lambda plan: tags(plan.spec))
    bucket_names = cached_property(lambda plan: bucket_names(plan.spec, plan.place))
    runs_uri = cached_property(lambda plan: runs_uri(plan.spec, plan.place))
    network = cached_property(lambda plan: network(plan.spec, plan.place))
    security = cached_property(lambda plan: rules(plan.spec))
    roles = cached_property(lambda plan: roles(plan.spec, plan.place))
    buckets = cached_property(lambda plan: buckets(plan.spec, plan.place))
    bundle = cached_property(lambda plan: with_names(bundle(plan.spec, region=plan.place.region), plan.bucket_names))
    lustre = cached_property(lambda plan: lustre_plan(plan.spec))
    associations = cached_property(lambda plan: associations(plan.spec, plan.place))
    s3_mounts = cached_property(lambda plan: s3_mounts(plan.spec, plan.place))
    home = cached_property(lambda plan: home(plan.spec))
    """The file system for homes that is made; None also where there is one already."""
    repository = cached_property(lambda plan: repository(plan.spec))
    node_groups = cached_property(
        lambda plan: () if plan.spec.hyperpod else node_groups(plan.spec, plan.place, plan.now)
    )
    """Of the `ec2` backend."""
    controller = cached_property(lambda plan: controller(plan.spec))
    """Of Slurm, on EC2."""
    monitor = cached_property(lambda plan: monitor(plan.spec, plan.place))
    grafana = cached_property(lambda plan: grafana(plan.spec))
    reservations = cached_property(lambda plan: reservations(plan.spec))
    eks = cached_property(lambda plan: eks_plan(plan.spec, plan.place) if plan.spec.backend == "hyperpod-eks" else None)
    channel = cached_property(lambda plan: channel(plan.spec, plan.place))
    observability = cached_property(lambda plan: observability(plan.spec, plan.place))
    budget = cached_property(lambda plan: budget(plan.spec, plan.place))
