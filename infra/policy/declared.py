"""What a rule sees of a resource: plain data, with `UNKNOWN` where a value exists only after `pulumi up`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from infra.finding import finding
from lustrain.problem import Problem


class Unknown:
    """A value that is not known during a preview; rules never hold it against a resource."""

    def __repr__(self) -> str:
        return "UNKNOWN"

    def __bool__(self) -> bool:
        return False


UNKNOWN: Final = Unknown()


@dataclass(frozen=True)
class Resource:
    """One resource of a program: `props` in the provider's spelling (camel case, numbers as floats).

    `uses` has for each property the URNs of the resources that its value was made from; that holds in a preview too,
    when ids are not known yet, but only the rules over a whole stack get it.
    """

    type: str
    props: Mapping[str, Any]
    name: str = ""
    urn: str = ""
    protect: bool = False
    ignore_changes: tuple[str, ...] = ()
    uses: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def at(self, *path: str) -> Any:
        """Return the value under these keys; None where there is none, UNKNOWN where a step is unknown."""
        found: Any = self.props
        for key in path:
            if found is UNKNOWN:
                return UNKNOWN
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def rows(self, *path: str) -> list[Mapping[str, Any]]:
        """Return the tables of a list under these keys, unknown ones left out."""
        return tables(self.at(*path))

    def problem(self, why: str) -> Problem:
        """Return what is wrong with this resource, whose URN stands for its path."""
        return finding(self.urn, why)

    def made_from(self, prop: str, other: Resource) -> bool:
        return other.urn in self.uses.get(prop, frozenset())


def tables(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def texts(value: Any) -> list[str]:
    """Return a policy's `Action` or `Resource`, which is one text or a list of them, as a list."""
    listed = value if isinstance(value, list) else [value]
    return [item for item in listed if isinstance(item, str)]


def is_true(value: Any) -> bool:
    """Return whether a value is true; the provider writes some truths as text."""
    return value is True or value == "true"


def is_unknown(value: Any) -> bool:
    return value is UNKNOWN


def parsed(document: Any) -> Mapping[str, Any]:
    """Return a JSON document as a table; empty where it is unknown or is not JSON."""
    try:
        parsed = json.loads(document) if isinstance(document, str) else document
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, Mapping) else {}


def allowed(document: Any) -> list[Mapping[str, Any]]:
    """Return the Allow statements of a policy document in JSON."""
    statements = parsed(document).get("Statement")
    listed = statements if isinstance(statements, list) else [statements]
    return [table for table in tables(listed) if table.get("Effect") == "Allow"]


def any_resource(statement: Mapping[str, Any]) -> bool:
    """Whether a statement is about all resources, or all buckets."""
    return any(text == "*" or text.endswith(":::*") for text in texts(statement.get("Resource")))
