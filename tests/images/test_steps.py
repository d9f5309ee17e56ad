"""What BuildKit tells becomes steps; what is no record of it is refused in order, never a crash."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from images.build.bake import documents
from images.build.failure import failure
from images.build.steps import Steps
from tests.images.builds import Remembering


def taken(updates: Iterable[Mapping[str, Any]]) -> tuple[Steps, Remembering]:
    watch = Remembering()
    steps = Steps(watch)
    for update in updates:
        steps.add(update)
    return steps, watch


def vertex(digest: str, name: str, started: float, completed: float | None = None, **more: Any) -> dict[str, Any]:
    times = {"started": started, "completed": completed}
    moments = {key: datetime.fromtimestamp(at, UTC).isoformat() for key, at in times.items() if at is not None}
    return {"digest": digest, "name": name, **moments, **more}


def log(vertex: str, text: str) -> dict[str, Any]:
    return {"vertex": vertex, "data": base64.b64encode(text.encode()).decode()}


def test_a_recorded_build_has_its_steps_its_failure_and_its_log() -> None:
    """Output of buildx 0.13.1 of a build on engine 26.1.5 whose third step, `RUN echo hello; …; exit 3`, fails."""
    with Path(__file__).with_name("recorded").joinpath("rawjson.txt").open() as lines:
        steps, watch = taken(one for one in documents(lines) if not isinstance(one, str))
    named = {step.name: step for step in steps.ended()}
    run = next(step for name, step in named.items() if name.startswith("[3/3] RUN echo hello"))
    assert run.error is not None
    assert 0 < run.seconds < 30
    assert not run.cached
    # The build ran beside others, and vertexes that builds share have one name.
    assert any("1/3] FROM" in name for name in named)
    assert steps.running() is None
    assert [step for step in watch.steps if step.error] == [run]
    assert set(watch.begun) == set(named)
    first, *log = failure("cpu", steps, ["something else", f"ERROR: failed to solve: {run.error}"]).problems
    assert first.startswith("build cpu: step [3/3] RUN echo hello")
    assert first.endswith(": exit code 3")
    assert sorted(log) == ["  | café €", "  | hello", "  | two"]


def test_step_to_blame_is_the_one_that_the_build_s_error_quotes() -> None:
    vertexes = [
        vertex("c", "importing cache manifest", 0.5, 0.6, error="cache: not found"),
        vertex("a", "[x 1/2] RUN sleep", 1.0, 2.0, error="rpc error: context canceled"),
        vertex("b", "[y 1/2] RUN false", 1.0, 2.5, error="exit code: 1"),
    ]
    steps, _ = taken([{"vertexes": vertexes}])
    for said, told in (
        ("exit code: 1", "build cpu: step [y 1/2] RUN false failed after 1.5 s: exit code: 1"),
        ("the engine ended", "build cpu: the engine ended"),
    ):
        assert failure("cpu", steps, [f"ERROR: failed to solve: {said}"]).problems == [told]


def test_goes_of_one_step_add_up_and_repeated_news_does_not() -> None:
    news = [vertex("a", "load", 1.0, 2.0), vertex("a", "load", 5.0), vertex("a", "load", 5.0, 7.0)]
    steps, watch = taken([{"vertexes": [one]} for one in [*news, news[-1], news[-1]]])
    (step,) = steps.ended()
    assert step.seconds == 3.0
    assert watch.begun == ["load"]
    assert len(watch.steps) == 2


def test_of_a_long_log_the_end_is_shown_without_cursor_codes() -> None:
    logs = [{"logs": [log("a", f"line {number}\n")]} for number in range(5000)]
    last = {"vertexes": [vertex("a", "RUN", 1.0, 2.0, error="no")], "logs": [log("a", "\x1b[2Jend")]}
    steps, _ = taken([*logs, last])
    found = steps.failed("no")
    assert found is not None
    assert found[1][-2:] == ["line 4999", "\\x1b[2Jend"]
    assert len(found[1]) == 12


def test_bytes_that_move_are_told() -> None:
    _, watch = taken(
        [{"statuses": [{"vertex": "a", "id": "sha256:1"}, {"vertex": "a", "id": "sha256:1", "current": 3, "total": 9}]}]
    )
    assert watch.moves == [("sha256:1", 3, 9)]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["vertex", "digest", "started", "data", "id"]), inner)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@example({"vertexes": [{"digest": []}]})
@given(st.dictionaries(st.sampled_from(["vertexes", "statuses", "logs", "other"]), _JSON))
def test_json_that_is_no_status_is_refused_in_order(found: dict[str, object]) -> None:
    try:
        taken([found])
    except ValueError:
        return


def test_objects_and_prose_between_them_are_told_apart() -> None:
    lines = ["WARN: x\n", '{"a": 1}\n', "{\n", '  "b": 2\n', "}\n", "\n", "ERROR: y\n", "{ no json\n"]
    assert list(documents(lines)) == ["WARN: x", {"a": 1}, {"b": 2}, "ERROR: y", "{ no json"]
