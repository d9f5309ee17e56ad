"""FSX: the file systems' sizes, rates and mounts. The arithmetic is `infra.plan.storage.lustre`'s."""

from __future__ import annotations

from collections.abc import Iterator

from infra.catalog.efs import GUIDE
from infra.catalog.fsx import API, EFA_CONNECTIONS, LUSTRE_GUIDE
from infra.config import ClusterSpec, ExistingHome, ExistingLustre
from infra.finding import Problems, finding
from infra.plan.nodes.clients import lustre_interfaces
from infra.plan.place import host
from infra.plan.storage import home
from infra.plan.storage.associations import nested
from infra.plan.storage.lustre import efa_wanted, takes_lustre_efa
from infra.plan.storage.lustre_checks import violations
from infra.preflight.rule import Context, Family, known_groups

SCRATCH = "/opt/dlami/nvme"
"""Where the deep-learning AMIs and HyperPod's mount the local NVMe
(https://docs.aws.amazon.com/dlami/latest/devguide/important-changes.html)."""
RULES = Family()


@RULES.add(
    "FSX-001",
    "An exact Lustre capacity is one that AWS sells: 1200 GiB or a multiple of 2400.",
    f"{API}/API_CreateFileSystem.html",
)
@RULES.add(
    "FSX-002",
    "An EFA-enabled Lustre has a capacity in EFA's own, larger steps.",
    f"{LUSTRE_GUIDE}/increase-storage-capacity.html",
)
@RULES.add(
    "FSX-003",
    "Lustre throughput is one that the storage type has.",
    f"{API}/API_CreateFileSystemLustreConfiguration.html",
)
@RULES.add(
    "FSX-004",
    "metadata_iops is on the ladder of the storage type.",
    f"{API}/API_CreateFileSystemLustreMetadataConfiguration.html",
)
@RULES.add(
    "FSX-005",
    "The read cache is Intelligent-Tiering's, and of a size that goes with the throughput.",
    f"{API}/API_LustreReadCacheConfiguration.html",
)
@RULES.add(
    "FSX-006", "Intelligent-Tiering has no data repository associations.", f"{API}/API_DataRepositoryAssociation.html"
)
@RULES.add(
    "FSX-007", "A Lustre file system with associations has no backups.", f"{LUSTRE_GUIDE}/using-backups-fsx.html"
)
@RULES.add(
    "FSX-008",
    "Lustre is not mounted over the operating system.",
    f"{LUSTRE_GUIDE}/mount-fs-auto-mount-onreboot.html",
    judgement=True,
)
@RULES.add(
    "FSX-012",
    "No key of a new Lustre stands beside an existing one: that is used as it is.",
    f"{LUSTRE_GUIDE}/getting-started.html",
    judgement=True,
)
def lustre(spec: ClusterSpec, context: Context) -> Problems:
    config = spec.storage.lustre
    return violations(config, efa_wanted(spec)) if config else ()


@RULES.add(
    "FSX-009", "Homes are mounted at /home or outside the operating system's folders.", home.SOURCE, judgement=True
)
@RULES.add(
    "FSX-010",
    "Mounts do not overlap, nor hide the local NVMe.",
    "https://github.com/aws/aws-parallelcluster (OverlappingMountDirValidator)",
    judgement=True,
)
@RULES.add("FSX-016", "The home file system's throughput is on OpenZFS's ladder.", home.SOURCE)
@RULES.add("FSX-018", "Keys of the home file system are those of its type, and of a new one.", GUIDE, judgement=True)
def home_folders(spec: ClusterSpec, context: Context) -> Problems:
    yield from home.violations(spec.storage)
    for key, path in _mounts(spec):
        if nested(path, SCRATCH):
            why = f"{path} and {SCRATCH}, the local NVMe, lie inside one another"
            yield finding(key, why, "mount it elsewhere", code="FSX-010")


@RULES.add(
    "FSX-011", "An EFA-enabled Lustre has nodes with EFA.", f"{LUSTRE_GUIDE}/efa-file-systems.html", judgement=True
)
def efa_without_nodes(spec: ClusterSpec, context: Context) -> Problems:
    config = spec.storage.lustre
    types = [spec.node_of(group) for group in spec.workers]
    if (
        config
        and (config.efa or (config.existing and config.existing.efa))
        and not any(item and item.efa for item in types)
    ):
        key = "storage.lustre.existing.efa" if config.existing else "storage.lustre.efa"
        yield finding(key, "no worker has EFA", "set efa: false, or take a type with EFA")


@RULES.add(
    "FSX-017",
    "Nodes with EFA reach an EFA-enabled Lustre over it: of each kind, and no more nodes than it has connections.",
    f"{LUSTRE_GUIDE}/configure-efa-clients.html",
    level="warning",
)
def efa_unused(spec: ClusterSpec, context: Context) -> Problems:
    if not efa_wanted(spec):
        return
    for path, group, facts in known_groups(spec):
        elsewhere = spec.zone_of(group) != spec.zone_id  # NET-017 says so
        if elsewhere or not facts.efa or lustre_interfaces(spec, group):
            continue
        if not takes_lustre_efa(facts):
            yield finding(f"{path}.instance_type", f"FSx takes no EFA from {facts.name}: TCP it is", NO_EFA)
        else:
            message = f"Lustre takes {EFA_CONNECTIONS} EFA interfaces of clients, fewer than it has nodes: TCP it is"
            yield finding(f"{path}.count", message, f"lower counts, or {NO_EFA}")


NO_EFA = "set storage.lustre.efa: false where the file system is not made yet"


@RULES.add(
    "FSX-013",
    "The DNS name of an existing file system is that of its id and of this region.",
    f"{LUSTRE_GUIDE}/mounting-ec2-instance.html",
    judgement=True,
)
def existing_name(spec: ClusterSpec, context: Context) -> Problems:
    for path, service, existing in _existing(spec):
        named = host(existing.dns_name, service)
        here, of = f"{path}.dns_name", {"fsx": "FSx", "efs": "EFS"}[service]
        if not named:
            message = f"{existing.dns_name} is not the name of an {of} file system"
            fix = f"write {existing.id}.{service}.{context.place.region}.{context.place.dns_suffix}"
            yield finding(here, message, fix)
        elif named.name != existing.id:
            yield finding(here, f"{named.name} is not id = {existing.id}", "make them the same file system")
        elif context.region and named.region != context.region:
            message = f"the file system is in {named.region}, the cluster in {context.region}"
            yield finding(here, message, "use one of the cluster's region and zone")


@RULES.add(
    "FSX-014",
    "An existing file system is reached from an existing network: a new VPC has no way to it.",
    f"{LUSTRE_GUIDE}/mounting-on-premises.html",
    level="warning",
)
def existing_in_new_network(spec: ClusterSpec, context: Context) -> Problems:
    for path, _, _ in _existing(spec) if spec.network.existing is None else ():
        message = "the file system lies in another VPC than the one that is made for the cluster"
        yield finding(path, message, "set network.existing to the file system's own VPC")


@RULES.add(
    "FSX-015",
    "Nodes of a Slurm cluster share a file system, where job scripts and logs lie.",
    f"{LUSTRE_GUIDE}/what-is.html",
    level="warning",
)
def nothing_shared(spec: ClusterSpec, context: Context) -> Problems:
    shared = spec.storage.lustre or spec.storage.home
    if spec.backend == "hyperpod-slurm" and not shared:
        message = "Slurm's nodes have no shared folder: job scripts and logs are on each node's own disk"
        yield finding("storage", message, "add storage.lustre or storage.home")


def _existing(spec: ClusterSpec) -> Iterator[tuple[str, str, ExistingLustre | ExistingHome]]:
    """Yield existing file systems with their path, and the service that names them."""
    lustre, homes = spec.storage.lustre, spec.storage.home
    if lustre and lustre.existing:
        yield "storage.lustre.existing", "fsx", lustre.existing
    if homes and homes.existing:
        yield "storage.home.existing", "efs" if homes.type == "efs" else "fsx", homes.existing


def _mounts(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    if spec.storage.lustre:
        yield "storage.lustre.mount_path", spec.storage.lustre.mount_path
    if spec.storage.home:
        yield "storage.home.mount_path", spec.storage.home.mount_path
