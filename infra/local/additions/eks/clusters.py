"""EKS control planes as EKS makes, shows, changes and deletes them; node groups and Fargate stay as moto has them."""

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
MOST_RANGES = 40
"""https://docs.aws.amazon.com/eks/latest/userguide/service-quotas.html"""
RESERVED = (
    *map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")),
    *map(IPv4Network, ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4")),
)
"""Private and otherwise not on the internet; ranges of documentation are taken, which nobody has tried on AWS
(https://docs.aws.amazon.com/eks/latest/userguide/config-cluster-endpoint.html)."""
MODES = ("CONFIG_MAP", "API_AND_CONFIG_MAP", "API")
KEPT = {
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
    """moto's cluster, with a life cycle and the members it lacks; `parts` holds add-ons, entries and pod identities by kind."""

    def __init__(self, call: Call, vpc: str) -> None:
        asked = call.params
        super().__init__(
            name=asked["name"],
            role_arn=asked["roleArn"],
            resources_vpc_config={},
            account_id=call.account,
            region_name=call.region,
            aws_partition=call.partition,
            version=call.get("version", DEFAULT_VERSION),
            tags=dict(call.get("tags", {})),
            encryption_config=call.get("encryptionConfig"),
        )
        self.ready = time.monotonic() + CREATING_SECONDS
        self.resources_vpc_config = {**_endpoints(asked["resourcesVpcConfig"]), "vpcId": vpc}
        self.access_config = {
            "authenticationMode": "CONFIG_MAP",
            "bootstrapClusterCreatorAdminPermissions": True,
            **call.get("accessConfig", {}),
        }
        self.more = {name: call.get(name, otherwise) for name, otherwise in KEPT.items()}
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
        """moto sets one at birth; here it follows from the clock."""


@dataclass
class Update:
    """One change of a cluster or an add-on, complete when it is answered."""

    kind: str
    params: list[dict[str, str]] = field(default_factory=list)
    id: str = field(default_factory=lambda: str(uuid4()))
    created: datetime = field(default_factory=lambda: datetime.now(UTC))

    def shown(self) -> dict[str, Any]:
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
            "DescribeCluster": lambda call: {"cluster": _shown(control_plane(call, call.params["name"]))},
            "DeleteCluster": _delete,
            "UpdateClusterConfig": _update_config,
            "UpdateClusterVersion": _update_version,
            "DescribeUpdate": _describe_update,
            "TagResource": _tag,
            "UntagResource": _untag,
            "ListTagsForResource": lambda call: {"tags": _tags(call)},
        },
        invalid=INVALID,
    )


def control_plane(call: Call, name: str) -> ControlPlane:
    found: Any = eks_backends[call.account][call.region].clusters.get(name)
    if not isinstance(found, ControlPlane):
        refuse("ResourceNotFoundException", f"No cluster found for name: {name}.", clusterName=name)
    return found


def active(call: Call) -> ControlPlane:
    """Return the control plane that a request is about; nothing can be put on one that is not ACTIVE."""
    found = control_plane(call, call.params["clusterName"])
    if found.status != "ACTIVE":
        refuse("InvalidRequestException", f"Cluster '{found.name}' is not in ACTIVE status")
    return found


def arn(call: Call, kind: str, name: str) -> str:
    return f"arn:{call.partition}:eks:{call.region}:{call.account}:{kind}/{name}"


def check_role(call: Call, role_arn: str, service: str) -> None:
    if not lookups.role_trusts(call, role_arn, service):
        invalid(
            f"Role with arn: {role_arn}, could not be assumed because it does not exist or the trusted entity is not correct"
        )


def _create(call: Call) -> Mapping[str, Any]:
    name, asked = call.params["name"], call.params["resourcesVpcConfig"]
    clusters: dict[str, Any] = eks_backends[call.account][call.region].clusters
    if name in clusters:
        refuse("ResourceInUseException", f"Cluster already exists with name: {name}", clusterName=name)
    if not re.fullmatch(r"1\.\d+", call.get("version", DEFAULT_VERSION)):
        invalid("unsupported Kubernetes version")
    check_role(call, call.params["roleArn"], "eks.amazonaws.com")
    vpc = _check_network(call, asked)
    made = ControlPlane(call, vpc)
    group = ec2_backends[call.account][call.region].create_security_group(
        f"eks-cluster-sg-{name}-{secrets.token_hex(4)}",
        "EKS created security group applied to ENI that is attached to EKS Control Plane master nodes.",
        vpc,
    )
    made.resources_vpc_config["clusterSecurityGroupId"] = group.id
    _put_interfaces(call, made)
    clusters[name] = made
    return {"cluster": _shown(made)}


def _put_interfaces(call: Call, found: ControlPlane) -> None:
    config = found.resources_vpc_config
    groups = (*config["securityGroupIds"], config["clusterSecurityGroupId"])
    interfaces.take(call, found.interfaces)
    found.interfaces = interfaces.put(call, config["subnetIds"], groups, f"Amazon EKS {found.name}")


def _check_network(call: Call, asked: Mapping[str, Any]) -> str:
    """Return the VPC of the subnets; they must be of two zones that EKS is in."""
    vpc, subnets = lookups.vpc_of(call, asked.get("subnetIds") or [], asked.get("securityGroupIds") or [], invalid)
    zones = {str(subnet.availability_zone_id) for subnet in subnets}
    for zone in zones.intersection(CLOSED_ZONES):
        message = (
            f"Cannot create cluster because {zone}, the targeted availability zone, does not currently have sufficient "
        )
        refuse("UnsupportedAvailabilityZoneException", message + "capacity to support the cluster.")
    if len(zones) < 2:
        invalid("Subnets specified must be in at least two different AZs")
    if asked.get("endpointPublicAccess") is False and not asked.get("endpointPrivateAccess"):
        invalid("Private and public endpoint access cannot be false")
    _check_ranges(asked.get("publicAccessCidrs") or [])
    return vpc


def _check_ranges(asked: Sequence[str]) -> None:
    """EKS takes everyone, or blocks without addresses that it calls reserved and does not list."""
    if wrong := [text for text in asked if text != EVERYONE and not _public(text)]:
        invalid(f"The following CIDRs are invalid in publicAccessCidrs: [{', '.join(wrong)}]")
    if len(asked) > MOST_RANGES:
        invalid(f"publicAccessCidrs must have {MOST_RANGES} entries at most")


def _public(text: str) -> bool:
    try:
        block = IPv4Network(text)
    except ValueError:
        return False
    return "/" in text and not any(block.overlaps(item) for item in RESERVED)


def _endpoints(asked: Mapping[str, Any]) -> dict[str, Any]:
    public = asked.get("endpointPublicAccess", True)
    return {
        "subnetIds": asked.get("subnetIds") or [],
        "securityGroupIds": asked.get("securityGroupIds") or [],
        "endpointPublicAccess": public,
        "endpointPrivateAccess": asked.get("endpointPrivateAccess", False),
        "publicAccessCidrs": asked.get("publicAccessCidrs") or (["0.0.0.0/0"] if public else []),
    }


def _log_types(now: tuple[str, ...], asked: Mapping[str, Any]) -> tuple[str, ...]:
    wanted = set(now)
    for change in asked.get("clusterLogging") or []:
        types = set(change.get("types") or [])
        wanted = wanted | types if change.get("enabled") else wanted - types
    return tuple(item for item in LOG_TYPES if item in wanted)


def _shown(found: ControlPlane) -> dict[str, Any]:
    others = [item for item in LOG_TYPES if item not in found.log_types]
    logging = [
        {"types": list(types), "enabled": on} for types, on in ((found.log_types, True), (others, False)) if types
    ]
    return {
        "name": found.name,
        "arn": found.arn,
        "createdAt": found.created_at,
        "version": found.version,
        "endpoint": found.endpoint,
        "roleArn": found.role_arn,
        "resourcesVpcConfig": found.resources_vpc_config,
        "kubernetesNetworkConfig": found.kubernetes_network_config,
        "logging": {"clusterLogging": logging},
        "identity": found.identity,
        "status": found.status,
        "certificateAuthority": found.certificate_authority,
        "platformVersion": "eks.1",
        "tags": found.tags,
        "encryptionConfig": found.encryption_config,
        "accessConfig": found.access_config,
        "health": {"issues": []},
        **{name: value for name, value in found.more.items() if value is not None},
    }


def _delete(call: Call) -> Mapping[str, Any]:
    found = control_plane(call, call.params["name"])
    if found.nodegroups or found.fargate_profiles:
        refuse("ResourceInUseException", "Cluster has nodegroups attached", clusterName=found.name)
    if found.more["deletionProtection"]:
        refuse("InvalidRequestException", "Cluster has deletion protection enabled")
    del eks_backends[call.account][call.region].clusters[found.name]
    interfaces.take(call, found.interfaces)
    group = found.resources_vpc_config["clusterSecurityGroupId"]
    ec2_backends[call.account][call.region].delete_security_group(group_id=group)
    return {"cluster": _shown(found) | {"status": "DELETING"}}


def _update_config(call: Call) -> Mapping[str, Any]:
    found = control_plane(call, call.params["name"])
    if found.status != "ACTIVE":
        refuse("ResourceInUseException", f"Cluster '{found.name}' is not in ACTIVE status", clusterName=found.name)
    asked = [name for name in call.params if name in UPDATE_TYPES or name == "resourcesVpcConfig"]
    if len(asked) != 1:
        invalid("Only one type of update can be allowed.")
    (name,) = asked
    if name == "resourcesVpcConfig":
        return {"update": note_update(found, _change_vpc(call, found))}
    if name == "logging":
        wanted = _log_types(found.log_types, call.params["logging"])
        if wanted == found.log_types:
            invalid("No changes needed for the logging config provided")
        found.log_types = wanted
    elif name == "accessConfig":
        _change_mode(found, call.params["accessConfig"]["authenticationMode"])
    else:
        found.more[name] = call.params[name]
    return {"update": note_update(found, UPDATE_TYPES[name])}


def _change_mode(found: ControlPlane, wanted: str) -> None:
    now = found.access_config["authenticationMode"]
    if MODES.index(wanted) <= MODES.index(now):
        invalid(f"Unsupported authentication mode update from {now} to {wanted}")
    found.access_config["authenticationMode"] = wanted


def _change_vpc(call: Call, found: ControlPlane) -> str:
    asked = call.params["resourcesVpcConfig"]
    now = found.resources_vpc_config
    wanted = {**now, **asked}
    if wanted == now:
        invalid("Cluster is already at the desired configuration")
    vpc = _check_network(call, wanted)
    if vpc != now["vpcId"]:
        invalid("Subnets must be in the VPC of the cluster")
    now.update(_endpoints(wanted))
    _put_interfaces(call, found)
    return "VpcConfigUpdate" if "subnetIds" in asked or "securityGroupIds" in asked else "EndpointAccessUpdate"


def _update_version(call: Call) -> Mapping[str, Any]:
    found = control_plane(call, call.params["name"])
    wanted = call.params["version"]
    if not re.fullmatch(r"1\.\d+", wanted):
        invalid("unsupported Kubernetes version")
    step = int(wanted.split(".")[1]) - int(found.version.split(".")[1])
    if step == 0:
        invalid(f"Cluster is already at the desired configuration with endpointPrivateAccess, version {wanted}")
    if step != 1:
        invalid(f"Unsupported Kubernetes minor version update from {found.version} to {wanted}")
    found.version = wanted
    return {"update": note_update(found, "VersionUpdate", {"Version": wanted})}


def note_update(found: ControlPlane, kind: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
    made = Update(kind, [{"type": name, "value": value} for name, value in (params or {}).items()])
    found.updates[made.id] = made
    return made.shown() | {"status": "InProgress"}


def _describe_update(call: Call) -> Mapping[str, Any]:
    found = control_plane(call, call.params["name"]).updates.get(call.params["updateId"])
    if found is None:
        refuse("ResourceNotFoundException", f"No update found for ID: {call.params['updateId']}")
    return {"update": found.shown()}


def _tags(call: Call) -> dict[str, str]:
    known: dict[str, dict[str, str]] = {}
    for cluster in eks_backends[call.account][call.region].clusters.values():
        known[cluster.arn] = cluster.tags
        known |= {group.arn: group.tags for group in cluster.nodegroups.values()}
        known |= {profile.fargate_profile_arn: profile.tags for profile in cluster.fargate_profiles.values()}
        if isinstance(cluster, ControlPlane):
            records = [record for kind in cluster.parts.values() for record in kind.values()]
            names = ("addonArn", "accessEntryArn", "associationArn")
            known |= {record[name]: record["tags"] for record in records for name in names if name in record}
    found = known.get(call.params["resourceArn"])
    if found is None:
        refuse("NotFoundException", "Resource was not found")
    return found


def _tag(call: Call) -> Mapping[str, Any]:
    _tags(call).update(call.params["tags"])
    return {}


def _untag(call: Call) -> Mapping[str, Any]:
    found = _tags(call)
    for key in call.params["tagKeys"]:
        found.pop(key, None)
    return {}


def invalid(message: str, **details: str) -> NoReturn:
    refuse(INVALID, message, **details)
