"""Layouts of directories: what options mean, what is compared, and that nothing with files in it is touched."""

from __future__ import annotations

import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.plan.nodes.clients import stripes
from lustrain.problem import UserError
from node_setup.agent.kinds.lustre.stripe import END, LARGEST_SIZE, layout_of, layout_of_fact, same, text_of
from tests.infra.specs import spec_of
from tests.node_setup.kinds_facts import applied, as_fact, commands, machine, plan, remark, steps

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
        (" ".join(PROGRESSIVE), components((100 * MIB, 1, None), (10 * GIB, 8, None), (END, -1, 16 * MIB))),
        ("-c 2 -S 1M -E 64M -E eof -c 8", components((64 * MIB, 2, MIB), (END, 8, MIB))),
    ],
)
def test_options_mean_what_lfs_makes_of_them(options: str, expected: list[dict[str, int | None]]) -> None:
    assert layout_of(options.split())["components"] == expected


@pytest.mark.parametrize(
    "options",
    [
        *("", "-c", "-c two", "-c -2", "-c 99999", "-c 2001", "-c 1_0", "-c 1 /etc", "--stripe-count="),
        *("-S 1000", "-S 4G", "-S -1", "-S 16Q", "-S ٣M"),
        *("-E 1", "-E 0", "-E 2M -E 1M", "-E -1 -E 2M", "-E 100M -c 1 -S 16M"),
        *("-x 1", "-i 3", "-L mdt", "-p flash"),
    ],
)
def test_layout_refused_by_lfs_or_incomparable_is_one_line(options: str) -> None:
    with pytest.raises(UserError, match=r"^lustre.stripes.options = .*; allowed: .*; fix: [^\n]*$"):
        layout_of(options.split())


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
def test_every_legal_option_list_equals_its_own_reading(options: list[str]) -> None:
    layout = layout_of(options)
    parts = layout["components"]
    ends = [part["end"] for part in parts]
    assert ends[:-1] == sorted(set(ends[:-1]))
    assert END not in ends[:-1]
    assert all(part["count"] is None or part["count"] == -1 or 1 <= part["count"] <= 2000 for part in parts)
    assert all(part["size"] is None or 0 < part["size"] < LARGEST_SIZE for part in parts)
    assert text_of(layout)
    assert same(layout, layout_of_fact(as_fact(parts)))


WORDS = st.sampled_from(["-c", "-S", "-E", "-1", "0", "1", "64k", "1M", "eof", "--stripe-count", "="])


@pytest.mark.slow
@given(st.lists(st.text(max_size=8) | WORDS, max_size=8))
def test_any_words_are_a_layout_or_one_line(options: list[str]) -> None:
    problems: Sequence[str] = ()
    try:
        layout = layout_of(options)
        assert same(layout, layout)
    except UserError as error:
        problems = error.problems
    assert [line.count("\n") for line in problems] in ([], [0])


@given(legal_options(), legal_options())
def test_layouts_that_differ_in_what_was_asked_are_not_the_same(one: list[str], other: list[str]) -> None:
    left, right = layout_of(one), layout_of_fact(as_fact(layout_of(other)["components"]))
    pairs = list(zip(left["components"], right["components"], strict=False))
    differs = len(left["components"]) != len(right["components"]) or any(
        want[key] not in (None, have[key]) for want, have in pairs for key in ("end", "count", "size")
    )
    assert same(left, right) is not differs


def test_created_directory_is_open_to_all_and_others_keep_modes(
    tmp_path: Path,
) -> None:
    made, _ = commands(plan("lustre.stripes", facts_of(exists=False, empty=None, layout=None), document(*WIDE)))
    new, old = tmp_path / "above" / "new", tmp_path / "old"
    old.mkdir(mode=0o750)
    for folder in (new, old):
        subprocess.run([*made.split()[:-1], str(folder)], check=True)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (new, old)] == [0o1777, 0o750]


def test_a_directory_that_is_empty_gets_its_layout() -> None:
    [step] = steps(plan("lustre.stripes", facts_of(), document(*WIDE)))
    assert commands([step]) == [f"lfs setstripe -c -1 -S 16M {CHECKPOINTS}"]
    assert (step.current, step.wanted) == ("to the end on 1 in 1M", "to the end on all in 16M")


ALL_THERE_ARE_TODAY = as_fact([{"end": END, "count": 4, "size": 16 * MIB}])


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        (facts_of(empty=False), "skipped"),
        (facts_of(empty=False, layout=ALL_THERE_ARE_TODAY), "skipped"),
        (facts_of(empty=False, layout=as_fact(layout_of(WIDE)["components"])), "ok"),
        (facts_of(layout=None, error="lfs getstripe did not end"), "unknown"),
        (facts_of(exists=None), "unknown"),
        (machine(mounts=[MOUNT]), "unknown"),
        (machine(mounts=[MOUNT], lustre={"lfs": False, "stripes": {}}), "failed"),
        (machine(), "skipped"),
    ],
)
def test_directory_with_files_or_unreadable_is_not_touched(facts: dict[str, Any], status: str) -> None:
    assert remark(plan("lustre.stripes", facts, document(*WIDE))).status == status


@pytest.mark.parametrize("path", ["/etc/lustre", "/fsx", "/fsx/../etc", "/fsxx/a"])
def test_a_directory_elsewhere_is_refused(path: str) -> None:
    asked = {"lustre": {"path": "/fsx", "stripes": [{"path": path, "options": WIDE, "why": ""}]}}
    assert remark(plan("lustre.stripes", machine(mounts=[MOUNT]), asked)).status == "failed"


@given(
    exists=st.sampled_from([True, False, None]),
    empty=st.sampled_from([True, False, None]),
    layout=st.sampled_from([None, as_fact([{"end": END, "count": 1, "size": None}])]),
)
def test_only_what_is_known_to_be_missing_or_empty_is_changed(exists: Any, empty: Any, layout: Any) -> None:
    said = plan("lustre.stripes", facts_of(exists=exists, empty=empty, layout=layout), document(*WIDE))
    assert bool(commands(said)) == (exists is False or (exists is True and empty is True and layout is not None))


@pytest.mark.parametrize("killed_after", [0, 1, 2])
def test_directory_is_striped_by_two_nodes_of_which_one_dies(killed_after: int) -> None:
    facts = facts_of(exists=False, empty=None, layout=None)
    first = second = plan("lustre.stripes", facts, document(*PROGRESSIVE))
    assert commands(first) == [
        f"mkdir -p -m 1777 {CHECKPOINTS}",
        f"lfs setstripe {' '.join(PROGRESSIVE)} {CHECKPOINTS}",
    ]
    shared = applied(applied(facts, first, killed_after), second)
    assert remark(plan("lustre.stripes", shared, document(*PROGRESSIVE))).status == "ok"
    assert applied(shared, first)["lustre"] == shared["lustre"]


def test_the_layouts_that_infra_plans_are_legal() -> None:
    planned = stripes(spec_of(storage={"lustre": {"throughput_gb_s": 1.2, "capacity_tib": 4.8}}))
    assert planned
    for stripe in planned:
        assert layout_of(stripe.options)["components"][-1]["end"] == END


def test_one_setting_says_something_of_each_directory() -> None:
    asked = {"lustre": {"path": "/fsx", "stripes": [{"path": f"/fsx/{one}", "options": WIDE} for one in "ab"]}}
    state = {"exists": False, "empty": None, "layout": None, "error": None}
    facts = machine(mounts=[MOUNT], lustre={"lfs": True, "stripes": {"/fsx/a": state, "/fsx/b": state}})
    assert [step.target for step in steps(plan("lustre.stripes", facts, asked))] == ["/fsx/a", "/fsx/b"]
