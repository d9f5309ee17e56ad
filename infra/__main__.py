"""The Pulumi program: read the configuration, stop on findings, build, export."""

from __future__ import annotations

import pulumi

from infra.components.stack import program
from lustrain.problem import UserError

try:
    outputs = program(pulumi.Config("lustrain").get_object("cluster"))
except UserError as error:
    # Pulumi prints a RunError's text alone; anything else would come with a traceback.
    raise pulumi.RunError(str(error)) from None
for name, value in outputs.items():
    pulumi.export(name, value)
