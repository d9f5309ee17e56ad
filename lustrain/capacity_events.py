"""The events of AWS that say that capacity goes away: what EventBridge calls them, and how the queue that they reach is read.

The stack's rules pass them by these names, and the trainer reads them by the same ones.
"""

from __future__ import annotations

SPOT = "EC2 Spot Instance Interruption Warning"
"""Two minutes ahead: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html"""
REBALANCE = "EC2 Instance Rebalance Recommendation"
"""https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html"""
TERMINATE = "EC2 Instance-terminate Lifecycle Action"
"""https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-event-reference.html"""
RESERVATION_INTERRUPTION = (
    "EC2 Capacity Reservation Instance Interruption Warning",
    "EC2 Interruptible Capacity Reservation Instance Interruption Warning",
)
"""AWS's pages give both names (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/monitor-interruptible-cr.html)."""
BLOCK_END = ("Capacity Block Expiration Warning", "Capacity Block Reservation Expiration Warning")
"""The name of today and the one of older pages (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-monitor.html)."""
HEALTH = "AWS Health Event"
"""https://docs.aws.amazon.com/health/latest/ug/aws-health-events-eventbridge-schema.html"""
HYPERPOD_STATE = "SageMaker HyperPod Cluster State Change"
HYPERPOD_NODE = "SageMaker HyperPod Cluster Node Health Event"
HYPERPOD_EVENT = "SageMaker HyperPod Cluster Event"
"""https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-cluster-events-reference.html"""

NODE_SOURCES = ("spot", "rebalance", "autoscaling", "reservation", "scheduled", "hyperpod")
"""Sources of a run's notices by which AWS takes one node away; whatever starts the run again leaves that node out."""

LOOK_S = 5
"""Seconds for which a reader hides a message of the queue while it looks at it. Messages about nodes of others come back by
themselves, so this bounds how long they wait for their own reader, and how often all readers together take them."""
