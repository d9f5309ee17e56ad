"""The effects of an update on what exists, derived from the old spec and the new one before the engine runs.

Create-only properties are those of the CloudFormation schemas: of AWS::SageMaker::Cluster ClusterName, VpcConfig and
Orchestrator.Eks; of AWS::FSx::FileSystem type, subnet, security groups, key and backup; of a data repository association
the file system, the folder and the S3 path. HyperPod's updates are described at
https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-operate-cli-command-update-cluster.html.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from ipaddress import IPv4Network

from pydantic import BaseModel

from infra.config import Capacity, ClusterSpec, Group
from infra.plan.network.vpc import cidr_problems, in_zone, layout
from infra.plan.nodes import hyperpod
from infra.plan.nodes.capacity import Shares, market, mix, shares
from infra.plan.nodes.logs import carries_logs
from infra.plan.roles import EKS_ROLES
from infra.plan.summary import machines
from infra.preflight import explain_monitor, explain_scheduler
from infra.preflight.change import Change, Effect, protected, shown
from infra.preflight.explain_storage import associations, file_system, home, objects, s3_mounts

MADE_ROLE = "the role that the stack made"
OWN_EKS = "a control plane of the stack's own"
NODES_LOST = "every node with its local disks and jobs"
SECOND_STACK = "make a second stack, move over, destroy the first"
TUNE = "run `fab node-tune` afterwards, which brings running nodes to the same state"
REFUSED = (Effect.REPLACES_FILE_SYSTEM, Effect.IMPOSSIBLE)


def explain(old: ClusterSpec, new: ClusterSpec, now: datetime | None = None) -> list[Change]:
    """Return everything that differs, the worst first; empty for equal specs. Without `now` no block has begun."""
    changes = [change for compare in _COMPARERS for change in compare(old, new)]
    changes += _groups(old, new, now)
    if old.hyperpod and hyperpod.protected(old) and any(item.effect is Effect.REPLACES_CLUSTER for item in changes):
        changes.append(protected("groups", "a cluster on a training plan"))
    ranks = list(Effect)
    return sorted(dict.fromkeys(changes), key=lambda change: -ranks.index(change.effect))


def explain_bundle(old: str, new: str, *, controller: bool = False) -> list[Change]:
    """Return what a new lifecycle bundle (scripts, node agent, settings, facts of the cluster) changes.

    `old` and `new` are the names of the bundles; `controller`: Slurm's, on EC2, is there before and after.
    """
    if old == new:
        return []
    message = f"{old} becomes {new}: new nodes boot with it, running nodes keep theirs"
    anew = [replace(explain_scheduler.ANEW, path="lifecycle")] if controller else []
    return [*anew, Change("lifecycle", Effect.NEW_NODES, message, "", TUNE)]


def refused(changes: Iterable[Change]) -> list[Change]:
    """Return those that must not reach the engine: they replace a file system, or end in the middle of an update."""
    return [change for change in changes if change.effect in REFUSED]


def _identity(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    """Yield what a new name or backend replaces: everything."""
    for key in ("name", "backend"):
        if getattr(old, key) != getattr(new, key):
            message = f"{getattr(old, key)} becomes {getattr(new, key)}"
            yield Change(key, Effect.REPLACES_CLUSTER, message, NODES_LOST, SECOND_STACK)
    if old.name != new.name and not all((old.buckets.data, old.buckets.checkpoints, old.buckets.lifecycle)):
        yield protected("name", "a bucket that is called after the cluster")


def _place(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    """Yield whatever moves or replaces the compute subnet."""
    before, after = old.network, new.network
    moved = ["zone_id"] if old.zone_id != new.zone_id else []
    keys = () if before.existing and after.existing else ("cidr", "compute_prefix")
    moved += [f"network.{key}" for key in keys if getattr(before, key) != getattr(after, key)]
    for key in ("vpc_id", "compute_subnet_id"):
        if getattr(before.existing, key, None) != getattr(after.existing, key, None):
            moved.append(f"network.existing.{key}")
    volumes = {explain_scheduler.VOLUME: old.controller, explain_monitor.VOLUME: old.monitor}
    # EBS has a volume in one zone.
    yield from (protected("zone_id", volume) for volume, there in volumes.items() if there and "zone_id" in moved)
    for path in moved:
        message = f"{shown(_at(old, path))} becomes {shown(_at(new, path))}: the nodes get a new subnet"
        instead = "make a second stack there, copy the data through S3, destroy the first"
        if _in_one_subnet(old):
            yield Change(
                path, Effect.REPLACES_FILE_SYSTEM, message, "all that lies in Lustre or homes and is not in S3", instead
            )
        yield Change(path, Effect.REPLACES_CLUSTER, message, NODES_LOST, instead)
    for zone, subnet in _zone_subnets(old).items():
        if not moved and subnet != (there := _zone_subnets(new).get(zone, subnet)):
            message = f"the subnet of its nodes in {zone} would go from {subnet} to {there} under them"
            yield Change(
                "groups", Effect.IMPOSSIBLE, message, "", "keep the order of groups and put new ones at the end"
            )
    if before.second_zone_id and before.second_zone_id != after.second_zone_id and new.backend == "hyperpod-eks":
        message = "the control plane's second subnet is made anew, which an EKS cluster takes in the VPC it has"
        yield Change("network.second_zone_id", Effect.IN_PLACE, message)


def _in_one_subnet(spec: ClusterSpec) -> bool:
    """Whether a file system was made that lies in the compute subnet for good; EFS only gets other mount targets."""
    homes, lustre = spec.storage.home, spec.storage.lustre
    return bool((homes and homes.type == "openzfs" and not homes.existing) or (lustre and not lustre.existing))


def _security_groups(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    """Yield other groups of the interfaces: HyperPod keeps its VPC settings for good, a launch template is for new nodes."""
    before, after = old.network.security_group_ids, new.network.security_group_ids
    if before == after:
        return
    here, message = "network.security_group_ids", f"{shown(before)} becomes {shown(after)}"
    if old.hyperpod:
        instead = "change the rules of groups that are named already"
        yield Change(here, Effect.REPLACES_CLUSTER, message, NODES_LOST, instead)
    else:
        fix = "aws ec2 modify-network-interface-attribute changes those of running machines"
        yield Change(here, Effect.NEW_NODES, f"{message}; running machines keep their groups", "", fix)


def _zone_subnets(spec: ClusterSpec) -> Mapping[str, object]:
    """Return the subnet that is made in each zone that only groups name; empty where AWS would refuse the ranges."""
    if spec.network.existing or any(problem.level == "error" for problem in cidr_problems(spec)):
        return {}
    cidrs = layout(spec, IPv4Network(spec.network.cidr), spec.network.compute_prefix) or {}
    return {zone: cidrs[in_zone(zone)] for zone in spec.other_zones}


def _groups(old: ClusterSpec, new: ClusterSpec, now: datetime | None) -> Iterator[Change]:
    before = {group.name: group for group in old.groups}
    after = {group.name: group for group in new.groups}
    for name, group in before.items():
        if name not in after:
            message = f"{machines(group)} end"
            fix = "let jobs save and stop first (a renamed group is a removed and a new one)"
            yield Change(f"groups ({name})", Effect.REPLACES_NODES, message, "their local disks and jobs", fix)
            if group.capacity.create:
                yield protected(f"groups ({name})", "the reservation that the stack made")
        else:
            yield from _group(new, name, group, after[name], now)
    for name in (name for name in after if name not in before):
        yield Change(f"groups ({name})", Effect.IN_PLACE, f"{machines(after[name])} are added")


def _group(spec: ClusterSpec, name: str, before: Group, after: Group, now: datetime | None) -> Iterator[Change]:
    here = f"groups ({name})"
    if after.count < before.count:
        chosen = "Auto Scaling" if spec.backend == "ec2" else "HyperPod, not you,"
        message = f"{before.count} nodes become {after.count}: {chosen} chooses which go"
        fix = (
            "stop jobs first"
            if spec.backend == "ec2"
            else "name them: aws sagemaker batch-delete-cluster-nodes, then lower count"
        )
        yield Change(f"{here}.count", Effect.WIPES, message, "local disks and jobs of the nodes that go", fix)
    elif after.count > before.count:
        yield Change(f"{here}.count", Effect.IN_PLACE, f"{before.count} nodes become {after.count}")
    if spec.backend == "ec2" and before.count and _is_placed(spec, before) and not _is_placed(spec, after):
        message = "its placement group goes, and EC2 deletes none with machines in it: the engine would stop there"
        fix = "set count: 0 and bring that up, then make this change"
        yield Change(here, Effect.IMPOSSIBLE, message, "", fix)
    for key in type(after).model_fields:
        if key not in ("name", "count") and getattr(before, key) != getattr(after, key):
            yield _group_key(spec, f"{here}.{key}", key, before, after, now)


def _is_placed(spec: ClusterSpec, group: Group) -> bool:
    return market(group, spec.type_of(group)).own_placement_group


HARMLESS = ("min_count", "partition", "labels", "taints", "deep_health_checks")


def _group_key(spec: ClusterSpec, path: str, key: str, before: Group, after: Group, now: datetime | None) -> Change:
    message = f"{shown(getattr(before, key))} becomes {shown(getattr(after, key))}"
    if key == "capacity":
        message = f"{before.capacity.mode} becomes {after.capacity.mode}, or different capacity of the same kind"
        if _same_but(before, after, "zone_id", "size"):
            return Change(path, Effect.IN_PLACE, "what is known about the capacity changes, not the capacity")
        if _same_but(before, after, "zone_id", "size", "starts_at"):
            return _start(path, before.capacity, after.capacity, now)
        if _same_but(before, after, "zone_id", "size", "ends_at"):
            return _end(spec, path, before, after)
        if before.capacity.create:
            return protected(path, "the reservation that the stack made")
    if key == "capacity" and spec.backend == "ec2":
        if mix(after) and shares(before) != shares(after):
            lost = "local disks and jobs of nodes that Auto Scaling ends to get there"
            message = f"{_in_words(shares(before))} become {_in_words(shares(after))}"
            return Change(path, Effect.REPLACES_NODES, message, lost, "let jobs save and stop first")
        base = before.capacity.on_demand_base
        if before.capacity.mode == after.capacity.mode == "spot" and base and not mix(after):
            message = (
                f"{base} nodes on demand become none, but those that run most likely stay, billed until you end them"
            )
            fix = "let the job save, then end the nodes on demand: spot ones take their place"
            return Change(path, Effect.NEW_NODES, message, "", fix)
    if key == "other_types" and (gone := [kind for kind in before.other_types if kind not in after.ec2_types]):
        message += f"; nodes of {' and '.join(gone)} keep running, and `fab node-verify` fails them as another type"
        fix = "let the job save, then end those nodes"
        return Change(path, Effect.NEW_NODES, message, "", fix)
    if key == "instance_type" and before.capacity.create:
        return protected(path, "the reservation that the stack made")
    if key == "role" and spec.hyperpod:
        return Change(path, Effect.REPLACES_CLUSTER, message, "the Slurm cluster's state", "make a second stack")
    if key == "min_count" and spec.backend == "ec2":
        return explain_scheduler.min_count(path, after)
    if key in HARMLESS:
        return Change(path, Effect.IN_PLACE, message)
    if key == "auto_patch":
        return Change(path, Effect.REIMAGES, message, "root disks, when a patch comes", "save what lies there")
    if key == "interface_type" and spec.hyperpod:
        # CloudFormation's page: no interruption; an interface of a running node keeps its type.
        fix = "let jobs save, then replace the nodes"
        return Change(path, Effect.NEW_NODES, f"{message}; running nodes keep theirs", "", fix)
    if key == "volume_kms_key" and spec.hyperpod:
        return Change(path, Effect.IMPOSSIBLE, message, "", "add a group with the other key, then remove this one")
    if spec.backend == "ec2":
        fix = "let the job save, then end the old machines: the group comes back whole with the new template"
        return Change(path, Effect.NEW_NODES, f"{message}; running machines keep the old launch template", "", fix)
    return Change(
        path,
        Effect.REPLACES_NODES,
        message,
        "their local disks and jobs",
        "let jobs save and stop first, or add a second group",
    )


def _in_words(share: Shares) -> str:
    if share.percent:
        return "nodes all on demand"
    return f"{share.base} nodes on demand with the others on spot" if share.base else "nodes all on spot"


def _same_but(before: Group, after: Group, *keys: str) -> bool:
    """Return whether only these keys of the capacity differ."""
    ignored = set(keys)
    return before.capacity.model_dump(exclude=ignored) == after.capacity.model_dump(exclude=ignored)


def _start(path: str, before: Capacity, after: Capacity, now: datetime | None) -> Change:
    """Another start of a block: a group whose block is still to begin is empty, one whose block has begun has its nodes."""
    was_ahead, is_ahead = (_is_ahead(capacity.starts_at, now) for capacity in (before, after))
    if is_ahead and (was_ahead or before.starts_at is None):
        message = "the group is empty until that time: nodes that run now are ended, after their save"
        return Change(path, Effect.IN_PLACE, message)
    if is_ahead:
        message = f"the group, filled at {shown(before.starts_at)}, is emptied until {shown(after.starts_at)}"
        return Change(path, Effect.WIPES, message, "local disks and jobs of its nodes", "keep starts_at as it is")
    if was_ahead:
        message = "the group is filled at once; where the block has not begun, each launch fails until it does"
        return Change(path, Effect.IN_PLACE, message)
    return Change(path, Effect.IN_PLACE, "the start has passed, and the group stays as it is")


def _is_ahead(moment: datetime | None, now: datetime | None) -> bool:
    return moment is not None and (now is None or moment > now)


def _end(spec: ClusterSpec, path: str, before: Group, after: Group) -> Change:
    """EC2's nodes learn the end at their first boot; a group on a block is emptied by a schedule that follows at once."""
    ends = (item.capacity.ends_at for item in (before, after))
    was, will_be = (end.isoformat() if end else "no known end" for end in ends)
    message = f"{was} becomes {will_be}"
    if after.capacity.mode == "capacity-block":
        message += "; the schedule that empties the group follows in place"
    if after.capacity.create:
        message += "; the end of the reservation follows in place"
    if spec.backend != "ec2":
        return Change(path, Effect.IN_PLACE, message)
    fix = "stop the job by hand in time, or let it save and end the old machines"
    return Change(path, Effect.NEW_NODES, f"{message}; running machines keep the old end", "", fix)


def _accounting(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    before, after = old.slurm.accounting, new.slurm.accounting
    if before == after:
        return
    here = "slurm.accounting"
    if after is None:
        message = "HyperPod does not go back to the database on the controller"
        yield Change(here, Effect.IMPOSSIBLE, message, "", "keep it, or make a second stack")
    else:
        was = before.endpoint if before else "the controller's own database"
        yield Change(
            here, Effect.IN_PLACE, f"{was} becomes {after.endpoint}; records so far are not known to move with it"
        )


def _kubernetes(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    if new.backend != "hyperpod-eks":
        return
    before, after = old.eks.existing, new.eks.existing
    if (before and before.name) != (after and after.name):
        was, will_be = (spec.eks.existing.name if spec.eks.existing else OWN_EKS for spec in (old, new))
        message = f"{was} becomes {will_be}"
        yield Change("eks.existing.name", Effect.REPLACES_CLUSTER, message, NODES_LOST, SECOND_STACK)
    elif before and after:
        if before.addons != after.addons:
            message = f"{shown(before.addons)} becomes {shown(after.addons)}; the software of those that go stays"
            yield Change("eks.existing.addons", Effect.IN_PLACE, message)
    else:
        yield from _control_plane(old, new)
    if old.eks.tiered_memory_percent != new.eks.tiered_memory_percent:
        yield Change("eks.tiered_memory_percent", Effect.IN_PLACE, "is changed on the running cluster")
    yield from _kubernetes_options(old, new)
    if old.access.admin_roles != new.access.admin_roles:
        yield Change("access.admin_roles", Effect.IN_PLACE, "access entries are made and removed")


def _control_plane(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    """Yield what changes on a control plane that the stack made."""
    here, named = "eks.version", new if new.eks.version_named else old
    before, after = (tuple(map(int, spec.eks.version.split("."))) for spec in (old, named))
    if after < before:
        yield Change(
            here, Effect.IMPOSSIBLE, f"{old.eks.version} cannot go back to {new.eks.version}", "", "keep the version"
        )
    elif after[1] > before[1] + 1:
        message = f"{old.eks.version} to {new.eks.version} is more than one minor version"
        yield Change(here, Effect.IMPOSSIBLE, message, "", f"go to 1.{before[1] + 1} first")
    elif after > before:
        message = "the control plane goes first, nodes follow by `aws sagemaker update-cluster-software`, re-imaged"
        yield Change(here, Effect.REIMAGES, message, "root disks, when you update the nodes", "save what lies there")
    for key in ("public_access_cidrs", "upgrade_policy"):
        if getattr(old.eks, key) != getattr(new.eks, key):
            yield Change(f"eks.{key}", Effect.IN_PLACE, "is changed on the running cluster")
    if old.eks.cluster_role != new.eks.cluster_role:
        # EKS changes the role of no control plane
        # (https://docs.aws.amazon.com/eks/latest/APIReference/API_UpdateClusterConfig.html).
        message = f"{old.eks.cluster_role or MADE_ROLE} becomes {new.eks.cluster_role or MADE_ROLE}"
        yield Change("eks.cluster_role", Effect.REPLACES_CLUSTER, message, NODES_LOST, SECOND_STACK)


def _kubernetes_options(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    if old.eks.karpenter != new.eks.karpenter:
        if new.eks.karpenter is None and old.eks.karpenter:
            message = "without the key HyperPod does not stop it: Karpenter may stay on, without its role"
            yield Change("eks.karpenter", Effect.IN_PLACE, message, "", "set it to false")
        else:
            yield Change("eks.karpenter", Effect.IN_PLACE, "is changed on the running cluster")
    for key, kept in (("task_governance", "queues and quotas"), ("training_operator", "jobs")):
        before, after = getattr(old.eks, key), getattr(new.eks, key)
        if after and not before:
            yield Change(f"eks.{key}", Effect.IN_PLACE, "the add-on comes to the running cluster")
        elif before and not after:
            lost = f"its {kept} in Kubernetes"
            yield Change(f"eks.{key}", Effect.IN_PLACE, "the add-on is removed", lost, "let the jobs end first")
    for key in sorted({*EKS_ROLES.values()} - {"cluster_role"}):
        if (was := getattr(old.eks, key)) != (will_be := getattr(new.eks, key)):
            yield Change(f"eks.{key}", Effect.IN_PLACE, f"{was or MADE_ROLE} becomes {will_be or MADE_ROLE}")


def _roles(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    """Yield another role of the nodes, a boundary that comes or goes, and a path: IAM moves no role, new ones are made."""
    before, after = old.access, new.access
    if (before.node_role, before.instance_profile) != (after.node_role, after.instance_profile):
        message = f"{before.node_role or MADE_ROLE} becomes {after.node_role or MADE_ROLE}"
        if old.backend == "ec2" and before.node_role:
            fix = "let the job save, then end the old machines"
            yield Change("access.node_role", Effect.NEW_NODES, f"{message}; running machines keep the old one", "", fix)
        else:
            gone = "" if before.node_role else ", which is deleted under running nodes"
            fix = "let jobs save and stop first"
            yield Change("access.node_role", Effect.REPLACES_NODES, message + gone, "their local disks and jobs", fix)
    here = "access.permissions_boundary"
    if before.permissions_boundary and not after.permissions_boundary:
        message = "the roles lose their boundary, which the deployer's policy does not allow"
        instead = "keep it, or have somebody with iam:DeleteRolePermissionsBoundary take it off"
        yield Change(here, Effect.IN_PLACE, message, "", instead)
    elif before.permissions_boundary != after.permissions_boundary:
        message = (
            f"{shown(before.permissions_boundary)} becomes {shown(after.permissions_boundary)} on running nodes too"
        )
        yield Change(here, Effect.IN_PLACE, message)
    if before.role_path != after.role_path:
        message = f"{before.role_path} becomes {after.role_path}: new roles are made and the old ones deleted"
        effect = Effect.REPLACES_CLUSTER if old.backend == "hyperpod-eks" else Effect.REPLACES_NODES
        yield Change("access.role_path", effect, message, NODES_LOST, SECOND_STACK)


def _tuning(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    """Yield changed tuning: a node tunes itself at boot, by its bundle."""
    for table in ("profiles", "settings"):
        before, after = getattr(old.tuning, table), getattr(new.tuning, table)
        for key in dict.fromkeys([*before, *after]):
            if before.get(key) != after.get(key):
                message = f"{shown(before.get(key))} becomes {shown(after.get(key))}"
                yield Change(f"tuning.{table} ({key})", Effect.NEW_NODES, message, "", TUNE)


def _boot(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    """Yield what nodes learn at their boot only, by user data or the bundle."""
    for key in ("network.proxy", "boot.on_configured"):
        if _at(old, key) != _at(new, key):
            fix = "let the job save, then replace the nodes one after the other or the group as a whole"
            yield Change(key, Effect.NEW_NODES, "running machines keep what they had", "", fix)


def _logs(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    before, after = carries_logs(old), carries_logs(new)
    key = "observability.logs"
    if before and not after:
        lost = "all that is in the log groups"
        fix = "aws logs create-export-task copies a group to S3; a shorter observability.log_days costs less, too"
        yield Change(key, Effect.IN_PLACE, "the log groups are deleted; running nodes try on in vain", lost, fix)
    elif after and not before:
        eks = new.backend == "hyperpod-eks"
        message = "the add-on comes to the running cluster" if eks else "running nodes carry nothing, new ones do"
        yield Change(key, Effect.IN_PLACE if eks else Effect.NEW_NODES, message)


def _other_changes(old: ClusterSpec, new: ClusterSpec) -> Iterator[Change]:
    """Yield every other key that differs."""
    for path, a, b in _leaves(old, new):
        if not any(path == key or path.startswith(f"{key}.") for key in _COVERED):
            yield Change(path, _EFFECTS.get(path, Effect.IN_PLACE), f"{shown(a)} becomes {shown(b)}")


_COVERED = (
    "name",
    "backend",
    "zone_id",
    "groups",
    "network.cidr",
    "network.compute_prefix",
    "network.existing.vpc_id",
    "network.existing.compute_subnet_id",
    "network.security_group_ids",
    "network.proxy",
    "boot",
    "storage",
    "eks",
    "slurm.accounting",
    "scheduler",
    "observability.prometheus",
    "observability.grafana",
    "observability.monitor",
    "tuning",
    "access.admin_roles",
    "access.permissions_boundary",
    "access.role_path",
    "access.node_role",
    "access.instance_profile",
    "observability.logs",
    "runs_uri",
    "buckets.runs_prefix",
    "buckets.data",
    "buckets.checkpoints",
    "buckets.lifecycle",
    "buckets.ephemeral_days",
    "buckets.noncurrent_days",
)
"""Keys, and tables with all that is in them, that the other functions report."""
_EFFECTS = {
    "access.ssh_key": Effect.NEW_NODES,
    "instance_types": Effect.NEW_NODES,
    "network.nic_policy": Effect.NEW_NODES,
    "network.existing.zone_subnet_ids": Effect.REPLACES_NODES,
    "buckets.kms_key": Effect.NEW_NODES,
}
_COMPARERS: Sequence[Callable[[ClusterSpec, ClusterSpec], Iterator[Change]]] = (
    _identity,
    _place,
    _security_groups,
    file_system,
    associations,
    home,
    s3_mounts,
    _accounting,
    explain_scheduler.scheduler,
    explain_monitor.monitor,
    _kubernetes,
    objects,
    _roles,
    _tuning,
    _boot,
    _logs,
    _other_changes,
)


def _leaves(old: BaseModel, new: BaseModel, path: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield every key that differs; a table that one side lacks is one difference."""
    for key in type(old).model_fields:
        a, b = getattr(old, key), getattr(new, key)
        here = f"{path}.{key}" if path else key
        if isinstance(a, BaseModel) and isinstance(b, BaseModel):
            yield from _leaves(a, b, here)
        elif a != b:
            yield here, a, b


def _at(spec: ClusterSpec, path: str) -> object:
    found: object = spec
    for key in path.split("."):
        found = getattr(found, key, None)
    return found
