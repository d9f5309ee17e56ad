"""What apply promises: the plan's order, each action once, and no failure that stops the rest or goes unsaid."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node_setup.agent import owned
from node_setup.agent.host import Done, Host
from node_setup.agent.kinds.hold import LOCKED
from node_setup.agent.model import PERSISTED, RUNTIME, Copy, Put, Remove, Run, Step, Write
from node_setup.agent.run.apply import RELOADS, apply, key, perform, sweep
from tests.node_setup.agents import silent

RELOAD = Run(("systemctl", "daemon-reload"))
Deed = tuple[str, ...]


class RecordingHost(Host):
    """Notes what is done and in which order; `broken` are files and programs that do not work."""

    def __init__(self, broken: frozenset[str] = frozenset()) -> None:
        super().__init__("/nonexistent")
        self.broken = broken
        self.deeds: list[Deed] = []

    def write(self, path: str, content: str, mode: int = 0o644) -> None:
        self._do(path, "write", path, content)

    def put(self, path: str, value: str) -> None:
        self._do(path, "put", path, value)

    def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
        self.deeds.append(tuple(command))
        return Done(1, "", "it says no") if command[0] in self.broken else Done(0, "", "")

    def _do(self, name: str, *deed: str) -> None:
        self.deeds.append(deed)
        if name in self.broken:
            raise OSError(30, "Read-only file system")


def step(setting: str, part: str, *actions: Write | Put | Run | Remove | Copy) -> Step:
    return Step(setting, part, f"target of {setting}", "old", "new", actions)


A, B, C = Write("/etc/a", "1"), Write("/etc/b", "1"), Write("/etc/c", "1")
PUT_A, PUT_B = Put("/a", "1"), Put("/b", "2")
WROTE_A, WROTE_B, WROTE_C = (("write", f"/etc/{name}", "1") for name in "abc")
AGAIN = ("systemctl", "daemon-reload")
NO = {"a": "/etc/a: Read-only file system", "b": "/etc/a: Read-only file system"}


@pytest.mark.parametrize(
    ("steps", "broken", "deeds", "troubles"),
    [
        (
            [step("a", RUNTIME, PUT_A), step("a", PERSISTED, A), step("b", RUNTIME, PUT_B)],
            "",
            [WROTE_A, ("put", "/a", "1"), ("put", "/b", "2")],
            {},
        ),
        ([step("a", PERSISTED, A), step("b", PERSISTED, A)], "", [WROTE_A], {}),
        (
            [step("a", PERSISTED, B, RELOAD), step("b", PERSISTED, RELOAD), step("c", PERSISTED, C, RELOAD)],
            "",
            [WROTE_B, AGAIN, WROTE_C, AGAIN],
            {},
        ),
        (
            [step("a", PERSISTED, A), step("b", PERSISTED, A), step("c", RUNTIME, PUT_B)],
            "/etc/a",
            [WROTE_A, ("put", "/b", "2")],
            NO,
        ),
        (
            [step("a", RUNTIME, Run(("mdadm", "--create")), Run(("mkfs.xfs", "/dev/md0")))],
            "mdadm",
            [("mdadm", "--create")],
            {"a": "mdadm --create: it says no"},
        ),
    ],
    ids=["files come first", "a shared file", "units are read in again", "a failure of two", "the rest of a step"],
)
def test_action_runs_once_and_fails_each_setting_that_needs_it(
    steps: list[Step], broken: str, deeds: list[Deed], troubles: dict[str, str]
) -> None:
    host = RecordingHost(frozenset({broken}))
    assert {name[0]: why for name, why in apply(host, steps, silent).items()} == troubles
    assert host.deeds == deeds


def test_each_step_is_logged_and_a_failed_one_with_its_reason() -> None:
    lines: list[str] = []
    host = RecordingHost(broken=frozenset({"/b"}))
    apply(host, [step("a", RUNTIME, Put("/a", "1")), step("b", RUNTIME, Put("/b", "1"))], lines.append)
    assert "FAILED" not in lines[0]
    assert "a (runtime)" in lines[0]
    assert lines[1].endswith("FAILED: /b: Read-only file system")


ACTIONS = st.sampled_from(
    [Write("/w1", "x"), Write("/w2", "x"), Put("/p1", "1"), Put("/p2", "2"), Run(("p", "1")), Run(("q",)), RELOAD]
)
STEPS = st.lists(
    st.builds(
        lambda setting, part, actions: step(setting, part, *actions),
        st.sampled_from(["a", "b", "c", "d"]),
        st.sampled_from([PERSISTED, RUNTIME]),
        st.lists(ACTIONS, min_size=1, max_size=4),
    ),
    max_size=6,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(STEPS, st.frozensets(st.sampled_from(["/w1", "/w2", "/p1", "p", "q", "systemctl"])))
def test_no_action_runs_twice_and_every_failure_has_a_reason(steps: list[Step], broken: frozenset[str]) -> None:
    host = RecordingHost(broken)
    troubles = apply(host, steps, silent)
    once = [deed for deed in host.deeds if deed not in RELOADS]
    assert len(once) == len(set(once))
    for one in steps:
        names = [action.command[0] if isinstance(action, Run) else action.path for action in one.actions]
        if set(names) & broken:
            assert key(one) in troubles
    assert set(troubles) <= {key(one) for one in steps}


def test_value_refused_by_the_kernel_reports_its_error(tmp_path: Path) -> None:
    os.symlink("/dev/full", tmp_path / "full")
    steps = [step("gone", RUNTIME, Put("/nowhere", "1")), step("full", RUNTIME, Put("/full", "1"))]
    troubles = apply(Host(str(tmp_path)), steps, silent)
    assert [why for _, why in sorted(troubles.items())] == [
        "/full: No space left on device",
        "/nowhere: No such file or directory",
    ]


def test_files_are_written_copied_and_removed_with_their_modes(tmp_path: Path) -> None:
    source = tmp_path / "agent"
    source.write_bytes(b"PK\x03\x04\xff\x00")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/old").write_text("x")
    actions = (Write("/etc/new/deep", "é\n", 0o600), Copy(str(source), "/var/agent.pyz"), Remove("/etc/old"))
    assert apply(Host(str(tmp_path)), [step("a", PERSISTED, *actions)], silent) == {}
    assert (tmp_path / "etc/new/deep").read_text(encoding="utf-8") == "é\n"
    assert (tmp_path / "etc/new/deep").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "var/agent.pyz").read_bytes() == source.read_bytes()
    assert (tmp_path / "var/agent.pyz").stat().st_mode & 0o777 == 0o644
    assert not (tmp_path / "etc/old").exists()


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    host, folder = Host(str(tmp_path)), Path(owned.SYSCTL).parent
    assert sweep(host) == []
    left = f".{Path(owned.SYSCTL).name}.0a1b2c3d.lustrain"
    others = (".hidden.lustrain", ".a.conf.lustrain", "x.0a1b2c3d.lustrain", ".x.0a1b2c3d.other", "90-lustrain.conf")
    for path in (f"/home/{left}", *(f"{folder}/{name}" for name in (left, *others))):
        host.write(path, "x")
    assert sweep(host) == [f"{folder}/{left}"]
    assert set(os.listdir(host.path(str(folder)))) == set(others)
    assert host.exists(f"/home/{left}")


class LockedHost(Host):
    """A program that complains for the first so many calls; nothing else is there."""

    def __init__(self, root: Path, calls: int, said: str) -> None:
        super().__init__(str(root))
        self.left, self.said = calls, said

    def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
        self.left -= 1
        return Done(0, "", "") if self.left < 0 else Done(100, "", f"{self.said}\nE: Executing dpkg failed.\n")


HOLD = Run(("apt-mark", "hold", "a"), busy=LOCKED)
HELD = "dpkg: error: dpkg frontend lock was locked by another process with pid 812"


MOUNT = Run(("mount", "/fsx"), tries=3)


@pytest.mark.parametrize(
    ("action", "calls", "said", "done", "left"),
    [
        (HOLD, 3, HELD, True, -1),
        (HOLD, 2, "E: no such package", False, 1),
        (MOUNT, 2, "mount: refused", True, -1),
        (MOUNT, 9, "mount: refused", False, 6),
    ],
)
def test_busy_or_failing_program_is_retried_up_to_its_limit(
    action: Run, calls: int, said: str, done: bool, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node_setup.agent.run.apply.AGAIN_S", 0.01)
    monkeypatch.setattr("node_setup.agent.run.apply.FAILED_PAUSE_S", 0.0)
    host = LockedHost(tmp_path, calls, said)
    assert (perform(host, action) is None, host.left) == (done, left)


def test_a_lock_that_is_never_free_is_given_up_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node_setup.agent.run.apply.AGAIN_S", 0.01)
    monkeypatch.setattr("node_setup.agent.run.apply.BUSY_S", 0.05)
    assert perform(LockedHost(tmp_path, 9999, HELD), HOLD) is not None
