"""All facts together: the documented keys, on whatever machine; what fails or hangs costs its own facts only."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

import pytest

from node_setup.agent.facts import collect, metadata, reading, services
from node_setup.agent.facts.devices import gpu
from node_setup.agent.facts.reading import MachineReading, run_side_by_side
from node_setup.agent.facts.schema import NodeFacts
from node_setup.agent.facts.wanted import Wanted
from node_setup.agent.host import TIMED_OUT, Done, Host
from node_setup.agent.lint import lint
from node_setup.agent.model import look_up
from tests.node_setup.machines import MACHINES, facts_of
from tests.node_setup.recorded_host import Machine, RecordedHost, build, facts_from, recorded

SECTIONS = (
    *("version", "agent", "host", "os", "kernel", "cpu", "memory", "instance", "group", "metadata", "sysctl"),
    *("sysctl_files", "modules", "limits", "blocks", "arrays", "mounts", "lustre", "efa", "gpu", "hpu", "init"),
    *("services", "packages", "time", "jobs", "slurm", "environment", "files", "s3_units", "disk", "boot_outcome"),
    "errors",
)
WANTED = Wanted(sysctls=("vm.max_map_count", "no.such.key"), services=("cron.service",), packages=("bash",))


@pytest.fixture(autouse=True)
def nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(metadata.ENDPOINT_VARIABLE, raising=False)


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_has_every_section_and_no_error(name: str) -> None:
    found = facts_of(name)
    assert (set(found), found["errors"]) == (set(SECTIONS), [])
    assert json.loads(json.dumps(found)) == found


def mismatches(value: Any, form: Any, path: str = "") -> list[str]:
    """Paths at which a value has not the form of a type, which is made of TypedDict, dict, list, Optional and plain classes."""
    origin, arguments = get_origin(form), get_args(form)
    if is_typeddict(form):
        if not isinstance(value, dict):
            return [path]
        wrong = [
            f"{path}.{key}" for key in (form.__required_keys__ - set(value)) | (set(value) - set(get_type_hints(form)))
        ]
        hints = get_type_hints(form).items()
        return wrong + [
            line for key, hint in hints if key in value for line in mismatches(value[key], hint, f"{path}.{key}")
        ]
    if origin is UnionType:
        inner, _ = arguments
        return [] if value is None else mismatches(value, inner, path)
    if origin in (dict, list):
        if not isinstance(value, origin):
            return [path]
        inner = value.values() if origin is dict else value
        return [line for one in inner for line in mismatches(one, arguments[-1], f"{path}[]")]
    fits = isinstance(value, (int, float) if form is float else form) and (form is bool or not isinstance(value, bool))
    return [] if fits else [path]


@pytest.mark.parametrize("name", MACHINES)
def test_facts_of_every_machine_have_the_schemas_form(name: str) -> None:
    assert mismatches(facts_of(name), NodeFacts) == []


def test_facts_of_this_machine_are_real() -> None:
    found = collect(Host(), WANTED)
    assert mismatches(json.loads(json.dumps(found)), NodeFacts) == []
    assert set(json.loads(json.dumps(found))) == set(SECTIONS)
    assert found["host"]["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert found["sysctl"] == {"vm.max_map_count": Path("/proc/sys/vm/max_map_count").read_text().strip()}
    assert found["memory"]["gib"] > 0
    assert any(one["target"] == "/" for one in found["mounts"])


def test_an_empty_machine_has_facts_too(tmp_path: Path) -> None:
    found = facts_from(RecordedHost(tmp_path, Machine()), WANTED)
    assert set(found) == set(SECTIONS)
    assert mismatches(found, NodeFacts) == []
    assert (found["blocks"], found["gpu"]["present"], found["init"]) == ([], None, None)
    assert (found["instance"]["type"], found["limits"]["slurmd"]) == (None, None)


def at(facts: Mapping[str, Any], path: str) -> Any:
    """A fact; `errors` are their places only."""
    return [one["where"] for one in facts["errors"]] if path == "errors" else look_up(facts, path)[1]


P5 = {
    "cpu": {"count": 192, "vendor": "GenuineIntel", "model": "Intel(R) Xeon(R) Platinum 8488C"},
    "memory.gib": 2048,
    "instance.type": "p5.48xlarge",
    "instance.source": "imds",
    "group": "train",
    "efa.pci": 32,
    "gpu.xids": [],
    "jobs": [],
    "gpu.nvlinks": {str(number): {"up": 18, "errors": 0} for number in range(8)},
    "gpu.driver": "570.172.08",
    "gpu.fabric_manager.version": "570.172.08",
    "limits.slurmd.memlock": ["8388608", "8388608"],
    "limits.slurmd.nofile": ["1024", "524288"],
    "limits.slurmd.stack": ["8388608", "unlimited"],
    "lustre.client": "2.15.6",
}
LOGIN = {
    "os.family": "rhel",
    "packages.manager": "dnf",
    "group": "login",
    "gpu": {**gpu.EMPTY["gpu"], "present": False},
}


@pytest.mark.parametrize(
    ("name", "expected"), [("p5", P5), ("gaudi", {"hpu.present": True, "gpu.present": False}), ("login", LOGIN)]
)
def test_a_fresh_node_as_it_is_found(name: str, expected: dict[str, Any]) -> None:
    found = facts_of(name)
    assert {path: at(found, path) for path in expected} == expected
    assert len(found["efa"]["devices"]) == len(found["efa"]["domains"] or ()) == {"p5": 32, "gaudi": 4}.get(name, 0)
    assert {one["state"] for one in found["efa"]["devices"]} <= {"ACTIVE"}
    assert len(found["gpu"]["devices"] or found["hpu"]["devices"] or ()) == {"p5": 8, "gaudi": 8}.get(name, 0)


def process(pid: int, name: str, command: str, **more: str) -> dict[str, str]:
    """Files of one process; `children` are those that its second thread has started."""
    files = {"stat": f"{pid} ({name}) S 1 1 1 0 -1 0 1 2 3 4 5 6 7 8 20 0 1 0 {pid} 1 1\n", "cmdline": command}
    files.update({f"task/{pid}/children": "", f"task/{pid + 1}/children": more.pop("children", "")}, **more)
    return {f"/proc/{pid}/{path}": text for path, text in files.items()}


def hung(program: str) -> Done:
    return Done(TIMED_OUT, "", f"{program} did not end within 10 s")


ON_GPUS = "nvidia-smi --query-compute-apps=pid"
STEP = process(3000, "slurmstepd", "slurmstepd: [123.batch]")
TRAINER = process(3001, "python3.11", "python3.11\0-m\0trainer\0train\0run.toml")
OPENED = ("/dev/accel/accel_controlD3", "/dev/hl_controlD3")
GAUDI_FILES = {path: text for pid in range(3000, 3004) for path, text in process(pid, "python3", "python3\0a").items()}
GAUDI_LINKS = {f"/proc/{pid}/fd/7": path for pid, path in enumerate(("/dev/accel/accel3", "/dev/hl3", *OPENED), 3000)}
SLURM, GPU = {"kind": "slurm", "id": "123"}, {"kind": "gpu", "id": "3001"}
CHRONY = {
    "/etc/chrony/chrony.conf": "# sourcedir /not\nconfdir /etc/chrony/conf.d\nSourceDir /a/ /b\n",
    "/etc/chrony/conf.d/x.conf": "sourcedir /c\n",
    "/etc/chrony/conf.d/x.other": "sourcedir /d\n",
}
MDC, MDT = "mdc.*.max_rpcs_in_flight", "mdt.*.mdt_num"
LCTL = Done(2, recorded("lctl_get_param.txt"), recorded("lctl_get_param_missing.txt"))
BY_MDC = Wanted(lustre_parameters=(MDC,))
NO_DATA, NO_LIBRARY = Done(61, "", "fi_getinfo: -61 (No data available)"), Done(127, "", "libfabric.so.1: not found")
STRIPES = Wanted(stripe_paths=("/fsx/checkpoints", "/other"))
UNREAD = {"exists": None, "empty": None, "layout": None, "error": "find did not end within 10 s"}
LAYOUT = {
    "find": Done(0, "/fsx/checkpoints/step-1\n", ""),
    "lfs getstripe": Done(0, recorded("lfs_getstripe_plain.txt"), ""),
}
OLD_SYSCTL = {"/etc/sysctl.conf": "vm.swappiness = 1\n"}
SYSTEMD_SYSCTL = {"/usr/lib/systemd/systemd-sysctl": ""}
BUILT_IN = {"/sys/module/ib_core/parameters/recv_queue_size": "128\n"}

Planted = dict[str, Any]
PLANTED: list[tuple[str, Planted, dict[str, Any]]] = [
    (
        "p5",
        {"programs": {"nvidia-smi": Done(9, recorded("nvidia_smi_failed.txt"), "")}},
        {"gpu.present": True, "gpu.devices": None, "errors": ["gpu.devices", "gpu.nvlinks", "gpu.processes"]},
    ),
    (
        "p5",
        {"gone": "nvidia-smi"},
        {"gpu.present": True, "gpu.devices": None, "errors": ["gpu"], "jobs": None},
    ),
    ("p5", {"programs": {ON_GPUS: hung("nvidia-smi")}}, {"jobs": None}),
    ("p5", {"programs": {ON_GPUS: Done(0, "", "")}}, {"jobs": []}),
    ("cpu", {"programs": {ON_GPUS: hung("nobody asks")}}, {"jobs": []}),
    ("p5", {"programs": {ON_GPUS: hung("nvidia-smi")}, "files": STEP}, {"jobs": [SLURM]}),
    (
        "p5",
        {"programs": {ON_GPUS: Done(0, "3001\n3001\n", "")}, "files": {**STEP, **TRAINER}},
        {"jobs": [SLURM, {"kind": "trainer", "id": "3001"}, GPU]},
    ),
    (
        "gaudi",
        {"files": GAUDI_FILES, "links": GAUDI_LINKS},
        {"jobs": [{"kind": "hpu", "id": "3000"}, {"kind": "hpu", "id": "3001"}]},
    ),
    ("cpu", {"files": CHRONY}, {"time.folders": ["/a", "/b", "/c"]}),
    ("cpu", {"without": "/etc/chrony/chrony.conf"}, {"time.folders": None}),
    ("cpu", {}, {"boot_outcome": None}),
    ("cpu", {"files": {"/var/lib/lustrain/boot": "failed mount of /fsx\n"}}, {"boot_outcome": "failed mount of /fsx"}),
    ("cpu", {"files": {"/proc/modules": "efa 1 0 - Live 0x0\n"}}, {"modules.loaded": ["efa"]}),
    ("cpu", {"files": {"/proc/modules": "efa 1 0 - Live 0x0\n", **BUILT_IN}}, {"modules.loaded": ["efa", "ib_core"]}),
    ("gaudi", {"programs": {"fi_info": NO_DATA}}, {"efa.domains": [], "errors": []}),
    ("gaudi", {"programs": {"fi_info": NO_LIBRARY}}, {"efa.domains": None, "errors": ["efa.domains"]}),
    (
        "login",
        {"programs": {"lctl": LCTL}, "wanted": Wanted(lustre_parameters=(MDT,))},
        {"lustre.parameters": {MDT: {}}, "errors": []},
    ),
    (
        "login",
        {"programs": {"lctl": Done(1, "", "opening /dev/lnet failed: No such device\n")}, "wanted": BY_MDC},
        {"lustre.parameters": None, "errors": ["lustre.parameters"]},
    ),
    (
        "login",
        {"programs": {"find": hung("find")}, "wanted": STRIPES},
        {"lustre.stripes": {"/fsx/checkpoints": UNREAD}},
    ),
    (
        "login",
        {"programs": LAYOUT, "wanted": STRIPES},
        {
            "lustre.stripes./fsx/checkpoints.exists": True,
            "lustre.stripes./fsx/checkpoints.empty": False,
            "lustre.stripes./fsx/checkpoints.error": None,
            "lustre.stripes./fsx/checkpoints.layout.count": 128,
        },
    ),
]


def planted(root: Path, name: str, **change: Any) -> dict[str, Any]:
    """Facts of a machine with other files, links and programs, or without some."""
    machine = MACHINES[name]()
    for path, text in change.get("files", {}).items():
        machine.files[path] = text
    machine.files.pop(change.get("without", ""), None)
    machine.links.update(change.get("links", {}))
    programs = {tuple(words.split()): done for words, done in change.get("programs", {}).items()}
    replaced = {change.get("gone"), *(words[0] for words in programs if len(words) == 1)}
    kept = {words: done for words, done in machine.programs.items() if words[0] not in replaced}
    machine.programs = {**kept, **programs}
    return facts_from(build(root, machine), change.get("wanted", Wanted()))


@pytest.mark.parametrize(("name", "change", "expected"), PLANTED)
def test_one_unreadable_fact_costs_no_other_fact(
    name: str, change: Planted, expected: dict[str, Any], tmp_path: Path
) -> None:
    found = planted(tmp_path, name, **change)
    assert {path: at(found, path) for path in expected} == expected
    assert len(found["efa"]["devices"]) == {"p5": 32, "gaudi": 4}.get(name, 0)


def test_a_field_that_a_driver_does_not_know_costs_only_itself(tmp_path: Path) -> None:
    class OldDriver(RecordedHost):
        def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
            if command[0] == "nvidia-smi" and command[1].startswith("--query-gpu"):
                old, new = "clocks_throttle_reasons.active", "clocks_event_reasons.active"
                for field in ("fabric.state", "fabric.status", old, new):
                    if field in command[1]:
                        return Done(2, f'Field "{field}" is not a valid field to query.\n', "")
                row = recorded("nvidia_smi_query.csv").splitlines()[0]
                return Done(0, row.rpartition(", 0x")[0] + "\n", "")
            return super().run(command, timeout, stdin)

    built = build(tmp_path, MACHINES["p5"]())
    found = facts_from(OldDriver(built.root, built.machine), Wanted())
    (device,) = found["gpu"]["devices"]
    assert (device["name"], device["throttle"], device["fabric_state"]) == ("NVIDIA H100 80GB HBM3", None, None)
    assert found["errors"] == []


def test_throttle_reasons_are_read_by_their_new_name_too(tmp_path: Path) -> None:
    class NewDriver(RecordedHost):
        def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
            if command[0] == "nvidia-smi" and "clocks_throttle_reasons.active" in command[1]:
                return Done(2, 'Field "clocks_throttle_reasons.active" is not a valid field to query.\n', "")
            if command[0] == "nvidia-smi" and command[1].startswith("--query-gpu"):
                assert command[1].count("clocks_event_reasons.active") == 1
            return super().run(command, timeout, stdin)

    built = build(tmp_path, MACHINES["p5"]())
    found = facts_from(NewDriver(built.root, built.machine), Wanted())
    assert found["gpu"]["devices"] == facts_of("p5")["gpu"]["devices"]
    assert all(one["throttle"] is not None for one in found["gpu"]["devices"])


def test_lustre_mounted_on_demand_is_mounted_before_reading(tmp_path: Path) -> None:
    class OnDemand(RecordedHost):
        def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
            if tuple(command[:2]) == ("find", "/fsx"):
                with self.path("/proc/mounts").open("a") as file:
                    file.write("10.1.1.67@tcp:/xeo3rbev /fsx lustre rw,flock 0 0\n")
            return super().run(command, timeout, stdin)

    machine = MACHINES["login"]()
    machine.files["/proc/mounts"] = "systemd-1 /fsx autofs rw,fd=52 0 0\nsystemd-1 /another autofs rw 0 0\n"
    built = build(tmp_path, machine)
    host = OnDemand(built.root, built.machine)
    found = facts_from(host, STRIPES)
    assert found["lustre"]["mounts"][0]["source"] == "10.1.1.67@tcp:/xeo3rbev"
    assert found["mounts"][-1]["fstype"] == "lustre"
    assert not any("/another" in command for command in host.asked)


def test_a_section_that_raises_costs_only_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(services, "collect", lambda reading: 1 / 0)
    found = planted(tmp_path, "cpu", wanted=WANTED)
    assert (found["services"], found["sysctl"]) == (None, {"vm.max_map_count": "65530"})
    assert found["errors"] == [{"where": "services", "why": "ZeroDivisionError: division by zero"}]


def test_endless_call_costs_no_other_call_its_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = iter([0.0, 0.0, 75.0])
    monkeypatch.setattr(reading, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    seen = MachineReading(Host(str(tmp_path)), Wanted())
    found = run_side_by_side(seen, {"a": lambda: 7, "lustre": threading.Event().wait}, 75.0)
    assert found == {"a": 7, "lustre": None}
    assert seen.errors == [{"where": "lustre", "why": "did not end within 75 s"}]


def sysctl_files(root: Path, files: dict[str, str], links: dict[str, str] | None = None) -> dict[str, Any]:
    found = facts_from(build(root, Machine(files=files, links=links or {})), Wanted())
    return {one["path"]: (one["link"], one["values"]) for one in found["sysctl_files"]}


def test_sysctl_files_come_in_boot_order_with_masks_and_links(tmp_path: Path) -> None:
    files = {
        "/etc/sysctl.conf": "vm.swappiness = 1\n",
        "/etc/sysctl.d/90-lustrain.conf": "vm.swappiness = 2\n",
        "/usr/lib/sysctl.d/50-default.conf": "vm.swappiness = 3\n",
        "/usr/lib/sysctl.d/95-vendor.conf": "vm.swappiness = 4\n",
        "/usr/lib/sysctl.d/10-off.conf": "vm.swappiness = 5\n",
        "/etc/sysctl.d/50-default.conf": "vm.swappiness = 6\n",
    }
    links = {"/etc/sysctl.d/99-sysctl.conf": "../sysctl.conf", "/etc/sysctl.d/10-off.conf": "/dev/null"}
    found = sysctl_files(tmp_path, {**files, **SYSTEMD_SYSCTL}, links)
    assert list(found.items()) == [
        ("/etc/sysctl.d/50-default.conf", (None, {"vm.swappiness": "6"})),
        ("/etc/sysctl.d/90-lustrain.conf", (None, {"vm.swappiness": "2"})),
        ("/usr/lib/sysctl.d/95-vendor.conf", (None, {"vm.swappiness": "4"})),
        ("/etc/sysctl.d/99-sysctl.conf", ("/etc/sysctl.conf", {"vm.swappiness": "1"})),
    ]


def test_old_sysctl_file_counts_only_where_it_is_read(tmp_path: Path) -> None:
    assert list(sysctl_files(tmp_path / "a", OLD_SYSCTL)) == ["/etc/sysctl.conf"]
    assert list(sysctl_files(tmp_path / "b", {**OLD_SYSCTL, **SYSTEMD_SYSCTL})) == []


def test_owned_files_have_content_and_mode_else_an_error(tmp_path: Path) -> None:
    host = build(tmp_path, Machine(files={"/etc/sysctl.d/90-lustrain.conf": "vm.swappiness = 2\n"}))
    (tmp_path / "etc/sysctl.d/90-lustrain.conf").chmod(0o640)
    found = facts_from(host, Wanted(mount_units=("/etc/systemd/system/fsx.mount",)))
    assert found["files"]["/etc/sysctl.d/90-lustrain.conf"] == {"content": "vm.swappiness = 2\n", "mode": "0640"}
    assert found["files"]["/etc/systemd/system/fsx.mount"] is None
    assert "files" not in at(found, "errors")
    (tmp_path / "etc/systemd/system/fsx.mount").mkdir(parents=True)
    found = facts_from(host, Wanted(mount_units=("/etc/systemd/system/fsx.mount",)))
    assert at(found, "errors").count("files") == 1


def test_job_environment_is_reported_once_and_only_variables(tmp_path: Path) -> None:
    simple = "AWS_SECRET_ACCESS_KEY=hush\0NCCL_PROTO=simple\0"
    step = {"environ": "NCCL_DEBUG=of slurmd's own\0", "children": "200 201"}
    files = {
        **process(100, "slurmstepd", "slurmstepd: [123.batch]", **step),
        **process(200, "bash", "bash\0job.sh", environ=simple, children="300"),
        **process(201, "bash", "bash\0job.sh", environ=simple),
        **process(300, "python3", "python3\0-m\0trainer\0train", environ=f"{simple}CUDA_VISIBLE_DEVICES=0\0"),
        **process(400, "python3", "python3\0-mtrainer\0train", environ="SECRET=hush\0FI_PROVIDER=tcp\0broken"),
        **process(500, "python3", "python3\0other.py", environ="NCCL_ALGO=Ring\0"),
        **process(600, "python3", "python3\0of nobody", environ="NCCL_ALGO=Tree\0"),
    }
    found = planted(tmp_path, "p5", files=files, programs={ON_GPUS: Done(0, "300\n500\n", "")})
    assert found["errors"] == []
    assert [tuple(one.values()) for one in found["environment"]] == [
        ("slurm job 123", None, "NCCL_PROTO", "simple"),
        ("slurm job 123", None, "CUDA_VISIBLE_DEVICES", "0"),
        ("running trainer process", None, "FI_PROVIDER", "tcp"),
        ("running gpu process", None, "NCCL_ALGO", "Ring"),
    ]
    told = {(one["where"], one["name"]) for one in lint(found)}
    assert ("slurm job 123", "NCCL_PROTO") in told
    assert ("slurm job 123", "CUDA_VISIBLE_DEVICES") not in told, "Slurm sets it for each job"


def test_all_places_are_read_but_only_training_variables_kept(tmp_path: Path) -> None:
    files = {
        "/etc/environment": 'PATH="/usr/bin"\nNCCL_IB_DISABLE=1\n',
        "/etc/profile.d/efa.sh": "#!/bin/sh\nexport FI_EFA_USE_DEVICE_RDMA=1\n",
        "/etc/profile.d/ignored.csh": "setenv NCCL_DEBUG INFO\n",
        "/etc/nccl.conf": "# NCCL\nNCCL_DEBUG=INFO\n",
        "/etc/systemd/system/slurmd.service.d/override.conf": "[Service]\nEnvironment=CUDA_VISIBLE_DEVICES=0,1\n",
        "/usr/lib/systemd/system/kubelet.service": "[Service]\nEnvironment=HOME=/root OMP_NUM_THREADS=8\n",
        "/etc/systemd/system/slurmd.service": "EnvironmentFile=-/etc/default/slurmd\nEnvironmentFile=/opt/site.env\n",
        "/opt/site.env": "SITE=x\nFI_PROVIDER=tcp\n",
        "/etc/default/slurmd": "SLURMD_OPTIONS=-M\nHABANA_LOGS=/tmp\n",
        "/opt/slurm/etc/slurm.conf": "TaskProlog=/opt/slurm/task.sh\n",
        "/opt/slurm/task.sh": '#!/bin/bash\necho "export NCCL_PROTO=simple"\necho export TORCH_NCCL_BLOCKING_WAIT=1\n',
    }
    found = facts_from(build(tmp_path, Machine(files=files)), Wanted())["environment"]
    assert [(one["where"], one["line"], one["name"], one["value"]) for one in found] == [
        ("/etc/environment", 2, "NCCL_IB_DISABLE", "1"),
        ("/etc/default/slurmd", 2, "HABANA_LOGS", "/tmp"),
        ("/etc/profile.d/efa.sh", 2, "FI_EFA_USE_DEVICE_RDMA", "1"),
        ("/etc/nccl.conf", 2, "NCCL_DEBUG", "INFO"),
        ("/usr/lib/systemd/system/kubelet.service", 2, "OMP_NUM_THREADS", "8"),
        ("/opt/site.env", 2, "FI_PROVIDER", "tcp"),
        ("/etc/systemd/system/slurmd.service.d/override.conf", 2, "CUDA_VISIBLE_DEVICES", "0,1"),
        ("/opt/slurm/task.sh", 2, "NCCL_PROTO", "simple"),
        ("/opt/slurm/task.sh", 3, "TORCH_NCCL_BLOCKING_WAIT", "1"),
    ]
