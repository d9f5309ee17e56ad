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
    """Return the violations of the type's schema, each with the path of the value."""
    errors = _validator(type_name).iter_errors(model)
    return ["/".join(["#", *map(str, error.absolute_path)]) + f": {error.message}" for error in errors]


def changed_create_only(type_name: str, before: Any, after: Any) -> list[str]:
    """Return which of a type's create-only properties differ between two models."""
    paths: list[str] = (schema(type_name) or {}).get("createOnlyProperties", [])
    return [path for path in paths if list(_values_at(before, path)) != list(_values_at(after, path))]


def drop_read_only(type_name: str, model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model without its read-only properties, also inside lists."""
    paths = [path.split("/")[2:] for path in (schema(type_name) or {}).get("readOnlyProperties", [])]
    return _drop_paths(model, paths)  # type: ignore[no-any-return]


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
