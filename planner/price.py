"""What the nodes and the storage of a training cost by the hour, for each way to pay for the nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from infra.catalog.fsx import PER_TIB_MB_S
from infra.catalog.prices import HOURS_A_MONTH, Price, RegionPrices, price

MODES = ("on-demand", "spot", "capacity-block", "training-plan")
_PREFIX = {"on-demand": "", "spot": "spot:", "capacity-block": "capacity-block:", "training-plan": "training-plan:"}
STORAGE_GB = 1e9


@dataclass(frozen=True)
class Rate:
    """USD an hour of one node, paid in this way; None where no price is known. `origin` says where it is from."""

    mode: str
    usd_hour: float | None
    origin: str
    source: str = ""


def rates(
    type_name: str, region: str, given: Mapping[str, float], today: Mapping[str, Price | None] = MappingProxyType({})
) -> list[Rate]:
    """Return the rate of each mode: the user's own first, then AWS's answer of `today`, else the catalogue's with its date and
    whether AWS lists it."""
    prices = RegionPrices(region, today)
    return [_rate(mode, type_name, prices, given.get(mode)) for mode in MODES]


def _rate(mode: str, type_name: str, prices: RegionPrices, given: float | None) -> Rate:
    if given is not None:
        return Rate(mode, given, "as given")
    known = prices.of(f"{_PREFIX[mode]}{type_name}")
    if known is None:
        return Rate(mode, None, f"price unknown: --price {mode}=USD")
    return Rate(mode, known.usd_hour, _origin(known, prices.region), known.source)


def _origin(known: Price, region: str) -> str:
    text = f"list of {known.date}" if known.is_from_aws else f"reported {known.date}"
    return text + ("" if known.holds_in(region) else f", {known.region}'s")


@dataclass(frozen=True)
class Storage:
    """USD an hour of the file system and of the checkpoints in S3; what S3 asks for requests is not in it."""

    lustre_usd_hour: float
    s3_usd_hour: float
    origin: str


def storage(checkpoint_bytes: int, kept: int, lustre_gib: int, per_tib_mb_s: int, region: str) -> Storage:
    """Return the cost of `kept` checkpoints, and of a file system of `lustre_gib` at one of FSx's rates."""
    s3 = price("s3-gb", region)
    lustre = price(f"lustre-ssd-{per_tib_mb_s}-gb", region) if lustre_gib else None
    used = [known for known in (s3, lustre) if known]
    return Storage(
        lustre.usd / HOURS_A_MONTH * lustre_gib if lustre else 0.0,
        s3.usd / HOURS_A_MONTH * kept * checkpoint_bytes / STORAGE_GB if s3 else 0.0,
        "; ".join(dict.fromkeys(_origin(known, region) for known in used)),
    )


LUSTRE_RATES = tuple(PER_TIB_MB_S)
