"""What tune promises: what it says of a node is what facts read again say, and it touches none that it should not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lustrain.problem import UserError
from node_setup.agent import owned
from node_setup.agent.model import EXIT_DRIFT, EXIT_FAILED, EXIT_IN_SYNC, EXIT_REFUSED, Request
from node_setup.agent.run.lock import held
from node_setup.agent.run.tune import check, tune
from node_setup.agent.wire.identity import Identity
from tests.node_setup.agents import BareHost

MAPS, WATCHES = "proc/sys/vm/max_map_count", "proc/sys/fs/inotify/max_user_watches"
NOBODY = Identity()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine without programs whose kernel has two parameters that want another value."""
    for path, value in (
        (MAPS, "65530"),
        (WATCHES, "8192"),
        ("proc/stat", "cpu 0\n"),
        ("etc/os-release", "ID=ubuntu\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{value}\n")
    return tmp_path


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


def silent(line: str) -> None:
    """A log that nobody reads."""


def by_status(result: dict[str, Any]) -> dict[str, set[tuple[str, str | None]]]:
    found: dict[str, set[tuple[str, str | None]]] = {}
    for row in result["rows"]:
        found.setdefault(row["status"], set()).add((row["setting"], row["part"]))
    return found


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_plan_changes_nothing_and_says_with_exit_2_what_tune_would_do(host: BareHost, root: Path) -> None:
    before = contents(root)
    result, code = check(host, Request(only=("sysctl.*",)), NOBODY)
    assert code == EXIT_DRIFT
    assert ("sysctl.vm.max_map_count", "runtime") in by_status(result)["change"]
    assert contents(root) == before


def test_the_first_tune_changes_what_the_plan_said_and_the_second_nothing(host: BareHost, root: Path) -> None:
    planned, _ = check(host, Request(), NOBODY)
    result, code = tune(host, Request(), NOBODY, 0.0, silent)
    assert code == EXIT_IN_SYNC
    assert by_status(result)["changed"] == by_status(planned)["change"]
    assert (root / MAPS).read_text() == "524288"
    assert result["unplanned"] == result["errors"] == []
    before = contents(root)
    again, code = tune(host, Request(), NOBODY, 0.0, silent)
    assert code == EXIT_IN_SYNC
    assert "changed" not in by_status(again)
    assert {name: text for name, text in contents(root).items() if owned.LOCK not in name} == {
        name: text for name, text in before.items() if owned.LOCK not in name
    }
    assert check(host, Request(), NOBODY)[1] == EXIT_IN_SYNC


def test_drift_is_named_and_undone(host: BareHost, root: Path) -> None:
    tune(host, Request(), NOBODY, 0.0, silent)
    (root / MAPS).write_text("65530\n")
    result, code = check(host, Request(), NOBODY)
    assert (code, by_status(result)["change"]) == (EXIT_DRIFT, {("sysctl.vm.max_map_count", "runtime")})
    result, code = tune(host, Request(), NOBODY, 0.0, silent)
    assert (code, by_status(result)["changed"]) == (EXIT_IN_SYNC, {("sysctl.vm.max_map_count", "runtime")})


def test_a_value_that_did_not_take_is_a_failure_though_nothing_complained(root: Path) -> None:
    result, code = only(DeafHost(root), "sysctl.vm.max_map_count")
    assert code == EXIT_FAILED
    [row] = [row for row in result["rows"] if row["status"] == "failed"]
    assert (row["part"], row["found"], row["wanted"]) == ("runtime", "65530", "524288")
    assert row["why"] == "it is 65530 now, wanted 524288"


def test_a_file_that_cannot_be_written_is_a_row_with_the_kernels_reason_and_the_rest_is_done(root: Path) -> None:
    result, code = only(StubbornHost(root), "sysctl.vm.max_map_count")
    assert code == EXIT_FAILED
    assert by_status(result) == {
        "failed": {("sysctl.vm.max_map_count", "persisted")},
        "changed": {("sysctl.vm.max_map_count", "runtime")},
    }
    [row] = [row for row in result["rows"] if row["status"] == "failed"]
    assert row["why"].startswith(f"{owned.SYSCTL}: Read-only file system; it is None now")
    assert result["errors"] == [{"where": "report", "why": f"{owned.REPORT}: Read-only file system"}]


def test_a_report_that_cannot_be_kept_is_a_failure_though_every_setting_took(root: Path) -> None:
    result, code = only(ForgetfulHost(root), "sysctl.vm.max_map_count")
    assert by_status(result) == {
        "changed": {("sysctl.vm.max_map_count", "persisted"), ("sysctl.vm.max_map_count", "runtime")}
    }
    assert (code, [one["where"] for one in result["errors"]]) == (EXIT_FAILED, ["report"])


def test_a_foreign_file_that_wins_at_boot_is_drift_and_no_success(host: BareHost, root: Path) -> None:
    only(host, "sysctl.vm.max_map_count")
    foreign = root / "etc/sysctl.d/99-zz.conf"
    foreign.write_text("vm.max_map_count = 65530\n")
    request = Request(only=("sysctl.vm.max_map_count",))
    looked, tuned = check(host, request, NOBODY), tune(host, request, NOBODY, 0.0, silent)
    assert (looked[1], tuned[1]) == (EXIT_DRIFT, EXIT_FAILED)
    for result, _ in (looked, tuned):
        assert by_status(result)["conflict"] == {("sysctl.vm.max_map_count", None)}
    foreign.unlink()
    assert check(host, request, NOBODY)[1] == EXIT_IN_SYNC


@pytest.mark.parametrize(
    ("setting", "severity", "codes"),
    [
        ("gpu.fabric-manager", "must", (EXIT_DRIFT, EXIT_FAILED)),
        ("gpu.nvidia-uvm", "should", (EXIT_IN_SYNC, EXIT_IN_SYNC)),
    ],
)
def test_what_nobody_could_read_is_told_and_fails_only_where_it_must_be(
    setting: str, severity: str, codes: tuple[int, int], host: BareHost
) -> None:
    """This machine has no table of a PCI bus, so that nobody can say whether it has GPUs."""
    request = Request(only=(setting,), profile="efa-gpu")
    for (result, code), wanted in zip(
        (check(host, request, NOBODY), tune(host, request, NOBODY, 0.0, silent)), codes, strict=True
    ):
        assert [(row["status"], row["severity"]) for row in result["rows"]] == [("unknown", severity)]
        assert code == wanted


def test_what_only_became_possible_by_the_first_round_is_done_in_the_next(root: Path) -> None:
    (root / WATCHES).unlink()
    result, code = only(GrowingHost(root), "sysctl.vm.max_map_count", "sysctl.fs.inotify.max_user_watches")
    assert (code, result["unplanned"]) == (EXIT_IN_SYNC, [])
    assert ("sysctl.fs.inotify.max_user_watches", "runtime") in by_status(result)["changed"]
    assert int((root / WATCHES).read_text()) > 8192


def test_what_differs_afterwards_though_no_step_said_so_is_told(root: Path) -> None:
    (root / MAPS).write_text("524288\n")
    result, code = only(LinkedHost(root), "sysctl.vm.max_map_count", "sysctl.fs.inotify.max_user_watches")
    assert code == EXIT_FAILED
    assert result["unplanned"] == [
        "sysctl.vm.max_map_count (runtime) /proc/sys/vm/max_map_count is 1000, wanted 524288"
    ]


def test_the_last_apply_is_on_record_and_a_pass_without_changes_does_not_touch_it(host: BareHost, root: Path) -> None:
    result, _ = only(host, "sysctl.*")
    record = root / owned.REPORT.lstrip("/")
    told = json.loads(record.read_text())
    assert told.pop("at").startswith("20")
    assert told == result
    before = record.stat().st_mtime_ns
    only(host, "sysctl.*")
    assert record.stat().st_mtime_ns == before


def job(root: Path) -> None:
    """A job's step as Slurm shows it in /proc."""
    folder = root / "proc/4711"
    folder.mkdir()
    (folder / "stat").write_text("4711 (slurmstepd) S 1 " + " ".join(["0"] * 48))
    (folder / "cmdline").write_bytes(b"slurmstepd: [123.0]\0")


def test_a_node_with_a_job_is_left_alone_unless_forced(host: BareHost, root: Path) -> None:
    job(root)
    result, code = only(host, "sysctl.vm.max_map_count")
    assert code == EXIT_REFUSED
    assert result["refused"] == "a job runs: slurm 123; fix: drain the node and let the job end, or --force"
    assert ("sysctl.vm.max_map_count", "runtime") in by_status(result)["change"]
    assert (root / MAPS).read_text() == "65530\n"
    assert not (root / owned.SYSCTL.lstrip("/")).exists()
    result, code = only(host, "sysctl.vm.max_map_count", force=True)
    assert (code, result["refused"]) == (EXIT_IN_SYNC, None)


def test_a_job_on_a_node_in_sync_is_no_reason_to_refuse(host: BareHost, root: Path) -> None:
    only(host, "sysctl.vm.max_map_count")
    job(root)
    assert only(host, "sysctl.vm.max_map_count")[1] == EXIT_IN_SYNC


def test_a_second_agent_waits_its_time_and_then_names_the_first(host: BareHost, root: Path) -> None:
    with held(host, 0.0):
        result, code = only(BareHost(root), "sysctl.vm.max_map_count")
    assert code == EXIT_REFUSED
    assert result["refused"].startswith("another agent changes this node: pid ")
    assert (result["rows"], result["profile"]) == ([], None)
    assert (root / MAPS).read_text() == "65530\n"


def test_without_a_lock_nothing_is_done(root: Path) -> None:
    (root / "run").write_text("no folder")
    result, code = only(BareHost(root), "sysctl.vm.max_map_count")
    assert (code, result["errors"][0]["where"]) == (EXIT_FAILED, owned.LOCK)
    assert (root / MAPS).read_text() == "65530\n"


def test_what_a_killed_agent_left_is_gone_after_the_next_tune(host: BareHost, root: Path) -> None:
    folder = (root / owned.SYSCTL.lstrip("/")).parent
    folder.mkdir(parents=True)
    left = folder / f".{Path(owned.SYSCTL).name}.00112233.lustrain"
    left.write_text("half")
    lines: list[str] = []
    tune(host, Request(only=("sysctl.*",)), NOBODY, 0.0, lines.append)
    assert not left.exists()
    assert any(left.name in line for line in lines)


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (Request(overrides={"sysctl.vm.max_map_cuont": "1"}), "did you mean sysctl.vm.max_map_count"),
        (Request(overrides={"sysctl.vm.max_map_count": "12"}), "allowed: integer 65530"),
        (Request(profile="gpu"), "allowed: efa-gpu, gaudi, cpu, login"),
    ],
)
def test_a_mistake_in_the_request_is_one_line_and_nothing_is_done(
    request_: Request, line: str, host: BareHost, root: Path
) -> None:
    with pytest.raises(UserError, match=line):
        tune(host, request_, NOBODY, 0.0, silent)
    assert (root / MAPS).read_text() == "65530\n"
