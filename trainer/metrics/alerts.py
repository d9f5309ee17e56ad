"""When alerts about a run fired, as a Prometheus that has its rules recorded it."""

from __future__ import annotations

import http.client
import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lustrain.problem import UserError, problem

POINTS = 2000
"""Times at which a run's alerts are read: below the 11,000 of a series that Prometheus answers with
(https://github.com/prometheus/prometheus/blob/v2.42.0/web/api/v1/api.go)."""
TIMEOUT_S = 30.0
FIX = "curl its /-/ready; through SSM it needs a port that is forwarded"


@dataclass(frozen=True)
class Firing:
    """An alert from its first to its last moment, in Unix seconds."""

    alert: str
    began: float
    ended: float


def read_firings(address: str, run: str, began: float, ended: float) -> list[Firing]:
    """Ask the Prometheus at `address` which alerts fired about this run, nodes or file systems between two Unix times.

    UserError, about --prometheus, where the address is none, does not answer, or is no Prometheus.
    """
    step_s = float(max(1, math.ceil((ended - began) / POINTS)))
    # What is not about a run has no such label: nodes and file systems.
    about = json.dumps(f"{re.escape(run)}|", ensure_ascii=False)
    words = {"query": f'ALERTS{{alertstate="firing",run=~{about}}}', "start": began, "end": ended, "step": step_s}
    series = query(address, "query_range", words)
    try:
        return firings(series, step_s)
    except (LookupError, TypeError, ValueError) as error:
        why = f"answers, but not as a Prometheus does ({error!r})"
        raise UserError(problem("--prometheus", address, why, fix=FIX)) from None


def firings(series: Sequence[Mapping[str, Any]], step_s: float) -> list[Firing]:
    """Return the periods in the series of a range query of `ALERTS`, by their begin; a gap of more than a step ends one."""
    found = []
    for one in series:
        alert, times = str(one["metric"]["alertname"]), [float(time) for time, _ in one["values"]]
        began = times[0]
        for time, after in zip(times, [*times[1:], math.inf], strict=True):
            if after - time > 1.5 * step_s:
                found.append(Firing(alert, began, time))
                began = after
    return sorted(found, key=lambda one: (one.began, one.alert))


def names(periods: Sequence[Firing]) -> list[str]:
    """Return each alert once, in the order in which they fired first."""
    return list(dict.fromkeys(one.alert for one in periods))


def query(address: str, kind: str, words: Mapping[str, Any]) -> list[Any]:
    """Return the series that the Prometheus at `address` answers to a query with; `kind` is `query` or `query_range`.

    UserError, about --prometheus, where the address is none, does not answer, or is no Prometheus.
    """
    if not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", address):
        raise UserError(
            problem("--prometheus", address, "is no address of a Prometheus", allowed="like http://localhost:9090")
        )
    url = f"{address.rstrip('/')}/api/v1/{kind}?{urllib.parse.urlencode(words)}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
            series = json.loads(reply.read())["data"]["result"]
        if isinstance(series, list):
            return series
        why = "answers, but not as a Prometheus does"
    except urllib.error.HTTPError as error:
        why = f"answers {error.code} {error.reason}"
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        why = f"does not answer as a Prometheus does ({getattr(error, 'reason', error)})"
    raise UserError(problem("--prometheus", address, why, fix=FIX))
