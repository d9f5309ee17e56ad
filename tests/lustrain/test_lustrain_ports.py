"""Ports that are looked up one after the other."""

from __future__ import annotations

import pytest

from lustrain.ports import hold_port, ports_in_a_row


def test_ports_in_a_row_leave_out_those_that_are_taken() -> None:
    with hold_port() as first:
        taken = first.getsockname()[1]
        first.listen()
        with pytest.raises(RuntimeError):
            ports_in_a_row(2, range(taken - 1, taken + 1))
        found = ports_in_a_row(2, range(21_000, 28_000))
    assert found[1] == found[0] + 1
    for port in found:
        hold_port(port=port).close()
