"""No test reaches anything but this machine."""

from __future__ import annotations

import socket

import boto3
import pytest
from botocore.config import Config

from tests.conftest import LeakedConnectionError


@pytest.mark.parametrize("address", ["169.254.169.254", "8.8.8.8", "fd00:ec2::254"])
def test_a_connection_to_another_machine_trips_the_guard(only_loopback: list[str], address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as s, pytest.raises(LeakedConnectionError):
        s.connect((address, 80))
    with socket.socket(family, socket.SOCK_DGRAM) as s, pytest.raises(LeakedConnectionError):
        s.sendto(b"x", (address, 53))
    assert only_loopback == [address, address]
    only_loopback.clear()


def test_aws_client_without_an_endpoint_of_ours_trips_the_guard(only_loopback: list[str]) -> None:
    client = boto3.client("s3", config=Config(retries={"total_max_attempts": 1}))
    with pytest.raises(Exception, match="loopback"):
        client.list_buckets()
    assert set(only_loopback) == {"s3.us-east-1.amazonaws.com"} or set(only_loopback) == {"s3.amazonaws.com"}
    only_loopback.clear()


def test_credentials_are_never_looked_up_at_a_metadata_address(only_loopback: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        assert boto3.Session().get_credentials() is None
    assert only_loopback == []
