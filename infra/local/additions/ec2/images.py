"""Public SSM parameters that name AWS's images, and EC2's way to resolve them (`resolve:ssm:…`).

Each documented parameter has a value that stays the same for its name and region; it stands for an image that AWS
renews. Sources: https://docs.aws.amazon.com/dlami/latest/devguide/find-dlami-id.html,
https://docs.aws.amazon.com/eks/latest/userguide/retrieve-ami-id.html,
https://documentation.ubuntu.com/aws/en/latest/aws-how-to/instances/find-ubuntu-images/ and
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/dlami/index.html.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from typing import Any

from moto.core.utils import utcnow
from moto.ec2.models import ec2_backends
from moto.ec2.models.amis import Ami
from moto.ssm.models import Parameter, ParameterDict, ssm_backends

from infra.local.patches.wrapping import around

LEFT_OUT = (
    "images: any well-formed id launches; a public parameter resolves to an invented id, and none is ever renewed"
)
RESOLVE = "resolve:ssm:"
_DLAMI = r"/aws/service/deeplearning/ami/(x86_64|arm64)/[a-z0-9.-]+/(latest|\d[\d.]*)/ami-id"
_NEURON = r"/aws/service/neuron/dlami/[a-z0-9.-]+/[a-z0-9.-]+/latest/image_id"
_UBUNTU = r"/aws/service/canonical/ubuntu/server/2[024]\.04/stable/current/(amd64|arm64)/hvm/ebs-gp[23]/ami-id"
_EKS = r"/aws/service/eks/optimized-ami/1\.\d\d/amazon-linux-2023/(x86_64|arm64)/(standard|nvidia|neuron)/recommended/image_id"
_FAMILIES = re.compile(
    r"(base-)?(oss-nvidia-driver-gpu|with-single-cuda|neuron)[a-z0-9.-]*-(ubuntu-2[024]\.04|amazon-linux-2(023)?)"
)
_PATTERNS = tuple(map(re.compile, (_DLAMI, _NEURON, _UBUNTU, _EKS)))


@cache
def install() -> None:
    """Let Parameter Store answer for the documented names."""

    @around(ParameterDict, "_check_loading_status")
    def _load(original: Any, self: Any, key: str) -> None:
        original(self, key)
        name = str(key or "")
        if _is_documented(name) and not dict.__contains__(self, name):
            parameter = _parameter(self.account_id, self.region_name, name)
            dict.__setitem__(self, name, [parameter])
            _describe(self.account_id, self.region_name, name, parameter.value)


def resolve_image(backend: Any, image: str) -> str | None:
    """Return the image that EC2 launches for `resolve:ssm:name[:version]`; None when there is no such parameter."""
    name = image.removeprefix(RESOLVE).partition(":")[0]
    parameters = ssm_backends[backend.account_id][backend.region_name].get_parameters([name])
    return str(parameters[name].value) if name in parameters else None


def _is_documented(name: str) -> bool:
    if not any(pattern.fullmatch(name) for pattern in _PATTERNS):
        return False
    return "/deeplearning/" not in name or _FAMILIES.fullmatch(name.split("/")[6]) is not None


def _describe(account: str, region: str, name: str, image_id: str) -> None:
    """Let DescribeImages know the image, as who launches a single instance asks for its root device."""
    backend = ec2_backends[account][region]
    backend.amis[image_id] = Ami(
        backend,
        image_id,
        name=name,
        owner_alias="amazon",
        public=True,
        virtualization_type="hvm",
        architecture="arm64" if "arm64" in name else "x86_64",
        hypervisor="xen",
        root_device_type="ebs",
        region_name=f"{region}a",
    )


def _parameter(account: str, region: str, name: str) -> Any:
    image = "ami-" + hashlib.sha256(f"{region} {name}".encode()).hexdigest()[:17]
    make: Any = Parameter  # abstract to a type checker, although moto instantiates it
    return make(
        account_id=account,
        name=name,
        value=image,
        parameter_type="String",
        description=None,
        allowed_pattern=None,
        keyid=None,
        last_modified_date=utcnow(),
        version=1,
        data_type="aws:ec2:image",
    )
