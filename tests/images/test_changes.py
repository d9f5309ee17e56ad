"""Why layers are made again, from a real edit in a real checkout, and what of it a node would pull."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images.plan import changes, dockerfile
from lustrain.image_file import GitState, Record
from tests.images.checkouts import checkout, staged

DIGEST = "sha256:" + "0" * 64
layered = st.dictionaries(
    st.sampled_from(changes.LAYERS),
    st.dictionaries(st.text(min_size=1), st.text(), max_size=3),
    max_size=len(changes.LAYERS),
)


def record(inputs: dict[str, dict[str, str]]) -> Record:
    return Record("r/n:t", DIGEST, "cpu", ("linux/amd64",), {}, GitState(None, dirty=False), DIGEST, inputs)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return checkout(tmp_path / "clone")


def told(
    root: Path, edit: Callable[[Path], object], target: str = "cpu", base: str = "0", tools: str = "0"
) -> list[changes.Rebuild]:
    def inputs(base: str, tools: str) -> dict[str, dict[str, str]]:
        images = {"base": f"r/b@sha256:{base * 64}", "tools": f"r/t@sha256:{tools * 64}"}
        context = staged(root, root.parent / "staged", target=target, **images)
        shutil.rmtree(context.folder)
        return {layer: dict(inputs) for layer, inputs in context.inputs.items()}

    before = inputs("0", "0")
    edit(root)
    return changes.reasons(record(before), inputs(base, tools))


def append(*paths: str) -> Callable[[Path], object]:
    def edit(root: Path) -> None:
        for path in paths:
            with (root / path).open("a") as file:
                file.write("# edited\n")

    return edit


def nothing(root: Path) -> None: ...


def test_nothing_changed_nothing_is_made_again(root: Path) -> None:
    found = told(root, nothing)
    assert found == []
    assert changes.lines(found) == ["nothing changed: every step comes from the cache"]
    assert changes.as_json(found) == {"rebuild": [], "pull": [], "pull_if_different": []}


def test_without_an_image_everything_is_new(root: Path) -> None:
    found = changes.reasons(None, staged(root, root.parent / "staged").inputs)
    assert [one.layer for one in found] == ["base", "tools", "system", "torch", "app", "shell", "code", "image"]
    assert {one.why for one in found} == {("no image was built before",)}
    assert changes.lines(found)[-1] == "a node would pull: base, system, torch, app, code"


def test_an_edit_of_the_code_is_one_layer(root: Path) -> None:
    assert changes.lines(told(root, append("trainer/loop.py"))) == [
        "code: trainer/loop.py changed",
        "a node would pull: code",
    ]


@pytest.mark.slow
def test_many_edits_are_counted_and_the_first_are_named(root: Path) -> None:
    paths = [f"trainer/{name}.py" for name in ("agree", "config", "errors", "loop", "optim", "peers")]
    [code] = told(root, append(*paths))
    assert code.why == (f"6 files changed: {', '.join(paths[:5])}, …",)
    [code] = told(root, append(*paths[:2]))
    assert code.why == (f"2 files changed: {', '.join(paths[:2])}",)


@pytest.mark.slow
def test_files_come_and_go(root: Path) -> None:
    [code] = told(root, lambda root: (root / "trainer/new.py").write_text("x"))
    assert code.why == ("trainer/new.py is new",)
    [code] = told(root, lambda root: (root / "trainer/new.py").unlink())
    assert code.why == ("trainer/new.py is gone",)


def test_another_torch_touches_no_other_layer(root: Path) -> None:
    assert changes.lines(told(root, append("images/locks/torch-cpu.lock"))) == [
        "torch: images/locks/torch-cpu.lock changed",
        "a node would pull: torch",
    ]


def test_another_base_remakes_the_system_and_leaves_what_is_linked_beside_it(root: Path) -> None:
    assert changes.lines(told(root, nothing, base="1")) == [
        f"base: BASE_IMAGE was r/b@sha256:{'0' * 64} and is r/b@sha256:{'1' * 64}",
        "system: it is made on base",
        "a node would pull: base, system",
    ]


def test_other_tools_unpack_again_and_a_node_pulls_only_what_comes_out_different(root: Path) -> None:
    found = told(root, nothing, tools="1")
    assert changes.lines(found)[1:] == [
        "torch: it is made on tools",
        "app: it is made on tools",
        "shell: it is made on tools",
        "code: it is made on shell",
        "a node would pull: no layer; and only if they come out different: torch, app, code",
    ]
    assert changes.as_json(found)["pull_if_different"] == ["torch", "app", "code"]


@pytest.mark.slow
def test_what_is_made_on_two_layers_names_both(root: Path) -> None:
    found = told(root, append("images/scripts/user.sh", "images/locks/torch-cuda.lock"), target="cuda")
    assert {one.layer: one.why for one in found}["linker"] == ("it is made on system", "it is made on torch")


def test_other_settings_of_the_image_make_no_layer(root: Path) -> None:
    def edit(root: Path) -> None:
        file = root / dockerfile.PATHS["cpu"]
        file.write_text(file.read_text().replace("ENV LUSTRAIN_TARGET=cpu", "ENV LUSTRAIN_TARGET=cpu MORE=1"))

    assert changes.lines(told(root, edit)) == [
        "image: images/trainer.Dockerfile [cpu-layers] changed",
        "a node would pull: no layer",
    ]


def test_programs_read_the_same_as_people(root: Path) -> None:
    assert changes.as_json(told(root, append("trainer/loop.py"))) == {
        "rebuild": [{"layer": "code", "why": ["trainer/loop.py changed"]}],
        "pull": ["code"],
        "pull_if_different": [],
    }


@pytest.mark.slow
@given(old=layered, new=layered)
def test_a_layer_is_made_again_exactly_where_its_inputs_differ(
    old: dict[str, dict[str, str]], new: dict[str, dict[str, str]]
) -> None:
    found = changes.reasons(record(old), new)
    assert {one.layer for one in found} == {layer for layer in new if new[layer] != old.get(layer)}
    assert all(one.why for one in found)
    assert [one.layer for one in found] == sorted((one.layer for one in found), key=changes.LAYERS.index)
