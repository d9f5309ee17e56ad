"""All facts together: the documented keys, on whatever machine; what fails or hangs costs its own facts only."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node_setup.agent import facts as facts_package
from node_setup.agent.facts import collect, lustre, metadata, scene, services
from node_setup.agent.facts.devices import gpu
from node_setup.agent.facts.wanted import Wanted
from node_setup.agent.host import TIMED_OUT, Done, Host
from tests.node_setup.agents import VERSIONS, interpreter
from tests.node_setup.machines import MACHINES, SLURMD_LIMITS, facts_of
from tests.node_setup.recorded_host import Machine, RecordedHost, build, facts_from, recorded

SECTIONS = (
    *("version", "agent", "host", "os", "kernel", "cpu", "memory", "instance", "group", "metadata", "sysctl"),
    *("sysctl_files", "modules", "limits", "blocks", "arrays", "mounts", "lustre", "efa", "gpu", "hpu", "init"),
    *("services", "packages", "time", "jobs", "environment", "files", "disk", "boot_outcome", "errors"),
)
WANTED = Wanted(sysctls=("vm.max_map_count", "no.such.key"), services=("cron.service",), packages=("bash",))


@pytest.fixture(autouse=True)
def nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(metadata.ENDPOINT_VARIABLE, raising=False)


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_has_every_section_and_no_error(name: str) -> None:
    found = facts_of(name)
    assert set(found) == set(SECTIONS)
    assert found["errors"] == []
    assert json.loads(json.dumps(found)) == found


def test_every_section_is_described() -> None:
    text = facts_package.__doc__ or ""
    assert [name for name in SECTIONS if not re.search(rf"\b{name}\b", text)] == []


def test_facts_of_this_machine_are_real() -> None:
    found = collect(Host(), WANTED)
    assert set(found) == set(SECTIONS)
    assert found["host"]["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert found["sysctl"] == {"vm.max_map_count": Path("/proc/sys/vm/max_map_count").read_text().strip()}
    assert found["memory"]["gib"] > 0
    assert any(one["target"] == "/" for one in found["mounts"])
    json.dumps(found)


def test_an_empty_machine_has_facts_too(tmp_path: Path) -> None:
    found = facts_from(RecordedHost(tmp_path, Machine()), WANTED)
    assert set(found) == set(SECTIONS)
    assert (found["blocks"], found["gpu"]["present"], found["init"]) == ([], None, None)
    assert (found["instance"]["type"], found["limits"]["slurmd"]) == (None, None)


def test_a_fresh_p5_as_it_is_found() -> None:
    found = facts_of("p5")
    assert (found["cpu"]["count"], found["memory"]["gib"], found["cpu"]["numa_nodes"]) == (192, 2048, 2)
    assert (found["instance"]["type"], found["instance"]["source"], found["group"]) == ("p5.48xlarge", "imds", "train")
    assert (len(found["efa"]["devices"]), found["efa"]["pci"], len(found["efa"]["domains"])) == (32, 32, 32)
    assert {one["state"] for one in found["efa"]["devices"]} == {"ACTIVE"}
    assert (len(found["gpu"]["devices"]), found["gpu"]["xids"], found["gpu"]["processes"]) == (8, [], 0)
    assert found["gpu"]["nvlinks"] == {str(at): {"up": 18, "errors": 0} for at in range(8)}
    assert found["gpu"]["driver"] == found["gpu"]["fabric_manager"]["version"]
    assert found["limits"]["slurmd"]["memlock"] == ["8388608", "8388608"]
    assert found["lustre"]["mounts"][0]["mount_name"] == "xeo3rbev"
    assert found["lustre"]["client"] == "2.15.6"
    assert found["lustre"]["stripes"]["/fsx/checkpoints"]["exists"] is False
    assert found["services"]["nvidia-fabricmanager.service"]["active"] == "active"


def test_gaudi_and_login_nodes_are_told_apart_by_what_is_on_the_bus() -> None:
    gaudi, login = facts_of("gaudi"), facts_of("login")
    assert (gaudi["hpu"]["present"], len(gaudi["hpu"]["devices"]), gaudi["gpu"]["present"]) == (True, 8, False)
    assert (login["os"]["family"], login["packages"]["manager"], login["group"]) == ("rhel", "dnf", "login")
    assert login["gpu"] == {**gpu.EMPTY["gpu"], "present": False}


def machine_with(name: str, **programs: Done) -> Machine:
    machine = MACHINES[name]()
    for command, done in programs.items():
        asked = command.replace("__", "-")
        machine.programs = {one: said for one, said in machine.programs.items() if one[0] != asked}
        machine.programs[(asked,)] = done
    return machine


def test_a_failing_nvidia_smi_is_no_count_of_gpus(tmp_path: Path) -> None:
    failed = Done(9, recorded("nvidia_smi_failed.txt"), "")
    found = facts_from(build(tmp_path, machine_with("p5", nvidia__smi=failed)), Wanted())
    assert (found["gpu"]["present"], found["gpu"]["devices"], found["gpu"]["processes"]) == (True, None, None)
    assert {one["where"] for one in found["errors"]} == {"gpu.devices", "gpu.nvlinks", "gpu.processes"}
    assert len(found["efa"]["domains"]) == 32


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


def test_a_driver_that_calls_throttle_reasons_by_their_new_name_only_still_tells_them(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("kind", "answer", "jobs"),
    [
        ("p5", Done(124, "", "nvidia-smi did not end within 30 s"), None),
        ("p5", Done(0, "", ""), []),
        ("cpu", Done(124, "", "nobody asks"), []),
    ],
)
def test_gpus_that_nobody_could_ask_are_not_idle_and_a_node_without_gpus_is(
    kind: str, answer: Done, jobs: object, tmp_path: Path
) -> None:
    machine = MACHINES[kind]()
    machine.programs[("nvidia-smi", "--query-compute-apps=pid")] = answer
    assert facts_from(build(tmp_path, machine), Wanted())["jobs"] == jobs


def test_a_job_that_was_seen_is_told_though_the_gpus_could_not_be_asked(tmp_path: Path) -> None:
    machine = MACHINES["p5"]()
    machine.files["/proc/3000/stat"] = "3000 (slurmstepd) S 1 1 1 0 -1 0 1 2 3 4 5 6 7 8 20 0 1 0 3000 1 1\n"
    machine.files["/proc/3000/cmdline"] = "slurmstepd: [123.batch]"
    machine.programs[("nvidia-smi", "--query-compute-apps=pid")] = Done(124, "", "it hangs")
    assert facts_from(build(tmp_path, machine), Wanted())["jobs"] == [{"kind": "slurm", "id": "123"}]


def test_the_folders_that_chrony_reads_are_found_through_its_confdir(tmp_path: Path) -> None:
    machine = MACHINES["cpu"]()
    machine.files["/etc/chrony/chrony.conf"] = "# sourcedir /not\nconfdir /etc/chrony/conf.d\nSourceDir /a/ /b\n"
    machine.files["/etc/chrony/conf.d/x.conf"] = "sourcedir /c\n"
    machine.files["/etc/chrony/conf.d/x.other"] = "sourcedir /d\n"
    assert facts_from(build(tmp_path, machine), Wanted())["time"]["folders"] == ["/a", "/b", "/c"]
    del machine.files["/etc/chrony/chrony.conf"]
    (tmp_path / "etc/chrony/chrony.conf").unlink()
    assert facts_from(build(tmp_path, machine), Wanted())["time"]["folders"] is None


def test_a_device_without_its_driver_is_an_error_and_not_a_cpu_node(tmp_path: Path) -> None:
    machine = MACHINES["p5"]()
    machine.programs = {one: done for one, done in machine.programs.items() if one[0] != "nvidia-smi"}
    found = facts_from(build(tmp_path, machine), Wanted())
    assert (found["gpu"]["present"], found["gpu"]["devices"]) == (True, None)
    assert "driver is not installed" in found["errors"][0]["why"]


@pytest.mark.parametrize("said", ["ready lustre-over-tcp", "failed mount of /fsx"])
def test_how_the_boot_script_ended_is_told_as_it_said_it(tmp_path: Path, said: str) -> None:
    assert collect(build(tmp_path, Machine()), Wanted())["boot_outcome"] is None
    assert (
        collect(build(tmp_path, Machine(files={"/var/lib/lustrain/boot": f"{said}\n"})), Wanted())["boot_outcome"]
        == said
    )


@pytest.mark.slow
def test_a_module_that_is_built_into_the_kernel_is_in_effect(tmp_path: Path) -> None:
    machine = MACHINES["p5"]()
    machine.files["/proc/modules"] = "efa 114688 0 - Live 0x0\n"
    absent = facts_from(build(tmp_path / "a", machine), Wanted())
    machine.files["/sys/module/ib_core/parameters/recv_queue_size"] = "128\n"
    built_in = facts_from(build(tmp_path / "b", machine), Wanted())
    assert absent["efa"]["modules"] == ["efa"]
    assert built_in["efa"]["modules"] == ["efa", "ib_core"]
    assert {"efa", "ib_core"} <= set(built_in["modules"]["loaded"])


def test_a_fabric_without_devices_has_no_domains_but_a_broken_library_is_unknown(tmp_path: Path) -> None:
    none = facts_from(
        build(tmp_path / "a", machine_with("gaudi", fi_info=Done(61, "", "fi_getinfo: -61 (No data available)"))),
        Wanted(),
    )
    broken = facts_from(
        build(tmp_path / "b", machine_with("gaudi", fi_info=Done(127, "", "libfabric.so.1: not found"))), Wanted()
    )
    assert (none["efa"]["domains"], none["errors"]) == ([], [])
    assert broken["efa"]["domains"] is None
    assert broken["errors"] == [{"where": "efa.domains", "why": "fi_info: libfabric.so.1: not found"}]


def test_a_pattern_of_lctl_that_matches_nothing_is_no_error(tmp_path: Path) -> None:
    said = Done(2, recorded("lctl_get_param.txt"), recorded("lctl_get_param_missing.txt"))
    wanted = Wanted(lustre_parameters=("mdc.*.max_rpcs_in_flight", "mdt.*.mdt_num"))
    found = facts_from(build(tmp_path, machine_with("login", lctl=said)), wanted)
    assert len(found["lustre"]["parameters"]["mdc.*.max_rpcs_in_flight"]) == 2
    assert found["lustre"]["parameters"]["mdt.*.mdt_num"] == {}
    assert found["errors"] == []


def test_a_failing_lctl_leaves_parameters_unknown(tmp_path: Path) -> None:
    said = Done(1, "", "opening /dev/lnet failed: No such device\n")
    wanted = Wanted(lustre_parameters=("mdc.*.max_rpcs_in_flight",))
    found = facts_from(build(tmp_path, machine_with("login", lctl=said)), wanted)
    assert found["lustre"]["parameters"] is None
    assert found["errors"][0]["where"] == "lustre.parameters"


def test_a_lustre_that_does_not_answer_is_an_error_of_its_directory(tmp_path: Path) -> None:
    hung = Done(TIMED_OUT, "", "find did not end within 10 s")
    found = facts_from(
        build(tmp_path, machine_with("login", find=hung)), Wanted(stripe_paths=("/fsx/checkpoints", "/other"))
    )
    assert found["lustre"]["stripes"] == {
        "/fsx/checkpoints": {"exists": None, "empty": None, "layout": None, "error": "find did not end within 10 s"}
    }


def test_an_existing_directory_has_a_layout_and_is_empty_or_not(tmp_path: Path) -> None:
    machine = machine_with("login", find=Done(0, "/fsx/checkpoints/step-1\n", ""))
    machine.programs[("lfs", "getstripe")] = Done(0, recorded("lfs_getstripe_plain.txt"), "")
    found = facts_from(build(tmp_path, machine), Wanted(stripe_paths=("/fsx/checkpoints",)))
    stripe = found["lustre"]["stripes"]["/fsx/checkpoints"]
    assert (stripe["exists"], stripe["empty"], stripe["layout"]["count"], stripe["error"]) == (True, False, 128, None)


def test_a_lustre_that_is_mounted_on_demand_is_woken_before_it_is_judged(tmp_path: Path) -> None:
    class OnDemand(RecordedHost):
        def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
            if tuple(command[:2]) == ("find", "/fsx"):
                with self.path("/proc/mounts").open("a") as file:
                    file.write("10.1.1.67@tcp:/xeo3rbev /fsx lustre rw,flock 0 0\n")
            return super().run(command, timeout, stdin)

    machine = MACHINES["login"]()
    machine.files["/proc/mounts"] = "systemd-1 /fsx autofs rw,fd=52 0 0\nsystemd-1 /other autofs rw 0 0\n"
    built = build(tmp_path, machine)
    host = OnDemand(built.root, built.machine)
    found = facts_from(host, Wanted(stripe_paths=("/fsx/checkpoints",)))
    assert found["lustre"]["mounts"][0]["mount_name"] == "xeo3rbev"
    assert found["mounts"][-1]["fstype"] == "lustre"
    assert not any("/other" in command for command in host.asked)


def test_a_section_that_raises_costs_only_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(services, "collect", lambda scene: 1 / 0)
    found = facts_from(build(tmp_path, MACHINES["cpu"]()), WANTED)
    assert found["services"] is None
    assert found["errors"] == [{"where": "services", "why": "ZeroDivisionError: division by zero"}]
    assert found["sysctl"] == {"vm.max_map_count": "65530"}


def test_a_section_that_never_ends_costs_the_deadline_and_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    others = [one for one in facts_package._SECTIONS if one is not lustre]
    # The time is over when all others have ended.
    clock = iter([0.0, *(0.0 for _ in others), facts_package.DEADLINE_SECONDS])
    monkeypatch.setattr(scene, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(facts_package, "_SECTIONS", (*others, lustre))
    monkeypatch.setattr(lustre, "collect", lambda scene: threading.Event().wait())
    found = facts_from(build(tmp_path, MACHINES["cpu"]()), WANTED)
    assert found["errors"] == [{"where": "lustre", "why": "did not end within 75 s"}]
    assert found["lustre"]["mounts"] == []


def test_jobs_of_slurm_of_the_trainer_and_on_gpus_are_all_seen(tmp_path: Path) -> None:
    machine = MACHINES["p5"]()
    for pid, name, command in (
        (3000, "slurmstepd", "slurmstepd: [123.batch]"),
        (3001, "python3.11", "python3.11\0-m\0trainer\0train\0run.toml"),
    ):
        machine.files[f"/proc/{pid}/stat"] = f"{pid} ({name}) S 1 1 1 0 -1 0 1 2 3 4 5 6 7 8 20 0 1 0 {pid} 1 1\n"
        machine.files[f"/proc/{pid}/cmdline"] = command
    machine.programs[("nvidia-smi", "--query-compute-apps=pid")] = Done(0, "3001\n3001\n", "")
    assert facts_from(build(tmp_path, machine), Wanted())["jobs"] == [
        {"kind": "slurm", "id": "123"},
        {"kind": "trainer", "id": "3001"},
        {"kind": "gpu", "id": "3001"},
    ]


@pytest.mark.parametrize("device", ["/dev/accel/accel3", "/dev/hl3"])
def test_who_computes_on_a_gaudi_is_a_job_and_who_only_looks_at_it_is_none(device: str, tmp_path: Path) -> None:
    machine = MACHINES["gaudi"]()
    for pid, path in ((3000, device), (3001, "/dev/accel/accel_controlD3"), (3002, "/dev/hl_controlD3")):
        machine.files[f"/proc/{pid}/stat"] = f"{pid} (python3) S 1 1 1 0 -1 0 1 2 3 4 5 6 7 8 20 0 1 0 {pid} 1 1\n"
        machine.files[f"/proc/{pid}/cmdline"] = "python3\0run.py"
        machine.links[f"/proc/{pid}/fd/7"] = path
    assert facts_from(build(tmp_path, machine), Wanted())["jobs"] == [{"kind": "hpu", "id": "3000"}]


def test_limits_are_those_of_the_running_slurmd() -> None:
    assert SLURMD_LIMITS.count("\n") == 4
    assert facts_of("p5")["limits"]["slurmd"] == {
        "memlock": ["8388608", "8388608"],
        "nofile": ["1024", "524288"],
        "stack": ["8388608", "unlimited"],
    }


def _sysctl_paths(found: dict[str, Any]) -> list[str]:
    return [one["path"] for one in found["sysctl_files"]]


def test_sysctl_files_come_in_boot_order_with_masks_and_links(tmp_path: Path) -> None:
    machine = Machine(
        files={
            "/etc/sysctl.conf": "vm.swappiness = 1\n",
            "/etc/sysctl.d/90-lustrain.conf": "vm.swappiness = 2\n",
            "/usr/lib/sysctl.d/50-default.conf": "vm.swappiness = 3\n",
            "/usr/lib/sysctl.d/95-vendor.conf": "vm.swappiness = 4\n",
            "/usr/lib/sysctl.d/10-off.conf": "vm.swappiness = 5\n",
            "/etc/sysctl.d/50-default.conf": "vm.swappiness = 6\n",
            "/usr/lib/systemd/systemd-sysctl": "",
        },
        links={"/etc/sysctl.d/99-sysctl.conf": "../sysctl.conf", "/etc/sysctl.d/10-off.conf": "/dev/null"},
    )
    found = facts_from(build(tmp_path, machine), Wanted())
    assert _sysctl_paths(found) == [
        "/etc/sysctl.d/50-default.conf",
        "/etc/sysctl.d/90-lustrain.conf",
        "/usr/lib/sysctl.d/95-vendor.conf",
        "/etc/sysctl.d/99-sysctl.conf",
    ]
    assert found["sysctl_files"][-1] == {
        "path": "/etc/sysctl.d/99-sysctl.conf",
        "link": "/etc/sysctl.conf",
        "values": {"vm.swappiness": "1"},
    }


def test_the_old_sysctl_file_counts_only_where_something_reads_it(tmp_path: Path) -> None:
    files = {"/etc/sysctl.conf": "vm.swappiness = 1\n"}
    without = facts_from(build(tmp_path / "a", Machine(files=files)), Wanted())
    systemd = facts_from(
        build(tmp_path / "b", Machine(files={**files, "/usr/lib/systemd/systemd-sysctl": ""})), Wanted()
    )
    assert _sysctl_paths(without) == ["/etc/sysctl.conf"]
    assert _sysctl_paths(systemd) == []


def test_our_own_files_are_told_with_content_and_mode(tmp_path: Path) -> None:
    host = build(tmp_path, Machine(files={"/etc/sysctl.d/90-lustrain.conf": "vm.swappiness = 2\n"}))
    (tmp_path / "etc/sysctl.d/90-lustrain.conf").chmod(0o640)
    found = facts_from(host, Wanted(mount_units=("/etc/systemd/system/fsx.mount",)))["files"]
    assert found["/etc/sysctl.d/90-lustrain.conf"] == {"content": "vm.swappiness = 2\n", "mode": "0640"}
    assert found["/etc/systemd/system/fsx.mount"] is None


@pytest.mark.parametrize("version", VERSIONS)
def test_facts_of_this_machine_are_read_under_every_python_that_nodes_have(version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    code = (
        "import json; from node_setup.agent.facts import collect; from node_setup.agent.facts.wanted import Wanted;"
        "from node_setup.agent.host import Host; print(json.dumps(collect(Host(), Wanted())))"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert set(json.loads(done.stdout)) == set(SECTIONS)
