"""What may not enter a build context is refused before anything is written, each mistake in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from images.plan import context, dockerfile
from lustrain.problem import UserError
from tests.images.checkouts import checkout
from tests.images.test_context import KEY, files, refusal, staged


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return checkout(tmp_path / "clone")


@pytest.mark.parametrize(
    "name",
    [
        ".env",
        ".env.prod",
        "id_rsa",
        "server.pem",
        "tls.KEY",
        "credentials",
        "credentials.json",
        ".netrc",
        "secrets.toml",
    ],
)
def test_a_file_with_the_name_of_a_secret_is_refused(root: Path, name: str) -> None:
    (root / "trainer/data" / name).write_text("x")
    [line] = refusal(root)
    assert line.startswith(f"context = 'trainer/data/{name}': has the name of a file with secrets")


@pytest.mark.parametrize("name", ["credentials.py", "keys.py", "environment.py", "secrets.py"])
def test_a_module_with_such_a_name_is_none(root: Path, name: str) -> None:
    (root / "trainer" / name).write_text("KEY = '-----BEGIN RSA PRIVATE KEY-----'\n")
    assert f"trainer/{name}" in files(staged(root).folder)


def test_a_key_in_a_file_of_any_name_is_refused_without_showing_it(root: Path) -> None:
    (root / "trainer/data/notes.md").write_text(f"remember:\n{KEY}")
    [line] = refusal(root)
    assert line.startswith("context = 'trainer/data/notes.md': holds a private key")
    assert "AAAA" not in line


def test_all_that_is_wrong_is_told_at_once_and_nothing_is_written(root: Path) -> None:
    (root / "trainer/link.py").symlink_to(root / "trainer/loop.py")
    (root / "trainer/folder").symlink_to("/etc")
    os.mkfifo(root / "trainer/pipe")
    (root / "trainer/.env").write_text("x")
    lines = refusal(root)
    assert [line.partition(":")[0] for line in lines] == [
        "context = 'trainer/.env'",
        "context = 'trainer/folder'",
        "context = 'trainer/link.py'",
        "context = 'trainer/pipe'",
    ]
    assert "is a symbolic link" in lines[1]
    assert "is not a regular file" in lines[3]


def test_data_that_somebody_left_in_the_code_is_refused(root: Path) -> None:
    with (root / "trainer/corpus.bin").open("wb") as file:
        file.truncate(context.LARGEST + (1 << 20))
    (root / "trainer/line\nend.py").write_text("x")
    (root / os.fsdecode(b"trainer/latin-\xe4.py")).write_text("x")
    large, latin, line = refusal(root)
    assert "'trainer/corpus.bin': has 17 MiB, which is too large for code; allowed: 16 MiB" in large
    assert "has a name with characters that cannot be printed" in latin
    assert "line\\nend.py" in line


def test_a_lock_that_is_missing_says_what_makes_it(root: Path) -> None:
    (root / "images/locks/app.lock").unlink()
    [line] = refusal(root)
    assert "'images/locks/app.lock': reads this, and it is missing; fix: fab image-lock" in line


def test_a_dockerfile_that_reads_more_than_may_enter_is_refused(root: Path) -> None:
    (root / "infra").mkdir()
    (root / "infra/config.py").write_text("x")
    file = root / dockerfile.PATHS["cpu"]
    file.write_text(file.read_text().replace("COPY trainer ", "COPY infra/config.py /x/\nCOPY trainer "))
    [line] = refusal(root)
    assert "'infra/config.py': the Dockerfile reads a file that may not enter an image" in line


def test_an_argument_that_no_stage_declares_is_refused(root: Path) -> None:
    [line] = refusal(root, arg=("EFA_VERSON=1.0",), target="cuda")
    assert line.startswith(
        "--arg = 'EFA_VERSON': images/trainer.Dockerfile has no such ARG; allowed: BASE_IMAGE, BUDGET_MB"
    )


def test_a_folder_in_use_is_one_line(root: Path) -> None:
    (root.parent / "used").mkdir()
    (root.parent / "used/mine").write_text("x")
    with pytest.raises(UserError, match="is not empty"):
        staged(root, "used")
    assert files(root.parent / "used") == {"mine"}
