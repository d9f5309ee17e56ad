"""FSx of the embedded AWS accepts and refuses what FSx does, fills in its defaults and keeps what it is told."""

from __future__ import annotations

import time
from typing import Any

import pytest

from infra.local.additions.fsx.associations import LINKING_SECONDS
from infra.local.aws import LocalAws
from tests.infra.local_network import Network, client, refusal
from tests.processes import wait_for

pytestmark = pytest.mark.slow

FOREIGN_LOGS = "arn:aws:logs:us-west-2:123456789012:log-group:mine"


@pytest.fixture(scope="module")
def fsx(aws: LocalAws) -> Any:
    return client(aws, "fsx")


@pytest.fixture(scope="module")
def bucket(aws: LocalAws) -> str:
    where = {"LocationConstraint": "us-west-2"}
    client(aws, "s3").create_bucket(Bucket="lustrain-data", CreateBucketConfiguration=where)
    return "lustrain-data"


def lustre(network: Network, capacity: int | None = 4800, **changes: Any) -> dict[str, Any]:
    """A request for an EFA file system of 1000 MB/s per TiB; `changes` replace members, None takes one away."""
    top = {
        name: changes.pop(name) for name in list(changes) if name in ("StorageType", "SubnetIds", "SecurityGroupIds")
    }
    configuration = {
        "DeploymentType": "PERSISTENT_2",
        "PerUnitStorageThroughput": 1000,
        "EfaEnabled": True,
        "MetadataConfiguration": {"Mode": "AUTOMATIC"},
        **changes,
    }
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
    return lustre(
        network,
        None,
        **{
            "StorageType": "INTELLIGENT_TIERING",
            "PerUnitStorageThroughput": None,
            "EfaEnabled": False,
            "ThroughputCapacity": 4000,
            "MetadataConfiguration": {"Mode": "USER_PROVISIONED", "Iops": 6000},
            "DataReadCacheConfiguration": {"SizingMode": "PROPORTIONAL_TO_THROUGHPUT_CAPACITY"},
            **changes,
        },
    )


def openzfs(network: Network) -> dict[str, Any]:
    return {
        "FileSystemType": "OPENZFS",
        "StorageCapacity": 256,
        "SubnetIds": [network.subnet],
        "SecurityGroupIds": [network.group],
        "OpenZFSConfiguration": {
            "DeploymentType": "SINGLE_AZ_HA_2",
            "ThroughputCapacity": 320,
            "RootVolumeConfiguration": {"DataCompressionType": "ZSTD"},
        },
    }


def available(fsx: Any, request: dict[str, Any]) -> dict[str, Any]:
    made = fsx.create_file_system(**request)["FileSystem"]
    return wait(lambda: fsx.describe_file_systems(FileSystemIds=[made["FileSystemId"]])["FileSystems"][0])


def wait(look: Any) -> dict[str, Any]:
    found: dict[str, Any] = wait_for(look, lambda seen: seen["Lifecycle"] == "AVAILABLE")
    return found


def test_a_new_lustre_file_system_is_creating_then_available_with_the_defaults_of_the_service(
    fsx: Any, network: Network
) -> None:
    made = fsx.create_file_system(**lustre(network))["FileSystem"]
    assert made["Lifecycle"] == "CREATING"
    found = wait(lambda: fsx.describe_file_systems(FileSystemIds=[made["FileSystemId"]])["FileSystems"][0])
    configuration = found["LustreConfiguration"]
    assert found["VpcId"] == network.vpc
    assert found["FileSystemTypeVersion"] == "2.15"
    assert found["DNSName"] == f"{found['FileSystemId']}.fsx.us-west-2.amazonaws.com"
    assert len(configuration["MountName"]) == 8
    assert configuration["MountName"] != "fsx"
    assert configuration["MetadataConfiguration"] == {"Mode": "AUTOMATIC", "Iops": 6000}
    assert configuration["DataCompressionType"] == "NONE"
    assert configuration["LogConfiguration"] == {"Level": "DISABLED"}


@pytest.mark.parametrize(
    ("per_unit", "capacity", "efa", "fits"),
    [
        (125, 38400, True, True),
        (125, 19200, True, False),
        (250, 19200, True, True),
        (500, 9600, True, True),
        (500, 4800, True, False),
        (1000, 4800, True, True),
        (1000, 2400, True, False),
        (125, 1200, False, True),
        (125, 2400, False, True),
        (250, 7200, False, True),
        (250, 5000, False, False),
        (250, 3600, False, False),
    ],
)
def test_capacity_goes_in_the_steps_of_its_throughput(
    fsx: Any, network: Network, per_unit: int, capacity: int, efa: bool, fits: bool
) -> None:
    request = lustre(network, capacity, PerUnitStorageThroughput=per_unit, EfaEnabled=efa)
    if fits:
        assert fsx.create_file_system(**request)["FileSystem"]["StorageCapacity"] == capacity
    else:
        code, message = refusal(fsx.create_file_system, **request)
        assert code == "BadRequest"
        assert f"StorageCapacity {capacity} is not valid" in message


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"PerUnitStorageThroughput": 200}, "InvalidPerUnitStorageThroughput", "use 125, 250, 500, 1000"),
        ({"PerUnitStorageThroughput": None}, "InvalidPerUnitStorageThroughput", "use 125"),
        ({"MetadataConfiguration": None}, "BadRequest", "EFA is supported"),
        ({"MetadataConfiguration": {"Mode": "AUTOMATIC", "Iops": 6000}}, "BadRequest", "Iops cannot be set"),
        ({"MetadataConfiguration": {"Mode": "USER_PROVISIONED", "Iops": 9000}}, "BadRequest", "Metadata Iops 9000"),
        ({"ThroughputCapacity": 4000}, "BadRequest", "INTELLIGENT_TIERING"),
        ({"ImportPath": "s3://bucket"}, "BadRequest", "data repository associations"),
        ({"DataCompressionType": "ZSTD"}, "ValidationException", "enum value set: [NONE, LZ4]"),
        (
            {"LogConfiguration": {"Level": "ERROR_ONLY", "Destination": FOREIGN_LOGS}},
            "BadRequest",
            "begins with /aws/fsx/",
        ),
        ({"DeploymentType": "SCRATCH_3"}, "ValidationException", "lustreConfiguration.deploymentType"),
        ({"SubnetIds": ["subnet-0123456789abcdef0"]}, "InvalidNetworkSettings", "subnet-0123456789abcdef0"),
        ({"SecurityGroupIds": ["sg-0123456789abcdef0"]}, "InvalidNetworkSettings", "sg-0123456789abcdef0"),
    ],
)
def test_fsx_refuses_with_its_own_words(
    fsx: Any, network: Network, changes: dict[str, Any], code: str, said: str
) -> None:
    found, message = refusal(fsx.create_file_system, **lustre(network, **changes))
    assert found == code
    assert said in message


def test_efa_needs_a_group_that_is_open_to_itself_both_ways(fsx: Any, network: Network) -> None:
    half = network.closed_group("half-open")
    itself = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": half}]}]
    network.ec2.authorize_security_group_ingress(GroupId=half, IpPermissions=itself)
    code, message = refusal(fsx.create_file_system, **lustre(network, SecurityGroupIds=[half]))
    assert (code, message.split(" to create")[0]) == (
        "InvalidNetworkSettings",
        "Insufficient security group permissions",
    )
    network.ec2.authorize_security_group_egress(GroupId=half, IpPermissions=itself)
    assert fsx.create_file_system(**lustre(network, SecurityGroupIds=[half]))["FileSystem"]["Lifecycle"] == "CREATING"


def test_file_servers_must_reach_each_other_on_port_988(fsx: Any, network: Network) -> None:
    group = network.closed_group("no-lnet")
    request = lustre(network, EfaEnabled=False, SecurityGroupIds=[group])
    assert "port 988" in refusal(fsx.create_file_system, **request)[1]
    lnet = [{"IpProtocol": "tcp", "FromPort": 988, "ToPort": 988, "UserIdGroupPairs": [{"GroupId": group}]}]
    network.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=lnet)
    assert fsx.create_file_system(**request)["FileSystem"]["Lifecycle"] == "CREATING"


def test_intelligent_tiering_has_rules_of_its_own(fsx: Any, network: Network) -> None:
    assert fsx.create_file_system(**tiered(network))["FileSystem"]["StorageType"] == "INTELLIGENT_TIERING"
    cache = {"SizingMode": "USER_PROVISIONED", "SizeGiB": 16}
    for changes, said in (
        ({"ThroughputCapacity": 5000}, "multiple of 4000"),
        ({"MetadataConfiguration": {"Mode": "AUTOMATIC"}}, "Iops 6000 or 12000"),
        ({"DataReadCacheConfiguration": None}, "DataReadCacheConfiguration is required"),
        ({"DataReadCacheConfiguration": cache}, "between 32 and 131072"),
        ({"PerUnitStorageThroughput": 250}, "PerUnitStorageThroughput cannot be set"),
    ):
        code, message = refusal(fsx.create_file_system, **tiered(network, **changes))
        assert (code, said in message) == ("BadRequest", True), message


def test_the_same_token_makes_one_file_system_and_another_request_under_it_is_refused(
    fsx: Any, network: Network
) -> None:
    request = lustre(network, ClientRequestToken=None) | {"ClientRequestToken": "token-1"}
    first = fsx.create_file_system(**request)["FileSystem"]["FileSystemId"]
    assert fsx.create_file_system(**request)["FileSystem"]["FileSystemId"] == first
    assert refusal(fsx.create_file_system, **request | {"StorageCapacity": 9600})[0] == "IncompatibleParameterError"


def test_what_can_change_changes_in_place_and_the_rest_is_refused(fsx: Any, network: Network) -> None:
    name = available(fsx, lustre(network))["FileSystemId"]
    more = {"DataCompressionType": "LZ4", "MetadataConfiguration": {"Mode": "USER_PROVISIONED", "Iops": 12000}}
    fsx.update_file_system(FileSystemId=name, StorageCapacity=9600, LustreConfiguration=more)
    found = fsx.describe_file_systems(FileSystemIds=[name])["FileSystems"][0]
    assert found["StorageCapacity"] == 9600
    assert found["LustreConfiguration"]["DataCompressionType"] == "LZ4"
    assert found["LustreConfiguration"]["MetadataConfiguration"] == {"Mode": "USER_PROVISIONED", "Iops": 12000}
    assert found["AdministrativeActions"][0]["Status"] == "COMPLETED"
    for changes, said in (
        ({"StorageCapacity": 4800}, "greater than the current 9600"),
        ({"StorageCapacity": 12000}, "multiples of 4800"),
        ({"LustreConfiguration": {"PerUnitStorageThroughput": 500}}, "EFA-enabled"),
        ({"LustreConfiguration": {"MetadataConfiguration": {"Iops": 6000}}}, "only be increased"),
        ({"FileSystemTypeVersion": "2.12"}, "cannot go back"),
    ):
        code, message = refusal(fsx.update_file_system, FileSystemId=name, **changes)
        assert (code, said in message) == ("BadRequest", True), message


def test_a_deleted_file_system_is_not_found(fsx: Any, network: Network) -> None:
    name = available(fsx, lustre(network))["FileSystemId"]
    fsx.delete_file_system(FileSystemId=name)
    assert refusal(fsx.describe_file_systems, FileSystemIds=[name])[0] == "FileSystemNotFound"


def test_tags_come_back_and_go(fsx: Any, network: Network) -> None:
    request = lustre(network) | {"Tags": [{"Key": "lustrain:cluster", "Value": "demo"}]}
    made = fsx.create_file_system(**request)["FileSystem"]
    fsx.tag_resource(ResourceARN=made["ResourceARN"], Tags=[{"Key": "team", "Value": "ml"}])
    fsx.untag_resource(ResourceARN=made["ResourceARN"], TagKeys=["lustrain:cluster"])
    found = fsx.describe_file_systems(FileSystemIds=[made["FileSystemId"]])["FileSystems"][0]
    assert found["Tags"] == [{"Key": "team", "Value": "ml"}]


def test_associations_are_linked_one_after_another(fsx: Any, network: Network, bucket: str) -> None:
    name = available(fsx, lustre(network))["FileSystemId"]
    events, began = {"AutoImportPolicy": {"Events": ["NEW", "CHANGED"]}}, time.monotonic()
    first, second = (
        fsx.create_data_repository_association(
            FileSystemId=name, FileSystemPath=f"/{word}", DataRepositoryPath=f"s3://{bucket}/{word}", S3=events
        )["Association"]["AssociationId"]
        for word in ("data", "results")
    )

    def look(one: str) -> dict[str, Any]:
        found: dict[str, Any] = fsx.describe_data_repository_associations(AssociationIds=[one])["Associations"][0]
        return found

    wait(lambda: look(second))
    assert look(first)["Lifecycle"] == "AVAILABLE"
    assert time.monotonic() - began >= 2 * LINKING_SECONDS
    fsx.update_data_repository_association(AssociationId=first, S3={"AutoExportPolicy": {"Events": ["NEW"]}})
    assert look(first)["S3"] == {**events, "AutoExportPolicy": {"Events": ["NEW"]}}
    fsx.delete_data_repository_association(AssociationId=first)
    assert refusal(look, one=first)[0] == "DataRepositoryAssociationNotFound"
    by_file_system = [{"Name": "file-system-id", "Values": [name]}]
    left = fsx.describe_data_repository_associations(Filters=by_file_system)["Associations"]
    assert [one["AssociationId"] for one in left] == [second]


@pytest.mark.parametrize(
    ("folder", "repository", "said"),
    [
        ("/data/train", "s3://lustrain-data/other", "FileSystemPath /data/train/ overlaps"),
        ("/", "s3://lustrain-data/other", "FileSystemPath / overlaps"),
        ("/other", "s3://lustrain-data/data/deeper/", "DataRepositoryPath s3://lustrain-data/data/deeper/ overlaps"),
        ("/other", "s3://lustrain-data", "overlaps"),
        ("other", "s3://lustrain-data/other", "begin with a forward slash"),
        ("/other", "s3://nobody-has-this-bucket/other", "does not exist"),
        ("/other", "lustrain-data/other", "form s3://"),
    ],
)
def test_an_association_keeps_to_its_own_folder_and_prefix(
    fsx: Any, network: Network, bucket: str, folder: str, repository: str, said: str
) -> None:
    name = available(fsx, lustre(network))["FileSystemId"]
    good = {"FileSystemId": name, "FileSystemPath": "/data", "DataRepositoryPath": f"s3://{bucket}/data"}
    fsx.create_data_repository_association(**good)
    bad = {"FileSystemId": name, "FileSystemPath": folder, "DataRepositoryPath": repository}
    code, message = refusal(fsx.create_data_repository_association, **bad)
    assert (code, said in message) == ("BadRequest", True), message
    beside = {**good, "FileSystemPath": "/data-2", "DataRepositoryPath": f"s3://{bucket}/data-2"}
    assert fsx.create_data_repository_association(**beside)["Association"]["FileSystemPath"] == "/data-2"


def test_an_association_needs_its_bucket_in_the_same_region_and_a_file_system_that_can(
    aws: LocalAws, fsx: Any, network: Network, bucket: str
) -> None:
    client(aws, "s3", "us-east-1").create_bucket(Bucket="lustrain-far")
    name = available(fsx, lustre(network))["FileSystemId"]
    far = {"FileSystemId": name, "FileSystemPath": "/far", "DataRepositoryPath": "s3://lustrain-far"}
    assert "is in us-east-1" in refusal(fsx.create_data_repository_association, **far)[1]
    name = available(fsx, tiered(network))["FileSystemId"]
    cold = {"FileSystemId": name, "FileSystemPath": "/data", "DataRepositoryPath": f"s3://{bucket}"}
    assert "Intelligent-Tiering" in refusal(fsx.create_data_repository_association, **cold)[1]


def test_a_ninth_association_is_refused(fsx: Any, network: Network, bucket: str) -> None:
    name = available(fsx, lustre(network))["FileSystemId"]
    requests = [
        {"FileSystemId": name, "FileSystemPath": f"/d{n}", "DataRepositoryPath": f"s3://{bucket}/d{n}"}
        for n in range(9)
    ]
    for request in requests[:8]:
        fsx.create_data_repository_association(**request)
    assert "at most 8" in refusal(fsx.create_data_repository_association, **requests[8])[1]


def test_an_openzfs_file_system_comes_with_a_root_volume_that_can_change(fsx: Any, network: Network) -> None:
    request = openzfs(network)
    assert "use 160, 320" in refusal(fsx.create_file_system, **_with_throughput(request, 300))[1]
    found = available(fsx, request)
    root = found["OpenZFSConfiguration"]["RootVolumeId"]
    assert found["OpenZFSConfiguration"]["DiskIopsConfiguration"] == {"Mode": "AUTOMATIC", "Iops": 768}
    exports = [{"ClientConfigurations": [{"Clients": "10.0.0.0/16", "Options": ["rw", "no_root_squash"]}]}]
    fsx.update_volume(VolumeId=root, OpenZFSConfiguration={"NfsExports": exports})
    (volume,) = fsx.describe_volumes(VolumeIds=[root])["Volumes"]
    assert volume["OpenZFSConfiguration"]["NfsExports"] == exports
    assert volume["OpenZFSConfiguration"]["DataCompressionType"] == "ZSTD"
    assert "10 percent" in refusal(fsx.update_file_system, FileSystemId=found["FileSystemId"], StorageCapacity=260)[1]
    fsx.update_file_system(FileSystemId=found["FileSystemId"], StorageCapacity=512)
    grown = fsx.describe_file_systems(FileSystemIds=[found["FileSystemId"]])["FileSystems"][0]
    assert grown["OpenZFSConfiguration"]["DiskIopsConfiguration"]["Iops"] == 1536
    fsx.delete_file_system(FileSystemId=found["FileSystemId"])
    assert refusal(fsx.describe_volumes, VolumeIds=[root])[0] == "VolumeNotFound"


@pytest.mark.parametrize("kind", ["LUSTRE", "OPENZFS"])
def test_subnet_group_and_vpc_stay_while_a_file_system_has_interfaces_in_them(
    aws: LocalAws, fsx: Any, kind: str
) -> None:
    network = Network(aws)
    ec2 = network.ec2
    unused = network.closed_group("unused")
    request = lustre(network) if kind == "LUSTRE" else openzfs(network)
    made = available(fsx, request)
    shown = ec2.describe_network_interfaces(NetworkInterfaceIds=made["NetworkInterfaceIds"])["NetworkInterfaces"]
    assert len(shown) == 2
    for one in shown:
        assert (one["Description"], one["Status"], one["RequesterManaged"]) == ("Created by Amazon FSx", "in-use", True)
        assert (one["SubnetId"], [group["GroupId"] for group in one["Groups"]]) == (network.subnet, [network.group])
    code, message = refusal(ec2.delete_subnet, SubnetId=network.subnet)
    assert (code, message) == (
        "DependencyViolation",
        f"The subnet '{network.subnet}' has dependencies and cannot be deleted.",
    )
    code, message = refusal(ec2.delete_security_group, GroupId=network.group)
    assert (code, message) == ("DependencyViolation", f"resource {network.group} has a dependent object")
    assert refusal(ec2.delete_vpc, VpcId=network.vpc)[0] == "DependencyViolation"
    by_hand = refusal(ec2.delete_network_interface, NetworkInterfaceId=shown[0]["NetworkInterfaceId"])
    assert by_hand[0] == "InvalidParameterValue"
    ec2.delete_security_group(GroupId=unused)
    fsx.delete_file_system(FileSystemId=made["FileSystemId"])
    gone = refusal(ec2.describe_network_interfaces, NetworkInterfaceIds=made["NetworkInterfaceIds"])
    assert gone[0] == "InvalidNetworkInterfaceID.NotFound"
    ec2.delete_subnet(SubnetId=network.subnet)
    ec2.delete_security_group(GroupId=network.group)
    ec2.delete_vpc(VpcId=network.vpc)


def _with_throughput(request: dict[str, Any], throughput: int) -> dict[str, Any]:
    return {**request, "OpenZFSConfiguration": {**request["OpenZFSConfiguration"], "ThroughputCapacity": throughput}}
