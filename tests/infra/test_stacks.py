"""Each example stack: up, clean preview, a change in place, the dangers that preflight announced, and what destroy leaves."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from infra.cluster import to_json
from tests.infra.stacks import EXAMPLES, Live

pytestmark = pytest.mark.slow
Lives = Callable[[str], Live]


@pytest.mark.parametrize("stack", EXAMPLES)
def test_a_second_preview_finds_nothing_to_change(lives: Lives, stack: str) -> None:
    lives(stack).engine("preview", "--expect-no-changes")
