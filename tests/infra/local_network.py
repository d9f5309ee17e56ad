"""boto3 clients of a server of this repository, and the network that file systems and clusters stand in."""

from __future__ import annotations

from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from infra.local.aws import LocalAws

ACCOUNT = "123456789012"


def client(aws: LocalAws, service: str, region: str = "us-west-2") -> Any:
    return boto3.client(
        service,  # type: ignore[call-overload]
        endpoint_url=aws.endpoint,
        region_name=region,
        aws_access_key_id="local",
        aws_secret_access_key="local",
        config=Config(retries={"total_max_attempts": 1}, parameter_validation=False),
    )


class Network:
    """A VPC with one subnet and a security group that is open to itself in both directions, as EFA asks for."""

    def __init__(self, aws: LocalAws, region: str = "us-west-2", zone_id: str = "usw2-az2") -> None:
        self.ec2, self.scaling = client(aws, "ec2", region), client(aws, "autoscaling", region)
        self.vpc = self.ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        self.subnet = self.ec2.create_subnet(VpcId=self.vpc, CidrBlock="10.0.0.0/20", AvailabilityZoneId=zone_id)[
            "Subnet"
        ]["SubnetId"]
        self.group = self.closed_group("cluster")
        itself = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": self.group}]}]
        self.ec2.authorize_security_group_ingress(GroupId=self.group, IpPermissions=itself)
        self.ec2.authorize_security_group_egress(GroupId=self.group, IpPermissions=itself)

    def closed_group(self, name: str) -> str:
        """A group as it is born: nothing may come in, everything may go out to addresses."""
        made = self.ec2.create_security_group(GroupName=name, Description=name, VpcId=self.vpc)
        return str(made["GroupId"])


def refusal(call: Any, **request: Any) -> tuple[str, str]:
    """The error's code and message; AssertionError when the service accepts."""
    try:
        call(**request)
    except ClientError as error:
        return error.response["Error"]["Code"], error.response["Error"]["Message"]
    raise AssertionError(f"accepted: {request}")
