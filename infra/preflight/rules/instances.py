"""EC2: instance types, their interfaces and images, and groups that do not fit together."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC

from infra.catalog.instances import Instance, snapshot
from infra.config import ClusterSpec, Group
from infra.finding import Problems, finding
from infra.plan.nodes.alike import differences
from infra.plan.nodes.auto_scaling import CANONICAL, IMAGE_FACTS_LAST, default_images, image
from infra.plan.nodes.nics import nics
from infra.preflight.rule import Context, Family, group_types, groups, known_groups, listed
from lustrain.problem import Problem, did_you_mean

TYPES = "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstanceTypes.html"
EFA = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html"
CPU = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-optimize-cpu.html"
IMAGES = "https://docs.aws.amazon.com/dlami/latest/devguide/find-dlami-id.html"
EFA_INSTALLER = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html#efa-start-enable"
EFA_DRIVER = "EFA's driver"
RULES = Family()


@RULES.add("EC2-001", "Instance types are known: the interfaces of a node follow from its type.", TYPES, essential=True)
def unknown_type(spec: ClusterSpec, context: Context) -> Problems:
    for kind in group_types(spec):
        if kind.facts is None:
            name = kind.group.ec2_type
            message = (
                f"{kind.group.instance_type!r} is not among the {len(snapshot().types)} types of {snapshot().date}"
            )
            meant = did_you_mean(name, [*spec.instance_types, *snapshot().types])
            described = f"instance_types: {{{name}: {{architecture: …, vcpus: …, memory_gib: …}}}}"
            meant = f"{meant} Otherwise" if meant else "correct it, or"
            yield finding(kind.key, message, f"{meant} describe it: {described}")


@RULES.add(
    "EC2-014",
    "Only types that a group has and the catalogue does not know are described by hand.",
    "infra/instance_types.py",
    level="warning",
)
def described_types(spec: ClusterSpec, context: Context) -> Problems:
    machines = [*spec.all_groups, *filter(None, [spec.monitor])]
    used = {kind for group in machines for kind in group.ec2_types}
    for name in spec.instance_types:
        if name not in used:
            yield finding(f"instance_types.{name}", "no group has this type", "remove it, or correct the name")
        elif name in snapshot().types:
            message = f"is used in place of what the list of {snapshot().date} says"
            yield finding(f"instance_types.{name}", message, "remove it, unless the list is wrong")


@RULES.add("EC2-002", "Workers with accelerators on more than one node have EFA.", EFA, level="warning")
def without_efa(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, facts in known_groups(spec):
        chosen = group.efa is False
        if group.role == "worker" and facts.accelerators and group.count > 1 and not facts.efa and not chosen:
            message = f"{group.ec2_type} has no EFA: {group.count} nodes exchange gradients over plain TCP"
            family = group.ec2_type.partition(".")[0]
            yield finding(f"{path}.instance_type", message, f"take a larger {family}, or one node")


@RULES.add("EC2-003", "Workers with accelerators have EFA all or none.", EFA, level="warning")
def mixed_efa(spec: ClusterSpec, context: Context) -> Problems:
    accelerated = [(path, group, facts) for path, group, facts in known_groups(spec) if facts.accelerators]
    workers = [(path, group, facts) for path, group, facts in accelerated if group.role == "worker"]
    if any(facts.efa for *_, facts in workers):
        for path, group, facts in workers:
            if not facts.efa:
                key = "efa" if group.efa is False else "instance_type"
                message = f"{group.ec2_type} has no EFA here, other groups have: a job over both falls back to TCP"
                yield finding(f"{path}.{key}", message, "keep jobs inside one group, or change it")


@RULES.add("EC2-004", "Workers have the same number of EFA interfaces.", EFA, level="warning")
def mixed_interfaces(spec: ClusterSpec, context: Context) -> Problems:
    counts = {facts.efa for _, group, facts in known_groups(spec) if group.role == "worker" and facts.efa}
    if len(counts) > 1:
        message = f"workers have {listed(sorted(counts))} EFA interfaces: a job over them runs at the smallest"
        yield finding("groups", message, "give all workers one instance type, or keep jobs inside one group")


@RULES.add(
    "EC2-005",
    "Workers have one kind of accelerator and the same number of them.",
    "https://github.com/aws/aws-parallelcluster (InstancesAcceleratorsValidator)",
    level="warning",
)
def mixed_accelerators(spec: ClusterSpec, context: Context) -> Problems:
    workers = [facts for _, group, facts in known_groups(spec) if group.role == "worker"]
    kinds = {f"{accelerator.count} {accelerator.name}" for facts in workers for accelerator in facts.accelerators}
    if len(kinds) > 1:
        message = f"workers have {listed(sorted(kinds))}: one job cannot use them evenly"
        yield finding("groups", message, "keep jobs inside one group, or give all workers one instance type")


@RULES.add("EC2-006", "All groups have one processor architecture, since one image serves all.", TYPES, level="warning")
def mixed_architectures(spec: ClusterSpec, context: Context) -> Problems:
    kinds = {facts.architecture for *_, facts in known_groups(spec)}
    if len(kinds) > 1:
        message = f"groups are {listed(sorted(kinds))}: programs and container images need both"
        yield finding("groups", message, "take types of one architecture")


@RULES.add("EC2-007", "threads_per_core is not above what the type has.", CPU)
def threads_per_core(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, facts in known_groups(spec):
        if group.threads_per_core > facts.threads_per_core:
            message = f"{group.threads_per_core}, but {group.ec2_type} has {facts.threads_per_core} thread a core"
            yield finding(f"{path}.threads_per_core", message, f"set {facts.threads_per_core}")


@RULES.add("EC2-008", "Some worker has accelerators.", TYPES, level="warning")
def no_accelerators(spec: ClusterSpec, context: Context) -> Problems:
    workers = [facts for _, group, facts in known_groups(spec) if group.role == "worker"]
    if workers and not any(facts.accelerators for facts in workers):
        yield finding(
            "groups", "no worker has a GPU or Trainium chip: training runs on CPUs", "take a p, g or trn type"
        )


@RULES.add(
    "EC2-009",
    "Workers have local NVMe or a Lustre file system to stage checkpoints on, not only the root disk.",
    "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/InstanceStorage.html",
    level="warning",
)
def no_local_disk(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, facts in known_groups(spec):
        if group.role == "worker" and facts.accelerators and not facts.nvme_count and spec.storage.lustre is None:
            message = f"{group.ec2_type} has no local NVMe, and the cluster no Lustre: checkpoints are staged on the root disk"
            yield finding(f"{path}.instance_type", message, "take a type with NVMe or add storage.lustre")


@RULES.add(
    "EC2-010",
    "The planned interfaces are what the type's network cards take: all its EFA, never more on a card than fit.",
    EFA,
    judgement=True,
)
def layout(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, facts in known_groups(spec):
        layout = nics(facts, spec.network.nic_policy)
        efa = sum(nic.kind != "interface" for nic in layout)
        crowded = [card.index for card in facts.cards if sum(n.card == card.index for n in layout) > card.slots]
        if efa != facts.efa or crowded:
            message = f"{efa} of {facts.efa} EFA interfaces of {group.ec2_type} fit on its cards"
            message += f", cards {listed(crowded)} are overfull" if crowded else ""
            yield wrong_facts(spec, f"{path}.instance_type", group, message)


def wrong_facts(spec: ClusterSpec, key: str, group: Group, message: str) -> Problem:
    """Return the finding about facts of the type that `key` names, at the place where they stand."""
    if group.ec2_type in spec.instance_types:
        fix = "correct it by `aws ec2 describe-instance-types`"
        return finding(f"instance_types.{group.ec2_type}", message, fix)
    return finding(key, message, "renew the facts: infra/catalog/refresh.py")


@RULES.add(
    "EC2-011",
    "A node that stages on its root disk has room for twice its accelerators' memory there.",
    "infra/plan/nodes/clients.py",
    level="warning",
)
def root_volume(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, facts in known_groups(spec):
        if group.role != "worker" or facts.nvme_count or spec.storage.lustre:
            continue
        held = sum(accelerator.count * accelerator.memory_mib for accelerator in facts.accelerators) // 1024
        if group.root_volume_gib < 2 * held:
            message = f"{group.root_volume_gib} GiB for a node with {held} GiB of accelerator memory and no other disk"
            yield finding(f"{path}.root_volume_gib", message, f"set {2 * held} or more")


@RULES.add("EC2-012", "The type runs Linux images for x86_64 or arm64.", TYPES, essential=True)
def no_linux(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, facts in known_groups(spec):
        if facts.architecture not in CANONICAL:
            message = f"{group.ec2_type} is {facts.architecture}; allowed: {listed(CANONICAL)}"
            yield finding(f"{path}.instance_type", message, "take another type")


@RULES.add("EC2-013", "A group that is to have EFA is of a type with EFA.", EFA, judgement=True)
def efa_of_type(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, facts in known_groups(spec):
        if spec.backend == "ec2" and group.efa and not facts.efa:
            yield finding(f"{path}.efa", f"{group.ec2_type} has no EFA", "remove it, or take a type with EFA")


@RULES.add(
    "EC2-024",
    "All types of a group are alike in what its one launch template and the plan of its nodes assume.",
    "infra/plan/nodes/alike.py",
)
def alike(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        if spec.backend == "ec2":
            yield from differences(spec, group, path)


@RULES.add(
    "EC2-021",
    "In a closed network the image has all that a node needs: its first boot reaches no package repository.",
    IMAGES,
)
def closed_image(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, family, lacks in _lacking(spec):
        if spec.network.closed:
            message = (
                f"the default image of {group.ec2_type} ({family}) lacks {listed(lacks)}, which a closed network "
                "cannot fetch"
            )
            fix = f"name an image that has {'them' if len(lacks) > 1 else 'it'}, or remove network.closed"
            yield finding(f"{path}.image_id", message, fix)


@RULES.add(
    "EC2-022",
    "The image of a type with EFA has its driver: the first boot does not install it.",
    EFA_INSTALLER,
    level="warning",
)
def image_without_efa(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, family, lacks in _lacking(spec):
        if EFA_DRIVER in lacks and not spec.network.closed:
            message = (
                f"the default image of {group.ec2_type} ({family}) lacks {EFA_DRIVER}: jobs and Lustre go over TCP, "
                "and node-verify fails"
            )
            yield finding(f"{path}.image_id", message, "name an image that AWS's EFA installer ran on")


@RULES.add(
    "EC2-023",
    f"The name of the default image was looked up within the last {IMAGE_FACTS_LAST.days} days.",
    IMAGES,
    level="warning",
)
def old_image_facts(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, facts in _with_default_image(spec):
        known = default_images(spec, group)[_family(spec, group, facts)]
        today = context.now and context.now.astimezone(UTC).date()
        if today and today - known.seen > IMAGE_FACTS_LAST:
            parameter = image(spec, group, facts).parameter
            message = f"{parameter} was last looked up on {known.seen}: AWS may have ended it since"
            yield finding(f"{path}.image_id", message, "ask AWS: fab preflight --online; or name an image")


def _with_default_image(spec: ClusterSpec) -> Iterator[tuple[str, Group, Instance]]:
    """Yield the worker groups on EC2 that name no image, with path and facts."""
    for path, group, facts in known_groups(spec) if spec.backend == "ec2" else ():
        if group.role == "worker" and not group.image_id and facts.architecture in CANONICAL:
            yield path, group, facts


def _family(spec: ClusterSpec, group: Group, facts: Instance) -> str:
    return image(spec, group, facts).family.partition("-")[0]


def _lacking(spec: ClusterSpec) -> Iterator[tuple[str, Group, str, list[str]]]:
    """Path, group, kind of image and what that lacks, for each worker group on EC2 that has a default image."""
    for path, group, facts in _with_default_image(spec):
        family = _family(spec, group, facts)
        if lacks := list(_lacks(spec, facts, family)):
            yield path, group, family, lacks


def _lacks(spec: ClusterSpec, facts: Instance, family: str) -> Iterator[str]:
    """By `infra.plan.nodes.auto_scaling.IMAGES`; in an open network first_boot.sh fetches all of it but EFA's driver."""
    if family == "ubuntu":
        yield "the AWS CLI"
        if facts.efa:
            yield EFA_DRIVER
        if spec.storage.home:
            yield "the NFS client"
    if family != "nvidia" and spec.storage.lustre:
        yield "the Lustre client"
