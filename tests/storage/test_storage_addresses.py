"""The host of a bucket: large bodies go to the one in botocore's URL, so it has to be the region's own."""

from __future__ import annotations

from urllib.parse import urlsplit

import boto3
import pytest

from trainer.storage.s3 import connect

KEYS = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}


def address(region: str, bucket: str) -> tuple[str, str]:
    url = connect(boto3.Session(**KEYS), region, 3).generate_presigned_url(
        "get_object", Params={"Bucket": bucket, "Key": "k"}
    )
    parts = urlsplit(url)
    return parts.netloc, parts.path


@pytest.mark.parametrize(
    ("region", "bucket", "expected"),
    [
        ("us-east-1", "runs", ("runs.s3.us-east-1.amazonaws.com", "/k")),
        ("us-west-2", "runs", ("runs.s3.us-west-2.amazonaws.com", "/k")),
        ("eu-south-2", "runs", ("runs.s3.eu-south-2.amazonaws.com", "/k")),
        ("cn-north-1", "runs", ("runs.s3.cn-north-1.amazonaws.com.cn", "/k")),
        # A name with dots is not in the certificate of virtual hosts.
        ("us-west-2", "our.runs", ("s3.us-west-2.amazonaws.com", "/our.runs/k")),
    ],
)
def test_bucket_of_aws_has_its_regions_host(
    monkeypatch: pytest.MonkeyPatch, region: str, bucket: str, expected: tuple[str, str]
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    assert address(region, bucket) == expected


def test_bucket_behind_an_own_endpoint_is_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    assert address("us-west-2", "runs") == ("127.0.0.1:9", "/runs/k")
