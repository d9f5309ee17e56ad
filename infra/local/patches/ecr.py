"""ECR: moto keeps scanning on when a client switches it off, since clients leave out `false`; no issue is known."""

from __future__ import annotations

from functools import cache
from typing import Any

from moto.ecr.models import ECRBackend

from infra.local.patches.wrapping import around

LEFT_OUT = "ECR holds no layers to pull: repositories, their settings and policies only; nothing is scanned or expired"


@cache
def install() -> None:
    """Replace the action whose empty configuration moto ignores."""

    @around(ECRBackend, "put_image_scanning_configuration")
    def _scanning(original: Any, self: Any, registry_id: str, repository_name: str, image_scan_config: Any) -> Any:
        # A client that leaves out `false` sends an empty structure.
        return original(self, registry_id, repository_name, {"scanOnPush": False, **(image_scan_config or {})})
