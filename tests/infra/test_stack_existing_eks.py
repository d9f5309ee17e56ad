"""Nodes for an EKS cluster that is there already, under the real engine: they join, and the cluster is left as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import boto3
import pytest

from infra.aws import Aws
from infra.config import parse
from infra.local.aws import LocalAws
from infra.local.engine import PROGRAM, Engine
from infra.preflight.online.answers import check_online
from infra.preflight.online.run import ONLINE
from infra.preflight.rule import Context
from tests.infra.edits import edited, place
from tests.infra.mistakes import EKS, JOINED
from tests.infra.stacks import PACK

pytestmark = pytest.mark.slow
REGION, OWN = place(EKS).region, ["eks-pod-identity-agent", "coredns"]
PLUGIN = '''
"""The program, also over a plugin that keeps Terraform's name for a cluster's network, which the SDK does not know."""

import runpy
from types import SimpleNamespace

import pulumi
import pulumi_aws as aws

get_cluster = aws.eks.get_cluster


def named(name):
    found = get_cluster(name=name)
    if not found.vpc_config:
        network = pulumi.runtime.invoke("aws:eks/getCluster:getCluster", {"name": name}).value["vpcConfigs"][0]
        ids = {"vpc_id": network["vpcId"], "cluster_security_group_id": network["clusterSecurityGroupId"]}
        pulumi.set(found, "vpc_config", SimpleNamespace(**ids))
    return found


aws.eks.get_cluster = named
runpy.run_path("MAIN", run_name="__main__")
'''
TRUST = {"Effect": "Allow", "Principal": {"Service": "eks.amazonaws.com"}, "Action": "sts:AssumeRole"}


def platform(client: Any) -> dict[str, str]:
    """Make an EKS cluster as another team would, with a VPC CNI of its own; returns the network."""
    ec2, eks, iam = client("ec2"), client("eks"), client("iam")
    vpc = ec2.create_vpc(CidrBlock="10.8.0.0/16")["Vpc"]["VpcId"]
    for attribute in ("EnableDnsSupport", "EnableDnsHostnames"):
        ec2.modify_vpc_attribute(VpcId=vpc, **{attribute: {"Value": True}})
    subnets = [
        ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.8.{16 * number}.0/20", AvailabilityZoneId=f"use2-az{number}")
        for number in (1, 2)
    ]
    ids = [one["Subnet"]["SubnetId"] for one in subnets]
    document = json.dumps({"Version": "2012-10-17", "Statement": [TRUST]})
    role = iam.create_role(RoleName="platform", AssumeRolePolicyDocument=document)["Role"]["Arn"]
    network = {"subnetIds": ids, "endpointPrivateAccess": True}
    eks.create_cluster(
        name="platform",
        version="1.34",
        roleArn=role,
        resourcesVpcConfig=network,
        accessConfig={"authenticationMode": "API_AND_CONFIG_MAP"},
        tags={"team": "platform"},
    )
    eks.get_waiter("cluster_active").wait(name="platform", WaiterConfig={"Delay": 1})
    eks.create_addon(clusterName="platform", addonName="vpc-cni")
    return {"vpc_id": vpc, "compute_subnet_id": ids[0]}


def test_existing_eks_cluster_is_joined_and_outlives_the_stack(
    engine_aws: LocalAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in engine_aws.environment.items():
        monkeypatch.setenv(name, value)

    def client(service: str) -> Any:
        return boto3.client(service, region_name=REGION)  # type: ignore[call-overload]

    network = platform(client)
    before = client("eks").describe_cluster(name="platform")["cluster"]
    spec = edited(EKS, {**JOINED, "network.existing": network, "eks.existing.addons": OWN})
    context, aws = Context.at(parse(spec), place(EKS)), Aws(REGION)
    told = [
        one
        for code in ("EKS-102", "EKS-103", "EKS-104", "EKS-105", "EKS-106")
        for one in check_online(ONLINE[code], context, aws)
    ]
    assert [(one.code, one.why) for one in told] == [("EKS-106", "platform has no add-on kube-proxy")]

    engine = Engine(tmp_path / "pulumi", EKS, engine_aws.environment)
    engine.change(spec)
    program = tmp_path / "program"
    program.mkdir()
    (program / "__main__.py").write_text(PLUGIN.replace("MAIN", str(PROGRAM / "__main__.py")), encoding="utf-8")
    engine.use(program)
    assert "POL-" not in engine.up("--policy-pack", str(PACK))
    assert engine.steps() == {}
    assert "aws:eks/cluster:Cluster" not in {one["type"] for one in engine.resources()}
    made = client("sagemaker").describe_cluster(ClusterName=spec["name"])
    assert made["Orchestrator"] == {"Eks": {"ClusterArn": before["arn"]}}
    assert before["resourcesVpcConfig"]["clusterSecurityGroupId"] in made["VpcConfig"]["SecurityGroupIds"]
    assert set(client("eks").list_addons(clusterName="platform")["addons"]) == {"vpc-cni", *OWN}
    assert not check_online(ONLINE["EKS-106"], context, Aws(REGION))[1:], "the stack's own add-ons are no one else's"

    engine("destroy", "--yes", "--skip-preview", "--exclude-protected")
    assert client("eks").describe_cluster(name="platform")["cluster"] == before
    assert client("eks").list_addons(clusterName="platform")["addons"] == ["vpc-cni"]
    assert spec["name"] not in {one["ClusterName"] for one in client("sagemaker").list_clusters()["ClusterSummaries"]}
