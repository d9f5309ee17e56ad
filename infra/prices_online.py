"""Asks AWS what machines cost today: the price list for those on demand, EC2 for the history of spot prices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError, PaginationError
from botocore.parsers import ResponseParserError

from infra.aws import DENIED, EXPIRED, NO_ONE, Aws, NotAwsError, code_of, connect
from infra.catalog.botocore_data import partitions
from infra.catalog.price_answers import SPOT, machine_filters, on_demand_price, spot_price
from infra.catalog.prices import Price
from lustrain.problem import FAILED, UNREACHABLE, UserError, problem, without_page
from lustrain.progress import Progress

NEAREST = {"eu": "eu-central-1", "ap": "ap-south-1"}
"""The price list has these and us-east-1's, each with the prices of all regions (botocore's endpoints of `pricing`)."""
LIST_RIGHT, HISTORY_RIGHT = "pricing:GetProducts", "ec2:DescribeSpotPriceHistory"
LONGEST_DAYS = 90
"""What EC2 keeps (https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSpotPriceHistory.html)."""
LINUX = ("Linux/UNIX",)
WITHOUT = "try again, or leave out --online for the dated prices"
Connect = Callable[[str], Aws]
Answer = TypeVar("Answer")


def on_demand_prices(
    types: Iterable[str], region: str, now: datetime, *, connect: Connect = connect
) -> dict[str, Price | None]:
    """Return what each type costs on demand by the hour; None where AWS sells none. UserError where AWS does not answer."""
    require_listed(region)
    names, date = sorted(set(types)), now.date().isoformat()
    prices: dict[str, Price | None] = {}
    aws = connect(NEAREST.get(region.partition("-")[0], "us-east-1"))
    with Progress("prices", len(names), "types", brief=True) as progress:
        for name in names:
            prices[name] = _answer(LIST_RIGHT, partial(_listed_price, aws, name, region, date))
            progress.advance()
    return prices


def spot_prices(
    types: Iterable[str], region: str, now: datetime, *, connect: Connect = connect
) -> dict[str, Price | None]:
    """Return what each type costs on spot now, in the zone where it is cheapest, by `spot:` and its name; None where AWS has
    had none for a day. UserError where AWS does not answer."""
    require_listed(region)
    names, date = sorted(set(types)), now.date().isoformat()
    rows = spot_history(names, region, now, 1, connect=connect) if names else []
    return {f"{SPOT}{name}": _answer(HISTORY_RIGHT, partial(spot_price, rows, name, date)) for name in names}


def spot_history(
    types: Sequence[str], region: str, now: datetime, days: int, *, connect: Connect = connect
) -> list[dict[str, Any]]:
    """Return the rows of the last `days`, and of each zone's last change before them, as `aws ec2 describe-spot-price-history`
    prints them. UserError where AWS does not answer."""
    return _answer(HISTORY_RIGHT, partial(_printed_rows, spot_rows(connect(region), types, now - timedelta(days=days))))


def spot_rows(
    aws: Aws, types: Sequence[str], since: datetime, *, zone_id: str | None = None
) -> Iterator[Mapping[str, Any]]:
    """Yield the spot prices of Linux since then, of one zone or of all in the region; what botocore raises passes."""
    paginator: Any = aws.ec2.get_paginator("describe_spot_price_history")
    zone = {"AvailabilityZoneId": zone_id} if zone_id else {}
    pages = paginator.paginate(InstanceTypes=list(types), ProductDescriptions=list(LINUX), StartTime=since, **zone)
    for page in pages:
        yield from page["SpotPriceHistory"]


def require_listed(region: str) -> None:
    """UserError where the price list has no prices in USD that these credentials may read."""
    if not partitions()["aws"].regions.match(region):
        why = "is in a partition whose price list is not read: China's is in yuan, that of GovCloud needs other credentials"
        raise UserError(problem("region", region, why, fix="leave out --online for the dated prices"))


def _listed_price(aws: Aws, name: str, region: str, date: str) -> Price | None:
    filters = [
        {"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in machine_filters(name, region).items()
    ]
    pages = aws.pricing.get_paginator("get_products").paginate(ServiceCode="AmazonEC2", Filters=filters)
    return on_demand_price([item for page in pages for item in page["PriceList"]], name, region, date)


def _printed_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    printed: list[dict[str, Any]] = []
    with Progress("spot prices", None, "changes", brief=True) as progress:
        for row in rows:
            printed.append({**row, "Timestamp": row["Timestamp"].isoformat()})
            progress.advance()
    return printed


def _answer(right: str, ask: Callable[[], Answer]) -> Answer:
    """Return what AWS answers; UserError in one line, with the right that it takes."""
    try:
        return ask()
    except ClientError as error:
        code = code_of(error)
        if code in DENIED:
            raise UserError(problem("--online", right, "permission is missing", fix=f"allow {right}"), FAILED) from None
        if code in EXPIRED | NO_ONE:
            raise _no_credentials(right, code) from None
        message = without_page(str(error.response.get("Error", {}).get("Message", "")) or code)
        raise UserError(problem("--online", right, f"AWS answers {code}: {message}", fix=WITHOUT), FAILED) from None
    except (ConnectionError, HTTPClientError, ResponseParserError, NotAwsError) as error:
        fix = "look at network, proxy and AWS_ENDPOINT_URL, or leave out --online for the dated prices"
        why = f"AWS cannot be reached: {without_page(str(error))}"
        raise UserError(problem("--online", right, why, fix=fix), UNREACHABLE) from None
    except PaginationError as error:
        raise _useless(right, str(error)) from None
    except BotoCoreError as error:
        raise _no_credentials(right, str(error)) from None
    except KeyError as error:
        raise _useless(right, f"{error} is missing") from None
    except ValueError as error:
        # Also botocore's, of an AWS_ENDPOINT_URL that is no address.
        raise _useless(right, str(error)) from None


def _useless(right: str, why: str) -> UserError:
    return UserError(problem("--online", right, f"has no answer that can be used: {why}", fix=WITHOUT), FAILED)


def _no_credentials(right: str, why: str) -> UserError:
    fix = "run `aws sso login` or `aws configure`, or set AWS_PROFILE"
    return UserError(problem("--online", right, f"AWS credentials: {why}", fix=fix))
