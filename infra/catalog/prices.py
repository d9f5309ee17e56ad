"""What AWS charges: list prices with their dates, from AWS itself or as others report them.

`prices.jsonl` has one row for each list that was read: its regions, date, source, the unit, and USD by name. A name is an
instance type on demand, the same type as `spot:` or `capacity-block:`, or a part of another service, such as
`lustre-ssd-125-gb`. Prices change: the bill is right, this is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

PRICES = Path(__file__).with_name("prices.jsonl")
HOME = "us-east-1"
"""The region whose price is shown where a region's own is not known."""
ANYWHERE = "*"
"""The region of a price that is one for all of them."""
HOURS_A_MONTH = 730
"""365 x 24 / 12, as AWS's calculator counts."""
FROM_AWS = (
    *("https://aws.amazon.com/", "https://docs.aws.amazon.com/"),
    *("https://github.com/aws/", "https://github.com/aws-samples/"),
)
"""Where AWS publishes prices itself; all other sources report them."""
HOURS = {"hour": 1, "month": HOURS_A_MONTH}


@dataclass(frozen=True)
class Price:
    """USD `per` hour, month, GB or 10 million samples of one thing; `region` is where it holds, `date` and `source` say whose
    list it is."""

    usd: float
    per: Literal["hour", "month", "GB", "10M samples"]
    region: str
    date: str
    source: str

    @property
    def usd_hour(self) -> float:
        """The price of an hour of a thing that is billed by time; KeyError for one billed by its use."""
        return self.usd / HOURS[self.per]

    @property
    def is_from_aws(self) -> bool:
        return self.source.startswith(FROM_AWS)

    def holds_in(self, region: str) -> bool:
        return self.region in (region, ANYWHERE)


@cache
def prices() -> Mapping[tuple[str, str], Price]:
    """Return the prices in this package by name and region."""
    _, *rows = map(json.loads, PRICES.read_text(encoding="utf-8").splitlines())
    return MappingProxyType(
        {
            (name, region): Price(usd, row["per"], region, row["date"], row["source"])
            for row in rows
            for region in row["regions"]
            for name, usd in row["usd"].items()
        }
    )


def price(name: str, region: str) -> Price | None:
    """Return the price of `name` in a region, or that of us-east-1, which says so; None where neither is known."""
    known = (prices().get((name, where)) for where in (region, ANYWHERE, HOME))
    return next(filter(None, known), None)


@dataclass(frozen=True)
class RegionPrices:
    """Prices for one region: `today` has those that AWS gave now, None where it has none, and goes before the
    catalogue's."""

    region: str
    today: Mapping[str, Price | None] = field(default_factory=dict)

    def of(self, name: str) -> Price | None:
        return self.today[name] if name in self.today else price(name, self.region)
