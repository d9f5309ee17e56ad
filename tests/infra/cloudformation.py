"""What cfn-lint says of a resource as CloudFormation's schemas describe it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from cfnlint.config import ConfigMixIn
from cfnlint.decode import decode_str
from cfnlint.rules import Rules
from cfnlint.runner import Runner, run_template_by_data


def complaints(kind: str, properties: Mapping[str, Any], region: str) -> list[str]:
    """Messages about a template that holds the resource alone."""
    text = json.dumps(
        {"AWSTemplateFormatVersion": "2010-09-09", "Resources": {"Resource": {"Type": kind, "Properties": properties}}}
    )
    template, broken = decode_str(text)
    assert template is not None, broken
    return [match.message for match in run_template_by_data(template, ConfigMixIn(regions=[region]), _rules())]


@cache
def _rules() -> Rules:
    """Those that cfn-lint's own `lint` reads for each template from hundreds of files."""
    return Runner(ConfigMixIn()).rules
