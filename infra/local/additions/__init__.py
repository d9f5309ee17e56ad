"""Additions to moto that the unmodified AWS provider needs; each module completes one service.

moto looks a service up by the name of a `moto.<service>.models` module and a line in
`moto.backend_index.backend_url_patterns`; a missing action of a known service is a method set on its `*Response` class.
That leans on internals, hence the pin `moto==5.2.*`. What a module does not emulate is said in its `LEFT_OUT`, and there
alone: `left_out` collects these lines for whoever starts the server.
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
    "budgets",
    "s3",
    "ecr",
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
"""Each has an `install()`."""
BESIDE = ("serving", "lookups", "hyperpod.resource_types", "hyperpod.events")
"""Modules that several additions use; they install nothing themselves."""


def install() -> None:
    """Mend moto in this process, before its server starts."""
    for module in _modules(MODULES):
        module.install()


def left_out() -> tuple[str, ...]:
    """Return the limits of the additions, one line for each."""
    return tuple(str(module.LEFT_OUT) for module in _modules((*MODULES, *BESIDE)))


def _modules(names: tuple[str, ...]) -> tuple[ModuleType, ...]:
    # By name: a module of this package imports others of it, which the package cannot import before it is one itself.
    return tuple(importlib.import_module(f"{__name__}.{name}") for name in names)
