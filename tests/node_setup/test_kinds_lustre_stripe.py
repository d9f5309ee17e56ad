"""Layouts of directories: what options mean, what is compared, and that nothing with files in it is touched."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.plan.nodes.clients import stripes
from lustrain.problem import UserError
from node_setup.agent.facts.lustre import parse_layout
from node_setup.agent.kinds.lustre.stripe import END, LARGEST_SIZE, found_layout, layout_of, same, text_of
from node_setup.agent.model import Remark, Run
from tests.infra.specs import spec_of
from tests.node_setup.kinds_facts import applied, as_fact, commands, machine, plan, remark, steps

RECORDED = Path(__file__).parent / "recorded"
KIB, MIB, GIB = 1024, 1024**2, 1024**3
PROGRESSIVE = ["-E", "100M", "-c", "1", "-E", "10G", "-c", "8", "-E", "-1", "-c", "-1", "-S", "16M"]
WIDE = ["-c", "-1", "-S", "16M"]
MOUNT = {"source": "fs@tcp:/x", "target": "/fsx", "fstype": "lustre", "options": ["rw", "flock", "noatime"]}
CHECKPOINTS = "/fsx/checkpoints"


def document(*options: str) -> dict[str, Any]:
    return {"lustre": {"path": "/fsx", "stripes": [{"path": CHECKPOINTS, "options": list(options), "why": ""}]}}


def facts_of(**found: Any) -> dict[str, Any]:
    state = {"exists": True, "empty": True, "layout": as_fact([{"end": END, "count": 1, "size": None}]), "error": None}
    return machine(mounts=[MOUNT], lustre={"lfs": True, "parameters": {}, "stripes": {CHECKPOINTS: {**state, **found}}})


def components(*parts: tuple[int, int | None, int | None]) -> list[dict[str, int | None]]:
    return [{"end": end, "count": count, "size": size} for end, count, size in parts]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("-c -1 -S 16M", components((END, -1, 16 * MIB))),
        ("-c1", components((END, 1, None))),
        ("--stripe-count=4 --stripe-size 1m", components((END, 4, MIB))),
        ("-c 0 -S 0", components((END, None, None))),
        (
            " ".join(PROGRESSIVE),
            components((100 * MIB, 1, None), (10 * GIB, 8, None), (END, -1, 16 * MIB)),
        ),
        ("-c 2 -S 1M -E 64M -E eof -c 8", components((64 * MIB, 2, MIB), (END, 8, MIB))),
    ],
)
def test_options_mean_what_lfs_makes_of_them(options: str, expected: list[dict[str, int | None]]) -> None:
    assert layout_of(options.split())["components"] == expected


@pytest.mark.parametrize(
    "options",
    [
        *("", "-c", "-c two", "-c -2", "-c 99999", "-c 1_0", "-c 1 /etc", "--stripe-count="),
        *("-S 1000", "-S 4G", "-S -1", "-S 16Q", "-S ٣M"),
        *("-E 1", "-E 0", "-E 2M -E 1M", "-E -1 -E 2M", "-E 100M -c 1 -S 16M"),
        *("-x 1", "-i 3", "-L mdt", "-p flash"),
    ],
)
def test_what_lfs_would_refuse_or_plan_could_not_compare_is_one_line(options: str) -> None:
    with pytest.raises(UserError, match=r"allowed: .*; fix: ") as error:
        layout_of(options.split())
    assert "\n" not in str(error.value)


SIZES = st.integers(1, 63).map(lambda n: n * 64 * KIB)


@st.composite
def legal_options(draw: st.DrawFn) -> list[str]:
    """Options as lfs-setstripe(1) allows them, of one to five components."""

    def size_text(size: int) -> str:
        units = [("", 1), ("k", KIB), ("K", KIB)] + ([("M", MIB), ("m", MIB)] if size % MIB == 0 else [])
        unit, factor = draw(st.sampled_from(units))
        return f"{size // factor}{unit}"

    options: list[str] = []
    end, inherited = 0, 0
    count = draw(st.integers(0, 4))
    for number in range(count + 1):
        size = draw(st.one_of(st.none(), SIZES))
        inherited = size or inherited
        own: list[list[str]] = []
        if draw(st.booleans()):
            own.append(["-c", str(draw(st.one_of(st.just(-1), st.integers(0, 2000))))])
        if size:
            own.append(draw(st.sampled_from([["-S", size_text(size)], [f"--stripe-size={size_text(size)}"]])))
        if count or draw(st.booleans()):
            step = inherited or 64 * KIB
            end = (end // step + draw(st.integers(1, 50))) * step
            last = number == count and draw(st.booleans())
            options += ["-E", draw(st.sampled_from(["-1", "eof"])) if last else size_text(end)]
        for part in draw(st.permutations(own)):
            options += part
    return options or ["-c", "1"]


@given(legal_options())
def test_every_legal_list_of_options_is_a_layout_that_equals_its_own_reading(options: list[str]) -> None:
    layout = layout_of(options)
    parts = layout["components"]
    ends = [part["end"] for part in parts]
    assert ends[:-1] == sorted(set(ends[:-1]))
    assert END not in ends[:-1]
    assert all(part["count"] is None or part["count"] == -1 or 1 <= part["count"] <= 2000 for part in parts)
    assert all(part["size"] is None or 0 < part["size"] < LARGEST_SIZE for part in parts)
    assert text_of(layout)
    assert same(layout, found_layout(as_fact(parts)))


def layout_or_none(options: list[str]) -> dict[str, Any] | None:
    """None where it is refused, which is one line; anything else that is raised fails the test."""
    try:
        return layout_of(options)
    except UserError as error:
        refused = error.problems
    [line] = refused
    assert "\n" not in line
    return None


@given(st.lists(st.text(max_size=8), max_size=6))
def test_arbitrary_texts_are_a_layout_or_one_line(options: list[str]) -> None:
    layout_or_none(options)


@pytest.mark.slow
@given(
    st.lists(st.sampled_from(["-c", "-S", "-E", "-1", "0", "1", "64k", "1M", "eof", "--stripe-count", "="]), max_size=8)
)
def test_options_in_any_order_are_a_layout_or_one_line(options: list[str]) -> None:
    layout = layout_or_none(options)
    assert layout is None or same(layout, layout)


@given(legal_options(), legal_options())
def test_layouts_that_differ_in_what_was_asked_are_not_the_same(one: list[str], other: list[str]) -> None:
    left, right = layout_of(one), found_layout(as_fact(layout_of(other)["components"]))
    pairs = list(zip(left["components"], right["components"], strict=False))
    differs = len(left["components"]) != len(right["components"]) or any(
        want[key] not in (None, have[key]) for want, have in pairs for key in ("end", "count", "size")
    )
    assert same(left, right) is not differs


def test_all_targets_is_not_as_many_as_there_are_today() -> None:
    assert not same(layout_of(["-c", "-1"]), found_layout(as_fact(components((END, 4, MIB)))))


@pytest.mark.parametrize("name", sorted(one.name for one in RECORDED.glob("lfs_getstripe_*.txt")))
def test_every_recorded_layout_can_be_told_and_compared(name: str) -> None:
    parsed = parse_layout((RECORDED / name).read_text())
    assert parsed is not None
    layout = found_layout(parsed)
    assert layout["components"][-1]["end"] == END
    assert text_of(layout)
    assert not same(layout_of(["-c", "77"]), layout)


def test_a_directory_that_is_missing_is_made_and_laid_out() -> None:
    facts = facts_of(exists=False, empty=None, layout=None)
    said = plan("lustre.stripes", facts, document(*PROGRESSIVE))
    assert commands(said) == [f"mkdir -p -m 1777 {CHECKPOINTS}", f"lfs setstripe {' '.join(PROGRESSIVE)} {CHECKPOINTS}"]
    assert steps(said)[0].wanted.endswith("for all to write in (1777)")
    again = plan("lustre.stripes", applied(facts, said), document(*PROGRESSIVE))
    assert remark(again).status == "ok"


def test_jobs_of_any_user_write_into_a_directory_that_we_made_and_one_that_was_there_keeps_its_mode(
    tmp_path: Path,
) -> None:
    said = plan("lustre.stripes", facts_of(exists=False, empty=None, layout=None), document(*WIDE))
    made = next(action for step in steps(said) for action in step.actions if isinstance(action, Run))
    new, old = tmp_path / "above" / "new", tmp_path / "old"
    old.mkdir(mode=0o750)
    for folder in (new, old):
        subprocess.run([*made.command[:-1], str(folder)], check=True)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (new, old)] == [0o1777, 0o750]
    assert not any("-m" in line for line in commands(plan("lustre.stripes", facts_of(), document(*WIDE))))


def test_a_directory_that_is_empty_gets_its_layout() -> None:
    said = plan("lustre.stripes", facts_of(), document(*WIDE))
    assert commands(said) == [f"lfs setstripe -c -1 -S 16M {CHECKPOINTS}"]
    assert steps(said)[0].found == "to the end on 1 in 1M"
    assert steps(said)[0].wanted == "to the end on all in 16M"


def test_a_directory_with_files_is_never_touched() -> None:
    only = remark(plan("lustre.stripes", facts_of(empty=False), document(*WIDE)))
    assert only.status == "skipped"
    assert "lfs migrate" in only.why


def test_a_directory_with_files_and_the_right_layout_is_well() -> None:
    layout = as_fact(layout_of(WIDE)["components"])
    assert remark(plan("lustre.stripes", facts_of(empty=False, layout=layout), document(*WIDE))).status == "ok"


@given(
    exists=st.sampled_from([True, False, None]),
    empty=st.sampled_from([True, False, None]),
    layout=st.sampled_from([None, as_fact([{"end": END, "count": 1, "size": None}])]),
)
def test_only_what_is_known_to_be_missing_or_empty_is_changed(exists: Any, empty: Any, layout: Any) -> None:
    said = plan("lustre.stripes", facts_of(exists=exists, empty=empty, layout=layout), document(*WIDE))
    assert bool(commands(said)) == (exists is False or (exists is True and empty is True and layout is not None))


@pytest.mark.parametrize("killed_after", [0, 1, 2])
def test_two_nodes_that_do_it_at_once_and_one_that_dies_come_to_the_same(killed_after: int) -> None:
    facts = facts_of(exists=False, empty=None, layout=None)
    first = second = plan("lustre.stripes", facts, document(*PROGRESSIVE))
    shared = applied(applied(facts, first, killed_after), second)
    assert remark(plan("lustre.stripes", shared, document(*PROGRESSIVE))).status == "ok"
    late = applied(shared, first)
    assert late["lustre"] == shared["lustre"]


def test_nothing_is_made_beneath_a_mount_point_that_is_not_mounted() -> None:
    only = remark(plan("lustre.stripes", machine(), document(*WIDE)))
    assert only.status == "skipped"
    assert "not mounted at /fsx" in only.why


@pytest.mark.parametrize("path", ["/etc/lustre", "/fsx", "/fsx/../etc", "/fsxx/a"])
def test_a_directory_elsewhere_is_refused(path: str) -> None:
    asked = {"lustre": {"path": "/fsx", "stripes": [{"path": path, "options": WIDE, "why": ""}]}}
    assert remark(plan("lustre.stripes", machine(mounts=[MOUNT]), asked)).status == "failed"


def test_what_cannot_be_read_is_said() -> None:
    unread = remark(plan("lustre.stripes", facts_of(layout=None, error="lfs getstripe did not end"), document(*WIDE)))
    assert (unread.status, "did not end" in unread.why) == ("unknown", True)
    without_tools = facts_of()
    without_tools["lustre"]["lfs"] = False
    assert remark(plan("lustre.stripes", without_tools, document(*WIDE))).status == "failed"
    assert remark(plan("lustre.stripes", machine(mounts=[MOUNT]), document(*WIDE))).status == "unknown"


def test_the_layouts_that_infra_plans_are_legal() -> None:
    planned = stripes(spec_of(storage={"lustre": {"throughput_gb_s": 1.2, "capacity_tib": 4.8}}))
    assert planned
    for stripe in planned:
        assert layout_of(stripe.options)["components"][-1]["end"] == END


def test_one_setting_says_something_of_each_directory() -> None:
    asked = {"lustre": {"path": "/fsx", "stripes": [{"path": f"/fsx/{one}", "options": WIDE} for one in "ab"]}}
    state = {"exists": False, "empty": None, "layout": None, "error": None}
    facts = machine(
        mounts=[MOUNT], lustre={"lfs": True, "parameters": {}, "stripes": {"/fsx/a": state, "/fsx/b": state}}
    )
    said = plan("lustre.stripes", facts, asked)
    assert [step.target for step in steps(said)] == ["/fsx/a", "/fsx/b"]
    assert not [one for one in said if isinstance(one, Remark)]
