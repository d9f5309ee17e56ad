"""Flags of `fab train` make a request, and every mistake in them is one line, before anything is written."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from launch import backends
from launch.backends import kubernetes, slurm
from launch.backends.ranks import first_port, late_s, ranks_environment
from launch.flags import TrainFlags
from launch.request import NODE_AGENT, RunRequest, resolve_request, uri_of
from launch.supervisor.executor import launch_port
from lustrain import cluster as contract
from lustrain.cluster import Cluster
from lustrain.problem import UserError
from tests.conftest import require
from tests.lab.training import config as settings
from tests.node_setup.agents import interpreter
from trainer.config import Config, load
from trainer.node import launcher

FOLDER = Path("/home/me")
EC2 = {"backend": "ec2", "slurm": None, "nodes": {"auto_scaling_groups": ["a"]}}


def cluster(**more: Any) -> Cluster:
    worker = {"type": "p5.48xlarge", "count": 4, "gpus": 8, "partition": "train"}
    whole = {
        "name": "lab",
        "backend": "hyperpod-slurm",
        "nodes": {"hyperpod_cluster": "lab"},
        "reach": {"via": "ssm"},
        "groups": {"train": worker, "login": {"type": "m5.large", "count": 1, "role": "login"}},
        "runs_uri": "s3://team-checkpoints/runs/",
        "capacity": {"mode": "on-demand"},
        "slurm": {"account": "research", "qos": "high"},
    }
    return contract.parse({**whole, **more})


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has as many as its environment says."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")


def config(tmp_path: Path, **train: object) -> Config:
    (tmp_path / "config.toml").write_text(settings("runs/first", **train))
    return load(tmp_path / "config.toml")


def resolve(
    flags: TrainFlags, settings: Config, on: Cluster | None, folder: Path = FOLDER, image: tuple[str, str] = ("", "")
) -> RunRequest:
    return resolve_request(flags, settings, on, backends.load_all(), folder, image)


def request_of(
    tmp_path: Path, on: Cluster | None = None, train: dict[str, object] | None = None, **flags: object
) -> RunRequest:
    given = dataclasses.replace(TrainFlags("config.toml"), **flags)  # type: ignore[arg-type]
    return resolve(given, config(tmp_path, **(train or {})), on)


def test_without_cluster_it_is_this_machine_with_all_its_devices(tmp_path: Path) -> None:
    request = request_of(tmp_path)
    assert (request.backend, request.run, request.policy.ranks_per_node, request.nodes) == (
        "local",
        "/home/me/runs/first",
        2,
        1,
    )
    assert 'stop_uri = "/home/me/runs/first/launch/stop"' in request.config
    assert 'uri = "/home/me/runs/first"' in request.config


def test_cluster_says_where_run_lies_ranks_a_node_and_who_pays(tmp_path: Path) -> None:
    on = cluster(capacity={"mode": "capacity-block", "ends_at": "2027-03-01T11:30:00Z"})
    request = request_of(tmp_path, on, {"global_batch": 64}, name="second", nodes="2-3", spare="1")
    assert (request.backend, request.run, request.nodes) == ("slurm", "s3://team-checkpoints/runs/second", 4)
    policy = request.policy
    assert (policy.min_nodes, policy.max_nodes, policy.ranks_per_node) == (2, 3, 8)
    assert policy.scheduler_can_replace_nodes
    options = request.options
    payer = (options.partition, options.account, options.qos, options.gpus)
    assert payer == ("train", "research", "high", 8)
    assert "metadata = true" in request.config
    assert 'deadline = "2027-03-01T11:00:00+00:00"' in request.config


@pytest.mark.parametrize(
    ("flags", "backend", "mode", "hours", "rented"),
    [
        ({}, EC2, "spot", 1, True),
        ({"give_up": "6"}, EC2, "spot", 6, True),
        ({}, EC2, "owned", 6, False),
        # Slurm's own limit is shorter.
        ({}, {}, "on-demand", 6, True),
        ({"on": "local", "nodes": "1"}, EC2, "spot", 6, False),
    ],
)
def test_wait_is_shorter_on_rented_nodes(
    tmp_path: Path, flags: dict[str, str], backend: dict[str, Any], mode: str, hours: int, rented: bool
) -> None:
    where = cluster(**backend, capacity={"mode": mode})
    given: dict[str, Any] = {"name": "first", "nodes": "2", "nproc": "1", **flags}
    request = resolve(TrainFlags("config.toml", **given), config(tmp_path), where)
    assert (request.max_wait_s, request.policy.nodes_are_rented) == (hours * 3600, rented)


def test_what_the_settings_say_stays(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        settings("s3://mine/run", global_batch=64) + '[interrupt]\nmetadata = false\nstop_uri = "/stop"\n'
    )
    request = resolve(TrainFlags("config.toml"), load(tmp_path / "config.toml"), cluster())
    assert request.run == "s3://mine/run"
    assert "metadata = false" in request.config
    assert 'stop_uri = "/stop"' in request.config


def test_cluster_gives_its_queue_unless_the_settings_name_one(tmp_path: Path) -> None:
    url = "https://sqs.us-east-1.amazonaws.com/123456789012/llm-interruptions"
    where = cluster(interruption_queue=url)
    for own, expected in (("", f'queue = "{url}"'), ('[interrupt]\nqueue = ""\n', 'queue = ""')):
        (tmp_path / "config.toml").write_text(settings("s3://mine/run") + own)
        request = resolve(TrainFlags("config.toml", nproc="1"), load(tmp_path / "config.toml"), where)
        assert expected in request.config


def test_a_run_is_named_by_its_place_or_under_the_clusters_runs(tmp_path: Path) -> None:
    assert uri_of("runs/a/", None, FOLDER) == "/home/me/runs/a"
    assert uri_of("s3://b/c/", None, FOLDER) == "s3://b/c"
    assert uri_of("a", cluster(), FOLDER) == "s3://team-checkpoints/runs/a"
    assert request_of(tmp_path, name="second").run == "/home/me/runs/second"


@pytest.mark.parametrize(
    ("shard", "nodes", "nproc", "line"),
    [
        ("4", "1-8", "2", ""),
        ("0", "3", "2", ""),
        ("4x2", "1-8", "2", ""),
        ("0x2", "3", "2", ""),
        ("1x2", "4", "16", ""),
        (
            "1x2",
            "5",
            "16",
            "--nodes = '5': 80 ranks are more than the 32 micro-batches of a step for parallel.tensor = 2",
        ),
        (
            "4x2",
            "1-3",
            "2",
            "--nodes = '1-3': these nodes, with 2 ranks each, make no multiple of parallel.shard = 4 x parallel.tensor = 2; "
            "allowed: multiples of 4 up to 32",
        ),
        (
            "8",
            "1-3",
            "2",
            "--nodes = '1-3': these nodes, with 2 ranks each, make no multiple of parallel.shard = 8",
        ),
        ("3", "1", "2", "--nodes = '1': these nodes, with 2 ranks each, make no multiple of parallel.shard = 3"),
    ],
)
def test_nodes_that_make_no_replica_are_one_line(tmp_path: Path, shard: str, nodes: str, nproc: str, line: str) -> None:
    (tmp_path / "config.toml").write_text(settings("runs/first", global_batch=64))
    shard, _, tensor = shard.partition("x")
    sharded = load(tmp_path / "config.toml", [f"parallel.shard={shard}", f"parallel.tensor={tensor or 1}"])
    flags = TrainFlags("config.toml", on="slurm", nodes=nodes, nproc=nproc)
    with pytest.raises(UserError) if line else nullcontext() as refused:
        policy = resolve(flags, sharded, None).policy
        assert policy.usable_nodes(policy.max_nodes)
    assert not line or str(refused.value.problems[0]).startswith(line)


def test_run_below_a_mounted_bucket_is_refused(tmp_path: Path) -> None:
    on = cluster(s3_mounts=[{"path": "/s3", "bucket": "team-data", "prefix": "a/"}])
    (tmp_path / "config.toml").write_text(settings("/s3/runs/first"))
    flags = TrainFlags("config.toml", on="slurm", nproc="2")
    with pytest.raises(UserError) as refused:
        resolve(flags, load(tmp_path / "config.toml"), on)
    assert str(refused.value.problems[0]) == (
        "run.uri = '/s3/runs/first': lies on the bucket mounted at /s3, where files cannot be renamed or appended to; "
        "fix: write s3://team-data/a/runs/first"
    )
    (tmp_path / "config.toml").write_text(settings("/s3x/runs/first"))
    assert resolve(flags, load(tmp_path / "config.toml"), on).run == "/s3x/runs/first"


def test_ranks_of_the_cluster_are_shown_where_too_many(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        request_of(tmp_path, cluster(), {"global_batch": 4, "micro_batch": 1})
    assert str(refused.value.problems[0]).startswith("--nproc = 8: 8 ranks are more than the 4 micro-batches of a step")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"on": "mars"}, "--on = 'mars': is not a place to train at; allowed: local, slurm"),
        ({"on": "ssh"}, "--on = 'ssh': needs a Cluster"),
        ({"nodes": "0"}, "--nodes = '0': is not a number of nodes"),
        ({"nodes": "3-2"}, "--nodes = '3-2': is not a number of nodes"),
        ({"detach": True}, "--detach = True: a run on this machine ends with its fab train"),
        ({"nodes": "2"}, "--nodes = '2': is more than this machine; fix: --nproc sets its ranks"),
        ({"spare": "x"}, "--spare = 'x': must be a whole number"),
        ({"nproc": "3"}, "--nproc = '3': 3 ranks are more than the 2 micro-batches of a step; allowed: 1 to 2; fix: "),
        ({"on": "slurm", "nproc": "1", "nodes": "3-8"}, "--nodes = '3-8': 3 ranks are more than the 2 micro-batches"),
        ({"nproc": "0"}, "--nproc = '0': must be a whole number"),
        ({"name": "../up"}, "--name = '../up': is not a plain name"),
        ({"time": "1"}, "--time = '1': only valid with --on slurm"),
        ({"on": "slurm", "nproc": "1", "time": "soon"}, "--time = 'soon': is not a time of Slurm"),
        ({"give_up": "-1"}, "--give-up = '-1': must be a number"),
        (
            {"on": "slurm", "nproc": "1", "nodes": "1-2", "grow_after": "soon"},
            "--grow-after = 'soon': must be a number",
        ),
        ({"on": "slurm", "nproc": "1", "grow_after": "5"}, "--grow-after = '5': only valid with --nodes N-M"),
        ({"on": "slurm", "nproc": "1", "account": "a b"}, "--account = 'a b': is not a name of Slurm"),
        ({"on": "slurm"}, "--nproc = None: without a Cluster the GPUs of a node are not known; fix: give the ranks"),
        ({"on": "slurm", "nproc": "1", "set_uri": "s3://b/a b"}, "run.uri = 's3://b/a b': holds ' '"),
    ],
)
def test_a_wrong_flag_is_one_line(tmp_path: Path, flags: dict[str, str], line: str) -> None:
    given = dict(flags)
    (tmp_path / "config.toml").write_text(settings(given.pop("set_uri", "runs/first")))
    wrong = dataclasses.replace(TrainFlags("config.toml"), **given)  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        resolve(wrong, load(tmp_path / "config.toml"), None)
    (only,) = caught.value.problems
    assert only.startswith(line)


def test_ranks_of_this_machine_that_make_no_replica_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(settings("runs/first", global_batch=64))
    with pytest.raises(UserError) as refused:
        resolve(TrainFlags("config.toml", nproc="2"), load(tmp_path / "config.toml", ["parallel.shard=4"]), None)
    (line,) = refused.value.problems
    assert line.startswith("--nproc = 2: is no multiple of parallel.shard = 4; allowed: multiples of 4")


def test_fix_names_the_tensor_sizes_that_divide_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(settings("runs/first", global_batch=64))
    with pytest.raises(UserError) as refused:
        resolve(TrainFlags("config.toml", nproc="4"), load(tmp_path / "config.toml", ["parallel.tensor=3"]), None)
    assert [(line.path, line.fix) for line in refused.value.problems] == [("--nproc", "parallel.tensor = 1 or 2 or 4")]


def test_setting_of_ddp_beside_shards_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(settings("runs/first"))
    sharded = load(tmp_path / "config.toml", ["parallel.shard=2", "parallel.bucket_mb=7.0"])
    with pytest.raises(UserError) as refused:
        resolve(TrainFlags("config.toml", nproc="2"), sharded, None)
    assert [line.path for line in refused.value.problems] == ["parallel.bucket_mb"]


def test_a_batch_without_whole_micro_batches_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        request_of(tmp_path, None, {"global_batch": 5})
    assert [line.path for line in caught.value.problems] == ["train.global_batch"]


@pytest.mark.parametrize(
    ("more", "flags", "line"),
    [
        ({}, {"nodes": "5"}, "--nodes = '5': the group has 4 nodes of type p5.48xlarge; allowed: 1 to 4"),
        ({}, {"group": "login"}, "--group = 'login': is not a worker group; allowed: train"),
        (
            {"groups": {name: {"type": "p5.48xlarge", "count": 4, "gpus": 8, "partition": name} for name in "ab"}},
            {},
            "--group = None: the Cluster has several worker groups; allowed: a, b",
        ),
        ({}, {"partition": "test"}, "--partition = 'test': is not a worker group's partition; allowed: train"),
    ],
)
def test_what_the_cluster_does_not_have_is_one_line(
    tmp_path: Path, more: dict[str, object], flags: dict[str, object], line: str
) -> None:
    with pytest.raises(UserError) as caught:
        request_of(tmp_path, cluster(**more), {"global_batch": 64}, **flags)
    assert caught.value.problems[0].startswith(line)


def test_nodes_of_a_scheduler_are_not_used_over_ssh(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        resolve(TrainFlags("config.toml", on="ssh"), config(tmp_path, global_batch=64), cluster())
    assert [line.path for line in caught.value.problems] == ["--on"]


def test_nodes_of_ec2_are_slurms_where_the_stack_has_one(tmp_path: Path) -> None:
    with_slurm = {**EC2, "slurm": {"controller": "10.0.0.9"}}
    names = [
        request_of(tmp_path, cluster(**more), {"global_batch": 64}, nodes="2").backend for more in (EC2, with_slurm)
    ]
    assert names == ["ssh", "slurm"]


def test_cluster_that_no_backend_serves_is_one_line(tmp_path: Path) -> None:
    known = {"local": backends.load_all()["local"]}
    with pytest.raises(UserError) as caught:
        resolve_request(TrainFlags("config.toml"), config(tmp_path), cluster(**EC2), known, FOLDER)
    assert [line.path for line in caught.value.problems] == ["--on"]


EKS = {
    "backend": "hyperpod-eks",
    "region": "us-east-2",
    "slurm": None,
    "kubernetes": {"context": "llm", "namespace": "research", "service_account": "trainer", "claims": {"/fsx": "fsx"}},
}
IMAGE = ("example.com/trainer@sha256:" + "0" * 64, "cuda")


def on_kubernetes(tmp_path: Path, image: tuple[str, str] = IMAGE, **flags: Any) -> RunRequest:
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    worker = {"type": "p5.48xlarge", "count": 4, "gpus": 8, "efa": 32, "labels": {"group": "train"}, "taints": [taint]}
    given = dataclasses.replace(TrainFlags("config.toml", name="second", nodes="2"), **flags)
    on = cluster(**EKS, groups={"train": worker})
    return resolve(given, config(tmp_path, global_batch=64), on, image=image)


def test_job_of_kubernetes_has_what_cluster_says_of_its_nodes(tmp_path: Path) -> None:
    request = on_kubernetes(tmp_path, queue="team", priority="high")
    _, job = kubernetes.objects(request, {"LUSTRAIN_SILENT_S": "60", "HF_TOKEN": "secret"})
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("trainer", "high")
    assert pod["nodeSelector"] == {"group": "train"}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    assert pod["terminationGracePeriodSeconds"] == 120
    limits = {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 32, "hugepages-2Mi": "5120Mi"}
    assert container["resources"]["limits"] == limits
    assert {"name": "claim-0", "mountPath": "/fsx"} in container["volumeMounts"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert variables == {
        "AWS_REGION": "us-east-2",
        "LUSTRAIN_CACHE": "/tmp/lustrain",
        "LUSTRAIN_SILENT_S": "60",
        "NCCL_NET_PLUGIN": "ofi",
    }
    assert container["args"][-1] == "s3://team-checkpoints/runs/second/launch/config.toml"
    assert container["image"] == IMAGE[0]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"image": ("", "")}, "--image = 'image.json': names no image by its digest"),
        ({"image": (IMAGE[0].partition("@")[0] + ":1", "")}, "--image = 'image.json': names no image by its digest"),
        ({"image": (IMAGE[0], "cpu")}, "--image = 'image.json': is built for cpu, and the group has nodes with 8 GPUs"),
        ({"spare": "1"}, "--spare = '1': only valid with --on slurm"),
        ({"nodes": "1-2", "queue": "team"}, "--queue = 'team': Kueue admits a run of one size"),
        ({"nodes": "1-2", "detach": True}, "--detach = True: a run of N to M nodes is supervised by its fab train"),
        ({"name": "Big"}, "--name = 'Big': cannot be the name of a Job"),
        ({"time": "1"}, "--time = '1': only valid with --on slurm"),
    ],
)
def test_what_no_job_of_kubernetes_can_be_is_one_line(tmp_path: Path, flags: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        on_kubernetes(tmp_path, **flags)
    (only,) = caught.value.problems
    assert only.startswith(line)


def test_run_of_one_size_is_left_to_its_job_others_are_supervised(tmp_path: Path) -> None:
    for one_size in ("2-2", "2-02"):
        assert not on_kubernetes(tmp_path, nodes=one_size, queue="q").supervised_by_caller
    request = on_kubernetes(tmp_path, nodes="2-4")
    assert (request.supervised_by_caller, request.policy.min_nodes, request.policy.max_nodes) == (True, 2, 4)


def test_nodes_of_an_empty_group_on_eks_come_for_its_pods(tmp_path: Path) -> None:
    empty = {"train": {"type": "p5.48xlarge", "count": 0, "gpus": 8}}
    flags = TrainFlags("config.toml", name="second", nodes="2", image=IMAGE[0])
    settings = config(tmp_path, global_batch=64)
    assert resolve(flags, settings, cluster(**EKS, groups=empty), image=IMAGE).nodes == 2
    with pytest.raises(UserError) as caught:
        resolve(flags, settings, cluster(**EKS | {"backend": "machines"}, groups=empty), image=IMAGE)
    assert "--nodes" in [line.path for line in caught.value.problems]


def test_each_pod_of_a_launch_has_its_node_and_knows_its_rank(tmp_path: Path) -> None:
    nodes = ["ip-10-0-0-7.ec2.internal", "ip-10-0-0-8.ec2.internal"]
    pods = kubernetes.launch_pods(on_kubernetes(tmp_path, nodes="1-2"), 3, nodes, {})
    for index, (pod, node) in enumerate(zip(pods, nodes, strict=True)):
        required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        fields = [{"key": "metadata.name", "operator": "In", "values": [node]}]
        assert required == {"nodeSelectorTerms": [{"matchFields": fields}]}
        (container,) = pod["spec"]["containers"]
        # Notices of AWS are matched by it, and the others find the first pod there.
        assert pod["spec"]["hostname"] == node.partition(".")[0]
        args = launcher.flags().parse_args(container["args"][3:])
        assert (args.node_rank, args.nnodes, args.roster) == (index, 2, ",".join(nodes))
        assert args.master == "ip-10-0-0-7.second:29500"
        assert {"name": "LUSTRAIN_ATTEMPT", "value": "3"} in container["env"]


def test_pods_have_to_see_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(settings("/home/me/run", global_batch=64))
    worker = {"type": "p5.48xlarge", "count": 4, "gpus": 8}
    with pytest.raises(UserError) as caught:
        resolve(TrainFlags("c"), load(tmp_path / "config.toml"), cluster(**EKS, groups={"train": worker}), image=IMAGE)
    assert caught.value.problems[0].startswith("run.uri = '/home/me/run': pods do not see it; allowed: s3://")


@pytest.mark.parametrize(
    ("more", "on", "agent"),
    [
        ({"log_group": "/lustrain/lab/train"}, None, "127.0.0.1:25888"),
        ({"log_group": "/lustrain/lab/train"}, "local", ""),
        ({}, None, ""),
    ],
)
def test_progress_goes_to_the_agent_of_a_stack_that_carries_logs(
    tmp_path: Path, more: dict[str, Any], on: str | None, agent: str
) -> None:
    request = resolve(
        TrainFlags("c", on=on, name="first", nproc="2"), config(tmp_path, global_batch=64), cluster(**more)
    )
    told = tomllib.loads(request.config)["metrics"]["cloudwatch"]
    assert told["agent"] == agent
    assert (told["cluster"], told["log_group"]) == (("lab", "/lustrain/lab/train") if agent else ("", ""))


def test_settings_keep_progress_from_a_stack(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        settings("runs/first", global_batch=64) + '[metrics.cloudwatch]\nagent = ""\n'
    )
    request = resolve(TrainFlags("c"), load(tmp_path / "config.toml"), cluster(log_group="/lustrain/lab/train"))
    assert tomllib.loads(request.config)["metrics"]["cloudwatch"]["agent"] == ""


@pytest.mark.parametrize(
    ("more", "on", "own", "port"),
    [
        ({"prometheus_port": 28_400}, None, "", 28_400),
        ({"prometheus_port": 28_400}, None, "prometheus_port = 0", 0),
        ({"prometheus_port": 28_400}, "local", "", 0),
        ({}, None, "", 0),
    ],
)
def test_run_on_a_watched_cluster_serves_its_metrics(
    tmp_path: Path, more: dict[str, Any], on: str | None, own: str, port: int
) -> None:
    (tmp_path / "config.toml").write_text(f"{settings('runs/first', global_batch=64)}[metrics]\n{own}\n")
    flags = TrainFlags("c", on=on, name="first", nproc="2")
    request = resolve(flags, load(tmp_path / "config.toml"), cluster(**more))
    assert tomllib.loads(request.config)["metrics"]["prometheus_port"] == port


def test_ports_of_launches_leave_those_of_others_on_nodes() -> None:
    """Those of the CloudWatch agent, and from 28400 on of ranks' metrics."""
    firsts = {first_port("a" * length) for length in range(4000)}
    ports = {launch_port(first, number) for first in (min(firsts), max(firsts)) for number in range(1000)}
    agent = int(NODE_AGENT.rpartition(":")[2])
    assert min(ports) >= 20_000
    assert max(ports) + 1 < min(agent, 28_400)


def test_batch_script_asks_for_nodes_and_holds_no_secret(tmp_path: Path) -> None:
    request = request_of(tmp_path, cluster(), {"global_batch": 64}, nodes="2", spare="1", time="1-12:00:00")
    secret = {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "no", "AWS_REGION": "us-east-1"}
    text = slurm.script(request, "/logs/a", ranks_environment(secret))
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert "--nodes=2-3" in options
    assert {"--gpus-per-node=8", "--partition=train", "--account=research", "--qos=high", "--time=1-12:00:00"} <= {
        *options
    }
    assert "--signal=B:USR1@120" in options
    assert [late_s(dataclasses.replace(request, grace_s=grace)) for grace in (request.grace_s, 20.0)] == [180, 90]
    assert "'late_s': 180" in text
    assert "AWS_SECRET" not in text


def test_batch_script_needs_python_39_alone(tmp_path: Path) -> None:
    """It gets as far as the job's number, which only Slurm sets, whatever a value holds."""
    request = request_of(tmp_path, cluster(), {"global_batch": 64}, nodes="2")
    odd = {"PATH": "/it's \"\"\"'''\\", "AWS_REGION": "é\udc80\r\n#SBATCH --hold\u2028"}
    text = slurm.script(request, "/logs/a", ranks_environment(odd))
    assert "--hold" in text
    oldest = interpreter("3.9")
    require(oldest, "needs a Python 3.9")
    assert oldest is not None
    done = subprocess.run([oldest, "-I", "-"], input=text, capture_output=True, text=True, check=False, env={})
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "KeyError: 'SLURM_JOB_ID'")


def test_array_of_a_sweep_has_a_task_for_each_run(tmp_path: Path) -> None:
    one = request_of(tmp_path, cluster(), {"global_batch": 64}, nodes="2")
    requests = {
        index: dataclasses.replace(one, run=f"/fsx/rates/{name}") for index, name in {0: "a", 1: "b", 4: "c"}.items()
    }
    plan = slurm.BACKEND.plan_array(requests, "/fsx/rates", tmp_path, {}, 2)
    assert plan is not None
    text = plan.files[slurm.ARRAY_SCRIPT]
    options = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")}
    assert {"--array=0,1,4%2", "--job-name=rates", "--comment=/fsx/rates", "--output=/fsx/rates/log-%A_%a"} <= options
    assert [f"'run': '/fsx/rates/{name}'" in text for name in "abc"] == [True] * 3
    # One with more time to save needs its signal earlier.
    other = dataclasses.replace(one, grace_s=999.0)
    assert slurm.BACKEND.plan_array(requests | {5: other}, "/fsx/rates", tmp_path, {}, None) is None


@pytest.mark.parametrize(
    ("uri", "python", "path"),
    [("s3://", None, "run.uri"), ("s3:/", None, "run.uri"), ("runs/first", "/nope/python", "--python")],
)
def test_unusable_run_or_python_is_refused(tmp_path: Path, uri: str, python: str | None, path: str) -> None:
    settings = config(tmp_path)
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"uri": uri})})
    with pytest.raises(UserError) as error:
        resolve(TrainFlags("config.toml", python=python), settings, None, tmp_path)
    assert [problem.path for problem in error.value.problems] == [path]  # type: ignore[attr-defined]


def test_the_record_of_a_request_is_plain_data(tmp_path: Path) -> None:
    assert json.loads(json.dumps(request_of(tmp_path).record()))["nodes"] == {"least": 1, "most": 1, "asked": 1}
