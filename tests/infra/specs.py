"""Cluster specs of all shapes for property tests: every backend, network and storage, valid for the parser."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from infra.config import ClusterSpec, parse
from infra.plan.place import Place

ACCOUNT = "123456789012"
AWS = Place("us-east-2", ACCOUNT)
CHINA = Place("cn-north-1", ACCOUNT, "aws-cn")
GOVERNMENT = Place("us-gov-west-1", ACCOUNT, "aws-us-gov")
PLACES = (AWS, CHINA, GOVERNMENT)

TYPES = ("p5.48xlarge", "p6-b300.48xlarge", "g6e.48xlarge", "m5.2xlarge", "hpc6id.32xlarge")


def spec_of(
    backend: str = "ec2", *, kind: str = "p5.48xlarge", count: int = 2, zone: str | None = None, **sections: Any
) -> ClusterSpec:
    """A small cluster of one group, which may lie in a `zone` of its own; `hyperpod-eks` gets its second zone."""
    network = dict(sections.pop("network", {}))
    if backend == "hyperpod-eks" and "existing" not in network:
        network.setdefault("second_zone_id", "use2-az2")
    return parse(
        {
            "name": "demo",
            "backend": backend,
            "zone_id": "use2-az1",
            "groups": [{"name": "train", "instance_type": kind, "count": count, "zone_id": zone}],
            "network": network,
            **sections,
        }
    )


EXISTING = {
    "vpc_id": "vpc-0123456789abcdef0",
    "compute_subnet_id": "subnet-0123456789abcdef0",
    "control_subnet_ids": ["subnet-0123456789abcdef1", "subnet-0123456789abcdef2"],
}
EXISTING_LUSTRE = {
    "id": "fs-0123456789abcdef0",
    "dns_name": "fs-0123456789abcdef0.fsx.us-east-2.amazonaws.com",
    "mount_name": "abcd1234",
    "security_group_id": "sg-0123456789abcdef0",
}


@st.composite
def networks(draw: st.DrawFn) -> dict[str, Any]:
    """A block that is legal by itself, and a compute subnet that may or may not fit into it."""
    prefix = draw(st.integers(16, 28))
    block = draw(st.integers(0, (1 << (prefix - 8)) - 1)) << (32 - prefix) | 10 << 24
    cidr = ".".join(str(block >> shift & 255) for shift in (24, 16, 8, 0)) + f"/{prefix}"
    return {
        "cidr": cidr,
        "compute_prefix": draw(st.integers(16, 28)),
        "nat": draw(st.booleans()),
        "closed": draw(st.booleans()),
        "flow_logs": draw(st.booleans()),
        **draw(st.sampled_from([{}, {"existing": EXISTING}])),
    }


LUSTRES = st.sampled_from(
    [
        None,
        {"throughput_gb_s": 1.2, "capacity_tib": 4.8, "kms_key": "alias/lustre"},
        {"throughput_gb_s": 19.2, "capacity_tib": 19.2, "efa": True},
        {"type": "intelligent-tiering", "throughput_gb_s": 4, "metadata_iops": 6000},
        {"existing": EXISTING_LUSTRE},
        {"existing": {**EXISTING_LUSTRE, "efa": True}},
    ]
)


@st.composite
def specs(draw: st.DrawFn) -> ClusterSpec:
    backend = draw(st.sampled_from(["ec2", "hyperpod-slurm", "hyperpod-eks"]))
    options = ("karpenter", "task_governance", "training_operator") if backend == "hyperpod-eks" else ()
    there = [None, {"name": "platform", "addons": ["aws-fsx-csi-driver"]}] if backend == "hyperpod-eks" else [None]
    return spec_of(
        backend,
        kind=draw(st.sampled_from(TYPES)),
        count=draw(st.integers(0, 64)),
        zone=draw(st.sampled_from([None, "use2-az3"])),
        network=draw(networks()),
        storage={"lustre": draw(LUSTRES), "home": draw(st.sampled_from([None, {}, {"type": "efs"}]))},
        observability={"prometheus": draw(st.sampled_from(["none", "self", "amp"]))},
        buckets={"kms_key": draw(st.sampled_from([None, "alias/data", "1234abcd-12ab-34cd-56ef-1234567890ab"]))},
        eks={"existing": draw(st.sampled_from(there)), **{option: draw(st.booleans()) for option in options}},
        runs_uri=draw(st.sampled_from([None, "/fsx/runs/", "s3://team-runs/demo/", "s3://team-runs"])),
    )
