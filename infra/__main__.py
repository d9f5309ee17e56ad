"""The Pulumi program: read the configuration, stop on findings, build, export."""

from __future__ import annotations

import pulumi

from infra.components.stack import program
from infra.problems import InfraError

try:
    outputs = program(pulumi.Config("lustrain").get_object("cluster"))
except InfraError as error:
    # Pulumi prints a RunError's text alone; anything else would come with a traceback.
    raise pulumi.RunError(str(error)) from None
for name, value in outputs.items():
    pulumi.export(name, value)
