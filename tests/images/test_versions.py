"""What a reader of versions.toml relies on: the real file is whole, a bad one is told line by line, nothing is filled in."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from images.plan import versions
from lustrain.problem import UserError

ROOT = Path(__file__).parents[2]


def problems(folder: Path, *replacements: tuple[str, str]) -> list[str]:
    """What is wrong with the real file where some text is replaced, which must be there."""
    text = versions.PATH.read_text(encoding="utf-8")
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    path = folder / "versions.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        versions.load(path)
    assert caught.value.exit_code == 2
    assert all("\n" not in line for line in caught.value.problems)
    return [line.removeprefix("versions.toml: ") for line in caught.value.problems]


def test_nothing_changes_after_loading() -> None:
    with pytest.raises(ValidationError):
        versions.load().torch = "1.0"


def test_gaudi_is_not_built_from_a_tag() -> None:
    """Its versions, too, which no image in tests/golden has."""
    gaudi = versions.load().gaudi
    with pytest.raises(UserError, match=r"gaudi\.digest = ''"):
        _ = gaudi.model_copy(update={"digest": ""}).pinned
    digest = "sha256:" + "a" * 64
    assert gaudi.model_copy(update={"digest": digest}).pinned == f"{gaudi.image}@{digest}"
    held = {"python": gaudi.python, "torch": gaudi.torch, "gaudi": gaudi.release}
    assert versions.load().of("gaudi") == held


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('torch = "2.13.0"', 'torch = "2.13.x"', "torch = '2.13.x'"),
        ('nccl = "2.29.7"', 'nccl = "2.9.7"', "2.9.7 is older than minimum.nccl, 2.28.0"),
        ('efa = "1.47.0"', 'efa = "1.100.0"', "1.49.0 is older than minimum.efa, 1.100.0"),
        ('version = "1.49.0"', 'version = "1.50.0"', "efa.url = "),
        ("debian@sha256:8", "debian:latest@sha256:8", "base = "),
        ('digest = ""', 'digest = "sha256:12"', "gaudi.digest = 'sha256:12'"),
        ("cpu = 1000", "cpu = true", "budget_mb.cpu = True"),
        ("cpu = 1000", "cpu = 0", "budget_mb.cpu = 0"),
        ("cpu = 1000\n", "", "budget_mb.cpu is missing"),
        ('uv = "', 'uw = "', "uw = '0.13.9'"),
    ],
)
def test_a_bad_value_is_one_line_that_names_it(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert any(told in line for line in problems(tmp_path, (old, new)))


def test_minimum_is_new_enough_and_other_problems_come_at_once(tmp_path: Path) -> None:
    fits = [('efa = "1.47.0"', 'efa = "1.49.0"'), ("cpu = 1000", "cpu = 1")]
    told = problems(tmp_path, *fits, ('uv = "', 'uw = "'), ('cuda = "13.0"', 'cuda = "13"'))
    assert sorted(line.split()[0] for line in told) == ["cuda", "uv", "uw"]


def test_what_is_no_file_of_toml_is_one_line(tmp_path: Path) -> None:
    assert "cannot be read" in problems(tmp_path, ("[efa]", "[efa"))[0]
    with pytest.raises(UserError, match="cannot be read"):
        versions.load(tmp_path / "none.toml")


def table(found: versions.Versions) -> str:
    """The table of docs/images.md."""
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
    _, start, text = (ROOT / "docs/images.md").read_text(encoding="utf-8").partition("<!-- versions -->\n")
    assert start
    assert text.partition("\n<!-- /versions -->")[0].strip() == table(versions.load())
