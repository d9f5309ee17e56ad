"""Money and counts of parameters as text."""

from __future__ import annotations


def usd_text(usd: float) -> str:
    """Write whole dollars, and cents below 100 USD."""
    return f"{usd:,.2f}" if round(usd, 2) < 100 else f"{usd:,.0f}"


def parameters_text(count: int) -> str:
    """Write `8.03 B`, below a billion `124 M`."""
    return f"{count / 1e9:,.3g} B" if count >= 999.5e6 else f"{count / 1e6:,.3g} M"
