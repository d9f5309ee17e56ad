"""The Pulumi program: read the configuration, stop on findings, build, export."""

from __future__ import annotations

import pulumi

from infra.components.stack import build, current_place
from infra.components.tagging import tag_everything
from infra.config import ClusterSpec, parse
from infra.plan.place import Place, tags
from infra.preflight.offline import run_offline
from infra.problems import InfraError


def deploy() -> None:
    spec = parse(pulumi.Config("lustrain").get_object("cluster"))
    place = current_place()
    stop_on_errors(spec, place)
    tag_everything(tags(spec))
    for name, value in build(spec, place).items():
        pulumi.export(name, value)


def stop_on_errors(spec: ClusterSpec, place: Place) -> None:
    """Say what preflight finds; InfraError when something of it would fail in AWS."""
    errors = []
    for finding in run_offline(spec, place):
        if finding.level == "error":
            errors.append(finding.line())
        else:
            pulumi.log.warn(finding.line())
    if errors:
        raise InfraError(errors)


try:
    deploy()
except InfraError as error:
    # Pulumi prints a RunError's text alone; anything else would come with a traceback.
    raise pulumi.RunError(str(error)) from None
