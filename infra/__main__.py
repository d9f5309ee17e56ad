"""The Pulumi program: read the configuration, stop on findings, build, export."""

from __future__ import annotations

import pulumi

from infra.components.stack import current_place, declare
from infra.config import parse
from infra.problems import InfraError

try:
    outputs = declare(parse(pulumi.Config("lustrain").get_object("cluster")), current_place())
except InfraError as error:
    # Pulumi prints a RunError's text alone; anything else would come with a traceback.
    raise pulumi.RunError(str(error)) from None
for name, value in outputs.items():
    pulumi.export(name, value)
