"""node-verify: what is unknown is not ready, what is broken is named with what it calls for."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lustrain.problem import UserError
from lustrain.status import Status
from node_setup.agent.facts.scheduler import NOT_KNOWN
from node_setup.agent.host import Done, Host
from node_setup.agent.model import EXIT_DRIFT, EXIT_IN_SYNC, Request
from node_setup.agent.verify import TOPICS, home, verify
from node_setup.agent.verify.expected import expected_hardware
from node_setup.agent.verify.gpu import xid_action
from node_setup.agent.verify.result import READY, Result, drain
from node_setup.request import Tuning, request_for
from tests.node_setup.machines import DOCUMENT, facts_of
from tests.node_setup.slurm_machines import cluster

HOMES = "fs-1.efs.us-east-1.amazonaws.com"
WITH_HOMES = {"path": "/home", "options": ["nfsvers=4.1", "rsize=1048576", "hard", "_netdev"]}
REQUEST = Request(
    document={**DOCUMENT, "s3_mounts": ["/s3/data"], "home": WITH_HOMES},
    expect={"home_server": HOMES, "home_user": "ubuntu"},
)
BUCKET = {"source": "mountpoint-s3", "target": "/s3/data", "fstype": "fuse", "options": ["ro"]}
HOME = {
    "source": f"{HOMES}:/",
    "target": "/home",
    "fstype": "nfs4",
    "options": ["rw", "vers=4.1", "rsize=65536", "hard"],
}
LEFT_OVER = {"lustrain-s3-s3-old.service": "/s3/old"}
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
    facts["mounts"] += [BUCKET, copy.deepcopy(HOME)]
    facts["boot_outcome"] = "ready"
    node = {"state": "IDLE+DYNAMIC_NORM", "gres": "gpu:h100:8", "version": "23.11.4", "reason": None}
    part = {"duty": "compute", "error": None, "node": node, "gres": "gpu:h100:8"}
    records = {"error": None, "registered": True}
    facts["slurm"] = {**part, "volume": "vol-0abc", "mounted": True, "accounting": records}
    return facts


def results(facts: dict[str, Any], request: Request = REQUEST) -> dict[str, Result]:
    want = expected_hardware(facts, request)
    said = [check(facts, want, request) for topic in TOPICS for check in topic.CHECKS]
    assert len({result.check for result in said}) == len(said)
    return {result.check: result for result in said}


def answer(facts: dict[str, Any], request: Request = REQUEST) -> tuple[dict[str, Any], int]:
    return verify(Host("/nonexistent"), facts, request, "facts")


def test_a_node_that_is_well_passes_every_check() -> None:
    assert {name: result for name, result in results(p5()).items() if result.status != "ok"} == {}


def put(value: Any, *path: str | int) -> Change:
    """The fact at a path becomes another."""

    def change(facts: Any) -> None:
        for key in path[:-1]:
            facts = facts[key]
        facts[path[-1]] = value

    return change


def lose(key: str | int, *path: str | int) -> Change:
    """What is at a path loses one of its parts."""

    def change(facts: Any) -> None:
        for one in path:
            facts = facts[one]
        facts.pop(key)

    return change


def first_gpu(key: str, value: object) -> Change:
    return put(value, "gpu", "devices", 0, key)


def xids(*events: tuple[int, str], switch: bool = False) -> Change:
    return put(
        [{"xid": xid, "pci": "0000:53:00", "text": text, "switch": switch} for xid, text in events], "gpu", "xids"
    )


def hot(jobs: object) -> Change:
    return lambda facts: (first_gpu("throttle", ["hw_thermal_slowdown"])(facts), facts.update(jobs=jobs))


SPOT = {"kind": "spot", "action": "terminate", "at": "12:00"}
FABRIC = "nvidia-fabricmanager.service"
PLUGINS = ["/opt/amazon/ofi-nccl/lib/a.so", "/usr/local/lib/b.so"]
OVER_TCP = [{"nids": ["10.0.0.9@tcp"]}]
ON_DEMAND = [{"source": "systemd-1", "target": "/fsx", "fstype": "autofs", "options": []}]
BROKEN: list[tuple[str, Change, str, str]] = [
    ("boot", put("failed mount of /fsx", "boot_outcome"), "failed", "NONE"),
    ("boot", put("half way", "boot_outcome"), "unknown", "NONE"),
    ("boot", put("ready lustre-over-tcp", "boot_outcome"), "ok", "NONE"),
    ("boot", put(None, "boot_outcome"), "skipped", "NONE"),
    ("instance-type", put("p4d.24xlarge", "instance", "type"), "failed", "NONE"),
    ("instance-type", put("p9.48xlarge", "instance", "type"), "failed", "NONE"),
    ("notice", put(SPOT, "metadata", "notice"), "failed", "NONE"),
    ("notice", put("timed out", "metadata", "error"), "unknown", "NONE"),
    ("nvme", lose(1, "blocks"), "failed", "REPLACE"),
    ("nvme", put(None, "blocks"), "unknown", "NONE"),
    ("gpu-count", lose(0, "gpu", "devices"), "failed", "REPLACE"),
    ("gpu-count", put(None, "gpu", "devices"), "unknown", "NONE"),
    ("gpu-ecc", first_gpu("ecc_volatile_uncorrected", 2), "failed", "RESET_GPU"),
    ("gpu-ecc", first_gpu("ecc_volatile_uncorrected", None), "unknown", "NONE"),
    ("gpu-memory", first_gpu("memory_mib", 40960), "failed", "REPLACE"),
    ("gpu-memory", first_gpu("memory_mib", None), "unknown", "NONE"),
    ("gpu-row-remap", first_gpu("remap_failed", True), "failed", "REPLACE"),
    ("gpu-row-remap", first_gpu("remap_pending", True), "failed", "RESET_GPU"),
    ("gpu-xid", xids((79, "GPU has fallen off the bus.")), "failed", "REBOOT"),
    ("gpu-xid", xids((95, "Uncontained ECC error")), "failed", "REBOOT"),
    ("gpu-xid", xids((13, "Graphics Exception"), (64, "row remapper")), "failed", "REPLACE"),
    ("gpu-xid", xids((13, "Graphics Exception")), "warning", "NONE"),
    ("gpu-xid", xids((999, "nobody listed it")), "warning", "NONE"),
    ("gpu-xid", xids((79, "of a switch, not of a GPU"), switch=True), "warning", "NONE"),
    ("gpu-xid", xids((20034, "Fatal, Link 30 LTSSM Fault Up"), switch=True), "failed", "REBOOT"),
    ("gpu-xid", xids((20034, "Non-fatal, Link 30 LTSSM Fault Up"), switch=True), "warning", "NONE"),
    ("gpu-xid", xids((149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08")), "failed", "REBOOT"),
    ("gpu-xid", xids((149, "NETIR_LINK_EVT Nonfatal XC0 i0 Link 08")), "warning", "NONE"),
    ("gpu-xid", xids((13, "Graphics Exception: Fatal")), "warning", "NONE"),
    ("gpu-xid", put(None, "gpu", "xids"), "unknown", "NONE"),
    ("gpu-throttle", first_gpu("throttle", ["hw_slowdown", "hw_thermal_slowdown"]), "failed", "REPLACE"),
    ("gpu-throttle", hot([{"kind": "slurm", "id": "12"}]), "warning", "NONE"),
    ("gpu-throttle", hot(None), "unknown", "NONE"),
    ("gpu-throttle", first_gpu("throttle", ["sw_thermal_slowdown"]), "warning", "NONE"),
    ("gpu-throttle", first_gpu("throttle", ["sw_power_cap", "gpu_idle"]), "ok", "NONE"),
    ("gpu-throttle", first_gpu("throttle", None), "unknown", "NONE"),
    ("gpu-persistence", first_gpu("persistence", False), "warning", "NONE"),
    ("gpu-clocks", put(1200, "gpu", "devices", 3, "applications", "graphics"), "warning", "NONE"),
    ("gpu-nvlink", put(17, "gpu", "nvlinks", "0", "up"), "failed", "REBOOT"),
    ("gpu-nvlink", lose("7", "gpu", "nvlinks"), "failed", "REBOOT"),
    ("gpu-nvlink", put(4, "gpu", "nvlinks", "0", "errors"), "warning", "NONE"),
    ("gpu-nvlink", put(None, "gpu", "nvlinks"), "unknown", "NONE"),
    ("fabric-manager", put("550.1", "gpu", "fabric_manager", "version"), "failed", "NONE"),
    ("fabric-manager", put(None, "gpu", "fabric_manager", "version"), "unknown", "NONE"),
    ("fabric-manager", put("failed", "services", FABRIC, "active"), "failed", "REBOOT"),
    ("fabric-manager", put("activating", "services", FABRIC, "active"), "unknown", "NONE"),
    ("fabric-manager", first_gpu("fabric_state", "In Progress"), "unknown", "NONE"),
    ("fabric-manager", first_gpu("fabric_state", "Not Started"), "failed", "REBOOT"),
    ("fabric-manager", first_gpu("fabric_status", "Insufficient Resources"), "failed", "REBOOT"),
    ("fabric-manager", first_gpu("fabric_status", None), "ok", "NONE"),
    ("efa-devices", lambda f: (lose(0, "efa", "devices")(f), put(31, "efa", "pci")(f)), "failed", "REPLACE"),
    ("efa-devices", put([], "efa", "devices"), "failed", "REBOOT"),
    ("efa-devices", put("DOWN", "efa", "devices", 0, "state"), "failed", "REPLACE"),
    ("efa-devices", put(None, "efa", "devices"), "unknown", "NONE"),
    ("efa-domains", lose(0, "efa", "domains"), "failed", "REBOOT"),
    ("efa-domains", put(None, "efa", "domains"), "unknown", "NONE"),
    ("efa-modules", lambda f: f["modules"]["loaded"].remove("ib_uverbs"), "failed", "REBOOT"),
    ("ofi-plugin", put(PLUGINS, "efa", "plugins"), "failed", "NONE"),
    ("ofi-plugin", put([], "efa", "plugins"), "warning", "NONE"),
    ("efa-hugepages", put(0, "memory", "hugepages_total"), "warning", "NONE"),
    ("efa-hugepages", put(0, "memory", "hugepages_free"), "warning", "NONE"),
    ("s3-mounts", lambda f: f["mounts"].remove(BUCKET), "failed", "NONE"),
    ("s3-mounts", put(None, "mounts"), "unknown", "NONE"),
    ("s3-mounts", put(LEFT_OVER, "s3_units"), "warning", "NONE"),
    ("s3-mounts", lambda f: (f["mounts"].remove(BUCKET), put(LEFT_OVER, "s3_units")(f)), "failed", "NONE"),
    ("home-mount", lambda f: f["mounts"].remove(HOME), "failed", "NONE"),
    ("home-mount", put("fs-2.efs.us-east-1.amazonaws.com:/", "mounts", -1, "source"), "failed", "NONE"),
    ("home-mount", put("10.0.0.7:/", "mounts", -1, "source"), "ok", "NONE"),
    ("home-mount", put("ext4", "mounts", -1, "fstype"), "failed", "NONE"),
    ("home-mount", put("autofs", "mounts", -1, "fstype"), "warning", "NONE"),
    ("home-mount", put(["ro", "vers=4.1", "hard"], "mounts", -1, "options"), "failed", "NONE"),
    ("home-mount", put(["rw", "vers=4.1", "soft"], "mounts", -1, "options"), "warning", "NONE"),
    ("home-mount", put(None, "mounts"), "unknown", "NONE"),
    ("lustre-mount", put([], "lustre", "mounts"), "failed", "NONE"),
    ("lustre-mount", lambda f: (put([], "lustre", "mounts")(f), put(ON_DEMAND, "mounts")(f)), "unknown", "NONE"),
    ("lustre-mount", put(["ro"], "lustre", "mounts", 0, "options"), "failed", "NONE"),
    ("lustre-mount", put(None, "lustre", "mounts"), "unknown", "NONE"),
    ("lustre-network", put([{"net": "tcp", "nids": []}], "lustre", "nets"), "failed", "NONE"),
    ("lustre-network", put(None, "lustre", "nets"), "unknown", "NONE"),
    ("lustre-network", lose(0, "lustre", "nets", 2, "nids"), "failed", "NONE"),
    ("lustre-network", put("down", "lustre", "nets", 2, "nids", 0, "status"), "failed", "NONE"),
    ("lustre-network", put(OVER_TCP, "lustre", "peers"), "failed", "NONE"),
    ("lustre-targets", put(98, "lustre", "osts", "fullest_percent"), "failed", "NONE"),
    ("lustre-targets", put(97, "lustre", "osts", "fullest_percent"), "warning", "NONE"),
    ("lustre-targets", put(90, "lustre", "osts", "fullest_percent"), "warning", "NONE"),
    ("lustre-targets", put(89, "lustre", "osts", "fullest_percent"), "ok", "NONE"),
    ("lustre-targets", put(2, "lustre", "osts", "inactive"), "warning", "NONE"),
    ("lustre-targets", put(1, "lustre", "osts", "read_only"), "warning", "NONE"),
    ("lustre-targets", put(["fsx-OST0001_UUID : Input/output error"], "lustre", "osts", "silent"), "failed", "NONE"),
    ("lustre-targets", put(None, "lustre", "osts"), "unknown", "NONE"),
    ("slurmd-memlock", put(["8388608", "8388608"], "limits", "slurmd", "memlock"), "failed", "NONE"),
    ("slurmd-memlock", put([str(2**35)] * 2, "limits", "slurmd", "memlock"), "warning", "NONE"),
    ("slurmd-memlock", put(None, "limits", "slurmd"), "unknown", "NONE"),
    ("slurm-node", put(NOT_KNOWN, "slurm", "node", "state"), "failed", "NONE"),
    ("slurm-node", put("IDLE+DRAIN", "slurm", "node", "state"), "failed", "NONE"),
    ("slurm-node", put("DOWN+DYNAMIC_NORM+NOT_RESPONDING", "slurm", "node", "state"), "failed", "NONE"),
    ("slurm-node", put("gpu:h100:7", "slurm", "gres"), "failed", "NONE"),
    ("slurm-node", put("timed out", "slurm", "error"), "unknown", "NONE"),
    ("slurm-node", put(None, "slurm"), "skipped", "NONE"),
    ("slurm-state", put(False, "slurm", "mounted"), "failed", "NONE"),
    ("slurm-state", put(None, "slurm", "mounted"), "unknown", "NONE"),
    ("slurm-state", put(None, "slurm", "volume"), "skipped", "NONE"),
    ("slurm-accounting", put(None, "slurm", "accounting"), "skipped", "NONE"),
    ("slurm-accounting", put("refused", "slurm", "accounting", "error"), "failed", "NONE"),
    ("slurm-accounting", put(None, "slurm", "accounting", "registered"), "unknown", "NONE"),
    ("slurm-accounting", put(False, "slurm", "accounting", "registered"), "failed", "NONE"),
    ("clock", put(-0.0013, "time", "offset_s"), "failed", "NONE"),
    ("clock", put(False, "time", "synchronised"), "failed", "NONE"),
    ("clock", put(None, "time", "offset_s"), "unknown", "NONE"),
    ("shm", put(64, "memory", "shm_gib"), "warning", "NONE"),
    ("scratch", put([], "blocks", 1, "mountpoints"), "warning", "NONE"),
    ("disk", put(2**29, "disk", "/", "free_bytes"), "failed", "NONE"),
    ("disk", put(3, "disk", "/", "free_inodes"), "failed", "NONE"),
    ("disk", put(True, "disk", "/", "read_only"), "failed", "REBOOT"),
    ("disk", put({}, "disk"), "unknown", "NONE"),
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


def with_group(**changes: Any) -> dict[str, Any]:
    """The document, in which the workers' group is described otherwise."""
    return {**DOCUMENT, "groups": {**DOCUMENT["groups"], "train": {**DOCUMENT["groups"]["train"], **changes}}}


COUNTED = ("instance-type", "gpu-count", "efa-devices", "nvme")
BY_HAND = {"backend": "machines", "groups": {"train": {"type": "other", "gpus": 8, "efa": 32, "nvme": 8}}}
CARDS = {"backend": "machines", "groups": {"gaudi": {"type": "other", "gpus": 8, "efa": 4, "nvme": 4}}}
EKS = {"backend": "hyperpod-eks", "lustre": None}
ONLY_TCP = put([{"net": "tcp", "nids": []}], "lustre", "nets")
OTHER_MOUNT = {"mount": {"dns_name": "fs-1.example", "mount_name": "other"}}
SOURCES = {
    "10.1.1.67@tcp:/xeo3rbev": "ok",
    "fs-1.fsx.us-east-2.amazonaws.com@tcp:/xeo3rbev": "ok",
    "10.1.1.68@tcp:/xeo3rbev": "failed",
    "fs-1.fsx.us-east-2.amazonaws.com@tcp:/fsx": "failed",
}


P9 = Request(with_group(type="p9.48xlarge"))
P9_BY_HAND = Request(with_group(type="p9.48xlarge", by_hand=True))
ONE_OF_UNKNOWN: Change = lambda f: (put(None, "instance", "type")(f), lose(0, "gpu", "devices")(f))  # noqa: E731


def nothing(facts: dict[str, Any]) -> None:
    """The node is as it is."""


@pytest.mark.parametrize(
    ("machine", "change", "request_", "expected_"),
    [
        ("p5", put("p9.48xlarge", "instance", "type"), P9, dict.fromkeys(COUNTED, "unknown")),
        ("p5", put("p9.48xlarge", "instance", "type"), P9_BY_HAND, dict.fromkeys(COUNTED, "ok")),
        ("p5", nothing, P9_BY_HAND, {"instance-type": "failed"}),
        ("p5", put(None, "instance", "type"), Request({**DOCUMENT, **BY_HAND}), dict.fromkeys(COUNTED, "ok")),
        ("p5", ONE_OF_UNKNOWN, Request({**DOCUMENT, **BY_HAND}), {"gpu-count": "failed"}),
        ("p5", nothing, Request(DOCUMENT, group="other"), {"instance-type": "unknown"}),
        ("p5", nothing, Request({**DOCUMENT, **EKS}), {"lustre-network": "ok"}),
        ("p5", ONLY_TCP, Request({**DOCUMENT, **EKS}), {"lustre-network": "failed"}),
        ("p5", ONLY_TCP, Request({**with_group(lustre_efa=0), **EKS}), {"lustre-network": "skipped"}),
        ("p5", nothing, Request(with_group(type="ml.p5.48xlarge")), {"instance-type": "ok"}),
        ("cpu", put("trn1.32xlarge", "instance", "type"), Request(), {"gpu-count": "unknown"}),
        ("gaudi", nothing, Request(CARDS), {"gpu-count": "ok"}),
        ("gaudi", lose(0, "hpu", "devices"), Request(CARDS), {"gpu-count": "failed"}),
        ("p5", nothing, Request({**DOCUMENT, **OTHER_MOUNT}), {"lustre-mount": "failed"}),
        *(("p5", nothing, Request(DOCUMENT, expect={"lustre_source": source}), {"lustre-mount": status})
          for source, status in SOURCES.items()),
    ],
)  # fmt: skip
def test_node_is_judged_by_type_group_and_counts_by_hand(
    machine: str, change: Change, request_: Request, expected_: dict[str, str]
) -> None:
    facts = p5() if machine == "p5" else facts_of(machine)
    change(facts)
    said = results(facts, request_)
    assert {check: said[check].status for check in expected_} == expected_


def test_a_node_of_an_unknown_type_is_not_ready_and_not_drained() -> None:
    facts = p5()
    facts["instance"]["type"] = "p9.48xlarge"
    untuned = Request(with_group(type="p9.48xlarge"), overrides={"slurmd-limit.memlock": "off"})
    said, status = answer(facts, untuned)
    assert "failed" not in {one["status"] for one in said["results"]}
    assert (said["ready"], said["drain"], status) == (False, None, EXIT_DRIFT)


def test_a_failed_boot_is_named_by_its_step() -> None:
    said = results({**p5(), "boot_outcome": "failed mount of /fsx"})["boot"].why
    assert said.startswith("the boot script failed at: mount of /fsx; fix: ")


def test_another_type_of_the_group_is_no_problem() -> None:
    for others, differs in (([], True), (["p5en.48xlarge"], True), (["p5en.48xlarge", "p5.48xlarge"], False)):
        want = expected_hardware(p5(), Request(with_group(type="p5e.48xlarge", other_types=others)))
        assert (want.type, want.other) == ("p5.48xlarge", differs)


def test_cluster_may_attach_fewer_efa_devices_but_not_gpus() -> None:
    want = expected_hardware(p5(), Request(with_group(efa=8, gpus=0)))
    assert (want.efa, want.gpus) == (8, 8)
    assert expected_hardware(p5(), Request(with_group(efa=0, gpus=0))).efa == 0


@pytest.mark.parametrize(
    ("xid", "text", "gpu", "action"),
    [
        (154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", "", "REBOOT"),
        (154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "", "RESET_GPU"),
        (154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x2 (Node Reboot Required)", "", "REBOOT"),
        (154, "GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)", "", "NONE"),
        (95, "", "NVIDIA A100", "REBOOT"),
        (95, "", "NVIDIA H100", "RESET_GPU"),
    ],
)
def test_xid_154_names_its_action_and_95_depends_on_the_gpu(xid: int, text: str, gpu: str, action: str) -> None:
    assert xid_action(xid, text, gpu) == action


def test_drain_reason_is_one_line_with_the_heaviest_action() -> None:
    said = [
        Result("clock", Status.FAILED, "off by 3 ms"),
        Result("gpu-count", Status.FAILED, 'one of "8"\nis missing', "REPLACE"),
        Result("shm", Status.WARNING, "small"),
    ]
    assert drain(said) == "lustrain: gpu-count: one of '8' is missing (and 1 more); action=REPLACE"
    assert drain([Result("gpu-count", Status.UNKNOWN, "nvidia-smi could not be read")]) is None


def test_verification_is_json_with_hyperpods_action() -> None:
    facts = p5()
    facts["gpu"]["devices"].pop()
    said, status = answer(facts)
    assert json.loads(json.dumps(said)) == said
    assert (said["ready"], status) == (False, EXIT_DRIFT)
    assert (said["hyperpod"], said["drain"].rpartition("; ")[2]) == ("Action:Replace", "action=REPLACE")
    assert (said["facts_digest"]["gpus"], said["jobs"]) == (7, [])
    (gpus,) = [result for result in said["results"] if result["check"] == "gpu-count"]
    assert (gpus["found"], gpus["expected"]) == ("7", "8")


def test_settings_that_must_be_and_are_not_keep_a_node_from_jobs() -> None:
    found = {result["check"]: result for result in answer(facts_of("p5"))[0]["results"]}
    assert (found["settings"]["status"], "memlock" in found["settings"]["why"]) == ("failed", True)
    assert found["lustre-stripes"]["status"] == "warning"


class Programs(Host):
    """A host that answers for its programs."""

    def __init__(self, home: str, made: Done) -> None:
        super().__init__("/nonexistent")
        self._entry, self._made = f"ubuntu:x:1000:1000::{home}:/bin/bash\n", made
        self.ran: list[str] = []

    def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "", keep: Sequence[str] = ()) -> Done:
        self.ran.append(" ".join(command))
        if command[0] == "getent":
            return Done(0, self._entry, "")
        return self._made if "mktemp" in command else Done(0, "", "")


def test_request_names_the_server_and_the_user_of_homes() -> None:
    home_system = {"id": "fs-1", "dns_name": HOMES, "path": "/home"}
    expect = request_for(None, Tuning(), cluster(home=home_system, reach={"via": "ssh", "user": "ec2-user"}))["expect"]
    assert (expect["home_server"], expect["home_user"]) == (HOMES, "ec2-user")


@pytest.mark.parametrize(
    ("folder", "made", "status"),
    [
        ("/home/ubuntu", Done(0, "/home/ubuntu/.lustrain-verify-a\n", ""), "ok"),
        ("/home/ubuntu", Done(1, "", "mktemp: failed to create file: Permission denied"), "failed"),
        ("/var/lib/ubuntu", Done(1, "", "not to be asked"), "skipped"),
    ],
)
def test_homes_are_tried_as_the_user_who_logs_in(folder: str, made: Done, status: str) -> None:
    host, facts = Programs(folder, made), p5()
    (said,) = home.write_probe(host, facts, expected_hardware(facts, REQUEST), REQUEST)
    assert said.status == status
    assert all(command.startswith(("getent passwd ubuntu", "runuser -u ubuntu -- ")) for command in host.ran)
    assert (host.ran[-1] == "runuser -u ubuntu -- rm -- /home/ubuntu/.lustrain-verify-a") == (status == "ok")


def test_login_node_without_devices_is_ready() -> None:
    said, status = answer(facts_of("login"), Request(DOCUMENT))
    assert [result for result in said["results"] if result["status"] not in READY] == []
    assert status == EXIT_IN_SYNC


def test_an_unknown_tier_is_one_line() -> None:
    with pytest.raises(UserError, match="tier = 'burn-in': unknown; allowed: facts, fast"):
        verify(Host("/nonexistent"), p5(), REQUEST, "burn-in")


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = tree if isinstance(tree, dict) else range(min(len(tree), 2)) if isinstance(tree, list) else ()
    return [found for key in keys for found in ((*path, key), *_paths(tree[key], (*path, key)))]


PATHS = _paths(p5())


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.sampled_from(PATHS), st.sampled_from([None, "", 0, [], {}, "N/A"]))
def test_facts_of_any_form_give_results_not_a_traceback(path: tuple[Any, ...], value: Any) -> None:
    facts = p5()
    put(value, *path)(facts)
    assert len(answer(facts)[0]["results"]) > sum(len(topic.CHECKS) for topic in TOPICS)


ALWAYS_THERE = {("lustre", "mounts", 0, "target")}
"""What no collector leaves open."""


@pytest.mark.slow
@pytest.mark.parametrize("section", sorted({path[0] for path in PATHS}))
def test_a_fact_that_could_not_be_read_drains_no_node(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = [Result("settings", Status.OK, "they have tests of their own")]
    monkeypatch.setattr("node_setup.agent.verify.settings.check_all", lambda facts, request: fine)
    for path in PATHS:
        if path[0] == section and isinstance(path[-1], str) and path not in ALWAYS_THERE:
            facts = p5()
            put(None, *path)(facts)
            assert [one for one in answer(facts)[0]["results"] if one["status"] == "failed"] == [], path
