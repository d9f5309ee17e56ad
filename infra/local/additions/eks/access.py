"""Access to an EKS cluster: access entries with their policies, and pod identities."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from moto.eks.responses import EKSResponse

from infra.local.additions.eks.clusters import INVALID, ControlPlane, active, arn, check_role, control_plane, invalid
from infra.local.additions.serving import Call, refuse, serve

LEFT_OUT = (
    "eks access: a principal need not exist in IAM, nothing is permitted or denied, HyperPod adds no entries of its own, "
    "no lists of entries and policies"
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
TYPES = ("STANDARD", "FARGATE_LINUX", "EC2_LINUX", "EC2_WINDOWS", "EC2", "HYBRID_LINUX", "HYPERPOD_LINUX")


def install() -> None:
    serve(
        EKSResponse,
        "eks",
        {
            "CreateAccessEntry": _create_entry,
            "DescribeAccessEntry": lambda call: {"accessEntry": _shown(_entry(call))},
            "UpdateAccessEntry": _update_entry,
            "DeleteAccessEntry": _delete_entry,
            "AssociateAccessPolicy": _associate,
            "DisassociateAccessPolicy": _disassociate,
            "ListAssociatedAccessPolicies": _list_associated,
            "CreatePodIdentityAssociation": _create_identity,
            "DescribePodIdentityAssociation": lambda call: {"association": _identity(call)},
            "UpdatePodIdentityAssociation": _update_identity,
            "DeletePodIdentityAssociation": _delete_identity,
            "ListPodIdentityAssociations": _list_identities,
        },
        invalid=INVALID,
    )


def _plane(call: Call) -> ControlPlane:
    return control_plane(call, call.params["clusterName"])


def _open_to_the_api(call: Call) -> ControlPlane:
    """Return the control plane, which must let the API say who enters."""
    found = active(call)
    if found.access_config["authenticationMode"] == "CONFIG_MAP":
        message = "The cluster's authentication mode must be set to one of [API, API_AND_CONFIG_MAP] to perform this operation."
        refuse("InvalidRequestException", message)
    return found


def _entry(call: Call) -> dict[str, Any]:
    principal = call.params["principalArn"]
    found: dict[str, Any] | None = _plane(call).parts["entries"].get(principal)
    if found is None:
        message = f"The specified principalArn could not be found: {principal}"
        refuse("ResourceNotFoundException", message)
    return found


def _shown(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "policies"}


def _check_entry(call: Call) -> None:
    kind = call.get("type", "STANDARD")
    for group in call.get("kubernetesGroups", []):
        if group.startswith("system:"):
            invalid(f"The kubernetes group name {group} is invalid, it cannot start with system:")
    if call.get("username", "").startswith("system:"):
        invalid("The username must not begin with system:")
    if kind != "STANDARD" and (call.get("kubernetesGroups") or call.get("username")):
        invalid(f"Kubernetes groups and username cannot be set for an access entry of type {kind}")


def _create_entry(call: Call) -> Mapping[str, Any]:
    found = _open_to_the_api(call)
    principal = call.params["principalArn"]
    service, _, name = principal.partition(":iam::")[2].partition(":")[2].partition("/")
    if service not in ("role", "user") or not name:
        invalid("The principalArn parameter format is not valid")
    if principal in found.parts["entries"]:
        message = "The specified access entry resource is already in use on this cluster."
        refuse("ResourceInUseException", message, clusterName=found.name)
    if call.get("type", "STANDARD") not in TYPES:
        invalid(f"The type {call.params['type']} is not valid")
    _check_entry(call)
    now = datetime.now(UTC)
    path = f"{found.name}/{service}/{principal.split(':')[4]}/{name.rpartition('/')[2]}/{uuid4()}"
    entry = {
        "clusterName": found.name,
        "principalArn": principal,
        "kubernetesGroups": call.get("kubernetesGroups", []),
        "accessEntryArn": arn(call, "access-entry", path),
        "createdAt": now,
        "modifiedAt": now,
        "tags": dict(call.get("tags", {})),
        "username": call.get("username", _username(principal)),
        "type": call.get("type", "STANDARD"),
        "policies": {},
    }
    found.parts["entries"][principal] = entry
    return {"accessEntry": _shown(entry)}


def _username(principal: str) -> str:
    """Return the name that a role's sessions have in Kubernetes unless another is given."""
    if ":role/" not in principal:
        return principal
    name = principal.rpartition("/")[2]
    return principal.split(":role/")[0].replace(":iam:", ":sts:") + f":assumed-role/{name}/{{{{SessionName}}}}"


def _update_entry(call: Call) -> Mapping[str, Any]:
    entry = _entry(call)
    _check_entry(call)
    for name in ("kubernetesGroups", "username"):
        if call.get(name) is not None:
            entry[name] = call.params[name]
    entry["modifiedAt"] = datetime.now(UTC)
    return {"accessEntry": _shown(entry)}


def _delete_entry(call: Call) -> Mapping[str, Any]:
    entry = _entry(call)
    del _plane(call).parts["entries"][entry["principalArn"]]
    return {}


def _policy_arn(call: Call, name: str) -> str:
    return f"arn:{call.partition}:eks::aws:cluster-access-policy/{name}"


def _associate(call: Call) -> Mapping[str, Any]:
    entry, policy, scope = _entry(call), call.params["policyArn"], call.params["accessScope"]
    if policy not in [_policy_arn(call, name) for name in POLICIES]:
        invalid("The policyArn parameter format is not valid")
    if entry["type"] != "STANDARD":
        invalid("You can only associate policies with access entries of type STANDARD")
    if (scope.get("type") == "namespace") != bool(scope.get("namespaces")):
        invalid("Namespaces must be given for an access scope of type namespace, and only for it")
    now = datetime.now(UTC)
    since = entry["policies"].get(policy, {}).get("associatedAt", now)
    made = {"policyArn": policy, "accessScope": scope, "associatedAt": since, "modifiedAt": now}
    entry["policies"][policy] = made
    return {"clusterName": entry["clusterName"], "principalArn": entry["principalArn"], "associatedAccessPolicy": made}


def _disassociate(call: Call) -> Mapping[str, Any]:
    if _entry(call)["policies"].pop(call.params["policyArn"], None) is None:
        refuse("ResourceNotFoundException", "The specified policyArn is not associated with the access entry.")
    return {}


def _list_associated(call: Call) -> Mapping[str, Any]:
    entry = _entry(call)
    return {
        "clusterName": entry["clusterName"],
        "principalArn": entry["principalArn"],
        "associatedAccessPolicies": list(entry["policies"].values()),
    }


def _identity(call: Call) -> dict[str, Any]:
    wanted = call.params["associationId"]
    found: dict[str, Any] | None = _plane(call).parts["identities"].get(wanted)
    if found is None:
        refuse("ResourceNotFoundException", f"Pod identity association not found: {wanted}")
    return found


def add_identity(call: Call, plane: ControlPlane, namespace: str, account: str, role: str) -> dict[str, Any]:
    """Give the pods of a service account a role; an account has one at most."""
    for other in plane.parts["identities"].values():
        if (other["namespace"], other["serviceAccount"]) == (namespace, account):
            message = f"Association already exists: {other['associationId']}"
            refuse("ResourceInUseException", message, clusterName=plane.name)
    check_role(call, role, "pods.eks.amazonaws.com")
    now, made = datetime.now(UTC), f"a-{secrets.token_hex(9)[:17]}"
    record = {
        "clusterName": plane.name,
        "namespace": namespace,
        "serviceAccount": account,
        "roleArn": role,
        "associationArn": arn(call, "podidentityassociation", f"{plane.name}/{made}"),
        "associationId": made,
        "tags": dict(call.get("tags", {})),
        "createdAt": now,
        "modifiedAt": now,
        "disableSessionTags": call.get("disableSessionTags", False),
    }
    plane.parts["identities"][made] = record
    return record


def _create_identity(call: Call) -> Mapping[str, Any]:
    asked = call.params
    record = add_identity(call, active(call), asked["namespace"], asked["serviceAccount"], asked["roleArn"])
    if "targetRoleArn" in asked:
        record["targetRoleArn"] = asked["targetRoleArn"]
    return {"association": record}


def _update_identity(call: Call) -> Mapping[str, Any]:
    record = _identity(call)
    if "roleArn" in call.params:
        check_role(call, call.params["roleArn"], "pods.eks.amazonaws.com")
    for name in ("roleArn", "targetRoleArn", "disableSessionTags"):
        if name in call.params:
            record[name] = call.params[name]
    record["modifiedAt"] = datetime.now(UTC)
    return {"association": record}


def _delete_identity(call: Call) -> Mapping[str, Any]:
    record = _identity(call)
    del _plane(call).parts["identities"][record["associationId"]]
    return {"association": record}


def _list_identities(call: Call) -> Mapping[str, Any]:
    found = [
        {name: value for name, value in record.items() if name in _SUMMARY}
        for record in _plane(call).parts["identities"].values()
        if call.get("namespace") in (None, record["namespace"])
        and call.get("serviceAccount") in (None, record["serviceAccount"])
    ]
    return {"associations": found}


_SUMMARY = ("clusterName", "namespace", "serviceAccount", "associationArn", "associationId")
