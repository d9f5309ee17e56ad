"""Slurm's accounting on a controller: its files, the order of its steps, and a password that nothing shows."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lustrain.cluster import NodeGroup
from lustrain.problem import UserError
from lustrain.status import Status
from node_setup.agent.facts import Wanted as FactsWanted
from node_setup.agent.facts import scheduler
from node_setup.agent.facts.instance import NODE
from node_setup.agent.facts.reading import MachineReading
from node_setup.agent.host import Done
from node_setup.agent.slurm import accounting, boot, key, paths
from node_setup.agent.slurm.apply import take_steps
from node_setup.agent.slurm.wanted import Accounting, Wanted, parse
from node_setup.slurm import accounting as accounting_plan
from node_setup.slurm import conf, dynamic, up
from tests.node_setup.agents import silent
from tests.node_setup.slurm_machines import cluster, machines, small_machines
from tests.node_setup.test_slurm_dynamic import Fake, done, part

SECRET = "arn:aws:secretsmanager:us-west-2:123456789012:secret:db-a1b2c3"
NO_DATABASE = "Unable to contact slurm database"
CONF = f"{paths.HEADER}StorageHost=localhost\n"


def wanted(**more: Any) -> Wanted:
    return Wanted(("controller",), (), accounting=Accounting("lab", CONF, **more))


def targets(host: Fake, request: Wanted) -> list[str]:
    return [step.target for step in accounting.all_steps(host, request, host.clock)]


def rows(host: Fake, request: Wanted, target: str) -> list[dict[str, Any]]:
    planned = [step for step in accounting.all_steps(host, request, host.clock) if step.target == target]
    return take_steps(planned, silent, check=False)


def test_slurmctld_starts_once_its_records_have_a_place(tmp_path: Path) -> None:
    host = Fake(tmp_path)
    order = ["mariadb.service", "slurm_acct_db", paths.DBD_CONF, "slurmdbd.service", "lab", "slurmctld.service"]
    here = targets(host, wanted())
    assert [target for target in here if target in order] == order
    assert accounting.ON_VOLUME not in here
    assert {accounting.ON_VOLUME, "var-lib-mysql.mount"} < {*targets(host, wanted(on_volume=True))}
    elsewhere = targets(host, wanted(own_database=False))
    assert [target for target in elsewhere if target in order] == order[2:]
    assert not {*order[:5]} & {*targets(host, Wanted(("controller",), ()))}


def test_database_is_stopped_before_other_data_are_mounted(tmp_path: Path) -> None:
    """Its package starts it, and it would go on writing below the mount."""
    host = Fake(tmp_path, systemctl=[done()])
    rows(host, wanted(on_volume=True), "var-lib-mysql.mount")
    verbs = [command[1] for command in host.ran if command[0] == "systemctl" and command[1] in ("stop", "restart")]
    assert verbs == ["stop", "restart"]


def test_data_that_cannot_be_copied_are_no_data(tmp_path: Path) -> None:
    host = Fake(tmp_path, systemctl=[done()], cp=[done(status=1, err="No space left on device")])
    (row,) = rows(host, wanted(on_volume=True), accounting.ON_VOLUME)
    assert (row["status"], "No space left" in row["why"]) == (Status.FAILED, True)
    assert not host.exists(accounting.ON_VOLUME)


def test_slurmctld_is_tried_where_its_records_fail(tmp_path: Path) -> None:
    """A controller that reboots while the database is away goes on with its queue."""
    host = Fake(tmp_path)
    planned = [*accounting.all_steps(host, wanted(), host.clock)]
    first = next(n for n, step in enumerate(planned) if step.target == "mariadb.service")
    taken = take_steps(planned[first:], silent, check=False)
    assert [(row["target"], row["status"]) for row in taken] == [
        ("mariadb.service", "failed"),
        ("slurmctld.service", "failed"),
    ]


@pytest.mark.parametrize(("active", "restarts"), [("activating", 0), ("inactive", 1)])
def test_a_database_that_starts_is_waited_for_and_not_ended(tmp_path: Path, active: str, restarts: int) -> None:
    class Systemd(Fake):
        def run(self, command: Sequence[str], *more: Any, **options: Any) -> Done:
            self.ran.append(tuple(command))
            return done(f"ActiveState={active}\nUnitFileState=enabled\n" if "show" in command else "")

    host = Systemd(tmp_path)
    rows(host, wanted(), "mariadb.service")
    assert sum("restart" in command for command in host.ran) == restarts


def test_a_slurmdbd_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    host = Fake(tmp_path)
    host.write(paths.DBD_CONF, "StorageHost=theirs\n")
    (row,) = rows(host, wanted(), paths.DBD_CONF)
    assert row["status"] == Status.FAILED
    assert host.read(paths.DBD_CONF) == "StorageHost=theirs\n"


@pytest.mark.parametrize(("shown", "status", "added"), [(["lab"], "ok", False), (["", "lab"], "changed", True)])
def test_a_cluster_is_registered_once(tmp_path: Path, shown: list[str], status: str, added: bool) -> None:
    class Manager(Fake):
        def run(self, command: Sequence[str], *more: Any, **options: Any) -> Done:
            self.ran.append(tuple(command))
            return done("" if "add" in command else answers.pop(0))

    host, answers = Manager(tmp_path), list(shown)
    (row,) = rows(host, wanted(), "lab")
    assert row["status"] == status
    assert (("sacctmgr", "--immediate", "add", "cluster", "lab") in host.ran) is added


@pytest.mark.parametrize(
    ("password", "line"),
    [
        ("plain", "StoragePass=plain"),
        ("a#b", "StoragePass=a\\#b"),
        ("c\\d", "StoragePass=c\\\\d"),
        ("e=f", "StoragePass=e=f"),
    ],
)
def test_a_password_is_written_as_slurm_reads_it(password: str, line: str) -> None:
    assert accounting.login_lines("me", password).splitlines() == ["StorageUser=me", line]


@pytest.mark.parametrize("password", ["", "two words", 'qu"ote', "line\nStorageHost=x", "clé"])
def test_a_password_that_cannot_be_written_is_not_shown(password: str) -> None:
    with pytest.raises(UserError) as error:
        accounting.login_lines("me", password)
    assert not password or password not in str(error.value)


def test_login_of_the_database_is_read_and_never_shown(tmp_path: Path) -> None:
    host, said = (
        Fake(tmp_path, aws=[done(json.dumps({"username": "me", "password": "hidden", "port": 1}))]),
        list[str](),
    )
    assert key.login(host, SECRET, 0, said.append, host.clock) == ("me", "hidden")
    assert "hidden" not in json.dumps([*host.ran, *host.given, *said])
    for odd in ("hidden", '["hidden"]', '{"username": "hidden"}'):
        with pytest.raises(UserError) as error:
            key.login(Fake(tmp_path, aws=[done(odd)]), SECRET, 0, said.append, host.clock)
        assert "hidden" not in str(error.value)


@pytest.mark.parametrize("known", [True, False])
def test_login_of_an_earlier_boot_does_while_the_secret_is_away(tmp_path: Path, known: bool) -> None:
    class Packaged(Fake):
        def which(self, program: str) -> str | None:
            return f"/usr/bin/{program}"

    records = dynamic.Records(12, accounting_plan.Database("db.example.com", 3306, "slurm", SECRET))
    document = dynamic.document("demo", {"train": NodeGroup(type="c7i.2xlarge", count=1)}, {}, records=records)
    munge, away = done(base64.b64encode(b"k" * 1024).decode()), done(status=254, err="Could not connect")
    host, said = Packaged(tmp_path, aws=[munge, away], slurmctld=[done("slurm 23.11.4")]), list[str]()
    host.write("/proc/sys/kernel/hostname", "c\n")
    host.write(NODE, part(duty="controller"))
    host.write(paths.DBD_CONF, document["accounting"]["conf"] + "StoragePass=hidden\n" if known else CONF)
    if known:
        boot.boot(host, json.dumps(document), said.append, lambda: None, host.clock)
        assert any(line.startswith("WARNING") for line in said)
    else:
        with pytest.raises(UserError, match="login of the database"):
            boot.boot(host, json.dumps(document), said.append, lambda: None, host.clock)
    assert "hidden" not in json.dumps(said)


def test_a_request_shows_no_password() -> None:
    sent = {"duties": ["controller"], "files": [], "accounting": {"cluster": "lab", "conf": "StoragePass=hidden"}}
    read = parse(json.dumps(sent))
    assert read.accounting
    assert (read.accounting.cluster, read.accounting.own_database) == ("lab", True)
    assert "hidden" not in repr(read)
    with pytest.raises(UserError, match=r"request\.accounting"):
        parse(json.dumps({**sent, "accounting": {"conf": "hidden"}}))


def test_own_machines_get_accounting_by_one_key(tmp_path: Path) -> None:
    there = cluster(slurm={"accounting": {"keep_months": 6}})
    text = conf.files(there, machines(there, small_machines(tmp_path)))["slurm.conf"]
    assert {"AccountingStorageHost=10.0.0.11", "AccountingStorageType=accounting_storage/slurmdbd"} < {
        *text.splitlines()
    }
    plan = up.controllers_accounting(there)
    assert plan
    assert (plan["cluster"], "PurgeJobAfter=6month" in plan["conf"], "StoragePass" in plan["conf"]) == (
        "lab",
        True,
        False,
    )
    assert up.controllers_accounting(cluster()) is None


@pytest.mark.parametrize("slurm", [{"settings": {"AccountingStorageHost": "dbd"}}, {"accounting": {"keep_months": 0}}])
def test_odd_accounting_of_own_machines_is_one_line(slurm: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        cluster(slurm={"accounting": {}} | slurm)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("answer", "known"),
    [
        (done("10.0.0.9\n"), {"error": None, "registered": True}),
        (done("\n"), {"error": None, "registered": False}),
        (done(status=1, err=NO_DATABASE), {"error": NO_DATABASE, "registered": None}),
        (None, None),
    ],
)
def test_facts_tell_whether_slurmdbd_answers_and_knows(tmp_path: Path, answer: Done | None, known: object) -> None:
    host = Fake(tmp_path, scontrol=[done()], sacctmgr=[answer or done()])
    host.write(NODE, part(duty="controller"))
    host.write(
        paths.CONF, "ClusterName=demo\n" + ("AccountingStorageType=accounting_storage/slurmdbd\n" if answer else "")
    )
    facts = scheduler.collect(MachineReading(host, FactsWanted()))
    assert facts["slurm"]["accounting"] == known
