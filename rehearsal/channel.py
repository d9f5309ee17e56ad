"""The cluster's interruption queue and role, as a node or an operator uses them."""

from __future__ import annotations

import json

import boto3

from lustrain.cluster import Cluster

RECEIVES = 5
"""Each waits up to two seconds for messages."""


def notice_arrived(cluster: Cluster, node: str) -> bool:
    """Check whether the spot interruption of `node` is in the cluster's queue; reads what is there, and leaves nothing of
    it."""
    sqs = boto3.client("sqs", region_name=cluster.region)
    queue = str(cluster.interruption_queue)
    for _ in range(RECEIVES):
        answer = sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10, WaitTimeSeconds=2)
        for message in answer.get("Messages", []):
            event = json.loads(message["Body"])
            sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
            if (
                event["detail-type"] == "EC2 Spot Instance Interruption Warning"
                and event["detail"]["instance-id"] == node
            ):
                return True
    return False


def role_credentials(cluster: Cluster) -> dict[str, str]:
    """Return variables with temporary credentials of the nodes' role; the embedded AWS checks none."""
    answer = boto3.client("sts").assume_role(RoleArn=str(cluster.role_arn), RoleSessionName="rehearsal")["Credentials"]
    return {
        "AWS_ACCESS_KEY_ID": answer["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": answer["SecretAccessKey"],
        "AWS_SESSION_TOKEN": answer["SessionToken"],
    }
