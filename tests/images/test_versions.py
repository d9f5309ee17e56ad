"""What a reader of versions.toml relies on: the real file is whole, a bad one is told line by line, nothing is filled in."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from images.plan import versions
from lustrain.problem import UserError

ROOT = Path(__file__).parents[2]


def changed(tmp_path: Path, *replacements: tuple[str, str]) -> Path:
    """The real file with some text replaced; each must be there."""
    text = versions.PATH.read_text(encoding="utf-8")
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "versions.toml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path) -> list[str]:
    with pytest.raises(UserError) as caught:
        versions.load(path)
    assert caught.value.exit_code == 2
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def test_an_image_is_labelled_with_the_versions_that_are_in_it_and_no_others() -> None:
    known = versions.load()
    assert known.of("cpu") == {"python": known.python, "torch": known.torch}
    assert known.of("cuda")["efa"] == known.efa.version
    assert known.of("cuda")["nccl"] == known.nccl
    assert known.of("gaudi") == {"python": "3.12", "torch": known.gaudi.torch, "gaudi": known.gaudi.release}


def test_nothing_changes_after_loading() -> None:
    with pytest.raises(ValidationError):
        versions.load().torch = "1.0"  # type: ignore[misc]


def test_gaudi_is_not_built_from_a_tag() -> None:
    gaudi = versions.load().gaudi
    with pytest.raises(UserError, match=r"gaudi\.digest = '': .*fix: .*--base vault.habana.ai/.*@sha256:…"):
        _ = gaudi.model_copy(update={"digest": ""}).pinned
    digest = "sha256:" + "a" * 64
    assert gaudi.model_copy(update={"digest": digest}).pinned == f"{gaudi.image}@{digest}"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('torch = "2.13.0"', 'torch = "2.13.x"', "torch = '2.13.x': is not a version; allowed: like 2.9.1"),
        ('nccl = "2.29.7"', 'nccl = "2.9.7"', "nccl = '2.9.7': 2.9.7 is older than minimum.nccl, 2.28.0"),
        (
            'version = "1.49.0"',
            'version = "1.50.0"',
            "is not of version 1.50.0; fix: change version, url and sha256 together",
        ),
        ("debian@sha256:8", "debian:latest@sha256:8", "is not an image by digest"),
        ('digest = ""', 'digest = "sha256:12"', "gaudi.digest = 'sha256:12': is not a digest or empty"),
        ("cpu = 1000", "cpu = true", "budget_mb.cpu = True: true/false is not a value here"),
        ("cpu = 1000", "cpu = 0", "budget_mb.cpu = 0: not allowed; allowed: > 0"),
        ("cpu = 1000\n", "", "budget_mb.cpu is missing: it has no default; fix: add it"),
        ('uv = "', 'uw = "', "uw = '0.13.9': unknown key"),
        ("[efa]", "[efa", "cannot be read: "),
    ],
)
def test_a_bad_value_is_one_line_that_names_it(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert any(told in line for line in problems(changed(tmp_path, (old, new))))


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    lines = problems(changed(tmp_path, ('uv = "', 'uw = "'), ('cuda = "13.0"', 'cuda = "13"')))
    assert sorted(line.split()[1] for line in lines) == ["cuda", "uv", "uw"]


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    assert "cannot be read" in problems(tmp_path / "none.toml")[0]


def test_an_installer_older_than_the_minimum_is_refused(tmp_path: Path) -> None:
    (line,) = problems(changed(tmp_path, ("1.49.0", "1.9.0")))
    assert "1.9.0 is older than minimum.efa, 1.47.0" in line


TABLE = ("<!-- versions -->", "<!-- /versions -->")


def table(found: versions.Versions) -> str:
    """The table of docs/images.md, which stands between the two comments of `TABLE`."""
    debian = f"`{found.base_tag}`"
    rows = [
        ("Debian", debian, debian, ""),
        ("Python", found.python, found.python, found.gaudi.python),
        ("PyTorch", f"{found.torch}+cpu", found.torch, found.gaudi.torch),
        ("CUDA", "", found.cuda, ""),
        ("NCCL", "", found.nccl, ""),
        ("EFA installer", "", found.efa.version, ""),
        ("libfabric", "", found.efa.libfabric, ""),
        ("aws-ofi-nccl", "", found.efa.plugin, ""),
        ("Gaudi software", "", "", found.gaudi.release),
    ]
    lines = ["| | cpu | cuda | gaudi |", "|---|---|---|---|"]
    return "\n".join(lines + ["| " + " | ".join(cell or "–" for cell in row) + " |" for row in rows])


def test_the_documents_show_the_versions_that_are_built() -> None:
    start, end = TABLE
    text = (ROOT / "docs/images.md").read_text(encoding="utf-8")
    assert text.count(start) == text.count(end) == 1, f"docs/images.md needs one table between {start} and {end}"
    shown = text.partition(start)[2].partition(end)[0]
    assert shown.strip() == table(versions.load())
