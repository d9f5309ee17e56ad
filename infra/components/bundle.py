"""The lifecycle bundle in its bucket."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra.plan.bundle import Bundle


class LifecycleBundle(pulumi.ComponentResource):
    """Puts one bundle under its own prefix; a later bundle goes beside it and this one stays, also after `pulumi destroy`,
    since a node that HyperPod replaces reads the bundle that the cluster names at that moment.

    `uri` names the prefix; whatever reads it must wait for this component, and so for the objects.
    """

    uri: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        bundle: Bundle,
        bucket: pulumi.Input[str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("lustrain:infra:LifecycleBundle", name, None, opts)
        for file in bundle.files:
            aws.s3.BucketObjectv2(
                f"{name}-{bundle.sha}-{file.path}",
                bucket=bucket,
                key=bundle.key(file),
                source=pulumi.FileAsset(str(file.source)),
                source_hash=file.sha256,
                opts=pulumi.ResourceOptions(parent=self, retain_on_delete=True),
            )
        self.sha = bundle.sha
        self.uri = pulumi.Output.format("s3://{0}/{1}", bucket, bundle.prefix)
        self.register_outputs({"uri": self.uri})
