"""What happens to a stack that is up: harmless changes in place, dangerous ones refused as preflight says, and its end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.config import ClusterSpec
from infra.config import parse as parse_spec
from infra.local.engine import PROGRAM, EngineError
from infra.preflight.change import Effect
from infra.preflight.explain import explain
from tests.infra.stacks import AT_ONCE, EXAMPLES, Live, example

pytestmark = pytest.mark.slow
Lives = Callable[[str], Live]
IN_PLACE = {"update", "create", "delete"}
"""Of these, only what no node and no data hangs on may be created or deleted; see the test."""


@dataclass(frozen=True)
class Course:
    """What was seen on a stack's way from a small change to its end."""

    small: dict[str, str]
    """Steps of a change of count, budget and alarm."""
    settled: dict[str, str]
    """Steps that were left after it."""
    edited: dict[str, str]
    """Steps after an edit of a lifecycle script."""
    moved: str
    """What the engine said to a new address range."""
    kept: frozenset[str]
    """Types of what is protected, after the end."""
    left: tuple[str, ...]
    """Names of all resources that the state still knows after the end."""


def small_change(live: Live) -> None:
    spec = live.engine.spec
    spec["groups"][-1]["count"] += 1
    spec["budget"]["monthly_usd"] += 1000
    spec["alarms"]["lustre_free_fraction"] = 0.2
    if "size" in spec["groups"][-1].get("capacity", {}):
        spec["groups"][-1]["capacity"]["size"] += 1
    live.engine.change(spec)


def run_course(live: Live, folder: Path) -> Course:
    engine = live.engine
    small_change(live)
    small = engine.steps()
    engine.up()
    settled = engine.steps()

    copied = folder / "infra"
    shutil.copytree(PROGRAM, copied, ignore=shutil.ignore_patterns("__pycache__"))
    script = copied / "lifecycle" / "on_init.sh"
    script.write_text(script.read_text(encoding="utf-8") + "\necho edited\n", encoding="utf-8")
    engine.use(copied)
    edited = engine.steps()
    engine.use(PROGRAM)

    before = engine.spec
    engine.change(elsewhere(before))
    try:
        moved = engine("preview")
    except EngineError as refusal:
        moved = str(refusal)
    engine.change(before)

    engine("destroy", "--yes", "--skip-preview", "--exclude-protected")
    rest = engine.resources()
    return Course(
        small,
        settled,
        edited,
        moved,
        frozenset(one["type"] for one in rest if one.get("protect")),
        tuple(one["urn"].rpartition("::")[2] for one in rest),
    )


def elsewhere(spec: dict[str, object]) -> dict[str, object]:
    """The same cluster in another address range: every subnet is replaced, and what lies in it."""
    network = dict(spec.get("network") or {})  # type: ignore[call-overload]
    return {**spec, "network": {**network, "cidr": "10.99.0.0/16"}}


@pytest.fixture(scope="module")
def courses(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Course]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running: dict[str, Future[Course]] = {
            stack: pool.submit(run_course, lives(stack), tmp_path_factory.mktemp(f"edited-{stack}"))
            for stack in EXAMPLES
        }
        yield lambda stack: running[stack].result()


def changed(spec: ClusterSpec, stack: str) -> ClusterSpec:
    return parse_spec(elsewhere(spec.model_dump(mode="json", exclude_defaults=True)))


@pytest.mark.parametrize("stack", EXAMPLES)
def test_count_budget_and_alarm_change_in_place(courses: Callable[[str], Course], stack: str) -> None:
    course = courses(stack)
    assert course.small
    assert set(course.small.values()) <= {"update"}, course.small
    assert course.settled == {}


@pytest.mark.parametrize("stack", EXAMPLES)
def test_an_edited_lifecycle_script_lies_beside_the_old_one(courses: Callable[[str], Course], stack: str) -> None:
    edited = courses(stack).edited
    assert [name for name, step in edited.items() if step == "create" and name.endswith("on_init.sh")]
    assert not [name for name, step in edited.items() if "replace" in step and "system" in name]


@pytest.mark.parametrize("stack", EXAMPLES)
def test_a_new_address_range_does_to_storage_what_preflight_says(courses: Callable[[str], Course], stack: str) -> None:
    old = example(stack)
    effects = {change.effect for change in explain(old, changed(old, stack))}
    refusal = "protected" in courses(stack).moved or "protection" in courses(stack).moved
    if old.storage.lustre or old.storage.home:
        assert Effect.REPLACES_FILE_SYSTEM in effects
        assert refusal
    else:
        assert Effect.REPLACES_FILE_SYSTEM not in effects


@pytest.mark.parametrize("stack", EXAMPLES)
def test_the_end_leaves_what_holds_data_or_money_and_what_that_stands_on(
    courses: Callable[[str], Course], stack: str
) -> None:
    course, spec = courses(stack), example(stack)
    expected = {"aws:s3/bucket:Bucket"}
    if spec.storage.lustre:
        expected.add("aws:fsx/lustreFileSystem:LustreFileSystem")
    if spec.storage.home:
        expected.add("aws:fsx/openZfsFileSystem:OpenZfsFileSystem")
    if any(group.capacity.create for group in spec.groups):
        expected.add("aws:ec2/capacityReservation:CapacityReservation")
    if any(group.capacity.mode == "training-plan" for group in spec.groups):
        expected.add("aws:cloudcontrol/resource:Resource")
    assert course.kept == expected
    assert not [name for name in course.left if name.endswith("-gang")]
