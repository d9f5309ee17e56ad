"""The file systems: FSx for Lustre with its log group and its links to S3, and OpenZFS or EFS for home folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pulumi
from pulumi_aws import cloudwatch, efs, fsx

from infra.catalog.fsx import VERSION
from infra.config import ExistingLustre
from infra.plan.storage.associations import AssociationPlan
from infra.plan.storage.home import EfsPlan, OpenZfsPlan
from infra.plan.storage.lustre import LustrePlan

LINK_TIMEOUT = "60m"
"""The provider gives up after 10 minutes; a link waits its turn behind whatever FSx is doing for the others."""


class LustreSystem(pulumi.ComponentResource):
    """The file system of a LustrePlan, or the outputs of one that is there already.

    It is protected and outlives the stack: most of its properties can only be changed by making another one, empty. The
    engine then refuses the change and names the resource; nothing is ignored silently. Associations hold no data, so
    they are deleted with the stack, and before a changed one is made, which could not overlap the old; what they linked
    stays on both sides.
    """

    id: pulumi.Output[str]
    dns_name: pulumi.Output[str]
    mount_name: pulumi.Output[str]
    arn: pulumi.Output[str] | None

    def __init__(
        self,
        name: str,
        plan: LustrePlan,
        associations: Sequence[AssociationPlan],
        *,
        subnet_id: pulumi.Input[str],
        security_group_ids: Sequence[pulumi.Input[str]],
        bucket_names: Mapping[str, pulumi.Input[str]],
        log_days: int = 30,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("lustrain:infra:LustreSystem", name, None, opts)
        if plan.existing is not None:
            self._adopt(plan.existing)
        else:
            self._make(name, plan, subnet_id, security_group_ids, log_days)
            self._link(name, associations, bucket_names)
        self.register_outputs(
            {"id": self.id, "dns_name": self.dns_name, "mount_name": self.mount_name, "arn": self.arn}
        )

    def _adopt(self, existing: ExistingLustre) -> None:
        self.id = pulumi.Output.from_input(existing.id)
        self.dns_name = pulumi.Output.from_input(existing.dns_name)
        self.mount_name = pulumi.Output.from_input(existing.mount_name)
        self.arn = None

    def _make(
        self,
        name: str,
        plan: LustrePlan,
        subnet_id: pulumi.Input[str],
        security_group_ids: Sequence[pulumi.Input[str]],
        log_days: int,
    ) -> None:
        logs = cloudwatch.LogGroup(
            f"{name}-log",
            name=f"/aws/fsx/{name}",
            retention_in_days=log_days,
            opts=pulumi.ResourceOptions(parent=self),
        )
        cache = fsx.LustreFileSystemDataReadCacheConfigurationArgs
        system = fsx.LustreFileSystem(
            f"{name}-system",
            deployment_type="PERSISTENT_2",
            file_system_type_version=VERSION,
            storage_type=plan.storage,
            storage_capacity=plan.capacity_gib,
            per_unit_storage_throughput=plan.per_tib_mb_s,
            throughput_capacity=plan.tiered_mb_s,
            data_read_cache_configuration=cache(sizing_mode="USER_PROVISIONED", size=plan.read_cache_gib)
            if plan.read_cache_gib
            else None,
            metadata_configuration=fsx.LustreFileSystemMetadataConfigurationArgs(
                mode=plan.metadata_mode, iops=plan.metadata_iops
            ),
            efa_enabled=plan.efa,
            data_compression_type=plan.compression,
            kms_key_id=plan.kms_key,
            automatic_backup_retention_days=plan.backup_days,
            copy_tags_to_backups=plan.backup_days > 0 or None,
            log_configuration=fsx.LustreFileSystemLogConfigurationArgs(destination=logs.arn, level="WARN_ERROR"),
            subnet_ids=subnet_id,
            security_group_ids=list(security_group_ids),
            opts=pulumi.ResourceOptions(parent=self, protect=True, retain_on_delete=True),
        )
        self.id = system.id
        self.dns_name = system.dns_name
        self.mount_name = system.mount_name
        self.arn = system.arn
        self._system = system

    def _link(
        self, name: str, associations: Sequence[AssociationPlan], bucket_names: Mapping[str, pulumi.Input[str]]
    ) -> None:
        """One after the other, as FSx works on them; the name follows the folder, so that an order changes nothing."""
        last: pulumi.Resource = self._system
        for plan in associations:
            # Through the bucket's own name, so that the link waits for a bucket of ours.
            bucket = bucket_names[plan.own] if plan.own else plan.bucket
            last = fsx.DataRepositoryAssociation(
                f"{name}-link{plan.path}",
                file_system_id=self.id,
                file_system_path=plan.path,
                data_repository_path=pulumi.Output.concat(
                    "s3://", bucket, plan.uri.removeprefix(f"s3://{plan.bucket}")
                ),
                batch_import_meta_data_on_create=plan.batch_import,
                delete_data_in_filesystem=False,
                imported_file_chunk_size=plan.chunk_mib,
                s3=fsx.DataRepositoryAssociationS3Args(
                    auto_import_policy=fsx.DataRepositoryAssociationS3AutoImportPolicyArgs(
                        events=list(plan.import_events)
                    )
                    if plan.import_events
                    else None,
                    auto_export_policy=fsx.DataRepositoryAssociationS3AutoExportPolicyArgs(
                        events=list(plan.export_events)
                    )
                    if plan.export_events
                    else None,
                ),
                opts=pulumi.ResourceOptions(
                    parent=self,
                    depends_on=[last],
                    delete_before_replace=True,
                    custom_timeouts=pulumi.CustomTimeouts(create=LINK_TIMEOUT, delete=LINK_TIMEOUT),
                ),
            )


class OpenZfsHome(pulumi.ComponentResource):
    """The file system of an OpenZfsPlan; it is protected and outlives the stack. Mounted over NFS from `dns_name`:/fsx."""

    id: pulumi.Output[str]
    dns_name: pulumi.Output[str]
    arn: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        plan: OpenZfsPlan,
        *,
        subnet_id: pulumi.Input[str],
        security_group_ids: Sequence[pulumi.Input[str]],
    ) -> None:
        super().__init__("lustrain:infra:OpenZfsHome", name)
        exported = fsx.OpenZfsFileSystemRootVolumeConfigurationNfsExportsClientConfigurationArgs(
            clients="*", options=list(plan.export_options)
        )
        system = fsx.OpenZfsFileSystem(
            f"{name}-system",
            deployment_type=plan.deployment,
            storage_capacity=plan.capacity_gib,
            throughput_capacity=plan.throughput_mb_s,
            kms_key_id=plan.kms_key,
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


class EfsHome(pulumi.ComponentResource):
    """The file system of an EfsPlan, and its mount targets; mounted over NFS from `dns_name`:/.

    The file system is protected and outlives the stack, with its backups. Mount targets hold no data and go with the nodes; a
    zone has one at most, so that a changed one is deleted first.
    """

    id: pulumi.Output[str]
    dns_name: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        plan: EfsPlan,
        *,
        subnet_ids: Mapping[str, pulumi.Input[str]],
        security_group_ids: Sequence[pulumi.Input[str]],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`subnet_ids` by zone id."""
        super().__init__("lustrain:infra:EfsHome", name, None, opts)
        policy = efs.FileSystemLifecyclePolicyArgs
        moves = [
            policy(transition_to_ia=plan.to_infrequent_access),
            policy(transition_to_primary_storage_class="AFTER_1_ACCESS"),
        ]
        system = efs.FileSystem(
            f"{name}-system",
            encrypted=True,
            kms_key_id=plan.kms_key,
            throughput_mode=plan.throughput,
            lifecycle_policies=moves if plan.to_infrequent_access else [],
            tags={"Name": f"{name}-home"},
            opts=pulumi.ResourceOptions(parent=self, protect=True, retain_on_delete=True),
        )
        efs.BackupPolicy(
            f"{name}-backup",
            file_system_id=system.id,
            backup_policy=efs.BackupPolicyBackupPolicyArgs(status="ENABLED" if plan.backup else "DISABLED"),
            # Its end would switch the backups off, while the file system stays.
            opts=pulumi.ResourceOptions(parent=self, retain_on_delete=True),
        )
        for zone in plan.zones:
            efs.MountTarget(
                f"{name}-home-{zone}",
                file_system_id=system.id,
                subnet_id=subnet_ids[zone],
                security_groups=list(security_group_ids),
                opts=pulumi.ResourceOptions(parent=self, delete_before_replace=True),
            )
        self.id = system.id
        self.dns_name = system.dns_name
        self.register_outputs({"id": self.id, "dns_name": self.dns_name})


@dataclass(frozen=True)
class ExistingHome:
    """A file system for homes that is there already."""

    id: pulumi.Output[str]
    dns_name: pulumi.Output[str]
