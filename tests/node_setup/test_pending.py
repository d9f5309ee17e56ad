"""What a killed apply leaves undone is noted before it begins, done by the next, and forgotten when it is done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from node_setup.agent import owned
from node_setup.agent.facts.files import collect
from node_setup.agent.facts.reading import MachineReading
from node_setup.agent.facts.wanted import Wanted
from node_setup.agent.kinds import pending as kind
from node_setup.agent.model import PERSISTED, RUNTIME, Facts, Put, Remark, Remove, Request, Run, Step, Write
from node_setup.agent.run import pending
from node_setup.agent.run.apply import apply
from node_setup.agent.settings import catalog
from tests.node_setup.agents import BareHost, silent

RELOAD = Run(("systemctl", "daemon-reload"))
CHRONY = Run(("chronyc", "reload", "sources"), 10.0)
SETTING = next(one for one in catalog.load() if one.kind == "pending")


def step(*actions: Write | Put | Run | Remove, part: str = PERSISTED) -> Step:
    return Step("a", part, "target", "old", "new", actions)


def facts_of(host: BareHost) -> Facts:
    return collect(MachineReading(host, Wanted()))


@pytest.mark.parametrize(
    ("steps", "asked"),
    [
        ([step(Write("/u", "x"), RELOAD, Run(("systemctl", "enable", "u")))], [RELOAD.command]),
        ([step(Remove("/s"), CHRONY), step(Write("/u", "x"), RELOAD)], [RELOAD.command, CHRONY.command]),
        ([step(RELOAD)], []),
        ([step(Run(("mkfs.xfs", "/dev/md0")), part=RUNTIME), step(Write("/m", "x"), Run(("mdadm", "--create")))], []),
    ],
)
def test_noted_commands_load_files_and_are_repeatable(steps: list[Step], asked: list[tuple[str, ...]]) -> None:
    assert pending.commands_for_files(steps) == asked


def test_note_of_an_apply_is_planned_after_a_kill_then_removed(tmp_path: Path) -> None:
    host, steps = BareHost(tmp_path), [step(Write("/u", "x"), RELOAD), step(Write("/s", "x"), CHRONY)]
    pending.begin(host, steps, facts_of(host), silent)
    after_kill = facts_of(host)
    left = kind.plan([SETTING], frozenset({SETTING.id}), after_kill, Request())
    assert [one.actions[0].command for one in left if isinstance(one, Step)] == [RELOAD.command, CHRONY.command]  # type: ignore[union-attr]
    again = [one for one in left if isinstance(one, Step)]
    pending.begin(host, again, after_kill, silent)
    apply(host, again, silent)
    pending.end(host, again, after_kill, silent)
    assert host.ran == [RELOAD.command, CHRONY.command]
    assert not host.exists(owned.PENDING)
    [only] = kind.plan([SETTING], frozenset({SETTING.id}), facts_of(host), Request())
    assert isinstance(only, Remark)
    assert only.status == "ok"


def test_an_apply_of_other_settings_keeps_what_it_did_not_do(tmp_path: Path) -> None:
    host = BareHost(tmp_path)
    pending.begin(host, [step(Write("/s", "x"), CHRONY)], facts_of(host), silent)
    facts, steps = facts_of(host), [step(Write("/u", "x"), RELOAD)]
    pending.begin(host, steps, facts, silent)
    assert kind.noted_commands(facts_of(host)) == [RELOAD.command, CHRONY.command]
    pending.end(host, steps, facts, silent)
    assert kind.noted_commands(facts_of(host)) == [CHRONY.command]
    assert kind.plan([SETTING], frozenset(), facts_of(host), Request()) == []


@pytest.mark.parametrize("note", ["", "{", "7", "null", '["rm"]', '[["rm", "-rf", "/"]]', '[7, ["systemctl", 1]]'])
def test_a_note_makes_nobody_run_what_is_not_on_the_list(note: str, tmp_path: Path) -> None:
    host = BareHost(tmp_path)
    host.write(owned.PENDING, note)
    assert kind.noted_commands(facts_of(host)) == []


def test_an_apply_that_takes_nothing_in_writes_no_note(tmp_path: Path) -> None:
    host, steps = BareHost(tmp_path), [step(Put("/proc/sys/vm/swappiness", "1"), part=RUNTIME)]
    pending.begin(host, steps, facts_of(host), silent)
    pending.end(host, steps, facts_of(host), silent)
    assert not (tmp_path / "var").exists()


def test_unwritable_note_is_logged_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "var").write_text("a file where a folder should be")
    lines: list[str] = []
    pending.begin(BareHost(tmp_path), [step(Write("/u", "x"), RELOAD)], {}, lines.append)
    pending.end(BareHost(tmp_path), [step(Write("/u", "x"), RELOAD)], {}, silent)
    assert [owned.PENDING in line for line in lines] == [True]


def test_every_listed_program_is_run_by_some_kind() -> None:
    kinds = Path(__file__).parents[2] / "node_setup/agent/kinds"
    text = "".join(file.read_text() for file in kinds.rglob("*.py"))
    for command in kind.TAKE_IN:
        assert ", ".join(json.dumps(word) for word in command) in text
