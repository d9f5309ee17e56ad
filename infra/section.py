"""The spelling of values that several tables of the configuration have."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field

from lustrain.schema import A_TIME, like


def id_of(prefix: str, what: str) -> AfterValidator:
    return like(rf"{prefix}-[0-9a-f]{{8,17}}", f"the id of {what}", f"{prefix}-0123456789abcdef0")


Name = Annotated[
    str,
    Field(max_length=40),
    like(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", "a name", "llm-p5 (small letters, digits, single dashes inside)"),
]
"""Fits HyperPod's `[a-zA-Z0-9](-*[a-zA-Z0-9])*`, at most 63. Buckets that the stack names after a name longer than 28 may be
too long for S3: rule S3-001 says so."""
ZoneId = Annotated[
    str,
    like(
        r"[a-z]{3,4}\d-([a-z0-9]+-)?az\d+",
        "a zone id (us-east-1a is a zone name, another one in each account)",
        "use1-az4",
    ),
]
"""The zone's id, the same in every account."""
TypeName = Annotated[str, like(r"(?!ml\.)[a-z0-9-]+\.[a-z0-9-]+", "EC2's name of an instance type", "p5.48xlarge")]
Positive = Annotated[int, Field(gt=0)]
_GO_TIME = re.compile(r"(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d(?:\.\d+)?) ([+-]\d\d)(\d\d)(?: [A-Za-z0-9+-]+)?", re.ASCII)
"""How Go prints a time (https://pkg.go.dev/time#Time.String): `pulumi stack init` and `pulumi config set` rewrite the whole
file, and a time without quotes becomes text of this form."""
_ISO_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d.*", re.ASCII)


def _time(value: object) -> object:
    """Text in ISO 8601, also where it comes in Go's spelling; a number would be taken for seconds since 1970."""
    if isinstance(value, str) and (go := _GO_TIME.fullmatch(value)):
        return f"{go[1]}T{go[2]}{go[3]}:{go[4]}"
    if isinstance(value, datetime) or (isinstance(value, str) and _ISO_TIME.fullmatch(value)):
        return value
    raise ValueError(f"is not a time; allowed: {A_TIME}")


def _of_our_age(value: datetime) -> datetime:
    """Python's years end at 1 and 9999: near them, a time in another zone or half an hour earlier is an OverflowError."""
    if not FIRST_YEAR <= value.year <= LAST_YEAR:
        raise ValueError(f"is in the year {value.year}; allowed: the years {FIRST_YEAR} to {LAST_YEAR}")
    return value


FIRST_YEAR, LAST_YEAR = 2000, 9000
Time = Annotated[AwareDatetime, BeforeValidator(_time), AfterValidator(_of_our_age)]
