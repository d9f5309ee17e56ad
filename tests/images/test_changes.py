"""Why layers are made again, and what of it a node would pull."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images.plan import changes
from lustrain.image_file import GitState, ImageRecord

DIGEST = "sha256:" + "0" * 64
Inputs = dict[str, dict[str, str]]
FILES = [f"trainer/{name}.py" for name in ("agree", "config", "errors", "loop", "optim", "peers")]
SETTINGS = "images/trainer.Dockerfile [cpu-layers]"
BEFORE: Inputs = {
    "base": {"BASE_IMAGE": "r/b@0"},
    "tools": {"TOOLS_IMAGE": "r/t@0"},
    "system": {"images/scripts/user.sh": "0", "on base": "0"},
    "torch": {"images/locks/torch.lock": "0", "on tools": "0"},
    "linker": {"on system": "0", "on torch": "0"},
    "app": {"images/locks/app.lock": "0", "on tools": "0"},
    "shell": {"on tools": "0"},
    "code": {**dict.fromkeys(FILES, "0"), "on shell": "0"},
    "image": {SETTINGS: "0"},
}
layered = st.dictionaries(
    st.sampled_from(changes.LAYERS),
    st.dictionaries(st.text(min_size=1), st.text(), max_size=3),
    max_size=len(changes.LAYERS),
)


def record(inputs: Inputs) -> ImageRecord:
    return ImageRecord("r/n:t", DIGEST, "cpu", ("linux/amd64",), {}, GitState(None, dirty=False), DIGEST, inputs)


def edited(edits: Mapping[str, Mapping[str, str]]) -> Inputs:
    """The same with these inputs; an empty one is gone."""
    found = {layer: {**own, **edits.get(layer, {})} for layer, own in BEFORE.items()}
    return {layer: {name: value for name, value in own.items() if value} for layer, own in found.items()}


TOOLS = {"on tools": "1"}
CASES: list[tuple[Mapping[str, Mapping[str, str]], list[str], list[str], list[str]]] = [
    ({}, [], [], []),
    ({"code": {FILES[3]: "1"}}, ["code: trainer/loop.py changed"], ["code"], []),
    ({"code": dict.fromkeys(FILES[:2], "1")}, [f"code: 2 files changed: {', '.join(FILES[:2])}"], ["code"], []),
    ({"code": dict.fromkeys(FILES[:5], "1")}, [f"code: 5 files changed: {', '.join(FILES[:5])}"], ["code"], []),
    ({"code": dict.fromkeys(FILES, "1")}, [f"code: 6 files changed: {', '.join(FILES[:5])}, …"], ["code"], []),
    ({"code": {"trainer/new.py": "1"}}, ["code: trainer/new.py is new"], ["code"], []),
    ({"code": {FILES[3]: ""}}, ["code: trainer/loop.py is gone"], ["code"], []),
    ({"image": {SETTINGS: "1"}}, [f"image: {SETTINGS} changed"], [], []),
    ({"system": {"EFA": "1"}}, ["system: EFA was not given and is 1"], ["system"], []),
    (
        {"base": {"BASE_IMAGE": "r/b@1"}, "system": {"on base": "1"}},
        ["base: BASE_IMAGE was r/b@0 and is r/b@1", "system: it is made on base"],
        ["base", "system"],
        [],
    ),
    (
        {"linker": {"on system": "1", "on torch": "1"}},
        ["linker: it is made on system", "linker: it is made on torch"],
        [],
        ["linker"],
    ),
    (
        {"torch": TOOLS, "app": TOOLS, "shell": TOOLS, "code": {"on shell": "1"}},
        [*(f"{layer}: it is made on tools" for layer in ("torch", "app", "shell")), "code: it is made on shell"],
        [],
        ["torch", "app", "code"],
    ),
    ({"app": {"images/locks/app.lock": "1", **TOOLS}}, ["app: images/locks/app.lock changed"], ["app"], []),
]


@pytest.mark.parametrize(("edits", "why", "pull", "perhaps"), CASES)
def test_change_is_reported_with_what_a_node_would_pull(
    edits: Mapping[str, Mapping[str, str]], why: list[str], pull: list[str], perhaps: list[str]
) -> None:
    found = changes.reasons(record(BEFORE), edited(edits))
    told = changes.as_json(found)
    assert (told["pull"], told["pull_if_different"]) == (pull, perhaps)
    assert [f"{one.layer}: {reason}" for one in found for reason in one.why] == why
    last = f"a node would pull: {', '.join(pull) or 'no layer'}"
    last += f"; and only if they come out different: {', '.join(perhaps)}" if perhaps else ""
    assert changes.lines(found) == [*why, last if why else "nothing changed: every step comes from the cache"]


def test_layer_that_was_not_there_is_new_without_image_all_are() -> None:
    without = {layer: own for layer, own in BEFORE.items() if layer != "linker"}
    (linker,) = changes.reasons(record(without), BEFORE)
    assert (linker.layer, linker.why, linker.pulled) == ("linker", ("the last image had no such layer",), True)
    found = changes.reasons(None, BEFORE)
    assert [one.layer for one in found] == list(BEFORE)
    assert {one.why for one in found} == {("no image was built before",)}
    assert changes.as_json(found)["pull"] == ["base", "system", "torch", "linker", "app", "code"]


@pytest.mark.slow
@given(old=layered, new=layered)
def test_a_layer_is_made_again_exactly_where_its_inputs_differ(old: Inputs, new: Inputs) -> None:
    found = changes.reasons(record(old), new)
    assert {one.layer for one in found} == {layer for layer in new if new[layer] != old.get(layer)}
    assert all(one.why for one in found)
    assert [one.layer for one in found] == sorted((one.layer for one in found), key=changes.LAYERS.index)
