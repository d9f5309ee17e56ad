"""Access to an EKS cluster: access entries with their policies, and pod identities."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from moto.eks.responses import EKSResponse

from infra.local.additions.eks.clusters import (
    INVALID,
    ControlPlane,
    arn,
    check_role,
    get_active_cluster,
    get_control_plane,
    refuse_members,
    reject,
)
from infra.local.additions.serving import Call, refuse, serve

LEFT_OUT = (
    "eks access: a principal need not exist in IAM, nothing is permitted or denied, entries are of type STANDARD and change "
    "with their policies only, HyperPod adds no entries of its own, no lists of entries and policies"
)
POLICIES = (
    "AmazonEKSClusterAdminPolicy",
    "AmazonEKSAdminPolicy",
    "AmazonEKSAdminViewPolicy",
    "AmazonEKSEditPolicy",
    "AmazonEKSViewPolicy",
    "AmazonSagemakerHyperpodClusterPolicy",
    "AmazonSagemakerHyperpodControllerPolicy",
    "AmazonSagemakerHyperpodSystemNamespacePolicy",
)
"""https://docs.aws.amazon.com/eks/latest/userguide/access-policy-permissions.html"""


def install() -> None:
    serve(
        EKSResponse,
        "eks",
        {
            "CreateAccessEntry": _create_entry,
            "DescribeAccessEntry": lambda call: {"accessEntry": _describe_entry(_get_entry(call))},
            "DeleteAccessEntry": _delete_entry,
            "AssociateAccessPolicy": _associate,
            "DisassociateAccessPolicy": _disassociate,
            "ListAssociatedAccessPolicies": _list_associated,
            "CreatePodIdentityAssociation": _create_identity,
            "DescribePodIdentityAssociation": lambda call: {"association": _get_identity(call)},
            "DeletePodIdentityAssociation": _delete_identity,
        },
        invalid=INVALID,
    )


def _get_plane(call: Call) -> ControlPlane:
    return get_control_plane(call, call.params["clusterName"])


def _get_api_cluster(call: Call) -> ControlPlane:
    """Return the active control plane; refuse when its authentication mode does not allow access entries."""
    plane = get_active_cluster(call)
    if plane.access_config["authenticationMode"] == "CONFIG_MAP":
        message = "The cluster's authentication mode must be set to one of [API, API_AND_CONFIG_MAP] to perform this operation."
        refuse("InvalidRequestException", message)
    return plane


def _get_entry(call: Call) -> dict[str, Any]:
    principal = call.params["principalArn"]
    entry: dict[str, Any] | None = _get_plane(call).parts["entries"].get(principal)
    if entry is None:
        message = f"The specified principalArn could not be found: {principal}"
        refuse("ResourceNotFoundException", message)
    return entry


def _describe_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "policies"}


def _create_entry(call: Call) -> Mapping[str, Any]:
    plane = _get_api_cluster(call)
    principal = call.params["principalArn"]
    service, _, name = principal.partition(":iam::")[2].partition(":")[2].partition("/")
    if service not in ("role", "user") or not name:
        reject("The principalArn parameter format is not valid")
    if principal in plane.parts["entries"]:
        message = "The specified access entry resource is already in use on this cluster."
        refuse("ResourceInUseException", message, clusterName=plane.name)
    refuse_members(call, "kubernetesGroups", "username")
    if call.get("type", "STANDARD") != "STANDARD":
        reject("The embedded AWS makes access entries of type STANDARD only")
    now = datetime.now(UTC)
    path = f"{plane.name}/{service}/{principal.split(':')[4]}/{name.rpartition('/')[2]}/{uuid4()}"
    entry = {
        "clusterName": plane.name,
        "principalArn": principal,
        "kubernetesGroups": [],
        "accessEntryArn": arn(call, "access-entry", path),
        "createdAt": now,
        "modifiedAt": now,
        "tags": dict(call.get("tags", {})),
        "username": _username(principal),
        "type": "STANDARD",
        "policies": {},
    }
    plane.parts["entries"][principal] = entry
    return {"accessEntry": _describe_entry(entry)}


def _username(principal: str) -> str:
    """Return the default Kubernetes user name of a role's sessions or of a user."""
    if ":role/" not in principal:
        return principal
    name = principal.rpartition("/")[2]
    return principal.split(":role/")[0].replace(":iam:", ":sts:") + f":assumed-role/{name}/{{{{SessionName}}}}"


def _delete_entry(call: Call) -> Mapping[str, Any]:
    entry = _get_entry(call)
    del _get_plane(call).parts["entries"][entry["principalArn"]]
    return {}


def _policy_arn(call: Call, name: str) -> str:
    return f"arn:{call.partition}:eks::aws:cluster-access-policy/{name}"


def _associate(call: Call) -> Mapping[str, Any]:
    entry, policy, scope = _get_entry(call), call.params["policyArn"], call.params["accessScope"]
    if policy not in [_policy_arn(call, name) for name in POLICIES]:
        reject("The policyArn parameter format is not valid")
    now = datetime.now(UTC)
    association = {"policyArn": policy, "accessScope": scope, "associatedAt": now, "modifiedAt": now}
    entry["policies"][policy] = association
    return {
        "clusterName": entry["clusterName"],
        "principalArn": entry["principalArn"],
        "associatedAccessPolicy": association,
    }


def _disassociate(call: Call) -> Mapping[str, Any]:
    if _get_entry(call)["policies"].pop(call.params["policyArn"], None) is None:
        refuse("ResourceNotFoundException", "The specified policyArn is not associated with the access entry.")
    return {}


def _list_associated(call: Call) -> Mapping[str, Any]:
    entry = _get_entry(call)
    return {
        "clusterName": entry["clusterName"],
        "principalArn": entry["principalArn"],
        "associatedAccessPolicies": list(entry["policies"].values()),
    }


def _get_identity(call: Call) -> dict[str, Any]:
    association_id = call.params["associationId"]
    identity: dict[str, Any] | None = _get_plane(call).parts["identities"].get(association_id)
    if identity is None:
        refuse("ResourceNotFoundException", f"Pod identity association not found: {association_id}")
    return identity


def _create_identity(call: Call) -> Mapping[str, Any]:
    """Give the pods of a service account a role; refuse a second role for the same account."""
    plane, parameters = get_active_cluster(call), call.params
    refuse_members(call, "targetRoleArn")
    for other in plane.parts["identities"].values():
        if all(other[name] == parameters[name] for name in ("namespace", "serviceAccount")):
            message = f"Association already exists: {other['associationId']}"
            refuse("ResourceInUseException", message, clusterName=plane.name)
    check_role(call, parameters["roleArn"], "pods.eks.amazonaws.com")
    now, association_id = datetime.now(UTC), f"a-{secrets.token_hex(9)[:17]}"
    record = {
        "clusterName": plane.name,
        "namespace": parameters["namespace"],
        "serviceAccount": parameters["serviceAccount"],
        "roleArn": parameters["roleArn"],
        "associationArn": arn(call, "podidentityassociation", f"{plane.name}/{association_id}"),
        "associationId": association_id,
        "tags": dict(call.get("tags", {})),
        "createdAt": now,
        "modifiedAt": now,
        "disableSessionTags": call.get("disableSessionTags", False),
    }
    plane.parts["identities"][association_id] = record
    return {"association": record}


def _delete_identity(call: Call) -> Mapping[str, Any]:
    record = _get_identity(call)
    del _get_plane(call).parts["identities"][record["associationId"]]
    return {"association": record}
