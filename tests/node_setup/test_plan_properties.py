"""Whatever a node is and whatever is asked of it: plans end, lower nothing, and keep to what was selected."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds.compare import satisfies
from node_setup.agent.kinds.files.owned_lines import parse
from node_setup.agent.model import RUNTIME, Request
from node_setup.agent.run.plan import plan, rows
from node_setup.agent.settings import catalog
from tests.node_setup.kinds_facts import applied, bare

pytestmark = pytest.mark.slow

PLAIN = ("sysctl", "limit", "file", "hold", "kernel-argument", "unit", "clock", "slurmd-limit", "module-load",
         "module-option")  # fmt: skip
SETTINGS = tuple(one for one in catalog.load() if one.kind in PLAIN)
SYSCTLS = {one.key: one for one in SETTINGS if one.kind == "sysctl"}
NUMBER = st.integers(1, 2**22).map(str)
FILES = tuple(f"{folder}/sysctl.d/{name}" for folder, name in (
    ("/usr/lib", "10-a.conf"), ("/etc", "50-b.conf"), ("/run", "95-c.conf"), ("/etc", "99-sysctl.conf")
))  # fmt: skip
SERVICE = st.fixed_dictionaries(
    {
        "load": st.sampled_from(["loaded", "not-found", "masked"]),
        "active": st.sampled_from(["active", "inactive", "failed"]),
        "enabled": st.sampled_from(["enabled", "disabled", "static", ""]),
    }
)
SYSCTL_FILES = st.dictionaries(
    st.sampled_from(FILES), st.dictionaries(st.sampled_from(sorted(SYSCTLS)), NUMBER), max_size=4
)


SYSTEMS = [{"id": "ubuntu", "family": "debian"}, {"id": "amzn", "family": "rhel"}, {"family": "other"}]
LIMITS = [None, {"memlock": ["unlimited", "unlimited"], "nofile": ["1024", "4096"]}]


@st.composite
def nodes(draw: st.DrawFn) -> dict[str, Any]:
    facts = bare(
        sysctl=draw(st.dictionaries(st.sampled_from(sorted(SYSCTLS)), NUMBER)),
        memory__gib=draw(st.sampled_from([None, 16.0, 2000.0])),
        cpu__count=draw(st.sampled_from([None, 8, 192])),
        modules__supported=draw(st.sampled_from([None, False, True])),
        modules__aws_lustre_block=draw(st.booleans()),
        init=draw(st.sampled_from(["systemd", "other", None])),
        os=draw(st.sampled_from(SYSTEMS)),
        instance__source=draw(st.sampled_from(["imds", None])),
        limits__slurmd=draw(st.sampled_from(LIMITS)),
    )
    files = draw(SYSCTL_FILES)
    facts["sysctl_files"] = [{"path": path, "values": files[path]} for path in FILES if path in files]
    for name in facts["services"]:
        facts["services"][name] = draw(SERVICE)
    return facts


IDS = st.sampled_from([one.id for one in SETTINGS])
REQUESTS = st.builds(
    Request,
    profile=st.sampled_from([None, *catalog.PROFILES]),
    overrides=st.dictionaries(IDS, st.sampled_from(["on", "off"])),
    only=st.lists(IDS, max_size=3).map(tuple),
    allow_reboot=st.booleans(),
    document=st.sampled_from([{}, *({"lustre": {"path": "/fsx", "efa": efa}} for efa in (False, True))]),
)


@given(nodes(), REQUESTS)
def test_after_a_plan_is_done_there_is_nothing_to_do(facts: dict[str, Any], request: Request) -> None:
    first = plan(SETTINGS, facts, request)
    second = plan(SETTINGS, applied(facts, first.steps), request)
    assert second.steps == ()
    changed = {step.setting for step in first.steps}
    quiet = {one.setting for one in second.remarks if one.status in (Status.OK, Status.REBOOT)}
    about = [one for one in second.remarks if one.setting in changed & quiet and one.status != Status.CONFLICT]
    assert all(one.status in (Status.OK, Status.REBOOT) for one in about)


@given(nodes(), REQUESTS)
def test_at_least_lowers_nothing_now_or_at_boot(facts: dict[str, Any], request: Request) -> None:
    made = plan(SETTINGS, facts, request)
    done = applied(facts, made.steps)
    file = done["files"][owned.SYSCTL]
    lines = parse(file["content"]) if file else {}
    for key, found in facts["sysctl"].items():
        one = SYSCTLS[key]
        if one.compare != "at-least":
            continue
        assert satisfies(done["sysctl"][key], found, "at-least")
        if one.id in lines:
            earlier = [other["values"][key] for other in facts["sysctl_files"] if key in other["values"]][-1:]
            assert all(satisfies(lines[one.id].partition("= ")[2], value, "at-least") for value in [found, *earlier])


@given(nodes(), REQUESTS, st.lists(IDS, min_size=1, max_size=3).map(tuple))
def test_a_selection_touches_and_names_nothing_else(
    facts: dict[str, Any], request: Request, only: tuple[str, ...]
) -> None:
    whole = applied(facts, plan(SETTINGS, facts, Request(document=request.document)).steps)
    asked = Request(profile=request.profile, overrides=request.overrides, document=request.document, only=only)
    made = plan(SETTINGS, whole, asked)
    assert {row["setting"] for row in rows(made)} <= set(only)
    done = applied(whole, made.steps)
    for path, was in whole["files"].items():
        if was and "# " in was["content"]:
            now = parse(done["files"][path]["content"]) if done["files"][path] else {}
            assert {k: v for k, v in parse(was["content"]).items() if k not in only} == {
                k: v for k, v in now.items() if k not in only
            }


@given(nodes(), REQUESTS)
def test_every_selected_setting_is_answered_for(facts: dict[str, Any], request: Request) -> None:
    named = {row["setting"] for row in rows(plan(SETTINGS, facts, request))}
    assert named == (set(request.only) or {one.id for one in SETTINGS})


@given(nodes(), REQUESTS)
def test_setting_turned_off_is_in_no_file_and_not_applied(facts: dict[str, Any], request: Request) -> None:
    tuned = applied(facts, plan(SETTINGS, facts, Request(document=request.document)).steps)
    off = {name for name, value in request.overrides.items() if value == "off"} & (
        set(request.only) or {*request.overrides}
    )
    made = plan(SETTINGS, tuned, request)
    assert not any(step.setting in off and step.part == RUNTIME for step in made.steps)
    done = applied(tuned, made.steps)
    for path in (owned.SYSCTL, owned.LIMITS, owned.SLURMD, owned.NEEDRESTART):
        file = done["files"][path]
        assert not file or not off & set(parse(file["content"]))
    assert all(row["status"] != Status.CHANGE or row["part"] for row in rows(made))
