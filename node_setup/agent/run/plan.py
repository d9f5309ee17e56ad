"""The plan, from facts and settings: the profile, the settings that apply and why, and their kinds' steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from lustrain.problem import UserError, did_you_mean, problem
from lustrain.status import Status
from node_setup.agent.group import group_of
from node_setup.agent.kinds import KINDS, planner
from node_setup.agent.model import Facts, Remark, Request, Setting, Step, look_up
from node_setup.agent.settings import allowed, condition
from node_setup.agent.settings.catalog import PROFILES

LOGIN_ROLES = ("login", "controller")
GPU_FAMILIES = ("p3", "p4", "p5", "p6", "g4dn", "g5", "g6", "gr6")
GAUDI_FAMILIES = ("dl1",)
ON, OFF = "on", "off"


@dataclass(frozen=True)
class Plan:
    """This is the plan of a node: `steps` are in the order in which they are applied; `remarks` say what is not changed;
    `settings` are all, by id."""

    profile: str
    profile_why: str
    group: str | None
    steps: tuple[Step, ...]
    remarks: tuple[Remark, ...]
    settings: Mapping[str, Setting] = field(default_factory=dict)


def plan(settings: Sequence[Setting], facts: Facts, request: Request) -> Plan:
    """Plan what to do on the node that has these facts. UserError names everything that is wrong with the request."""
    problems = list(mistakes(settings, request))
    if problems:
        raise UserError(problems)
    group = group_of(facts, request)
    profile, why = choose_profile(facts, request)
    selected = _selected(settings, request.only)
    decided = [_decide(setting, _tree(facts, request, profile), profile, _overrides(request)) for setting in settings]
    remarks = [decision for decision in decided if isinstance(decision, Remark) and decision.setting in selected]
    selected, request = _leaving_unknown(selected, remarks, request)
    steps: list[Step] = []
    for kind in _kinds(settings):
        chosen = [decision for decision in decided if isinstance(decision, Setting) and decision.kind == kind]
        for planned in planner(kind)(chosen, selected, facts, request):
            if isinstance(planned, Step):
                steps.append(planned)
            else:
                remarks.append(planned)
    return Plan(profile, why, group, tuple(steps), tuple(remarks), {setting.id: setting for setting in settings})


def rows(plan: Plan) -> list[dict[str, Any]]:
    """Return one row for each step and each remark, in the catalogue's order, with the keys of the agent's result."""
    made = [_step_row(step, plan) for step in plan.steps] + [_remark_row(remark, plan) for remark in plan.remarks]
    order = {name: number for number, name in enumerate(plan.settings)}
    return sorted(made, key=lambda row: order.get(row["setting"], len(order)))


def choose_profile(facts: Facts, request: Request) -> tuple[str, str]:
    """Return the profile and why: a flag, else the cluster's tuning, else by what the node is."""
    if request.profile:
        return request.profile, "requested"
    group = group_of(facts, request)
    named = _tuning(request, "profiles").get(group)
    if named:
        return str(named), f"the cluster's tuning names it for group {group}"
    return _profile_by_facts(facts, _group_entry(facts, request))


def _profile_by_facts(facts: Facts, entry: Mapping[str, Any]) -> tuple[str, str]:
    role, kind = entry.get("role"), _instance_type(facts, entry)
    if role in LOGIN_ROLES:
        return "login", f"the group's role is {role}"
    if _fact(facts, "hpu.present") or kind.startswith(GAUDI_FAMILIES):
        return "gaudi", "it has Gaudi devices" if _fact(facts, "hpu.present") else f"{kind} has Gaudi devices"
    if _fact(facts, "efa.devices"):
        return "efa-gpu", "it has EFA devices"
    if _fact(facts, "gpu.present"):
        return "efa-gpu", "it has GPUs"
    if kind.startswith(GPU_FAMILIES) or entry.get("gpus") or entry.get("efa"):
        return "efa-gpu", f"{kind or 'its group'} has GPUs or EFA, though none is visible on the node"
    return "cpu", "neither GPUs nor EFA nor Gaudi devices are visible"


def _instance_type(facts: Facts, entry: Mapping[str, Any]) -> str:
    return str(_fact(facts, "instance.type") or entry.get("type") or "").replace("ml.", "", 1)


def _fact(facts: Facts, path: str) -> Any:
    return look_up(facts, path)[1]


def _group_entry(facts: Facts, request: Request) -> Mapping[str, Any]:
    entry: Mapping[str, Any] = (request.document.get("groups") or {}).get(group_of(facts, request)) or {}
    return entry


def _tuning(request: Request, name: str) -> Mapping[Any, Any]:
    part: Mapping[Any, Any] = (request.document.get("tuning") or {}).get(name) or {}
    return part


def _overrides(request: Request) -> dict[str, str]:
    """Return what the cluster's tuning, then flags, set for single settings."""
    return {**_tuning(request, "settings"), **request.overrides}


def _tree(facts: Facts, request: Request, profile: str) -> dict[str, Any]:
    """Return what conditions look at: the facts, and beside them what the caller wants."""
    group = {"name": group_of(facts, request), **_group_entry(facts, request)}
    return {**facts, "document": request.document, "profile": profile, "group": group}


def _selected(settings: Iterable[Setting], only: Sequence[str]) -> frozenset[str]:
    ids = [setting.id for setting in settings]
    return frozenset(name for name in ids if not only or any(fnmatchcase(name, pattern) for pattern in only))


def _leaving_unknown(
    selected: frozenset[str], remarks: Iterable[Remark], request: Request
) -> tuple[frozenset[str], Request]:
    """Leave out settings that depend on an unreadable fact: whether they apply is not known, so what is in place for them
    stays."""
    unknown = {remark.setting for remark in remarks if remark.status == Status.UNKNOWN}
    if not unknown:
        return selected, request
    known = selected - unknown
    return known, replace(request, only=tuple(sorted(known)) or ("",))


def _kinds(settings: Iterable[Setting]) -> list[str]:
    """Return the catalogue's kinds in the order of the registry; also those with nothing chosen, to clean up."""
    used = {setting.kind for setting in settings}
    return [kind for kind in KINDS if kind in used]


def _decide(setting: Setting, tree: Mapping[str, Any], profile: str, overrides: Mapping[str, str]) -> Setting | Remark:
    """Return the setting with its value where it applies, else why it does not."""
    override = overrides.get(setting.id)
    if override == OFF:
        return Remark(setting.id, Status.SKIPPED, "turned off")
    if profile not in setting.profiles:
        return Remark(setting.id, Status.SKIPPED, f"for {', '.join(setting.profiles)}; this node is {profile}")
    if not setting.default and override is None:
        return Remark(setting.id, Status.SKIPPED, f'opt-in: name it "{ON}" or give it a value')
    for text in setting.when:
        outcome = condition.judge(condition.parse(text), tree)
        if outcome.status != condition.HOLDS:
            return Remark(
                setting.id, Status.UNKNOWN if outcome.status == condition.UNKNOWN else Status.SKIPPED, outcome.why
            )
    return _with_value(setting, tree, None if override in (None, ON) else override)


def _with_value(setting: Setting, tree: Mapping[str, Any], override: str | None) -> Setting | Remark:
    if override is not None:
        return replace(setting, value=override)
    if setting.value_per is None:
        return setting
    path, times = setting.value_per
    fact = look_up(tree, path)[1]
    if not isinstance(fact, (int, float)):
        return Remark(setting.id, Status.UNKNOWN, f"{path} could not be read, and the value is {times:g} times that")
    return replace(setting, value=str(int(fact * times)))


def mistakes(settings: Sequence[Setting], request: Request) -> Iterator[str]:
    """Yield what is wrong with a request on any node, a line each; the operator's side checks this before it calls a node."""
    yield from _profile_mistakes(request)
    yield from _group_mistakes(request)
    known = {setting.id: setting for setting in settings}
    for pattern in request.only:
        if not any(fnmatchcase(name, pattern) for name in known):
            yield problem("only", pattern, "no such setting", fix=did_you_mean(pattern, known))
    cluster = _tuning(request, "settings")
    for where, overrides in (("tuning.settings", cluster), ("setting", request.overrides)):
        for name, value in overrides.items():
            yield from _override_mistakes(f"{where}.{name}", name, value, known)
    for name, value in request.overrides.items():
        if {value, cluster.get(name)} == {ON, OFF}:
            why = f'the cluster\'s tuning says "{cluster[name]}"'
            yield problem(f"setting.{name}", value, why, fix="change the cluster, else the next boot undoes it")


def _override_mistakes(where: str, name: str, value: Any, known: Mapping[str, Setting]) -> Iterator[str]:
    if name not in known:
        yield problem(where, value, "no such setting", fix=did_you_mean(name, known) or "see node-tune --check")
    elif not isinstance(value, str):
        yield problem(where, value, "wrong type", allowed="text in quotes, on, off")
    elif value not in (ON, OFF) and not allowed.accepts(known[name].allowed, value):
        yield problem(where, value, "not allowed", allowed=f"{known[name].allowed}, or on, off")


def _profile_mistakes(request: Request) -> Iterator[str]:
    profiles = {f"tuning.profiles.{group}": name for group, name in _tuning(request, "profiles").items()}
    if request.profile is not None:
        profiles["profile"] = request.profile
    for where, name in profiles.items():
        if name not in PROFILES:
            yield problem(where, name, "no such profile", allowed=", ".join(PROFILES))


def _group_mistakes(request: Request) -> Iterator[str]:
    groups = request.document.get("groups") or {}
    if request.group and groups and request.group not in groups:
        yield problem("group", request.group, "the cluster has no such group", allowed=", ".join(groups))


def _step_row(step: Step, plan: Plan) -> dict[str, Any]:
    setting = plan.settings.get(step.setting)
    row: dict[str, Any] = {"setting": step.setting, "status": Status.CHANGE, "why": setting.reason if setting else ""}
    row.update(part=step.part, target=step.target, found=step.current, wanted=step.wanted, needs=step.needs)
    return {**row, "severity": setting.severity if setting else "should"}


def _remark_row(remark: Remark, plan: Plan) -> dict[str, Any]:
    setting = plan.settings.get(remark.setting)
    row: dict[str, Any] = {
        "setting": remark.setting,
        "status": remark.status,
        "why": remark.why,
        "part": None,
        "target": None,
    }
    row.update(
        found=remark.current,
        wanted=remark.wanted,
        needs=setting.needs if setting and remark.status == Status.REBOOT else "",
    )
    return {**row, "severity": setting.severity if setting else "should"}
