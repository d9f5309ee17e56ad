"""What an update would replace, re-image or wipe is told before, and what cannot be had back is refused."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from infra.config import parse
from infra.preflight import commands, stackfile
from infra.preflight.change import Change, Effect
from infra.preflight.explain import explain, refused
from lustrain import deployed
from tests.infra.edits import GONE, STACKS, config, edited, spec_of
from tests.infra.mistakes import (
    BLOCK,
    DATABASE,
    EKS,
    EXISTING,
    FURTHER,
    HOMES,
    JOINED,
    KEY,
    NODE_ROLE,
    P9,
    PROXY,
    RESERVED,
    SLURM,
    SPOT,
    THERE,
)

REHEARSAL = "rehearsal"
EXACT = {"capacity_gib": 4800, "per_tib_mb_s": 500}
TIERED = {"throughput_gb_s": 4, "type": "intelligent-tiering"}
BOUNDARY_KEY = "access.permissions_boundary"
LINK = "storage.lustre.associations ({})"


def changes(stack: str, edits: dict[str, Any], before: dict[str, Any] | None = None) -> list[Change]:
    return explain(spec_of(stack, before or {}), spec_of(stack, {**(before or {}), **edits}))


CASES: list[tuple[str, dict[str, Any], Effect, str]] = [
    (SPOT, {"name": "other"}, Effect.REPLACES_CLUSTER, "name"),
    (SPOT, {"name": "other"}, Effect.IMPOSSIBLE, "name"),
    (SLURM, {"backend": "ec2"}, Effect.REPLACES_CLUSTER, "backend"),
    (SPOT, {"zone_id": "use1-az5"}, Effect.REPLACES_FILE_SYSTEM, "zone_id"),
    (REHEARSAL, {"zone_id": "use1-az5"}, Effect.REPLACES_CLUSTER, "zone_id"),
    (SPOT, {"network.cidr": "10.1.0.0/16"}, Effect.REPLACES_FILE_SYSTEM, "network.cidr"),
    (SPOT, {"network.compute_prefix": 19}, Effect.REPLACES_FILE_SYSTEM, "network.compute_prefix"),
    (SPOT, {"network.existing": EXISTING}, Effect.REPLACES_FILE_SYSTEM, "network.existing.compute_subnet_id"),
    (SLURM, {"zone_id": "usw2-az1"}, Effect.IMPOSSIBLE, "groups"),
    (EKS, {"network.second_zone_id": "use2-az3"}, Effect.IN_PLACE, "network.second_zone_id"),
    (SPOT, {"storage.s3_mounts": [{"bucket": "data", "path": "/s3"}]}, Effect.NEW_NODES, "storage.s3_mounts"),
    (SPOT, {"storage.lustre": GONE}, Effect.IMPOSSIBLE, "storage.lustre"),
    (REHEARSAL, {"storage.lustre": {"capacity_tib": 1.2}}, Effect.NEW_NODES, "storage.lustre"),
    (SPOT, {"storage.lustre": {"existing": THERE}}, Effect.IMPOSSIBLE, "storage.lustre"),
    (SPOT, {"storage.lustre": TIERED}, Effect.REPLACES_FILE_SYSTEM, "storage.lustre.type"),
    (BLOCK, {"storage.lustre.efa": False}, Effect.REPLACES_FILE_SYSTEM, "storage.lustre.efa"),
    (SPOT, {"storage.lustre.kms_key": KEY}, Effect.REPLACES_FILE_SYSTEM, "storage.lustre.kms_key"),
    (BLOCK, {"storage.lustre.capacity_tib": 38.4}, Effect.IN_PLACE, "storage.lustre.capacity_gib"),
    (BLOCK, {"storage.lustre.metadata_iops": 6000}, Effect.IMPOSSIBLE, "storage.lustre.metadata_iops"),
    (BLOCK, {"storage.lustre.metadata_iops": 24000}, Effect.IN_PLACE, "storage.lustre.metadata_iops"),
    (SPOT, {"storage.lustre.compression": "NONE"}, Effect.IN_PLACE, "storage.lustre.compression"),
    (SPOT, {"storage.lustre.mount_path": "/lustre"}, Effect.NEW_NODES, "storage.lustre.mount_path"),
    (SPOT, {"storage.home": GONE}, Effect.IMPOSSIBLE, "storage.home"),
    (REHEARSAL, {"storage.home": {}}, Effect.NEW_NODES, "storage.home"),
    (SPOT, {"storage.home": {"type": "efs"}}, Effect.IMPOSSIBLE, "storage.home"),
    (SLURM, {"storage.home": {"type": "efs", "existing": HOMES}}, Effect.IMPOSSIBLE, "storage.home"),
    (SLURM, {"storage.home.backup": False}, Effect.IN_PLACE, "storage.home.backup"),
    (SLURM, {"storage.home.infrequent_access_days": None}, Effect.IN_PLACE, "storage.home.infrequent_access_days"),
    (SPOT, {"storage.home.kms_key": KEY}, Effect.REPLACES_FILE_SYSTEM, "storage.home.kms_key"),
    (SPOT, {"storage.home.capacity_gib": 64}, Effect.IMPOSSIBLE, "storage.home.capacity_gib"),
    (SPOT, {"storage.home.capacity_gib": 512}, Effect.IN_PLACE, "storage.home.capacity_gib"),
    (SPOT, {"storage.home.throughput_mb_s": 320}, Effect.IN_PLACE, "storage.home.throughput_mb_s"),
    (SPOT, {"storage.home.mount_path": "/homes"}, Effect.NEW_NODES, "storage.home.mount_path"),
    (SPOT, {"storage.lustre.associations": []}, Effect.REPLACES_ASSOCIATION, "storage.lustre.associations (/data)"),
    (SPOT, {"storage.lustre.associations.0.prefix": "x"}, Effect.REPLACES_ASSOCIATION, LINK.format("/data")),
    (SPOT, {"storage.lustre.associations.0.chunk_mib": 64}, Effect.IN_PLACE, "storage.lustre.associations (/data)"),
    (SPOT, {"storage.lustre.associations.1": {"path": "/b", "bucket": "b"}}, Effect.IN_PLACE, LINK.format("/b")),
    (SPOT, {"groups.0.count": 4}, Effect.WIPES, "groups (train).count"),
    (SPOT, {"groups.0.count": 9}, Effect.IN_PLACE, "groups (train).count"),
    (SPOT, {"groups.0.name": "gang"}, Effect.REPLACES_NODES, "groups (train)"),
    (SPOT, {"groups.0.name": "gang"}, Effect.IN_PLACE, "groups (gang)"),
    (SPOT, {"groups.0.instance_type": "g6e.24xlarge"}, Effect.NEW_NODES, "groups (train).instance_type"),
    (SLURM, {"groups.2.instance_type": "p5en.48xlarge"}, Effect.REPLACES_NODES, "groups (train).instance_type"),
    (SLURM, {"groups.2.root_volume_gib": 800}, Effect.REPLACES_NODES, "groups (train).root_volume_gib"),
    (SLURM, {"groups.2.interface_type": "efa-only"}, Effect.NEW_NODES, "groups (train).interface_type"),
    (SLURM, {"groups.2.auto_patch": "WhenIdle"}, Effect.REIMAGES, "groups (train).auto_patch"),
    (SLURM, {"groups.2.volume_kms_key": "arn:key"}, Effect.IMPOSSIBLE, "groups (train).volume_kms_key"),
    (SPOT, {"groups.0.volume_kms_key": "arn:key"}, Effect.NEW_NODES, "groups (train).volume_kms_key"),
    (SPOT, {"groups.0.efa": False}, Effect.NEW_NODES, "groups (train).efa"),
    (SPOT, {"groups.0.other_types": ["g6e.24xlarge"]}, Effect.NEW_NODES, "groups (train).other_types"),
    (BLOCK, {"groups.0.efa": False, "storage.lustre.efa": GONE}, Effect.REPLACES_FILE_SYSTEM, "storage.lustre.efa"),
    (SPOT, {"groups.0.placement": "none"}, Effect.NEW_NODES, "groups (train).placement"),
    (SPOT, {"groups.0.placement": "none"}, Effect.IMPOSSIBLE, "groups (train)"),
    (SLURM, {"slurm.accounting": DATABASE}, Effect.IN_PLACE, "slurm.accounting"),
    (SLURM, {"groups.1.role": "worker"}, Effect.REPLACES_CLUSTER, "groups (login).role"),
    (SLURM, {"groups.2.min_count": 2}, Effect.IN_PLACE, "groups (train).min_count"),
    (EKS, {"groups.1.taints": []}, Effect.IN_PLACE, "groups (spot).taints"),
    (SPOT, {"groups.0.capacity.mode": "on-demand"}, Effect.NEW_NODES, "groups (train).capacity"),
    (BLOCK, {"groups.0.capacity.ends_at": "2027-03-01T00:00:00Z"}, Effect.NEW_NODES, "groups (train).capacity"),
    (BLOCK, {"groups.0.capacity.size": 20}, Effect.IN_PLACE, "groups (train).capacity"),
    (SLURM, {"groups.2.capacity.ends_at": "2027-03-01T00:00:00Z"}, Effect.IN_PLACE, "groups (train).capacity"),
    (RESERVED, {"groups.0.capacity.ends_at": "2027-03-01T00:00:00Z"}, Effect.NEW_NODES, "groups (train).capacity"),
    (RESERVED, {"groups.0.instance_type": "p5.48xlarge"}, Effect.IMPOSSIBLE, "groups (train).instance_type"),
    (RESERVED, {"groups.0.name": "gang"}, Effect.IMPOSSIBLE, "groups (train)"),
    (RESERVED, {"groups.0.capacity": {"mode": "on-demand"}}, Effect.IMPOSSIBLE, "groups (train).capacity"),
    (EKS, {"eks.version": "1.36"}, Effect.REIMAGES, "eks.version"),
    (EKS, {"eks.version": "1.34"}, Effect.IMPOSSIBLE, "eks.version"),
    (EKS, {"eks.upgrade_policy": "EXTENDED"}, Effect.IN_PLACE, "eks.upgrade_policy"),
    (EKS, {"eks.version": "1.37"}, Effect.IMPOSSIBLE, "eks.version"),
    (EKS, {"eks.tiered_memory_percent": 30}, Effect.IN_PLACE, "eks.tiered_memory_percent"),
    (EKS, {"eks.public_access_cidrs": []}, Effect.IN_PLACE, "eks.public_access_cidrs"),
    (EKS, {"eks.karpenter": True}, Effect.IN_PLACE, "eks.karpenter"),
    (EKS, {"eks.task_governance": True}, Effect.IN_PLACE, "eks.task_governance"),
    (EKS, JOINED, Effect.REPLACES_CLUSTER, "eks.existing.name"),
    (EKS, {"eks.cluster_role": NODE_ROLE}, Effect.REPLACES_CLUSTER, "eks.cluster_role"),
    (EKS, {"eks.karpenter_role": NODE_ROLE}, Effect.IN_PLACE, "eks.karpenter_role"),
    (EKS, {"access.admin_roles": []}, Effect.IN_PLACE, "access.admin_roles"),
    (SPOT, {"buckets.data": "mine"}, Effect.IMPOSSIBLE, "buckets.data"),
    (SPOT, {"buckets.runs_prefix": "new/"}, Effect.IN_PLACE, "buckets.runs_prefix"),
    (SPOT, {"runs_uri": "s3://mine/runs/"}, Effect.IN_PLACE, "runs_uri"),
    (SPOT, {"buckets.ephemeral_days": 3}, Effect.DELETES_OBJECTS, "buckets.ephemeral_days"),
    (SPOT, {"buckets.ephemeral_days": 30}, Effect.IN_PLACE, "buckets.ephemeral_days"),
    (SPOT, {"repository.keep_last": 5}, Effect.DELETES_OBJECTS, "repository.keep_last"),
    (SPOT, {"budget.monthly_usd": 5}, Effect.IN_PLACE, "budget.monthly_usd"),
    (SPOT, {"alarms.nat_gb_per_hour": 5}, Effect.IN_PLACE, "alarms.nat_gb_per_hour"),
    (SPOT, {"tuning.profiles": {"train": "cpu"}}, Effect.NEW_NODES, "tuning.profiles (train)"),
    (SPOT, {"tuning.settings": {"clock.chrony": "off"}}, Effect.NEW_NODES, "tuning.settings (clock.chrony)"),
    (SPOT, {"tags": {"a": "b"}}, Effect.IN_PLACE, "tags"),
    (SPOT, {"instance_types": {"g6e.48xlarge": P9}}, Effect.NEW_NODES, "instance_types"),
    (SPOT, {"access.ssh_key": "mine"}, Effect.NEW_NODES, "access.ssh_key"),
    (SPOT, {"access.permissions_boundary": "arn:aws:iam::123456789012:policy/b"}, Effect.IN_PLACE, BOUNDARY_KEY),
    (SPOT, {"access.role_path": "/team/"}, Effect.REPLACES_NODES, "access.role_path"),
    (SPOT, {"boot.on_configured": "lifecycle/node.sh"}, Effect.NEW_NODES, "boot.on_configured"),
    (SPOT, {"network.proxy": PROXY}, Effect.NEW_NODES, "network.proxy"),
    (SPOT, {FURTHER: ["sg-01234567"]}, Effect.NEW_NODES, FURTHER),
    (SLURM, {FURTHER: ["sg-01234567"]}, Effect.REPLACES_CLUSTER, FURTHER),
    (SPOT, {"network.allow_from": ["10.20.0.0/16"]}, Effect.IN_PLACE, "network.allow_from"),
    (SPOT, {"access.node_role": NODE_ROLE}, Effect.REPLACES_NODES, "access.node_role"),
    (EKS, {"access.role_path": "/team/"}, Effect.REPLACES_CLUSTER, "access.role_path"),
    (SPOT, {"job_ends_at": "2027-01-01T00:00:00Z"}, Effect.IN_PLACE, "job_ends_at"),
]


def test_zones_in_another_order_would_move_subnets_of_nodes() -> None:
    def cluster(*zones: str) -> Any:
        more = {"instance_type": "g6e.8xlarge", "count": 1}
        return spec_of(
            SPOT, {f"groups.{n}": {**more, "name": zone, "zone_id": zone} for n, zone in enumerate(zones, 1)}
        )

    before = cluster("use1-az2", "use1-az5")
    assert Effect.IMPOSSIBLE not in {one.effect for one in explain(before, cluster("use1-az2", "use1-az5", "use1-az6"))}
    assert Effect.IMPOSSIBLE in {one.effect for one in explain(before, cluster("use1-az5", "use1-az2"))}
    assert Effect.IMPOSSIBLE in {one.effect for one in explain(before, cluster("use1-az5"))}


def test_unchanged_file_system_is_not_judged() -> None:
    """A rate that FSx refuses is a finding of preflight (FSX-004); an update that leaves it alone changes nothing."""
    edits = {"storage.lustre": {"metadata_iops": 1}}
    assert changes(SPOT, {}, edits) == []


def test_other_existing_role_is_for_new_nodes_or_hyperpods() -> None:
    before, after = {"access.node_role": NODE_ROLE}, {"access.node_role": f"{NODE_ROLE}2"}
    for stack, effect in ((SPOT, Effect.NEW_NODES), (SLURM, Effect.REPLACES_NODES)):
        assert {(one.effect, one.path) for one in changes(stack, after, before)} == {(effect, "access.node_role")}


def test_existing_eks_cluster_gets_addons_and_keeps_its_version() -> None:
    other = {**JOINED, "eks.existing.name": "other"}
    assert [(one.effect, one.path) for one in changes(EKS, other, JOINED)] == [
        (Effect.REPLACES_CLUSTER, "eks.existing.name")
    ]
    more = {**JOINED, "eks.existing.addons": ["coredns"], "eks.version": "1.30"}
    assert [(one.effect, one.path) for one in changes(EKS, more, JOINED)] == [(Effect.IN_PLACE, "eks.existing.addons")]


def test_an_accounting_database_is_for_good() -> None:
    there = spec_of(SLURM, {"slurm.accounting": DATABASE})
    (change,) = explain(there, spec_of(SLURM, {}))
    assert (change.effect, change.path) == (Effect.IMPOSSIBLE, "slurm.accounting")


@pytest.mark.parametrize(("stack", "edits", "effect", "path"), CASES, ids=lambda value: str(value)[:60])
def test_each_change_has_its_effect(stack: str, edits: dict[str, Any], effect: Effect, path: str) -> None:
    found = changes(stack, edits)
    assert (effect, path) in {(change.effect, change.path) for change in found}, [one.line() for one in found]
    lost = [change for change in found if change.lost or change.effect is Effect.IMPOSSIBLE]
    assert all(change.instead for change in lost), "what is lost comes with what to do instead"


def test_removed_mount_asks_for_a_tune_and_a_changed_one_for_nodes() -> None:
    mounts = [{"bucket": name, "path": f"/s3/{name}"} for name in ("data", "theirs")]
    other = [{**mounts[0], "prefix": "v2/"}, mounts[1]]
    (fewer,) = changes(SPOT, {"storage.s3_mounts": mounts[:1]}, {"storage.s3_mounts": mounts})
    (more,) = changes(SPOT, {"storage.s3_mounts": mounts}, {"storage.s3_mounts": mounts[:1]})
    (changed,) = changes(SPOT, {"storage.s3_mounts": other}, {"storage.s3_mounts": mounts})
    assert ["unmounts /s3/theirs" in one.message for one in (fewer, more, changed)] == [True, False, False]
    assert ["replace running nodes" in one.message for one in (fewer, more, changed)] == [False, False, True]


def test_an_effect_has_a_case_here() -> None:
    assert {case[2] for case in CASES} == set(Effect)


def test_group_that_turns_the_file_systems_efa_on_is_refused() -> None:
    before = {"storage.lustre": {"throughput_gb_s": 4.8}, "groups.0.instance_type": "g6e.4xlarge"}
    found = changes(SPOT, {"groups.0.instance_type": "g6e.48xlarge"}, before)
    assert "storage.lustre.efa" in {change.path for change in refused(found)}


def test_throughput_is_fixed_with_efa_and_free_without() -> None:
    for efa, effect in ((True, Effect.IMPOSSIBLE), (False, Effect.IN_PLACE)):
        found = changes(
            SPOT,
            {"storage.lustre": {"capacity_gib": 19200, "per_tib_mb_s": 250, "efa": efa}},
            {"storage.lustre": {"capacity_gib": 19200, "per_tib_mb_s": 500, "efa": efa}},
        )
        assert (effect, "storage.lustre.per_tib_mb_s") in {(one.effect, one.path) for one in found}


def test_a_file_system_cannot_shrink() -> None:
    found = changes(SPOT, {"storage.lustre": {**EXACT, "capacity_gib": 2400}}, {"storage.lustre": EXACT})
    assert [change.path for change in refused(found)] == ["storage.lustre.capacity_gib"]


def test_what_is_added_is_told_in_the_order_of_the_config() -> None:
    names = [f"g{number}" for number in range(9)]
    added = [{"name": name, "instance_type": "g6e.48xlarge", "count": 1} for name in names]
    found = changes(SPOT, {f"groups.{number}": one for number, one in enumerate(added, 1)})
    assert [change.path for change in found] == [f"groups ({name})" for name in names]


def test_the_end_of_a_block_moves_its_schedule_in_place() -> None:
    (found,) = changes(BLOCK, {"groups.0.capacity.ends_at": "2027-03-01T00:00:00Z"})
    assert "schedule that empties the group follows in place" in found.line()


STARTS = "groups.0.capacity.starts_at"
EARLY, LATE = "2027-01-14T11:30:00Z", "2027-01-16T11:30:00Z"


@pytest.mark.parametrize(
    ("before", "after", "today", "effect", "words"),
    [
        (EARLY, LATE, "2027-01-13", Effect.IN_PLACE, "empty until that time"),
        (EARLY, LATE, "2027-01-15", Effect.WIPES, "is emptied until"),
        (EARLY, GONE, "2027-01-13", Effect.IN_PLACE, "filled at once"),
        (EARLY, GONE, "2027-01-15", Effect.IN_PLACE, "stays as it is"),
    ],
)
def test_start_of_a_block_is_compared_with_the_day(
    before: str, after: Any, today: str, effect: Effect, words: str
) -> None:
    old = spec_of(BLOCK, {STARTS: before})
    new = spec_of(BLOCK, {} if after is GONE else {STARTS: after})
    (change,) = explain(old, new, datetime.fromisoformat(f"{today}T12:00:00+00:00"))
    assert (change.effect, change.path) == (effect, "groups (train).capacity")
    assert words in change.message


def test_change_of_a_stack_is_judged_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = {"spec": edited(BLOCK, {STARTS: EARLY})}
    monkeypatch.setenv("LUSTRAIN_NOW", "2027-01-15T00:00:00Z")
    monkeypatch.setattr(deployed, "outputs", lambda *_: outputs)
    after = stackfile.Stack(BLOCK, "us-east-2", spec_of(BLOCK, {STARTS: LATE}))
    monkeypatch.setattr(stackfile, "read", lambda _: after)
    assert [change.effect for change in commands.changes(BLOCK, None)] == [Effect.WIPES]


def test_the_worst_comes_first() -> None:
    found = changes(SPOT, {"zone_id": "use1-az5", "groups.0.count": 9, "budget.monthly_usd": 5})
    ranks = [list(Effect).index(change.effect) for change in found]
    assert ranks == sorted(ranks, reverse=True)
    assert found[0].effect in (Effect.REPLACES_FILE_SYSTEM, Effect.IMPOSSIBLE)


def test_a_harmless_update_is_not_refused() -> None:
    assert refused(changes(SPOT, {"groups.0.count": 9, "alarms.emails": ["new@example.com"]})) == []


def test_another_tuning_is_a_small_change_with_the_way_for_nodes() -> None:
    before = {"tuning": {"settings": {"a": "1", "b": "on", "c": "on"}}}
    found = changes(SPOT, {"tuning": {"settings": {"a": 2, "b": True}}}, before)
    assert refused(found) == []
    assert [(one.effect, one.path, one.message) for one in found] == [
        (Effect.NEW_NODES, "tuning.settings (a)", "1 becomes 2"),
        (Effect.NEW_NODES, "tuning.settings (c)", "on becomes nothing"),
    ]
    assert all("fab node-tune" in one.instead for one in found)


@pytest.mark.parametrize("stack", STACKS)
def test_what_a_stack_says_of_itself_is_what_its_file_says(stack: str) -> None:
    spec = spec_of(stack, {})
    told = json.loads(json.dumps(spec.model_dump(mode="json")))
    assert explain(parse(told), spec) == []


OLDER: list[tuple[dict[str, Any], dict[str, Any], list[tuple[Effect, str]]]] = [
    ({}, {}, [(Effect.REIMAGES, "eks.version"), (Effect.IN_PLACE, "eks.upgrade_policy")]),
    ({}, {"eks.version": GONE}, [(Effect.IN_PLACE, "eks.upgrade_policy")]),
    ({"version": "1.35", "upgrade_policy": "STANDARD"}, {}, []),
    ({"version": "1.34", "upgrade_policy": "STANDARD"}, {"eks.version": GONE}, []),
]


@pytest.mark.parametrize(("told", "edits", "expected"), OLDER)
def test_older_stack_keeps_defaults_until_a_version_is_named(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], edits: dict[str, Any], expected: list[tuple[Effect, str]]
) -> None:
    values = config(EKS)["lustrain:cluster"]
    kept = {key: value for key, value in values["eks"].items() if key != "version"}
    outputs = {"spec": {**values, "eks": {**kept, **told}}}
    monkeypatch.setattr(deployed, "outputs", lambda *_: outputs)
    monkeypatch.setattr(stackfile, "read", lambda stack: stackfile.Stack(stack, "us-east-2", spec_of(stack, edits)))
    assert [(one.effect, one.path) for one in commands.changes(EKS, None)] == expected


def test_efs_home_survives_another_subnet() -> None:
    efs = {"storage.home": {"type": "efs"}}
    effects = {change.effect for change in changes(REHEARSAL, {"network.cidr": "10.1.0.0/16"}, efs)}
    assert effects == {Effect.REPLACES_CLUSTER}
