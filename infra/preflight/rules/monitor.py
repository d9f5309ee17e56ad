"""OBS: Prometheus, Grafana, and the machine that they run on."""

from __future__ import annotations

from infra.catalog.botocore_data import regions_with
from infra.config import MONITOR, ClusterSpec, Monitor
from infra.finding import Problems, finding
from infra.preflight.rule import Context, Family, groups
from infra.preflight.rules.machine import has_idle_accelerators, has_no_image

OURS = "infra/plan/watch/machine.py"
HERE = "observability"
QUERY = "https://docs.aws.amazon.com/prometheus/latest/userguide/AMP-amg.html"
ADDON = "https://docs.aws.amazon.com/sagemaker/latest/dg/hyperpod-observability-addon-setup.html"
ENDPOINTS = "https://docs.aws.amazon.com/general/latest/gr/prometheus-service.html"
GRAFANA_ENDPOINTS = "https://docs.aws.amazon.com/general/latest/gr/grafana-service.html"
RULES = Family()


@RULES.add("OBS-001", "A Grafana of the stack's own has a Prometheus to ask.", OURS)
def nothing_to_show(spec: ClusterSpec, context: Context) -> Problems:
    # On EKS no Prometheus mends it: OBS-003.
    watch, here = spec.observability, spec.backend != "hyperpod-eks"
    if here and watch.grafana == "self" and watch.prometheus == "none":
        fix = "set observability.prometheus: self, or amp, or grafana: none"
        yield finding(f"{HERE}.grafana", "self shows what Prometheus has, and prometheus is none", fix)


@RULES.add(
    "OBS-002", "A managed Grafana has a workspace of Prometheus to query: no port of the monitor is open.", QUERY
)
def managed_grafana(spec: ClusterSpec, context: Context) -> Problems:
    watch = spec.observability
    if watch.grafana == "managed" and watch.prometheus != "amp":
        message = f"managed does not reach what prometheus: {watch.prometheus} has"
        yield finding(f"{HERE}.grafana", message, "set observability.prometheus: amp, or grafana: self or none")


@RULES.add("OBS-003", "On EKS, AWS's add-on scrapes: there is no monitor.", ADDON, judgement=True)
def no_monitor_on_eks(spec: ClusterSpec, context: Context) -> Problems:
    if spec.backend != "hyperpod-eks":
        return
    fixes = {"prometheus": "amp, into which HyperPod's add-on writes, or none", "grafana": "managed, or none"}
    for key, fix in fixes.items():
        if getattr(spec.observability, key) == "self":
            yield finding(f"{HERE}.{key}", "self needs the monitor, which no stack with hyperpod-eks has", f"set {fix}")


@RULES.add("OBS-004", "The monitor runs Linux on a processor that there is an image for.", OURS, essential=True)
def architecture(spec: ClusterSpec, context: Context) -> Problems:
    return has_no_image(spec, spec.monitor)


@RULES.add("OBS-005", "The monitor has no accelerators: it runs no jobs.", OURS, judgement=True)
def idle_accelerators(spec: ClusterSpec, context: Context) -> Problems:
    return has_idle_accelerators(spec, spec.monitor)


@RULES.add(
    "OBS-006",
    "In a closed network, the monitor's image brings what it would install from Ubuntu's and Grafana's archives.",
    OURS,
    judgement=True,
)
def nowhere_to_install_from(spec: ClusterSpec, context: Context) -> Problems:
    network = spec.network
    if spec.monitor and network.closed and not network.proxy and spec.monitor.image_id is None:
        message = "the default image has neither Prometheus nor Grafana, and a closed network nothing to install from"
        fix = "name an image with them, aws-cli among them, set network.proxy, or set observability.prometheus: none"
        yield finding(f"{HERE}.monitor.image_id", message, fix)


@RULES.add("OBS-007", "No group has the monitor's name.", OURS, essential=True)
def name(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec) if spec.monitor else ():
        if group.name == MONITOR:
            yield finding(f"{path}.name", f"{MONITOR} is the machine that scrapes the nodes", "take another name")


@RULES.add("OBS-008", "Keys of the monitor stand where there is one.", OURS, level="warning")
def unused_keys(spec: ClusterSpec, context: Context) -> Problems:
    if spec.monitor is None and spec.observability.monitor != Monitor():
        message = "has no effect: this stack has no monitor"
        fix = (
            "remove it" if spec.backend == "hyperpod-eks" else "remove it, or set observability.prometheus: self or amp"
        )
        yield finding(f"{HERE}.monitor", message, fix)


@RULES.add("OBS-009", "The partition has Amazon Managed Service for Prometheus.", ENDPOINTS)
def workspace_in_partition(spec: ClusterSpec, context: Context) -> Problems:
    if spec.observability.prometheus == "amp" and context.partition == "aws-cn":
        message = "Amazon Managed Service for Prometheus is not offered in China"
        yield finding(f"{HERE}.prometheus", message, "set it to self")


@RULES.add(
    "OBS-010",
    "Where nodes have a role of the user's, the deployer may still make one for the monitor.",
    OURS,
    level="warning",
    judgement=True,
)
def role_beside_users(spec: ClusterSpec, context: Context) -> Problems:
    if spec.monitor and spec.access.node_role:
        message = "is the nodes' only: the stack makes a role of its own for the monitor, which needs the right to"
        fix = "allow it (fab deployer-policy), or set observability.prometheus: none, and suppress this"
        yield finding("access.node_role", message, fix)


@RULES.add("OBS-011", "The region has Amazon Managed Grafana.", GRAFANA_ENDPOINTS)
def grafana_in_region(spec: ClusterSpec, context: Context) -> Problems:
    region = context.region
    if spec.observability.grafana == "managed" and region and region not in regions_with("grafana"):
        message = f"Amazon Managed Grafana is not offered in {region}"
        fix = "set it to self or none; or suppress this where AWS offers it by now"
        yield finding(f"{HERE}.grafana", message, fix)
