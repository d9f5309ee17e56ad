"""The schemas of CloudFormation's resource types, which cfn-lint ships, and what of a model breaks them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from jsonschema import Draft7Validator  # type: ignore[import-untyped]
from jsonschema.exceptions import ValidationError  # type: ignore[import-untyped]
from jsonschema.validators import extend  # type: ignore[import-untyped]

LEFT_OUT = (
    "resource types: the schemas are those of us-east-1; conditional and write-only properties, patterns with Unicode property "
    "classes and what only CloudFormation checks of a template are not looked at"
)


@cache
def schema(type_name: str) -> dict[str, Any] | None:
    """Return the schema of a resource type; None for one that does not exist."""
    # A second of imports, spent by those who use Cloud Control only.
    from cfnlint.schema import ResourceNotFoundError  # type: ignore[import-untyped]
    from cfnlint.schema.manager import ProviderSchemaManager  # type: ignore[import-untyped]

    try:
        found: dict[str, Any] = ProviderSchemaManager().get_resource_schema("us-east-1", type_name).schema
    except ResourceNotFoundError:
        return None
    return found


def violations(type_name: str, model: Mapping[str, Any]) -> list[str]:
    """Return the violations of the type's schema, in CloudFormation's words."""
    return [_message(error) for error in _validator(type_name).iter_errors(model)]


def changed(type_name: str, kind: str, before: Any, after: Any) -> list[str]:
    """Which of a type's `createOnlyProperties` or `readOnlyProperties` (`kind`) differ between two models."""
    paths: list[str] = (schema(type_name) or {}).get(kind, [])
    return [path for path in paths if list(_at(before, path)) != list(_at(after, path))]


def without_read_only(type_name: str, model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model less its read-only properties, those inside lists too."""
    paths = [path.split("/")[2:] for path in (schema(type_name) or {}).get("readOnlyProperties", [])]
    return _pruned(model, paths)  # type: ignore[no-any-return]


def given_read_only(type_name: str, model: Mapping[str, Any]) -> list[str]:
    return [path for path in (schema(type_name) or {}).get("readOnlyProperties", []) if list(_at(model, path))]


def _pruned(value: Any, paths: list[list[str]]) -> Any:
    if isinstance(value, list):
        return [_pruned(item, [path[1:] for path in paths if path[0] == "*"]) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        name: _pruned(item, [path[1:] for path in paths if path[0] == name and len(path) > 1])
        for name, item in value.items()
        if [name] not in paths
    }


def _at(model: Any, path: str) -> Iterator[Any]:
    """Yield the values at a schema path such as /properties/InstanceGroups/*/CurrentCount."""
    found = [model]
    for part in path.split("/")[2:]:
        if part == "*":
            found = [item for value in found if isinstance(value, list) for item in value]
        else:
            found = [value[part] for value in found if isinstance(value, Mapping) and part in value]
    yield from found


@cache
def _validator(type_name: str) -> Any:
    return extend(Draft7Validator, {"pattern": _pattern})(schema(type_name))


def _pattern(_validator: Any, pattern: str, value: Any, _schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and r"\p{" not in pattern and not re.search(pattern, value):
        yield ValidationError(f"string [{value}] does not match pattern {pattern}")


def _message(error: ValidationError) -> str:
    where = "/".join(["#", *(str(part) for part in error.absolute_path)])
    if error.validator == "additionalProperties":
        known = error.schema.get("properties", {})
        extra = ", ".join(sorted(name for name in error.instance if name not in known))
        return f"{where}: extraneous key [{extra}] is not permitted"
    if error.validator == "required":
        missing = ", ".join(name for name in error.validator_value if name not in error.instance)
        return f"{where}: required key [{missing}] not found"
    if error.validator == "enum":
        return f"{where}: {error.instance} is not a valid enum value"
    if error.validator == "oneOf":
        return f"{where}: 0 subschemas matched instead of one"
    return f"{where}: failed validation constraint for keyword [{error.validator}]: {error.message}"
