"""EKS control planes with the service's checks of network and role, and a life cycle.

moto's clusters have neither VPC nor access configuration, are active at once and never change; it has no add-ons, access
entries or pod identities.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
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
    "eks: control planes without Kubernetes; any version 1.x is taken; no access entry for the creator, no encryption, "
    "outposts, identity providers, Auto Mode or scaling; a new one is there after its first description; only version, logs, "
    "endpoints and support change, and in no time"
)
INVALID = "InvalidParameterException"
DEFAULT_VERSION = "1.33"
LOG_TYPES = ("api", "audit", "authenticator", "controllerManager", "scheduler")
DEFAULT_UPGRADE_POLICY = {"supportType": "EXTENDED"}
_NOT_KEPT = (
    "encryptionConfig", "outpostConfig", "computeConfig", "storageConfig", "remoteNetworkConfig", "zonalShiftConfig",
    "deletionProtection",
)  # fmt: skip
UPDATE_TYPES = {"logging": "LoggingUpdate", "upgradePolicy": "UpgradePolicyUpdate"}


class ControlPlane(MotoCluster):
    """moto's cluster with all members, active once it has been described; `parts` holds add-ons and the like by kind."""

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
        )
        self.status = "CREATING"
        self.resources_vpc_config = {**_endpoint_config(parameters["resourcesVpcConfig"]), "vpcId": vpc}
        self.access_config = {
            "authenticationMode": "CONFIG_MAP",
            "bootstrapClusterCreatorAdminPermissions": True,
            **call.get("accessConfig", {}),
        }
        self.upgrade_policy = call.get("upgradePolicy", DEFAULT_UPGRADE_POLICY)
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
        self.updates: dict[str, dict[str, Any]] = {}
        self.interfaces: list[str] = []


def install() -> None:
    for path in ("clusters/(?P<name>[^/]+)/(?P<rest>.+)", "addons/(?P<rest>.+)", "access-policies"):
        urls.url_paths[f"{{0}}/{path}$"] = EKSResponse.dispatch
    serve(
        EKSResponse,
        "eks",
        {
            "CreateCluster": _create,
            "DescribeCluster": _describe,
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
    refuse_members(call, *_NOT_KEPT)
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
    if len(zones) < 2:
        reject("Subnets specified must be in at least two different AZs")
    if network.get("endpointPublicAccess") is False and not network.get("endpointPrivateAccess"):
        reject("Private and public endpoint access cannot be false")
    return vpc


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


def _describe(call: Call) -> Mapping[str, Any]:
    plane = get_control_plane(call, call.params["name"])
    description = _describe_cluster(plane)
    plane.status = "ACTIVE"
    return {"cluster": description}


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
        "accessConfig": plane.access_config,
        "health": {"issues": []},
        "upgradePolicy": plane.upgrade_policy,
        "deletionProtection": False,
    }


def _delete(call: Call) -> Mapping[str, Any]:
    plane = get_control_plane(call, call.params["name"])
    del eks_backends[call.account][call.region].clusters[plane.name]
    interfaces.delete_interfaces(call, plane.interfaces)
    group = plane.resources_vpc_config["clusterSecurityGroupId"]
    ec2_backends[call.account][call.region].delete_security_group(group_id=group)
    return {"cluster": _describe_cluster(plane) | {"status": "DELETING"}}


def _update_config(call: Call) -> Mapping[str, Any]:
    plane = get_control_plane(call, call.params["name"])
    update_names = [name for name in call.params if name in UPDATE_TYPES or name == "resourcesVpcConfig"]
    if len(update_names) > 1:
        reject("Only one type of update can be allowed.")
    if not update_names:
        reject(f"The embedded AWS changes resourcesVpcConfig, {' and '.join(UPDATE_TYPES)} of a cluster only.")
    (name,) = update_names
    if name == "resourcesVpcConfig":
        return {"update": record_update(plane, _change_vpc_config(call, plane))}
    if name == "logging":
        plane.log_types = _log_types(plane.log_types, call.params["logging"])
    else:
        plane.upgrade_policy = call.params[name]
    return {"update": record_update(plane, UPDATE_TYPES[name])}


def _change_vpc_config(call: Call, plane: ControlPlane) -> str:
    changes = call.params["resourcesVpcConfig"]
    current = plane.resources_vpc_config
    desired = {**current, **changes}
    _check_network(call, desired)
    current.update(_endpoint_config(desired))
    _create_interfaces(call, plane)
    return "VpcConfigUpdate" if "subnetIds" in changes or "securityGroupIds" in changes else "EndpointAccessUpdate"


def _update_version(call: Call) -> Mapping[str, Any]:
    plane = get_control_plane(call, call.params["name"])
    version = call.params["version"]
    step = int(version.partition(".")[2]) - int(plane.version.partition(".")[2])
    if step != 1:
        reject(f"Unsupported Kubernetes minor version update from {plane.version} to {version}")
    plane.version = version
    return {"update": record_update(plane, "VersionUpdate")}


def record_update(plane: ControlPlane, kind: str) -> dict[str, Any]:
    """Return the description of a change, which is complete as soon as it is accepted."""
    update = {"id": str(uuid4()), "type": kind, "params": [], "createdAt": datetime.now(UTC), "errors": []}
    plane.updates[str(update["id"])] = {**update, "status": "Successful"}
    return {**update, "status": "InProgress"}


def _describe_update(call: Call) -> Mapping[str, Any]:
    update = get_control_plane(call, call.params["name"]).updates.get(call.params["updateId"])
    if update is None:
        refuse("ResourceNotFoundException", f"No update found for ID: {call.params['updateId']}")
    return {"update": update}


def _get_tags(call: Call) -> dict[str, str]:
    tags_by_arn: dict[str, dict[str, str]] = {}
    planes: list[Any] = list(eks_backends[call.account][call.region].clusters.values())
    for plane in planes:
        tags_by_arn[plane.arn] = plane.tags
        records = [record for kind in plane.parts.values() for record in kind.values()]
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


def refuse_members(call: Call, *names: str) -> None:
    """Refuse what the emulation would take and forget, which a client would miss later without a reason."""
    for name in names:
        if call.get(name):
            reject(f"The embedded AWS keeps no {name}.")


def reject(message: str, **details: str) -> NoReturn:
    refuse(INVALID, message, **details)
