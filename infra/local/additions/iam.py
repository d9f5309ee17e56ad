"""IAM with AWS's managed policies, so that they attach by ARN and unknown names are refused."""

from __future__ import annotations

import os
from functools import cache

LEFT_OUT = "IAM: no permission is ever checked; AWS's managed policies are those of the day of moto's release"


@cache
def install() -> None:
    """Enable managed policies; moto reads this variable when it creates its first account."""
    os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"
