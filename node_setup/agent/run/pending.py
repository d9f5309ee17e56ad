"""The record of programs that a killed apply had still to run; their files are in place already and look as wanted.

No fact tells a unit that systemd has read from one that only lies there. So before an apply begins, the programs that its
files need are noted on the node's disk, and the note goes when they have run; a note that is still there is work to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from node_setup.agent import owned
from node_setup.agent.host import Host
from node_setup.agent.kinds.pending import TAKE_IN, Command, noted_commands
from node_setup.agent.model import Action, Facts, Remove, Run, Step, Write
from node_setup.agent.run.apply import Log, perform


def commands_for_files(steps: Iterable[Step]) -> list[Command]:
    """Return the commands by which the steps have their files taken in."""
    commands: set[Command] = set()
    for step in steps:
        written = False
        for action in step.actions:
            written = written or isinstance(action, (Write, Remove))
            if written and isinstance(action, Run):
                commands.add(tuple(action.command))
    return [command for command in TAKE_IN if command in commands]


def begin(host: Host, steps: Iterable[Step], facts: Facts, log: Log) -> None:
    """Note what will have to be run, beside what is noted already."""
    noted, needed = noted_commands(facts), commands_for_files(steps)
    if set(needed) - set(noted):
        _note(host, [command for command in TAKE_IN if command in (*noted, *needed)], log)


def end(host: Host, steps: Iterable[Step], facts: Facts, log: Log) -> None:
    """Drop what the steps ran: what remains was noted before and is in none of them. `facts` are those of `begin`."""
    steps = list(steps)
    ran = {tuple(action.command) for step in steps for action in step.actions if isinstance(action, Run)}
    noted = noted_commands(facts)
    left = [command for command in noted if command not in ran]
    if left != noted or commands_for_files(steps):
        _note(host, left, log)


def _note(host: Host, commands: list[Command], log: Log) -> None:
    note: Action = Write(owned.PENDING, json.dumps(commands) + "\n") if commands else Remove(owned.PENDING)
    trouble = perform(host, note)
    if trouble is not None and (commands or host.exists(owned.PENDING)):
        log(f"the record of pending programs cannot be written: {trouble}")
