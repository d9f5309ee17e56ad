"""node-verify: what is unknown is not ready, what is broken is named with what it calls for."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lustrain.problem import UserError
from node_setup.agent.host import Host
from node_setup.agent.model import EXIT_DRIFT, EXIT_IN_SYNC, Request
from node_setup.agent.verify import TOPICS, _timed, verify
from node_setup.agent.verify.expected import expected
from node_setup.agent.verify.gpu import xid_action
from node_setup.agent.verify.result import READY, Result, drain
from tests.node_setup.machines import DOCUMENT, facts_of

REQUEST = Request(document=DOCUMENT)
Change = Callable[[dict[str, Any]], Any]


def p5() -> dict[str, Any]:
    """A node that is well, with what tuning gives it."""
    facts = facts_of("p5")
    facts["limits"]["slurmd"]["memlock"] = ["unlimited", "unlimited"]
    facts["memory"].update(hugepages_total=5128, hugepages_free=5128, hugepage_kib=2048)
    for device in facts["gpu"]["devices"]:
        device["persistence"] = True
        device["applications"] = dict(device["max"])
    facts["blocks"][1]["mountpoints"] = ["/opt/dlami/nvme"]
    facts["boot_outcome"] = "ready"
    return facts


def results(facts: dict[str, Any], request: Request = REQUEST) -> dict[str, Result]:
    want = expected(facts, request)
    said = [check(facts, want, request) for topic in TOPICS for check in topic.CHECKS]
    assert len({result.check for result in said}) == len(said)
    return {result.check: result for result in said}


def test_a_node_that_is_well_passes_every_check() -> None:
    assert {name: result for name, result in results(p5()).items() if result.status != "ok"} == {}


def first_gpu(key: str, value: object) -> Change:
    return lambda facts: facts["gpu"]["devices"][0].update({key: value})


def xids(*events: tuple[int, str]) -> Change:
    seen = [{"xid": number, "pci": "0000:53:00", "text": text, "switch": False} for number, text in events]
    return lambda facts: facts["gpu"].update(xids=seen)


def hot(jobs: object) -> Change:
    return lambda facts: (first_gpu("throttle", ["hw_thermal_slowdown"])(facts), facts.update(jobs=jobs))


BROKEN: list[tuple[str, Change, str, str]] = [
    ("boot", lambda f: f.update(boot_outcome="failed mount of /fsx"), "failed", "NONE"),
    ("boot", lambda f: f.update(boot_outcome="half way"), "unknown", "NONE"),
    ("boot", lambda f: f.update(boot_outcome="ready lustre-over-tcp"), "ok", "NONE"),
    ("boot", lambda f: f.update(boot_outcome=None), "skipped", "NONE"),
    ("instance-type", lambda f: f["instance"].update(type="p4d.24xlarge"), "failed", "NONE"),
    ("instance-type", lambda f: f["instance"].update(type="p9.48xlarge"), "failed", "NONE"),
    (
        "notice",
        lambda f: f["metadata"].update(notice={"kind": "spot", "action": "terminate", "at": "12:00"}),
        "failed",
        "NONE",
    ),
    ("notice", lambda f: f["metadata"].update(error="timed out"), "unknown", "NONE"),
    ("nvme", lambda f: f["blocks"].pop(1), "failed", "REPLACE"),
    ("nvme", lambda f: f.update(blocks=None), "unknown", "NONE"),
    ("gpu-count", lambda f: f["gpu"]["devices"].pop(), "failed", "REPLACE"),
    ("gpu-count", lambda f: f["gpu"].update(devices=None), "unknown", "NONE"),
    ("gpu-ecc", first_gpu("ecc_volatile_uncorrected", 2), "failed", "RESET_GPU"),
    ("gpu-ecc", first_gpu("ecc_volatile_uncorrected", None), "unknown", "NONE"),
    ("gpu-row-remap", first_gpu("remap_failed", True), "failed", "REPLACE"),
    ("gpu-row-remap", first_gpu("remap_pending", True), "failed", "RESET_GPU"),
    ("gpu-xid", xids((79, "GPU has fallen off the bus.")), "failed", "REBOOT"),
    ("gpu-xid", xids((95, "Uncontained ECC error")), "failed", "REBOOT"),
    ("gpu-xid", xids((13, "Graphics Exception"), (64, "row remapper")), "failed", "REPLACE"),
    ("gpu-xid", xids((13, "Graphics Exception")), "warning", "NONE"),
    ("gpu-xid", lambda f: f["gpu"].update(xids=None), "unknown", "NONE"),
    ("gpu-throttle", first_gpu("throttle", ["hw_slowdown", "hw_thermal_slowdown"]), "failed", "REPLACE"),
    ("gpu-throttle", hot([{"kind": "slurm", "id": "12"}]), "warning", "NONE"),
    ("gpu-throttle", hot(None), "unknown", "NONE"),
    ("gpu-throttle", first_gpu("throttle", ["sw_thermal_slowdown"]), "warning", "NONE"),
    ("gpu-throttle", first_gpu("throttle", ["sw_power_cap", "gpu_idle"]), "ok", "NONE"),
    ("gpu-throttle", first_gpu("throttle", None), "unknown", "NONE"),
    ("gpu-persistence", first_gpu("persistence", False), "warning", "NONE"),
    ("gpu-clocks", lambda f: f["gpu"]["devices"][3]["applications"].update(graphics=1200), "warning", "NONE"),
    ("gpu-nvlink", lambda f: f["gpu"]["nvlinks"]["0"].update(up=17), "failed", "REBOOT"),
    ("gpu-nvlink", lambda f: f["gpu"]["nvlinks"].pop("7"), "failed", "REBOOT"),
    ("gpu-nvlink", lambda f: f["gpu"]["nvlinks"]["0"].update(errors=4), "warning", "NONE"),
    ("gpu-nvlink", lambda f: f["gpu"].update(nvlinks=None), "unknown", "NONE"),
    ("fabric-manager", lambda f: f["gpu"].update(fabric_manager={"version": "550.1"}), "failed", "NONE"),
    ("fabric-manager", lambda f: f["gpu"].update(fabric_manager={"version": None}), "unknown", "NONE"),
    (
        "fabric-manager",
        lambda f: f["services"]["nvidia-fabricmanager.service"].update(active="failed"),
        "failed",
        "REBOOT",
    ),
    (
        "fabric-manager",
        lambda f: f["services"]["nvidia-fabricmanager.service"].update(active="activating"),
        "unknown",
        "NONE",
    ),
    ("fabric-manager", first_gpu("fabric_state", "In Progress"), "unknown", "NONE"),
    ("fabric-manager", first_gpu("fabric_state", "Not Started"), "failed", "REBOOT"),
    ("efa-devices", lambda f: (f["efa"]["devices"].pop(), f["efa"].update(pci=31)), "failed", "REPLACE"),
    ("efa-devices", lambda f: f["efa"].update(devices=[]), "failed", "REBOOT"),
    ("efa-devices", lambda f: f["efa"]["devices"][0].update(state="DOWN"), "failed", "REPLACE"),
    ("efa-devices", lambda f: f["efa"].update(devices=None), "unknown", "NONE"),
    ("efa-domains", lambda f: f["efa"]["domains"].pop(), "failed", "REBOOT"),
    ("efa-domains", lambda f: f["efa"].update(domains=None), "unknown", "NONE"),
    ("efa-modules", lambda f: f["modules"]["loaded"].remove("ib_uverbs"), "failed", "REBOOT"),
    (
        "ofi-plugin",
        lambda f: f["efa"].update(plugins=["/opt/amazon/ofi-nccl/lib/a.so", "/usr/local/lib/b.so"]),
        "failed",
        "NONE",
    ),
    ("ofi-plugin", lambda f: f["efa"].update(plugins=[]), "warning", "NONE"),
    ("efa-hugepages", lambda f: f["memory"].update(hugepages_total=0), "warning", "NONE"),
    ("efa-hugepages", lambda f: f["memory"].update(hugepages_free=0), "warning", "NONE"),
    ("lustre-mount", lambda f: f["lustre"].update(mounts=[]), "failed", "NONE"),
    ("lustre-mount", lambda f: f["lustre"]["mounts"][0]["options"].append("ro"), "failed", "NONE"),
    ("lustre-mount", lambda f: f["lustre"].update(mounts=None), "unknown", "NONE"),
    ("lustre-network", lambda f: f["lustre"].update(nets=[{"net": "tcp", "nids": []}]), "failed", "NONE"),
    ("lustre-network", lambda f: f["lustre"].update(nets=None), "unknown", "NONE"),
    ("lustre-network", lambda f: f["lustre"]["nets"][2]["nids"].pop(), "failed", "NONE"),
    ("lustre-network", lambda f: f["lustre"]["nets"][2]["nids"][0].update(status="down"), "failed", "NONE"),
    (
        "lustre-network",
        lambda f: f["lustre"].update(peers=[{"primary": "10.0.0.9@tcp", "nids": ["10.0.0.9@tcp"]}]),
        "failed",
        "NONE",
    ),
    ("lustre-targets", lambda f: f["lustre"]["osts"].update(fullest_percent=99), "failed", "NONE"),
    ("lustre-targets", lambda f: f["lustre"]["osts"].update(fullest_percent=91), "warning", "NONE"),
    ("lustre-targets", lambda f: f["lustre"].update(osts=None), "unknown", "NONE"),
    ("slurmd-memlock", lambda f: f["limits"]["slurmd"].update(memlock=["8388608", "8388608"]), "failed", "NONE"),
    ("slurmd-memlock", lambda f: f["limits"]["slurmd"].update(memlock=[str(2**35)] * 2), "warning", "NONE"),
    ("slurmd-memlock", lambda f: f["limits"].update(slurmd=None), "unknown", "NONE"),
    ("clock", lambda f: f["time"].update(offset_s=-0.0013), "failed", "NONE"),
    ("clock", lambda f: f["time"].update(synchronised=False), "failed", "NONE"),
    ("clock", lambda f: f["time"].update(offset_s=None), "unknown", "NONE"),
    ("shm", lambda f: f["memory"].update(shm_gib=64), "warning", "NONE"),
    ("scratch", lambda f: f["blocks"][1].update(mountpoints=[]), "warning", "NONE"),
    ("disk", lambda f: f["disk"]["/"].update(free_bytes=2**29), "failed", "NONE"),
    ("disk", lambda f: f["disk"]["/"].update(free_inodes=3), "failed", "NONE"),
    ("disk", lambda f: f["disk"]["/"].update(read_only=True), "failed", "REBOOT"),
    ("disk", lambda f: f.update(disk={}), "unknown", "NONE"),
]


@pytest.mark.parametrize(("check", "change", "status", "action"), BROKEN)
def test_a_fault_is_named_with_what_it_calls_for(check: str, change: Change, status: str, action: str) -> None:
    facts = p5()
    change(facts)
    said = results(facts)[check]
    assert (said.status, said.action) == (status, action), said
    assert said.why


def test_every_check_has_a_case_in_which_it_does_not_pass() -> None:
    assert {check for check, _, status, _ in BROKEN if status != "ok"} == set(results(p5()))


def test_a_failed_boot_is_named_by_its_step() -> None:
    said = results({**p5(), "boot_outcome": "failed mount of /fsx"})["boot"].why
    assert said.startswith("the boot script failed at: mount of /fsx; fix: ")


def test_an_unknown_type_is_unknown_and_not_ready() -> None:
    facts = p5()
    facts["instance"]["type"] = "p9.48xlarge"
    document = copy.deepcopy(DOCUMENT)
    document["groups"]["train"]["type"] = "p9.48xlarge"
    said = results(facts, Request(document=document))
    assert {said[name].status for name in ("instance-type", "gpu-count", "efa-devices", "nvme")} == {"unknown"}
    untuned = Request(document=document, overrides={"slurmd-limit.memlock": "off"})
    answer, status = verify(Host("/nonexistent"), facts, untuned, "facts")
    assert "failed" not in {one["status"] for one in answer["results"]}
    assert (answer["ready"], answer["drain"], status) == (False, None, EXIT_DRIFT)


def test_an_unknown_machine_that_someone_counted_by_hand_is_known() -> None:
    facts = p5()
    facts["instance"]["type"] = None
    document = {
        **DOCUMENT,
        "backend": "machines",
        "groups": {"train": {"type": "other", "gpus": 8, "efa": 32, "nvme": 8}},
    }
    said = results(facts, Request(document=document))
    assert {said[name].status for name in ("instance-type", "gpu-count", "efa-devices", "nvme")} == {"ok"}
    facts["gpu"]["devices"].pop()
    assert results(facts, Request(document=document))["gpu-count"].status == "failed"


def test_a_group_that_the_cluster_has_not_is_unknown() -> None:
    said = results(p5(), Request(document=DOCUMENT, group="other"))["instance-type"]
    assert (said.status, said.why) == ("unknown", "the cluster has no group other; it has train, login")


def test_on_eks_a_node_without_lustre_has_its_lnet_judged_all_the_same() -> None:
    document = copy.deepcopy(DOCUMENT) | {"backend": "hyperpod-eks", "lustre": None}
    facts = p5()
    assert results(facts, Request(document=document))["lustre-network"].status == "ok"
    facts["lustre"]["nets"] = [{"net": "tcp", "nids": []}]
    assert results(facts, Request(document=document))["lustre-network"].status == "failed"
    document["groups"]["train"]["lustre_efa"] = 0
    assert results(facts, Request(document=document))["lustre-network"].status == "skipped"


def test_a_cluster_may_attach_fewer_efa_devices_but_no_fewer_gpus() -> None:
    document = copy.deepcopy(DOCUMENT)
    document["groups"]["train"].update(efa=8, gpus=0)
    want = expected(p5(), Request(document=document))
    assert (want.efa, want.gpus) == (8, 8)


def test_hyperpods_prefix_is_the_same_type() -> None:
    document = copy.deepcopy(DOCUMENT)
    document["groups"]["train"]["type"] = "ml.p5.48xlarge"
    assert results(p5(), Request(document=document))["instance-type"].status == "ok"


def test_a_login_node_needs_no_devices() -> None:
    said = results(facts_of("login"))
    assert {result.status for result in said.values()} <= READY


def test_neuron_devices_are_not_passed_unseen() -> None:
    facts = facts_of("cpu")
    facts["instance"]["type"] = "trn1.32xlarge"
    assert results(facts, Request())["gpu-count"].status == "unknown"


def test_cards_of_gaudi_are_counted() -> None:
    document = {"backend": "machines", "groups": {"gaudi": {"type": "other", "gpus": 8, "efa": 4, "nvme": 4}}}
    facts = facts_of("gaudi")
    assert results(facts, Request(document=document))["gpu-count"].status == "ok"
    facts["hpu"]["devices"].pop()
    assert results(facts, Request(document=document))["gpu-count"].status == "failed"


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("10.1.1.67@tcp:/xeo3rbev", "ok"),
        ("fs-1.fsx.us-east-2.amazonaws.com@tcp:/xeo3rbev", "ok"),
        ("10.1.1.68@tcp:/xeo3rbev", "failed"),
        ("fs-1.fsx.us-east-2.amazonaws.com@tcp:/fsx", "failed"),
    ],
)
def test_lustre_is_told_by_its_mount_name_and_by_its_server_where_both_are_spelled_alike(
    source: str, status: str
) -> None:
    said = results(p5(), Request(document=DOCUMENT, expect={"lustre_source": source}))["lustre-mount"]
    assert said.status == status


def test_the_source_of_a_cluster_that_mounts_itself_is_its_documents() -> None:
    document = {**DOCUMENT, "mount": {"dns_name": "fs-1.example", "mount_name": "other"}}
    assert results(p5(), Request(document=document))["lustre-mount"].status == "failed"


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", "REBOOT"),
        ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "RESET_GPU"),
        ("GPU recovery action changed from 0x1 (GPU Reset Required) to 0x2 (Node Reboot Required)", "REBOOT"),
        ("GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)", "NONE"),
    ],
)
def test_xid_154_names_its_own_action_by_what_it_changed_to(text: str, action: str) -> None:
    assert xid_action(154, text) == action


def test_xid_95_reboots_an_a100_and_resets_others() -> None:
    assert xid_action(95, "", "NVIDIA A100") == "REBOOT"
    assert xid_action(95, "", "NVIDIA H100") == "RESET_GPU"


def test_an_xid_that_nobody_listed_is_a_persons_to_judge() -> None:
    facts = p5()
    xids((999, "new"))(facts)
    assert results(facts)["gpu-xid"].status == "warning"


def test_an_error_of_a_switch_is_not_read_as_one_of_a_gpu() -> None:
    facts = p5()
    facts["gpu"]["xids"] = [{"xid": 79, "pci": "0000:c4:00.0", "text": "", "switch": True}]
    assert results(facts)["gpu-xid"].status == "warning"


def test_the_reason_to_drain_is_one_line_with_the_heaviest_action() -> None:
    said = [
        Result("clock", "failed", "off by 3 ms"),
        Result("gpu-count", "failed", 'one of "8"\nis missing', "REPLACE"),
        Result("shm", "warning", "small"),
    ]
    assert drain(said) == "lustrain: gpu-count: one of '8' is missing (and 1 more); action=REPLACE"


def test_not_to_know_is_no_reason_to_drain() -> None:
    assert drain([Result("gpu-count", "unknown", "nvidia-smi could not be read")]) is None


def test_a_whole_verification_is_json_and_says_what_hyperpod_wants_to_hear() -> None:
    facts = p5()
    facts["gpu"]["devices"].pop()
    said, status = verify(Host("/nonexistent"), facts, REQUEST, "facts")
    assert json.loads(json.dumps(said)) == said
    assert (said["ready"], status) == (False, EXIT_DRIFT)
    assert said["hyperpod"] == "Action:Replace"
    assert said["drain"].endswith("action=REPLACE")
    assert said["facts_digest"]["gpus"] == 7
    assert said["jobs"] == []


def test_settings_that_must_be_and_are_not_keep_a_node_from_jobs() -> None:
    said, _ = verify(Host("/nonexistent"), facts_of("p5"), REQUEST, "facts")
    found = {result["check"]: result for result in said["results"]}
    assert found["settings"]["status"] == "failed"
    assert "memlock" in found["settings"]["why"]
    assert found["lustre-stripes"]["status"] == "warning"


def test_a_login_node_of_the_cluster_is_ready() -> None:
    said, status = verify(Host("/nonexistent"), facts_of("login"), REQUEST, "facts")
    assert [result for result in said["results"] if result["status"] not in READY] == []
    assert status == EXIT_IN_SYNC


def test_an_unknown_tier_is_one_line() -> None:
    with pytest.raises(UserError, match="tier = 'burn-in': unknown; allowed: facts, fast"):
        verify(Host("/nonexistent"), p5(), REQUEST, "burn-in")


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = tree if isinstance(tree, dict) else range(min(len(tree), 2)) if isinstance(tree, list) else ()
    return [found for key in keys for found in ((*path, key), *_paths(tree[key], (*path, key)))]


PATHS = _paths(p5())


def with_fact(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    facts = p5()
    inner: Any = facts
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return facts


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.sampled_from(PATHS), st.sampled_from([None, "", 0, [], {}, "N/A"]))
def test_facts_of_any_form_end_in_results_and_never_in_a_traceback(path: tuple[Any, ...], value: Any) -> None:
    said, _ = verify(Host("/nonexistent"), with_fact(path, value), REQUEST, "facts")
    assert len(said["results"]) > sum(len(topic.CHECKS) for topic in TOPICS)


ALWAYS_THERE = {("lustre", "mounts", 0, "target")}
"""What no collector leaves open."""


@pytest.mark.slow
@pytest.mark.parametrize("section", sorted({path[0] for path in PATHS}))
def test_a_fact_that_could_not_be_read_drains_no_node(section: str) -> None:
    for path in PATHS:
        if path[0] != section or not isinstance(path[-1], str) or path in ALWAYS_THERE:
            continue
        facts = with_fact(path, None)
        want = expected(facts, REQUEST)
        said = [_timed(check, facts, want, REQUEST) for topic in TOPICS for check in topic.CHECKS]
        assert [result for result in said if result.status == "failed"] == [], path
