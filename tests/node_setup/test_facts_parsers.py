"""What the parsers make of recorded outputs (`recorded/ORIGINS.md` says whose)."""

from __future__ import annotations

from pathlib import Path

import pytest

from node_setup.agent.facts import clock, instance, jobs, kernel, lustre, machine, scene, services
from node_setup.agent.facts.devices import fabric, gpu, hpu
from node_setup.agent.facts.wanted import Wanted
from node_setup.agent.host import Done
from tests.node_setup.recorded_host import Machine, build, recorded


def test_a_domain_that_two_fabrics_list_counts_once() -> None:
    assert fabric.parse_domains(recorded("fi_info_p5.txt")) == ["rdmap79s0-rdm", "rdmap80s0-rdm"]


def test_datagram_and_layered_providers_are_no_efa_domains() -> None:
    assert fabric.parse_domains(recorded("fi_info_old.txt")) == ["efa_0-rdm"]


def test_versions_of_the_efa_installer_and_its_libfabric() -> None:
    assert fabric.parse_installed(recorded("efa_installed_packages.txt")) == ("1.38.1", "1.22.0amzn4.0")


def test_every_interface_of_every_lustre_network_is_listed_with_its_counters() -> None:
    nets = {one["net"]: one["nids"] for one in lustre.parse_nets(recorded("lnetctl_net_show_v.txt"))}
    assert list(nets) == ["lo", "tcp", "efa"]
    assert [(one["interface"], one["send"], one["recv"]) for one in nets["efa"]] == [
        ("efa_0", 88471, 108468),
        ("efa_1", 88536, 108517),
    ]
    assert sum(one["send"] for one in nets["efa"]) == 177007
    assert nets["tcp"][0] == {
        "nid": "10.73.20.11@tcp",
        "interface": "bond0",
        "status": "up",
        "send": 2682864,
        "recv": 2682858,
        "drop": 11,
    }


def test_networks_without_counters_have_none_rather_than_zero() -> None:
    nets = lustre.parse_nets(recorded("lnetctl_net_show.txt"))
    assert nets[2]["nids"] == [
        {"nid": "1.61.92.0@efa", "interface": "efa_0", "status": "up", "send": None, "recv": None, "drop": None}
    ]


def test_of_several_default_routes_the_one_with_the_lowest_metric_counts() -> None:
    assert lustre.default_interface(recorded("proc_net_route.txt")) == "ens32"
    assert lustre.default_interface(recorded("proc_net_route.txt").splitlines()[0]) is None


def test_the_interface_of_the_nodes_own_address_goes_before_the_default_route(tmp_path: Path) -> None:
    """A HyperPod node: ens32 is the service's network and has the lower metric, ens65 is that of the VPC."""
    node = Machine(files={"/proc/net/route": recorded("proc_net_route.txt")})
    node.programs[("lnetctl",)] = Done(0, "", "")
    held = "1: lo    inet 127.0.0.1/8 scope host lo\n2: ens32    inet 169.254.0.7/24 brd 169.254.0.255 scope global ens32\n"
    node.programs[("ip",)] = Done(0, held + "3: ens65    inet 10.1.71.9/16 scope global ens65\n", "")
    for own, wanted in (("10.1.71.9", "ens65"), ("127.0.1.1", "ens32"), ("169.254.0.7 10.1.71.9", "ens32")):
        node.programs[("hostname",)] = Done(0, own + "\n", "")
        found = lustre.collect(scene.Scene(build(tmp_path, node), Wanted()))
        assert found["lustre"]["interface"] == wanted


def test_parameters_come_under_the_pattern_that_asked_for_them_with_all_instances() -> None:
    values = lustre.parse_parameters(recorded("lctl_get_param.txt"))
    found = lustre.by_pattern(("osc.*OST*.max_rpcs_in_flight", "mdc.*.max_rpcs_in_flight", "llite.*.nothing"), values)
    assert list(found["osc.*OST*.max_rpcs_in_flight"].values()) == ["32", "8"]
    assert len(found["mdc.*.max_rpcs_in_flight"]) == 2
    assert found["llite.*.nothing"] == {}


def test_a_parameter_of_many_lines_keeps_them() -> None:
    text = "llite.fs-ff.max_cached_mb=\nusers: 5\nmax_cached_mb: 12000\nllite.fs-ff.statahead_max=32\n"
    assert lustre.parse_parameters(text) == {
        "llite.fs-ff.max_cached_mb": "users: 5\nmax_cached_mb: 12000",
        "llite.fs-ff.statahead_max": "32",
    }


def test_a_plain_layout_has_no_components() -> None:
    assert lustre.parse_layout(recorded("lfs_getstripe_plain.txt")) == {
        "count": 128,
        "size": 1048576,
        "offset": -1,
        "pattern": "raid0",
        "pool": None,
        "components": [],
    }


@pytest.mark.parametrize(
    ("name", "ends", "counts"),
    [
        ("lfs_getstripe_pfl.txt", [104857600, 10737418240, 107374182400, None], [1, 8, 16, 32]),
        ("lfs_getstripe_dom.txt", [65536, None], [0, -1]),
    ],
)
def test_a_composite_layout_lists_its_components(name: str, ends: list[int | None], counts: list[int]) -> None:
    layout = lustre.parse_layout(recorded(name))
    assert layout is not None
    assert [one["end"] for one in layout["components"]] == ends
    assert [one["count"] for one in layout["components"]] == counts
    assert layout["count"] == counts[-1]


def test_an_error_of_lfs_is_no_layout() -> None:
    assert lustre.parse_layout("lfs getstripe: cannot get lov name: Inappropriate ioctl for device (25)") is None


def test_storage_targets_are_counted_and_switched_off_ones_apart() -> None:
    assert lustre.parse_df(recorded("lfs_df.txt")) == {"count": 2, "fullest_percent": 6, "inactive": 0}
    assert lustre.parse_df(recorded("lfs_df_inactive.txt")) == {"count": 2, "fullest_percent": 1, "inactive": 2}
    assert lustre.parse_df("") == {"count": 0, "fullest_percent": None, "inactive": 0}


def test_gpu_rows_become_devices_and_unknown_values_none() -> None:
    first, second = (gpu.device_of(row) for row in gpu.parse_rows(gpu.FIELDS, recorded("nvidia_smi_query.csv")))
    assert (first["index"], first["pci"], first["memory_mib"]) == (0, "0000:53:00.0", 81559)
    assert first["persistence"] is True
    assert first["throttle"] == ["gpu_idle"]
    assert first["max"] == {"graphics": 1980, "memory": 2619}
    assert second["applications"] == {"graphics": None, "memory": None}
    assert (second["ecc_volatile_uncorrected"], second["remap_pending"], second["remap_failed"]) == (2, True, False)
    assert second["throttle"] == ["hw_slowdown", "hw_thermal_slowdown"]
    assert (second["fabric_state"], second["fabric_status"]) == ("In Progress", None)


def test_what_nvidia_smi_says_when_it_fails_is_no_gpu() -> None:
    assert gpu.parse_rows(gpu.FIELDS, recorded("nvidia_smi_failed.txt")) == []
    assert gpu.parse_rows(("index",), recorded("nvidia_smi_failed.txt")) == []


def test_links_are_counted_by_gpu_and_inactive_ones_are_down() -> None:
    assert gpu.parse_nvlinks(recorded("nvlink_s.txt")) == {"0": 18, "1": 18}
    assert gpu.parse_nvlinks(recorded("nvlink_s_inactive.txt")) == {"3": 4}


def test_link_errors_are_summed_by_gpu() -> None:
    assert gpu.parse_nvlink_errors(recorded("nvlink_e.txt")) == {"0": 0}
    assert gpu.parse_nvlink_errors(recorded("nvlink_e_errors.txt")) == {"0": 17, "1": 0}


def test_driver_errors_are_found_in_all_their_forms() -> None:
    found = gpu.parse_xids(recorded("xids.txt"))
    assert [(one["xid"], one["pci"], one["switch"]) for one in found] == [
        (32, "0000:01:00", False),
        (79, "0000:3b:00", False),
        (20009, "0000:c3:00.0", True),
        (79, "0000:b3:00", False),
    ]
    assert found[0]["text"] == "Channel ID 00000009 intr 00800000"


def test_gaudi_rows_become_devices() -> None:
    first, second = (hpu.device_of(row) for row in gpu.parse_rows(hpu.FIELDS, recorded("hl_smi.csv")))
    assert first == {
        "index": 0,
        "module": 0,
        "pci": "0000:3b:00.0",
        "name": "HL-225",
        "memory_mib": 98304,
        "used_mib": 1304,
        "celsius": 35,
    }
    assert (second["module"], second["celsius"]) == (4, None)


def test_the_clock_of_a_synchronised_and_of_a_lost_node() -> None:
    assert clock.parse_tracking(recorded("chronyc_tracking.csv")) == {
        "synchronised": True,
        "source": "169.254.169.123",
        "offset_s": 0.000042,
        "leap": "Normal",
    }
    lost = clock.parse_tracking(recorded("chronyc_tracking_unsynchronised.csv"))
    assert (lost["synchronised"], lost["leap"]) == (False, "Not synchronised")


def test_services_come_in_the_order_asked_also_under_an_alias() -> None:
    asked = ("chronyd.service", "slurmd.service", "nvidia-persistenced.service")
    found = services.parse_services(asked, recorded("systemctl_show.txt"))
    assert found["chronyd.service"] == {"load": "loaded", "active": "active", "enabled": "enabled", "result": "success"}
    assert found["slurmd.service"]["load"] == "not-found"
    assert found["nvidia-persistenced.service"]["result"] == "exit-code"


def test_held_and_installed_packages_of_dpkg() -> None:
    text = (
        "Package: linux-aws\nStatus: hold ok installed\nArchitecture: amd64\nVersion: 6.8.0.1\nDepends: x\n\n"
        "Package: lustre-client-modules-aws\nStatus: install ok installed\nVersion: 2.15.6-1\n\n"
        "Package: lustre-old\nStatus: deinstall ok config-files\nVersion: 2.12\n\n"
        "Package: linux-aws-lts\nStatus: install ok installed\nDescription: named like one\n more: Version: 1\nVersion: 6.8\n"
    )
    held, installed = services.parse_dpkg(text, ("linux-aws", "lustre-*", "absent"))
    assert held == ["linux-aws"]
    assert installed == {"linux-aws": "6.8.0.1", "lustre-client-modules-aws": "2.15.6-1"}


def test_locked_packages_of_dnf() -> None:
    text = "# Added lock\nkernel-0:6.1.177-224.371.amzn2023.*\n!excluded-0:1-1.*\nnvidia-driver-3:570.172.08-1.*\n"
    assert services.parse_versionlock(text) == ["kernel", "nvidia-driver"]


def test_steps_of_slurm_count_as_one_job_and_slurms_own_daemon_as_none() -> None:
    def process(pid: int, *command: str) -> scene.Process:
        return scene.Process(pid, "slurmstepd", command, pid)

    running = [
        process(1, "slurmstepd: [123.batch]"),
        process(2, "slurmstepd: [123.0]"),
        process(3, "slurmstepd: [77.extern]"),
        process(4, "/usr/sbin/slurmstepd", "infinity"),
        scene.Process(5, "python3", ("python3", "-m", "trainer", "train", "run.toml"), 5),
        scene.Process(6, "python3", ("python3", "-m", "trainer", "plot", "run"), 6),
    ]
    assert jobs.jobs_of(running) == [
        {"kind": "slurm", "id": "77"},
        {"kind": "slurm", "id": "123"},
        {"kind": "trainer", "id": "5"},
    ]


@pytest.mark.parametrize(
    ("command", "is_ours"),
    [
        ("python -m trainer train run.toml", True),
        ("python -mtrainer train run.toml", True),
        ("python3 -um trainer train", True),
        ("python3 -X dev -Oumtrainer train", True),
        ("python -m trainer.__main__ train", True),
        ("python /opt/bin/torchrun --nproc-per-node 8 -m trainer train", True),
        ("python -m torch.distributed.run --module trainer train", True),
        ("python torchrun --module=trainer train", True),
        ("python -m trainer plot run", False),
        ("python -m trainers train", False),
        ("python train.py --format trainer train", False),
        ("vim trainer train", False),
        ("python -m", False),
    ],
)
def test_the_trainer_is_known_however_its_module_is_named(command: str, is_ours: bool) -> None:
    assert jobs.is_trainer(tuple(command.split())) == is_ours


def test_a_node_of_hyperpod_is_found_by_its_address_or_its_id() -> None:
    head = [{"InstanceId": "i-1", "CustomerIpAddress": "10.1.0.1"}]
    train = [{"InstanceId": "i-2", "CustomerIpAddress": "10.1.0.2"}]
    config = {
        "InstanceGroups": [
            {"Name": "head", "InstanceType": "ml.m5.large", "Instances": head},
            {"Name": "train", "InstanceType": "ml.p5.48xlarge", "Instances": train},
        ]
    }
    expected = {"group": "train", "type": "p5.48xlarge", "id": "i-2"}
    assert instance.parse_hyperpod(config, "i-2", set()) == expected
    assert instance.parse_hyperpod(config, None, {"127.0.0.1", "10.1.0.2"}) == expected
    assert instance.parse_hyperpod(config, None, {"10.1.0.3"}) == {}


def test_own_addresses_from_the_kernels_table() -> None:
    text = (
        "Local:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.1.0.0\n        /24 link UNICAST\n"
        "     |-- 10.1.0.17\n        /32 host LOCAL\n     |-- 127.0.0.1\n        /32 host LOCAL\n"
    )
    assert instance.parse_addresses(text) == {"10.1.0.17", "127.0.0.1"}


def test_sysctl_files_in_both_spellings() -> None:
    text = (
        "# a comment\n; another\nvm.swappiness=10\n-net.ipv4.tcp_rmem = 4096  87380\t6291456\n"
        "net/ipv4/conf/eth0.1/forwarding = 1\nbroken\n"
    )
    assert kernel.parse_sysctl_file(text) == {
        "vm.swappiness": "10",
        "net.ipv4.tcp_rmem": "4096 87380 6291456",
        "net.ipv4.conf.eth0/1.forwarding": "1",
    }


def test_module_options_with_quotes_continuations_and_dashes() -> None:
    text = (
        "# START, AUTO GENERATED BY AWS FSxL CONFIGURE EFA SCRIPT, DO NOT MODIFY\n"
        'options libcfs cpu_npartitions=4 cpu_pattern="0[0-11] 1[12-23]"\n'
        "options ptlrpc ptlrpcd_per_cpt_max=64\noptions ptlrpc \\\n  ptlrpcd_per_cpt_max=32\noptions snd-pcsp index=-2\n"
        "blacklist nouveau\n"
    )
    assert kernel.parse_modprobe_file(text) == {
        "libcfs": {"cpu_npartitions": "4", "cpu_pattern": "0[0-11] 1[12-23]"},
        "ptlrpc": {"ptlrpcd_per_cpt_max": "32"},
        "snd_pcsp": {"index": "-2"},
    }


def test_lines_of_limits_files() -> None:
    text = "#<domain> <type> <item> <value>\n* soft memlock unlimited # all\n@hpc hard nofile 131072\nroot -\n"
    assert kernel.parse_limit_file(text) == [
        ["*", "soft", "memlock", "unlimited"],
        ["@hpc", "hard", "nofile", "131072"],
    ]


def test_what_the_kernel_was_started_with() -> None:
    found = machine.parse_cmdline('quiet intel_idle.max_cstate=1 dyndbg="file a.c +p" quiet=2\n')
    assert found == {"quiet": "2", "intel_idle.max_cstate": "1", "dyndbg": "file a.c +p"}


@pytest.mark.parametrize(("text", "count"), [("0-191\n", 192), ("0-2,5", 4), ("0", 1), ("", None), ("all", None)])
def test_threads_online(text: str, count: int | None) -> None:
    assert machine.count_of(text) == count


def test_the_start_of_a_process_whose_name_holds_spaces_and_parentheses() -> None:
    assert scene.start_ticks("1 (a) b (c)) S 0 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 2531 17 3") == 2531


def test_mount_points_with_spaces() -> None:
    assert scene.parse_mounts("/dev/sda1 /mnt/my\\040data ext4 rw,noatime 0 0\n") == [
        scene.Mount("/dev/sda1", "/mnt/my data", "ext4", ("rw", "noatime"))
    ]
