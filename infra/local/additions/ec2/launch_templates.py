"""Launch templates with the tags and the user data that they were given.

moto adds the template's own tags to the data of its launches, never renews them, and forgets on a second version that
user data is encoded; the provider would see changes where there are none.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cache
from typing import Any

from moto.ec2.models import ec2_backends
from moto.ec2.models.launch_templates import LaunchTemplate
from moto.ec2.responses import EC2Response
from moto.ec2.utils import convert_tag_spec, parse_user_data

from infra.local.additions.ec2.launch_rules import MOST_USER_DATA
from infra.local.additions.serving import Call, refuse, serve

LEFT_OUT = "launch templates are kept and not checked before a launch; none warns, as CreateLaunchTemplate does"


@cache
def install() -> None:
    """Replace moto's actions."""
    # moto reads the tags only once, when the template is created.
    LaunchTemplate.tags = property(lambda self: self.get_tags(), lambda self, value: None)  # type: ignore[assignment]
    actions = {"CreateLaunchTemplate": _create, "CreateLaunchTemplateVersion": _create_version}
    serve(EC2Response, "ec2", actions, "InvalidParameterValue")


def _create(call: Call) -> Mapping[str, Any]:
    backend = ec2_backends[call.account][call.region]
    data = _decode_data(call.get("LaunchTemplateData", {}))
    tags = convert_tag_spec(call.get("TagSpecifications", []))
    template = backend.create_launch_template(
        call.get("LaunchTemplateName"), call.get("VersionDescription"), data, tags
    )
    description = {
        "CreateTime": template.create_time,
        "CreatedBy": f"arn:{call.partition}:iam::{call.account}:root",
        "DefaultVersionNumber": template.default_version_number,
        "LatestVersionNumber": template.latest_version_number,
        "LaunchTemplateId": template.id,
        "LaunchTemplateName": template.name,
        "Tags": template.tags,
    }
    return {"LaunchTemplate": description}


def _create_version(call: Call) -> Mapping[str, Any]:
    backend = ec2_backends[call.account][call.region]
    name, template_id = call.get("LaunchTemplateName"), call.get("LaunchTemplateId")
    template = backend.get_launch_template_by_name(name) if name else backend.get_launch_template(template_id)
    source = call.get("SourceVersion")
    data = {**(template.get_version(source).data if source else {}), **_decode_data(call.get("LaunchTemplateData", {}))}
    version = template.create_version(data, call.get("VersionDescription"))
    description = {
        "CreateTime": version.create_time,
        "CreatedBy": f"arn:{call.partition}:iam::{call.account}:root",
        "DefaultVersion": template.is_default(version),
        "LaunchTemplateData": version.data,
        "LaunchTemplateId": template.id,
        "LaunchTemplateName": template.name,
        "VersionDescription": version.description,
        "VersionNumber": version.number,
    }
    return {"LaunchTemplateVersion": description}


def _decode_data(template_data: Mapping[str, Any]) -> dict[str, Any]:
    data = dict(template_data)
    if (encoded := data.pop("UserData", None)) is not None:
        data["UserData"] = parse_user_data(encoded)
        if len(base64.b64decode(encoded)) > MOST_USER_DATA:
            refuse("InvalidParameterValue", f"User data is limited to {MOST_USER_DATA} bytes")
    return data
