"""Not NVIDIA's fabric manager: says its version."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    print("Fabric Manager version is : 570.172.08")
    return 0
