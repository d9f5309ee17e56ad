"""What a build came to, for people and for programs: the same figures."""

from __future__ import annotations

import json

from images.build.answers import step_lines, steps
from images.model import Built, Step

STEPS = (
    Step("[internal] load build definition", 0.01, False),
    Step("[system 2/2] RUN packages", 0.0, True),
    Step("[torch 1/1] RUN install", 48.25, False),
    Step("[cpu 3/3] COPY --link code /", 0.1, False),
    Step("exporting to image", 3.5, False),
    Step("exporting cache to registry", 0.2, False, "400 Bad Request"),
)
BUILT = Built(STEPS, 52.5, "sha256:1", "sha256:1")


def test_steps_of_the_dockerfile_and_slow_ones_have_totals() -> None:
    assert step_lines(BUILT) == [
        "     s  step",
        "  48.2  [torch 1/1] RUN install",
        "   0.1  [cpu 3/3] COPY --link code /",
        "   3.5  exporting to image",
        "failed  exporting cache to registry",
        "",
        "52.5 s, 1 of 3 steps cached, 1 failed without ending the build, sha256:1",
    ]


def test_the_object_holds_every_step_and_is_json() -> None:
    found = json.loads(json.dumps(steps(BUILT)))
    assert found["version"] == 1
    assert (found["digest"], found["seconds"], found["cached_share"]) == ("sha256:1", 52.5, 0.333)
    assert [step["name"] for step in found["steps"]] == [step.name for step in STEPS]
    assert found["steps"][-1]["error"] == "400 Bad Request"
    assert found["steps"][1]["stage"] == "system"


def test_a_build_of_nothing_has_no_share_and_no_table() -> None:
    assert step_lines(Built((), 0.5, None)) == ["0.5 s"]
    assert steps(Built((), 0.5, None))["cached_share"] is None
