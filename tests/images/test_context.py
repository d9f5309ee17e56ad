"""What enters an image: these files and no others, the same from every checkout, and each change known by its layer."""

from __future__ import annotations

import os
import random
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from images.model import Context
from images.plan import context, dockerfile, versions
from images.plan.plan import arguments_of
from images.wish import BuildWish
from lustrain.problem import UserError
from rehearsal.lab.containers.engine import Engine
from tests.images import checkouts
from tests.images.checkouts import ROOT, checkout

PINNED = "registry.example.com/base@sha256:" + "0" * 64
TARGETS = [target for target, path in dockerfile.PATHS.items() if (ROOT / path).is_file()]
PEM = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
KEY = f"-----BEGIN RSA PRIVATE KEY-----\n{'A' * 64}\n-----END RSA PRIVATE KEY-----\n"


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
    return {
        layer: names
        for layer, found in after.inputs.items()
        if (
            names := [
                name for name in found if found[name] != before.inputs[layer].get(name) and not name.startswith("on ")
            ]
        )
    }


def refusal(root: Path, **more: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        staged(root, "refused", **more)
    assert caught.value.exit_code == 2
    assert not (root.parent / "refused").exists() or not files(root.parent / "refused")
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def read_by(target: str) -> set[str]:
    """Paths that the Dockerfile copies or mounts for a target, found without `dockerfile`: stages followed by name."""
    text = re.sub(r"\\\n(\s*#.*\n)*", " ", (ROOT / dockerfile.PATHS[target]).read_text())
    stages: dict[str, list[str]] = {}
    for line in text.splitlines():
        if found := re.match(r"FROM \S+ AS (\S+)", line):
            stages[found[1]] = current = []
        if stages:
            current.append(line)
    wanted, done = [f"{target}-verify", target], set()
    while wanted:
        if (name := wanted.pop()) in stages and name not in done:
            done.add(name)
            wanted += re.findall(r"(?:^FROM |from=)([\w-]+)", "\n".join(stages[name]), re.MULTILINE)
    lines = [line for name in done for line in stages[name]]
    copied = [re.match(r"COPY (?!.*--from)(?:--\S+ )*(.+) \S+$", line) for line in lines]
    mounted = [re.findall(r"--mount=type=bind,(?!from)source=([^,\s]+)", line) for line in lines]
    return {path for found in copied if found for path in found[1].split()} | {
        path for many in mounted for path in many
    }


@pytest.mark.parametrize("target", TARGETS)
def test_exactly_what_the_dockerfile_copies_or_mounts_is_staged(root: Path, target: str) -> None:
    sources = read_by(target)
    there = {
        path
        for path in files(root)
        if any(path == source or path.startswith(f"{source}/") for source in sources - {context.SITE})
        and not re.search(r"__pycache__", path)
    }
    told = {dockerfile.PATHS[target]}
    assert "trainer/loop.py" in there
    assert files(staged(root, target=target).folder) == there | told


@pytest.mark.parametrize("target", TARGETS)
def test_every_argument_that_is_given_is_declared(target: str) -> None:
    text = (ROOT / dockerfile.PATHS[target]).read_text()
    declared = set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    given = set(arguments_of(BuildWish(target, base=PINNED), versions.load()))
    assert given <= declared
    # What is declared and not given would keep a default that nobody compares with versions.toml.
    stages = dockerfile.parse(text).for_image(target)
    assert {name for one in stages for name in one.arguments} <= given


@pytest.mark.parametrize("target", TARGETS)
def test_a_person_who_builds_from_the_checkout_sends_the_same_files(root: Path, target: str) -> None:
    ignore = (ROOT / f"{dockerfile.PATHS[target]}.dockerignore").read_text().split()
    assert ignore[0] == "*"
    allowed = tuple(line[1:] for line in ignore if line.startswith("!"))
    told = {dockerfile.PATHS[target]}
    missing = {path for path in files(staged(root, target=target).folder) - told if not path.startswith(allowed)}
    assert not missing


@pytest.mark.slow
def test_the_dockerfiles_stages_are_the_layers_that_are_spoken_of(root: Path) -> None:
    assert list(staged(root).inputs) == ["app", "base", "code", "image", "shell", "system", "tools", "torch"]
    assert set(staged(root, "cuda", target="cuda").inputs) == {*staged(root, "again").inputs, "linker"}
    assert list(staged(root, "gaudi", target="gaudi").inputs) == [
        "app",
        "base",
        "code",
        "image",
        "init",
        "shell",
        "system",
        "tools",
    ]


@pytest.mark.slow
def test_what_is_made_on_what_comes_from_the_dockerfile(root: Path) -> None:
    def below(target: str) -> dict[str, list[str]]:
        found = staged(root, target, target=target).inputs
        return {layer: on for layer in found if (on := [name for name in found[layer] if name.startswith("on ")])}

    tools = {"app": ["on tools"], "code": ["on shell"], "shell": ["on tools"], "system": ["on base"]}
    cpu = tools | {"torch": ["on tools"]}
    assert below("cpu") == cpu
    assert below("cuda") == cpu | {"linker": ["on system", "on torch"]}
    assert below("gaudi") == tools | {"app": ["on base", "on tools"], "init": ["on tools"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("trainer/loop.py", "code"),
        ("trainer/launch/local.py", "code"),
        ("images/locks/app.lock", "app"),
        ("images/locks/torch-cpu.lock", "torch"),
        ("images/locks/tools.lock", "tools"),
        ("images/scripts/bytecode.py", "torch"),
        ("images/scripts/user.sh", "system"),
    ],
)
def test_an_edit_is_known_by_the_layer_it_belongs_to(root: Path, path: str, layer: str) -> None:
    before = staged(root, "before")
    with (root / path).open("a") as file:
        file.write("# edited\n")
    assert changed(before, staged(root, "after")) == {layer: [path]}


def test_an_edit_of_the_check_is_in_the_image_and_checks_again(root: Path) -> None:
    before = staged(root, "before")
    with (root / "images/verify.py").open("a") as file:
        file.write("# edited\n")
    assert changed(before, staged(root, "after")) == {"code": ["images/verify.py"], "image": ["images/verify.py"]}


@pytest.mark.parametrize(
    "path",
    ["launch/ssh.py", "images/locks/torch-cuda.lock", "images/scripts/install_efa.sh", "infra/config.py"],
)
def test_what_does_not_enter_changes_nothing(root: Path, path: str) -> None:
    before = staged(root, "before").inputs
    (root / path).parent.mkdir(exist_ok=True)
    with (root / path).open("a") as file:
        file.write("# edited\n")
    after = staged(root, "after")
    assert after.inputs == before
    assert path not in files(after.folder)


@pytest.mark.slow
def test_the_part_of_the_dockerfile_that_changed_is_known_and_comments_are_no_change(root: Path) -> None:
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
    first = staged(checkout(folder / "one"), "first")
    paths = sorted(files(folder / "one"))
    order.shuffle(paths)
    before = os.umask(umask)
    try:
        for path in paths:
            target = folder / "two" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((folder / "one" / path).read_bytes())
            if os.access(folder / "one" / path, os.X_OK) and (folder / "one" / path).stat().st_mode & 0o100:
                target.chmod(target.stat().st_mode | 0o700)
            os.utime(target, (when, when))
        second = staged(folder / "two", "second")
    finally:
        os.umask(before)
    assert second.inputs == first.inputs
    assert tree(second.folder) == tree(first.folder)


def test_modes_are_two_and_folders_have_no_time(root: Path) -> None:
    found = tree(staged(root).folder)
    assert {mode for mode, _, _ in found.values()} == {0o644, 0o755}
    assert found["images/scripts/install.sh"][0] == 0o755
    assert found["trainer/loop.py"][0] == 0o644
    assert found["trainer"][:2] == (0o755, 0)


def test_an_edit_that_keeps_the_size_does_not_keep_the_time_stamp(root: Path) -> None:
    path = root / "trainer/loop.py"
    before = staged(root, "before").folder / "trainer/loop.py"
    path.write_text(path.read_text().replace("step", "pets", 1))
    after = staged(root, "after").folder / "trainer/loop.py"
    assert after.stat().st_size == before.stat().st_size
    assert after.stat().st_mtime != before.stat().st_mtime


def test_nothing_compiled_and_no_launcher_of_the_operators_side_enters(root: Path) -> None:
    for path in (
        "trainer/__pycache__/loop.cpython-311.pyc",
        "trainer/old.pyc",
        "launch/ssh.py",
        "trainer/.git",
    ):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text("x")
    found = files(staged(root).folder)
    assert not [path for path in found if path.startswith("launch/")]
    assert not [path for path in found if "pyc" in path or ".git" in path]


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o664])
def test_a_wheel_of_the_site_is_there_and_the_site_keeps_it_as_it_was(root: Path, mode: int) -> None:
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
    for name in (
        "ca.crt",
        "README.md",
        "notes",
        "wheels/torch-1.whl",
        "wheels/readme",
        "aws-efa-installer-1.49.0.tar.gz",
    ):
        (root / context.SITE / name).parent.mkdir(parents=True, exist_ok=True)
        (root / context.SITE / name).write_text(PEM)
    found = {path for path in files(staged(root).folder) if path.startswith(context.SITE)}
    assert found == {
        f"{context.SITE}/{name}" for name in ("ca.crt", "wheels/torch-1.whl", "aws-efa-installer-1.49.0.tar.gz")
    }
    (root / context.SITE / "wheels/away.whl").symlink_to("/etc/passwd")
    assert "is a symbolic link" in refusal(root)[0]


def test_a_site_may_keep_its_wheels_elsewhere(root: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store/torch-1.whl").write_bytes(b"wheel")
    (root / context.SITE).mkdir()
    (root / context.SITE / "wheels").symlink_to(tmp_path / "store")
    found = staged(root).folder / context.SITE / "wheels"
    assert not found.is_symlink()
    assert (found / "torch-1.whl").read_bytes() == b"wheel"


def test_the_sites_folder_is_there_for_the_mount_also_without_anything_in_it(root: Path) -> None:
    assert (staged(root).folder / context.SITE).is_dir()


@pytest.mark.slow
def test_a_builder_that_has_seen_the_folder_builds_what_is_in_it_now(engine: Engine, root: Path) -> None:
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
