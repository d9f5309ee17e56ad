"""The launcher's number of an attempt is a number, or one line says so."""

from __future__ import annotations

import pytest

from lustrain.problem import UserError
from trainer.environment import launch_attempt
from trainer.metrics.relay import rank_name


@pytest.mark.parametrize(
    ("value", "number"), [(None, None), ("", None), ("1", 1), ("000000012", 12), ("999999999", 999999999)]
)
def test_the_launchers_number_begins_the_lines_of_a_rank(value: str | None, number: int | None) -> None:
    read = launch_attempt({} if value is None else {"LUSTRAIN_ATTEMPT": value})
    assert read == number
    assert rank_name(3, read) == ("rank 3" if number is None else f"attempt {number}, rank 3")


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "\u00b2", "1" * 5000])
def test_what_is_not_the_number_of_an_attempt_is_one_line(value: str) -> None:
    with pytest.raises(
        UserError, match=r"^LUSTRAIN_ATTEMPT = .*: is not the number of an attempt; allowed: "
    ) as caught:
        launch_attempt({"LUSTRAIN_ATTEMPT": value})
    assert len(str(caught.value).splitlines()) == 1
