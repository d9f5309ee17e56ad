"""The buckets and the repository of the trainer's images; both outlive the stack."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pulumi
from pulumi_aws import ecr, s3

from infra.plan.storage.buckets import BucketKey, BucketPlan, Rule
from infra.plan.storage.repository import RepositoryPlan


class Buckets(pulumi.ComponentResource):
    """The cluster's buckets; they are protected and outlive the stack.

    `names` by key, also of a bucket that was there before; `ready` when all are private, encrypted and refuse plain HTTP.
    """

    names: dict[BucketKey, pulumi.Output[str]]
    ready: list[pulumi.Resource]

    def __init__(self, name: str, plans: Sequence[BucketPlan]) -> None:
        super().__init__("lustrain:infra:Buckets", name)
        self.names = {plan.key: pulumi.Output.from_input(plan.name) for plan in plans}
        self.ready = []
        for plan in plans:
            if not plan.existing:
                self._make(f"{name}-{plan.key}", plan)
        self.register_outputs({"names": self.names})

    def _make(self, name: str, plan: BucketPlan) -> None:
        bucket = s3.Bucket(
            name,
            bucket=plan.name,
            opts=pulumi.ResourceOptions(parent=self, protect=True, retain_on_delete=True),
        )
        self.names[plan.key] = bucket.bucket
        # S3 answers "conflicting operation" to two settings of one bucket at a time, hence one after the other.
        chain: list[pulumi.Resource] = [bucket]
        chain.append(
            s3.BucketOwnershipControls(
                f"{name}-ownership",
                bucket=bucket.id,
                rule=s3.BucketOwnershipControlsRuleArgs(object_ownership="BucketOwnerEnforced"),
                opts=self._after(chain),
            )
        )
        chain.append(
            s3.BucketPublicAccessBlock(
                f"{name}-private",
                bucket=bucket.id,
                block_public_acls=True,
                block_public_policy=True,
                ignore_public_acls=True,
                restrict_public_buckets=True,
                opts=self._after(chain),
            )
        )
        chain.append(self._encrypted(name, bucket, plan, self._after(chain)))
        if plan.versioned:
            versioning = s3.BucketVersioningVersioningConfigurationArgs(status="Enabled")
            chain.append(
                s3.BucketVersioning(
                    f"{name}-versions",
                    bucket=bucket.id,
                    versioning_configuration=versioning,
                    opts=self._after(chain),
                )
            )
        policy = pulumi.Output.json_dumps(plan.policy)
        chain.append(s3.BucketPolicy(f"{name}-policy", bucket=bucket.id, policy=policy, opts=self._after(chain)))
        self.ready.append(chain[-1])
        # Nothing waits for the rules: the provider looks for most of a minute whether S3 has them everywhere.
        s3.BucketLifecycleConfiguration(
            f"{name}-rules", bucket=bucket.id, rules=[_rule(rule) for rule in plan.rules], opts=self._after(chain)
        )

    def _encrypted(
        self, name: str, bucket: s3.Bucket, plan: BucketPlan, opts: pulumi.ResourceOptions
    ) -> s3.BucketServerSideEncryptionConfiguration:
        default = s3.BucketServerSideEncryptionConfigurationRuleApplyServerSideEncryptionByDefaultArgs(
            sse_algorithm=plan.encryption, kms_master_key_id=plan.kms_key
        )
        return s3.BucketServerSideEncryptionConfiguration(
            f"{name}-encryption",
            bucket=bucket.id,
            rules=[
                s3.BucketServerSideEncryptionConfigurationRuleArgs(
                    apply_server_side_encryption_by_default=default,
                    bucket_key_enabled=plan.encryption == "aws:kms",
                )
            ],
            opts=opts,
        )

    def _after(self, chain: Sequence[pulumi.Resource]) -> pulumi.ResourceOptions:
        return pulumi.ResourceOptions(parent=self, depends_on=[chain[-1]])


class ImageRepository(pulumi.ComponentResource):
    """An ECR repository with immutable tags, or the URL of the user's own passed on.

    It stays when the stack goes: the checkpoints stay too, and a run resumes bit for bit only with the image it ran on.
    """

    url: pulumi.Output[str]

    def __init__(self, name: str, plan: RepositoryPlan) -> None:
        super().__init__("lustrain:infra:ImageRepository", name)
        self.url = pulumi.Output.from_input(plan.existing) if plan.existing else self._made(name, plan)
        self.register_outputs({"url": self.url})

    def _made(self, name: str, plan: RepositoryPlan) -> pulumi.Output[str]:
        kept = pulumi.ResourceOptions(parent=self, retain_on_delete=True)
        made = ecr.Repository(
            f"{name}-images",
            name=plan.name,
            image_tag_mutability="IMMUTABLE",
            image_scanning_configuration=ecr.RepositoryImageScanningConfigurationArgs(scan_on_push=True),
            encryption_configurations=[ecr.RepositoryEncryptionConfigurationArgs(encryption_type="AES256")],
            force_delete=False,
            opts=kept,
        )
        ecr.LifecyclePolicy(f"{name}-lifecycle", repository=made.name, policy=json.dumps(plan.lifecycle), opts=kept)
        return made.repository_url


def _rule(rule: Rule) -> s3.BucketLifecycleConfigurationRuleArgs:
    """As S3 spells it; unset parts are left out."""
    abort = s3.BucketLifecycleConfigurationRuleAbortIncompleteMultipartUploadArgs
    expiration = s3.BucketLifecycleConfigurationRuleExpirationArgs
    transition = s3.BucketLifecycleConfigurationRuleTransitionArgs
    noncurrent = s3.BucketLifecycleConfigurationRuleNoncurrentVersionExpirationArgs
    expires = expiration(days=rule.expire_days) if rule.expire_days else None
    if rule.expired_markers:
        expires = expiration(expired_object_delete_marker=True)
    return s3.BucketLifecycleConfigurationRuleArgs(
        id=rule.id,
        status="Enabled",
        filter=s3.BucketLifecycleConfigurationRuleFilterArgs(prefix=rule.prefix),
        abort_incomplete_multipart_upload=abort(days_after_initiation=rule.abort_days) if rule.abort_days else None,
        expiration=expires,
        transitions=[transition(days=rule.transition_days, storage_class=rule.storage_class)]
        if rule.storage_class
        else None,
        noncurrent_version_expiration=noncurrent(noncurrent_days=rule.noncurrent_days)
        if rule.noncurrent_days
        else None,
    )
