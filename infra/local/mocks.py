"""A mock of the Pulumi engine: it records the resources that a program asks for.

It emulates almost nothing: no provider checks an argument, nothing is created, resources have no order, ids and computed
values are invented, and a misspelled key of a plain dictionary passes.
"""

from __future__ import annotations

import json
import os
from typing import Any

from pulumi.runtime import MockCallArgs, MockResourceArgs, Mocks

ACCOUNT = "123456789012"
"""Account number, which the embedded AWS uses as well."""


class Recorder(Mocks):
    """Records every resource, and answers with its inputs and the values that AWS would compute."""

    def __init__(self, region: str) -> None:
        self.region = region
        self.resources: list[tuple[str, str, dict[str, Any]]] = []

    def new_resource(self, args: MockResourceArgs) -> tuple[str | None, dict[str, Any]]:
        self.resources.append((args.typ, args.name, dict(args.inputs)))
        name = args.inputs.get("name") or args.inputs.get("bucket") or f"{args.name}-mock"
        outputs = {"name": name, "arn": f"arn:aws:mock:{self.region}:{ACCOUNT}:{name}", **self._computed(args, name)}
        # Inputs override computed values, as in AWS.
        made = "i-0123456789abcdef0" if args.typ == "aws:ec2/instance:Instance" else f"{args.name}-id"
        return made, {**outputs, **args.inputs}

    def call(self, args: MockCallArgs) -> tuple[dict[str, Any], list[tuple[str, str]] | None]:
        answers: dict[str, dict[str, Any]] = {
            "aws:index/getCallerIdentity:getCallerIdentity": {"accountId": ACCOUNT},
            "aws:ssm/getParameter:getParameter": {"value": "ami-0123456789abcdef0"},
            "aws:ec2/getAmi:getAmi": {"rootDeviceName": "/dev/sda1"},
            "aws:index/getAvailabilityZone:getAvailabilityZone": {"name": f"{self.region}a"},
            "aws:index/getPartition:getPartition": {"partition": "aws", "dnsSuffix": "amazonaws.com"},
            "aws:index/getRegion:getRegion": {"region": self.region, "name": self.region},
        }
        return answers.get(args.token, dict(args.args)), []

    def _computed(self, args: MockResourceArgs, name: str) -> dict[str, Any]:
        if args.typ == "aws:sqs/queue:Queue":
            endpoint = os.environ.get("AWS_ENDPOINT_URL", f"https://sqs.{self.region}.amazonaws.com")
            return {"url": f"{endpoint}/{ACCOUNT}/{name}"}
        if args.typ.startswith("aws:fsx/"):
            return {"dnsName": f"fs-mock.fsx.{self.region}.amazonaws.com", "mountName": "mockmock"}
        if args.typ == "aws:ec2/networkInterface:NetworkInterface":
            return {"privateIp": "10.0.64.10"}
        if args.typ == "aws:efs/fileSystem:FileSystem":
            return {"dnsName": f"fs-mock.efs.{self.region}.amazonaws.com"}
        if args.typ == "aws:amp/workspace:Workspace":
            return {"prometheusEndpoint": f"https://aps-workspaces.{self.region}.amazonaws.com/workspaces/ws-mock/"}
        if args.typ == "aws:grafana/workspace:Workspace":
            return {"endpoint": f"g-mock.grafana-workspace.{self.region}.amazonaws.com"}
        if args.typ == "aws:ecr/repository:Repository":
            return {"repositoryUrl": f"{ACCOUNT}.dkr.ecr.{self.region}.amazonaws.com/{name}"}
        if args.typ == "aws:ec2/launchTemplate:LaunchTemplate":
            return {"latestVersion": 1}
        if args.typ == "aws:cloudcontrol/resource:Resource":
            arn = f"arn:aws:sagemaker:{self.region}:{ACCOUNT}:cluster/mock"
            return {"properties": json.dumps({"ClusterArn": arn, "ClusterName": "mock"})}
        return {}
