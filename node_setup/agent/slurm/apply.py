"""The apply of Slurm on one node: packages, munge's key, files, daemons; each is looked at before and after.

A step whose state is as wanted does nothing, so that a second run changes nothing. The first step that fails ends the run:
those after it build on it.
"""

from __future__ import annotations

import json
import os
import pwd
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Optional

from lustrain.status import Status
from node_setup.agent.host import Host
from node_setup.agent.slurm import facts, paths
from node_setup.agent.slurm.wanted import File, Wanted

Inspect = Callable[[], Optional[str]]
"""Returns what is there in place of what is wanted; None where it is as wanted."""
Mend = Callable[[], Optional[str]]
"""Returns why it could not be done; None where nothing went wrong so far as is known."""
Log = Callable[[str], None]

PACKAGES = {
    "controller": ("slurmctld", "slurm-client"),
    "compute": ("slurmd", "slurm-client"),
    "client": ("slurm-client",),
}
"""Names of Debian and Ubuntu; munge comes on top."""
PROGRAMS = {"controller": ("slurmctld", "scontrol"), "compute": ("slurmd", "scontrol"), "client": ("scontrol",)}
DAEMONS = {"controller": "slurmctld.service", "compute": "slurmd.service"}
DATABASE_DAEMON, DATABASE_SERVER = "slurmdbd.service", "mariadb.service"
ANSWERS = {
    DAEMONS["controller"]: ("scontrol", "ping"),
    DATABASE_DAEMON: ("sacctmgr", "--noheader", "show", "cluster"),
    DATABASE_SERVER: ("mariadb-admin", "ping"),
}
"""What succeeds once a daemon is not only up, but answers."""
INSTALL_S = 900.0
LOCK_S = 300
"""apt waits so long for another apt, as that of a first boot."""
KEY_BYTES = 1024
"""Length of a key that we make; munge takes 32 to 1024: https://github.com/dun/munge/wiki/Man-8-mungekey"""
RESTARTS = """[Service]
Restart=on-failure
RestartSec=10
"""
"""Debian's units of slurmctld and slurmd have no `Restart=`. The interval is longer than systemd counts starts over (10 s, of
which five are the limit), so that it never gives up: https://www.freedesktop.org/software/systemd/man/latest/systemd.unit.html"""
STARTED_S = 30.0
SLOW = (DATABASE_DAEMON, DATABASE_SERVER)
SLOW_S = 600.0
"""slurmdbd of a newer release converts its tables before it answers, and must not be ended meanwhile
(https://slurm.schedmd.com/upgrades.html); MariaDB reads its log again after a crash."""
STABLE_S = 1.0
"""A daemon that does not take its configuration ends within a second of its start."""
POLL_S = 0.2
FORMER = ".before-lustrain"
"""Ends the name under which a replaced file that was not ours is kept."""


@dataclass(frozen=True)
class Clock:
    """Tells seconds that only grow, and waits."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


SYSTEM_CLOCK = Clock()


@dataclass(frozen=True)
class Step:
    setting: str
    target: str
    wanted: str
    inspect: Inspect
    mend: Mend
    aside: bool = False
    """Its failure ends the others aside, and not the run: slurmctld goes on with what it knew of accounts."""


def take_steps(planned: Iterable[Step], log: Log, *, check: bool) -> list[dict[str, Any]]:
    """Take the steps that are not as wanted, up to the first that fails, and return a row for each."""
    rows, aside_failed = [], False
    for step in planned:
        if step.aside and aside_failed:
            continue
        before = step.inspect()
        if before is None:
            rows.append(_row(step, Status.OK, None))
            continue
        if check:
            rows.append(_row(step, Status.CHANGE, before))
            continue
        error = step.mend()
        after = step.inspect()
        log(f"{step.setting} {step.target}: {before} -> {after or step.wanted}")
        if after is None:
            rows.append(_row(step, Status.CHANGED, before))
            continue
        why = f"{error}; it is {after} now" if error else f"it is {after} now"
        rows.append(_row(step, Status.FAILED, before, why))
        if not step.aside:
            break
        aside_failed = True
    return rows


def steps(host: Host, wanted: Wanted, clock: Clock = SYSTEM_CLOCK) -> Iterator[Step]:
    """Yield the steps in their order; each look is of the moment."""
    yield _packages(host, wanted)
    yield _key(host, wanted)
    for path, user, mode in _folders(wanted):
        yield _folder(host, path, user, mode)
    yield service(host, "munge.service", clock)
    daemons = tuple(DAEMONS[duty] for duty in wanted.duties if duty in DAEMONS)
    for daemon in sorted(set(DAEMONS.values()) - set(daemons)):
        yield _no_service(host, daemon)
    for file in wanted.files:
        yield file_step(host, file, daemons)
    for daemon in daemons:
        header = paths.HEADER if wanted.enabled else paths.STACK_HEADER
        yield file_step(host, File(paths.restart_drop_in(daemon), f"{header}{RESTARTS}"), ())
        yield service(host, daemon, clock, enabled=wanted.enabled)


def _row(step: Step, status: Status, before: str | None, why: str = "") -> dict[str, Any]:
    shown = {"setting": step.setting, "target": step.target, "status": status.value, "why": why}
    return {**shown, "part": None, "found": before or step.wanted, "wanted": step.wanted}


def _packages(host: Host, wanted: Wanted) -> Step:
    programs = [*dict.fromkeys(program for duty in wanted.duties for program in PROGRAMS[duty]), "munged", "munge"]
    names = [*dict.fromkeys(name for duty in wanted.duties for name in PACKAGES[duty]), "munge"]
    if wanted.accounting:
        programs, names = [*programs, "slurmdbd", "sacctmgr"], [*names, "slurmdbd"]
        if wanted.accounting.own_database:
            programs, names = [*programs, "mariadbd", "mariadb"], [*names, "mariadb-server"]

    def inspect() -> str | None:
        missing = [program for program in programs if host.which(program) is None]
        return f"{', '.join(missing)} missing" if missing else None

    def mend() -> str | None:
        apt = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-o", f"DPkg::Lock::Timeout={LOCK_S}")
        # A MySQL that is there would be removed for MariaDB.
        options = ("-y", "--no-remove", "--no-install-recommends", "-o", "Dpkg::Options::=--force-confold")
        updated = host.run((*apt, "update"), INSTALL_S)
        done = host.run((*apt, "install", *options, *names), INSTALL_S)
        # A mirror that does not answer need not matter: the packages may be in its cache.
        before = "" if updated.ok else f", after apt-get update: {updated.complaint}"
        return None if done.ok else f"apt-get install: {done.complaint}{before}"

    return Step("slurm.packages", ", ".join(names), "installed", inspect, mend)


def _key(host: Host, wanted: Wanted) -> Step:
    """Return the step of munge's key: the controller keeps its own, or makes one; the others get the controller's."""

    def inspect() -> str | None:
        key = facts.read_bytes(host, paths.MUNGE_KEY)
        if not key:
            return "no key"
        if wanted.munge_digest is not None and sha256(key).hexdigest() != wanted.munge_digest:
            return "another key"
        return wrong_owner(host, paths.MUNGE_KEY, "munge", 0o400)

    def mend() -> str | None:
        key = wanted.munge_key or facts.read_bytes(host, paths.MUNGE_KEY)
        if not key and wanted.munge_digest is None:
            key = os.urandom(KEY_BYTES)
        if not key or (wanted.munge_digest is not None and sha256(key).hexdigest() != wanted.munge_digest):
            return "the key did not come along"
        _owe_restart(host, "munge.service")
        try:
            if facts.read_bytes(host, paths.MUNGE_KEY) != key:
                _keep_former(host, paths.MUNGE_KEY)
            host.write_bytes(paths.MUNGE_KEY, key, 0o400)
            _give(host, paths.MUNGE_KEY, "munge")
        except (OSError, KeyError) as error:
            return str(error)
        return None

    return Step("slurm.munge-key", paths.MUNGE_KEY, "the cluster's key, 0400 of munge", inspect, mend)


def _folders(wanted: Wanted) -> list[tuple[str, str, int]]:
    """Owners follow from slurm.conf: slurmctld runs as `slurm`, slurmd as root."""
    made = [(paths.LOGS, "slurm", 0o755)] if set(wanted.duties) & set(DAEMONS) else []
    if "controller" in wanted.duties:
        made.append((paths.STATE, "slurm", 0o700))
    if "compute" in wanted.duties:
        made.append((paths.SPOOL, "root", 0o755))
    return made


def _folder(host: Host, path: str, user: str, mode: int) -> Step:
    def inspect() -> str | None:
        return wrong_owner(host, path, user, mode) if host.exists(path) else "missing"

    def mend() -> str | None:
        try:
            host.path(path).mkdir(parents=True, exist_ok=True)
            host.path(path).chmod(mode)
            _give(host, path, user)
        except (OSError, KeyError) as error:
            return str(error)
        return None

    return Step("slurm.folder", path, f"{mode:04o} of {user}", inspect, mend)


def file_step(host: Host, file: File, daemons: tuple[str, ...]) -> Step:
    def inspect() -> str | None:
        content = host.read(file.path)
        if content is None:
            return "missing"
        if content != file.content:
            return "another content"
        if file.owner:
            return wrong_owner(host, file.path, file.owner, file.mode)
        mode = stat.S_IMODE(os.stat(host.path(file.path)).st_mode)
        return None if mode == file.mode else f"mode {mode:04o}"

    def mend() -> str | None:
        for daemon in daemons:
            _owe_restart(host, daemon)
        try:
            former = host.read(file.path) or ""
            if paths.HEADER not in former and paths.STACK_HEADER not in former:
                _keep_former(host, file.path)
            host.write(file.path, file.content, file.mode)
            if file.owner:
                _give(host, file.path, file.owner)
            if file.path.startswith("/etc/systemd/"):
                host.run(("systemctl", "daemon-reload"), 60)
        except (OSError, KeyError) as error:
            return str(error)
        return None

    return Step("slurm.file", file.path, "as planned", inspect, mend)


def service(host: Host, unit: str, clock: Clock, *, enabled: bool = True) -> Step:
    """Return the step of a daemon, which is restarted after a change.

    `scontrol reconfigure` takes a changed list of nodes only since 23.11; jobs outlive both:
    https://slurm.schedmd.com/slurm.conf.html
    """

    def inspect() -> str | None:
        state = facts.unit_state(host, unit)
        runs = state["active"] == "active"
        wrong = [] if runs else [state["active"] or "unknown"]
        if (state["enabled"] == "enabled") != enabled:
            wrong.append("not enabled" if enabled else "enabled")
        wrong += ["not restarted since its files changed"] if runs and unit in _restarts_owed(host) else []
        return ", ".join(wrong) or None

    def mend() -> str | None:
        verbs = ["enable"] if enabled else ["disable"] * (facts.unit_state(host, unit)["enabled"] == "enabled")
        # At a reboot slurmd's start waits for the unit that tunes, which waits for the boot unit, which is us (seen with 252).
        mode = () if enabled else ("--job-mode=ignore-dependencies",)
        slow = unit in SLOW
        starts = slow and facts.unit_state(host, unit)["active"] == "activating" and unit not in _restarts_owed(host)
        restart = () if starts else (("systemctl", "restart", *mode, unit),)
        for command in (*(("systemctl", verb, unit) for verb in verbs), *restart):
            done = host.run(command, SLOW_S if slow else 120)
            if slow and command in restart:
                # The next try shall wait for it, and not end it while it is at work.
                _restarted(host, unit)
            if not done.ok:
                return f"{' '.join(command)}: {done.complaint}; fix: journalctl -u {unit}"
        if not _stays_up(host, unit, clock):
            return f"{unit} does not stay up; fix: journalctl -u {unit}"
        _restarted(host, unit)
        return None

    return Step("slurm.service", unit, "active, enabled" if enabled else "active, not enabled", inspect, mend)


def _no_service(host: Host, unit: str) -> Step:
    """Return the step that ends a daemon whose duty went to another machine: there must be one controller."""

    def inspect() -> str | None:
        state = facts.unit_state(host, unit)
        # One that does not answer may run, and two controllers would start the same jobs.
        wrong = [] if state["active"] in ("inactive", "failed") else [state["active"] or "unknown"]
        return ", ".join([*wrong, *(["enabled"] if state["enabled"] == "enabled" else [])]) or None

    def mend() -> str | None:
        done = host.run(("systemctl", "disable", "--now", unit), 120)
        return None if done.ok else f"systemctl disable --now {unit}: {done.complaint}"

    return Step("slurm.service", unit, "not running, not enabled", inspect, mend)


def _stays_up(host: Host, unit: str, clock: Clock) -> bool:
    """Wait until the daemon has been up for a while; some also have to answer."""
    end = clock.monotonic() + (SLOW_S if unit in SLOW else STARTED_S)
    up_since: float | None = None
    while clock.monotonic() < end:
        up = facts.unit_state(host, unit)["active"] == "active"
        if up and (question := ANSWERS.get(unit)):
            up = host.run(question).ok
        now = clock.monotonic()
        up_since = (now if up_since is None else up_since) if up else None
        if up_since is not None and now - up_since >= STABLE_S:
            return True
        clock.sleep(POLL_S)
    return False


def _restarts_owed(host: Host) -> list[str]:
    try:
        owed = json.loads(host.read(paths.RESTART_OWED) or "[]")
    except ValueError:
        return list(DAEMONS.values())
    return [unit for unit in owed if isinstance(unit, str)] if isinstance(owed, list) else []


def _owe_restart(host: Host, unit: str) -> None:
    owed = _restarts_owed(host)
    if unit not in owed:
        host.write(paths.RESTART_OWED, json.dumps([*owed, unit]))


def _restarted(host: Host, unit: str) -> None:
    if unit in (owed := _restarts_owed(host)):
        host.write(paths.RESTART_OWED, json.dumps([other for other in owed if other != unit]))


def wrong_owner(host: Host, path: str, user: str, mode: int) -> str | None:
    try:
        status, wanted = os.stat(host.path(path)), pwd.getpwnam(user)
    except KeyError:
        return f"without a user {user}"
    except OSError as error:
        return error.strerror
    seen = stat.S_IMODE(status.st_mode)
    return None if (status.st_uid, seen) == (wanted.pw_uid, mode) else f"{seen:04o} of uid {status.st_uid}"


def _keep_former(host: Host, path: str) -> None:
    """Copy a file that is about to be replaced, with its mode and owner; the first copy stays. OSError."""
    content, copy = facts.read_bytes(host, path), path + FORMER
    if not content or host.exists(copy):
        return
    status = os.stat(host.path(path))
    host.write_bytes(copy, content, stat.S_IMODE(status.st_mode))
    os.chown(host.path(copy), status.st_uid, status.st_gid)


def _give(host: Host, path: str, user: str) -> None:
    account = pwd.getpwnam(user)
    os.chown(host.path(path), account.pw_uid, account.pw_gid)
