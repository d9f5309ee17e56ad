"""The laws of the planner beside published figures, and docs/plan.md, which shows the errors as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.planner.published import PUBLISHED, Published

PAGE = Path(__file__).parents[2] / "docs/plan.md"


@pytest.mark.parametrize("one", PUBLISHED, ids=lambda one: one.name)
def test_law_is_within_the_error_that_is_admitted(one: Published) -> None:
    assert abs(one.error) <= one.within


def test_the_page_shows_each_figure_with_its_error() -> None:
    rows = re.findall(r"^\| (.+?) \| (\S+) \| (\S+) \| ([+-]\S+) % \| (.+?) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    shown = {name: (float(figure.replace(",", "")), int(error)) for name, figure, _, error, _ in rows}
    assert shown == {one.name: (one.figure, round(100 * one.error)) for one in PUBLISHED}
