"""The Pulumi program: read the configuration, stop on findings, build, export."""

from __future__ import annotations

import pulumi

from infra.config import parse

spec = parse(pulumi.Config("lustrain").require_object("cluster"))
