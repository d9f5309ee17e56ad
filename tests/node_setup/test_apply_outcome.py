"""How steps are judged by the plan that followed: in sync again, still needed, waiting, or never seen before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lustrain.status import Status
from node_setup.agent.model import PERSISTED, RUNTIME, Remark, Run, Setting, Step
from node_setup.agent.run.apply import key
from node_setup.agent.run.outcome import (
    Changes,
    enabled_by_earlier_step,
    reboot_reasons,
    result_rows,
    unplanned_changes,
)
from node_setup.agent.run.plan import Plan

SETTINGS = {name: Setting(name, "sysctl", ("cpu",), f"reason of {name}", "a source") for name in ("a", "b", "c")}


def step(setting: str = "a", part: str = RUNTIME, current: str | None = "1", needs: str = "") -> Step:
    return Step(setting, part, f"/{setting}", current, "2", (), needs)


def plan(*said: Step | Remark) -> Plan:
    steps = tuple(one for one in said if isinstance(one, Step))
    remarks = tuple(one for one in said if isinstance(one, Remark))
    return Plan("cpu", "said so", None, steps, remarks, SETTINGS)


def told(setting: str, status: str, why: str) -> Remark:
    return Remark(setting, Status(status), why)


OK = told("a", "ok", "as wanted")


def test_only_parameters_lost_by_a_remount_are_set_again() -> None:
    mount = replace(step("a"), actions=(Run(("umount", "/fsx")), Run(("mount", "/fsx"))))
    lost = replace(step("b"), actions=(Run(("lctl", "set_param", "osc.*.max_rpcs_in_flight=32")),))
    before = plan(mount, told("b", "ok", "as wanted"), told("c", "ok", "as wanted"))
    assert [enabled_by_earlier_step(one, before) for one in (lost, step("c"))] == [True, False]
    assert not enabled_by_earlier_step(lost, plan(step("a"), told("b", "ok", "as wanted")))


@pytest.mark.parametrize(
    ("one", "trouble", "after", "status", "why"),
    [
        (step(), None, [OK], "changed", "reason of a"),
        (step(), "sysctl: no", [OK], "changed", "as wanted, though sysctl: no"),
        (step(), None, [step()], "failed", "it is 1 now, wanted 2"),
        (step(), "no", [step(current="7")], "failed", "no; it is 7 now, wanted 2"),
        (step(), None, [told("a", "unknown", "it hangs")], "failed", "it cannot be read back: it hangs"),
        (step(part=PERSISTED, needs="reboot"), None, [OK], "reboot", "in place, in effect after: reboot"),
        (step(part=PERSISTED), None, [told("a", "reboot", "loaded before")], "reboot", "loaded before"),
        (step(part=RUNTIME, needs="remount"), None, [OK], "changed", "reason of a"),
    ],
)
def test_a_step_is_what_the_next_plan_says_of_it(
    one: Step, trouble: str | None, after: list[Step | Remark], status: str, why: str
) -> None:
    rows = result_rows(Changes((one,), {key(one): trouble} if trouble else {}), plan(*after))
    assert [(row["setting"], row["status"], row["why"]) for row in rows] == [("a", status, why)]


UNASKED = told("a", "unknown", "no systemd to ask")
SKIPPED = told("c", "skipped", "no")


@pytest.mark.parametrize(
    ("done", "after", "rows"),
    [
        (
            Changes((step(),)),
            [OK, told("a", "conflict", "zz.conf wins"), SKIPPED],
            [("changed", "1"), ("conflict", None), ("skipped", None)],
        ),
        (Changes((step(),), known=(UNASKED,)), [UNASKED], [("changed", "1"), ("unknown", None)]),
        (
            Changes((step("a"), step("b", PERSISTED)), known=(SKIPPED,)),
            [SKIPPED, OK, told("b", "ok", "")],
            [("changed", "1"), ("changed", "1"), ("skipped", None)],
        ),
        (Changes((step("a"), step("b"))), [step("a", current="3")], [("failed", "3"), ("changed", "1")]),
    ],
    ids=["other remarks", "unknown before", "all carried out", "a failed row shows what is there now"],
)
def test_rows_of_steps_come_first_and_no_remark_is_lost(
    done: Changes, after: list[Step | Remark], rows: list[tuple[str, str | None]]
) -> None:
    assert [(row["status"], row["found"]) for row in result_rows(done, plan(*after))] == rows


def test_all_that_waits_for_a_reboot_is_listed() -> None:
    done = Changes((step("a", PERSISTED, needs="reboot"), step("b")))
    assert reboot_reasons(result_rows(done, plan())) == ["a: in place, in effect after: reboot"]


def test_only_what_did_not_apply_before_may_follow() -> None:
    before = plan(step("a"), told("b", "ok", ""), told("c", "skipped", "not mounted"))
    assert enabled_by_earlier_step(step("c"), before)
    assert not enabled_by_earlier_step(step("b"), before)
    assert not enabled_by_earlier_step(step("a", PERSISTED), before)


def test_drift_that_no_step_foresaw_is_named() -> None:
    assert unplanned_changes(Changes((step("a"),)), plan(step("a"), step("b"))) == ["b (runtime) /b is 1, wanted 2"]


STEPS = st.builds(step, st.sampled_from("abc"), st.sampled_from([RUNTIME, PERSISTED]), st.sampled_from(["1", None]))
STATUSES = st.sampled_from(["ok", "skipped", "unknown", "failed", "reboot"])
REMARKS = st.builds(told, st.sampled_from("abc"), STATUSES, st.just("w"))
PLANS = st.builds(lambda said: plan(*said), st.lists(STEPS | REMARKS, max_size=6))


@given(PLANS, PLANS)
def test_every_step_has_one_row_and_a_needed_one_is_not_done(before: Plan, after: Plan) -> None:
    steps = {key(one): one for one in before.steps}
    rows: list[dict[str, Any]] = result_rows(Changes(tuple(steps.values()), known=before.remarks), after)
    shown = [(row["setting"], row["part"], row["target"]) for row in rows if row["part"] is not None]
    assert sorted(shown) == sorted(steps)
    left = {key(one) for one in after.steps}
    for row in rows:
        if (row["setting"], row["part"], row["target"]) in left:
            assert row["status"] == "failed"
    assert {row["status"] for row in rows if row["part"] is not None} <= {"changed", "failed", "reboot"}
