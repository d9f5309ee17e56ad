"""The protocol with a node's agent: one round trip, and a second one that installs the agent where it is missing."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from lustrain.problem import plain
from node_setup.agent.model import EXIT_OTHER_AGENT
from node_setup.agent.owned import AGENT
from node_setup.answers import AgentResponse, NoAnswerError, response_to
from node_setup.fleet.faults import DISK, NO_ANSWER, PYTHON, SUDO, TIMEOUT, Fault
from node_setup.fleet.session import Completed, Session

EXIT_NOT_STORED = 97
KILLED_AFTER_S = 5
"""So long after SIGTERM comes SIGKILL."""
SPARE_S = 3
"""A round trip takes so long besides the command."""
ENDED_STATUS = (124, 137, -1)
"""timeout(1) exits with 124, or 137 where SIGKILL was needed; -1 where a signal ended timeout itself."""
STALE_MINUTES = 60


@dataclass(frozen=True)
class Agent:
    """This is the agent's file as it is sent, its SHA-256 in hex, and where it lies on nodes."""

    content: bytes
    sha: str
    path: str = AGENT


@dataclass
class Traffic:
    """This counts what was exchanged with one node: round trips, and bytes of input and output, without what SSH adds."""

    round_trips: int = 0
    sent: int = 0
    received: int = 0


@dataclass(frozen=True)
class Response:
    """This is what the agent sent back: its exit status (`agent.model`), its answer, its log."""

    status: int
    answer: AgentResponse
    log: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """This is a command of the agent with its JSON body, the seconds it may take, and the interpreter that runs it."""

    command: str
    body: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 300
    python: str = "python3"
    privileged: bool = True
    """The command goes through sudo where the user is not root."""


def send_request(session: Session, agent: Agent, request: Request, traffic: Traffic) -> Response:
    """Call the node's agent; where the node holds no agent or another version, send ours along and call again. Fault."""
    body = json.dumps(request.body, sort_keys=True).encode() + b"\n"
    completed = _once(session, request, _run_script(request, agent), body, traffic)
    if completed.status == EXIT_OTHER_AGENT or _is_damaged(completed):
        script = f"{_store_script(agent)}\n{_run_script(request, agent)}"
        completed = _once(session, request, script, agent.content + body, traffic)
    return _response(completed, request, agent)


def _once(session: Session, request: Request, script: str, stdin: bytes, traffic: Traffic) -> Completed:
    # For what the user's login shell is, the script is one word.
    words = ["sh", "-c", script]
    if request.privileged and not session.root:
        words = ["env", "LC_ALL=C", "sudo", "-n", *words]
    began = time.monotonic()
    traffic.round_trips += 1
    traffic.sent += len(stdin) + len(script)
    completed = session.execute(shlex.join(words), stdin, request.seconds + KILLED_AFTER_S + SPARE_S)
    traffic.received += len(completed.out) + len(completed.err)
    if fault := _fault(completed, session, request, time.monotonic() - began):
        raise fault
    return completed


def _run_script(request: Request, agent: Agent) -> str:
    # -I and -S: nothing of the node's environment or site-packages is loaded, which also takes half of Python's start.
    limit = f"timeout -k {KILLED_AFTER_S} {math.ceil(request.seconds)}"
    path = shlex.quote(agent.path)
    words = f"{shlex.quote(request.python)} -I -S {path} {request.command} --sha {agent.sha} --request -"
    return f"[ -r {path} ] || exit {EXIT_OTHER_AGENT}\nexec {limit} {words}"


def _store_script(agent: Agent) -> str:
    """Return a script that stores the agent from standard input; even after a crash the old file or the new one is in place."""
    folder, path = shlex.quote(str(PurePosixPath(agent.path).parent)), shlex.quote(agent.path)
    size = len(agent.content)
    return f"""umask 022
mkdir -p {folder} || exit {EXIT_NOT_STORED}
find {folder} -maxdepth 1 -name '.upload.*' -mmin +{STALE_MINUTES} -delete
t=$(mktemp {folder}/.upload.XXXXXX) || exit {EXIT_NOT_STORED}
head -c {size} >"$t" && [ "$(wc -c <"$t")" -eq {size} ] && sync "$t" && chmod 644 "$t" && mv -f "$t" {path} ||
{{ rm -f "$t"; exit {EXIT_NOT_STORED}; }}"""


def _is_damaged(completed: Completed) -> bool:
    """Check for a damaged agent: Python runs an empty file without output, and complains of a cut one before any of it has
    run."""
    return not completed.out and (completed.status == 0 or b"can't find '__main__' module" in completed.err)


def _fault(completed: Completed, session: Session, request: Request, spent_s: float) -> Fault | None:
    """Find what kept the agent from being run, or from its end, in the exit status and the last line."""
    printed = _last_line(completed.err)
    if _object(completed.out) is not None:
        return None
    if completed.status == EXIT_NOT_STORED:
        fix = "free space below /var/lib" if "No space left" in printed else "make /var/lib writable"
        return Fault(DISK, f"the agent cannot be stored: {printed}", fix)
    if completed.status == 127 and request.python in printed:
        return Fault(
            PYTHON, f"{request.python} is not installed", "install Python 3.9 or newer, or name it by --python"
        )
    if completed.status == 1 and "needs Python 3.9" in printed:
        return Fault(PYTHON, printed, "install Python 3.9 or newer beside it, and name it by --python")
    if completed.status in (1, 127) and "sudo" in printed and not completed.out:
        why = f"user {session.user} may not sudo without a password: {printed}"
        return Fault(SUDO, why, session.root_fix)
    if completed.status in ENDED_STATUS and spent_s >= request.seconds:
        return Fault(TIMEOUT, f"it took more than {request.seconds:.0f} s and was ended", "give it more --timeout")
    if completed.status in ENDED_STATUS:
        return Fault(
            NO_ANSWER, f"the agent was killed after {spent_s:.0f} s", "look for an out-of-memory kill in its kernel log"
        )
    return None


def _response(completed: Completed, request: Request, agent: Agent) -> Response:
    record = _object(completed.out)
    if record is None:
        printed = _last_line(completed.err) or _last_line(completed.out) or "nothing"
        raise Fault(
            NO_ANSWER,
            f"the agent ended with status {completed.status} and printed: {printed}",
            "run it on the node by hand",
        )
    try:
        checked = response_to(request.command, completed.status, agent.sha, record)
    except NoAnswerError as error:
        fix = f"run it on the node by hand: {request.python} {agent.path} {request.command}"
        raise Fault(NO_ANSWER, f"its output is not an answer of the agent: {plain(str(error)[:300])}", fix) from None
    log = tuple(plain(line) for line in completed.err.decode(errors="replace").splitlines() if line.strip())
    return Response(completed.status, checked, log)


def _object(out: bytes) -> dict[str, Any] | None:
    """Return the JSON object in the last line; a login shell may have printed before it."""
    lines = out.strip().splitlines()
    try:
        record = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _last_line(text: bytes) -> str:
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
    return plain(lines[-1].strip()[:300]) if lines else ""
