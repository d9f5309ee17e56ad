"""Faults between the operator and a node: each has a kind, one line, and a fix."""

from __future__ import annotations

import errno
import os
import socket

from paramiko.ssh_exception import (
    AuthenticationException,
    BadHostKeyException,
    ChannelException,
    PasswordRequiredException,
    SSHException,
)

from node_setup.fleet.known_hosts import UnknownHostKeyError, UnrecordedError

UNREACHABLE, LOGIN, HOST_KEY = "unreachable", "login refused", "host key"
SUDO, PYTHON, DISK, TIMEOUT, LOST, NO_ANSWER, STOPPED, NOT_BEGUN = (
    "no sudo",
    "no python3",
    "disk",
    "timeout",
    "lost",
    "no answer",
    "stopped",
    "not begun",
)
RUNS_ON = "no longer waited for; an agent that is running finishes its work"
NO_WAY = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)
MISTAKE = "internal error"
NOT_REACHED = (UNREACHABLE, LOGIN, HOST_KEY)
"""Faults of these kinds came before anything was sent to the node."""


class Fault(Exception):
    """This is one node's trouble. `passing`: it may be gone a second later, and nothing was sent to the node yet."""

    def __init__(self, kind: str, why: str, fix: str = "", *, passing: bool = False) -> None:
        self.kind, self.why, self.fix, self.passing = kind, why, fix, passing
        super().__init__(f"{kind}: {why}" + (f"; fix: {fix}" if fix else ""))


def of_connecting(error: Exception, user: str, late_s: float | None, known_hosts: str, name: str) -> Fault:
    """Return the fault behind an exception of connecting as `user` to what is recorded as `name`; `late_s` are the seconds that
    went by where all of them did, which paramiko does not always tell from a connection that was closed."""
    if isinstance(error, BadHostKeyException):
        return _changed(error, known_hosts, name)
    if isinstance(error, UnknownHostKeyError):
        fix = f"check the fingerprint on the machine and add its line to {known_hosts}, or leave out --strict-host-keys"
        return Fault(HOST_KEY, str(error), fix)
    if isinstance(error, UnrecordedError):
        return Fault(HOST_KEY, str(error), "make room and make it writable, or name another file by --known-hosts")
    if isinstance(error, PasswordRequiredException):
        return Fault(LOGIN, "the key is locked by a passphrase", "ssh-add it, or fab --prompt-for-passphrase")
    if isinstance(error, OSError) and error.filename:
        return Fault(LOGIN, f"the key {error.filename}: {error.strerror}", "name a key that can be read")
    if late_s is None and (isinstance(error, AuthenticationException) or _no_key(error)):
        why = f"it accepts none of our keys for user {user}"
        return Fault(LOGIN, why, "give the right --key and --user, or put the public key on the node")
    return _unreachable(error, late_s)


def _no_key(error: Exception) -> bool:
    # What paramiko says of a key file that it cannot read, and where there was none to try.
    message = str(error)
    return isinstance(error, (SSHException, ValueError)) and (
        "No authentication methods" in message or "private key" in message or "key file" in message
    )


def _changed(error: BadHostKeyException, known_hosts: str, name: str) -> Fault:
    why = f"its host key has changed: it shows {error.key.fingerprint}, recorded is {error.expected_key.fingerprint}"
    fix = f"if the machine was made anew, ssh-keygen -R '{name}' -f {known_hosts}; if not, another machine answers in its place"
    return Fault(HOST_KEY, why, fix)


def _unreachable(error: Exception, late_s: float | None) -> Fault:
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, socket.gaierror):
        passing = error.errno == socket.EAI_AGAIN
        return Fault(UNREACHABLE, f"its name is not known: {error.strerror}", "check the address", passing=passing)
    if late_s is not None or isinstance(error, TimeoutError):
        fix = "check that the machine runs and that the firewall lets you in"
        spent = f"within {late_s:.0f} s" if late_s is not None else "in time"
        return Fault(UNREACHABLE, f"it did not answer {spent}", fix, passing=True)
    if isinstance(error, ChannelException):
        return Fault(UNREACHABLE, f"the jump host or the node opens no channel: {message}", passing=True)
    if isinstance(error, OSError) and error.errno in NO_WAY:
        fix = "check that the machine runs, and sshd on it"
        return Fault(UNREACHABLE, os.strerror(error.errno or 0).lower(), fix, passing=True)
    if isinstance(error, EOFError) or "banner" in message or isinstance(error, ConnectionError):
        return Fault(UNREACHABLE, "it closed the connection before the login", "look at sshd's log there", passing=True)
    return Fault(UNREACHABLE, message, passing=isinstance(error, (OSError, SSHException)))
