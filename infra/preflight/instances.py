"""EC2: instance types, their network interfaces, and groups that do not fit together."""

from __future__ import annotations

from collections.abc import Iterable

from infra.catalog.instances import instance, similar, snapshot
from infra.config import ClusterSpec
from infra.plan.nodes.gang import CANONICAL
from infra.plan.nodes.nics import nics
from infra.preflight.finding import Finding
from infra.preflight.rule import Context, OfflineRule, groups, known_groups, listed

TYPES = "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstanceTypes.html"
EFA = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html"
CPU = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-optimize-cpu.html"


class UnknownType(OfflineRule):
    code = "EC2-001"
    checks = "Instance types are known: the interfaces of a node follow from its type."
    source = TYPES
    essential = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for path, group in groups(spec):
            if instance(group.ec2_type) is None:
                close = similar(group.instance_type)
                yield self.finding(
                    f"{path}.instance_type",
                    f"{group.instance_type!r} is not among the {len(snapshot().types)} types of {snapshot().date}",
                    f"did you mean {' or '.join(close)}?"
                    if close
                    else "correct it, or renew the list: infra/catalog/refresh.py",
                )


class WithoutEfa(OfflineRule):
    code = "EC2-002"
    level = "warning"
    checks = "Workers with accelerators on more than one node have EFA."
    source = EFA

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for path, group, facts in known_groups(spec):
            if group.role == "worker" and facts.accelerators and group.count > 1 and not facts.efa:
                message = f"{group.ec2_type} has no EFA: {group.count} nodes exchange gradients over plain TCP"
                family = group.ec2_type.partition(".")[0]
                yield self.finding(f"{path}.instance_type", message, f"take a larger {family}, or one node")


class MixedEfa(OfflineRule):
    code = "EC2-003"
    level = "warning"
    checks = "Workers with accelerators have EFA all or none."
    source = EFA

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        found = [(path, group, facts) for path, group, facts in known_groups(spec) if facts.accelerators]
        workers = [(path, group, facts) for path, group, facts in found if group.role == "worker"]
        if any(facts.efa for *_, facts in workers):
            for path, group, facts in workers:
                if not facts.efa:
                    message = f"{group.ec2_type} has no EFA, other groups have: a job over both falls back to TCP"
                    yield self.finding(
                        f"{path}.instance_type", message, "keep jobs inside one group, or change the type"
                    )


class MixedInterfaces(OfflineRule):
    code = "EC2-004"
    level = "warning"
    checks = "Workers have the same number of EFA interfaces."
    source = EFA

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        counts = {facts.efa for _, group, facts in known_groups(spec) if group.role == "worker" and facts.efa}
        if len(counts) > 1:
            message = f"workers have {listed(sorted(counts))} EFA interfaces: a job over them runs at the smallest"
            yield self.finding("groups", message, "give all workers one instance type, or keep jobs inside one group")


class MixedAccelerators(OfflineRule):
    code = "EC2-005"
    level = "warning"
    checks = "Workers have one kind of accelerator and the same number of them."
    source = "https://github.com/aws/aws-parallelcluster (InstancesAcceleratorsValidator)"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        workers = [facts for _, group, facts in known_groups(spec) if group.role == "worker"]
        kinds = {f"{one.count} {one.name}" for facts in workers for one in facts.accelerators}
        if len(kinds) > 1:
            message = f"workers have {listed(sorted(kinds))}: one job cannot use them evenly"
            yield self.finding("groups", message, "keep jobs inside one group, or give all workers one instance type")


class MixedArchitectures(OfflineRule):
    code = "EC2-006"
    level = "warning"
    checks = "All groups have one processor architecture, since one image serves all."
    source = TYPES

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        kinds = {facts.architecture for *_, facts in known_groups(spec)}
        if len(kinds) > 1:
            message = f"groups are {listed(sorted(kinds))}: programs and container images need both"
            yield self.finding("groups", message, "take types of one architecture")


class ThreadsPerCore(OfflineRule):
    code = "EC2-007"
    checks = "threads_per_core is not above what the type has."
    source = CPU

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for path, group, facts in known_groups(spec):
            if group.threads_per_core > facts.threads_per_core:
                message = f"{group.threads_per_core}, but {group.ec2_type} has {facts.threads_per_core} thread a core"
                yield self.finding(f"{path}.threads_per_core", message, f"set {facts.threads_per_core}")


class NoAccelerators(OfflineRule):
    code = "EC2-008"
    level = "warning"
    checks = "Some worker has accelerators."
    source = TYPES

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        workers = [facts for _, group, facts in known_groups(spec) if group.role == "worker"]
        if workers and not any(facts.accelerators for facts in workers):
            yield self.finding(
                "groups", "no worker has a GPU or Trainium chip: training runs on CPUs", "take a p, g or trn type"
            )


class NoLocalDisk(OfflineRule):
    code = "EC2-009"
    level = "warning"
    checks = "Workers have local NVMe or a Lustre file system to stage checkpoints on, not only the root disk."
    source = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/InstanceStorage.html"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for path, group, facts in known_groups(spec):
            if group.role == "worker" and facts.accelerators and not facts.nvme_count and spec.storage.lustre is None:
                message = f"{group.ec2_type} has no local NVMe and there is no Lustre: checkpoints are staged on the root disk"
                yield self.finding(f"{path}.instance_type", message, "take a type with NVMe or add storage.lustre")


class Layout(OfflineRule):
    code = "EC2-010"
    checks = (
        "The planned interfaces are what the type's network cards take: all its EFA, never more on a card than fit."
    )
    source = EFA
    judgement = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for path, group, facts in known_groups(spec):
            layout = nics(facts, spec.network.nic_policy)
            efa = sum(nic.kind != "interface" for nic in layout)
            crowded = [card.index for card in facts.cards if sum(n.card == card.index for n in layout) > card.slots]
            if efa != facts.efa or crowded:
                message = f"{efa} of {facts.efa} EFA interfaces of {group.ec2_type} fit on its cards"
                message += f", cards {listed(crowded)} are overfull" if crowded else ""
                yield self.finding(f"{path}.instance_type", message, "renew the facts: infra/catalog/refresh.py")


class NoLinux(OfflineRule):
    code = "EC2-012"
    checks = "The type runs the Linux images that there are, x86_64 or arm64."
    source = TYPES
    essential = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for path, group, facts in known_groups(spec):
            if facts.architecture not in CANONICAL:
                message = f"{group.ec2_type} is {facts.architecture}; allowed: {listed(CANONICAL)}"
                yield self.finding(f"{path}.instance_type", message, "take another type")


class RootVolume(OfflineRule):
    code = "EC2-011"
    level = "warning"
    checks = "A node that stages on its root disk has room for twice its accelerators' memory there."
    source = "infra/plan/nodes/clients.py"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for path, group, facts in known_groups(spec):
            if group.role != "worker" or facts.nvme_count or spec.storage.lustre:
                continue
            held = sum(one.count * one.memory_mib for one in facts.accelerators) // 1024
            if group.root_volume_gib < 2 * held:
                message = (
                    f"{group.root_volume_gib} GiB for a node with {held} GiB of accelerator memory and no other disk"
                )
                yield self.finding(f"{path}.root_volume_gib", message, f"set {2 * held} or more")


RULES = (
    UnknownType(),
    WithoutEfa(),
    MixedEfa(),
    MixedInterfaces(),
    MixedAccelerators(),
    MixedArchitectures(),
    ThreadsPerCore(),
    NoAccelerators(),
    NoLocalDisk(),
    Layout(),
    RootVolume(),
    NoLinux(),
)
