"""IAM: moto takes any ARN as a role's boundary (no issue is known), and has AWS's managed policies where a variable is set."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from moto.iam.exceptions import NotFoundException
from moto.iam.models import IAMBackend

from infra.local.patches.wrapping import around

LEFT_OUT = (
    "IAM: no permission is ever checked, nor a role's boundary beyond its being there; AWS's managed policies are those of "
    "the day of moto's release"
)


@cache
def install() -> None:
    """Enable managed policies and check boundaries; moto reads the variable when it creates its first account."""
    os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"

    def check(backend: Any, boundary: str | None) -> None:
        """Raise what https://docs.aws.amazon.com/IAM/latest/APIReference/API_PutRolePermissionsBoundary.html lists."""
        if boundary and boundary not in backend.managed_policies:
            raise NotFoundException(f"Scope ARN: {boundary} does not exist or is not attachable.")

    @around(IAMBackend, "create_role")
    def _create(
        original: Any,
        self: Any,
        role_name: str,
        assume_role_policy_document: str,
        path: str,
        permissions_boundary: str | None,
        *more: Any,
        **named: Any,
    ) -> Any:
        check(self, permissions_boundary)
        return original(self, role_name, assume_role_policy_document, path, permissions_boundary, *more, **named)

    @around(IAMBackend, "put_role_permissions_boundary")
    def _put(original: Any, self: Any, name: str, boundary: str) -> None:
        check(self, boundary)
        original(self, name, boundary)
