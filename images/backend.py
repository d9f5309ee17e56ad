"""What a builder must be able to do; `images.bake` and `images.engine_api` can."""

from __future__ import annotations

from typing import Protocol

from images.records import Built, Context, Output, Plan
from images.watch import Watch


class Backend(Protocol):
    """One way to run a BuildKit build."""

    name: str

    def cannot(self, plan: Plan, output: Output) -> str | None:
        """Why this backend cannot do what the plan asks, in one line with the fix; None where it can."""

    def build(self, plan: Plan, context: Context, target: str, output: Output, watch: Watch) -> Built:
        """Build one stage of the plan's Dockerfile. UserError with the failed step's last lines where it fails."""
