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


def silent(line: str) -> None:
    """A log that nobody reads."""


def test_persisted_artefacts_are_in_place_before_the_running_state_changes() -> None:
    host = RecordingHost()
    steps = [
        step("a", RUNTIME, Put("/a", "1")),
        step("a", PERSISTED, Write("/etc/a", "1")),
        step("b", RUNTIME, Put("/b", "2")),
    ]
    assert apply(host, steps, silent) == {}
    assert host.deeds == [("write", "/etc/a", "1"), ("put", "/a", "1"), ("put", "/b", "2")]


def test_a_file_that_several_settings_share_is_written_once() -> None:
    host = RecordingHost()
    shared = Write("/etc/sysctl.d/x", "a\nb\n")
    assert apply(host, [step("a", PERSISTED, shared), step("b", PERSISTED, shared)], silent) == {}
    assert host.deeds == [("write", "/etc/sysctl.d/x", "a\nb\n")]


def test_units_are_read_in_again_after_each_further_file_but_not_without_one() -> None:
    host = RecordingHost()
    steps = [
        step("a", PERSISTED, Write("/a", "1"), RELOAD),
        step("b", PERSISTED, RELOAD),
        step("c", PERSISTED, Write("/c", "1"), RELOAD),
    ]
    apply(host, steps, silent)
    assert [deed[0] for deed in host.deeds] == ["write", "systemctl", "write", "systemctl"]


def test_one_failure_is_said_of_each_setting_that_wanted_it_and_the_others_are_done() -> None:
    host = RecordingHost(broken=frozenset({"/etc/shared"}))
    shared = Write("/etc/shared", "x")
    steps = [step("a", PERSISTED, shared), step("b", PERSISTED, shared), step("c", RUNTIME, Put("/c", "1"))]
    troubles = apply(host, steps, silent)
    assert {name[0]: why for name, why in troubles.items()} == {
        "a": "/etc/shared: Read-only file system",
        "b": "/etc/shared: Read-only file system",
    }
    assert host.deeds == [("write", "/etc/shared", "x"), ("put", "/c", "1")]


def test_what_follows_a_failed_action_in_its_step_is_left() -> None:
    host = RecordingHost(broken=frozenset({"mdadm"}))
    troubles = apply(
        host, [step("scratch", RUNTIME, Run(("mdadm", "--create")), Run(("mkfs.xfs", "/dev/md0")))], silent
    )
    assert list(troubles.values()) == ["mdadm --create: it says no"]
    assert host.deeds == [("mdadm", "--create")]


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
def test_whatever_the_steps_no_action_is_done_twice_and_every_failure_has_its_reason(
    steps: list[Step], broken: frozenset[str]
) -> None:
    host = RecordingHost(broken)
    troubles = apply(host, steps, silent)
    once = [deed for deed in host.deeds if deed not in RELOADS]
    assert len(once) == len(set(once))
    for one in steps:
        names = [getattr(action, "path", None) or action.command[0] for action in one.actions]
        if set(names) & broken:
            assert key(one) in troubles
    assert set(troubles) <= {key(one) for one in steps}


def test_a_value_that_the_kernel_does_not_take_is_told_by_its_error(tmp_path: Path) -> None:
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
    host = Host(str(tmp_path))
    folder = host.path(owned.SYSCTL).parent
    folder.mkdir(parents=True)
    left = f".{Path(owned.SYSCTL).name}.0a1b2c3d.lustrain"
    for name in (
        left,
        "90-lustrain.conf",
        ".hidden.lustrain",
        ".a.conf.lustrain",
        "x.0a1b2c3d.lustrain",
        ".x.0a1b2c3d.other",
    ):
        (folder / name).write_text("x")
    elsewhere = tmp_path / "home"
    elsewhere.mkdir()
    (elsewhere / left).write_text("x")
    assert sweep(host) == [f"{Path(owned.SYSCTL).parent}/{left}"]
    assert sorted(os.listdir(folder)) == [
        ".a.conf.lustrain",
        ".hidden.lustrain",
        ".x.0a1b2c3d.other",
        "90-lustrain.conf",
        "x.0a1b2c3d.lustrain",
    ]
    assert (elsewhere / left).exists()


@pytest.mark.parametrize("folder", ["/etc/sysctl.d", "/var/lib/lustrain", "/etc/systemd/system"])
def test_a_machine_without_our_folders_is_swept_in_silence(folder: str, tmp_path: Path) -> None:
    assert sweep(Host(str(tmp_path)), [folder]) == []


class LockedHost(Host):
    """A program whose lock another one has for the first so many calls; nothing else is there."""

    def __init__(self, root: Path, calls: int, said: str) -> None:
        super().__init__(str(root))
        self.left, self.said = calls, said

    def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
        self.left -= 1
        return (
            Done(0, "", "")
            if self.left < 0
            else Done(100, "", f"{self.said}\nE: Executing dpkg failed. Are you root?\n")
        )


HOLD = Run(("apt-mark", "hold", "a"), busy=LOCKED)
HELD = "dpkg: error: dpkg frontend lock was locked by another process with pid 812"


def test_a_program_whose_lock_another_has_is_run_again_until_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node_setup.agent.run.apply.AGAIN_S", 0.01)
    assert perform(LockedHost(tmp_path, 3, HELD), HOLD) is None


def test_it_is_given_up_in_the_end_and_another_mistake_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node_setup.agent.run.apply.AGAIN_S", 0.01)
    monkeypatch.setattr("node_setup.agent.run.apply.BUSY_S", 0.05)
    assert perform(LockedHost(tmp_path, 9999, HELD), HOLD) is not None
    once = LockedHost(tmp_path, 2, "E: no such package")
    assert perform(once, HOLD) is not None
    assert once.left == 1


def test_a_program_that_may_fail_a_few_times_is_run_so_often_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node_setup.agent.run.apply.FAILED_PAUSE_S", 0.0)
    mount = Run(("mount", "/fsx"), tries=3)
    assert perform(LockedHost(tmp_path, 2, "mount: refused"), mount) is None
    never = LockedHost(tmp_path, 9, "mount: refused")
    assert perform(never, mount) is not None
    assert never.left == 6
