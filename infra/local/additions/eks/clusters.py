"""EKS control planes with the service's rules and life cycle; node groups and Fargate are moto's."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from ipaddress import IPv4Network
from typing import Any, NoReturn
from uuid import uuid4

from moto.ec2.models import ec2_backends
from moto.eks import urls
from moto.eks.models import Cluster as MotoCluster
from moto.eks.models import eks_backends
from moto.eks.responses import EKSResponse

from infra.local.additions import lookups
from infra.local.additions.ec2 import interfaces
from infra.local.additions.serving import Call, refuse, serve

LEFT_OUT = (
    "eks: control planes without Kubernetes; any version 1.x is taken; no access entry for the creator, no outposts, identity "
    "providers, changes of encryption, Auto Mode or scaling, waiting for the update before, or pages of long listings"
)
INVALID = "InvalidParameterException"
CREATING_SECONDS = 0.3
DEFAULT_VERSION = "1.33"
LOG_TYPES = ("api", "audit", "authenticator", "controllerManager", "scheduler")
CLOSED_ZONES = ("use1-az3", "usw1-az2", "cac1-az3")
"""https://docs.aws.amazon.com/eks/latest/userguide/network-reqs.html"""
EVERYONE = "0.0.0.0/0"
MAX_RANGES = 40
"""https://docs.aws.amazon.com/eks/latest/userguide/service-quotas.html"""
RESERVED = (
    *map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")),
    *map(IPv4Network, ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4")),
)
"""Private ranges and others that are not on the internet; documentation ranges are accepted, which is untested on AWS
(https://docs.aws.amazon.com/eks/latest/userguide/config-cluster-endpoint.html)."""
MODES = ("CONFIG_MAP", "API_AND_CONFIG_MAP", "API")
DEFAULT_OPTIONS = {
    "upgradePolicy": {"supportType": "EXTENDED"},
    "zonalShiftConfig": None,
    "computeConfig": None,
    "storageConfig": None,
    "deletionProtection": False,
    "controlPlaneScalingConfig": None,
    "remoteNetworkConfig": None,
}
UPDATE_TYPES = {
    "logging": "LoggingUpdate",
    "accessConfig": "AccessConfigUpdate",
    "upgradePolicy": "UpgradePolicyUpdate",
    "deletionProtection": "DeletionProtectionUpdate",
}


class ControlPlane(MotoCluster):
    """moto's cluster with a life cycle and all members; `parts` holds add-ons, entries and pod identities by kind."""

    def __init__(self, call: Call, vpc: str) -> None:
        parameters = call.params
        super().__init__(
            name=parameters["name"],
            role_arn=parameters["roleArn"],
            resources_vpc_config={},
            account_id=call.account,
            region_name=call.region,
            aws_partition=call.partition,
            version=call.get("version", DEFAULT_VERSION),
            tags=dict(call.get("tags", {})),
            encryption_config=call.get("encryptionConfig"),
        )
        self.ready = time.monotonic() + CREATING_SECONDS
        self.resources_vpc_config = {**_endpoint_config(parameters["resourcesVpcConfig"]), "vpcId": vpc}
        self.access_config = {
            "authenticationMode": "CONFIG_MAP",
            "bootstrapClusterCreatorAdminPermissions": True,
            **call.get("accessConfig", {}),
        }
        self.options = {name: call.get(name, default) for name, default in DEFAULT_OPTIONS.items()}
        self.kubernetes_network_config: dict[str, Any] = {
            "serviceIpv4Cidr": "172.20.0.0/16",
            "ipFamily": "ipv4",
            "elasticLoadBalancing": {"enabled": False},
            **call.get("kubernetesNetworkConfig", {}),
        }
        self.log_types = _log_types((), call.get("logging", {}))
        identity = secrets.token_hex(16).upper()
        self.identity = {"oidc": {"issuer": f"https://oidc.eks.{call.region}.amazonaws.com/id/{identity}"}}
        self.endpoint = f"https://{identity}.gr7.{call.region}.eks.amazonaws.com"
        self.parts: dict[str, dict[str, Any]] = {"addons": {}, "entries": {}, "identities": {}}
        self.updates: dict[str, Update] = {}
        self.interfaces: list[str] = []

    @property
    def status(self) -> str:
        return "ACTIVE" if time.monotonic() >= self.ready else "CREATING"

    @status.setter
    def status(self, value: str) -> None:
        """Ignore the status that moto sets at creation; the clock determines it."""


@dataclass
class Update:
    """A change of a cluster or an add-on, which is complete as soon as it is accepted."""

    kind: str
    params: list[dict[str, str]] = field(default_factory=list)
    id: str = field(default_factory=lambda: str(uuid4()))
    created: datetime = field(default_factory=lambda: datetime.now(UTC))

    def describe(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "status": "Successful",
            "type": self.kind,
            "params": self.params,
            "createdAt": self.created,
            "errors": [],
        }


def install() -> None:
    for path in ("clusters/(?P<name>[^/]+)/(?P<rest>.+)", "addons/(?P<rest>.+)", "access-policies"):
        urls.url_paths[f"{{0}}/{path}$"] = EKSResponse.dispatch
    serve(
        EKSResponse,
        "eks",
        {
            "CreateCluster": _create,
            "DescribeCluster": lambda call: {
                "cluster": _describe_cluster(get_control_plane(call, call.params["name"]))
            },
            "DeleteCluster": _delete,
            "UpdateClusterConfig": _update_config,
            "UpdateClusterVersion": _update_version,
            "DescribeUpdate": _describe_update,
            "TagResource": _tag,
            "UntagResource": _untag,
            "ListTagsForResource": lambda call: {"tags": _get_tags(call)},
        },
        invalid=INVALID,
    )


def get_control_plane(call: Call, name: str) -> ControlPlane:
    plane: Any = eks_backends[call.account][call.region].clusters.get(name)
    if not isinstance(plane, ControlPlane):
        refuse("ResourceNotFoundException", f"No cluster found for name: {name}.", clusterName=name)
    return plane


def get_active_cluster(call: Call) -> ControlPlane:
    """Return the control plane that a request names; refuse when it is not ACTIVE."""
    plane = get_control_plane(call, call.params["clusterName"])
    if plane.status != "ACTIVE":
        refuse("InvalidRequestException", f"Cluster '{plane.name}' is not in ACTIVE status")
    return plane


def arn(call: Call, kind: str, name: str) -> str:
    return f"arn:{call.partition}:eks:{call.region}:{call.account}:{kind}/{name}"


def check_role(call: Call, role_arn: str, service: str) -> None:
    if not lookups.role_trusts(call, role_arn, service):
        reject(
            f"Role with arn: {role_arn}, could not be assumed because it does not exist or the trusted entity is not correct"
        )


def _create(call: Call) -> Mapping[str, Any]:
    name, network = call.params["name"], call.params["resourcesVpcConfig"]
    clusters: dict[str, Any] = eks_backends[call.account][call.region].clusters
    if name in clusters:
        refuse("ResourceInUseException", f"Cluster already exists with name: {name}", clusterName=name)
    if not re.fullmatch(r"1\.\d+", call.get("version", DEFAULT_VERSION)):
        reject("unsupported Kubernetes version")
    check_role(call, call.params["roleArn"], "eks.amazonaws.com")
    vpc = _check_network(call, network)
    plane = ControlPlane(call, vpc)
    security_group = ec2_backends[call.account][call.region].create_security_group(
        f"eks-cluster-sg-{name}-{secrets.token_hex(4)}",
        "EKS created security group applied to ENI that is attached to EKS Control Plane master nodes.",
        vpc,
    )
    plane.resources_vpc_config["clusterSecurityGroupId"] = security_group.id
    _create_interfaces(call, plane)
    clusters[name] = plane
    return {"cluster": _describe_cluster(plane)}


def _create_interfaces(call: Call, plane: ControlPlane) -> None:
    config = plane.resources_vpc_config
    group_ids = (*config["securityGroupIds"], config["clusterSecurityGroupId"])
    interfaces.delete_interfaces(call, plane.interfaces)
    plane.interfaces = interfaces.create_interfaces(call, config["subnetIds"], group_ids, f"Amazon EKS {plane.name}")


def _check_network(call: Call, network: Mapping[str, Any]) -> str:
    """Return the VPC of the subnets, which must be in at least two zones with EKS."""
    vpc, subnets = lookups.find_vpc(call, network.get("subnetIds") or [], network.get("securityGroupIds") or [], reject)
    zones = {str(subnet.availability_zone_id) for subnet in subnets}
    for zone in zones.intersection(CLOSED_ZONES):
        message = (
            f"Cannot create cluster because {zone}, the targeted availability zone, does not currently have sufficient "
        )
        refuse("UnsupportedAvailabilityZoneException", message + "capacity to support the cluster.")
    if len(zones) < 2:
        reject("Subnets specified must be in at least two different AZs")
    if network.get("endpointPublicAccess") is False and not network.get("endpointPrivateAccess"):
        reject("Private and public endpoint access cannot be false")
    _check_ranges(network.get("publicAccessCidrs") or [])
    return vpc


def _check_ranges(ranges: Sequence[str]) -> None:
    """Refuse CIDRs that EKS calls reserved, without a documented list; 0.0.0.0/0 is allowed."""
    if invalid_ranges := [text for text in ranges if text != EVERYONE and not _is_public(text)]:
        reject(f"The following CIDRs are invalid in publicAccessCidrs: [{', '.join(invalid_ranges)}]")
    if len(ranges) > MAX_RANGES:
        reject(f"publicAccessCidrs must have {MAX_RANGES} entries at most")


def _is_public(text: str) -> bool:
    try:
        block = IPv4Network(text)
    except ValueError:
        return False
    return "/" in text and not any(block.overlaps(reserved) for reserved in RESERVED)


def _endpoint_config(network: Mapping[str, Any]) -> dict[str, Any]:
    public = network.get("endpointPublicAccess", True)
    return {
        "subnetIds": network.get("subnetIds") or [],
        "securityGroupIds": network.get("securityGroupIds") or [],
        "endpointPublicAccess": public,
        "endpointPrivateAccess": network.get("endpointPrivateAccess", False),
        "publicAccessCidrs": network.get("publicAccessCidrs") or (["0.0.0.0/0"] if public else []),
    }


def _log_types(current: tuple[str, ...], request: Mapping[str, Any]) -> tuple[str, ...]:
    enabled = set(current)
    for change in request.get("clusterLogging") or []:
        types = set(change.get("types") or [])
        enabled = enabled | types if change.get("enabled") else enabled - types
    return tuple(log_type for log_type in LOG_TYPES if log_type in enabled)


def _describe_cluster(plane: ControlPlane) -> dict[str, Any]:
    disabled = [log_type for log_type in LOG_TYPES if log_type not in plane.log_types]
    logging = [
        {"types": list(types), "enabled": enabled}
        for types, enabled in ((plane.log_types, True), (disabled, False))
        if types
    ]
    return {
        "name": plane.name,
        "arn": plane.arn,
        "createdAt": plane.created_at,
        "version": plane.version,
        "endpoint": plane.endpoint,
        "roleArn": plane.role_arn,
        "resourcesVpcConfig": plane.resources_vpc_config,
        "kubernetesNetworkConfig": plane.kubernetes_network_config,
        "logging": {"clusterLogging": logging},
        "identity": plane.identity,
        "status": plane.status,
        "certificateAuthority": plane.certificate_authority,
        "platformVersion": "eks.1",
        "tags": plane.tags,
        "encryptionConfig": plane.encryption_config,
        "accessConfig": plane.access_config,
        "health": {"issues": []},
        **{name: value for name, value in plane.options.items() if value is not None},
    }


def _delete(call: Call) -> Mapping[str, Any]:
    plane = get_control_plane(call, call.params["name"])
    if plane.nodegroups or plane.fargate_profiles:
        refuse("ResourceInUseException", "Cluster has nodegroups attached", clusterName=plane.name)
    if plane.options["deletionProtection"]:
        refuse("InvalidRequestException", "Cluster has deletion protection enabled")
    del eks_backends[call.account][call.region].clusters[plane.name]
    interfaces.delete_interfaces(call, plane.interfaces)
    group = plane.resources_vpc_config["clusterSecurityGroupId"]
    ec2_backends[call.account][call.region].delete_security_group(group_id=group)
    return {"cluster": _describe_cluster(plane) | {"status": "DELETING"}}


def _update_config(call: Call) -> Mapping[str, Any]:
    plane = get_control_plane(call, call.params["name"])
    if plane.status != "ACTIVE":
        refuse("ResourceInUseException", f"Cluster '{plane.name}' is not in ACTIVE status", clusterName=plane.name)
    update_names = [name for name in call.params if name in UPDATE_TYPES or name == "resourcesVpcConfig"]
    if len(update_names) != 1:
        reject("Only one type of update can be allowed.")
    (name,) = update_names
    if name == "resourcesVpcConfig":
        return {"update": record_update(plane, _change_vpc_config(call, plane))}
    if name == "logging":
        log_types = _log_types(plane.log_types, call.params["logging"])
        if log_types == plane.log_types:
            reject("No changes needed for the logging config provided")
        plane.log_types = log_types
    elif name == "accessConfig":
        _change_auth_mode(plane, call.params["accessConfig"]["authenticationMode"])
    else:
        plane.options[name] = call.params[name]
    return {"update": record_update(plane, UPDATE_TYPES[name])}


def _change_auth_mode(plane: ControlPlane, mode: str) -> None:
    current = plane.access_config["authenticationMode"]
    if MODES.index(mode) <= MODES.index(current):
        reject(f"Unsupported authentication mode update from {current} to {mode}")
    plane.access_config["authenticationMode"] = mode


def _change_vpc_config(call: Call, plane: ControlPlane) -> str:
    changes = call.params["resourcesVpcConfig"]
    current = plane.resources_vpc_config
    desired = {**current, **changes}
    if desired == current:
        reject("Cluster is already at the desired configuration")
    vpc = _check_network(call, desired)
    if vpc != current["vpcId"]:
        reject("Subnets must be in the VPC of the cluster")
    current.update(_endpoint_config(desired))
    _create_interfaces(call, plane)
    return "VpcConfigUpdate" if "subnetIds" in changes or "securityGroupIds" in changes else "EndpointAccessUpdate"


def _update_version(call: Call) -> Mapping[str, Any]:
    plane = get_control_plane(call, call.params["name"])
    version = call.params["version"]
    if not re.fullmatch(r"1\.\d+", version):
        reject("unsupported Kubernetes version")
    step = int(version.split(".")[1]) - int(plane.version.split(".")[1])
    if step == 0:
        reject(f"Cluster is already at the desired configuration with endpointPrivateAccess, version {version}")
    if step != 1:
        reject(f"Unsupported Kubernetes minor version update from {plane.version} to {version}")
    plane.version = version
    return {"update": record_update(plane, "VersionUpdate", {"Version": version})}


def record_update(plane: ControlPlane, kind: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
    update = Update(kind, [{"type": name, "value": value} for name, value in (params or {}).items()])
    plane.updates[update.id] = update
    return update.describe() | {"status": "InProgress"}


def _describe_update(call: Call) -> Mapping[str, Any]:
    update = get_control_plane(call, call.params["name"]).updates.get(call.params["updateId"])
    if update is None:
        refuse("ResourceNotFoundException", f"No update found for ID: {call.params['updateId']}")
    return {"update": update.describe()}


def _get_tags(call: Call) -> dict[str, str]:
    tags_by_arn: dict[str, dict[str, str]] = {}
    for cluster in eks_backends[call.account][call.region].clusters.values():
        tags_by_arn[cluster.arn] = cluster.tags
        tags_by_arn |= {group.arn: group.tags for group in cluster.nodegroups.values()}
        tags_by_arn |= {profile.fargate_profile_arn: profile.tags for profile in cluster.fargate_profiles.values()}
        if isinstance(cluster, ControlPlane):
            records = [record for kind in cluster.parts.values() for record in kind.values()]
            names = ("addonArn", "accessEntryArn", "associationArn")
            tags_by_arn |= {record[name]: record["tags"] for record in records for name in names if name in record}
    tags = tags_by_arn.get(call.params["resourceArn"])
    if tags is None:
        refuse("NotFoundException", "Resource was not found")
    return tags


def _tag(call: Call) -> Mapping[str, Any]:
    _get_tags(call).update(call.params["tags"])
    return {}


def _untag(call: Call) -> Mapping[str, Any]:
    tags = _get_tags(call)
    for key in call.params["tagKeys"]:
        tags.pop(key, None)
    return {}


def reject(message: str, **details: str) -> NoReturn:
    refuse(INVALID, message, **details)
