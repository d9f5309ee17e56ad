"""Additions to moto that the unmodified AWS provider needs; each module completes one service.

moto looks a service up by the name of a `moto.<service>.models` module and a line in
`moto.backend_index.backend_url_patterns`; a missing action of a known service is a method set on its `*Response` class.
This depends on moto's internals, hence the pin `moto==5.2.*`. Each module lists what it does not emulate in its `LEFT_OUT`,
and nowhere else; `left_out` collects these lines for the output of the server.
"""

from __future__ import annotations

import importlib
from types import ModuleType

MODULES = (
    "iam",
    "ec2.images",
    "ec2.vpc",
    "ec2.interfaces",
    "ec2.placement",
    "ec2.capacity",
    "ec2.launches",
    "ec2.launch_templates",
    "autoscaling.groups",
    "amp",
    "budgets",
    "s3",
    "ecr",
    "efs",
    "sqs",
    "eventbridge",
    "autoscaling.lifecycle",
    "fsx.file_systems",
    "fsx.associations",
    "hyperpod.clusters",
    "hyperpod.nodes",
    "hyperpod.cloudcontrol",
    "eks.clusters",
    "eks.access",
    "eks.addons",
)
"""Modules with an `install()`, in the order in which they are installed."""
SHARED_MODULES = ("serving", "lookups", "hyperpod.resource_types", "hyperpod.events")
"""Modules that several additions share; they install nothing themselves."""


def install() -> None:
    """Install all additions in this process, before moto's server starts."""
    for module in _modules(MODULES):
        module.install()


def left_out() -> tuple[str, ...]:
    """Return the limits of the additions, one line for each."""
    return tuple(str(module.LEFT_OUT) for module in _modules((*MODULES, *SHARED_MODULES)))


def _modules(names: tuple[str, ...]) -> tuple[ModuleType, ...]:
    # Import by name: the modules import this package, so the package cannot import them while it loads.
    return tuple(importlib.import_module(f"{__name__}.{name}") for name in names)
