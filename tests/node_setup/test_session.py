"""What a session over a real sshd gives up on by itself: answers without end, and a stop that nobody closes it for."""

from __future__ import annotations

import pytest

from node_setup.fleet.faults import NO_ANSWER, STOPPED, Fault
from node_setup.fleet.session import LONGEST_ANSWER, Session
from node_setup.fleet.transport import Connections, Deadline
from tests.node_setup.local_sshd import Sshd
from tests.node_setup.meanwhile import Sleeper, once

pytestmark = pytest.mark.slow


@pytest.fixture
def session(machine: Sshd, connections: Connections) -> Session:
    return connections.connect(machine.node, Deadline(300))


@pytest.mark.parametrize("output", ["/dev/stdout", "/dev/stderr"])
def test_an_answer_without_end_is_given_up(session: Session, output: str) -> None:
    with pytest.raises(Fault) as caught:
        session.execute("exec cat /dev/zero" + (" >&2" if output.endswith("err") else ""), b"", 300)
    assert (caught.value.kind, caught.value.why) == (NO_ANSWER, f"its output is longer than {LONGEST_ANSWER >> 20} MiB")


def test_as_much_as_an_answer_may_be_is_taken(session: Session) -> None:
    assert len(session.execute(f"head -c {LONGEST_ANSWER} /dev/zero", b"", 300).out) == LONGEST_ANSWER


def test_whoever_listens_sees_the_stop_by_himself(session: Session, connections: Connections, sleeper: Sleeper) -> None:
    # Not connections.stop(), which closes the connection as well: one that is being made is closed by nobody.
    once(sleeper.begun, connections.stopped.set)
    with pytest.raises(Fault) as caught:
        session.execute(sleeper.command, b"", 300)
    assert caught.value.kind == STOPPED
