"""Actions that moto lacks and the unmodified AWS provider needs; each module completes one service.

moto looks a service up by the name of a `moto.<service>.models` module and a line in
`moto.backend_index.backend_url_patterns`; a missing action of a known service is a method set on its `*Response` class.
This depends on moto's internals, hence the pin `moto==5.2.*`. Faults in actions that it has are mended in `patches` beside this
package. A module is here because a stack, the rehearsal or preflight calls it. Each lists what it does not emulate in its
`LEFT_OUT`, and nowhere else; `left_out` collects these lines for the output of the server.
"""

from __future__ import annotations

import importlib
from types import ModuleType

MODULES = (
    "patches.iam",
    "additions.ec2.images",
    "patches.vpc",
    "additions.ec2.interfaces",
    "additions.ec2.placement",
    "additions.ec2.capacity",
    "additions.ec2.launches",
    "additions.ec2.launch_templates",
    "additions.autoscaling.groups",
    "additions.amp",
    "additions.budgets",
    "patches.s3",
    "patches.ecr",
    "additions.efs",
    "patches.sqs",
    "patches.eventbridge",
    "additions.autoscaling.lifecycle",
    "additions.fsx.file_systems",
    "additions.fsx.associations",
    "additions.hyperpod.clusters",
    "additions.hyperpod.nodes",
    "additions.hyperpod.cloudcontrol",
    "additions.eks.clusters",
    "additions.eks.access",
    "additions.eks.addons",
)
"""Modules with an `install()`, in the order in which they are installed."""
SHARED_MODULES = (
    "additions.serving",
    "additions.lookups",
    "additions.hyperpod.resource_types",
    "additions.hyperpod.events",
)
"""Modules that several additions share; they install nothing themselves."""


def install() -> None:
    """Install all additions and patches in this process, before moto's server starts."""
    for module in _modules(MODULES):
        module.install()


def left_out() -> tuple[str, ...]:
    """Return the limits of the additions and patches, one line for each."""
    return tuple(str(module.LEFT_OUT) for module in _modules((*MODULES, *SHARED_MODULES)))


def _modules(names: tuple[str, ...]) -> tuple[ModuleType, ...]:
    # Import by name: the modules import this package, so the package cannot import them while it loads.
    return tuple(importlib.import_module(f"infra.local.{name}") for name in names)
