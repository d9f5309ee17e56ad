"""The form of the facts that `collect` returns, as types; nothing at run time depends on it.

A fact that could not be read is None. A section whose collector failed is empty, so sections of plain values are not total.
"""

from __future__ import annotations

from typing import TypedDict


class AgentFacts(TypedDict):
    """A tune adds the agent's path and SHA-256, and the SHA-256 of the installed one."""

    python: str
    seconds: float


class HostFacts(TypedDict, total=False):
    name: str | None
    boot_id: str | None
    pid1_start: int | None
    """It counts clock ticks from the boot to the start of process 1."""


class OsFacts(TypedDict, total=False):
    id: str | None
    version: str | None
    family: str
    """It is debian, rhel or other."""


class KernelFacts(TypedDict, total=False):
    release: str | None
    arch: str
    cmdline: dict[str, str]
    thp: str | None


class CpuFacts(TypedDict, total=False):
    count: int | None
    """Only threads that are online count."""
    vendor: str | None
    model: str | None


class MemoryFacts(TypedDict, total=False):
    gib: float | None
    hugepages_total: int | None
    hugepages_free: int | None
    hugepage_kib: int | None
    shm_gib: float | None


class DiskSpace(TypedDict):
    free_bytes: int
    free_inodes: int | None
    read_only: bool


class InstanceFacts(TypedDict):
    type: str | None
    id: str | None
    life_cycle: str | None
    zone_id: str | None
    source: str | None
    """The type comes from here: imds, dmi, hyperpod or node.json."""


class Notice(TypedDict):
    kind: str
    """It is spot, lifecycle, maintenance or rebalance."""
    action: str
    at: str | None
    in_hours: float | None
    """Only maintenance has the hours until `at`."""


class MetadataFacts(TypedDict):
    """On machines that are not EC2's it is not read: `reachable` is False and `error` None."""

    reachable: bool
    notice: Notice | None
    error: str | None


class SysctlFile(TypedDict):
    path: str
    link: str | None
    """A linked file leads here, such as /etc/sysctl.conf."""
    values: dict[str, str]


class ModprobeFile(TypedDict):
    path: str
    options: dict[str, dict[str, str]]


class ModuleFacts(TypedDict):
    supported: bool | None
    loaded: list[str]
    """Modules that are built into the kernel count too."""
    parameters: dict[str, str]
    files: list[ModprobeFile]
    aws_lustre_block: bool | None
    """AWS's own block of Lustre options is in one of the files."""


class LimitFile(TypedDict):
    path: str
    lines: list[list[str]]
    """A line is domain, type, item and value."""


class LimitFacts(TypedDict):
    slurmd: dict[str, list[str]] | None
    """memlock, nofile and stack each have a soft and a hard limit."""
    files: list[LimitFile]


class BlockFacts(TypedDict):
    name: str
    path: str
    model: str | None
    bytes: int
    instance_store: bool
    scheduler: str | None
    schedulers: list[str]
    fstype: str | None
    holders: list[str]
    partitions: list[str]
    mountpoints: list[str]
    """Mount points of arrays and logical volumes on the disk count too."""
    blank: bool | None
    """A blank disk is unused and holds nothing but zeros in its first and last MiB; None where it cannot be read."""
    root: bool


class ArrayFacts(TypedDict):
    name: str
    path: str
    level: str | None
    members: list[str]
    fstype: str | None
    holders: list[str]
    mountpoints: list[str]
    blank: bool | None


class MountFacts(TypedDict):
    source: str
    target: str
    fstype: str
    options: list[str]


class LustreMount(TypedDict):
    target: str
    source: str
    options: list[str]


class LnetInterface(TypedDict):
    nid: str | None
    interface: str | None
    status: str | None
    send: int | None
    recv: int | None
    drop: int | None


class LnetNetwork(TypedDict):
    net: str
    nids: list[LnetInterface]


class LnetPeer(TypedDict):
    nids: list[str]


class StripeComponent(TypedDict):
    start: int | None
    end: int | None
    count: int | None
    size: int | None
    offset: int | None
    pattern: str | None
    pool: str | None


class StripeLayout(TypedDict):
    """Sizes are bytes. The values beside `components` are the last component's."""

    count: int
    size: int | None
    offset: int | None
    pattern: str | None
    pool: str | None
    components: list[StripeComponent]


class StripeFacts(TypedDict):
    exists: bool | None
    empty: bool | None
    layout: StripeLayout | None
    error: str | None


class TargetFacts(TypedDict):
    """Object storage targets are counted; `silent` holds a line for each target that does not answer, metadata targets too."""

    count: int
    fullest_percent: int | None
    inactive: int
    read_only: int
    silent: list[str]


class LustreFacts(TypedDict):
    client: str | None
    """It is the version of the loaded client."""
    loaded: bool | None
    lctl: bool | None
    lfs: bool | None
    lnetctl: bool | None
    mounts: list[LustreMount] | None
    parameters: dict[str, dict[str, str]]
    """Values stand by name below the pattern that matched them."""
    nets: list[LnetNetwork] | None
    aws_configured: bool | None
    peers: list[LnetPeer] | None
    """It is None where nothing is mounted."""
    preferred: list[str] | None
    """A selection policy puts these networks first."""
    interface: str | None
    """It is the interface of the node's own address, else of the default route; None without lnetctl."""
    stripes: dict[str, StripeFacts]
    """Paths that no Lustre mount holds are left out."""
    osts: TargetFacts | None


class EfaDevice(TypedDict):
    name: str
    driver: str | None
    state: str | None
    counters: dict[str, int | None]


class EfaFacts(TypedDict):
    devices: list[EfaDevice] | None
    pci: int | None
    """It is the number of adapters on the bus."""
    domains: list[str] | None
    installer: str | None
    libfabric: str | None
    plugins: list[str] | None
    """There is one path for each folder with a plugin."""


class GpuClocks(TypedDict):
    """Clocks are in MHz."""

    graphics: int | None
    memory: int | None


class GpuDevice(TypedDict):
    index: int | None
    name: str | None
    uuid: str | None
    pci: str | None
    persistence: bool | None
    ecc_volatile_uncorrected: int | None
    remap_pending: bool | None
    remap_failed: bool | None
    clocks: GpuClocks
    applications: GpuClocks
    max: GpuClocks
    throttle: list[str] | None
    """Names are those of gpu.THROTTLES."""
    memory_mib: int | None
    fabric_state: str | None
    fabric_status: str | None


class FabricManager(TypedDict):
    version: str | None


class NvLinks(TypedDict):
    up: int
    errors: int


class Xid(TypedDict):
    xid: int
    pci: str
    text: str
    switch: bool


class GpuFacts(TypedDict):
    present: bool | None
    driver: str | None
    devices: list[GpuDevice] | None
    fabric_manager: FabricManager | None
    nvlinks: dict[str, NvLinks] | None
    """Keys are the GPUs' indices as text."""
    xids: list[Xid] | None


class HpuDevice(TypedDict):
    index: int | None
    module: int | None
    pci: str | None
    name: str | None
    memory_mib: int | None
    used_mib: int | None
    celsius: int | None


class HpuFacts(TypedDict):
    present: bool | None
    driver: str | None
    devices: list[HpuDevice] | None


class UnitFacts(TypedDict):
    load: str
    """It is loaded, not-found or another LoadState of systemd."""
    active: str | None
    enabled: str | None
    result: str | None


class PackageFacts(TypedDict):
    manager: str | None
    held: list[str] | None
    installed: dict[str, str] | None


class TimeFacts(TypedDict):
    synchronised: bool | None
    source: str | None
    offset_s: float | None
    """It is positive where the clock is behind."""
    leap: str | None
    folders: list[str] | None
    """chrony reads sources from these folders."""


class JobFacts(TypedDict):
    kind: str
    """It is slurm, gpu, hpu or trainer."""
    id: str


class Variable(TypedDict):
    where: str
    """It is a file, or text such as `slurm job 123`."""
    line: int | None
    name: str
    value: str


class FileFacts(TypedDict):
    content: str
    mode: str
    """It is octal, such as 0644."""


class SlurmNode(TypedDict):
    state: str | None
    gres: str | None
    version: str | None
    reason: str | None


class SlurmAccounting(TypedDict):
    error: str | None
    """It says why slurmdbd does not answer."""
    registered: bool | None


class SlurmFacts(TypedDict):
    duty: str
    error: str | None
    """It says why the controller does not answer."""
    node: SlurmNode | None
    """It is this node as the controller has it, where it runs jobs and the controller answers."""
    gres: str
    """It is what slurmd was started with; empty without GPUs."""
    volume: str | None
    mounted: bool
    """It is true where something is mounted where the controller keeps its state."""
    accounting: SlurmAccounting | None
    """It is None but on a controller with a slurmdbd."""


class FactError(TypedDict):
    where: str
    """It is the fact's path."""
    why: str


class NodeFacts(TypedDict):
    version: int
    agent: AgentFacts
    host: HostFacts
    boot_outcome: str | None
    """It is the last line of the first boot's script, `ready …` or `failed STEP`; None where none ran."""
    os: OsFacts
    kernel: KernelFacts
    cpu: CpuFacts
    memory: MemoryFacts
    instance: InstanceFacts
    group: str | None
    """It is the node's group of the cluster."""
    metadata: MetadataFacts
    sysctl: dict[str, str]
    """It holds the wanted keys that exist, with white space as single spaces."""
    sysctl_files: list[SysctlFile]
    """Files are in the order of boot, in which the last wins."""
    modules: ModuleFacts
    limits: LimitFacts
    blocks: list[BlockFacts] | None
    arrays: list[ArrayFacts] | None
    mounts: list[MountFacts] | None
    lustre: LustreFacts
    efa: EfaFacts
    gpu: GpuFacts
    hpu: HpuFacts
    init: str | None
    """It is systemd or other."""
    services: dict[str, UnitFacts] | None
    """It is empty where there is no systemd."""
    packages: PackageFacts
    time: TimeFacts
    jobs: list[JobFacts] | None
    """It is None where it is not known whether jobs run."""
    slurm: SlurmFacts | None
    """It is None where the stack has no Slurm."""
    environment: list[Variable]
    files: dict[str, FileFacts | None]
    """It holds `owned.PATHS`, `owned.NOTES` and the wanted mount units; None for a file that is not there."""
    s3_units: dict[str, str]
    """The mount point of a bucket stands by its unit's name."""
    disk: dict[str, DiskSpace | None]
    """Paths are / and /etc."""
    errors: list[FactError]
