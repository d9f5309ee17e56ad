"""RESULTS.md after one bench: its table is new, and every other line stands as it did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench import __main__ as bench
from tests.bench.harness import Row, machine
from tests.bench.results import renewed

TITLES = list(bench.BENCHES.values())


def found(figure: str) -> dict[str, Any]:
    row = Row(figure=figure, ours=1.0, baseline=2.0, ratio=0.5, bar=1.0, limit=None, unit="s", at_most=True)
    return {"machine": machine(), "rows": [row.as_dict()]}


def sections(text: str) -> list[str]:
    return text.split("\n## ")


def test_renewed_bench_keeps_all_that_was_written_by_hand() -> None:
    before = bench.RESULTS.read_text(encoding="utf-8")
    for title in TITLES:
        after = renewed(before, title, found("anew"), TITLES)
        old, new = ([one for one in sections(text) if not one.startswith(title)] for text in (before, after))
        assert old == new
    assert renewed(before, "From a fault to its alert", found("anew"), TITLES).count("On 2026-11-27 StragglerData") == 1


def test_renewed_bench_has_the_new_table_alone() -> None:
    first = renewed("", TITLES[3], found("stale"), TITLES)
    words = "A reason.\n\n- of two\n- parts\n"
    again = renewed(f"{first}\n{words}", TITLES[3], found("fresh"), TITLES)
    assert "stale" not in again
    assert again == renewed("", TITLES[3], found("fresh"), TITLES) + f"\n{words}"


def test_words_above_or_in_place_of_a_table_are_kept() -> None:
    table = renewed("", TITLES[3], found("fresh"), TITLES)
    machine, words = table.split("\n\n")[3], "Why it is so."
    for before in (
        table.replace(f"{machine}\n", f"{machine}\n\n{words}\n"),
        f"{table.partition('## ')[0]}## {TITLES[3]}\n\n{words}\n",
    ):
        assert renewed(before, TITLES[3], found("fresh"), TITLES) == f"{table}\n{words}\n"


def test_every_section_is_of_a_bench_or_written_by_hand() -> None:
    """A bench that is renamed would leave its old table behind, and the words below that."""
    titles = {one.partition("\n")[0] for one in sections(bench.RESULTS.read_text(encoding="utf-8"))[1:]}
    assert titles - {*TITLES} == {"One GPU"}


def test_new_section_stands_where_its_bench_does() -> None:
    text = "# Results\n"
    for title in (TITLES[0], TITLES[4]):
        text = renewed(text, title, found(title), TITLES)
    text += "\n## By hand\n\nwords\n"
    for title in (TITLES[2], TITLES[5]):
        text = renewed(text, title, found(title), TITLES)
    order = [one.partition("\n")[0] for one in sections(text)[1:]]
    assert order == [TITLES[0], TITLES[2], TITLES[4], TITLES[5], "By hand"]


def test_running_one_bench_renews_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "RESULTS.md"
    results.write_text(text := renewed("", TITLES[0], found("of another"), TITLES))

    def run(name: str) -> dict[str, Any]:
        return json.loads(json.dumps(found(name)))  # type: ignore[no-any-return]

    monkeypatch.setattr(bench, "RESULTS", results)
    monkeypatch.setattr(bench, "run", run)
    assert bench.main(["bench_launch"]) == 0
    after = results.read_text()
    assert after.startswith(text)
    assert "| bench_launch |" in after
