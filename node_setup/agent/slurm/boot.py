"""The part of Slurm that a node of a stack has, at every boot: by /etc/lustrain/node.json and the bundle's slurm.json.

Nodes are dynamic ones, which tell the controller what they are. Their daemons are started here and not by systemd: a node takes
jobs once its file systems are mounted and its settings in place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from lustrain.problem import UserError, problem
from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.facts import scheduler
from node_setup.agent.facts.instance import NODE
from node_setup.agent.host import Host
from node_setup.agent.run import lock
from node_setup.agent.slurm import accounting, apply, facts, gres, key, paths, volume
from node_setup.agent.slurm.wanted import DUTIES, Accounting, File, Wanted

WAIT_S = 1500.0
"""For what the stack makes meanwhile: munge's key, the state volume. first_boot.sh gives the whole step 30 minutes."""
KNOWN_KEY_WAIT_S = 60.0
"""At a later boot the key is there already, and Secrets Manager may be away."""
ANSWERS_S, REGISTERS_S, LOCK_S, POLL_S = 600.0, 120.0, 300.0, 5.0
GIVEN_UP_S = 360.0
"""More than Slurm's own SlurmdTimeout of 300 s, where the stack's settings say so."""
OLDEST = (22, 5)
"""With dynamic nodes: https://slurm.schedmd.com/archive/slurm-22.05.0/dynamic_nodes.html"""
WATCH = paths.WATCH_UNIT.rpartition("/")[2]
WATCH_UNIT = f"""{paths.STACK_HEADER}[Unit]
Description=Slurm and what AWS announces: notices, nodes that are gone

[Service]
EnvironmentFile=-/etc/lustrain/proxy.env
ExecStart=/usr/bin/python3 -I -S {owned.AGENT} slurm-watch
Restart=always
RestartSec=10
Nice=10
"""


@dataclass(frozen=True)
class Part:
    """What node.json and slurm.json say of this node."""

    duty: str
    host: str
    address: str
    secret: str
    volume: str | None
    group: str
    features: tuple[str | None, ...]
    gpus: int
    files: Mapping[str, str]
    cgroup: Mapping[str, str]
    scaling: Mapping[str, Any] | None = None
    """For the controller: the groups that go to zero."""
    accounting: Mapping[str, Any] | None = None
    """Of a cluster with slurmdbd."""


def part(host: Host, text: str) -> Part | None:
    """Read both documents; None where the node has no part in a Slurm. UserError."""
    node, bundle = _table(NODE, host.read(NODE) or ""), _table("slurm.json", text)
    own = node.get("slurm")
    if own is None:
        return None
    if not isinstance(own, dict) or own.get("duty") not in DUTIES:
        raise UserError(problem(f"slurm of {NODE}", own, "is no part of a Slurm", ", ".join(DUTIES), "`pulumi up`"))
    group = str(node.get("group"))
    gpus: Any = bundle.get("gpus")
    try:
        known = (node.get("instance_type"), node.get("capacity"), node.get("zone_id"))
        return Part(
            own["duty"], own["host"], own["address"], own["munge_secret"], own["state_volume"], group,
            # A feature that is another group's name would put the node into that group's partition.
            (group, *(word for word in known if word not in gpus)), gpus.get(group, 0), bundle["files"], bundle["cgroup"],
            bundle.get("scaling"), bundle.get("accounting"),
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(problem(f"{NODE} and slurm.json", None, f"do not fit this agent: {error!r}")) from None


def boot(
    host: Host, text: str, log: apply.Log, tune: Callable[[], object], clock: apply.Clock = apply.SYSTEM_CLOCK
) -> list[dict[str, Any]]:
    """Bring this node's part of Slurm up, and return a row for each step. UserError; lock.BusyError.

    `tune` makes the settings that only a node with slurmd has; slurmd's first check of the node would drain it without them.
    """
    mine = part(host, text)
    if mine is None:
        return []
    with lock.hold(host, LOCK_S):
        rows = _take(_packages(host, mine, clock), log)
    if rows[-1]["status"] == Status.FAILED:
        return rows
    if mine.duty == "compute" and not host.exists(owned.SLURMD):
        tune()
    munge = _key(host, mine, log, clock)
    records = _accounting(host, mine, log, clock)
    with lock.hold(host, LOCK_S):
        return rows + _take(_steps(host, mine, munge, records, clock), log)


def _take(steps: Iterable[apply.Step], log: apply.Log) -> list[dict[str, Any]]:
    rows = apply.take_steps(steps, log, check=False)
    for row in rows:
        if row["status"] == Status.FAILED:
            log(f"failed: {row['setting']} {row['target']}: {row['why']}")
    return rows


def _packages(host: Host, mine: Part, clock: apply.Clock) -> Iterator[apply.Step]:
    """Yield the steps up to the packages, after which the release is known for sure."""
    yield _release(host)
    if mine.duty == "compute":
        yield _gpus(mine, len(facts.gpus(host, facts.cores_of(host))))
    yield next(apply.steps(host, Wanted((mine.duty,), (), accounting=_planned(mine)), clock))
    yield _release(host)


def _key(host: Host, mine: Part, log: apply.Log, clock: apply.Clock) -> bytes | None:
    """Return munge's key; None where the node has one from an earlier boot and the secret cannot be read now."""
    has = mine.secret in (host.read(paths.CONF) or "") and host.exists(paths.MUNGE_KEY)
    wait_s = KNOWN_KEY_WAIT_S if has else WAIT_S
    try:
        return key.munge_key(host, mine.secret, wait_s, log, clock, makes=mine.duty == "controller")
    except UserError as error:
        if not has:
            raise
        log(f"WARNING: {error}; going on with the key of an earlier boot")
        return None


def _planned(mine: Part) -> Accounting | None:
    """Return what a controller has for Slurm's records, without what is secret."""
    if mine.duty != "controller" or mine.accounting is None:
        return None
    plan = mine.accounting
    own = plan["secret"] is None
    return Accounting(plan["cluster"], plan["conf"], own_database=own, on_volume=own and mine.volume is not None)


def _accounting(host: Host, mine: Part, log: apply.Log, clock: apply.Clock) -> Accounting | None:
    """Return the plan with the login of a database elsewhere: that of an earlier boot where the secret cannot be read now."""
    planned = _planned(mine)
    if planned is None or planned.own_database:
        return planned
    assert mine.accounting is not None
    former = host.read(paths.DBD_CONF) or ""
    has = former.startswith(planned.conf)
    try:
        name, password = key.login(host, mine.accounting["secret"], KNOWN_KEY_WAIT_S if has else WAIT_S, log, clock)
    except UserError as error:
        if not has:
            raise
        log(f"WARNING: {error}; going on with the login of an earlier boot")
        return replace(planned, conf=former)
    return replace(planned, conf=planned.conf + accounting.login_lines(name, password))


def _steps(
    host: Host, mine: Part, munge: bytes | None, records: Accounting | None, clock: apply.Clock
) -> Iterator[apply.Step]:
    if mine.duty == "controller":
        yield _host_name(host, mine.host)
        if mine.volume is not None:
            yield from volume.steps(host, mine.volume, WAIT_S, clock)
    computes = mine.duty == "compute"
    seen = facts.gpus(host, facts.cores_of(host)) if computes else []
    first = paths.STACK_HEADER not in (host.read(paths.OPTIONS) or "")
    digest = sha256(munge).hexdigest() if munge else None
    wanted = Wanted((mine.duty,), _files(host, mine, seen), digest, munge, enabled=False, accounting=records)
    for step in accounting.all_steps(host, wanted, clock):
        if computes and step.target == apply.DAEMONS["compute"]:
            if first:
                yield _answers(host, clock)
                yield no_predecessor(host, clock)
            yield apply.file_step(host, _options(mine, seen), (apply.DAEMONS["compute"],))
        yield step
    if mine.duty == "controller" and mine.scaling:
        yield apply.file_step(host, File(paths.SCALING, json.dumps(mine.scaling) + "\n"), (WATCH,))
    if mine.duty != "client":
        yield apply.file_step(host, File(paths.WATCH_UNIT, WATCH_UNIT), (WATCH,))
        yield apply.service(host, WATCH, clock, enabled=False)
    if computes:
        yield registers(host, clock)


def _files(host: Host, mine: Part, gpus: list[dict[str, Any]]) -> tuple[File, ...]:
    """Return the files of /etc/slurm. slurm.conf remembers the secret that the node's key is of."""
    head = f"{paths.STACK_HEADER}# munge: {mine.secret}\nSlurmctldHost={mine.host}({mine.address})\n"
    if mine.accounting:
        head += f"AccountingStorageHost={mine.address}\n"
    programs = dict(mine.files)
    texts = {
        "slurm.conf": programs.pop("slurm.conf").replace(paths.STACK_HEADER, head),
        "gres.conf": paths.STACK_HEADER + "".join(f"{line}\n" for line in gres.device_words(gpus)),
        "cgroup.conf": mine.cgroup[facts.cgroup(host) or "none"],
    }
    made = [File(name, text) for name, text in texts.items()]
    return (*made, *(File(name, text, 0o755) for name, text in programs.items()))


def _options(mine: Part, gpus: list[dict[str, Any]]) -> File:
    """Return slurmd's options, which the packages' unit takes from this file."""
    words = {"RealMemory": str(gres.real_memory(facts.memory_mib() or 0)), "Gres": gres.gres(gpus)}
    words["Feature"] = ",".join(gres.features(mine.features))
    conf = " ".join(f"{name}={value}" for name, value in words.items() if value)
    return File(paths.OPTIONS, f"{paths.STACK_HEADER}SLURMD_OPTIONS=\"-Z --conf '{conf}'\"\n")


def _release(host: Host) -> apply.Step:
    def inspect() -> str | None:
        known = facts.release_here(host)
        return None if known is None or known >= OLDEST else f"{known[0]}.{known[1]:02d}"

    def mend() -> str | None:
        return "this image's Slurm knows no dynamic nodes; fix: name an image of Ubuntu 24.04 or Debian 12 in the stack"

    return apply.Step("slurm.release", "Slurm", "22.05 or newer", inspect, mend)


def _host_name(host: Host, name: str) -> apply.Step:
    def inspect() -> str | None:
        seen = scheduler.own_name(host)
        return None if seen == name else seen or "none"

    def mend() -> str | None:
        host.write("/etc/hostname", f"{name}\n")
        done = host.run(("hostname", name))
        return None if done.ok else done.complaint

    return apply.Step("slurm.host-name", name, "as in SlurmctldHost", inspect, mend)


def _gpus(mine: Part, seen: int) -> apply.Step:
    def mend() -> str | None:
        return "Slurm would never give it the jobs of its group; fix: nvidia-smi there, or NVIDIA's driver of the image"

    return apply.Step(
        "slurm.gpus", mine.group, f"{mine.gpus} GPUs", lambda: None if seen == mine.gpus else f"{seen} GPUs", mend
    )


def _answers(host: Host, clock: apply.Clock) -> apply.Step:
    def inspect() -> str | None:
        return None if host.run(("scontrol", "ping"), 30).ok else "it does not answer"

    def mend() -> str | None:
        _wait(inspect, ANSWERS_S, clock)
        return "fix: look at the boot of the controller; open TCP 6817 to it"

    return apply.Step("slurm.controller", "slurmctld", "answers", inspect, mend)


def no_predecessor(host: Host, clock: apply.Clock) -> apply.Step:
    """Return the step that deletes the node that had this new machine's name: it may be drained, or of another group.

    It cannot be deleted while it has a job, which it has until Slurm gives it up.
    """
    name = scheduler.own_name(host)

    def inspect() -> str | None:
        node, error = scheduler.show_node(host, name)
        return "known from a machine before it" if node else error

    def delete() -> str | None:
        done = host.run(("scontrol", "delete", f"NodeName={name}"), 30)
        return None if done.ok or inspect() is None else f"scontrol delete: {done.complaint}"

    return apply.Step("slurm.predecessor", name, "not known yet", inspect, lambda: _wait(delete, GIVEN_UP_S, clock))


def _wait(inspect: apply.Inspect, limit_s: float, clock: apply.Clock) -> str | None:
    """Inspect until nothing is wrong any more or the time is over, and return what is wrong then."""
    end = clock.monotonic() + limit_s
    while (wrong := inspect()) and clock.monotonic() < end:
        clock.sleep(POLL_S)
    return wrong


def registers(host: Host, clock: apply.Clock) -> apply.Step:
    name = scheduler.own_name(host)

    def inspect() -> str | None:
        node, error = scheduler.show_node(host, name)
        return None if node and scheduler.is_registered(node) else error or (node or {}).get("state") or "not known"

    def mend() -> str | None:
        _wait(inspect, REGISTERS_S, clock)
        return "fix: open TCP 6817 and 6818 among the nodes; journalctl -u slurmd"

    return apply.Step("slurm.node", name, "registered", inspect, mend)


def _table(where: str, text: str) -> Mapping[str, Any]:
    try:
        table = json.loads(text)
    except ValueError:
        table = None
    if not isinstance(table, dict):
        raise UserError(problem(where, None, "is not a JSON object", fix="`pulumi up` writes it anew"))
    return table
