"""A new machine's key is recorded once, whoever meets it first, and nobody is let in whose key cannot be."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from paramiko import ECDSAKey, PKey
from paramiko.ssh_exception import BadHostKeyException

from node_setup.fleet.faults import HOST_KEY, Fault, of_connecting
from node_setup.fleet.known_hosts import KnownHosts, UnrecordedError
from node_setup.fleet.transport import Connections, Deadline
from tests.node_setup.local_sshd import PATIENT, Sshd


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "new" / "known"


@pytest.fixture(scope="module")
def keys() -> list[PKey]:
    return [ECDSAKey.generate() for _ in range(3)]


def line(name: str, key: PKey) -> str:
    return f"{name} {key.get_name()} {key.get_base64()}\n"


def test_second_run_trusts_the_key_that_the_first_recorded(file: Path, keys: list[PKey]) -> None:
    first, second = KnownHosts(str(file)), KnownHosts(str(file))
    first.record("n1", keys[0])
    second.record("n1", keys[0])
    second.record("n2", keys[1])
    with pytest.raises(BadHostKeyException) as caught:
        second.record("n1", keys[2])
    assert (caught.value.key, caught.value.expected_key) == (keys[2], keys[0])
    with pytest.raises(BadHostKeyException):
        first.record("n2", keys[0])
    assert file.read_text() == line("n1", keys[0]) + line("n2", keys[1])


@pytest.mark.slow
def test_writer_waits_for_the_lock_and_rereads_the_file(file: Path, keys: list[PKey]) -> None:
    known = KnownHosts(str(file))
    known.record("n0", keys[0])
    said: list[BaseException] = []

    def record() -> None:
        try:
            known.record("n1", keys[1])
        except BadHostKeyException as error:
            said.append(error)

    with open(file, "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        thread = threading.Thread(target=record)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        other.write(line("n1", keys[2]))
    thread.join(300)
    assert [type(one) for one in said] == [BadHostKeyException]
    assert file.read_text() == line("n0", keys[0]) + line("n1", keys[2])


RECORDS = """
import sys
from paramiko import ECDSAKey
from node_setup.fleet.known_hosts import KnownHosts
known = KnownHosts(sys.argv[1])
key = ECDSAKey.generate()
sys.stdin.readline()
for number in range(50):
    try:
        known.record(f"n{number}", key)
    except Exception as error:
        assert type(error).__name__ == "BadHostKeyException", error
"""


@pytest.mark.slow
def test_processes_at_one_moment_record_one_key_for_each_machine(file: Path) -> None:
    command = [sys.executable, "-c", RECORDS, str(file)]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, cwd=Path(__file__).parents[2]) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda one: one.communicate(b"\n", 300), running))
    assert [one.returncode for one in running] == [0] * 4
    names = [text.split()[0] for text in file.read_text().splitlines()]
    assert sorted(names) == sorted(f"n{number}" for number in range(50))


@pytest.mark.parametrize("before", ["", "# mine\n", "n0 ssh-nothing AAAA\n", "n0 ssh-rsa !\n"])
def test_foreign_lines_stay_and_a_last_line_gets_its_newline(before: str, file: Path, keys: list[PKey]) -> None:
    known = KnownHosts(str(file))
    file.parent.mkdir()
    file.write_text(before + line("n1", keys[0]).rstrip())
    known.record("n2", keys[1])
    assert file.read_text() == before + line("n1", keys[0]) + line("n2", keys[1])


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """Takes what is written beyond it for too much, as a disk does that is full in the middle of a line."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_half_a_line_is_taken_back_and_its_machine_not_let_in(file: Path, keys: list[PKey]) -> None:
    known = KnownHosts(str(file))
    known.record("n1", keys[0])
    with no_file_longer_than(file.stat().st_size + 20), pytest.raises(UnrecordedError, match="No space left"):
        known.record("n2", keys[1])
    assert file.read_text() == line("n1", keys[0])
    known.record("n2", keys[2])
    assert file.read_text() == line("n1", keys[0]) + line("n2", keys[2])


def test_unrecordable_key_is_a_fault_of_its_own(file: Path, keys: list[PKey]) -> None:
    known = KnownHosts(str(file))
    file.parent.touch()
    with pytest.raises(UnrecordedError) as caught:
        known.record("n1", keys[0])
    fault = of_connecting(caught.value, "root", None, str(file), "n1")
    assert (fault.kind, fault.passing, "--known-hosts" in fault.fix) == (HOST_KEY, False, True)
    assert fault.why == f"its host key cannot be recorded in {file}: {os.strerror(17)}"


@pytest.mark.slow
def test_key_recorded_during_the_run_is_the_valid_one(own_machine: Sshd, file: Path) -> None:
    own_machine.start()
    first, second = Connections(KnownHosts(str(file)), PATIENT), Connections(KnownHosts(str(file)), PATIENT)
    first.close(first.connect(own_machine.node, Deadline(300)))
    own_machine.new_host_key()
    with pytest.raises(Fault, match="its host key has changed") as caught:
        second.connect(own_machine.node, Deadline(300))
    assert caught.value.kind == HOST_KEY
    assert len(file.read_text().splitlines()) == 1
