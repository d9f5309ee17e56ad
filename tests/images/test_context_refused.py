"""What may not enter a build context is refused before anything is written, each mistake in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from images.plan import dockerfile
from lustrain.problem import UserError
from tests.images.checkouts import checkout
from tests.images.test_context import files, heads, refusal, staged

KEY = f"-----BEGIN RSA PRIVATE KEY-----\n{'A' * 64}\n-----END RSA PRIVATE KEY-----\n"
MOST = 16 << 20
NAMES = ".env .env.prod id_rsa server.pem tls.KEY credentials credentials.json .netrc secrets.toml"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return checkout(tmp_path / "clone")


@pytest.mark.parametrize("name", NAMES.split())
def test_a_file_with_the_name_of_a_secret_is_refused(root: Path, name: str) -> None:
    (root / "trainer/data" / name).write_text("x")
    assert heads(refusal(root)) == [f"context = 'trainer/data/{name}'"]


def test_modules_with_such_names_are_none(root: Path) -> None:
    names = {f"trainer/{name}.py" for name in ("credentials", "keys", "environment", "secrets")}
    for name in names:
        (root / name).write_text("KEY = '-----BEGIN RSA PRIVATE KEY-----'\n")
    assert names <= files(staged(root).folder)


def test_key_in_a_file_of_any_name_is_refused_without_showing_it(root: Path) -> None:
    (root / "trainer/data/notes.md").write_text(f"remember:\n{KEY}")
    [line] = refusal(root)
    assert line.startswith("context = 'trainer/data/notes.md'")
    assert "AAAA" not in line


def test_all_that_is_wrong_comes_at_once_and_nothing_is_written(root: Path) -> None:
    (root / "trainer/link.py").symlink_to(root / "trainer/loop.py")
    (root / "trainer/folder").symlink_to("/etc")
    os.mkfifo(root / "trainer/pipe")
    (root / "trainer/.env").write_text("x")
    with (root / "trainer/corpus.bin").open("wb") as file:
        file.truncate(MOST + 1)
    (root / "trainer/line\nend.py").write_text("x")
    (root / os.fsdecode(b"trainer/latin-\xe4.py")).write_text("x")
    names = [".env", "corpus.bin", "folder", "latin-\\udce4.py", "line\\nend.py", "link.py", "pipe"]
    told = refusal(root)
    assert heads(told) == [f"context = 'trainer/{name}'" for name in names]
    assert "is a symbolic link" in told[2].why
    assert "is not a regular file" in told[-1].why


def test_a_file_of_code_may_be_as_large_as_the_limit(root: Path) -> None:
    with (root / "trainer/corpus.bin").open("wb") as file:
        file.truncate(MOST)
    assert "trainer/corpus.bin" in files(staged(root).folder)


def test_a_lock_that_is_missing_says_what_makes_it(root: Path) -> None:
    (root / "images/locks/app.lock").unlink()
    [line] = refusal(root)
    assert "'images/locks/app.lock'" in line
    assert line.endswith("fix: fab image-lock")


def test_a_dockerfile_that_reads_more_than_may_enter_is_refused(root: Path) -> None:
    (root / "infra").mkdir()
    (root / "infra/config.py").write_text("x")
    file = root / dockerfile.PATHS["cpu"]
    file.write_text(file.read_text().replace("COPY trainer ", "COPY infra/config.py /x/\nCOPY trainer "))
    assert heads(refusal(root)) == ["context = 'infra/config.py'"]


def test_an_argument_that_no_stage_declares_is_refused(root: Path) -> None:
    assert heads(refusal(root, arg=("EFA_VERSON=1.0",), target="cuda")) == ["--arg = 'EFA_VERSON'"]


def test_a_folder_in_use_stays_as_it_is(root: Path) -> None:
    (root.parent / "used").mkdir()
    (root.parent / "used/mine").write_text("x")
    with pytest.raises(UserError, match="is not empty"):
        staged(root, "used")
    assert files(root.parent / "used") == {"mine"}
