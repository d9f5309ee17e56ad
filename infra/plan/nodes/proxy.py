"""The company's proxy on a node: the environment of the boot, and files for what runs later.

Services get the environment one by one and not from systemd as a whole: HyperPod's own agents must not get it, and the SSM
agent does on EC2 only (https://docs.aws.amazon.com/systems-manager/latest/userguide/configure-proxy-ssm-agent.html).
"""

from __future__ import annotations

from collections.abc import Mapping

from infra.config import ClusterSpec
from infra.plan.nodes.logs import carries_logs
from infra.plan.place import PRIVATE_RANGES, dns_suffix, partition_of

ALWAYS_DIRECT = ("localhost", "127.0.0.1", "169.254.169.254", "169.254.170.2", "169.254.170.23", ".internal")
"""Metadata, credentials of containers and of pods (https://docs.aws.amazon.com/eks/latest/userguide/pod-id-how-it-works.html),
and the names that EC2 gives to nodes."""
SERVICES = ("containerd", "docker", "kubelet", "snapd")
SSM = ("amazon-ssm-agent", "snap.amazon-ssm-agent.amazon-ssm-agent")
"""The unit's name as a package and as a snap."""
LOGS = ("amazon-cloudwatch-agent",)
"""On HyperPod it is one of the service's own agents."""
ENVIRONMENT = "etc/lustrain/proxy.env"


def environment(spec: ClusterSpec, region: str) -> dict[str, str]:
    """Return the variables, empty without a proxy; programs disagree on their case."""
    proxy = spec.network.proxy
    if proxy is None:
        return {}
    lower = {
        "http_proxy": proxy.http,
        "https_proxy": proxy.https or proxy.http,
        "no_proxy": ",".join(direct(spec, region)),
    }
    return {**lower, **{name.upper(): value for name, value in lower.items()}}


def direct(spec: ClusterSpec, region: str) -> tuple[str, ...]:
    """Return what is reached without the proxy: the node, its VPC, S3 by the gateway endpoint, the Kubernetes API, the
    interface endpoints of a closed network, and what the spec names."""
    network = spec.network
    inside = PRIVATE_RANGES if network.existing else (network.cidr,)
    home = f"{region}.{dns_suffix(partition_of(region))}"
    services = [f"s3.{home}", f".s3.{home}"]
    if spec.backend == "hyperpod-eks":
        services.append(f".{region}.eks.{dns_suffix(partition_of(region))}")
    if network.closed:
        services.append(f".{home}")
    named = network.proxy.no_proxy if network.proxy else ()
    return tuple(dict.fromkeys([*ALWAYS_DIRECT, *inside, *services, *named]))


def files(spec: ClusterSpec, region: str) -> Mapping[str, bytes]:
    """Return the files by their path under a node's root, none without a proxy."""
    variables = environment(spec, region)
    if not variables:
        return {}
    lines = "".join(f"{name}={value}\n" for name, value in variables.items())
    units = (*SERVICES, *((*SSM, *(LOGS if carries_logs(spec) else ())) if spec.backend == "ec2" else ()))
    dropin = f"[Service]\nEnvironmentFile=-/{ENVIRONMENT}\n"
    apt = "".join(f'Acquire::{kind}::Proxy "{variables[f"{kind}_proxy"]}";\n' for kind in ("http", "https"))
    texts = {
        ENVIRONMENT: lines,
        "etc/profile.d/lustrain-proxy.sh": f"#!/bin/sh\nset -a\n. /{ENVIRONMENT}\nset +a\n",
        "etc/apt/apt.conf.d/90lustrain-proxy": apt,
        **{f"etc/systemd/system/{unit}.service.d/lustrain-proxy.conf": dropin for unit in units},
    }
    return {path: text.encode("ascii") for path, text in texts.items()}
