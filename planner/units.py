"""Time, money and counts of parameters as text."""

from __future__ import annotations


def span_text(seconds: float) -> str:
    """Write `46s`, `10m 55s`, `3h 58m`, `32d 23h`: the two largest units."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600}h"


def usd_text(usd: float) -> str:
    """Write whole dollars, and cents below 100 USD."""
    return f"{usd:,.2f}" if round(usd, 2) < 100 else f"{usd:,.0f}"


def parameters_text(count: int) -> str:
    """Write `8.03 B`, below a billion `124 M`."""
    return f"{count / 1e9:,.3g} B" if count >= 999.5e6 else f"{count / 1e6:,.3g} M"
