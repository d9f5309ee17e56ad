"""Each rule finds its mistake, names the key and the fix, and says nothing about a good cluster."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from functools import cache
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infra.catalog.instances import Card, Instance, instance
from infra.config import Eks, parse
from infra.plan.place import Place
from infra.policy.checks import open_to_the_world
from infra.policy.declared import Resource
from infra.preflight.offline import FAMILIES, LAST_OFFLINE, OFFLINE, SUPPRESSIONS, run_offline
from infra.preflight.rule import Context
from infra.preflight.rules import instances
from lustrain.problem import Problem, UserError
from tests.infra.edits import ACCOUNT, GONE, place, spec_of
from tests.infra.mistakes import BLOCK, BOUGHT, EKS, JOINED, MISTAKES, NOW, P9, SPOT, TRN3, ULTRASERVER, Mistake

DOCS = Path(__file__).parents[2] / "docs/cluster.md"


def found(mistake: Mistake) -> list[Problem]:
    return run_offline(spec_of(mistake.stack, mistake.edits), mistake.place or place(mistake.stack), NOW)


@cache
def found_as_planted(number: int) -> list[Problem]:
    """Of a mistake by its place in `MISTAKES`, all of which two tests look at."""
    return found(MISTAKES[number])


@pytest.mark.parametrize(("number", "mistake"), list(enumerate(MISTAKES)), ids=str)
def test_each_mistake_is_found_with_its_key_and_a_fix(number: int, mistake: Mistake) -> None:
    hits = [finding for finding in found_as_planted(number) if finding.code == mistake.code]
    assert [finding.path for finding in hits if finding.path == mistake.key], found_as_planted(number)
    for finding in hits:
        assert finding.fix
        assert finding.source
        assert "\n" not in finding
        assert finding.startswith(f"{finding.code} {finding.level}: {finding.path}: ")


EXAMPLE = spec_of(EKS, {})
PREFIXES = st.integers(0, 32).flatmap(
    lambda prefix: st.integers(0, 2**prefix - 1).map(lambda bits: IPv4Network((bits << (32 - prefix), prefix)))
)


@settings(deadline=None)
@given(PREFIXES)
@example(IPv4Network("0.0.0.0/0"))
@example(IPv4Network("8.0.0.0/7"))
def test_the_policy_pack_agrees_on_ranges_for_the_kubernetes_api(
    block: IPv4Network,
) -> None:
    spec = EXAMPLE.model_copy(update={"eks": Eks(public_access_cidrs=(str(block),))})
    refused = [one for code in ("EKS-008", "EKS-030") for one in OFFLINE[code].check(Context(spec))]
    network = {"endpointPublicAccess": True, "publicAccessCidrs": [str(block)]}
    declared = Resource("aws:eks/cluster:Cluster", {"vpcConfig": network})
    assert refused or not list(open_to_the_world(declared))


@settings(deadline=None)
@given(PREFIXES)
@example(IPv4Network("0.0.0.0/0"))
def test_the_policy_pack_agrees_on_ranges_for_the_nodes(block: IPv4Network) -> None:
    spec = spec_of(SPOT, {"network.allow_from": [str(block)]})
    refused = [one for code in ("NET-021", "NET-022") for one in OFFLINE[code].check(Context(spec))]
    kind = "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"
    assert refused or not list(open_to_the_world(Resource(kind, {"cidrIpv4": str(block)})))


def test_what_eks_refuses_cannot_be_suppressed() -> None:
    suppress = [{"code": "EKS-008", "reason": "our office is in there"}]
    findings = run_offline(
        spec_of(EKS, {"eks.public_access_cidrs": ["10.0.0.0/8"], "suppress": suppress}), place(EKS), NOW
    )
    assert {"EKS-008", "CFG-091"} <= {finding.code for finding in findings}
    with pytest.raises(UserError, match=r"eks\.public_endpoint"):
        spec_of(EKS, {"eks.public_endpoint": True})


def test_group_that_karpenter_fills_starts_empty_without_warning() -> None:
    edits = {"eks.karpenter": True, "groups.1.count": 0, "groups.1.capacity": GONE}
    edits["eks.public_access_cidrs"] = ["52.95.4.7/32"]
    assert run_offline(spec_of(EKS, edits), place(EKS), NOW) == []


def test_spot_gang_without_efa_and_placement_passes() -> None:
    edits = {"groups.0.efa": False, "groups.0.placement": "none"}
    assert run_offline(spec_of(SPOT, edits), place(SPOT), NOW) == []


def test_unknown_type_described_by_hand_passes() -> None:
    edits = {"groups.0.instance_type": "p9.48xlarge"}
    (unknown,) = OFFLINE["EC2-001"].check(Context(spec_of(BLOCK, edits)))
    assert "describe it: instance_types: {p9.48xlarge: {architecture: …" in unknown.fix
    assert run_offline(spec_of(BLOCK, {**edits, "instance_types": {"p9.48xlarge": P9}}), place(BLOCK), NOW) == []


def test_ultraserver_and_trainium3_by_hand_pass() -> None:
    assert run_offline(spec_of(BLOCK, {**ULTRASERVER, "observability.logs": False}), place(BLOCK), NOW) == []
    trn3 = {"groups.0.instance_type": "trn3.48xlarge", "instance_types": {"trn3.48xlarge": TRN3}}
    edits = {**trn3, "groups.0.image_id": "ami-0123456789abcdef0"}
    assert run_offline(spec_of(BLOCK, edits), place(BLOCK), NOW) == []


def test_stacks_of_the_docs_have_no_errors() -> None:
    for text in re.findall(r"```yaml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL):
        config = yaml.safe_load(text)["config"]
        found = run_offline(parse(config["lustrain:cluster"]), Place(config["aws:region"], ACCOUNT), NOW)
        assert {one.level for one in found} <= {"warning"}, list(found)


def test_existing_eks_cluster_passes_without_control_plane_keys() -> None:
    edits = {**JOINED, "eks.existing.addons": ["eks-pod-identity-agent"], "groups.0": GONE}
    assert run_offline(spec_of(EKS, edits), place(EKS), NOW) == []


@pytest.mark.parametrize(
    ("stack", "edits", "now", "told"),
    [
        (SPOT, {}, datetime(2027, 10, 9, 23, tzinfo=UTC), False),
        (SPOT, {}, datetime(2027, 10, 10, tzinfo=UTC), True),
        (SPOT, {}, None, False),
        (SPOT, {"groups.0.image_id": "ami-0123456789abcdef0"}, datetime(2028, 1, 1, tzinfo=UTC), False),
        (SPOT, {"groups.0.instance_type": "trn2.48xlarge"}, datetime(2027, 11, 25, tzinfo=UTC), False),
        (SPOT, {"groups.0.instance_type": "trn2.48xlarge"}, datetime(2027, 11, 26, tzinfo=UTC), True),
        (EKS, {}, datetime(2028, 1, 1, tzinfo=UTC), False),
    ],
)
def test_default_image_older_than_a_year_is_reported(
    stack: str, edits: dict[str, Any], now: datetime | None, told: bool
) -> None:
    hits = OFFLINE["EC2-023"].check(Context(spec_of(stack, edits), now=now))
    assert [hit.path for hit in hits] == (["groups.0.image_id"] if told else [])


def test_every_rule_has_a_code_of_its_own_and_a_mistake_here() -> None:
    rules = [*(rule for family in FAMILIES for rule in family), *SUPPRESSIONS.values()]
    assert len({rule.code for rule in rules}) == len(rules)
    assert all(int(rule.code[-3:]) <= LAST_OFFLINE for rule in rules)
    planted = {mistake.code for mistake in MISTAKES} | {"CFG-013", "EC2-023"}
    assert planted == set(OFFLINE) | set(SUPPRESSIONS)


def test_interfaces_that_do_not_fit_on_the_cards_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = instance("g6e.48xlarge")
    assert real is not None
    cards = (Card(0, 1, frozenset({"interface"})), *real.cards[1:])
    odd = Instance(**{**vars(real), "cards": cards})
    monkeypatch.setattr(instances, "known_groups", lambda spec: [("groups.0", spec.groups[0], odd)])
    hits = list(OFFLINE["EC2-010"].check(Context(spec_of(SPOT, {}))))
    assert [finding.path for finding in hits] == ["groups.0.instance_type"]
    assert "3 of 4" in hits[0].why


def test_all_mistakes_are_told_at_once_errors_first() -> None:
    edits = {"zone_id": "usw2-az1", "budget": GONE, "groups.0.instance_type": "p9.huge", "runs_uri": "s3://x/runs"}
    findings = run_offline(spec_of(SPOT, edits), place(SPOT), NOW)
    assert {"NET-001", "BUD-001", "EC2-001", "S3-004"} <= {finding.code for finding in findings}
    assert [finding.level for finding in findings] == sorted(finding.level for finding in findings)


def test_suppressed_finding_and_its_suppression_are_silent() -> None:
    suppress = [{"code": "BUD-001", "reason": "the department watches the bill"}]
    assert run_offline(spec_of(SPOT, {"budget": GONE, "suppress": suppress}), place(SPOT), NOW) == []


@pytest.mark.slow
def test_silenced_rule_that_aws_holds_to_shows_what_aws_refuses() -> None:
    """With the suppression of each mistake in turn: its own line is gone, and it is told where AWS would say no."""
    reason = "we know better"
    for number, mistake in enumerate(MISTAKES):
        rule = OFFLINE.get(mistake.code)
        if rule is None or rule.essential:
            continue
        suppress = [{"code": mistake.code, "reason": reason}]
        before = found_as_planted(number)
        after = found(replace(mistake, edits={**mistake.edits, "suppress": suppress}))
        assert not [finding for finding in after if finding.code == mistake.code]
        (silenced, *_) = [finding for finding in before if finding.code == mistake.code]
        told = [finding for finding in after if finding.code == "CFG-092"]
        if silenced.level == "error" and not rule.judgement and rule.source.startswith("https://"):
            assert [(one.path, one.level, silenced.why in one) for one in told] == [("suppress.0", "warning", True)], (
                mistake
            )
        else:
            assert told == [], mistake


@pytest.mark.parametrize("code", ["CFG-005", "FSX-008", "NET-007", "S3-005", "BUD-004"])
def test_what_only_we_refuse_is_silent_once_it_is_suppressed(code: str) -> None:
    mistake = next(mistake for mistake in MISTAKES if mistake.code == code)
    suppress = [{"code": code, "reason": "we know better"}]
    codes = {finding.code for finding in found(replace(mistake, edits={**mistake.edits, "suppress": suppress}))}
    assert not {code, "CFG-092"} & codes


MOUNTS = {
    **dict.fromkeys(("/bin", "/boot", "/dev", "/etc", "/home/fsx", "/lib", "/lib32", "/lib64"), "the operating system"),
    **dict.fromkeys(("/libx32", "/media", "/proc", "/root", "/run", "/sbin", "/sys"), "the operating system"),
    **dict.fromkeys(("/tmp", "/usr", "/usr/local/fsx", "/var"), "the operating system"),
    **dict.fromkeys(("/snap", "/snap/fsx"), "snapd"),
    **dict.fromkeys(("/scratch", "/scratch/fsx"), "every node makes"),
    **dict.fromkeys(("/opt/amazon", "/opt/amazon/efa"), "EFA"),
    "/opt/amazon-cloudwatch-agent": "CloudWatch",
    "/opt/aws": "AWS's own programs",
    "/opt/cni": "Kubernetes",
    "/opt/containerd": "containerd's",
    "/opt/habanalabs": "Gaudi",
    "/opt/ml": "the node's configuration",
    "/opt/nvidia": "NVIDIA",
    **dict.fromkeys(("/opt/sagemaker", "/opt/sagemaker/fsx"), "HyperPod"),
    "/opt/slurm": "Slurm",
    **dict.fromkeys(("/mnt/k8s-disks", "/mnt/k8s-disks/0"), "EKS"),
    "/opt": "what lies in /opt",
    "/opt/fsx": "",
    "/opt/amazonia": "",
    "/mnt/fsx": "",
    "/snapshots": "",
    "/scratch2": "",
    "/data/var": "",
}


def test_file_system_is_mounted_where_it_hides_nothing_needed() -> None:
    for path, whose in MOUNTS.items():
        for key, code in (("storage.lustre", "FSX-008"), ("storage.home", "FSX-009")):
            spec = spec_of(SPOT, {f"{key}.mount_path": path})
            hits = [one.why for one in OFFLINE[code].check(Context(spec))]
            assert [whose in message for message in hits] == ([True] if whose else []), (code, path, hits)


@pytest.mark.parametrize(("path", "told"), [("/fsxdata", False), ("/data/fsx", False), ("/fsx/a/b", True)])
def test_only_a_folder_that_begins_with_mount_path_repeats_it(path: str, told: bool) -> None:
    hits = OFFLINE["DRA-011"].check(Context(spec_of(SPOT, {"storage.lustre.associations.0.path": path})))
    assert [f"/fsx{path}" in one.why and "write /a/b," in one.fix for one in hits] == ([True] if told else [])


@pytest.mark.parametrize(("mode", "day"), [("on-demand", 3_038.208), ("spot", 303.8208)])
def test_budget_below_a_month_and_a_day_warns_with_figures(mode: str, day: float) -> None:
    """A home of 46,080 + 5,324.80 USD a month, and two machines of 63.296 USD an hour."""
    edits = {"groups.0.capacity.mode": mode, "groups.0.instance_type": "p5en.48xlarge", "groups.0.count": 2}
    edits |= {"storage": {"home": {"capacity_gib": 512_000, "throughput_mb_s": 10_240}}, "network.nat": False}
    edits["observability"] = GONE
    month = 512_000 * 0.09 + 10_240 * 0.52 + 3 + 7 * 0.1
    disks = 2 * (500 * 0.08 + 3_000 * 0.005 + 375 * 0.04) / 730 * 24

    def warned(budget: float) -> list[Problem]:
        return list(OFFLINE["BUD-004"].check(Context(spec_of(SPOT, {**edits, "budget.monthly_usd": budget}))))

    assert warned(month + day + disks + 0.01) == []
    (hit,) = warned(month + day + disks - 1)
    assert f"{month:,.0f} USD a month or more, most of it home (512,000 GiB" in hit.why
    assert f"{day + disks:,.0f} USD a day" in hit.why


@pytest.mark.parametrize(("length", "told"), [(50, []), (51, ["budget.emails.0"])])
def test_an_address_of_more_than_fifty_characters_is_found(length: int, told: list[str]) -> None:
    spec = spec_of(SPOT, {"budget.emails": ["a" * (length - 12) + "@example.com"]})
    assert [one.path for one in OFFLINE["BUD-003"].check(Context(spec))] == told


def test_an_empty_group_is_told_with_what_is_left() -> None:
    edits = {"groups.1": {"name": "more", "instance_type": "g6e.48xlarge", "count": 0}}
    (hit,) = OFFLINE["CFG-003"].check(Context(spec_of(SPOT, edits)))
    assert hit.why == "group more has 0 machines: the cluster has 8 workers with 64 accelerators"


def test_what_no_plan_can_be_built_on_cannot_be_suppressed() -> None:
    suppress = [{"code": "EC2-001", "reason": "a new type of today"}]
    findings = run_offline(spec_of(SPOT, {"groups.0.instance_type": "p9.huge", "suppress": suppress}), place(SPOT), NOW)
    assert {"EC2-001", "CFG-091"} <= {finding.code for finding in findings}


def test_a_suppression_of_an_online_rule_is_left_alone_offline() -> None:
    suppress = [{"code": "EC2-102", "reason": "the quota is being raised"}]
    assert run_offline(spec_of(SPOT, {"suppress": suppress}), place(SPOT), NOW) == []


@pytest.mark.parametrize(("partition", "refused"), [("aws", False), ("aws-cn", False), ("aws-us-gov", True)])
def test_a_budget_is_refused_where_aws_has_none(partition: str, refused: bool) -> None:
    found = OFFLINE["BUD-005"].check(Context(spec_of(SPOT, {}), partition=partition))
    assert [finding.level for finding in found] == (["error"] if refused else [])
    without = run_offline(spec_of(SPOT, {"budget": GONE}), Place("us-gov-west-1", "123456789012", "aws-us-gov"), NOW)
    assert not {"BUD-001", "BUD-005"} & {finding.code for finding in without}


@pytest.mark.parametrize(
    ("version", "policy", "last_second", "then"),
    [
        ("1.34", "STANDARD", "2026-09-02", "EKS-020 warning, in 90 days, EKS then upgrades, set 1.35"),
        ("1.35", "STANDARD", "2026-12-26", "EKS-020 warning, in 90 days, set a newer one when HyperPod takes it"),
        ("1.34", "EXTENDED", "2026-09-02", "EKS-020 warning, in 90 days, 0.60 USD an hour, 365 USD a month, set 1.35"),
        ("1.34", "STANDARD", "2026-12-01", "EKS-010 error, ended on 2026-12-02, set 1.35, upgrade_policy: EXTENDED"),
        ("1.34", "EXTENDED", "2026-12-01", "EKS-020 warning, ended on 2026-12-02, 365 USD a month, on 2027-12-02"),
        ("1.34", "EXTENDED", "2027-12-01", "EKS-010 error, all support of 1.34 ended on 2027-12-02"),
        ("1.35", "STANDARD", "2027-03-26", "EKS-010 error, ended on 2027-03-27, when HyperPod takes it"),
    ],
)
def test_more_is_said_once_a_kubernetes_versions_support_ends(
    version: str, policy: str, last_second: str, then: str
) -> None:
    """The day begins in UTC, wherever one sits: https://docs.aws.amazon.com/eks/latest/userguide/kubernetes-versions.html."""
    spec = spec_of(EKS, {"eks.version": version, "eks.upgrade_policy": policy})

    def said(now: datetime) -> list[str]:
        return [one for code in ("EKS-010", "EKS-020") for one in OFFLINE[code].check(Context(spec, now=now))]

    before = datetime.fromisoformat(f"{last_second}T23:59:59+00:00")
    after = (before + timedelta(seconds=1)).astimezone(timezone(timedelta(hours=-8)))
    (line,) = said(after)
    assert [word for word in then.split(", ") if word not in line] == [], line
    assert line not in said(before)


def test_version_out_of_standard_support_is_not_recommended() -> None:
    """Support of 1.35, the last that HyperPod takes, ended the day before."""
    spec = spec_of(EKS, {"eks.version": "1.33", "eks.upgrade_policy": "STANDARD"})
    (hit,) = OFFLINE["EKS-010"].check(Context(spec, now=datetime(2027, 3, 28, tzinfo=UTC)))
    assert "set a newer one when HyperPod takes it" in hit.fix


def test_version_newer_than_calendar_is_left_to_hyperpods_list() -> None:
    found = run_offline(spec_of(EKS, {"eks.version": "1.41"}), place(EKS), NOW)
    assert [(one.code, one.level) for one in found if one.code != "EKS-031"] == [("EKS-003", "error")]


def test_a_reservation_in_another_zone_says_nothing_of_this_one() -> None:
    spec = spec_of(SPOT, {"zone_id": "use1-az3", "groups.0.capacity": {**BOUGHT, "zone_id": "use1-az6"}})
    assert len(list(OFFLINE["EC2-020"].check(Context(spec, region="us-east-1")))) == 1


@pytest.mark.parametrize(
    ("edits", "at"),
    [
        ({"zone_id": "use1-bos1-az1"}, Place("us-east-1", ACCOUNT)),
        ({"zone_id": "euw1-az4"}, Place("eu-west-1", ACCOUNT)),
        ({"zone_id": "mxc1-az1"}, Place("mx-central-1", ACCOUNT)),
        ({"zone_id": "cnnw1-az9"}, Place("cn-northwest-1", ACCOUNT, "aws-cn")),
        ({"zone_id": "use1-az3", "groups.0.instance_type": "m5.2xlarge"}, Place("us-east-1", ACCOUNT)),
        ({"zone_id": "use1-az3", "groups.0.capacity": {**BOUGHT, "zone_id": "use1-az3"}}, Place("us-east-1", ACCOUNT)),
    ],
    ids=["Local Zone", "zone of old accounts", "region not asked", "region without a list", "plain type", "reserved"],
)
def test_nothing_is_said_where_lists_are_silent_or_user_knows(edits: dict[str, Any], at: Place) -> None:
    found = {one.code for one in run_offline(spec_of(SPOT, edits), at, NOW)}
    assert not found & {"NET-020", "EC2-020"}


def test_image_of_ones_own_ends_questions_about_the_default_one() -> None:
    edits = {"groups.0.instance_type": "hpc7a.96xlarge", "network.closed": True}
    (hit,) = [one for one in run_offline(spec_of(SPOT, edits), place(SPOT), NOW) if one.code == "EC2-021"]
    assert "the AWS CLI, EFA's driver, the NFS client and the Lustre client" in hit.why
    mine = {**edits, "groups.0.image_id": "ami-0123456789abcdef0"}
    assert not {one.code for one in run_offline(spec_of(SPOT, mine), place(SPOT), NOW)} & {"EC2-021", "EC2-022"}


def test_without_a_place_its_rules_are_silent_and_that_is_said() -> None:
    found = run_offline(spec_of(SPOT, {"zone_id": "usw2-az1"}), None, NOW)
    assert [(one.code, one.level, one.path) for one in found] == [("CFG-013", "warning", "aws:region")]
