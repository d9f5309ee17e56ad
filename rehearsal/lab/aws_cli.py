"""Not AWS's CLI: the commands of it that a stack's nodes call, by boto3. It runs as a program of its own on a node of the lab.

Left out: every other command and option, progress, retries of its own; `--output text` prints the one value that was queried.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import boto3
from botocore.exceptions import BotoCoreError, ClientError

FAILED, REFUSED = 254, 252
"""What AWS's CLI ends with where the service refuses a command, and where it does not know one
(https://docs.aws.amazon.com/cli/latest/userguide/cli-usage-returncodes.html)."""


def main(words: Sequence[str]) -> int:
    service, verb, *rest = [*words, "", ""][: max(2, len(words))]
    command = {
        ("s3", "cp"): _copy,
        ("secretsmanager", "get-secret-value"): _get_secret,
        ("secretsmanager", "put-secret-value"): _put_secret,
    }.get((service, verb))
    if command is None:
        print(f"aws {service} {verb}: not a command of this stand-in", file=sys.stderr)
        return REFUSED
    try:
        command(rest)
    except (BotoCoreError, ClientError) as error:
        print(error, file=sys.stderr)
        return FAILED
    return 0


def _copy(words: Sequence[str]) -> None:
    """Copy the objects below an S3 address into a folder."""
    parser = argparse.ArgumentParser(prog="aws s3 cp", allow_abbrev=False)
    parser.add_argument("--recursive", action="store_true", required=True)
    parser.add_argument("--only-show-errors", action="store_true")
    parser.add_argument("source")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(words)
    bucket, _, prefix = str(args.source).removeprefix("s3://").partition("/")
    prefix = f"{prefix.rstrip('/')}/" if prefix else ""
    client = boto3.client("s3")
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", []):
            target = args.folder / item["Key"].removeprefix(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            client.download_file(bucket, item["Key"], str(target))


def _get_secret(words: Sequence[str]) -> None:
    parser = _secret_parser("get-secret-value")
    parser.add_argument("--query", choices=["SecretString"], required=True)
    parser.add_argument("--output", choices=["text"], required=True)
    args = parser.parse_args(words)
    client = boto3.client("secretsmanager", region_name=args.region)
    print(client.get_secret_value(SecretId=args.secret_id)["SecretString"])


def _put_secret(words: Sequence[str]) -> None:
    parser = _secret_parser("put-secret-value")
    parser.add_argument("--client-request-token", required=True)
    parser.add_argument("--secret-string", required=True)
    args = parser.parse_args(words)
    text = Path(args.secret_string.removeprefix("file://")).read_text(encoding="utf-8")
    boto3.client("secretsmanager", region_name=args.region).put_secret_value(
        SecretId=args.secret_id, ClientRequestToken=args.client_request_token, SecretString=text
    )


def _secret_parser(verb: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"aws secretsmanager {verb}", allow_abbrev=False)
    parser.add_argument("--secret-id", required=True)
    parser.add_argument("--region")
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
