"""What enters an image: these files and no others, the same from every checkout, and each change known by its layer."""

from __future__ import annotations

import os
import random
import re
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from images.flags import BuildFlags
from images.model import Context
from images.plan import context, dockerfile, versions
from images.plan.plan import arguments_of
from lustrain.problem import Problem, UserError
from rehearsal.lab.containers.engine import Engine
from tests.images import checkouts
from tests.images.checkouts import ROOT, checkout

PINNED = "registry.example.com/base@sha256:" + "0" * 64
TARGETS = [target for target, path in dockerfile.PATHS.items() if (ROOT / path).is_file()]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return checkout(tmp_path / "clone")


def staged(root: Path, into: str = "staged", **flags: Any) -> Context:
    return checkouts.staged(root, root.parent / into, **({"base": PINNED} | flags))


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def tree(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything that a builder sees of a folder."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        content = b"" if path.is_dir() else path.read_bytes()
        found[path.relative_to(folder).as_posix()] = (stat.S_IMODE(status.st_mode), int(status.st_mtime_ns), content)
    return found


def changed(before: Context, after: Context) -> dict[str, list[str]]:
    """Layer by layer what is different, but for the layers below."""
    found = {
        layer: [name for name, value in own.items() if value != before.inputs[layer].get(name) and name[:3] != "on "]
        for layer, own in after.inputs.items()
    }
    return {layer: names for layer, names in found.items() if names}


def refusal(root: Path, **more: Any) -> list[Problem]:
    with pytest.raises(UserError) as caught:
        staged(root, "refused", **more)
    assert caught.value.exit_code == 2
    assert not (root.parent / "refused").exists() or not files(root.parent / "refused")
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def heads(lines: Sequence[str]) -> list[str]:
    """What each problem is about."""
    return [line.partition(": ")[0] for line in lines]


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_staged_makes_the_layers_with_all_of_the_code(root: Path, target: str) -> None:
    context = staged(root, target=target)
    named = {name for own in context.inputs.values() for name in own if "/" in name and " [" not in name}
    assert files(context.folder) == named | {dockerfile.PATHS[target]}
    assert {path for path in files(root) if path.startswith(("lustrain/", "trainer/"))} < named


@pytest.mark.parametrize("target", TARGETS)
def test_every_argument_that_is_given_is_declared(target: str) -> None:
    text = (ROOT / dockerfile.PATHS[target]).read_text()
    declared = set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    given = set(arguments_of(BuildFlags(target, base=PINNED), versions.load()))
    assert given <= declared
    # What is declared and not given would keep a default that nobody compares with versions.toml.
    stages = dockerfile.parse(text).for_image(target)
    assert {name for one in stages for name in one.arguments} <= given


def test_gaudis_layers_have_files_and_layers_below_of_their_own(root: Path) -> None:
    """Those of the other targets are in tests/golden."""
    found = staged(root, target="gaudi").inputs
    own = {
        layer: [name for name in names if name.startswith(("images/locks", "images/scripts", "on "))]
        for layer, names in found.items()
    }
    assert own == {
        "app": ["images/locks/app.lock", "images/scripts/install.sh", "on base", "on tools"],
        "base": [],
        "code": ["on shell"],
        "image": [],
        "init": ["on tools"],
        "shell": ["on tools"],
        "system": ["images/scripts/user.sh", "on base"],
        "tools": ["images/locks/tools.lock", "images/scripts/packages.sh"],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "layers"),
    [
        ("trainer/loop.py", ["code"]),
        ("images/locks/app.lock", ["app"]),
        ("images/scripts/user.sh", ["system"]),
        ("images/verify.py", ["code", "image"]),
        ("launch/ssh.py", []),
        ("images/locks/torch-cuda.lock", []),
        ("images/scripts/install_efa.sh", []),
        ("trainer/__pycache__/loop.cpython-311.pyc", []),
        ("trainer/old.pyc", []),
        ("trainer/.git", []),
    ],
)
def test_edit_is_known_by_the_layers_it_belongs_to_and_no_others(root: Path, path: str, layers: list[str]) -> None:
    before = staged(root, "before")
    (root / path).parent.mkdir(exist_ok=True)
    with (root / path).open("a") as file:
        file.write("# edited\n")
    after = staged(root, "after")
    assert changed(before, after) == {layer: [path] for layer in layers}
    assert (path in files(after.folder)) is bool(layers)


@pytest.mark.slow
def test_the_changed_part_of_the_dockerfile_is_known(root: Path) -> None:
    file = root / dockerfile.PATHS["cpu"]
    before = staged(root, "before")
    text = file.read_text()
    file.write_text(f"# A word more.\n{text}")
    assert staged(root, "comment").inputs == before.inputs
    file.write_text(text.replace("python3 tini", "python3 tini gdb"))
    assert changed(before, staged(root, "after")) == {"system": ["images/trainer.Dockerfile [system]"]}


@pytest.mark.slow
def test_other_images_and_arguments_are_changes_of_their_layers(root: Path) -> None:
    before = staged(root, "before", target="cuda")
    after = staged(root, "after", target="cuda", arg=("EFA_VERSION=1.48.0",))
    assert changed(before, after) == {"system": ["EFA_VERSION"], "image": ["EFA_VERSION"]}
    assert after.inputs["system"]["EFA_VERSION"] == "1.48.0"
    other = staged(root, "other", target="cuda", base=PINNED.replace("0" * 64, "1" * 64))
    assert changed(before, other) == {"base": ["BASE_IMAGE"]}


def test_a_file_that_became_executable_is_a_change(root: Path) -> None:
    before = staged(root, "before").inputs
    (root / "trainer/loop.py").chmod(0o755)
    assert staged(root, "after").inputs["code"] != before["code"]


@pytest.mark.slow
@settings(max_examples=8)
@given(umask=st.sampled_from([0o000, 0o022, 0o077]), when=st.integers(0, 2**31), order=st.randoms())
def test_every_checkout_of_the_same_code_stages_the_same_folder(
    umask: int, when: int, order: random.Random, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    one = checkout(folder / "one")
    paths = sorted(files(one))
    order.shuffle(paths)
    before = os.umask(umask)
    try:
        for path in paths:
            target = folder / "two" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((one / path).read_bytes())
            if (one / path).stat().st_mode & 0o100:
                target.chmod(target.stat().st_mode | 0o700)
            os.utime(target, (when, when))
        second = staged(folder / "two", "second")
    finally:
        os.umask(before)
    first = staged(one, "first")
    assert second.inputs == first.inputs
    assert tree(second.folder) == tree(first.folder)


def test_modes_are_two_and_folders_have_no_time(root: Path) -> None:
    found = tree(staged(root).folder)
    assert {mode for mode, _, _ in found.values()} == {0o644, 0o755}
    assert found["images/scripts/install.sh"][0] == 0o755
    assert found["trainer/loop.py"][0] == 0o644
    assert found["trainer"][:2] == (0o755, 0)


def test_edit_that_keeps_the_size_does_not_keep_the_time_stamp(root: Path) -> None:
    path = root / "trainer/loop.py"
    before = staged(root, "before").folder / "trainer/loop.py"
    path.write_text(path.read_text().replace("step", "pets", 1))
    after = staged(root, "after").folder / "trainer/loop.py"
    assert after.stat().st_size == before.stat().st_size
    assert after.stat().st_mtime != before.stat().st_mtime


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o664])
def test_wheel_of_the_site_is_there_and_the_site_keeps_it(root: Path, mode: int) -> None:
    wheel = root / context.SITE / "wheels/torch-1.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"wheel")
    wheel.chmod(mode)
    os.utime(wheel, (1_000_000_000, 1_000_000_000))
    without = {layer: dict(found) for layer, found in staged(root, "with").inputs.items()}
    copy = root.parent / "with" / context.SITE / "wheels/torch-1.whl"
    assert (copy.read_bytes(), stat.S_IMODE(copy.stat().st_mode)) == (b"wheel", 0o644)
    assert copy.samefile(wheel) == (mode == 0o644)
    assert (stat.S_IMODE(wheel.stat().st_mode), wheel.stat().st_mtime) == (mode, 1_000_000_000)
    shutil.rmtree(root.parent / "with")
    assert wheel.read_bytes() == b"wheel"
    wheel.unlink()
    assert staged(root, "none").inputs == without


def test_of_the_site_only_what_builds_ask_for_enters(root: Path) -> None:
    asked = {"ca.crt", "wheels/torch-1.whl", "aws-efa-installer-1.49.0.tar.gz"}
    assert (staged(root, "none").folder / context.SITE).is_dir(), "there for the mount"
    for name in (*asked, "README.md", "notes", "wheels/readme"):
        (root / context.SITE / name).parent.mkdir(parents=True, exist_ok=True)
        (root / context.SITE / name).write_text("x")
    found = {path for path in files(staged(root).folder) if path.startswith(context.SITE)}
    assert found == {f"{context.SITE}/{name}" for name in asked}
    (root / context.SITE / "wheels/away.whl").symlink_to("/etc/passwd")
    assert heads(refusal(root)) == [f"context = '{context.SITE}/wheels/away.whl'"]


def test_a_site_may_keep_its_wheels_elsewhere(root: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store/torch-1.whl").write_bytes(b"wheel")
    (root / context.SITE).mkdir()
    (root / context.SITE / "wheels").symlink_to(tmp_path / "store")
    found = staged(root).folder / context.SITE / "wheels"
    assert not found.is_symlink()
    assert (found / "torch-1.whl").read_bytes() == b"wheel"


@pytest.mark.slow
def test_builder_that_saw_the_folder_builds_what_is_in_it_now(engine: Engine, root: Path) -> None:
    """An edit that keeps the size: with one time stamp for all files, BuildKit took the file for the one it had."""
    told = root.parent / "Dockerfile"
    told.write_text("FROM scratch\nCOPY trainer/loop.py /\n")

    def built(into: str) -> str:
        folder = staged(root).folder
        out = root.parent / into
        engine.docker(
            "buildx", "build", "--quiet", "--output", f"type=local,dest={out}", "--file", str(told), str(folder)
        )
        shutil.rmtree(folder)
        return (out / "loop.py").read_text()

    path = root / "trainer/loop.py"
    assert built("first") == path.read_text()
    path.write_text(path.read_text().replace("step", "pets", 1))
    assert built("second") == path.read_text()
