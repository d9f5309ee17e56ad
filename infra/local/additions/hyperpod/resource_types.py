"""The schemas of CloudFormation's resource types, which cfn-lint ships, and checks of models against them."""

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
    """Return the schema of a resource type, None when the type does not exist."""
    # These imports take a second, so only users of Cloud Control pay for them.
    from cfnlint.schema import ResourceNotFoundError  # type: ignore[import-untyped]
    from cfnlint.schema.manager import ProviderSchemaManager  # type: ignore[import-untyped]

    try:
        content: dict[str, Any] = ProviderSchemaManager().get_resource_schema("us-east-1", type_name).schema
    except ResourceNotFoundError:
        return None
    return content


def schema_violations(type_name: str, model: Mapping[str, Any]) -> list[str]:
    """Return the violations of the type's schema, in CloudFormation's words."""
    return [_message(error) for error in _validator(type_name).iter_errors(model)]


def changed_properties(type_name: str, kind: str, before: Any, after: Any) -> list[str]:
    """Return which of a type's `createOnlyProperties` or `readOnlyProperties` (`kind`) differ between two models."""
    paths: list[str] = (schema(type_name) or {}).get(kind, [])
    return [path for path in paths if list(_values_at(before, path)) != list(_values_at(after, path))]


def drop_read_only(type_name: str, model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model without its read-only properties, also inside lists."""
    paths = [path.split("/")[2:] for path in (schema(type_name) or {}).get("readOnlyProperties", [])]
    return _drop_paths(model, paths)  # type: ignore[no-any-return]


def read_only_in(type_name: str, model: Mapping[str, Any]) -> list[str]:
    return [path for path in (schema(type_name) or {}).get("readOnlyProperties", []) if list(_values_at(model, path))]


def _drop_paths(value: Any, paths: list[list[str]]) -> Any:
    if isinstance(value, list):
        return [_drop_paths(item, [path[1:] for path in paths if path[0] == "*"]) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        name: _drop_paths(item, [path[1:] for path in paths if path[0] == name and len(path) > 1])
        for name, item in value.items()
        if [name] not in paths
    }


def _values_at(model: Any, path: str) -> Iterator[Any]:
    """Yield the values at a schema path such as /properties/InstanceGroups/*/CurrentCount."""
    values = [model]
    for part in path.split("/")[2:]:
        if part == "*":
            values = [item for value in values if isinstance(value, list) for item in value]
        else:
            values = [value[part] for value in values if isinstance(value, Mapping) and part in value]
    yield from values


@cache
def _validator(type_name: str) -> Any:
    return extend(Draft7Validator, {"pattern": _pattern})(schema(type_name))


def _pattern(_validator: Any, pattern: str, value: Any, _schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and r"\p{" not in pattern and not re.search(pattern, value):
        yield ValidationError(f"string [{value}] does not match pattern {pattern}")


def _message(error: ValidationError) -> str:
    where = "/".join(["#", *(str(part) for part in error.absolute_path)])
    if error.validator == "additionalProperties":
        properties = error.schema.get("properties", {})
        extra_keys = ", ".join(sorted(name for name in error.instance if name not in properties))
        return f"{where}: extraneous key [{extra_keys}] is not permitted"
    if error.validator == "required":
        missing_keys = ", ".join(name for name in error.validator_value if name not in error.instance)
        return f"{where}: required key [{missing_keys}] not found"
    if error.validator == "enum":
        return f"{where}: {error.instance} is not a valid enum value"
    if error.validator == "oneOf":
        return f"{where}: 0 subschemas matched instead of one"
    return f"{where}: failed validation constraint for keyword [{error.validator}]: {error.message}"
