"""The image repository of a cluster, or the one that the user has already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra.config import ClusterSpec
from infra.plan.place import Place


@dataclass(frozen=True)
class RepositoryPlan:
    """Either `existing` is the URL of a repository to use, or one called `name` is made with `lifecycle`."""

    name: str
    existing: str | None
    lifecycle: Mapping[str, Any]


def repository(spec: ClusterSpec) -> RepositoryPlan:
    """Tags never move, since jobs run an image by digest and a run resumes bit for bit with that image only."""
    return RepositoryPlan(
        name=f"{spec.name}/trainer",
        existing=spec.repository.existing,
        lifecycle=keep_last(spec.repository.keep_last),
    )


def url(spec: ClusterSpec, place: Place) -> str:
    """Of the repository that is made or used, without a tag."""
    return (
        spec.repository.existing or f"{place.account}.dkr.ecr.{place.region}.{place.dns_suffix}/{repository(spec).name}"
    )


def keep_last(count: int) -> dict[str, Any]:
    """Return a lifecycle policy that drops all but the `count` newest images, counted by the time of the push.

    ECR does not know which digest a job still runs: a node that is replaced later must find its image, so keep more than
    you push during your longest run (https://docs.aws.amazon.com/AmazonECR/latest/userguide/LifecyclePolicies.html).
    """
    return {
        "rules": [
            {
                "rulePriority": 1,
                "description": f"keep the {count} newest images",
                "selection": {"tagStatus": "any", "countType": "imageCountMoreThan", "countNumber": count},
                "action": {"type": "expire"},
            }
        ]
    }
