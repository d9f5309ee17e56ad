"""What an image says of its code: the commit, and whether what went in differs from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from images.plan import git_state
from lustrain.image_file import GitState
from lustrain.problem import UserError
from tests.conftest import require
from tests.images.checkouts import committed, git

PATHS = ("trainer", "images/verify.py")


@pytest.fixture(autouse=True)
def plain_git(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in os.environ if one.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")


def small(folder: Path) -> Path:
    for path in ("trainer/loop.py", "trainer/data/order.py", "images/verify.py", "infra/config.py"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"{path}\n")
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return committed(small(tmp_path / "clone"))


def read(root: Path) -> GitState:
    return git_state.read(root, PATHS, lambda path: "__pycache__" not in path)


def test_an_untouched_checkout_is_its_commit(repository: Path) -> None:
    assert read(repository) == GitState(git(repository, "rev-parse", "HEAD"), dirty=False)
    assert read(repository).time == int(git(repository, "show", "--no-patch", "--format=%ct"))


def test_what_does_not_go_into_the_image_makes_nothing_dirty(repository: Path) -> None:
    (repository / "infra/config.py").write_text("changed")
    (repository / "notes").write_text("new")
    (repository / "trainer/__pycache__").mkdir()
    (repository / "trainer/__pycache__/loop.pyc").write_text("compiled")
    assert not read(repository).dirty


def test_every_kind_of_change_is_found_and_named(repository: Path) -> None:
    git(repository, "config", "status.showUntrackedFiles", "no")
    (repository / ".gitignore").write_text("*.log\n")
    (repository / "trainer/loop.py").chmod(0o755)
    (repository / "trainer/data/order.py").unlink()
    (repository / "images/verify.py").rename(repository / "trainer/data/moved.py")
    (repository / "trainer/data/old.log").write_text("git ignores it, the image does not")
    (repository / "trainer/new").mkdir()
    (repository / "trainer/new/größe 'x'.py").write_text("untracked")
    git(repository, "add", "trainer/data/moved.py")
    state = read(repository)
    assert state.dirty
    found = ("data/moved.py", "data/old.log", "data/order.py", "loop.py", "new/größe 'x'.py")
    assert state.changed == ("images/verify.py", *(f"trainer/{name}" for name in found))


@pytest.mark.parametrize("mark", ["--assume-unchanged", "--skip-worktree"])
def test_a_change_that_git_was_told_not_to_see_is_seen(repository: Path, mark: str) -> None:
    git(repository, "update-index", mark, "trainer/loop.py", "trainer/data/order.py", "images/verify.py")
    assert not read(repository).dirty
    (repository / "trainer/loop.py").write_text("edited")
    (repository / "images/verify.py").unlink()
    assert read(repository).changed == ("images/verify.py", "trainer/loop.py")


def test_outside_a_repository_or_without_git_there_is_no_commit(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert read(small(tmp_path / "plain")) == GitState(None, dirty=False)
    monkeypatch.setenv("PATH", str(repository))
    assert read(repository) == GitState(None, dirty=False)


def test_unrelated_repository_around_us_does_not_lend_its_commit(repository: Path) -> None:
    (repository / ".gitignore").write_text("inner\n")
    assert read(small(repository / "inner")).commit is None


def test_folder_of_a_larger_repository_has_its_commit_and_paths(tmp_path: Path) -> None:
    small(tmp_path / "mono" / "training" / "lustrain")
    commit = git(committed(tmp_path / "mono"), "rev-parse", "HEAD")
    root = tmp_path / "mono" / "training" / "lustrain"
    (root / "trainer/loop.py").write_text("edited")
    assert read(root) == GitState(commit, dirty=True, changed=("trainer/loop.py",))


def test_before_the_first_commit_everything_is_a_change(tmp_path: Path) -> None:
    root = small(tmp_path)
    git(root, "init", "-q")
    git(root, "add", "-A")
    state = read(root)
    assert (state.commit, state.dirty, len(state.changed)) == (None, True, 3)


def test_a_worktree_and_a_shallow_clone_have_their_commits(repository: Path, tmp_path: Path) -> None:
    git(repository, "commit", "-q", "--allow-empty", "-m", "second")
    git(repository, "worktree", "add", "-q", "-b", "side", str(tmp_path / "side"), "HEAD~")
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{repository}", "shallow")
    assert read(tmp_path / "side").commit == git(repository, "rev-parse", "HEAD~")
    assert read(tmp_path / "shallow") == GitState(git(repository, "rev-parse", "HEAD"), dirty=False)
    (tmp_path / "side/trainer/loop.py").write_text("edited")
    assert read(tmp_path / "side").changed == ("trainer/loop.py",)
    assert not read(repository).dirty


def test_a_submodule_that_goes_in_is_looked_into(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/extra.py").write_text("one")
    committed(tmp_path / "other")
    git(repository, "submodule", "--quiet", "add", str(tmp_path / "other"), "trainer/extra")
    git(repository, "config", "submodule.trainer/extra.ignore", "all")
    git(repository, "commit", "-q", "-m", "with a submodule")
    assert not read(repository).dirty
    (repository / "trainer/extra/extra.py").write_text("two")
    assert "trainer/extra/extra.py" in read(repository).changed


def test_the_repository_a_process_around_us_works_on_is_not_ours(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = committed(small(tmp_path / "other"))
    git(other, "commit", "-q", "--allow-empty", "-m", "second")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / "no-index"))
    monkeypatch.setenv("GIT_CONFIG_PARAMETERS", "'core.worktree=/nowhere'")
    assert read(repository) == GitState(git(repository, "rev-parse", "HEAD"), dirty=False)


def test_asking_runs_no_hook_monitor_or_pager_and_writes_nothing(repository: Path, tmp_path: Path) -> None:
    trap, sprung = tmp_path / "trap", tmp_path / "sprung"
    trap.write_text(f"#!/bin/sh\ntouch {sprung}\ncat\n")
    trap.chmod(0o755)
    for name in ("post-index-change", "fsmonitor-watchman", "post-checkout"):
        (repository / ".git/hooks").mkdir(exist_ok=True)
        (repository / ".git/hooks" / name).symlink_to(trap)
    # Only a stale index makes status want to write it back.
    os.utime(repository / "trainer/loop.py", (1, 1))
    before = (repository / ".git/index").read_bytes()
    for key in ("core.fsmonitor", "core.pager", "pager.status", "diff.external"):
        git(repository, "config", key, str(trap))
    # git itself, asked for the configuration above, may have called it: the answer is about our own questions.
    sprung.unlink(missing_ok=True)
    assert not read(repository).dirty
    assert not sprung.exists()
    assert (repository / ".git/index").read_bytes() == before


def refusal(root: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        read(root)
    (line,) = caught.value.problems
    assert line.startswith("git = ")
    assert "\n" not in line
    return caught.value


def test_foreign_repository_is_refused_with_line_that_trusts_it(repository: Path) -> None:
    require(os.geteuid() == 0, "giving a folder to another user needs root")
    for path in (repository, *repository.rglob("*")):
        os.chown(path, 12345, 12345)
    error = refusal(repository)
    assert error.exit_code == 2
    assert str(error).endswith(f"; fix: git config --global --add safe.directory {repository}")


def test_damaged_repository_or_a_silent_git_is_one_line(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / ".git/index").write_bytes(b"no index")
    damaged = refusal(repository)
    assert (damaged.exit_code, "safe.directory" in str(damaged)) == (2, False)
    slow = tmp_path / "bin/git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 3600\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(git_state, "TIMEOUT_S", 0.2)
    assert refusal(repository).exit_code == 1
