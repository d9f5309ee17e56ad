"""Prices from the answers of AWS's own interfaces: what a machine costs on demand, and what it costs on spot now."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from infra.catalog.prices import Price

PRICE_LIST = "https://docs.aws.amazon.com/aws-cost-management/latest/APIReference/API_pricing_GetProducts.html"
SPOT_HISTORY = "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSpotPriceHistory.html"
SPOT = "spot:"
"""Before the name of a type, in the names of prices."""
MOST_USD = 100_000.0
"""Of a machine an hour; a higher price is an error. Ours."""


def machine_filters(type_name: str, region: str) -> dict[str, str]:
    """Return the attributes that only the plain Linux machine on demand has, as Karpenter asks for them
    (https://github.com/aws/karpenter-provider-aws/blob/09303f32337c575bf343a8b4d9c8defbc73addce/pkg/providers/pricing/pricing.go)."""
    bare = type_name.partition(".")[2].startswith("metal")
    return {
        "instanceType": type_name,
        "regionCode": region,
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",
        "tenancy": "Dedicated" if bare else "Shared",
        "productFamily": "Compute Instance (bare metal)" if bare else "Compute Instance",
    }


def on_demand_price(price_list: Iterable[str], type_name: str, region: str, date: str) -> Price | None:
    """Return USD an hour by the `PriceList` of GetProducts, whose items are JSON texts; None where it sells none for USD.

    ValueError where the items name different prices, or are not of the documented form.
    """
    found = {usd for item in price_list for usd in _hourly_usd(item, type_name, region)}
    if len(found) > 1:
        raise ValueError(f"{len(found)} different prices for {type_name}: {', '.join(map(str, sorted(found)))}")
    return Price(found.pop(), "hour", region, date, PRICE_LIST) if found else None


def _hourly_usd(item: str, type_name: str, region: str) -> Iterator[float]:
    try:
        sold = json.loads(item)
        attributes = sold["product"]["attributes"]
        if (attributes["instanceType"], attributes["regionCode"]) != (type_name, region):
            return
        for term in sold["terms"].get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                usd = _usd(dimension["pricePerUnit"].get("USD", 0))
                if dimension["unit"] == "Hrs" and usd:
                    yield usd
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"an item of the price list has another form ({type(error).__name__}: {error})") from None


def spot_price(history: Iterable[Mapping[str, Any]], type_name: str, date: str) -> Price | None:
    """Return USD an hour now in the zone where it is lowest, by rows of DescribeSpotPriceHistory; the price's `region` is that
    zone. None where there is no row of the type, ValueError for a row that is not of the documented form."""
    newest: dict[str, tuple[Any, float]] = {}
    try:
        for row in history:
            if row["InstanceType"] == type_name:
                zone, change = row["AvailabilityZone"], (row["Timestamp"], _usd(row["SpotPrice"]))
                newest[zone] = max(newest.get(zone, change), change)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a row of the history has another form ({type(error).__name__}: {error})") from None
    # A price of 0 is none.
    now = {zone: usd for zone, (_, usd) in newest.items() if usd}
    if not now:
        return None
    zone = min(now, key=lambda zone: (now[zone], zone))
    return Price(now[zone], "hour", zone, date, SPOT_HISTORY)


def _usd(value: Any) -> float:
    usd = float(value)
    if not 0 <= usd < MOST_USD:
        raise ValueError(f"the price {usd} is out of range")
    return usd
