"""What holds for every test: no network but loopback and our own labs', no account but a dummy one, one way to be optional."""

from __future__ import annotations

import functools
import ipaddress
import os

# Before anything imports torch: a pool of threads in every rank of every test fights for the same cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import botocore.session
import pytest
from hypothesis import HealthCheck, settings

from infra.clock import NOW
from infra.local.aws import client_environment
from infra.local.engine import DAY_OF_EXAMPLES
from rehearsal.lab import network

# How long one example takes says how busy the machine is, not whether the code is right.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# For `make unit`: a few examples of every rule, where `make test` tries a hundred.
settings.register_profile("quick", parent=settings.get_profile("untimed"), max_examples=20)
settings.load_profile("untimed")

pytest_plugins = [
    "tests.distribution",
    "tests.fab",
    "tests.leftovers",
    "tests.prove.marking",
    "tests.seeds",
    "tests.lab.servers",
    "tests.lab.nodes",
    "tests.lab.engines",
    "tests.lab.ranks",
    "tests.infra.stacks",
]

_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


class LeakedConnectionError(AssertionError):
    """A test tried to reach something that is not on this machine."""


def require(condition: object, reason: str) -> None:
    """Skips the test in one line when `condition` is false; with LUSTRAIN_REQUIRE=all in the environment it fails instead."""
    if condition:
        return
    if os.environ.get("LUSTRAIN_REQUIRE") == "all":
        pytest.fail(f"needed here (LUSTRAIN_REQUIRE=all): {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(autouse=True, scope="session")
def no_account() -> Iterator[None]:
    """Every client, also in child processes, finds dummy credentials, no configuration of the user, and no metadata address."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("AWS_")] + list(_PROXY_VARIABLES):
            patch.delenv(name, raising=False)
        for name, value in client_environment().items():
            patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def process_left_as_it_was(no_account: None) -> Iterator[None]:
    """Fails the test that leaves a state of the process behind, and puts back what programs set for as long as they run."""
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    environment, before = _environment(), _process_state()
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    # It keeps the credentials that the first of its clients found.
    boto3.DEFAULT_SESSION = None
    after = _process_state()
    changed = [name for name in before if before[name] != after[name]]
    # Of the environment all: an undo may put back what another undo took away.
    for name in sorted({name for name, _ in environment.items() ^ _environment().items()}):
        changed.append(f"{name} in the environment")
        os.environ.pop(name, None)
        if name in environment:
            os.environ[name] = environment[name]
    if changed:
        pytest.fail(f"this test left changed: {', '.join(changed)}", pytrace=False)


def _written(descriptor: int) -> None:
    """Refuses what os.fsync refuses: a descriptor that is not open."""
    os.fstat(descriptor)


_HANDLED = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGCHLD)
_SET_ONCE = ("PYTEST_", "TORCH", "_TORCH", "TRITON_", "CUBLAS_", "DISABLE_CUPTI_", "TEARDOWN_CUPTI", "MPLCONFIGDIR")
"""Beginnings of what pytest, torch, the trainer's command for it, or matplotlib without a home sets once in a process."""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_SET_ONCE)}


def _process_state() -> dict[str, object]:
    """Cheap to ask for, and of torch nothing before a test needs it."""
    state: dict[str, object] = {
        "the working directory": os.getcwd(),
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    }
    if torch := sys.modules.get("torch"):
        state["torch's default dtype"] = torch.get_default_dtype()
        state["torch's threads"] = torch.get_num_threads()
        state["torch's deterministic algorithms"] = torch.are_deterministic_algorithms_enabled()
        state["torch's process group"] = torch.distributed.is_initialized()
    return state


@pytest.fixture(autouse=True, scope="session")
def day_of_examples() -> Iterator[None]:
    """Preflight's day is one on which the example stacks pass, whatever the calendar says, also in child processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NOW, DAY_OF_EXAMPLES)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_reading_of_aws_models() -> Iterator[None]:
    """Sessions of this process share botocore's descriptions of services, which each would read from disk again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_wait_for_a_disk() -> Iterator[None]:
    """Files that this process syncs are written, and no more: no test takes the power away, and each sync waits for a disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", _written)
        yield


@pytest.fixture(autouse=True, scope="session")
def heard_interrupts() -> None:
    """Children hear Ctrl-C also where the shell that started the tests in its background has switched it off."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def loopback_guard() -> Iterator[list[str]]:
    """Refuses connections, datagrams and look-ups of other machines before a packet leaves; the list holds what was tried."""
    tried: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, _checked(getattr(socket.socket, name), lambda args: args[1], tried))
        patch.setattr(socket.socket, "sendto", _checked(socket.socket.sendto, lambda args: args[-1], tried))
        patch.setattr(socket, "getaddrinfo", _checked(socket.getaddrinfo, lambda args: args[:2], tried))
        yield tried


@pytest.fixture(autouse=True)
def only_loopback(loopback_guard: list[str]) -> Iterator[list[str]]:
    """Fails the test that tried to leave this machine, even where a client swallowed the refusal and tried again."""
    loopback_guard.clear()
    yield loopback_guard
    if loopback_guard:
        pytest.fail(f"this test tried to reach {', '.join(sorted(set(loopback_guard)))}", pytrace=False)


def _checked(
    real: Callable[..., Any], address_of: Callable[[tuple[Any, ...]], Any], tried: list[str]
) -> Callable[..., Any]:
    def checked(*args: Any, **options: Any) -> Any:
        address = address_of(args)
        # Unix sockets have path names for addresses.
        if isinstance(address, tuple) and address and not _is_local(address[0]):
            tried.append(str(address[0]))
            raise LeakedConnectionError(f"a test must stay on loopback, but tried {address[0]!r}")
        return real(*args, **options)

    return checked


def _is_local(host: object) -> bool:
    if isinstance(host, bytes):
        host = host.decode()
    if host in (None, "", "localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(str(host).partition("%")[0])
    except ValueError:
        return False
    # Nodes of a lab that this process runs now are namespaces of this machine, and lead nowhere else.
    return address.is_loopback or address.is_unspecified or any(address in subnet for subnet in network.live())
