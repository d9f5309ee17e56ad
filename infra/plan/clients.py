"""How nodes use the file system: layouts of its folders, and the client settings that AWS documents.

Settings that AWS does not give for the machine at hand are left at Lustre's default; none is a matter of taste.
`node_setup` applies them and reads them back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infra.catalog.instances import Instance, instance
from infra.cluster import Stripe
from infra.config import ClusterSpec, Group
from infra.plan.storage import LUSTRE_GUIDE

MEMORY_MIB = 64 * 1024
CPUS = 64
TIPS = f"{LUSTRE_GUIDE}/performance-tips.html"
"""Settings for clients with more than 64 GiB of memory, and for those with more than 64 CPUs."""


@dataclass(frozen=True)
class Client:
    """What the conditions look at; `cpus` counts the threads that are on."""

    memory_mib: int
    cpus: int

    @property
    def large(self) -> bool:
        return self.memory_mib > MEMORY_MIB

    @property
    def wide(self) -> bool:
        return self.cpus > CPUS


@dataclass(frozen=True)
class Setting:
    """`key` of `lctl set_param`, or a kernel module's name with `value` as its option."""

    key: str
    value: Callable[[Client], str]
    applies: Callable[[Client], bool]
    why: str
    source: str = TIPS


def _fixed(value: str) -> Callable[[Client], str]:
    return lambda _: value


def _large(client: Client) -> bool:
    return client.large


def _wide(client: Client) -> bool:
    return client.wide


PARAMETERS = (
    Setting("ldlm.namespaces.*.lru_max_age", _fixed("600000"), _large, "over 64 GiB: locks idle for 10 minutes go"),
    Setting(
        "ldlm.namespaces.*.lru_size", lambda client: str(100 * client.cpus), _large, "over 64 GiB: 100 locks a CPU"
    ),
    Setting(
        "osc.*OST*.max_rpcs_in_flight", _fixed("32"), _wide, "over 64 CPUs: requests in flight to one storage target"
    ),
    Setting("mdc.*.max_rpcs_in_flight", _fixed("64"), _wide, "over 64 CPUs: requests in flight to a metadata server"),
    Setting("mdc.*.max_mod_rpcs_in_flight", _fixed("50"), _wide, "over 64 CPUs: those of them that change something"),
)
"""In the order to apply them in: the last must stay below the one before it."""

MODULES = (
    Setting("ptlrpc", _fixed("ptlrpcd_per_cpt_max=32"), _wide, "over 64 CPUs: threads that serve requests in flight"),
    Setting("ksocklnd", _fixed("credits=2560"), _wide, "over 64 CPUs: messages in flight over TCP"),
)


def client(kind: Instance, threads_per_core: int = 2) -> Client:
    """The client that a node of this type is, with `threads_per_core` of its threads on."""
    cores = kind.vcpus // kind.threads_per_core
    return Client(kind.memory_mib, cores * min(threads_per_core, kind.threads_per_core))


def client_parameters(kind: Instance, threads_per_core: int = 2) -> dict[str, str]:
    """What to `lctl set_param` after the mount, in order; lost at each reboot and remount."""
    return _chosen(PARAMETERS, client(kind, threads_per_core))


def client_modules(kind: Instance, threads_per_core: int = 2) -> dict[str, str]:
    """Options of kernel modules, to be there before the modules are loaded.

    They hold with EFA as well: its requests go through ptlrpc, and TCP stays beside it for what EFA does not reach.
    """
    return _chosen(MODULES, client(kind, threads_per_core))


def client_settings(spec: ClusterSpec, group: Group) -> tuple[dict[str, str], dict[str, str]]:
    """Module options and parameters of the Lustre clients on a group's nodes; empty for a type that nobody knows."""
    kind = instance(group.ec2_type)
    if kind is None or spec.storage.lustre is None:
        return {}, {}
    threads = group.threads_per_core
    return client_modules(kind, threads), client_parameters(kind, threads)


def stripes(spec: ClusterSpec) -> tuple[Stripe, ...]:
    """Layouts of folders, to be set while they are empty; empty without a file system.

    The file system's own default, which widens with a file's size, stays for all other folders. Imported files follow
    the association's chunk size, whatever their folder says. -1 is all storage targets: how many there are, only `lfs df`
    knows. Large files gain from many targets; one below 10 MB on many pays a round trip for each
    (https://docs.aws.amazon.com/fsx/latest/LustreGuide/performance.html#striping-data).
    """
    lustre = spec.storage.lustre
    if lustre is None:
        return ()
    root = lustre.mount_path
    progressive = "-E 100M -c 1 -E 10G -c 8 -E -1 -c -1 -S 16M"
    wide = "-c -1 -S 16M"
    return (
        Stripe(
            path=f"{root}/checkpoints",
            options=tuple(progressive.split()),
            why="shards over all targets, the small files beside them on one",
        ),
        Stripe(path=f"{root}/containers", options=tuple(wide.split()), why="one large image that every node reads"),
        Stripe(path=f"{root}/logs", options=("-c", "1"), why="small files that grow line by line"),
    )


def _chosen(settings: tuple[Setting, ...], client: Client) -> dict[str, str]:
    return {setting.key: setting.value(client) for setting in settings if setting.applies(client)}
