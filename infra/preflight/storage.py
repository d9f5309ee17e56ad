"""FSX: the file systems' sizes, rates and mounts. The arithmetic is `infra.plan.storage.lustre`'s."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from infra.catalog.instances import instance
from infra.config import ClusterSpec
from infra.plan.nodes.clients import EFA_CONNECTIONS, WITHOUT_LUSTRE_EFA, lustre_interfaces
from infra.plan.place import host
from infra.plan.storage import home
from infra.plan.storage.associations import nested
from infra.plan.storage.lustre import API, LUSTRE_GUIDE, Violation, efa_wanted, violations
from infra.preflight.finding import Finding
from infra.preflight.rule import Context, OfflineRule, known_groups

SCRATCH = "/opt/dlami/nvme"
"""Where the deep-learning AMIs and HyperPod's mount the local NVMe
(https://docs.aws.amazon.com/dlami/latest/devguide/important-changes.html)."""


def _violations(spec: ClusterSpec) -> tuple[Violation, ...]:
    wish = spec.storage.lustre
    return violations(wish, efa_wanted(spec)) if wish else ()


def _by_efa(spec: ClusterSpec) -> list[Violation]:
    """What only EFA forbids."""
    wish = spec.storage.lustre
    without = violations(wish, False) if wish else ()
    return [one for one in _violations(spec) if one not in without]


def _beside_existing(spec: ClusterSpec) -> list[Violation]:
    """What is asked of a file system that is only used."""
    if spec.storage.lustre is None or spec.storage.lustre.existing is None:
        return []
    return [one for one in _violations(spec) if one.path != "storage.lustre.mount_path"]


class _LustreRule(OfflineRule):
    """Shows what the planner says about some keys of storage.lustre."""

    keys: tuple[str, ...]

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        shown_elsewhere = {*_by_efa(spec), *_beside_existing(spec)}
        for one in _violations(spec):
            if one.path.removeprefix("storage.lustre.") in self.keys and one not in shown_elsewhere:
                yield self.finding(one.path, one.message, one.fix, source=one.source)


class Capacity(_LustreRule):
    code = "FSX-001"
    checks = "An exact Lustre capacity is one that AWS sells: 1200 GiB or a multiple of 2400."
    source = f"{API}/API_CreateFileSystem.html"
    keys = ("capacity_gib", "capacity_tib")


class EfaSize(OfflineRule):
    code = "FSX-002"
    checks = "An EFA-enabled Lustre has a capacity in EFA's own, larger steps."
    source = f"{LUSTRE_GUIDE}/increase-storage-capacity.html"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for one in _by_efa(spec):
            yield self.finding(one.path, one.message, one.fix, source=one.source)


class Throughput(_LustreRule):
    code = "FSX-003"
    checks = "Lustre throughput is one that the storage type has."
    source = f"{API}/API_CreateFileSystemLustreConfiguration.html"
    keys = ("per_tib_mb_s", "throughput_gb_s")


class MetadataIops(_LustreRule):
    code = "FSX-004"
    checks = "metadata_iops is on the ladder of the storage type."
    source = f"{API}/API_CreateFileSystemLustreMetadataConfiguration.html"
    keys = ("metadata_iops",)


class ReadCache(_LustreRule):
    code = "FSX-005"
    checks = "The read cache is Intelligent-Tiering's, and of a size that goes with the throughput."
    source = f"{API}/API_LustreReadCacheConfiguration.html"
    keys = ("read_cache_gib",)


class TieredAssociations(_LustreRule):
    code = "FSX-006"
    checks = "Intelligent-Tiering has no data repository associations."
    source = f"{API}/API_DataRepositoryAssociation.html"
    keys = ("associations",)


class Backups(_LustreRule):
    code = "FSX-007"
    checks = "A Lustre file system with associations has no backups."
    source = f"{LUSTRE_GUIDE}/using-backups-fsx.html"
    keys = ("backup_days",)


class MountPath(_LustreRule):
    code = "FSX-008"
    checks = "Lustre is not mounted over the operating system."
    source = f"{LUSTRE_GUIDE}/mount-fs-auto-mount-onreboot.html"
    judgement = True
    keys = ("mount_path",)


class HomePath(OfflineRule):
    code = "FSX-009"
    checks = "Homes are mounted at /home or outside the operating system's folders."
    source = home.SOURCE
    judgement = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for one in _home_alone(spec):
            if one.path == "storage.home.mount_path":
                yield self.finding(one.path, one.message, one.fix, source=one.source)


class Mounts(OfflineRule):
    code = "FSX-010"
    checks = "No mount lies inside another one, nor over the local NVMe."
    source = "https://github.com/aws/aws-parallelcluster (OverlappingMountDirValidator)"
    judgement = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        alone = _home_alone(spec)
        for one in home.violations(spec.storage):
            if one not in alone:
                yield self.finding(one.path, one.message, one.fix)
        for key, path in _mounts(spec):
            if nested(path, SCRATCH):
                yield self.finding(
                    key, f"{path} and {SCRATCH}, the local NVMe, lie inside one another", "mount it elsewhere"
                )


class HomeThroughput(OfflineRule):
    code = "FSX-016"
    checks = "The home file system's throughput is on OpenZFS's ladder."
    source = home.SOURCE

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for one in _home_alone(spec):
            if one.path == "storage.home.throughput_mb_s":
                yield self.finding(one.path, one.message, one.fix, source=one.source)


class EfaWithoutNodes(OfflineRule):
    code = "FSX-011"
    checks = "An EFA-enabled Lustre has nodes with EFA."
    source = f"{LUSTRE_GUIDE}/efa-file-systems.html"
    judgement = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        wish = spec.storage.lustre
        types = [instance(group.ec2_type) for group in spec.workers]
        if wish and (wish.efa or (wish.existing and wish.existing.efa)) and not any(one and one.efa for one in types):
            key = "storage.lustre.existing.efa" if wish.existing else "storage.lustre.efa"
            yield self.finding(key, "no worker's type has EFA", "set efa: false, or take a type with EFA")


class EfaUnused(OfflineRule):
    code = "FSX-017"
    level = "warning"
    checks = (
        "Nodes with EFA reach an EFA-enabled Lustre over it: of each kind, and no more nodes than it has connections."
    )
    source = f"{LUSTRE_GUIDE}/configure-efa-clients.html"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if not efa_wanted(spec):
            return
        for path, group, facts in known_groups(spec):
            elsewhere = spec.zone_of(group) != spec.zone_id  # NET-017 says so
            if elsewhere or not facts.efa or lustre_interfaces(spec, group):
                continue
            if facts.name.startswith(WITHOUT_LUSTRE_EFA):
                yield self.finding(f"{path}.instance_type", f"FSx takes no EFA from {facts.name}: TCP it is", NO_EFA)
            else:
                message = (
                    f"Lustre takes {EFA_CONNECTIONS} EFA interfaces of clients, fewer than it has nodes: TCP it is"
                )
                yield self.finding(f"{path}.count", message, f"lower counts, or {NO_EFA}")


NO_EFA = "set storage.lustre.efa: false where the file system is not made yet"


class WithExisting(OfflineRule):
    code = "FSX-012"
    checks = "Nothing else is asked of an existing Lustre: it is used as it is."
    source = f"{LUSTRE_GUIDE}/getting-started.html"
    judgement = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for one in _beside_existing(spec):
            yield self.finding(one.path, one.message, one.fix, source=one.source)


class ExistingName(OfflineRule):
    code = "FSX-013"
    checks = "The DNS name of an existing Lustre is that of its id and of this region."
    source = f"{LUSTRE_GUIDE}/mounting-ec2-instance.html"
    judgement = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        existing = spec.storage.lustre.existing if spec.storage.lustre else None
        if existing is None:
            return
        found = host(existing.dns_name, "fsx")
        here = "storage.lustre.existing.dns_name"
        if not found:
            message = f"{existing.dns_name} is no name of a file system"
            yield self.finding(
                here, message, f"write {existing.id}.fsx.{context.place.region}.{context.place.dns_suffix}"
            )
        elif found.name != existing.id:
            yield self.finding(here, f"{found.name} is not id = {existing.id}", "make them the same file system")
        elif context.region and found.region != context.region:
            message = f"the file system is in {found.region}, the cluster in {context.region}"
            yield self.finding(here, message, "use one of the cluster's region and zone")


class ExistingInNewNetwork(OfflineRule):
    code = "FSX-014"
    level = "warning"
    checks = "An existing Lustre is reached from an existing network: a new VPC has no way to it."
    source = f"{LUSTRE_GUIDE}/mounting-on-premises.html"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if spec.storage.lustre and spec.storage.lustre.existing and spec.network.existing is None:
            message = "the file system lies in another VPC than the one that is made for the cluster"
            yield self.finding("storage.lustre.existing", message, "set network.existing to the file system's own VPC")


class NothingShared(OfflineRule):
    code = "FSX-015"
    level = "warning"
    checks = "Nodes of a Slurm cluster share a file system, where job scripts and logs lie."
    source = f"{LUSTRE_GUIDE}/what-is.html"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        shared = spec.storage.lustre or spec.storage.home
        if spec.backend == "hyperpod-slurm" and not shared:
            message = "Slurm's nodes share no folder: job scripts and logs are on each node's own disk"
            yield self.finding("storage", message, "add storage.lustre or storage.home")


def _home_alone(spec: ClusterSpec) -> tuple[Violation, ...]:
    """What is wrong with the home file system whatever else is mounted."""
    return home.violations(spec.storage.model_copy(update={"lustre": None}))


def _mounts(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    if spec.storage.lustre:
        yield "storage.lustre.mount_path", spec.storage.lustre.mount_path
    if spec.storage.home:
        yield "storage.home.mount_path", spec.storage.home.mount_path


RULES = (
    Capacity(),
    EfaSize(),
    Throughput(),
    MetadataIops(),
    ReadCache(),
    TieredAssociations(),
    Backups(),
    MountPath(),
    HomePath(),
    Mounts(),
    EfaWithoutNodes(),
    EfaUnused(),
    WithExisting(),
    ExistingName(),
    ExistingInNewNetwork(),
    NothingShared(),
    HomeThroughput(),
)
