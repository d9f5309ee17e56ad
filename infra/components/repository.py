"""Where the trainer's images are kept."""

from __future__ import annotations

import json

import pulumi
import pulumi_aws as aws

from infra.plan.repository import RepositoryPlan


class ImageRepository(pulumi.ComponentResource):
    """An ECR repository with immutable tags, or the URL of the user's own passed on.

    It stays when the stack goes: the checkpoints stay too, and a run resumes bit for bit only with the image it ran on.
    """

    url: pulumi.Output[str]

    def __init__(self, name: str, plan: RepositoryPlan, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("lustrain:infra:ImageRepository", name, None, opts)
        self.url = pulumi.Output.from_input(plan.existing) if plan.existing else self._made(name, plan)
        self.register_outputs({"url": self.url})

    def _made(self, name: str, plan: RepositoryPlan) -> pulumi.Output[str]:
        kept = pulumi.ResourceOptions(parent=self, retain_on_delete=True)
        made = aws.ecr.Repository(
            f"{name}-images",
            name=plan.name,
            image_tag_mutability="IMMUTABLE",
            image_scanning_configuration=aws.ecr.RepositoryImageScanningConfigurationArgs(scan_on_push=True),
            encryption_configurations=[aws.ecr.RepositoryEncryptionConfigurationArgs(encryption_type="AES256")],
            force_delete=False,
            opts=kept,
        )
        aws.ecr.LifecyclePolicy(f"{name}-lifecycle", repository=made.name, policy=json.dumps(plan.lifecycle), opts=kept)
        return made.repository_url
