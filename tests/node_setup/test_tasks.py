"""`fab node-…` as a user calls it: what is wrong costs one line and an exit code, and no host is ever guessed."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from fabric import Config, Connection

from lustrain.cluster import to_json
from lustrain.problem import USAGE, UserError
from node_setup import pack
from node_setup.agent.settings import catalog
from node_setup.fleet.flags import Flags
from node_setup.fleet.inventory import Source
from node_setup.fleet.options import DEFAULTS, SECTION, Options, options
from node_setup.fleet.run import packed_agent, prepare
from node_setup.request import Tuning, parse_tuning
from tests.fab import Fab
from tests.node_setup import slurm_machines
from tests.node_setup.test_inventory import described
from tests.ports import own_port

ROOT = Path(__file__).parents[2]
FAB = [sys.executable, "-m", "fabric"]
Called = Callable[..., tuple[object, str, str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """No cluster, no configuration and no keys of whoever runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LUSTRAIN_", "FABRIC_", "SSH_"))}
    return {**kept, "HOME": str(tmp_path)}


@pytest.fixture
def called(environment: dict[str, str], fab: Fab) -> Called:
    """The exit code of `fab`, and what it printed."""

    def call(*words: str) -> tuple[object, str, str]:
        done = fab(*words, environment=environment)
        return done.code, done.out, done.err

    return call


NOBODY = "127.0.0.1:1"
TUNE = f"node-tune --nodes {NOBODY}"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("node-tune", 3, "there is no Cluster to take nodes from; fix: give --cluster FILE"),
        (f"{TUNE} --profile gpu", USAGE, "--profile = 'gpu': no such profile; allowed: efa-gpu"),
        (f"{TUNE} --only sysctl.vm.max_map_cuont", USAGE, "--only = 'sysctl.vm.max_map_cuont'"),
        (f"{TUNE} --skip gpu.perzistence", USAGE, "--skip = 'gpu.perzistence': no such setting"),
        (f"{TUNE} --set sysctl.vm.max_map_count=5", USAGE, "--set sysctl.vm.max_map_count = '5'"),
        (f"{TUNE} --set gpu.persistence", USAGE, "has no value; allowed: ID=VALUE"),
        (f"{TUNE} --set gpu.persistence=on --skip gpu.persistence", USAGE, "contradicts gpu.persistence=off"),
        (f"{TUNE} --limit 0", USAGE, "--limit = '0': must be a whole number; allowed: 1 to 100000"),
        (f"{TUNE} --fail-percent 101", USAGE, "--fail-percent = '101'"),
        (f"{TUNE} --timeout soon", USAGE, "--timeout = 'soon': wrong type; allowed: a number"),
        (f"{TUNE} --key /no/key", USAGE, "--key = '/no/key': No such file or directory"),
        (f"{TUNE} --strict-host-keys", USAGE, "there is no such file, and --strict-host-keys"),
        ("node-tune --cluster /no/cluster.json", USAGE, "--cluster = '/no/cluster.json': No such file"),
        (f"-H {NOBODY} node-tune --local", USAGE, "-H and --nodes, --hosts-file or --local name different nodes"),
        (f"-H {NOBODY},{NOBODY} node-facts", USAGE, "is named twice"),
        (f"node-verify --nodes {NOBODY} --tier slow", USAGE, "--tier = 'slow': unknown; allowed: facts, fast"),
        ("node-reboot --local", USAGE, "this machine cannot wait for its own reboot"),
    ],
)
def test_a_mistake_is_one_line_and_no_node_is_asked(words: str, code: int, said: str, called: Called) -> None:
    status, out, err = called(*words.split())
    assert (status, out, err.count("\n"), said in err) == (code, "", 1, True), err


def test_a_mistake_is_told_as_json_too(called: Called) -> None:
    status, out, err = called("node-verify", "--json", "--nodes", NOBODY, "--tier", "slow")
    lines = ["--tier = 'slow': unknown; allowed: facts, fast"]
    assert (status, json.loads(out), err.splitlines()) == (USAGE, {"error": lines, "exit_code": USAGE}, lines)


TEXTS = [field.name for field in fields(Flags) if field.default is None]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("text", ["", " ", ",", " , "])
def test_a_flag_that_is_given_and_empty_never_means_everything(name: str, text: str) -> None:
    given: dict[str, Any] = {name: text}
    with pytest.raises(UserError) as caught:
        Flags(**given).source()
    [line] = caught.value.problems
    assert (line.partition(": ")[0], caught.value.exit_code) == (f"--{name.replace('_', '-')} = {text!r}", USAGE)


def test_flags_that_are_not_given_are_not_empty() -> None:
    assert Flags().source() == Source()
    assert Flags(group="train, login,").source().groups == ("train", "login")


@pytest.mark.parametrize(
    "words", [["node-tune", "--nodes", ""], ["node-reboot", "--group", ","], ["node-tune", "--profile", ""]]
)
def test_empty_flag_does_not_mean_the_whole_cluster(
    words: list[str], tmp_path: Path, environment: dict[str, str], called: Called
) -> None:
    file = tmp_path / "cluster.json"
    # Whoever asked it would be refused at once, and say so in the report.
    file.write_text(json.dumps(described(nodes={"addresses": ["127.0.0.1:1"]})))
    environment["LUSTRAIN_CLUSTER"] = str(file)
    status, out, err = called(*words)
    assert (status, out, err.count("\n")) == (USAGE, "", 1)
    assert err.startswith(f"{words[1]} = {words[2]!r}: is empty; fix: ")


@pytest.mark.parametrize(("only", "skip"), [([""], []), (["sysctl.*", ","], []), ([], [" "])])
def test_of_settings_too_an_empty_word_is_not_all(only: list[str], skip: list[str]) -> None:
    with pytest.raises(UserError, match="is empty"):
        parse_tuning(only, skip, [], None)


def test_flags_of_a_tune_come_together() -> None:
    found = parse_tuning(["sysctl.*,limit.memlock"], ["gpu.persistence"], ["a.b=x=y", "a.b=x=y"], "cpu", force=True)
    assert (found.only, found.overrides) == (("sysctl.*", "limit.memlock"), {"gpu.persistence": "off", "a.b": "x=y"})
    every = {one.id for one in catalog.load() if one.id.startswith("gpu.")}
    assert set(parse_tuning([], ["gpu.*"], [], None).overrides) == every > {"gpu.persistence"}
    assert (found.profile, found.force, found.allow_reboot) == ("cpu", True, False)


def test_hosts_of_fabrics_own_flag_are_one_run(called: Called, environment: dict[str, str]) -> None:
    environment["FABRIC_NODE_SETUP_RETRIES"] = "0"
    status, out, _ = called("-H", f"{NOBODY},me@127.0.0.2:1", "node-tune", "--json")
    said = {one["name"]: one["outcome"] for one in json.loads(out)["nodes"]}
    assert (status, said) == (3, {"127.0.0.1:1": "unreachable", "127.0.0.2:1": "unreachable"})


@pytest.mark.parametrize(
    ("hosts", "flags", "found"),
    [
        (["me@n1:2222"], {}, [("n1", "me", 2222)]),
        (["n1", "n2"], {"user": "ubuntu"}, [("n1", "ubuntu", None), ("n2", "ubuntu", None)]),
        (["me@n1", "n2:2222"], {}, [("n1", "me", None), ("n2:2222", None, 2222)]),
        (["me@n1", "n2"], {"user": "ubuntu"}, [("n1", "ubuntu", None), ("n2", "ubuntu", None)]),
    ],
)
def test_each_host_is_reached_as_it_was_named(
    hosts: list[str], flags: dict[str, Any], found: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LUSTRAIN_CLUSTER", raising=False)
    config = Config(overrides={"load_ssh_configs": False})
    connections = tuple(Connection(one, config=config) for one in hosts)
    run = prepare(connections[0], Flags(**flags), Tuning(), connections)
    assert [(one.name, one.route.user, one.route.port) for one in run.inventory.nodes] == found


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("node_setup.fleet.run.check_tuning", "stopped by Ctrl-C before any node was contacted\n"),
        ("node_setup.fleet.run.prepare", "stopped by Ctrl-C\n"),
    ],
)
def test_ctrl_c_before_any_node_is_asked_is_one_line(
    place: str, line: str, called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, stopped)
    status, _, err = called("node-facts", "--nodes", NOBODY)
    assert (status, err) == (1, line)


def test_who_may_not_write_the_checkout_packs_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "BUILD", Path("/proc/nobody/may/write/here"))
    with pytest.raises(FileNotFoundError):
        packed_agent(here=True)

    def read_only(target: Path) -> str:
        if not target.is_relative_to(tmp_path):
            raise PermissionError(errno.EACCES, "Permission denied", str(target))
        return packs(target)

    packs = pack.pack
    monkeypatch.setattr(pack, "pack", read_only)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours = packed_agent(here=True)
    assert (Path(ours.path).read_bytes() == ours.content, Path(ours.path).is_relative_to(tmp_path)) == (True, True)


@pytest.mark.slow
def test_wrong_variable_is_one_line_and_flags_precede_it(environment: dict[str, str], called: Called) -> None:
    environment["FABRIC_NODE_SETUP_MAX_PARALLEL"] = "many"
    status, _, err = called("node-facts", "--nodes", NOBODY)
    assert (status, err.count("\n"), err.partition(": ")[0]) == (USAGE, 1, "node_setup.max_parallel = 'many'")
    environment["FABRIC_NODE_SETUP_RETRIES"] = "0"
    assert called("node-facts", "--nodes", NOBODY, "--max-parallel", "2")[0] == 3


@pytest.mark.slow
def test_missing_node_is_in_the_report_and_the_exit_code(environment: dict[str, str], called: Called) -> None:
    environment["FABRIC_NODE_SETUP_RETRIES"] = "0"
    status, out, _ = called("node-tune", "--check", "--nodes", NOBODY)
    assert (status, "unreachable: connection refused; fix: check that the machine runs" in out) == (3, True)
    status, out, err = called("-H", NOBODY, "node-facts", "--json")
    said = json.loads(out)
    assert (status, said["exit"], said["nodes"][0]["outcome"], err) == (3, 3, "unreachable", "")


@pytest.mark.slow
def test_local_facts_need_no_root_and_change_nothing(called: Called) -> None:
    watched = [Path("/var/lib/lustrain"), Path("/etc/lustrain"), Path("/etc/sysctl.d/90-lustrain.conf")]
    before = [one.exists() for one in watched]
    status, out, _ = called("node-facts", "--local", "--json")
    [node] = json.loads(out)["nodes"]
    assert (status, node["result"]["kernel"]["release"], node["round_trips"]) == (0, os.uname().release, 1)
    status, out, _ = called("--dry", "node-tune", "--local", "--json")
    said = json.loads(out)
    assert (said["check"], said["exit"]) == (True, status)
    assert "changed" not in {row["status"] for row in said["nodes"][0]["result"]["rows"]}
    assert [one.exists() for one in watched] == before


@pytest.mark.slow
def test_ctrl_c_ends_it_at_once_with_a_report(environment: dict[str, str]) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        nodes = f"127.0.0.1:{mute.getsockname()[1]},127.0.0.1:{own_port()}"
        command = [*FAB, "node-facts", "--json", "--serial", "1", "--nodes", nodes]
        patient = {**environment, "FABRIC_NODE_SETUP_LOGIN_S": "300"}
        process = subprocess.Popen(
            command, cwd=ROOT, env=patient, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        with mute.accept()[0] as connection:
            assert connection.recv(4) == b"SSH-", "it has said who it is, and waits to hear the same"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert [one["outcome"] for one in json.loads(out)["nodes"]] == ["stopped", "not begun"]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("configured", "flags", "found"),
    [
        ({}, {}, Options()),
        (
            {"max_parallel": "3", "strict_host_keys": "yes"},
            {"max_parallel": None},
            Options(max_parallel=3, strict_host_keys=True),
        ),
        ({"max_parallel": 3, "connect_s": 4}, {"max_parallel": "5"}, Options(max_parallel=5, connect_s=4)),
    ],
)
def test_what_is_configured_stands_where_no_flag_does(configured: Any, flags: Any, found: Options) -> None:
    assert options(configured, flags) == found
    assert set(DEFAULTS[SECTION]) == set(Options.model_fields)


@pytest.mark.parametrize(
    ("configured", "said"),
    [
        ({"max_paralel": 3}, "did you mean max_parallel?"),
        ({"retries": -1}, "node_setup.retries = -1: not allowed; allowed: >= 0"),
        ({"retries": True}, "node_setup.retries = True: true/false is not a value here"),
        ({"connect_s": 0}, "node_setup.connect_s = 0: not allowed; allowed: > 0"),
        ({"strict_host_keys": "perhaps"}, "allowed: true or false"),
        ({"python": ""}, "node_setup.python = '': not allowed; allowed: 1 character or more"),
    ],
)
def test_a_wrong_value_in_fabric_yaml_is_one_line(configured: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        options(configured, {})
    [line] = caught.value.problems
    assert said in line


def test_nodes_at_once_follow_the_way_to_them() -> None:
    assert (Options().parallel(ssm=False), Options().parallel(ssm=True)) == (32, 10)
    assert Options(max_parallel=64).parallel(ssm=True) == 64


@pytest.mark.slow
def test_every_task_is_listed_with_what_its_exit_codes_mean(called: Called) -> None:
    tasks = {one["name"]: one["help"] for one in json.loads(called("--list", "--list-format=json")[1])["tasks"]}
    assert all("Exit code" in tasks[name] for name in ("node-facts", "node-tune", "node-verify", "node-reboot"))
    shown = called("--help", "node-tune")[1]
    flags = ("check", "limit", "serial", "fail-percent", "only", "set", "nodes", "strict-host-keys")
    assert [flag for flag in flags if f"--{flag}" not in shown] == []


@pytest.mark.parametrize(
    "flags", [("--node", "node1"), ("--group", "train"), ("--limit", "1"), ("--nodes", "a"), ("--local",), ()]
)
def test_a_slurm_of_a_part_of_the_machines_is_refused(flags: tuple[str, ...], called: Called, tmp_path: Path) -> None:
    """And without flags, the Cluster in which no controller is named."""
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(to_json(slurm_machines.cluster(slurm={"controller": None}))))
    code, out, errors = called("slurm-up", "--cluster", str(file), *flags)
    assert code == USAGE
    assert (flags[0] if flags else "cluster.slurm.controller") in errors
    assert out == ""
