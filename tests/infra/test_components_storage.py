"""Storage as Pulumi resources: what is kept when the stack goes, what waits for what, what other parts learn from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pulumi
import pytest
from pulumi.runtime import MockCallArgs, MockResourceArgs, Mocks

from infra.components.buckets import Buckets
from infra.components.file_systems import LustreSystem, OpenZfsHome
from infra.config import ClusterSpec, ExistingLustre, Home, Lustre, parse
from infra.plan.place import Place
from infra.plan.storage.associations import associations
from infra.plan.storage.buckets import buckets
from infra.plan.storage.home import home
from infra.plan.storage.lustre import LustrePlan, efa_wanted, lustre
from tests.infra.registered import Registered, run_on

PLACE = Place("us-east-1", "123456789012")
LUSTRE, LINK = (
    "aws:fsx/lustreFileSystem:LustreFileSystem",
    "aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation",
)
BUCKET = "aws:s3/bucket:Bucket"


class Service(Mocks):
    """Answers as AWS would."""

    def new_resource(self, args: MockResourceArgs) -> tuple[str | None, dict[str, Any]]:
        computed = {"arn": f"arn:of:{args.name}"}
        if args.typ.startswith("aws:fsx/"):
            computed |= {"dnsName": "fs-1.fsx.us-east-1.amazonaws.com", "mountName": "abcd1234"}
        return f"{args.name}-id", {**args.inputs, **computed}

    def call(self, args: MockCallArgs) -> tuple[dict[Any, Any], list[tuple[str, str]] | None]:
        raise AssertionError(f"a component asked AWS for {args.token}")


def run(program: Callable[[], dict[str, pulumi.Output[Any]]]) -> tuple[Registered, dict[str, Any]]:
    return run_on(Registered(Service()), Service(), program)


def spec(storage: dict[str, Any], **more: Any) -> ClusterSpec:
    groups = [{"name": "train", "instance_type": "p5.48xlarge", "count": 2}]
    return parse({"name": "llm", "backend": "ec2", "zone_id": "use1-az4", "groups": groups, "storage": storage, **more})


def system(plan: LustrePlan, found: ClusterSpec | None = None) -> tuple[Registered, dict[str, Any]]:
    def program() -> dict[str, pulumi.Output[Any]]:
        made = LustreSystem(
            "fs",
            plan,
            associations(found, PLACE) if found else (),
            subnet_id="subnet-1",
            security_group_ids=["sg-1"],
            bucket_names={"data": pulumi.Output.from_input("our-data"), "checkpoints": "our-checkpoints"},
            log_days=14,
        )
        return {"id": made.id, "dns": made.dns_name, "mount": made.mount_name}

    return run(program)


def test_what_is_planned_is_what_fsx_is_asked_for() -> None:
    wish = Lustre(throughput_gb_s=4.8, kms_key="arn:key", backup_days=7, compression="NONE", metadata_iops=6000)
    made, values = system(lustre(wish, True))
    sent = made.properties("fs-system")
    assert (sent["deploymentType"], sent["storageType"], sent["fileSystemTypeVersion"]) == (
        "PERSISTENT_2",
        "SSD",
        "2.15",
    )
    assert (sent["storageCapacity"], sent["perUnitStorageThroughput"], sent["efaEnabled"]) == (4800, 1000, True)
    assert sent["metadataConfiguration"] == {"mode": "USER_PROVISIONED", "iops": 6000}
    assert (sent["dataCompressionType"], sent["kmsKeyId"], sent["automaticBackupRetentionDays"]) == (
        "NONE",
        "arn:key",
        7,
    )
    assert (sent["subnetIds"], sent["securityGroupIds"]) == ("subnet-1", ["sg-1"])
    assert values["id"] == "fs-system-id"
    assert (values["dns"], values["mount"]) == ("fs-1.fsx.us-east-1.amazonaws.com", "abcd1234")


def test_the_default_leaves_metadata_to_fsx_and_makes_no_backup() -> None:
    sent = system(lustre(Lustre(), False))[0].properties("fs-system")
    assert sent["metadataConfiguration"] == {"mode": "AUTOMATIC"}
    assert sent["automaticBackupRetentionDays"] == 0
    assert "copyTagsToBackups" not in sent


def test_intelligent_tiering_has_a_rate_and_a_cache_and_no_capacity() -> None:
    sent = system(lustre(Lustre(type="intelligent-tiering", throughput_gb_s=8), True))[0].properties("fs-system")
    assert (sent["storageType"], sent["throughputCapacity"]) == ("INTELLIGENT_TIERING", 8000)
    assert sent["dataReadCacheConfiguration"] == {"sizingMode": "USER_PROVISIONED", "size": 64}
    assert not {"storageCapacity", "perUnitStorageThroughput"} & set(sent)


def test_the_file_system_is_protected_and_outlives_the_stack_its_links_do_not() -> None:
    found = spec({"lustre": {"associations": [{"path": "/data", "bucket": "data"}]}})
    made, _ = system(lustre(Lustre(), False), found)
    request = made.requests["fs-system"]
    assert (request.protect, request.retainOnDelete, list(request.ignoreChanges)) == (True, True, [])
    (name,) = made.named(LINK)
    link = made.requests[name]
    assert (link.protect, link.retainOnDelete, link.deleteBeforeReplace) == (False, False, True)
    assert made.properties(name)["deleteDataInFilesystem"] is False
    assert (link.customTimeouts.create, link.customTimeouts.delete) == ("60m", "60m")


def test_logs_go_where_fsx_may_write_and_are_not_kept_for_ever() -> None:
    made, _ = system(lustre(Lustre(), False))
    assert made.properties("fs-log") == {**made.properties("fs-log"), "name": "/aws/fsx/fs", "retentionInDays": 14}
    assert made.properties("fs-system")["logConfiguration"] == {"destination": "arn:of:fs-log", "level": "WARN_ERROR"}


def test_links_are_made_one_after_the_other_and_wait_for_our_buckets() -> None:
    links = [
        {"path": "/data", "bucket": "data", "prefix": "datasets", "chunk_mib": 128},
        {"path": "/a-b", "bucket": "corpus"},
        {"path": "/a/b", "bucket": "checkpoints", "prefix": "out", "import_events": [], "export_events": ["NEW"]},
    ]
    made = system(lustre(Lustre(), False), spec({"lustre": {"associations": links}}))[0]
    names = ["fs-link/data", "fs-link/a-b", "fs-link/a/b"]
    assert made.named(LINK) == names
    for before, name in pairwise(["fs-system", *names]):
        assert before in made.waits_for(name)
    sent = [made.properties(name) for name in names]
    uris = [one["dataRepositoryPath"] for one in sent]
    assert uris == ["s3://our-data/datasets/", "s3://corpus", "s3://our-checkpoints/out/"]
    assert [one["fileSystemPath"] for one in sent] == ["/data", "/a-b", "/a/b"]
    assert [one["batchImportMetaDataOnCreate"] for one in sent] == [True, True, False]
    assert (sent[0]["importedFileChunkSize"], sent[0]["fileSystemId"]) == (128, "fs-system-id")
    assert sent[0]["s3"] == {"autoImportPolicy": {"events": ["NEW", "CHANGED", "DELETED"]}}
    assert sent[2]["s3"] == {"autoExportPolicy": {"events": ["NEW"]}}


def test_an_existing_file_system_is_passed_on_and_nothing_is_made() -> None:
    existing = ExistingLustre(
        id="fs-0123456789abcdef0", dns_name="there", mount_name="mnt", security_group_id="sg-0123456789abcdef0"
    )
    made, values = system(lustre(Lustre(existing=existing), False))
    assert values == {"id": "fs-0123456789abcdef0", "dns": "there", "mount": "mnt"}
    assert [request.type for request in made.requests.values() if request.type.startswith("aws:")] == []


def test_homes_are_as_planned_protected_and_outlive_the_stack() -> None:
    plan = home(Home(capacity_gib=512, throughput_mb_s=320))

    def program() -> dict[str, pulumi.Output[Any]]:
        made = OpenZfsHome("home", plan, subnet_id="subnet-1", security_group_ids=["sg-1"])
        return {"id": made.id, "dns": made.dns_name}

    made, values = run(program)
    sent = made.properties("home-system")
    assert (sent["deploymentType"], sent["storageCapacity"], sent["throughputCapacity"]) == ("SINGLE_AZ_HA_2", 512, 320)
    assert (sent["subnetIds"], sent["automaticBackupRetentionDays"]) == (["subnet-1"], 7)
    (client,) = sent["rootVolumeConfiguration"]["nfsExports"]["clientConfigurations"]
    assert "no_root_squash" in client["options"]
    assert (made.requests["home-system"].protect, made.requests["home-system"].retainOnDelete) == (True, True)
    assert values == {"id": "home-system-id", "dns": "fs-1.fsx.us-east-1.amazonaws.com"}


def bucket_program(found: ClusterSpec) -> tuple[Registered, dict[str, Any]]:
    def program() -> dict[str, pulumi.Output[Any]]:
        made = Buckets("s3", buckets(found, PLACE))
        ready = pulumi.Output.all(*[one.urn for one in made.ready])
        return {**{str(key): name for key, name in made.names.items()}, "ready": ready}

    return run(program)


def test_every_bucket_is_kept_private_encrypted_and_over_tls_before_it_is_ready() -> None:
    made, values = bucket_program(spec({}))
    assert made.named(BUCKET) == ["s3-data", "s3-checkpoints", "s3-lifecycle"]
    for plan in buckets(spec({}), PLACE):
        name = f"s3-{plan.key}"
        assert (made.requests[name].protect, made.requests[name].retainOnDelete) == (True, True)
        assert values[plan.key] == made.properties(name)["bucket"] == plan.name
        private = made.properties(f"{name}-private")
        assert all(private[key] for key in private if key.startswith(("block", "ignore", "restrict")))
        assert made.properties(f"{name}-ownership")["rule"] == {"objectOwnership": "BucketOwnerEnforced"}
        (encryption,) = made.properties(f"{name}-encryption")["rules"]
        assert encryption["applyServerSideEncryptionByDefault"] == {"sseAlgorithm": "AES256"}
        assert json.loads(made.properties(f"{name}-policy")["policy"]) == plan.policy
    assert [urn.rpartition("::")[2] for urn in values["ready"]] == [f"s3-{key}-policy" for key in list(values)[:3]]


def test_settings_of_one_bucket_are_made_one_after_the_other() -> None:
    made, _ = bucket_program(spec({}))
    order = ["", "-ownership", "-private", "-encryption", "-versions", "-policy", "-rules"]
    for before, after in pairwise(order):
        assert f"s3-lifecycle{before}" in made.waits_for(f"s3-lifecycle{after}")


def test_only_the_scripts_have_versions() -> None:
    assert bucket_program(spec({}))[0].named("aws:s3/bucketVersioning:BucketVersioning") == ["s3-lifecycle-versions"]


def test_rules_are_spelled_as_s3_spells_them() -> None:
    rules = {rule["id"]: rule for rule in bucket_program(spec({}))[0].properties("s3-checkpoints-rules")["rules"]}
    assert all(rule["status"] == "Enabled" for rule in rules.values())
    bodies = {name: {key: rule[key] for key in rule if key not in ("id", "status")} for name, rule in rules.items()}
    whole = {"prefix": ""}
    assert bodies == {
        "abort-uploads": {"filter": whole, "abortIncompleteMultipartUpload": {"daysAfterInitiation": 1}},
        "drop-old-versions": {"filter": whole, "noncurrentVersionExpiration": {"noncurrentDays": 3}},
        "drop-expired-markers": {"filter": whole, "expiration": {"expiredObjectDeleteMarker": True}},
        "expire-ephemeral": {"filter": {"prefix": "ephemeral/"}, "expiration": {"days": 7}},
        "archive-milestones": {
            "filter": {"prefix": "milestone/"},
            "transitions": [{"days": 30, "storageClass": "GLACIER_IR"}],
        },
    }


def test_a_key_of_the_users_encrypts_with_a_bucket_key() -> None:
    made, _ = bucket_program(spec({}, buckets={"kms_key": "arn:key"}))
    (rule,) = made.properties("s3-data-encryption")["rules"]
    assert rule["applyServerSideEncryptionByDefault"] == {"sseAlgorithm": "aws:kms", "kmsMasterKeyId": "arn:key"}
    assert rule["bucketKeyEnabled"] is True


@pytest.mark.parametrize("key", ["data", "checkpoints", "lifecycle"])
def test_a_bucket_that_is_there_is_passed_on_and_not_touched(key: str) -> None:
    made, values = bucket_program(spec({}, buckets={key: "mine"}))
    assert values[key] == "mine"
    assert len(made.named(BUCKET)) == 2
    assert not [name for name in made.requests if name.startswith(f"s3-{key}")]


@pytest.mark.parametrize("efa", [True, False])
def test_the_components_take_what_the_spec_plans(efa: bool) -> None:
    found = spec({"lustre": {"throughput_gb_s": 9.6, "efa": efa}})
    assert found.storage.lustre is not None
    sent = system(lustre(found.storage.lustre, efa_wanted(found)), found)[0].properties("fs-system")
    assert (sent["storageCapacity"], sent["perUnitStorageThroughput"], sent["efaEnabled"]) == (9600, 1000, efa)
