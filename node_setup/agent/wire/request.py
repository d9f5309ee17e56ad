"""The request to the agent, read strictly from JSON: a mistake is one line and nothing is done."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lustrain.problem import UserError, did_you_mean, problem
from node_setup.agent.model import Request

DOCUMENT_VERSION = 1

_Check = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_table_of_texts(value: Any) -> bool:
    return _is_table(value) and all(isinstance(item, str) for item in value.values())


def _is_table_of_tables(value: Any) -> bool:
    return _is_table(value) and all(isinstance(item, dict) for item in value.values())


def _or_null(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


_REQUEST: Mapping[str, tuple[_Check, str]] = {
    "document": (_is_table, "an object"),
    "group": (_or_null(_is_text), "text or null"),
    "profile": (_or_null(_is_text), "text or null"),
    "overrides": (_is_table_of_texts, "an object of texts"),
    "only": (_is_texts, "a list of texts"),
    "force": (_is_flag, "true, false"),
    "allow_reboot": (_is_flag, "true, false"),
    "expect": (_is_table, "an object"),
}
_DOCUMENT: Mapping[str, tuple[_Check, str]] = {
    "cluster": (_or_null(_is_text), "text"),
    "backend": (_or_null(_is_text), "text"),
    "groups": (_or_null(_is_table_of_tables), "an object of objects"),
    "lustre": (_or_null(_is_table), "an object or null"),
    "mount": (_or_null(_is_table), "an object or null"),
    "tuning": (_or_null(_is_table), "an object"),
}
_TUNING: Mapping[str, tuple[_Check, str]] = {
    "profiles": (_or_null(_is_table_of_texts), "an object of texts"),
    "settings": (_or_null(_is_table_of_texts), "an object of texts"),
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


def _wrong(where: str, table: Mapping[str, Any], checks: Mapping[str, tuple[_Check, str]]) -> Iterator[str]:
    for key, (check, allowed) in checks.items():
        if key in table and not check(table[key]):
            yield problem(f"{where}.{key}", table[key], "wrong type", allowed)


def _wrong_document(where: str, table: Mapping[str, Any]) -> Iterator[str]:
    if table and table.get("version", DOCUMENT_VERSION) != DOCUMENT_VERSION:
        fix = "use the agent of the version that wrote it"
        yield problem(
            f"{where}.version", table["version"], "not a version that this agent reads", str(DOCUMENT_VERSION), fix
        )
        return
    wrong = list(_wrong(where, table, _DOCUMENT))
    yield from wrong or _wrong(f"{where}.tuning", table.get("tuning") or {}, _TUNING)
