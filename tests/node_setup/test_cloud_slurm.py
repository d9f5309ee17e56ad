"""A stack's Slurm on nodes of the lab, from their boots on. Real: Slurm with slurmdbd, MariaDB, munge, the agent. Not real:
systemd, the volume's file system, and Secrets Manager, in whose place a program keeps the secret in a folder that all nodes
share."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lustrain.cluster import NodeGroup, to_json
from node_setup.agent.owned import AGENT
from node_setup.agent.slurm import paths
from node_setup.slurm import dynamic
from node_setup.slurm.conf import SCHEDULER_PARAMETERS
from rehearsal.lab import instance
from rehearsal.lab import slurm as lab_slurm
from rehearsal.lab.node import Node
from rehearsal.lab.nodes import Lab, why_not
from rehearsal.lab.slurm import QUICK, UNHELD, Slurm, bring_packages
from tests.conftest import require
from tests.lab.training import ROOT, VARIABLES, assert_equals_an_undisturbed_run
from tests.launch.test_launch_slurm import Place
from tests.node_setup.slurm_machines import cluster
from tests.processes import wait_until

pytestmark = pytest.mark.slow

SETTINGS = {**QUICK, **UNHELD}
SECRET = "arn:aws:secretsmanager:us-west-2:123456789012:secret:demo-munge-a1b2c3"
VOLUME = "vol-0123456789abcdef0"
GROUPS = {"train": NodeGroup(type="c7i.24xlarge", count=3)}
FOLDER = instance.SHARED
AWS = f"""#!/bin/sh
echo "$*" >>{FOLDER}/calls
case "$1" in autoscaling | ec2) exec /usr/bin/python3 {FOLDER}/auto_scaling.py "$@" ;; esac
case "$2" in
get-secret-value)
  [ ! -e {FOLDER}/secret ] || exec cat {FOLDER}/secret
  echo "Secrets Manager can't find the specified secret value for staging label: AWSCURRENT" >&2
  exit 254 ;;
put-secret-value) cat >{FOLDER}/.secret && mv {FOLDER}/.secret {FOLDER}/secret ;;
esac
"""
AUTO_SCALING = f"""
import json, os, subprocess, sys
path = "{FOLDER}/group"
group = json.load(open(path))
verb, value = sys.argv[2], dict(zip(sys.argv, sys.argv[1:]))
if verb == "describe-auto-scaling-groups":
    live = [
        dict(InstanceId=key, LifecycleState=one["state"], ProtectedFromScaleIn=True)
        for key, one in group["machines"].items()
    ]
    tags = [dict(Key="lustrain:group", Value="train")]
    one = dict(AutoScalingGroupName="demo-train-gang-1", DesiredCapacity=group["desired"], MaxSize=3, Instances=live, Tags=tags)
    print(json.dumps(dict(AutoScalingGroups=[one])))
elif verb == "describe-instances":
    faces = [
        dict(InstanceId=key, NetworkInterfaces=[dict(PrivateIpAddress=one["address"])])
        for key, one in group["machines"].items()
    ]
    print(json.dumps(dict(Reservations=[dict(Instances=faces)])))
elif verb == "describe-scaling-activities":
    print(json.dumps(dict(Activities=group["activities"])))
else:
    if verb == "set-desired-capacity":
        group["desired"] = int(value["--desired-capacity"])
    else:
        one = group["machines"][value["--instance-id"]]
        group["desired"] -= 1
        busy = ["squeue", "--noheader", "--states=R,CG", "--nodelist=" + one["node"]]
        one.update(state="Terminating:Wait", jobs=subprocess.run(busy, capture_output=True, text=True).stdout)
    with open(path + ".new", "w") as file:
        json.dump(group, file)
    os.rename(path + ".new", path)
"""
"""An Auto Scaling group: the test launches what it wants, and ends what it was told to end."""
CLUSTER = cluster(
    {"train": {"type": "c7i.24xlarge", "count": 3, "partition": "train"}},
    {"controller": None},
    name="demo",
    backend="ec2",
    region="us-west-2",
    nodes={"auto_scaling_groups": ["demo-train-gang-1"]},
    reach={"via": "ssm"},
    runs_uri=f"{lab_slurm.SHARED}/runs",
    capacity={"mode": "spot"},
)
IDLE_MINUTES = 0.1
GONE = "[Service]\nEnvironment=LUSTRAIN_SLURM_GONE_SECONDS=20\n"


class Stack:
    """The nodes of a stack: the first is the controller."""

    def __init__(
        self,
        lab: Lab,
        agent: bytes,
        *,
        to_zero: Mapping[str, int] = {},
        settings: Mapping[str, str] = SETTINGS,
        records: dynamic.Records | None = None,
    ) -> None:
        self.lab = lab
        self._document = dynamic.document(
            "demo", GROUPS, settings, to_zero=to_zero, idle_minutes=IDLE_MINUTES, records=records
        )
        self.slurm = Slurm(lab)
        self._agent = agent
        for node in lab.nodes:
            self.deploy(node)

    def deploy(self, node: Node, group: str = "train") -> None:
        """Leave on a new machine what its image, user data and bundle would."""
        controls = node is self.lab.nodes[0]
        bring_packages(node)
        duty = "controller" if controls else "client" if group == "login" else "compute"
        part = {"duty": duty, "host": "demo-controller", "munge_secret": SECRET}
        part |= {"address": self.lab.nodes[0].address, "state_volume": VOLUME if controls else None}
        told: dict[str, object] = {"cluster": "demo", "region": "us-west-2"}
        told |= {"group": "controller" if controls else group, "instance_type": "c7i.24xlarge", "capacity": "spot"}
        node.write("/etc/lustrain/node.json", json.dumps({**told, "zone_id": "usw2-az1", "slurm": part}))
        node.write("/opt/lustrain/bundle/slurm.json", json.dumps(self._document))
        node.write("/usr/local/bin/aws", AWS, 0o755)
        node.write("/etc/systemd/system/lustrain-slurm.service.d/gone.conf", GONE)
        packed = Path(f"/proc/{node.pid}/root{AGENT}")
        packed.parent.mkdir(parents=True, exist_ok=True)
        packed.write_bytes(self._agent)

    def boot(self, node: Node) -> subprocess.CompletedProcess[str]:
        command = ("/usr/bin/python3", "-I", "-S", AGENT, "slurm-boot", "--request", "/opt/lustrain/bundle/slurm.json")
        return node.exec(*command, check=False, timeout=900)

    def statuses(self, node: Node) -> dict[str, str]:
        """Boot a node and return what its steps did, the last one's where a setting has several. AssertionError."""
        done = self.boot(node)
        assert done.returncode == 0, done.stderr
        return {row["setting"]: row["status"] for row in json.loads(done.stdout)["rows"]}

    def checks(self, node: Node) -> dict[str, str]:
        done = node.exec("/usr/bin/python3", "-I", "-S", AGENT, "verify", "--tier", "facts", check=False)
        return {one["check"]: one["status"] for one in json.loads(done.stdout)["results"]}

    def record(self, job: int, node: Node | None = None) -> str:
        """What accounting says of a job, asked on the controller or on that node."""
        words = ("sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job}", "--format=state,exitcode")
        return (node or self.lab.nodes[0]).exec(*words, check=False).stdout.strip()

    def show(self, node: str) -> str:
        return self.slurm.call("scontrol", "show", "node", "--oneliner", node, check=False).stdout


def saved(controller: Node, since: str) -> bool:
    """Whether slurmctld has written down its jobs since that file was made."""
    return controller.exec("test", "/var/spool/slurmctld/job_state", "-nt", since, check=False).returncode == 0


@pytest.fixture
def lab() -> Iterator[Lab]:
    require(why_not() is None, str(why_not()))
    require(lab_slurm.why_not() is None, str(lab_slurm.why_not()))
    with Lab(4, "cpu", metadata=True) as lab:
        yield lab


@pytest.fixture
def stack(agent: Path, lab: Lab) -> Stack:
    require(lab_slurm.why_not(accounting=True) is None, str(lab_slurm.why_not(accounting=True)))
    return Stack(lab, agent.read_bytes(), records=dynamic.Records(keep_months=12))


def test_a_slurm_of_a_stack_outlives_nodes_and_controller(stack: Stack) -> None:
    lab, slurm = stack.lab, stack.slurm
    controller, node2, node3, node4 = lab.nodes
    early = node2.start(
        "/usr/bin/python3", "-I", "-S", AGENT, "slurm-boot", "--request", "/opt/lustrain/bundle/slurm.json"
    )
    wait_until(lambda: controller.exists(f"{FOLDER}/calls"))
    instance.attach_volume(controller, VOLUME)
    assert stack.statuses(controller)["slurm.state-volume"] == "changed"
    assert "changed" not in stack.statuses(controller).values(), "a second boot changes nothing"
    for node in (node3, node4):
        stack.statuses(node)
    assert early.wait(300) == 0, "it waited for the key"
    slurm.wait(dict.fromkeys(("node2", "node3", "node4"), "idle"))
    assert "AvailableFeatures=train,c7i.24xlarge,spot,usw2-az1" in stack.show("node2")
    key = base64.b64decode(controller.read(f"{FOLDER}/secret"))
    assert len(key) == 1024
    assert key[:12].hex() not in controller.read(f"{FOLDER}/calls").encode().hex()
    checks = stack.checks(controller)
    assert (stack.checks(node2)["slurm-node"], checks["slurm-state"], checks["slurm-accounting"]) == ("ok", "ok", "ok")
    assert controller.exec("stat", "-c", "%a %U", paths.DBD_CONF).stdout.strip() == "600 slurm"

    script = "#!/bin/sh\nsrun hostname\n"
    job = slurm.submit(script, "--nodes=3", "--partition=train")
    wait_until(lambda: slurm.job(job)["JobState"] == "COMPLETED")
    failed = slurm.submit("#!/bin/sh\nexit 7\n", "--partition=train")
    wait_until(lambda: stack.record(failed, node2) == "FAILED|7:0")

    node2.reboot()
    assert not node2.exec("systemctl", "is-active", "slurmd.service", check=False).stdout.startswith("active")
    stack.statuses(node2)
    slurm.wait({"node2": "idle"})

    # A notice drains the node; the machine that gets its name afterwards takes jobs.
    node3.metadata().spot_notice()
    slurm.wait({"node3": "drained"})
    assert "Reason=lustrain: notice of AWS: spot, terminate at" in stack.show("node3")
    assert stack.checks(node3)["slurm-node"] == "failed"
    node3.metadata().clear()
    node3.replace()
    stack.deploy(node3)
    assert stack.statuses(node3)["slurm.predecessor"] == "changed"
    slurm.wait({"node3": "idle"})

    # One that is gone and not replaced is deleted.
    node4.crash()
    slurm.wait({"node4": "down"})
    wait_until(lambda: "NodeName=node4" not in stack.show("node4"))

    # A login runs no jobs, and people submit from it as on the controller.
    node4.replace()
    stack.deploy(node4, "login")
    stack.statuses(node4)
    assert stack.checks(node4)["slurm-node"] == "ok"
    assert node4.exec("srun", "--nodelist=node2", "hostname").stdout == "node2\n"
    script_of_login = "/run/job.sh"
    node4.write(script_of_login, script, 0o755)
    submitted = node4.exec(
        "sbatch", "--parsable", "--output=/dev/null", "--chdir=/", "--nodelist=node2", script_of_login
    )
    wait_until(lambda: slurm.job(int(submitted.stdout))["JobState"] == "COMPLETED")
    assert "node4" not in slurm.states()

    # One that the controller has forgotten comes back by itself.
    slurm.call("scontrol", "delete", "NodeName=node3")
    wait_until(lambda: slurm.states().get("node3") == "idle")

    # Another machine in the controller's place has its queue and its records.
    running = slurm.submit("#!/bin/sh\nsleep 600\n", "--nodelist=node2", "--exclusive")
    waiting = slurm.submit(script, "--nodelist=node2")
    wait_until(lambda: slurm.job(running)["JobState"] == "RUNNING")
    # slurmctld writes its queue down some seconds after a change.
    controller.exec("touch", "/run/marker")
    wait_until(lambda: saved(controller, "/run/marker"))
    disks = controller.read(instance.DISKS)
    controller.replace()
    stack.deploy(controller)
    instance.attach_volume(controller, VOLUME, disks)
    assert stack.statuses(controller)["slurm.state-volume"] == "ok"
    slurm.wait({"node3": "idle"})
    assert (slurm.job(running)["JobState"], slurm.job(waiting)["JobState"]) == ("RUNNING", "PENDING")
    slurm.call("scancel", str(running))
    wait_until(lambda: slurm.job(waiting)["JobState"] == "COMPLETED")
    assert (stack.record(job), stack.record(failed)) == ("COMPLETED|0:0", "FAILED|7:0")
    wait_until(lambda: stack.record(waiting) == "COMPLETED|0:0")
    assert stack.checks(controller)["slurm-accounting"] == "ok"


def test_job_goes_on_where_its_old_script_still_lives(agent: Path, lab: Lab) -> None:
    """Its node was cut off until Slurm counted it down, and comes back once Slurm may start the job there again. Slurm kills
    the old script at once then; an epilog keeps what it runs in, so that the new one always comes too early."""
    slow = {
        "SchedulerParameters": f"{QUICK['SchedulerParameters']},{SCHEDULER_PARAMETERS}",
        "TaskEpilog": f"{FOLDER}/linger",
    }
    stack = Stack(lab, agent.read_bytes(), settings={**SETTINGS, **slow})
    slurm, (controller, node2, *_) = stack.slurm, lab.nodes
    controller.write(f"{FOLDER}/linger", "#!/bin/sh\nwhile [ -e /run/linger ]; do sleep 0.2; done\n", 0o755)
    controller.write("/etc/systemd/system/lustrain-slurm.service.d/gone.conf", "")
    instance.attach_volume(controller, VOLUME)
    stack.statuses(controller)
    stack.statuses(node2)
    slurm.wait({"node2": "idle"})

    job = slurm.submit(f"#!/bin/sh\n[ -e {FOLDER}/go ] || exec sleep 3600\n", "--partition=train", "--requeue")
    wait_until(lambda: slurm.job(job)["JobState"] == "RUNNING")
    node2.write("/run/linger", "")
    node2.link(False)
    slurm.wait({"node2": "down"})
    wait_until(lambda: slurm.job(job)["JobState"] == "PENDING" and slurm.job(job)["Reason"] != "BeginTime")
    controller.write(f"{FOLDER}/go", "")
    node2.link(True)
    wait_until(lambda: "Reason=Duplicate jobid" in stack.show("node2"))
    node2.exec("rm", "/run/linger")
    wait_until(lambda: slurm.job(job)["JobState"] == "COMPLETED", 300)
    slurm.wait({"node2": "idle"})


class LoginPlace(Place):
    """`fab` as the docs have it: on a login machine, as a user without rights, whose home all nodes share."""

    variables: Mapping[str, str] = {**VARIABLES, "LUSTRAIN_CLUSTER": f"{lab_slurm.SHARED}/cluster.json"}


def test_fab_train_on_a_login_runs_to_its_end(agent: Path) -> None:
    require(why_not() is None, str(why_not()))
    require(lab_slurm.why_not() is None, str(lab_slurm.why_not()))
    with Lab(4, "cpu", folders=[ROOT, sys.prefix, sys.base_prefix], metadata=True) as lab:
        stack = Stack(lab, agent.read_bytes())
        controller, *workers, login = lab.nodes
        stack.deploy(login, "login")
        instance.attach_volume(controller, VOLUME)
        for node in lab.nodes:
            stack.statuses(node)
            node.exec("useradd", "--uid", "4242", "--no-create-home", "--home-dir", lab_slurm.SHARED, "ubuntu")
            # This machine's interpreter may lie in the home of root.
            node.exec("chmod", "711", "/root")
        login.exec("chown", "ubuntu:", lab_slurm.SHARED)
        stack.slurm.wait({node.name: "idle" for node in workers})

        place = LoginPlace(lab, stack.slurm, login, "ubuntu")
        place.run = lab.shared / "runs/first"
        place.write()
        (lab.shared / "cluster.json").write_text(json.dumps(to_json(CLUSTER)))
        job = int(place.fab("train", "config.toml", "--name", "first", "--nodes", "2", "--nproc", "1")["job"])
        place.committed()
        state = place.fab("status", "first")
        assert (state["on"], state["submitted"]["slurm"]["job"]) == ("slurm", job)
        place.go()
        assert place.ended(job) == "COMPLETED", place.log()
        assert_equals_an_undisturbed_run(place.run)
        assert "UserId=ubuntu" in stack.slurm.call("scontrol", "show", "job", str(job)).stdout
        assert place.records()[-1]["nodes"] == [node.name for node in workers]
        assert any("stopped" in line["text"] for line in place.fab("logs", "first")["lines"])
        assert place.fab("report", "first")


def test_group_goes_to_zero_and_comes_back_with_jobs(agent: Path, lab: Lab) -> None:
    stack = Stack(lab, agent.read_bytes(), to_zero={"train": 2})
    slurm, (controller, node2, node3, _) = stack.slurm, lab.nodes

    def group() -> dict[str, Any]:
        return json.loads(controller.read(f"{FOLDER}/group"))  # type: ignore[no-any-return]

    def be(**changed: object) -> None:
        controller.write(f"{FOLDER}/group", json.dumps(changed))

    be(desired=0, machines={}, activities=[])
    controller.write(f"{FOLDER}/auto_scaling.py", AUTO_SCALING)
    instance.attach_volume(controller, VOLUME)
    stack.statuses(controller)

    # A job that waits brings machines, which stay while it runs and longer than idle ones would.
    job = slurm.submit("#!/bin/sh\nsrun sleep 20\n", "--nodes=2", "--partition=train", "--exclusive", "--mem=0")
    wait_until(lambda: group()["desired"] == 2)
    launched = {
        f"i-{node.name}": {"address": node.address, "node": node.name, "state": "InService"} for node in (node2, node3)
    }
    be(desired=2, machines=launched, activities=[])
    for node in (node2, node3):
        stack.statuses(node)
    wait_until(lambda: slurm.job(job)["JobState"] == "COMPLETED")

    # Idle ones end, each without a job, and Slurm forgets them.
    wait_until(lambda: [one["state"] for one in group()["machines"].values()] == ["Terminating:Wait"] * 2)
    assert (group()["desired"], [one["jobs"] for one in group()["machines"].values()]) == (0, ["", ""])
    assert "Reason=lustrain: idle, its machine ends" in stack.show("node2")
    for node in (node2, node3):
        node.crash()
    wait_until(lambda: slurm.states() == {})

    # Capacity that is not there is told to the job, and not asked for again at once.
    be(desired=0, machines={}, activities=[])
    job = slurm.submit("#!/bin/sh\nsrun hostname\n", "--nodes=1", "--partition=train")
    wait_until(lambda: group()["desired"] == 1)
    failed = {"ActivityId": "a", "StatusCode": "Failed", "StatusMessage": "InsufficientInstanceCapacity - none here"}
    be(desired=1, machines={}, activities=[failed])
    wait_until(lambda: group()["desired"] == 0)
    shown = slurm.call("scontrol", "show", "job", str(job)).stdout
    assert "AdminComment=lustrain: group train gets no more machines: InsufficientInstanceCapacity" in shown
