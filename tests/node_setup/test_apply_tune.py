"""What tune promises: what it says of a node is what facts read again say, and it touches none that it should not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lustrain.problem import UserError
from node_setup.agent import owned
from node_setup.agent.host import Done
from node_setup.agent.model import EXIT_DRIFT, EXIT_FAILED, EXIT_IN_SYNC, EXIT_REFUSED, Request
from node_setup.agent.run.lock import hold
from node_setup.agent.run.outcome import stopped_services
from node_setup.agent.run.tune import check, tune
from node_setup.agent.settings import catalog
from node_setup.agent.wire.identity import Identity
from tests.node_setup.agents import BareHost, silent

MAPS, WATCHES = "proc/sys/vm/max_map_count", "proc/sys/fs/inotify/max_user_watches"
MAPS_ID, WATCHES_ID = "sysctl.vm.max_map_count", "sysctl.fs.inotify.max_user_watches"
NOBODY = Identity()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine without programs whose kernel has two parameters that want another value."""
    plant(tmp_path, {MAPS: "65530\n", WATCHES: "8192\n", "proc/stat": "cpu 0\n", "etc/os-release": "ID=ubuntu\n"})
    return tmp_path


def plant(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


@pytest.fixture
def host(root: Path) -> BareHost:
    return BareHost(root)


class DeafHost(BareHost):
    """Its kernel takes every value and keeps the old one, as `sysctl -w` of Debian 12 makes it look on a read-only key."""

    def put(self, path: str, value: str) -> None:
        """Says nothing."""


class LinkedHost(BareHost):
    """Its kernel changes another parameter along with the one that is written."""

    def put(self, path: str, value: str) -> None:
        super().put(path, value)
        if path.endswith("max_user_watches"):
            super().put(f"/{MAPS}", "1000")


class GrowingHost(BareHost):
    """Its kernel has the second parameter only once the first is set, as a client's appear when it is mounted."""

    def put(self, path: str, value: str) -> None:
        super().put(path, value)
        later = self.path(f"/{WATCHES}")
        if path.endswith("max_map_count") and not later.exists():
            later.write_text("8192\n")


class StubbornHost(BareHost):
    """Its file system has become read-only since it was looked at."""

    def write_bytes(self, path: str, content: bytes, mode: int) -> None:
        raise OSError(30, "Read-only file system")


class ForgetfulHost(BareHost):
    """It has room for everything but the report of what was done."""

    def write_bytes(self, path: str, content: bytes, mode: int) -> None:
        if path.startswith(owned.REPORT):
            raise OSError(28, "No space left on device")
        super().write_bytes(path, content, mode)


def only(host: BareHost, *settings: str, **more: Any) -> tuple[dict[str, Any], int]:
    return tune(host, Request(only=settings, **more), NOBODY, 0.0, silent)


def by_status(result: dict[str, Any]) -> dict[str, set[tuple[str, str | None]]]:
    found: dict[str, set[tuple[str, str | None]]] = {}
    for row in result["rows"]:
        found.setdefault(row["status"], set()).add((row["setting"], row["part"]))
    return found


def failed(result: dict[str, Any]) -> dict[str, Any]:
    """The one row that has failed."""
    [row] = [row for row in result["rows"] if row["status"] == "failed"]
    return dict(row)


def contents(root: Path) -> dict[str, bytes]:
    """All files, but for who held the lock last."""
    files = {f"/{path.relative_to(root)}": path for path in sorted(root.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name != owned.LOCK}


def test_tune_follows_its_plan_is_idempotent_and_undoes_drift(host: BareHost, root: Path) -> None:
    before = contents(root)
    planned, code = check(host, Request(), NOBODY)
    assert (code, contents(root)) == (EXIT_DRIFT, before)
    result, code = tune(host, Request(), NOBODY, 0.0, silent)
    assert code == EXIT_IN_SYNC
    assert by_status(result)["changed"] == by_status(planned)["change"]
    assert (root / MAPS).read_text() == "524288"
    assert result["unplanned"] == result["errors"] == []
    before = contents(root)
    again, code = tune(host, Request(), NOBODY, 0.0, silent)
    assert (code, "changed" in by_status(again), contents(root)) == (EXIT_IN_SYNC, False, before)
    assert check(host, Request(), NOBODY)[1] == EXIT_IN_SYNC
    (root / MAPS).write_text("65530\n")
    drift = {(MAPS_ID, "runtime")}
    result, code = check(host, Request(), NOBODY)
    assert (code, by_status(result)["change"]) == (EXIT_DRIFT, drift)
    result, code = tune(host, Request(), NOBODY, 0.0, silent)
    assert (code, by_status(result)["changed"]) == (EXIT_IN_SYNC, drift)


def test_turning_all_off_leaves_no_file_and_the_running_values(host: BareHost, root: Path) -> None:
    names = ("sysctl.*", "limit.*")
    assert only(host, *names)[1] == EXIT_IN_SYNC
    off = {one.id: "off" for one in catalog.load() if one.kind in ("sysctl", "limit")}
    assert only(host, *names, overrides=off)[1] == EXIT_IN_SYNC
    assert not host.exists(owned.SYSCTL)
    assert not host.exists(owned.LIMITS)
    assert (root / MAPS).read_text() == "524288"


def test_a_mistake_in_the_request_does_nothing(host: BareHost, root: Path) -> None:
    before = contents(root)
    with pytest.raises(UserError):
        tune(host, Request(profile="gpu"), NOBODY, 0.0, silent)
    assert contents(root) == before


def test_value_that_did_not_take_is_a_failure(root: Path) -> None:
    result, code = only(DeafHost(root), MAPS_ID)
    row = failed(result)
    assert (code, row["part"], row["found"], row["wanted"]) == (EXIT_FAILED, "runtime", "65530", "524288")
    assert row["why"] == "it is 65530 now, wanted 524288"


def test_unwritable_file_is_a_row_and_the_rest_is_applied(root: Path) -> None:
    result, code = only(StubbornHost(root), MAPS_ID)
    assert code == EXIT_FAILED
    assert by_status(result) == {"failed": {(MAPS_ID, "persisted")}, "changed": {(MAPS_ID, "runtime")}}
    assert failed(result)["why"].startswith(f"{owned.SYSCTL}: Read-only file system; it is None now")
    assert result["errors"] == [{"where": "report", "why": f"{owned.REPORT}: Read-only file system"}]


def test_unwritable_report_is_a_failure(root: Path) -> None:
    result, code = only(ForgetfulHost(root), MAPS_ID)
    assert set(by_status(result)) == {"changed"}
    assert (code, [one["where"] for one in result["errors"]]) == (EXIT_FAILED, ["report"])


def test_foreign_file_that_wins_at_boot_is_drift(host: BareHost, root: Path) -> None:
    only(host, MAPS_ID)
    foreign = root / "etc/sysctl.d/99-zz.conf"
    foreign.write_text("vm.max_map_count = 65530\n")
    request = Request(only=(MAPS_ID,))
    looked, tuned = check(host, request, NOBODY), tune(host, request, NOBODY, 0.0, silent)
    assert (looked[1], tuned[1]) == (EXIT_DRIFT, EXIT_FAILED)
    for result, _ in (looked, tuned):
        assert by_status(result)["conflict"] == {(MAPS_ID, None)}
    foreign.unlink()
    assert check(host, request, NOBODY)[1] == EXIT_IN_SYNC


@pytest.mark.parametrize(
    ("setting", "severity", "codes"),
    [
        ("gpu.fabric-manager", "must", (EXIT_DRIFT, EXIT_FAILED)),
        ("gpu.nvidia-uvm", "should", (EXIT_IN_SYNC, EXIT_IN_SYNC)),
    ],
)
def test_unreadable_setting_fails_only_where_it_is_a_must(
    setting: str, severity: str, codes: tuple[int, int], host: BareHost
) -> None:
    """This machine has no table of a PCI bus, so that nobody can say whether it has GPUs."""
    request = Request(only=(setting,), profile="efa-gpu")
    looked, tuned = check(host, request, NOBODY), tune(host, request, NOBODY, 0.0, silent)
    assert (looked[1], tuned[1]) == codes
    for result, _ in (looked, tuned):
        assert [(row["status"], row["severity"]) for row in result["rows"]] == [("unknown", severity)]


def test_step_enabled_by_the_first_round_is_applied_next(root: Path) -> None:
    (root / WATCHES).unlink()
    result, code = only(GrowingHost(root), MAPS_ID, WATCHES_ID)
    assert (code, result["unplanned"]) == (EXIT_IN_SYNC, [])
    assert (WATCHES_ID, "runtime") in by_status(result)["changed"]
    assert int((root / WATCHES).read_text()) > 8192


def test_what_differs_afterwards_though_no_step_said_so_is_told(root: Path) -> None:
    (root / MAPS).write_text("524288\n")
    result, code = only(LinkedHost(root), MAPS_ID, WATCHES_ID)
    told = [f"{MAPS_ID} (runtime) /proc/sys/vm/max_map_count is 1000, wanted 524288"]
    assert (code, result["unplanned"]) == (EXIT_FAILED, told)


def test_last_apply_is_recorded_and_leftovers_are_removed(host: BareHost, root: Path) -> None:
    left = f"{Path(owned.SYSCTL).parent}/.{Path(owned.SYSCTL).name}.00112233.lustrain"
    host.write(left, "half")
    lines: list[str] = []
    result, _ = tune(host, Request(only=("sysctl.*",)), NOBODY, 0.0, lines.append)
    assert (host.exists(left), any(left in line for line in lines)) == (False, True)
    record = host.path(owned.REPORT)
    told = json.loads(record.read_text())
    assert told.pop("at").startswith("20")
    assert told == result
    before = record.stat().st_mtime_ns
    only(host, "sysctl.*")
    assert record.stat().st_mtime_ns == before


def job(root: Path) -> None:
    """A job's step as Slurm shows it in /proc."""
    stat = "4711 (slurmstepd) S 1 " + " ".join(["0"] * 48)
    plant(root, {"proc/4711/stat": stat, "proc/4711/cmdline": "slurmstepd: [123.0]\0"})


def test_a_node_with_a_job_is_left_alone_unless_forced(host: BareHost, root: Path) -> None:
    job(root)
    result, code = only(host, MAPS_ID)
    assert code == EXIT_REFUSED
    assert result["refused"] == "a job runs: slurm 123; fix: drain the node and let the job end, or --force"
    assert (MAPS_ID, "runtime") in by_status(result)["change"]
    assert (root / MAPS).read_text() == "65530\n"
    assert not (root / owned.SYSCTL.lstrip("/")).exists()
    result, code = only(host, MAPS_ID, force=True)
    assert (code, result["refused"]) == (EXIT_IN_SYNC, None)


def test_a_job_on_a_node_in_sync_is_no_reason_to_refuse(host: BareHost, root: Path) -> None:
    only(host, MAPS_ID)
    job(root)
    assert only(host, MAPS_ID)[1] == EXIT_IN_SYNC


def test_a_second_agent_waits_its_time_and_then_names_the_first(host: BareHost, root: Path) -> None:
    with hold(host, 0.0):
        result, code = only(BareHost(root), MAPS_ID)
    assert code == EXIT_REFUSED
    assert result["refused"].startswith("another agent changes this node: pid ")
    assert (result["rows"], result["profile"]) == ([], None)
    assert (root / MAPS).read_text() == "65530\n"


def test_without_a_lock_nothing_is_done(root: Path) -> None:
    (root / "run").write_text("no folder")
    result, code = only(BareHost(root), MAPS_ID)
    assert (code, result["errors"][0]["where"]) == (EXIT_FAILED, owned.LOCK)
    assert (root / MAPS).read_text() == "65530\n"


LIMITS = "Limit              Soft Limit   Hard Limit   Units\nMax locked memory  {0}          {0}          bytes\n"
SLURMD = {
    "proc/stat": "cpu 0\n",
    "proc/1/comm": "systemd\n",
    "run/systemd/system/.keep": "",
    "etc/os-release": "ID=ubuntu\n",
    "proc/300/stat": "300 (slurmd) S 1 1 1 0 -1 0 1 2 3 4 5 6 7 8 20 0 1 0 300 1 1\n",
    "proc/300/cmdline": "/usr/sbin/slurmd\0-D\0",
    "proc/300/limits": LIMITS.format("65536"),
}


class SlurmHost(BareHost):
    """slurmd runs with low limits; `comes_back` tells whether it survives its restart. What systemd does when a service dies is
    left out but for the state that it shows."""

    def __init__(self, root: Path, comes_back: bool) -> None:
        super().__init__(root)
        self.comes_back, self.state = comes_back, "active"
        plant(root, SLURMD)

    def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
        if tuple(command[:2]) == ("systemctl", "show"):
            return Done(0, "\n".join(map(self._unit, command[command.index("--") + 1 :])), "")
        if tuple(command) == ("systemctl", "daemon-reload"):
            return Done(0, "", "")
        if tuple(command) == ("systemctl", "restart", "slurmd.service"):
            if self.comes_back:
                self.path("/proc/300/limits").write_text(LIMITS.format("unlimited"))
                return Done(0, "", "")
            shutil.rmtree(self.path("/proc/300"))
            self.state = "failed"
            return Done(1, "", "Job for slurmd.service failed because the control process exited with error code.")
        return super().run(command, timeout, stdin)

    def _unit(self, name: str) -> str:
        load, active = ("loaded", self.state) if name == "slurmd.service" else ("not-found", "inactive")
        return f"Id={name}\nLoadState={load}\nActiveState={active}\nUnitFileState=enabled\nResult=success\n"


def test_a_slurmd_that_comes_back_is_changed(tmp_path: Path) -> None:
    result, code = only(SlurmHost(tmp_path, comes_back=True), "slurmd-limit.memlock")
    assert code == EXIT_IN_SYNC
    assert {row["part"]: row["status"] for row in result["rows"]}["runtime"] == "changed"


def test_slurmd_gone_after_restart_fails_but_not_one_down_before(
    tmp_path: Path,
) -> None:
    host = SlurmHost(tmp_path, comes_back=False)
    result, code = only(host, "slurmd-limit.memlock")
    [row] = [row for row in result["rows"] if row["part"] == "runtime"]
    assert (row["status"], code) == ("failed", EXIT_FAILED)
    assert "slurmd.service ran before and is failed now; fix: journalctl -u slurmd.service" in row["why"]
    assert "control process exited" in row["why"]
    result, code = only(host, "slurmd-limit.memlock")
    assert (code, [row["status"] for row in result["rows"]]) == (EXIT_IN_SYNC, ["ok"])
    assert "slurmd has failed (journalctl -u slurmd)" in result["rows"][0]["why"]


@pytest.mark.parametrize(
    ("before", "after", "gone"),
    [
        ("active", "failed", True),
        ("active", "inactive", True),
        ("active", "activating", True),
        ("active", "reloading", False),
        ("inactive", "failed", False),
        ("failed", "failed", False),
    ],
)
def test_only_what_ran_before_can_be_gone(before: str, after: str, gone: bool) -> None:
    was, now = ({"services": {"a.service": {"active": state}}} for state in (before, after))
    assert stopped_services(was, now) == ({"a.service": after} if gone else {})
    assert stopped_services(was, {"services": None}) == {}, "systemd does not tell"
