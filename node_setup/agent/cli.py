"""The agent's command line: one JSON object out, log lines on standard error, an exit status that a program can read.

No argparse: to load it and build its parser takes 6 ms under Python 3.11 and 10 ms under 3.9, a tenth of an idle pass.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from lustrain.problem import UserError, did_you_mean, problem
from node_setup.agent.host import Host
from node_setup.agent.model import EXIT_DRIFT, EXIT_FAILED, EXIT_IN_SYNC, EXIT_OTHER_AGENT, EXIT_REFUSED, Request
from node_setup.agent.wire.answer import empty_answer
from node_setup.agent.wire.identity import Identity

OPTIONS = ("--sha", "--request", "--wait", "--mount-wait", "--tier", "--textfile")
STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
WAIT_S = 5.0
USAGE = """usage: agent.pyz COMMAND [--sha HEX] [--request FILE] [--wait SECONDS] [--mount-wait SECONDS]
                         [--tier NAME] [--textfile FOLDER]
commands: facts plan tune verify boot lnet metrics reboot-check version
          slurm-facts slurm-apply slurm-state slurm-health slurm-boot slurm-watch
  --sha HEX        end with status 96, doing nothing, unless this is the agent with that SHA-256
  --request FILE   JSON object with what is wanted; - is standard input; without it, what lies on the node
  --wait SECONDS   how long tune waits for another agent on this node to end (5)
  --mount-wait SECONDS
                   how long boot waits for Lustre where somebody else mounts it (300)
  --tier NAME      how far verify goes: facts, which only looks, or fast, which writes to Lustre as well (fast)
  --textfile FOLDER
                   where metrics writes lustrain.prom, for node_exporter (/var/lib/prometheus/node-exporter)
status: 0 in sync or done, 1 failed, 2 drift (plan) or not ready (verify), 4 refused, 96 another agent"""


class Invocation(NamedTuple):
    """Hold the checked command line."""

    command: str
    sha: str | None = None
    request: str | None = None
    wait_s: float = WAIT_S
    tier: str = "fast"
    mount_wait_s: float | None = None
    textfile: str | None = None


class StoppedError(BaseException):
    """A signal ended the agent. It is a BaseException, so that the guards around single facts do not catch it."""


def main(arguments: Sequence[str], identity: Identity) -> int:
    """Run the command; return the exit status."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stderr.write(USAGE + "\n")
        return EXIT_IN_SYNC if arguments else EXIT_FAILED
    os.umask(0o022)
    for number in STOPS:
        # Under nohup SIGHUP is ignored, and the agent goes on.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    try:
        options = parse(arguments)
        if options.sha is not None and options.sha != identity.sha256:
            return EXIT_OTHER_AGENT
        result, code = COMMANDS[options.command](options, identity)
    except UserError as error:
        result, code = _failure(identity, arguments[0], error.problems), EXIT_FAILED
    except StoppedError as stopped:
        result, code = _failure(identity, arguments[0], [str(stopped)]), EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - the caller reads JSON, whatever is wrong with us
        result, code = _failure(identity, _place(error), [f"{type(error).__name__}: {error}"]), EXIT_FAILED
    _print(result)
    return code


def parse(arguments: Sequence[str]) -> Invocation:
    """Read the command line. UserError where an option is unknown or lacks its value."""
    command, rest = arguments[0], list(arguments[1:])
    if command not in COMMANDS:
        raise UserError(problem("command", command, "unknown", ", ".join(COMMANDS), did_you_mean(command, COMMANDS)))
    values: dict[str, str] = {}
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in OPTIONS:
            raise UserError(problem("option", name, "unknown", ", ".join(OPTIONS), did_you_mean(name, OPTIONS)))
        if not equals:
            if not rest:
                raise UserError(problem("option", name, "its value is missing"))
            value = rest.pop(0)
        values[name] = value
    wait_s = _seconds("--wait", values)
    return Invocation(
        command,
        values.get("--sha"),
        values.get("--request"),
        WAIT_S if wait_s is None else wait_s,
        values.get("--tier", "fast"),
        _seconds("--mount-wait", values),
        values.get("--textfile"),
    )


def _seconds(name: str, values: Mapping[str, str]) -> float | None:
    text = values.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 5:
        raise UserError(problem(name, text, "must be a whole number of seconds", "0..99999"))
    return float(text)


def _facts(options: Invocation, identity: Identity) -> tuple[dict[str, Any], int]:
    from node_setup.agent.run import tune
    from node_setup.agent.settings import catalog

    host = Host()
    return tune.facts(host, _request(options, host), identity, catalog.load()), EXIT_IN_SYNC


def _plan(options: Invocation, identity: Identity) -> tuple[dict[str, Any], int]:
    from node_setup.agent.run import tune

    host = Host()
    return tune.check(host, _request(options, host), identity)


def _tune(options: Invocation, identity: Identity) -> tuple[dict[str, Any], int]:
    from node_setup.agent.run import tune

    _require_root("tune")
    host = Host()
    answer = tune.tune(host, _request(options, host), identity, options.wait_s, _log)
    _keep_compiled(identity)
    return answer


def _verify(options: Invocation, identity: Identity) -> tuple[dict[str, Any], int]:
    from node_setup.agent import verify
    from node_setup.agent.run import tune
    from node_setup.agent.settings import catalog

    host = Host()
    request = _request(options, host)
    return verify.verify(host, tune.facts(host, request, identity, catalog.load()), request, options.tier)


def _boot(options: Invocation, identity: Identity) -> tuple[dict[str, Any], int]:
    from node_setup.agent.run import boot

    _require_root("boot")
    wait_s = boot.MOUNT_WAIT_S if options.mount_wait_s is None else options.mount_wait_s
    answer = boot.boot(Host(), identity, _log, wait_s)
    _keep_compiled(identity)
    return answer


def _lnet(options: Invocation, identity: Identity) -> tuple[dict[str, Any], int]:
    from node_setup.agent.run import boot

    _require_root("lnet")
    return boot.lnet(Host(), identity, _log)


def _metrics(options: Invocation, identity: Identity) -> tuple[dict[str, Any], int]:
    from node_setup.agent.metrics import textfile

    host = Host()
    return textfile.write(host, _request(options, host), identity, options.textfile or textfile.FOLDER)


def _reboot_check(options: Invocation, identity: Identity) -> tuple[dict[str, Any], int]:
    """Return what identifies this boot, and why the node may not be rebooted now."""
    from node_setup.agent.facts import collect
    from node_setup.agent.facts.wanted import Wanted
    from node_setup.agent.run.refusal import refusal

    host = Host()
    facts = collect(host, Wanted())
    refused = None if _request(options, host).force else refusal(facts, to_reboot=True)
    result = {**empty_answer(identity), "boot": facts["host"], "refused": refused}
    return result, EXIT_REFUSED if refused else EXIT_IN_SYNC


def _slurm_facts(options: Invocation, identity: Identity) -> tuple[dict[str, Any], int]:
    from node_setup.agent.slurm import facts

    return {**empty_answer(identity), "slurm": facts.collect(Host())}, EXIT_IN_SYNC


def _slurm_apply(options: Invocation, identity: Identity) -> tuple[dict[str, Any], int]:
    from node_setup.agent.run import lock
    from node_setup.agent.slurm import accounting, apply, wanted

    _require_root("slurm-apply")
    host, request = Host(), wanted.parse(_read(options.request or "-"))
    try:
        with lock.hold(host, options.wait_s):
            rows = apply.take_steps(accounting.all_steps(host, request), _log, check=request.check)
    except (lock.BusyError, lock.NoLockError) as error:
        return {**empty_answer(identity), "refused": str(error)}, EXIT_REFUSED
    statuses = {row["status"] for row in rows}
    code = EXIT_FAILED if "failed" in statuses else EXIT_DRIFT if "change" in statuses else EXIT_IN_SYNC
    return {**empty_answer(identity), "rows": rows}, code


def _slurm_state(options: Invocation, identity: Identity) -> tuple[dict[str, Any], int]:
    from node_setup.agent.slurm import state, wanted

    awaited = wanted.parse_awaited(_read(options.request or "-"))
    return {**empty_answer(identity), "slurm": state.wait_for_nodes(Host(), awaited)}, EXIT_IN_SYNC


def _slurm_boot(options: Invocation, identity: Identity) -> tuple[dict[str, Any], int]:
    from node_setup.agent.run import boot as tuning
    from node_setup.agent.run import lock
    from node_setup.agent.slurm import boot

    _require_root("slurm-boot")
    host = Host()
    try:
        rows = boot.boot(host, _read(options.request or "-"), _log, lambda: tuning.boot(host, identity, _log))
    except (lock.BusyError, lock.NoLockError) as error:
        # The boot's log has no reports.
        _log(f"slurm-boot: {error}")
        return {**empty_answer(identity), "refused": str(error)}, EXIT_REFUSED
    code = EXIT_FAILED if any(row["status"] == "failed" for row in rows) else EXIT_IN_SYNC
    return {**empty_answer(identity), "rows": rows}, code


def _slurm_watch(options: Invocation, identity: Identity) -> tuple[dict[str, Any], int]:
    from node_setup.agent.slurm import watch

    _require_root("slurm-watch")
    watch.watch(Host(), _log)


def _slurm_health(options: Invocation, identity: Identity) -> tuple[dict[str, Any], int]:
    from node_setup.agent.run import tune
    from node_setup.agent.settings import catalog
    from node_setup.agent.slurm import health

    host = Host()
    request = _request(options, host)
    facts = tune.facts(host, request, identity, catalog.load()) if request.document else {}
    result, code = health.check(host, facts, request)
    return {**empty_answer(identity), **result}, code


def _version(options: Invocation, identity: Identity) -> tuple[dict[str, Any], int]:
    return {
        "version": 1,
        "agent": identity.sha256,
        "path": identity.path,
        "python": sys.version.split()[0],
    }, EXIT_IN_SYNC


COMMANDS: dict[str, Callable[[Invocation, Identity], tuple[dict[str, Any], int]]] = {
    "facts": _facts,
    "plan": _plan,
    "tune": _tune,
    "verify": _verify,
    "boot": _boot,
    "lnet": _lnet,
    "metrics": _metrics,
    "reboot-check": _reboot_check,
    "slurm-facts": _slurm_facts,
    "slurm-apply": _slurm_apply,
    "slurm-state": _slurm_state,
    "slurm-health": _slurm_health,
    "slurm-boot": _slurm_boot,
    "slurm-watch": _slurm_watch,
    "version": _version,
}


def _request(options: Invocation, host: Host) -> Request:
    """Return what the caller wants; where it names no cluster, the one that the node was last tuned for."""
    from dataclasses import replace

    from node_setup.agent.run import boot
    from node_setup.agent.wire import request

    given = Request()
    if options.request is not None:
        given = request.parse(_read(options.request))
    return given if given.document else replace(given, document=boot.last_request(host)[0].document)


def _read(name: str) -> str:
    try:
        if name == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        with open(name, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise UserError(problem("--request", name, error.strerror or "cannot be read")) from None
    except UnicodeDecodeError:
        raise UserError(problem("--request", name, "not UTF-8")) from None


def _keep_compiled(identity: Identity) -> None:
    from node_setup.agent import compiled

    try:
        compiled.keep(identity)
    except OSError as error:
        _log(f"the next pass has to compile again: {error}")


def _require_root(command: str) -> None:
    if os.geteuid() != 0:
        raise UserError(
            f"{command} needs root and this is uid {os.geteuid()}; fix: run it with sudo; `plan` needs no root"
        )


def _failure(identity: Identity, where: str, lines: Sequence[str]) -> dict[str, Any]:
    for line in lines:
        _log(f"{where}: {line}")
    return {**empty_answer(identity), "errors": [{"where": where, "why": line} for line in lines]}


def _place(error: Exception) -> str:
    """Return file, line and function of the innermost frame that is ours."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "node_setup" in frame.filename] or frames
    name = ours[-1].filename.rpartition("node_setup")[2].lstrip("/")
    return f"{name}:{ours[-1].lineno} in {ours[-1].name}"


def _stop(number: int, frame: object) -> NoReturn:
    # Once is enough: what follows is the report of where we stopped. A lost connection sends two kinds of them.
    for stop in STOPS:
        signal.signal(stop, signal.SIG_IGN)
    raise StoppedError(f"stopped by {signal.Signals(number).name}; completed steps stay in place, run it again")


def _log(line: str) -> None:
    # The pass goes on without its caller: a node must not be left half changed.
    with suppress(OSError):
        os.write(2, f"lustrain-agent: {line}\n".encode("utf-8", "replace"))


def _print(result: dict[str, Any]) -> None:
    left = (json.dumps(result) + "\n").encode()
    with suppress(OSError):
        while left:
            left = left[os.write(1, left) :]
