"""FSx of the embedded AWS refuses members that do not go together, fills in defaults and stores all fields."""

from __future__ import annotations

from typing import Any

import pytest

from infra.local.aws import LocalAws
from tests.infra.local_network import Network, client, refusal

pytestmark = pytest.mark.slow

FOREIGN_LOGS = "arn:aws:logs:us-west-2:123456789012:log-group:mine"
BUCKET = "lustrain-data"
TOP = ("StorageType", "SubnetIds", "SecurityGroupIds")


@pytest.fixture(scope="module")
def fsx(aws: LocalAws) -> Any:
    return client(aws, "fsx")


@pytest.fixture(scope="module", autouse=True)
def bucket(aws: LocalAws) -> None:
    where = {"LocationConstraint": "us-west-2"}
    client(aws, "s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration=where)


def lustre(network: Network, capacity: int | None = 4800, **changes: Any) -> dict[str, Any]:
    """A request for an EFA file system of 1000 MB/s per TiB; `changes` replace members, and None removes a member."""
    top = {name: changes.pop(name) for name in TOP if name in changes}
    rate = {"PerUnitStorageThroughput": 1000, "EfaEnabled": True, "MetadataConfiguration": {"Mode": "AUTOMATIC"}}
    configuration = {"DeploymentType": "PERSISTENT_2", **rate, **changes}
    request = {
        "FileSystemType": "LUSTRE",
        "StorageCapacity": capacity,
        "SubnetIds": [network.subnet],
        "SecurityGroupIds": [network.group],
        "LustreConfiguration": {name: value for name, value in configuration.items() if value is not None},
        **top,
    }
    return {name: value for name, value in request.items() if value is not None}


def tiered(network: Network, **changes: Any) -> dict[str, Any]:
    defaults = {
        "StorageType": "INTELLIGENT_TIERING",
        "PerUnitStorageThroughput": None,
        "EfaEnabled": False,
        "ThroughputCapacity": 4000,
        "MetadataConfiguration": {"Mode": "USER_PROVISIONED", "Iops": 6000},
        "DataReadCacheConfiguration": {"SizingMode": "PROPORTIONAL_TO_THROUGHPUT_CAPACITY"},
    }
    return lustre(network, None, **{**defaults, **changes})


def openzfs(network: Network) -> dict[str, Any]:
    configuration = {
        "DeploymentType": "SINGLE_AZ_HA_2",
        "ThroughputCapacity": 320,
        "RootVolumeConfiguration": {"DataCompressionType": "ZSTD"},
    }
    where = {"SubnetIds": [network.subnet], "SecurityGroupIds": [network.group]}
    return {"FileSystemType": "OPENZFS", "StorageCapacity": 256, **where, "OpenZFSConfiguration": configuration}


def create_available(fsx: Any, request: dict[str, Any]) -> dict[str, Any]:
    file_system = fsx.create_file_system(**request)["FileSystem"]
    assert file_system["Lifecycle"] == "CREATING"
    answers = [fsx.describe_file_systems(FileSystemIds=[file_system["FileSystemId"]]) for _ in range(2)]
    assert [answer["FileSystems"][0]["Lifecycle"] for answer in answers] == ["CREATING", "AVAILABLE"]
    return dict(answers[-1]["FileSystems"][0])


def test_new_lustre_file_system_has_service_defaults(fsx: Any, network: Network) -> None:
    file_system = create_available(fsx, lustre(network))
    configuration = file_system["LustreConfiguration"]
    assert (file_system["VpcId"], file_system["FileSystemTypeVersion"]) == (network.vpc, "2.15")
    assert file_system["DNSName"] == f"{file_system['FileSystemId']}.fsx.us-west-2.amazonaws.com"
    assert len(configuration["MountName"]) == 8
    assert configuration["MetadataConfiguration"] == {"Mode": "AUTOMATIC", "Iops": 6000}
    assert configuration["DataCompressionType"] == "NONE"
    assert configuration["LogConfiguration"] == {"Level": "DISABLED"}
    fsx.delete_file_system(FileSystemId=file_system["FileSystemId"])
    assert refusal(fsx.describe_file_systems, FileSystemIds=[file_system["FileSystemId"]])[0] == "FileSystemNotFound"


@pytest.mark.parametrize(
    ("make", "changes", "code"),
    [
        (lustre, {"PerUnitStorageThroughput": None}, "BadRequest"),
        (lustre, {"MetadataConfiguration": None}, "BadRequest"),
        (lustre, {"MetadataConfiguration": {"Mode": "AUTOMATIC", "Iops": 6000}}, "BadRequest"),
        (lustre, {"ThroughputCapacity": 4000}, "BadRequest"),
        (lustre, {"DataCompressionType": "ZSTD"}, "ValidationException"),
        (lustre, {"LogConfiguration": {"Level": "ERROR_ONLY", "Destination": FOREIGN_LOGS}}, "BadRequest"),
        (lustre, {"DeploymentType": "SCRATCH_2"}, "BadRequest"),
        (lustre, {"SubnetIds": ["subnet-0123456789abcdef0"]}, "InvalidNetworkSettings"),
        (lustre, {"SecurityGroupIds": ["sg-0123456789abcdef0"]}, "InvalidNetworkSettings"),
        (tiered, {"MetadataConfiguration": {"Mode": "AUTOMATIC"}}, "BadRequest"),
        (tiered, {"DataReadCacheConfiguration": None}, "BadRequest"),
        (tiered, {"PerUnitStorageThroughput": 250}, "BadRequest"),
    ],
)
def test_invalid_file_system_is_refused(fsx: Any, network: Network, make: Any, changes: Any, code: str) -> None:
    assert refusal(fsx.create_file_system, **make(network, **changes))[0] == code


def test_closed_security_groups_are_refused(fsx: Any, network: Network) -> None:
    group = network.closed_group("half-open")
    to_itself = {"UserIdGroupPairs": [{"GroupId": group}]}
    lnet = [{"IpProtocol": "tcp", "FromPort": 988, "ToPort": 988, **to_itself}]
    tcp, efa = (lustre(network, EfaEnabled=efa, SecurityGroupIds=[group]) for efa in (False, True))
    assert refusal(fsx.create_file_system, **tcp)[0] == "InvalidNetworkSettings"
    network.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=lnet)
    fsx.create_file_system(**tcp)
    network.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[{"IpProtocol": "-1", **to_itself}])
    assert refusal(fsx.create_file_system, **efa)[0] == "InvalidNetworkSettings"
    network.ec2.authorize_security_group_egress(GroupId=group, IpPermissions=[{"IpProtocol": "-1", **to_itself}])
    fsx.create_file_system(**efa)


def test_update_grows_in_place_and_never_shrinks(fsx: Any, network: Network) -> None:
    name = create_available(fsx, lustre(network))["FileSystemId"]
    changes = {"DataCompressionType": "LZ4", "MetadataConfiguration": {"Mode": "USER_PROVISIONED", "Iops": 12000}}
    fsx.update_file_system(FileSystemId=name, StorageCapacity=9600, LustreConfiguration=changes)
    file_system = fsx.describe_file_systems(FileSystemIds=[name])["FileSystems"][0]
    assert file_system["StorageCapacity"] == 9600
    assert {key: file_system["LustreConfiguration"][key] for key in changes} == changes
    assert file_system["AdministrativeActions"][0]["Status"] == "COMPLETED"
    slower = {"MetadataConfiguration": {"Mode": "USER_PROVISIONED", "Iops": 6000}}
    for smaller in ({"StorageCapacity": 4800}, {"LustreConfiguration": slower}):
        assert refusal(fsx.update_file_system, FileSystemId=name, **smaller)[0] == "BadRequest"


def linked(name: str, folder: str, repository: str) -> dict[str, Any]:
    return {"FileSystemId": name, "FileSystemPath": folder, "DataRepositoryPath": repository}


def test_associations_are_linked_in_sequence(fsx: Any, network: Network) -> None:
    name = create_available(fsx, lustre(network))["FileSystemId"]
    events = {"AutoImportPolicy": {"Events": ["NEW", "CHANGED"]}}
    first, second = (
        fsx.create_data_repository_association(**linked(name, f"/{word}", f"s3://{BUCKET}/{word}"), S3=events)
        for word in ("data", "results")
    )
    first, second = (response["Association"]["AssociationId"] for response in (first, second))

    def describe(association_id: str) -> dict[str, Any]:
        response = fsx.describe_data_repository_associations(AssociationIds=[association_id])
        return dict(response["Associations"][0])

    assert [describe(second)["Lifecycle"] for _ in range(3)] == ["CREATING", "CREATING", "AVAILABLE"]
    assert describe(first)["Lifecycle"] == "AVAILABLE"
    some = [{"Name": "file-system-id", "Values": [name]}]
    assert refusal(fsx.describe_data_repository_associations, Filters=some)[0] == "ValidationException"
    fsx.update_data_repository_association(AssociationId=first, S3={"AutoExportPolicy": {"Events": ["NEW"]}})
    assert describe(first)["S3"] == {**events, "AutoExportPolicy": {"Events": ["NEW"]}}
    fsx.delete_data_repository_association(AssociationId=first)
    assert refusal(describe, association_id=first)[0] == "DataRepositoryAssociationNotFound"


def test_link_to_a_missing_or_far_bucket_is_refused(aws: LocalAws, fsx: Any, network: Network) -> None:
    name = create_available(fsx, lustre(network))["FileSystemId"]
    client(aws, "s3", "us-east-1").create_bucket(Bucket="lustrain-far")
    for file_system, bucket in (
        (name, "nobody-has-this-bucket"),
        (name, "lustrain-far"),
        (create_available(fsx, tiered(network))["FileSystemId"], BUCKET),
        (create_available(fsx, openzfs(network))["FileSystemId"], BUCKET),
    ):
        code, message = refusal(fsx.create_data_repository_association, **linked(file_system, "/d", f"s3://{bucket}/d"))
        assert code == "BadRequest", message


def test_openzfs_has_a_root_volume_until_it_is_deleted(fsx: Any, network: Network) -> None:
    file_system = create_available(fsx, openzfs(network))
    root = file_system["OpenZFSConfiguration"]["RootVolumeId"]
    assert file_system["OpenZFSConfiguration"]["DiskIopsConfiguration"] == {"Mode": "AUTOMATIC", "Iops": 768}
    volume = fsx.describe_volumes(VolumeIds=[root])["Volumes"][0]["OpenZFSConfiguration"]
    assert (volume["VolumePath"], volume["DataCompressionType"]) == ("/fsx", "ZSTD")
    changed = fsx.update_file_system(FileSystemId=file_system["FileSystemId"], StorageCapacity=512)["FileSystem"]
    assert changed["OpenZFSConfiguration"]["DiskIopsConfiguration"]["Iops"] == 1536
    fsx.delete_file_system(FileSystemId=file_system["FileSystemId"])
    assert refusal(fsx.describe_volumes, VolumeIds=[root])[0] == "VolumeNotFound"


@pytest.mark.parametrize("make", [lustre, openzfs])
def test_network_of_file_system_cannot_be_deleted(aws: LocalAws, fsx: Any, make: Any) -> None:
    network = Network(aws)
    ec2 = network.ec2
    unused = network.closed_group("unused")
    file_system = create_available(fsx, make(network))
    ids = file_system["NetworkInterfaceIds"]
    interfaces = ec2.describe_network_interfaces(NetworkInterfaceIds=ids)["NetworkInterfaces"]
    assert len(interfaces) == 2
    for nic in interfaces:
        assert (nic["Description"], nic["Status"], nic["RequesterManaged"]) == ("Created by Amazon FSx", "in-use", True)
        assert (nic["SubnetId"], [group["GroupId"] for group in nic["Groups"]]) == (network.subnet, [network.group])
    assert refusal(ec2.delete_subnet, SubnetId=network.subnet)[0] == "DependencyViolation"
    assert refusal(ec2.delete_security_group, GroupId=network.group)[0] == "DependencyViolation"
    assert refusal(ec2.delete_vpc, VpcId=network.vpc)[0] == "DependencyViolation"
    by_hand = refusal(ec2.delete_network_interface, NetworkInterfaceId=interfaces[0]["NetworkInterfaceId"])
    assert by_hand[0] == "InvalidParameterValue"
    ec2.delete_security_group(GroupId=unused)
    fsx.delete_file_system(FileSystemId=file_system["FileSystemId"])
    missing = refusal(ec2.describe_network_interfaces, NetworkInterfaceIds=ids)
    assert missing[0] == "InvalidNetworkInterfaceID.NotFound"
    ec2.delete_subnet(SubnetId=network.subnet)
    ec2.delete_security_group(GroupId=network.group)
    ec2.delete_vpc(VpcId=network.vpc)
