"""A wish becomes the smallest file system that FSx sells, and what FSx would refuse is told in words."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.catalog.efs import MOUNT_OPTIONS
from infra.config import Association, ClusterSpec, ExistingLustre, Home, Lustre, Storage
from infra.plan.storage import home
from infra.plan.storage.home import EfsPlan, NfsMount, OpenZfsPlan
from infra.plan.storage.lustre import LustrePlan, efa_wanted, lustre
from infra.plan.storage.lustre_checks import violations
from tests.infra.edits import spec_of as edited
from tests.infra.specs import EXISTING_LUSTRE, spec_of

EFA_STEPS = {125: 38_400, 250: 19_200, 500: 9_600, 1000: 4_800}
"""Written out once more: AWS's table, not ours."""
THERE = {key: value for key, value in EXISTING_LUSTRE.items() if key in ("id", "dns_name", "security_group_id")}

sizes = st.one_of(st.none(), st.integers(1, 4000).map(lambda tenths: tenths / 10))
wishes = st.builds(Lustre, throughput_gb_s=sizes, capacity_tib=sizes)


def sold(capacity_gib: int, per_tib: int, efa: bool) -> bool:
    if efa:
        return capacity_gib % EFA_STEPS[per_tib] == 0
    return capacity_gib == 1200 or capacity_gib % 2400 == 0


def meets(capacity_gib: int, per_tib: int, wish: Lustre) -> bool:
    throughput_mb_s = capacity_gib / 1000 * per_tib
    enough = throughput_mb_s >= (wish.throughput_gb_s or 0) * 1000 - 1e-6
    return enough and capacity_gib >= (wish.capacity_tib or 0) * 1000 - 1e-6


def size(plan: LustrePlan) -> tuple[int, int]:
    assert plan.capacity_gib is not None
    assert plan.per_tib_mb_s is not None
    return plan.capacity_gib, plan.per_tib_mb_s


def spec(group: str = "p5.48xlarge", **lustre: Any) -> ClusterSpec:
    return spec_of(kind=group, storage={"lustre": lustre})


@given(wish=wishes, efa=st.booleans())
def test_the_plan_is_sold_and_meets_the_wish(wish: Lustre, efa: bool) -> None:
    capacity_gib, per_tib = size(lustre(wish, efa))
    assert sold(capacity_gib, per_tib, efa)
    assert meets(capacity_gib, per_tib, wish)
    assert violations(Lustre(capacity_gib=capacity_gib, per_tib_mb_s=per_tib), efa) == ()


@given(wish=wishes, efa=st.booleans())
def test_nothing_smaller_meets_the_wish(wish: Lustre, efa: bool) -> None:
    planned = size(lustre(wish, efa))
    ladder = product([1200, *range(2400, planned[0] + 1, 2400)], EFA_STEPS)
    smaller = [one for one in ladder if one < planned and sold(*one, efa) and meets(*one, wish)]
    assert smaller == []


@pytest.mark.parametrize(
    ("capacity_tib", "gb_s", "efa", "expected", "binding"),
    [
        (None, None, False, (1200, 125), "the smallest file system there is"),
        (1.2, 0.3, False, (1200, 250), "the smallest file system there is"),
        (3, None, False, (4800, 125), "in steps of 2400 GiB; 3000 GiB are needed"),
        (261.6, None, False, (261_600, 125), "in steps of 2400 GiB; 261600 GiB are needed"),
        (4.8, 1.2, False, (4800, 250), "in steps of 2400 GiB; 4800 GiB are needed"),
        (None, 5, False, (7200, 1000), "5 GB/s take 7200 GiB even at 1000 MB/s/TiB"),
        (7.2, 2, True, (9600, 500), "EFA at 500 MB/s/TiB comes in steps of 9600 GiB"),
        (1, None, True, (4800, 1000), "EFA at 1000 MB/s/TiB comes in steps of 4800 GiB"),
        (19.2, 4.8, True, (19200, 250), "in steps of 19200 GiB; 19200 GiB are needed"),
        (9.6, 9.6, True, (9600, 1000), "in steps of 4800 GiB; 9600 GiB are needed"),
        (4.8, 9.6, True, (9600, 1000), "9.6 GB/s take 9600 GiB even at 1000 MB/s/TiB"),
    ],
)
def test_the_rule_that_bound_is_named(
    capacity_tib: float | None, gb_s: float | None, efa: bool, expected: tuple[int, int], binding: str
) -> None:
    plan = lustre(Lustre(capacity_tib=capacity_tib, throughput_gb_s=gb_s), efa)
    assert (size(plan), binding in plan.binding) == (expected, True), plan.binding


def test_throughput_is_counted_as_fsx_counts_it() -> None:
    assert lustre(Lustre(capacity_gib=2400, per_tib_mb_s=250), False).throughput_mb_s == 600


@given(capacity=st.integers(1, 10**6), per_tib=st.integers(1, 2000), efa=st.booleans())
def test_an_exact_size_is_taken_as_it_is_even_an_illegal_one(capacity: int, per_tib: int, efa: bool) -> None:
    plan = lustre(Lustre(capacity_gib=capacity, per_tib_mb_s=per_tib), efa)
    assert size(plan) == (capacity, per_tib)


@given(capacity=st.integers(1, 10**6), per_tib=st.sampled_from([125, 250, 500, 1000]), efa=st.booleans())
def test_exactly_sizes_that_fsx_sells_are_without_a_violation(capacity: int, per_tib: int, efa: bool) -> None:
    found = violations(Lustre(capacity_gib=capacity, per_tib_mb_s=per_tib), efa)
    assert (found == ()) == sold(capacity, per_tib, efa)


@given(gb_s=st.floats(0.1, 2000), cache=st.one_of(st.none(), st.integers(1, 200_000)))
def test_intelligent_tiering_comes_in_steps_and_starts_small(gb_s: float, cache: int | None) -> None:
    wish = Lustre(type="intelligent-tiering", throughput_gb_s=gb_s, read_cache_gib=cache)
    plan = lustre(wish, True)
    assert plan.tiered_mb_s is not None
    assert plan.tiered_mb_s % 4000 == 0
    assert 0 <= plan.tiered_mb_s - gb_s * 1000 + 1e-5 < 4000 + 1e-5
    assert plan.read_cache_gib == (cache or plan.tiered_mb_s // 4000 * 32)
    assert (plan.capacity_gib, plan.metadata_mode, plan.metadata_iops) == (None, "USER_PROVISIONED", 6000)
    legal = cache is None or 32 <= cache / (plan.tiered_mb_s // 4000) <= 131_072
    assert (violations(wish, True) == ()) == legal


def broken(efa: bool = False, **wish: Any) -> list[str]:
    return [found.path.removeprefix("storage.lustre.") for found in violations(Lustre.model_validate(wish), efa)]


LINK = Association(path="/data", bucket="data")


@pytest.mark.parametrize(
    ("wish", "paths"),
    [
        ({"capacity_gib": 4800}, ["per_tib_mb_s"]),
        ({"per_tib_mb_s": 125}, ["capacity_gib"]),
        ({"capacity_gib": 4800, "per_tib_mb_s": 125, "capacity_tib": 4.8}, ["capacity_tib"]),
        ({"capacity_gib": 4800, "per_tib_mb_s": 125, "throughput_gb_s": 1}, ["throughput_gb_s"]),
        ({"metadata_iops": 4000}, ["metadata_iops"]),
        ({"metadata_iops": 204_000}, ["metadata_iops"]),
        ({"mount_path": "/mnt"}, ["mount_path"]),
        ({"mount_path": "/fsx/../etc"}, ["mount_path"]),
        ({"type": "intelligent-tiering"}, ["throughput_gb_s"]),
        ({"type": "intelligent-tiering", "throughput_gb_s": 2004}, ["throughput_gb_s"]),
        ({"type": "intelligent-tiering", "throughput_gb_s": 4, "capacity_tib": 10}, ["capacity_tib"]),
        ({"type": "intelligent-tiering", "throughput_gb_s": 4, "metadata_iops": 1500}, ["metadata_iops"]),
        ({"type": "intelligent-tiering", "throughput_gb_s": 8, "read_cache_gib": 32}, ["read_cache_gib"]),
        ({"type": "intelligent-tiering", "throughput_gb_s": 4, "associations": [LINK]}, ["associations"]),
    ],
)
def test_what_fsx_would_refuse_is_found(wish: dict[str, Any], paths: list[str]) -> None:
    assert broken(**wish) == paths


@pytest.mark.parametrize(
    "wish",
    [
        {"capacity_gib": 1200, "per_tib_mb_s": 1000},
        {"throughput_gb_s": 1, "metadata_iops": 1500},
        {"throughput_gb_s": 1, "metadata_iops": 192_000},
        {"backup_days": 7},
        {"associations": [LINK]},
        {"mount_path": "/mnt/fsx"},
        {"type": "intelligent-tiering", "throughput_gb_s": 4, "metadata_iops": 12_000, "read_cache_gib": 32},
        {"type": "intelligent-tiering", "throughput_gb_s": 4, "backup_days": 7},
    ],
)
def test_what_fsx_takes_is_not_complained_about(wish: dict[str, Any]) -> None:
    assert broken(**wish) == []


EXISTING = ExistingLustre.model_validate({**EXISTING_LUSTRE, "efa": True})


def test_existing_file_system_is_passed_on_without_requirements() -> None:
    plan = lustre(Lustre(existing=EXISTING, mount_path="/shared"), False)
    assert (plan.existing, plan.efa, plan.mount_path, plan.throughput_mb_s) == (EXISTING, True, "/shared", None)
    assert violations(Lustre(existing=EXISTING), True) == ()
    wished = Lustre(existing=EXISTING, capacity_tib=1.2, backup_days=1, associations=(LINK,))
    assert {found.path for found in violations(wished, True)} == {
        f"storage.lustre.{key}" for key in ("capacity_tib", "backup_days", "associations")
    }


@pytest.mark.parametrize(
    ("group", "storage", "wanted"),
    [
        ("p5.48xlarge", {"throughput_gb_s": 4.8}, True),
        ("p5.48xlarge", {"throughput_gb_s": 2.4}, False),
        ("p5.48xlarge", {"capacity_tib": 38.4}, True),
        ("p5.48xlarge", {"throughput_gb_s": 2.4, "efa": True}, True),
        ("p5.48xlarge", {"throughput_gb_s": 9.6, "efa": False}, False),
        ("g6e.xlarge", {"throughput_gb_s": 9.6}, False),
        ("g6e.xlarge", {"throughput_gb_s": 9.6, "efa": True}, True),
        ("p5.48xlarge", {"capacity_gib": 9600, "per_tib_mb_s": 500}, True),
        ("p5.48xlarge", {"capacity_gib": 7200, "per_tib_mb_s": 1000}, False),
        ("p5.48xlarge", {"capacity_gib": 7200, "per_tib_mb_s": 333}, False),
        ("p5.48xlarge", {"type": "intelligent-tiering", "throughput_gb_s": 4}, True),
        ("p99.large", {"throughput_gb_s": 9.6}, False),
        ("g6e.xlarge", {"existing": EXISTING.model_dump()}, True),
    ],
)
def test_efa_is_on_where_the_workers_have_it_and_the_size_allows(
    group: str, storage: dict[str, Any], wanted: bool
) -> None:
    assert efa_wanted(spec(group, **storage)) is wanted


def test_efa_of_a_login_node_counts_for_nothing() -> None:
    edits = {"groups.1.instance_type": "c5n.18xlarge", "groups.2.instance_type": "g6e.xlarge"}
    assert not efa_wanted(edited("hyperpod-slurm-p5", {**edits, "storage.lustre": {"throughput_gb_s": 9.6}}))
    assert not efa_wanted(edited("ec2-spot-g6e", {"storage": {}}))


@given(wish=wishes)
def test_what_is_turned_on_without_a_word_is_legal(wish: Lustre) -> None:
    found = spec(**wish.model_dump(include={"throughput_gb_s", "capacity_tib"}))
    assert found.storage.lustre is not None
    assert violations(found.storage.lustre, efa_wanted(found)) == ()


@pytest.mark.parametrize(
    ("wish", "paths"),
    [
        ({}, []),
        ({"throughput_mb_s": 10_240}, []),
        ({"throughput_mb_s": 100}, ["throughput_mb_s"]),
        ({"throughput_mb_s": 20_480}, ["throughput_mb_s"]),
        ({"mount_path": "/etc"}, ["mount_path"]),
        ({"mount_path": "/fsx"}, ["mount_path"]),
        ({"mount_path": "/fsx/home"}, ["mount_path"]),
        ({"mount_path": "/fsx2"}, []),
        ({"type": "efs", "backup": False, "infrequent_access_days": None}, []),
        ({"type": "efs", "throughput_mb_s": 100, "capacity_gib": 64}, ["capacity_gib", "throughput_mb_s"]),
        ({"backup": False}, ["backup"]),
        ({"type": "efs", "existing": THERE, "backup": True}, ["backup"]),
        ({"existing": THERE, "throughput_mb_s": 100}, ["throughput_mb_s"]),
        ({"existing": THERE, "mount_path": "/homes"}, []),
    ],
)
def test_homes_that_cannot_be_are_found(wish: dict[str, Any], paths: list[str]) -> None:
    found = home.violations(Storage(home=Home.model_validate(wish), lustre=Lustre()))
    assert [one.path.removeprefix("storage.home.") for one in found] == paths


def test_home_is_as_specified_and_none_is_no_problem() -> None:
    plan = home.home(spec_of("ec2", storage={"home": {"capacity_gib": 512, "throughput_mb_s": 321}}))
    assert isinstance(plan, OpenZfsPlan)
    assert (plan.capacity_gib, plan.throughput_mb_s) == (512, 321)
    assert home.violations(Storage(lustre=Lustre())) == ()


@pytest.mark.parametrize(("days", "word"), [(None, None), (1, "AFTER_1_DAY"), (90, "AFTER_90_DAYS")])
def test_efs_home_has_a_target_in_each_zone_of_nodes(days: int | None, word: str | None) -> None:
    groups = [
        {"name": f"g{index}", "instance_type": "p5.48xlarge", "count": 1, "zone_id": zone}
        for index, zone in enumerate([None, "use2-az3", "use2-az1"])
    ]
    wish = {"type": "efs", "backup": False, "infrequent_access_days": days}
    plan = home.home(spec_of("ec2", groups=groups, storage={"home": wish}))
    assert plan == EfsPlan(zones=("use2-az1", "use2-az3"), backup=False, to_infrequent_access=word)


def test_existing_home_is_mounted_and_not_made() -> None:
    spec = spec_of("hyperpod-slurm", storage={"home": {"type": "efs", "existing": THERE, "mount_path": "/homes"}})
    assert home.home(spec) is None
    assert home.mounted_by_bundle(spec) == NfsMount("/", "/homes", MOUNT_OPTIONS)
    assert home.mounted_by_bundle(spec_of("ec2", storage={"home": {"type": "efs"}})) is None
    assert home.mounted_by_bundle(spec_of("hyperpod-slurm", storage={"home": {}})) is None
    assert home.mount_options(spec) == tuple(home.OPTIONS["efs"].split(","))
    assert home.mount_options(spec_of("hyperpod-slurm", storage={"home": {}})) == (), "HyperPod has its own"
