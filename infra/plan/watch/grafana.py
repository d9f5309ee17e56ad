"""A workspace of Amazon Managed Grafana, which shows what the cluster's workspace of Prometheus and CloudWatch have.

People sign in by IAM Identity Center. Who may, data sources and pages are left to do by hand: `first_steps` says how.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.config import ClusterSpec
from infra.plan.documents import Document, allow, document
from infra.plan.place import Place, ours

ROLE = "grafana"
"""Key of its role."""
SIGN_IN = "https://docs.aws.amazon.com/grafana/latest/userguide/authentication-in-AMG-SSO.html"
SOURCES = ("PROMETHEUS", "CLOUDWATCH")


@dataclass(frozen=True)
class GrafanaPlan:
    """`name` is unique in an account and a region."""

    name: str
    description: str
    data_sources: tuple[str, ...] = SOURCES


def grafana(spec: ClusterSpec) -> GrafanaPlan | None:
    """Return the workspace of a cluster with `grafana: managed`."""
    if spec.observability.grafana != "managed":
        return None
    return GrafanaPlan(spec.name, f"Runs and nodes of {spec.name}")


def read_policy(spec: ClusterSpec, place: Place) -> Document:
    """Let it query this cluster's workspace of Prometheus and CloudWatch's metrics and alarms, no logs
    (https://docs.aws.amazon.com/grafana/latest/userguide/AMG-manage-permissions.html)."""
    read = ["DescribeWorkspace", "GetLabels", "GetMetricMetadata", "GetSeries", "QueryMetrics"]
    metrics = ["DescribeAlarmHistory", "DescribeAlarms", "DescribeAlarmsForMetric", "GetMetricData", "ListMetrics"]
    return document(
        [
            allow("PrometheusFind", ["aps:ListWorkspaces"], "*"),
            allow("PrometheusRead", [f"aps:{name}" for name in read], place.arn("aps", "workspace/*"), ours(spec)),
            allow("MetricsRead", [*(f"cloudwatch:{name}" for name in metrics), "ec2:DescribeRegions"], "*"),
        ]
    )
