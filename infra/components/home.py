"""An FSx for OpenZFS file system for home folders."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi
from pulumi_aws import fsx

from infra.plan.home import HomePlan


class OpenZfsHome(pulumi.ComponentResource):
    """The file system of a HomePlan; it is protected and outlives the stack. Mounted over NFS from `dns_name`:/fsx."""

    id: pulumi.Output[str]
    dns_name: pulumi.Output[str]
    arn: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        plan: HomePlan,
        *,
        subnet_id: pulumi.Input[str],
        security_group_ids: Sequence[pulumi.Input[str]],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("lustrain:infra:OpenZfsHome", name, None, opts)
        exported = fsx.OpenZfsFileSystemRootVolumeConfigurationNfsExportsClientConfigurationArgs(
            clients="*", options=list(plan.export_options)
        )
        system = fsx.OpenZfsFileSystem(
            f"{name}-system",
            deployment_type=plan.deployment,
            storage_capacity=plan.capacity_gib,
            throughput_capacity=plan.throughput_mb_s,
            subnet_ids=[subnet_id],
            security_group_ids=list(security_group_ids),
            automatic_backup_retention_days=plan.backup_days,
            copy_tags_to_backups=True,
            root_volume_configuration=fsx.OpenZfsFileSystemRootVolumeConfigurationArgs(
                data_compression_type="LZ4",
                nfs_exports=fsx.OpenZfsFileSystemRootVolumeConfigurationNfsExportsArgs(
                    client_configurations=[exported]
                ),
            ),
            opts=pulumi.ResourceOptions(parent=self, protect=True, retain_on_delete=True),
        )
        self.id = system.id
        self.dns_name = system.dns_name
        self.arn = system.arn
        self.register_outputs({"id": self.id, "dns_name": self.dns_name, "arn": self.arn})
