"""Prices of today: what is asked of AWS, how its answers become prices, and one line where it gives none."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest
from botocore.exceptions import EndpointConnectionError, NoCredentialsError
from botocore.stub import Stubber
from moto import mock_aws

from infra.aws import Aws
from infra.catalog.price_answers import machine_filters, on_demand_price, spot_price
from infra.catalog.prices import Price
from infra.plan.cost import cost, machine_types
from infra.plan.stack import Plan
from infra.prices_online import on_demand_prices, spot_history, spot_prices
from lustrain.problem import UserError
from tests.infra.edits import place, spec_of
from tests.infra.mistakes import BLOCK, SLURM, SPOT
from tests.infra.test_preflight_online import broken

NOW = datetime(2026, 11, 26, tzinfo=UTC)
P5 = "p5.48xlarge"


def item(usd: object, type_name: str = P5, unit: str = "Hrs", region: str = "eu-west-1", currency: str = "USD") -> str:
    """An item of a price list, with the fields and in the form of
    https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api-getproducts.html."""
    dimension = {
        "rateCode": "X.JRTCKXETXF.6YS6EN2CT7",
        "unit": unit,
        "description": f"${usd} per On Demand Linux {type_name} Instance Hour",
        "appliesTo": [],
        "beginRange": "0",
        "endRange": "Inf",
        "pricePerUnit": {currency: usd},
    }
    term = {"sku": "X", "offerTermCode": "JRTCKXETXF", "termAttributes": {}, "priceDimensions": {"X.1": dimension}}
    attributes = {"instanceType": type_name, "regionCode": region}
    product = {"productFamily": "Compute Instance", "sku": "X", "attributes": attributes}
    return json.dumps({"product": product, "serviceCode": "AmazonEC2", "terms": {"OnDemand": {"X.2": term}}})


def connected(*answers: tuple[str, str, Any, Any]) -> Callable[[str], Aws]:
    """Clients that check each request and give these answers in turn: service, method, what is sent, the answer."""
    clients: dict[str, Any] = {}
    for service, method, sent, answer in answers:
        if service not in clients:
            clients[service] = boto3.client(
                service, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
            )  # type: ignore[call-overload]
            clients[service].stubber = Stubber(clients[service])
            clients[service].stubber.activate()
        if isinstance(answer, str):
            clients[service].stubber.add_client_error(method, answer, "as planted")
        else:
            clients[service].stubber.add_response(method, answer, sent)
    return lambda region: Aws(region, lambda service: clients[service])


def products(*items: str, type_name: str = P5, token: str = "", more: str = "") -> tuple[str, str, Any, Any]:
    filters = [
        {"Type": "TERM_MATCH", "Field": key, "Value": value}
        for key, value in machine_filters(type_name, "eu-west-1").items()
    ]
    sent = {"ServiceCode": "AmazonEC2", "Filters": filters, **({"NextToken": token} if token else {})}
    answer = {"FormatVersion": "aws_v1", "PriceList": list(items), **({"NextToken": more} if more else {})}
    return "pricing", "get_products", sent, answer


def change(zone: str, usd: str, day: int, type_name: str = P5) -> dict[str, Any]:
    return {
        "AvailabilityZone": zone,
        "InstanceType": type_name,
        "ProductDescription": "Linux/UNIX",
        "SpotPrice": usd,
        "Timestamp": datetime(2026, 11, day, tzinfo=UTC),
    }


def history(*rows: Any, token: str = "", more: str = "") -> tuple[str, str, Any, Any]:
    sent: dict[str, Any] = {
        "InstanceTypes": [P5],
        "ProductDescriptions": ["Linux/UNIX"],
        "StartTime": NOW - timedelta(days=1),
    }
    sent |= {"NextToken": token} if token else {}
    return "ec2", "describe_spot_price_history", sent, {"SpotPriceHistory": list(rows), "NextToken": more}


def test_both_kinds_of_prices_come_from_all_pages_of_answers() -> None:
    asked: list[str] = []
    connect = connected(
        products(item("0.0000000000"), more="next"),
        products(item("60.5"), token="next"),
        history(change("eu-west-1a", "30.0", 20), change("eu-west-1b", "21.0", 20), more="next"),
        history(change("eu-west-1b", "25.0", 25), token="next"),
    )

    def ask(region: str) -> Aws:
        asked.append(region)
        return connect(region)

    prices = on_demand_prices([P5], "eu-west-1", NOW, connect=ask) | spot_prices([P5], "eu-west-1", NOW, connect=ask)
    assert {name: (one.usd, one.region, one.date) for name, one in prices.items() if one} == {
        P5: (60.5, "eu-west-1", "2026-11-26"),
        f"spot:{P5}": (25.0, "eu-west-1b", "2026-11-26"),
    }
    assert all(one and one.is_from_aws for one in prices.values())
    assert asked == ["eu-central-1", "eu-west-1"]


def test_type_that_aws_does_not_sell_has_no_price() -> None:
    assert on_demand_prices([P5], "eu-west-1", NOW, connect=connected(products())) == {P5: None}
    assert spot_prices([P5], "eu-west-1", NOW, connect=connected(history())) == {f"spot:{P5}": None}


@pytest.mark.parametrize("name", ["m7i.metal-24xl", "g4dn.metal"])
def test_bare_metal_is_asked_for_as_it_is_listed(name: str) -> None:
    filters = machine_filters(name, "us-east-1")
    assert (filters["tenancy"], filters["productFamily"]) == ("Dedicated", "Compute Instance (bare metal)")


@pytest.mark.parametrize(
    "answer",
    [
        {"PriceList": [item("1"), item("2")]},
        {"PriceList": ['{"product": {}}']},
        {"PriceList": ["[]"]},
        {"PriceList": ["{"]},
        {"PriceList": ["[" * 100_000]},
        *({"PriceList": [item(usd)]} for usd in ("nan", "inf", "-1", "1e300", "many", None, [])),
        {},
    ],
)
def test_price_list_of_another_form_is_one_line(answer: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        on_demand_prices([P5], "eu-west-1", NOW, connect=connected(("pricing", "get_products", None, answer)))
    (line,) = error.value.problems
    assert (line.path, error.value.exit_code) == ("--online", 1)


@pytest.mark.parametrize(
    "row",
    [
        *({**change("eu-west-1a", "1", 20), "SpotPrice": usd} for usd in ("nan", "-1", "many")),
        *(
            {key: value for key, value in change("eu-west-1a", "1", 20).items() if key != gone}
            for gone in ("SpotPrice", "Timestamp", "AvailabilityZone", "InstanceType")
        ),
    ],
)
def test_spot_history_of_another_form_is_one_line(row: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        spot_prices([P5], "eu-west-1", NOW, connect=connected(history(row)))
    (line,) = error.value.problems
    assert (line.path, error.value.exit_code) == ("--online", 1)


def test_pages_that_do_not_end_are_one_line() -> None:
    pages = [products(more="again"), products(token="again", more="again")]
    with pytest.raises(UserError) as error:
        on_demand_prices([P5], "eu-west-1", NOW, connect=connected(*pages))
    assert [line.path for line in error.value.problems] == ["--online"]
    assert error.value.exit_code == 1


@pytest.mark.parametrize(
    "other",
    [
        item("5", unit="Quantity"),
        item("5", "p4d.24xlarge"),
        item("5", region="eu-west-2"),
        item("5", currency="CNY"),
        item("0.0000000000"),
    ],
)
def test_what_is_no_hours_price_in_usd_there_is_left_out(other: str) -> None:
    assert on_demand_price([other], P5, "eu-west-1", "today") is None
    price = on_demand_price([other, item("9")], P5, "eu-west-1", "today")
    assert price
    assert price.usd == 9.0


def test_spot_price_of_0_is_no_price() -> None:
    rows = [change("eu-west-1a", "0.0", 20), change("eu-west-1b", "7.0", 20)]
    price = spot_price(rows, P5, "today")
    assert price
    assert (price.usd, price.region) == (7.0, "eu-west-1b")
    assert spot_price(rows[:1], P5, "today") is None


@pytest.mark.parametrize(
    ("prices", "answer", "right"),
    [
        (on_demand_prices, ("pricing", "get_products", None, "AccessDeniedException"), "pricing:GetProducts"),
        (
            spot_prices,
            ("ec2", "describe_spot_price_history", None, "UnauthorizedOperation"),
            "ec2:DescribeSpotPriceHistory",
        ),
    ],
)
def test_missing_right_is_named(prices: Callable[..., Any], answer: Any, right: str) -> None:
    with pytest.raises(UserError) as error:
        prices([P5], "eu-west-1", NOW, connect=connected(answer))
    (line,) = error.value.problems
    assert (line.path, line.fix, error.value.exit_code) == ("--online", f"allow {right}", 1)


@pytest.mark.parametrize("code", ["ExpiredTokenException", "UnrecognizedClientException"])
def test_refused_credentials_are_named_as_such(code: str) -> None:
    with pytest.raises(UserError) as error:
        on_demand_prices([P5], "eu-west-1", NOW, connect=connected(("pricing", "get_products", None, code)))
    (line,) = error.value.problems
    assert "AWS_PROFILE" in line.fix
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (EndpointConnectionError(endpoint_url="https://api.pricing.us-east-1.amazonaws.com"), 3),
        (NoCredentialsError(), 2),
    ],
)
def test_aws_that_does_not_answer_is_one_line(failure: Exception, code: int) -> None:
    for ask in (lambda connect: on_demand_prices([P5], "us-east-1", NOW, connect=connect),
                lambda connect: spot_history([P5], "us-east-1", NOW, 30, connect=connect)):  # fmt: skip
        with pytest.raises(UserError) as error:
            ask(lambda region: broken(failure))
        assert ([line.path for line in error.value.problems], error.value.exit_code) == (["--online"], code)


@pytest.mark.parametrize("region", ["cn-north-1", "us-gov-west-1"])
def test_other_partitions_are_refused_unasked(region: str) -> None:
    with pytest.raises(UserError) as error:
        on_demand_prices([P5], region, NOW, connect=connected())
    assert [line.path for line in error.value.problems] == ["region"]


@pytest.mark.slow
@mock_aws
def test_history_of_moto_is_read_as_the_command_prints_it() -> None:
    rows = spot_history([P5], "us-east-1", NOW, 30)
    assert rows
    assert {row["InstanceType"] for row in rows} == {P5}
    assert all(isinstance(row["Timestamp"], str) for row in rows)


def test_machines_alone_are_asked_for_and_priced_anew() -> None:
    spot = spec_of(SPOT, {})
    types = machine_types(spot)
    assert {"g6e.48xlarge"} < types
    assert not machine_types(spec_of(BLOCK, {})) & {"p5en.48xlarge"}
    assert {group.ec2_type for group in (spec_of(SLURM, {}).monitor,) if group} <= machine_types(spec_of(SLURM, {}))
    plan = Plan(spot, place(SPOT), NOW)
    dated, today = cost(plan), cost(plan, {name: Price(1.0, "hour", "us-east-1", "2026-11-26", "") for name in types})
    machines = {part.name for part, then in zip(today.parts, dated.parts, strict=True) if part != then}
    assert machines == {"train", "monitor"}
    assert next(part.usd_hour for part in today.parts if part.name == "train") == spot.groups[0].count
    unknown = cost(plan, dict.fromkeys(types))
    assert set(unknown.unknown) & types
