"""Whatever a parsed spec holds, rules and explanations end, and they know all that the planners complain about."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.catalog.instances import snapshot
from infra.config import ClusterSpec, parse
from infra.plan.network.vpc import cidr_problems
from infra.plan.nodes.capacity import capacity_problems
from infra.plan.place import Place
from infra.plan.storage import buckets, home, lustre_checks
from infra.plan.storage import lustre as storage
from infra.plan.storage.associations import associations, overlaps
from infra.preflight.explain import explain, refused
from infra.preflight.offline import run_offline
from tests.infra.edits import STACKS, edited
from tests.infra.mistakes import BOUNDARY, DATABASE, NODE_ROLE, P9, PROFILE, PROXY, RECORDS

pytestmark = pytest.mark.slow

NOW = datetime(2026, 11, 21, tzinfo=UTC)
PLACES = st.sampled_from([None, Place("us-east-1", "123456789012"), Place("cn-north-1", "123456789012", "aws-cn")])
TYPES = st.sampled_from(sorted(snapshot().types)) | st.sampled_from(
    ["p9.huge", "p9.48xlarge", "ml.p5.48xlarge", "t3.large", "g6e.48xlarge"]
)
TEXT = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=12)
ADDRESS = st.sampled_from(["ghcr.io/me/train", "123456789012.dkr.ecr.us-west-2.amazonaws.com/a:v1", "host:5000/x_y/z"])
PATHS = st.sampled_from(["/fsx", "/home", "/fsx/home", "/usr/x", "/data", "/data/../x", "/opt/dlami/nvme", "/a.b/c"])
TIMES = st.sampled_from(["2026-01-01T00:00:00Z", "2027-01-01T00:00:00+09:00"])
PREFIXES = st.sampled_from(["", "a", "a/b/", "/a", "runs", "milestone/x", "ephemeral"]) | TEXT
CAPACITY = st.fixed_dictionaries(
    {"mode": st.sampled_from(["on-demand", "spot", "reservation", "capacity-block", "training-plan"])},
    optional={
        "reservation": st.just("cr-0123456789abcdef0"),
        "create": st.booleans(),
        "training_plan": st.just("arn:aws:sagemaker:us-west-2:123456789012:training-plan/a"),
        "zone_id": st.sampled_from(["use1-az4", "usw2-lax1-az1"]),
        "size": st.integers(1, 9),
        "placement_group": TEXT,
        "ends_at": TIMES,
    },
)
GROUP = st.fixed_dictionaries(
    {"name": st.sampled_from(["a", "b", "default"]), "instance_type": TYPES, "count": st.integers(0, 6758)},
    optional={
        "min_count": st.integers(0, 9),
        "role": st.sampled_from(["worker", "controller", "login"]),
        "capacity": CAPACITY,
        "threads_per_core": st.sampled_from([1, 2]),
        "partition": st.just("default"),
        "zone_id": st.sampled_from(["use1-az2", "use1-az5", "usw2-az2"]),
        "image_id": st.just("ami-0123456789abcdef0"),
        "volume_kms_key": TEXT | st.just("arn:aws:kms:us-east-1:123456789012:alias/a"),
        "auto_patch": st.sampled_from(["WhenIdle", "WhenAllIdle"]),
        "labels": st.dictionaries(TEXT, TEXT, max_size=2),
        "taints": st.lists(st.fixed_dictionaries({"key": TEXT, "value": TEXT}), max_size=2),
        "deep_health_checks": st.just([]),
        "efa": st.booleans(),
        "placement": st.sampled_from(["cluster", "none"]),
    },
)
LINK = st.fixed_dictionaries(
    {"path": PATHS, "bucket": st.sampled_from(["data", "checkpoints"]) | TEXT, "prefix": PREFIXES},
    optional={"import_events": st.just([]), "export_events": st.just(["NEW", "DELETED"])},
)
NUMBER = st.integers(1, 200_000)
LUSTRE = st.fixed_dictionaries(
    {},
    optional={
        "throughput_gb_s": st.floats(0.001, 1e6),
        "capacity_tib": st.floats(0.001, 1e6),
        "capacity_gib": NUMBER,
        "per_tib_mb_s": NUMBER,
        "type": st.sampled_from(["ssd", "intelligent-tiering"]),
        "read_cache_gib": NUMBER,
        "efa": st.booleans(),
        "metadata_iops": NUMBER,
        "mount_path": PATHS,
        "backup_days": st.integers(0, 90),
        "kms_key": TEXT,
        "associations": st.lists(LINK, max_size=9),
        "existing": st.fixed_dictionaries(
            {
                "id": st.just("fs-0123456789abcdef0"),
                "dns_name": TEXT,
                "mount_name": st.just("fsx"),
                "security_group_id": st.just("sg-0123456789abcdef0"),
            }
        ),
    },
)
EXISTING = st.fixed_dictionaries(
    {"vpc_id": st.just("vpc-0123456789abcdef0"), "compute_subnet_id": st.just("subnet-0123456789abcdef0")},
    optional={
        "control_subnet_ids": st.just(["subnet-01234567"] * 2),
        "compute_cidr": TEXT | st.just("10.0.0.0/24"),
        "zone_subnet_ids": st.dictionaries(st.sampled_from(["use1-az2", "use1-az5"]), st.just("subnet-01234567")),
    },
)
EDITS: Any = st.fixed_dictionaries(
    {},
    optional={
        "backend": st.sampled_from(["hyperpod-slurm", "hyperpod-eks", "ec2"]),
        "groups": st.lists(GROUP, min_size=1, max_size=3),
        "network.cidr": TEXT | st.sampled_from(["10.0.0.0/20", "8.8.8.8/32", "172.16.0.0/12", "::/0"]),
        "network.compute_prefix": st.integers(16, 28),
        "network.existing": EXISTING,
        "network.closed": st.booleans(),
        "network.nat": st.booleans(),
        "network.second_zone_id": st.sampled_from(["use1-az4", "use1-az5"]),
        "network.security_group_ids": st.lists(st.just("sg-01234567"), max_size=6),
        "network.allow_from": st.lists(
            st.sampled_from(["pl-01234567", "0.0.0.0/0", "10.1.2.3/8", "999.1.1.1/99"]), max_size=3
        ),
        "network.proxy": st.sampled_from([PROXY, {"http": "http://me:secret@proxy.example.com"}]),
        "access.permissions_boundary": st.sampled_from([BOUNDARY.format("", "aws"), BOUNDARY.format("-cn", "0" * 12)]),
        "access.node_role": st.just(NODE_ROLE),
        "access.instance_profile": st.just(PROFILE),
        "boot.on_configured": st.sampled_from(["nowhere.sh", "lifecycle", "lifecycle/node.sh"]),
        "storage.lustre": LUSTRE,
        "storage.home": st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from(["openzfs", "efs"]),
                "throughput_mb_s": NUMBER,
                "backup": st.booleans(),
                "mount_path": PATHS,
                "kms_key": TEXT,
            },
        ),
        "buckets": st.fixed_dictionaries(
            {}, optional={"data": TEXT, "checkpoints": TEXT, "lifecycle": TEXT, "kms_key": TEXT}
        ),
        "repository.existing": ADDRESS,
        "alarms.emails": st.lists(TEXT, max_size=3),
        "access.user": TEXT,
        "slurm.accounting": st.just(DATABASE),
        "scheduler": st.sampled_from([{"type": "slurm", "accounting": {"database": RECORDS}}, None]),
        "eks.version": st.sampled_from(["1.10", "1.34"]),
        "eks.public_access_cidrs": st.lists(TEXT | st.sampled_from(["0.0.0.0/0", "::/0", "8.8.8.8/32"]), max_size=3),
        "eks.karpenter": st.sampled_from([None, True, False]),
        "instance_types": st.just({"p9.48xlarge": P9, "g6e.48xlarge": P9}),
        "job_ends_at": TIMES,
        "runs_uri": TEXT | st.sampled_from(["s3://a/b/", "s3://a", "/fsx/runs", "s3://", "/"]),
        "tuning": st.fixed_dictionaries(
            {},
            optional={
                "profiles": st.dictionaries(st.sampled_from(["a", "train"]), st.sampled_from(["cpu", "efa-gpu"])),
                "settings": st.dictionaries(
                    TEXT | st.just("sysctl.vm.max_map_count"),
                    TEXT | st.booleans() | st.integers() | st.floats(),
                    max_size=3,
                ),
            },
        ),
        "tags": st.dictionaries(TEXT, TEXT, max_size=3),
        "suppress": st.just(
            [{"code": "BUD-001", "reason": "somebody watches"}, {"code": "XX-999", "reason": "no such one"}]
        ),
    },
)


@st.composite
def specs(draw: st.DrawFn) -> ClusterSpec:
    return parse(edited(draw(st.sampled_from(STACKS)), draw(EDITS)))


LOOSE = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])


@LOOSE
@given(specs(), PLACES)
def test_no_rule_raises_and_each_finding_is_one_line(spec: ClusterSpec, place: Place | None) -> None:
    for finding in run_offline(spec, place, NOW):
        assert finding.fix
        assert "\n" not in finding


@LOOSE
@given(specs())
def test_planners_complaint_is_a_finding_with_the_code_it_names(spec: ClusterSpec) -> None:
    place = Place("us-east-1", "123456789012")
    told = set(run_offline(spec.model_copy(update={"suppress": ()}), place, NOW))
    lustre = spec.storage.lustre
    complaints = {
        *(lustre_checks.violations(lustre, storage.efa_wanted(spec)) if lustre else ()),
        *home.violations(spec.storage),
        *buckets.violations(spec, place),
        *cidr_problems(spec),
    }
    for index, group in enumerate(spec.groups):
        complaints |= set(capacity_problems(group, spec.type_of(group), spec.backend, f"groups.{index}."))
    assert complaints <= told
    paths = {finding.path for finding in told}
    for overlap in overlaps(associations(spec, place)):
        assert f"storage.lustre.associations.{overlap.second}.{overlap.side}" in paths


@LOOSE
@given(specs(), specs())
def test_explaining_never_raises_and_equal_specs_do_not_differ(old: ClusterSpec, new: ClusterSpec) -> None:
    changes = explain(old, new)
    assert all("\n" not in change.line() for change in changes)
    assert set(refused(changes)) <= set(changes)
    assert explain(old, old) == []
