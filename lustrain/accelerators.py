"""What a GPU can compute and exchange at most, from its maker's data sheets.

Figures are dense: data sheets double them for matrices of which half are zeros. A GPU that is not here is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Peak:
    """Operations per second at most by format of the numbers, and GB/s to and from the other GPUs of the node, each way.

    `tf32` and `bf16` are 0 where the GPU has no such units. `nvlink` tells NVLink from PCIe, over which GPUs share what leads
    to the CPUs.
    """

    fp32: float
    tf32: float
    fp16: float
    bf16: float
    link_gb_s: float
    nvlink: bool
    source: str


_T = 1e12
PEAKS: Mapping[str, Peak] = MappingProxyType(
    {
        "NVIDIA V100": Peak(
            *(15.7 * _T, 0, 125 * _T, 0, 150, True),
            "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
        ),
        "NVIDIA T4": Peak(
            *(8.1 * _T, 0, 65 * _T, 0, 16, False),
            "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf",
        ),
        "NVIDIA A10G": Peak(
            *(31.52 * _T, 35 * _T, 70 * _T, 70 * _T, 32, False),
            "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf",
        ),
        "NVIDIA A100": Peak(
            *(19.5 * _T, 156 * _T, 312 * _T, 312 * _T, 300, True),
            "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
        ),
        "NVIDIA L4": Peak(
            *(30.3 * _T, 60 * _T, 121 * _T, 121 * _T, 32, False), "https://www.nvidia.com/en-us/data-center/l4/"
        ),
        "NVIDIA L40S": Peak(
            *(91.6 * _T, 183 * _T, 362.05 * _T, 362.05 * _T, 32, False),
            "https://www.nvidia.com/en-us/data-center/l40s/",
        ),
        "NVIDIA H100": Peak(
            *(67 * _T, 494.5 * _T, 989.5 * _T, 989.5 * _T, 450, True), "https://www.nvidia.com/en-us/data-center/h100/"
        ),
        "NVIDIA H200": Peak(
            *(67 * _T, 494.5 * _T, 989.5 * _T, 989.5 * _T, 450, True), "https://www.nvidia.com/en-us/data-center/h200/"
        ),
        "NVIDIA B200": Peak(
            *(75 * _T, 1125 * _T, 2250 * _T, 2250 * _T, 900, True), "https://www.nvidia.com/en-us/data-center/hgx/"
        ),
        "NVIDIA B300": Peak(
            *(75 * _T, 1125 * _T, 2250 * _T, 2250 * _T, 900, True), "https://www.nvidia.com/en-us/data-center/hgx/"
        ),
    }
)
"""By the name in `infra.catalog.instances`, of the forms that EC2 has. NVLink's figure is half of the data sheet's, which adds
both directions; PCIe's is that of 16 lanes of the GPU's generation (https://pcisig.com/faq)."""
_OTHER_FORM = re.compile(r"\b(?:PCIe|NVL|MIG)\b", re.IGNORECASE)
"""Parts of a device name whose GPU, or slice of one, has lower peaks than the form that EC2 has."""


def peak_of_device(device_name: str) -> Peak | None:
    """Return the peak of a GPU by the name that its driver and torch have for it; None for a GPU or form without a figure."""
    if _OTHER_FORM.search(device_name):
        return None
    words = re.split(r"[^A-Za-z0-9]+", device_name)
    return next((peak for name, peak in PEAKS.items() if name.removeprefix("NVIDIA ") in words), None)
