"""The request to the agents, from flags and the Cluster; mistakes are reported here, before any node is contacted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from lustrain.cluster import Cluster, node_document
from lustrain.problem import UserError, did_you_mean, problem
from node_setup.agent.model import Request
from node_setup.agent.run import plan
from node_setup.agent.settings import catalog

SPELLING = "ID=VALUE, ID=on or ID=off"


@dataclass(frozen=True)
class Tuning:
    """This is what flags say, the same for all nodes; the fields are those of `agent.model.Request`, but for `skipped`: which
    of the overrides `--skip` made."""

    overrides: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    skipped: frozenset[str] = frozenset()
    profile: str | None = None
    force: bool = False
    allow_reboot: bool = False


def parse_tuning(
    only: Sequence[str], skip: Sequence[str], settings: Sequence[str], profile: str | None, **more: bool
) -> Tuning:
    """Read the flags of `node-tune`. UserError names every mistake."""
    problems = [
        problem(flag, text, "is empty", fix="name something, or leave the flag out")
        for flag, texts in (("--only", only), ("--skip", skip), ("--profile", [] if profile is None else [profile]))
        for text in texts
        if not _words([text])
    ]
    overrides: dict[str, str] = {}
    skipped: set[str] = set()
    ids = [setting.id for setting in catalog.load()] if skip else []
    for text in _words(skip):
        matches = [name for name in ids if fnmatchcase(name, text)]
        skipped.update(matches)
        if not matches:
            problems.append(problem("--skip", text, "no such setting", fix=did_you_mean(text, ids)))
    given = [("--skip", name, name, "=", "off") for name in sorted(skipped)]
    given += [("--set", text, *text.partition("=")) for text in settings]
    for flag, text, name, equals, value in given:
        if not (name.strip() and equals and value.strip()):
            problems.append(problem(flag, text, "has no value", allowed=SPELLING))
        elif overrides.get(name.strip(), value.strip()) != value.strip():
            why = f"contradicts {name.strip()}={overrides[name.strip()]}"
            problems.append(problem(flag, text, why, fix="give one of the two"))
        else:
            overrides[name.strip()] = value.strip()
    if problems:
        raise UserError(problems)
    return Tuning(overrides, tuple(_words(only)), frozenset(skipped), profile, **more)


def check_tuning(tuning: Tuning, cluster: Cluster | None) -> Tuning:
    """Return `tuning` unchanged; UserError for what every agent would refuse: unknown settings and profiles, values out of
    range."""
    request = Request(document=_document(cluster), overrides=tuning.overrides, only=tuning.only, profile=tuning.profile)
    try:
        problems = list(plan.mistakes(catalog.load(), request))
    except UserError as error:
        problems = list(error.problems)
    if problems:
        raise UserError([_as_flag(line, tuning) for line in problems])
    return tuning


def _as_flag(line: str, tuning: Tuning) -> str:
    """Name a mistake of a request, which names its field, by the flag that filled it."""
    name = line.partition(" = ")[0]
    setting = name.removeprefix("setting.")
    if name in ("only", "profile"):
        return f"--{line}"
    if setting == name:
        return line
    flag = "--skip" if setting in tuning.skipped else "--set"
    return f"{flag} {line.removeprefix('setting.')}"


def request_for(group: str | None, tuning: Tuning, cluster: Cluster | None) -> dict[str, Any]:
    """Return the request for a node of this group. Without a Cluster the agent takes what it was last tuned for."""
    expect = {"lustre_source": _lustre_source(cluster)} if cluster and cluster.lustre else {}
    if cluster and cluster.home:
        expect |= {"home_server": cluster.home.dns_name, "home_user": cluster.reach.user}
    return {
        "document": _document(cluster),
        "group": group,
        "profile": tuning.profile,
        "overrides": dict(tuning.overrides),
        "only": list(tuning.only),
        "force": tuning.force,
        "allow_reboot": tuning.allow_reboot,
        "expect": expect,
    }


def _lustre_source(cluster: Cluster) -> str:
    assert cluster.lustre is not None
    return f"{cluster.lustre.dns_name}@tcp:/{cluster.lustre.mount_name}"


def _document(cluster: Cluster | None) -> dict[str, Any]:
    return node_document(cluster) if cluster else {}


def _words(texts: Sequence[str]) -> list[str]:
    return [word.strip() for text in texts for word in text.split(",") if word.strip()]
