"""How steps are judged by the plan that followed: in sync again, still needed, waiting, or never seen before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_setup.agent.model import PERSISTED, RUNTIME, Remark, Run, Setting, Step
from node_setup.agent.run.apply import key
from node_setup.agent.run.outcome import Changes, applied, followed, reboots, unplanned
from node_setup.agent.run.plan import Plan

SETTINGS = {name: Setting(name, "sysctl", ("cpu",), f"reason of {name}", "a source") for name in ("a", "b", "c")}


def step(setting: str = "a", part: str = RUNTIME, found: str | None = "1", needs: str = "") -> Step:
    return Step(setting, part, f"/{setting}", found, "2", (), needs)


def plan(*said: Step | Remark) -> Plan:
    steps = tuple(one for one in said if isinstance(one, Step))
    remarks = tuple(one for one in said if isinstance(one, Remark))
    return Plan("cpu", "said so", None, steps, remarks, SETTINGS)


def judged(done: Changes, after: Plan) -> list[tuple[str, str, str]]:
    return [(row["setting"], row["status"], row["why"]) for row in applied(done, after)]


OK = Remark("a", "ok", "as wanted")


def test_parameters_that_a_mount_lost_as_it_was_made_anew_are_set_again_and_nothing_else_is() -> None:
    mount = replace(step("a"), actions=(Run(("umount", "/fsx")), Run(("mount", "/fsx"))))
    lost = replace(step("b"), actions=(Run(("lctl", "set_param", "osc.*.max_rpcs_in_flight=32")),))
    before = plan(mount, Remark("b", "ok", "as wanted"), Remark("c", "ok", "as wanted"))
    assert [followed(one, before) for one in (lost, step("c"))] == [True, False]
    assert not followed(lost, plan(step("a"), Remark("b", "ok", "as wanted")))


@pytest.mark.parametrize(
    ("one", "trouble", "after", "status", "why"),
    [
        (step(), None, [OK], "changed", "reason of a"),
        (step(), "sysctl: no", [OK], "changed", "as wanted, though sysctl: no"),
        (step(), None, [step()], "failed", "it is 1 now, wanted 2"),
        (step(), "no", [step(found="7")], "failed", "no; it is 7 now, wanted 2"),
        (step(), None, [Remark("a", "unknown", "it hangs")], "failed", "it cannot be read back: it hangs"),
        (step(part=PERSISTED, needs="reboot"), None, [OK], "reboot", "in place, in effect after: reboot"),
        (step(part=PERSISTED), None, [Remark("a", "reboot", "loaded before")], "reboot", "loaded before"),
        (step(part=RUNTIME, needs="remount"), None, [OK], "changed", "reason of a"),
    ],
)
def test_a_step_is_what_the_next_plan_says_of_it(
    one: Step, trouble: str | None, after: list[Step | Remark], status: str, why: str
) -> None:
    done = Changes((one,), {key(one): trouble} if trouble else {})
    assert judged(done, plan(*after)) == [("a", status, why)]


def test_a_failed_row_shows_what_is_there_now_and_a_changed_one_what_was() -> None:
    done = Changes((step("a"), step("b")))
    found = {row["setting"]: row["found"] for row in applied(done, plan(step("a", found="3")))}
    assert found == {"a": "3", "b": "1"}


def test_what_was_unknown_before_says_nothing_of_a_step_and_stays_told() -> None:
    before = Remark("a", "unknown", "no systemd to ask")
    assert judged(Changes((step(),), known=(before,)), plan(before)) == [
        ("a", "changed", "reason of a"),
        ("a", "unknown", "no systemd to ask"),
    ]


def test_remarks_of_other_settings_and_conflicts_stay_told() -> None:
    after = plan(OK, Remark("a", "conflict", "zz.conf wins"), Remark("b", "skipped", "no GPU"))
    assert [status for _, status, _ in judged(Changes((step(),)), after)] == ["changed", "conflict", "skipped"]


def test_all_that_waits_for_a_reboot_is_listed() -> None:
    done = Changes((step("a", PERSISTED, needs="reboot"), step("b")))
    assert reboots(applied(done, plan())) == ["a: in place, in effect after: reboot"]


def test_only_what_did_not_apply_before_may_follow() -> None:
    before = plan(step("a"), Remark("b", "ok", ""), Remark("c", "skipped", "not mounted"))
    assert followed(step("c"), before)
    assert not followed(step("b"), before)
    assert not followed(step("a", PERSISTED), before)


def test_drift_that_no_step_foresaw_is_named() -> None:
    assert unplanned(Changes((step("a"),)), plan(step("a"), step("b"))) == ["b (runtime) /b is 1, wanted 2"]


PLANS = st.builds(
    lambda said: plan(*said),
    st.lists(
        st.one_of(
            st.builds(
                step, st.sampled_from("abc"), st.sampled_from([RUNTIME, PERSISTED]), st.sampled_from(["1", None])
            ),
            st.builds(
                Remark,
                st.sampled_from("abc"),
                st.sampled_from(["ok", "skipped", "unknown", "failed", "reboot"]),
                st.just("w"),
            ),
        ),
        max_size=6,
    ),
)


@given(PLANS, PLANS)
def test_every_step_has_one_row_and_none_that_is_still_needed_is_called_done(before: Plan, after: Plan) -> None:
    steps = {key(one): one for one in before.steps}
    rows: list[dict[str, Any]] = applied(Changes(tuple(steps.values()), known=before.remarks), after)
    shown = [(row["setting"], row["part"], row["target"]) for row in rows if row["part"] is not None]
    assert sorted(shown) == sorted(steps)
    left = {key(one) for one in after.steps}
    for row in rows:
        if (row["setting"], row["part"], row["target"]) in left:
            assert row["status"] == "failed"
    assert {row["status"] for row in rows if row["part"] is not None} <= {"changed", "failed", "reboot"}


def test_of_a_plan_that_was_carried_out_nothing_is_lost() -> None:
    before = plan(step("a"), step("b", PERSISTED), Remark("c", "skipped", "no"))
    after = replace(before, steps=(), remarks=(*before.remarks, Remark("a", "ok", ""), Remark("b", "ok", "")))
    assert [status for _, status, _ in judged(Changes(before.steps, known=before.remarks), after)] == [
        "changed",
        "changed",
        "skipped",
    ]
