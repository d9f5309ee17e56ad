"""One form of task for `fab`: flags are a frozen dataclass, a result is lines, data and an exit code.

    @dataclass(frozen=True)
    class Flags:
        stack: str = flag(help="name of the stack")
        json: bool = flag(False, "print one JSON object")

    @task("explain-change")
    def explain_change(flags: Flags) -> TaskResult:
        ...

Exit codes are those of `lustrain.problem`: 0 done, 1 failed, 2 usage, 3 unreachable, 4 differs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, get_type_hints

from invoke.context import Context
from invoke.exceptions import Exit, ParseError
from invoke.parser.parser import ParseMachine
from invoke.program import Program
from invoke.tasks import task as invoke_task

from lustrain.problem import DONE, FAILED, USAGE, Problem, UserError, did_you_mean
from lustrain.process import drop_output


@dataclass(frozen=True)
class TaskResult:
    """This is what a task returns.

    `data` is what `--json` prints in place of the lines. `problems` say what could not be done beside that: with them the task
    ends as with a UserError, after its lines; with `--json` they are added to `data`, where that is an object.
    """

    lines: Sequence[str]
    data: Any = None
    code: int = DONE
    problems: Sequence[str] = ()


def task(name: str) -> Callable[[Callable[..., TaskResult]], Any]:
    """Make a task of `fab` from a function of its flags, whose dataclass is the first parameter's type.

    A second parameter gets Invoke's context.
    """

    def decorate(body: Callable[..., TaskResult]) -> Any:
        kind = flags_of(body)
        wants_context = len(inspect.signature(body).parameters) > 1

        @functools.wraps(body)
        def call(context: Context, **given: Any) -> None:
            flags = filled(kind, given)
            perform(
                lambda: body(flags, context) if wants_context else body(flags), as_json=getattr(flags, "json", False)
            )

        return declared(name, kind, call)

    return decorate


def declared(name: str, kind: type[Any], call: Callable[..., None], **more: Any) -> Any:
    """Make Invoke's task that calls `call` with a context and the fields of `kind` by name."""
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__signature__ = inspect.Signature([context, *map(_parameter, dataclasses.fields(kind))])  # type: ignore[attr-defined]
    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(kind)}
    again = [field.name for field in dataclasses.fields(kind) if field.default == ()]
    return invoke_task(name=name, help=helps, iterable=again, auto_shortflags=False, **more)(call)


def flags_of(body: Callable[..., Any]) -> type[Any]:
    """Return the type of the first parameter."""
    first = next(iter(inspect.signature(body).parameters))
    kind = get_type_hints(body)[first]
    assert isinstance(kind, type)
    return kind


def filled(kind: type[Any], given: Mapping[str, Any]) -> Any:
    """Return the flags as they were given; a list that may grow becomes a tuple."""
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def perform(work: Callable[[], TaskResult], *, as_json: bool = False) -> None:
    """Print the result of `work`, or its error, and end with its exit code.

    With `as_json` standard output is one JSON value, also for a mistake: `{"error": [lines], "exit_code": code}`, after what
    the task has done until then.
    """
    try:
        result = work()
        if result.lines and not as_json:
            _print("\n".join(result.lines))
        if result.problems:
            _refuse(result.problems, result.code, as_json, result.data)
        if as_json:
            _print(json.dumps(result.data, indent=1))
        if result.code:
            raise Exit(code=result.code)
    except UserError as error:
        _refuse(error.problems, error.exit_code, as_json)
    except OSError as error:
        _refuse([Problem(f"{error.filename or 'this machine'}: {error.strerror or error}")], FAILED, as_json)
    except KeyboardInterrupt:
        _refuse([Problem("stopped by Ctrl-C")], FAILED, as_json)


_READ, _CLEAN_UP, _TAKE = Program.parse_tasks, Program.parse_cleanup, ParseMachine.see_positional_arg
"""Invoke's own, also where several programs in one process read their command lines strictly."""


def read_command_line_strictly() -> None:
    """Report an unknown task or flag, or a missing value, as any mistake: one line, exit code 2, JSON with --json; and show the
    help of the task that stands before `--help`.

    Invoke reads the command line before any code of a task, would end with 1, and takes `--help` for an argument of the task.
    """

    def parse_tasks(program: Program) -> None:
        words, names = program.core.unparsed, program.collection.task_names if program.collection else {}
        before = list(itertools.takewhile(lambda word: word not in ("--help", "-h"), words))
        if len(before) < len(words) and (tasks := [word for word in before if word in names]):
            program.core[0].args.help.value = tasks[-1]
            words.clear()
        try:
            _READ(program)
        except ParseError as error:
            why = re.sub(r"Flag <Argument: (\S+).*> needed", r"Flag --\1 needed", str(error)).rstrip("!")
            word = re.match("No idea what '([^']+)'", why)
            allowed, help_of = list(names), "fab --list, or fab --help TASK"
            if word and word[1].startswith("-") and error.context is not None and error.context.name:
                of = error.context
                allowed, help_of = [*of.flags, *of.inverse_flags], f"fab --help {of.name}"
                why = f"{word[1]} is not a flag of {of.name}"
            fix = (did_you_mean(word[1], allowed) if word else "") or help_of
            _refuse([Problem(f"command line: {why}; fix: {fix}")], USAGE, "--json" in program.argv)

    def parse_cleanup(program: Program) -> None:
        try:
            try:
                _CLEAN_UP(program)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            # The reader of the help, such as `head`, has what it wanted.
            drop_output(sys.stdout.fileno())
            raise Exit from None

    def see_positional_arg(machine: ParseMachine, value: Any) -> None:
        # Invoke would take such a flag for the argument that is missing, and blame what follows it.
        if value in machine.initial.flags:
            machine.switch_to_flag(value)
        elif value.startswith("-") and value != "-":
            machine.error(f"No idea what '{value}' is!")
        else:
            _TAKE(machine, value)

    ParseMachine.see_positional_arg = see_positional_arg  # type: ignore[method-assign, assignment]
    Program.parse_tasks = parse_tasks  # type: ignore[method-assign, assignment]
    Program.parse_cleanup = parse_cleanup  # type: ignore[method-assign, assignment]


def _refuse(lines: Sequence[str], code: int, as_json: bool, data: Any = None) -> NoReturn:
    if as_json:
        done = data if isinstance(data, dict) else {}
        # A standard output that takes nothing, as on a full disk, may be what is refused here.
        with suppress(OSError):
            _print(json.dumps({**done, "error": list(lines), "exit_code": code}, indent=1))
    raise Exit("\n".join(lines), code)


def _print(text: str) -> None:
    """Print to standard output; a reader like `head` that has read enough is not a mistake."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        drop_output(sys.stdout.fileno())


def _parameter(field: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
    # Invoke makes a list of a flag that may be given again, and wants no default for it.
    default = None if default == () else default
    return inspect.Parameter(field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
