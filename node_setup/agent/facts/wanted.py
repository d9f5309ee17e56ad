"""The facts that the catalog and the node document need; only those are read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    """These keys are read, each as its own tool names it.

    `sysctls` are dotted keys; `module_parameters` are `module.parameter`; `lustre_parameters` are patterns of `lctl get_param`;
    `stripe_paths` are absolute directories on Lustre; `services` are unit names with their suffix; `packages` are names, a
    trailing `*` for all that begin so; `mount_units` are paths of unit files of ours.
    """

    sysctls: tuple[str, ...] = ()
    module_parameters: tuple[str, ...] = ()
    lustre_parameters: tuple[str, ...] = ()
    stripe_paths: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    mount_units: tuple[str, ...] = ()
