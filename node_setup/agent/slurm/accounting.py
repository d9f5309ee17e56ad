"""Slurm's records of jobs on its controller: slurmdbd, and a MariaDB unless the database is elsewhere.

MariaDB takes slurmdbd's user for who it is by its socket, so that there is no password. That of a database elsewhere goes from
Secrets Manager through this process' memory into slurmdbd.conf, and is in no command line and no log.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace

from lustrain.problem import UserError, problem
from node_setup.agent.host import Host
from node_setup.agent.slurm import apply, paths
from node_setup.agent.slurm.wanted import Accounting, File, Wanted

DATABASE = "slurm_acct_db"
"""Of a MariaDB on the controller. slurmdbd.conf says the same (node_setup/slurm/accounting.py)."""
DATA = "/var/lib/mysql"
ON_VOLUME = f"{paths.STATE}/mariadb"
MOUNT_PATH = "/etc/systemd/system/var-lib-mysql.mount"
MOUNT = f"""{paths.STACK_HEADER}[Unit]
Description=Data of MariaDB on the volume of Slurm's state
RequiresMountsFor={paths.STATE}

[Mount]
What={ON_VOLUME}
Where={DATA}
Options=bind
"""
DROP_IN = File(
    "/etc/systemd/system/mariadb.service.d/90-lustrain.conf",
    f"""{paths.STACK_HEADER}[Unit]
# On the root volume MariaDB would begin without a record.
RequiresMountsFor={DATA}
""",
)
SERVER_CONF = File(
    "/etc/mysql/mariadb.conf.d/10-lustrain.cnf",
    f"""{paths.STACK_HEADER}[mariadb]
innodb_buffer_pool_size=1G
innodb_lock_wait_timeout=900
""",
)
"""What slurmdbd asks of a database (https://slurm.schedmd.com/accounting.html#mysql-configuration), in a file
that is read before those of others."""
CALL_S, COPY_S = 60.0, 900.0
_FOUND = f"""SELECT
 (SELECT COUNT(*) FROM information_schema.schemata WHERE schema_name='{DATABASE}') +
 (SELECT COUNT(*) FROM mysql.user WHERE User='slurm' AND Host='localhost' AND plugin='unix_socket') +
 (SELECT COUNT(*) FROM mysql.db WHERE User='slurm' AND Host='localhost' AND Db='{DATABASE}');
"""
_MAKE = f"""CREATE DATABASE IF NOT EXISTS {DATABASE};
CREATE USER IF NOT EXISTS 'slurm'@'localhost' IDENTIFIED VIA unix_socket;
GRANT ALL ON {DATABASE}.* TO 'slurm'@'localhost';
"""


def all_steps(host: Host, wanted: Wanted, clock: apply.Clock = apply.SYSTEM_CLOCK) -> Iterator[apply.Step]:
    """Yield the steps of a node; those of accounting come before slurmctld, which asks slurmdbd at its first start.

    Where they fail, slurmctld is tried all the same: it ends by itself only where its state holds nothing of accounts."""
    for step in apply.steps(host, wanted, clock):
        if wanted.accounting and (step.setting, step.target) == ("slurm.service", apply.DAEMONS["controller"]):
            for own in _steps(host, wanted.accounting, clock, enabled=wanted.enabled):
                yield replace(own, aside=True)
        yield step


def login_lines(username: str, password: str) -> str:
    """Return the lines of slurmdbd.conf with a user's name and password. UserError, which shows neither."""
    lines = []
    for key, text in {"StorageUser": username, "StoragePass": password}.items():
        if not re.fullmatch(r"[!-~]+", text) or '"' in text:
            why = "cannot stand in slurmdbd.conf"
            raise UserError(problem(key, None, why, "printable ASCII without spaces and quotes", "choose another"))
        # https://slurm.schedmd.com/slurm.conf.html: # begins a comment unless it is escaped.
        lines.append(f"{key}={text.replace(chr(92), chr(92) * 2).replace('#', chr(92) + '#')}\n")
    return "".join(lines)


def _steps(host: Host, wanted: Accounting, clock: apply.Clock, *, enabled: bool) -> Iterator[apply.Step]:
    if wanted.own_database:
        if wanted.on_volume:
            yield _data(host)
            yield apply.file_step(host, File(MOUNT_PATH, MOUNT), ())
            mounted = apply.service(host, MOUNT_PATH.rpartition("/")[2], clock, enabled=False)
            # The package has started it with the data of the root volume.
            yield replace(mounted, mend=lambda: _stop_server(host) or mounted.mend())
            yield apply.file_step(host, DROP_IN, (apply.DATABASE_SERVER,))
        yield apply.file_step(host, SERVER_CONF, (apply.DATABASE_SERVER,))
        yield apply.service(host, apply.DATABASE_SERVER, clock, enabled=enabled)
        yield _database(host)
    yield _conf(host, wanted.conf)
    yield apply.service(host, apply.DATABASE_DAEMON, clock, enabled=enabled)
    yield _cluster(host, wanted.cluster)


def _data(host: Host) -> apply.Step:
    """Return the step of MariaDB's data: those that its package has made, once, and then what lies there, whose owner may have
    another number on a new machine."""

    def inspect() -> str | None:
        return apply.wrong_owner(host, ON_VOLUME, "mysql", 0o700) if host.exists(ON_VOLUME) else "missing"

    def mend() -> str | None:
        if error := _stop_server(host):
            return error
        if not host.exists(ON_VOLUME):
            aside = f"{ON_VOLUME}.new"
            try:
                if host.exists(aside):
                    shutil.rmtree(host.path(aside))
                # Half of a copy must not get the name, also after a crash.
                for words in (("cp", "--archive", "--no-target-directory", DATA, aside), ("sync", "-f", aside)):
                    copied = host.run(words, COPY_S)
                    if not copied.ok:
                        return f"{words[0]}: {copied.complaint}"
                host.path(aside).rename(host.path(ON_VOLUME))
            except OSError as error:
                return str(error)
        for command in (("chown", "--recursive", "mysql:mysql", ON_VOLUME), ("chmod", "0700", ON_VOLUME)):
            done = host.run(command, COPY_S)
            if not done.ok:
                return f"{command[0]}: {done.complaint}"
        return None

    return apply.Step("slurm.database-data", ON_VOLUME, "0700 of mysql", inspect, mend)


def _stop_server(host: Host) -> str | None:
    done = host.run(("systemctl", "stop", apply.DATABASE_SERVER), 120)
    return None if done.ok else f"systemctl stop {apply.DATABASE_SERVER}: {done.complaint}"


def _database(host: Host) -> apply.Step:
    words = ("mariadb", "--batch", "--skip-column-names")

    def inspect() -> str | None:
        done = host.run(words, CALL_S, _FOUND)
        return None if done.ok and done.out.strip() == "3" else "missing" if done.ok else done.complaint

    def mend() -> str | None:
        done = host.run(words, CALL_S, _MAKE)
        return None if done.ok else f"mariadb: {done.complaint}"

    return apply.Step("slurm.database", DATABASE, "of the user slurm, by its socket", inspect, mend)


def _conf(host: Host, text: str) -> apply.Step:
    """Return the step of slurmdbd.conf, which has to be its user's alone: https://slurm.schedmd.com/slurmdbd.conf.html"""
    step = apply.file_step(host, File(paths.DBD_CONF, text, 0o600, "slurm"), (apply.DATABASE_DAEMON,))

    def mend() -> str | None:
        former = host.read(paths.DBD_CONF)
        if former is not None and paths.HEADER not in former and paths.STACK_HEADER not in former:
            return "it belongs to a slurmdbd that is not ours; fix: name that one in slurm.settings, or take it away"
        return step.mend()

    return replace(step, mend=mend)


def _cluster(host: Host, name: str) -> apply.Step:
    show = ("sacctmgr", "--noheader", "--parsable2", "show", "cluster", name, "format=cluster")

    def inspect() -> str | None:
        done = host.run(show, CALL_S)
        return (None if done.out.strip() == name else "not registered") if done.ok else done.complaint

    def mend() -> str | None:
        done = host.run(("sacctmgr", "--immediate", "add", "cluster", name), CALL_S)
        return None if done.ok else f"sacctmgr: {done.complaint}"

    return apply.Step("slurm.accounting", name, "registered with slurmdbd", inspect, mend)
