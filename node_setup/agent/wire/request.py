"""The request to the agent, read strictly from JSON: a mistake is one line and nothing is done."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lustrain.problem import UserError, did_you_mean, problem
from node_setup.agent.model import Request

DOCUMENT_VERSION = 1


class _Shape(NamedTuple):
    """This is the shape of a value: `items` is the type of a list's items or of a table's values; `null` takes null as well."""

    text: str
    kind: type
    items: type | None = None
    null: bool = False

    def fits(self, value: Any) -> bool:
        if value is None:
            return self.null
        items = value.values() if isinstance(value, dict) else value
        return isinstance(value, self.kind) and (not self.items or all(isinstance(item, self.items) for item in items))


_REQUEST = {
    "document": _Shape("an object", dict),
    "group": _Shape("text or null", str, null=True),
    "profile": _Shape("text or null", str, null=True),
    "overrides": _Shape("an object of texts", dict, str),
    "only": _Shape("a list of texts", list, str),
    "force": _Shape("true, false", bool),
    "allow_reboot": _Shape("true, false", bool),
    "expect": _Shape("an object", dict),
}
_DOCUMENT = {
    "cluster": _Shape("text", str, null=True),
    "backend": _Shape("text", str, null=True),
    "groups": _Shape("an object of objects", dict, dict, null=True),
    "lustre": _Shape("an object or null", dict, null=True),
    "mount": _Shape("an object or null", dict, null=True),
    "tuning": _Shape("an object", dict, null=True),
    "s3_mounts": _Shape("a list of texts", list, str, null=True),
    "home": _Shape("an object or null", dict, null=True),
}
_TUNING = {
    "profiles": _Shape("an object of texts", dict, str, null=True),
    "settings": _Shape("an object of texts", dict, str, null=True),
}


def parse(text: str) -> Request:
    """Read the request on standard input. UserError names every mistake."""
    table = _table("request", text)
    problems: list[str] = [
        problem(f"request.{key}", table[key], "unknown key", ", ".join(_REQUEST), did_you_mean(key, _REQUEST))
        for key in table
        if key not in _REQUEST
    ]
    problems += _wrong("request", table, _REQUEST)
    if not problems:
        problems += _wrong_document("request.document", table.get("document", {}))
    if problems:
        raise UserError(problems)
    return Request(**{**table, "only": tuple(table.get("only", ()))})


def document(where: str, text: str) -> dict[str, Any]:
    """Read a node document from a file. UserError names every mistake."""
    table = _table(where, text)
    problems = list(_wrong_document(where, table))
    if problems:
        raise UserError(problems)
    return table


def _table(where: str, text: str) -> dict[str, Any]:
    try:
        table = json.loads(text)
    except ValueError as error:
        raise UserError(problem(where, text, f"is not JSON: {error}", "one object")) from None
    if not isinstance(table, dict):
        raise UserError(problem(where, table, "wrong type", "one object"))
    return table


def _wrong(where: str, table: Mapping[str, Any], shapes: Mapping[str, _Shape]) -> Iterator[str]:
    for key, shape in shapes.items():
        if key in table and not shape.fits(table[key]):
            yield problem(f"{where}.{key}", table[key], "wrong type", shape.text)


def _wrong_document(where: str, table: Mapping[str, Any]) -> Iterator[str]:
    if table and table.get("version", DOCUMENT_VERSION) != DOCUMENT_VERSION:
        fix = "use the agent of the version that wrote it"
        yield problem(
            f"{where}.version", table["version"], "not a version that this agent reads", str(DOCUMENT_VERSION), fix
        )
        return
    wrong = list(_wrong(where, table, _DOCUMENT))
    yield from wrong or _wrong(f"{where}.tuning", table.get("tuning") or {}, _TUNING)
