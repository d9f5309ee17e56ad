"""Region and cluster of a stack, from Pulumi.<stack>.yaml, read as Pulumi reads them but without it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infra.config import KEY, ClusterSpec, parse
from lustrain.problem import UserError, did_you_mean, plain, problem

PROGRAM = Path(__file__).parents[1]
REGION = "aws:region"
NAMESPACE = KEY.partition(":")[0] + ":"
ALIKE = 0.85
"""Ours: one letter too many, missing, wrong or swapped is nearer than that, the region of another provider is not."""
STACK_NAME = r"[A-Za-z0-9._-]{1,100}"
"""What Pulumi takes as the name of a stack (https://www.pulumi.com/docs/iac/concepts/stacks/)."""


@dataclass(frozen=True)
class Stack:
    """`region` is None where neither the file nor the environment names one."""

    name: str
    region: str | None
    spec: ClusterSpec


def stacks(folder: Path = PROGRAM) -> list[str]:
    """Return the names of the stacks whose configuration lies in `folder`."""
    return sorted(path.name.removeprefix("Pulumi.").removesuffix(".yaml") for path in folder.glob("Pulumi.*.yaml"))


def read(stack: str, folder: Path = PROGRAM) -> Stack:
    """Return the stack's region and spec; UserError lists all that is wrong with the file, one line each."""
    if not re.fullmatch(STACK_NAME, stack):
        why, allowed = "must be the name of a stack", "1 to 100 letters, digits, hyphens, underscores and periods"
        raise UserError(problem("stack", stack, why, allowed=allowed, fix="name a stack of this folder"))
    path = folder / f"Pulumi.{stack}.yaml"
    if not path.is_file() and os.path.lexists(path):
        why = f"{path} is not a file, but a folder, a pipe or a link to nothing"
        raise UserError(problem("stack", stack, why, fix="put the stack's configuration there, or remove it"))
    if not path.is_file():
        names = stacks(folder)
        fix = did_you_mean(stack, names) or f"copy one of {', '.join(names) or 'none'} to {path.name} and edit it"
        raise UserError(problem("stack", stack, f"there is no {path}", fix=fix))
    values = _mapping(path).get("config")
    if not isinstance(values, Mapping):
        raise UserError(
            f"{path.name}: config is missing or not a table; fix: copy one of infra/Pulumi.*.yaml and edit it"
        )
    if misspelt := list(_misspelt(path.name, values)):
        raise UserError(misspelt)
    region = values.get(REGION) or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region and not (isinstance(region, str) and re.fullmatch(r"[a-z0-9-]+", region)):
        why = "must be the name of a region" if isinstance(region, str) else "is not text"
        raise UserError(problem(f"{path.name}: {REGION}", region, why, allowed="like us-east-1"))
    return Stack(stack, region or None, parse(values.get(KEY)))


def _misspelt(name: str, values: Mapping[Any, Any]) -> Iterator[str]:
    """Yield keys that Pulumi accepts and no code reads: others of our namespace, and near misses of the keys that are read.

    Other namespaces are other providers' (https://www.pulumi.com/docs/iac/concepts/config/#configuration-options).
    """
    for key in values:
        meant = did_you_mean(str(key).lower(), (REGION, KEY), likeness=ALIKE)
        if key not in (REGION, KEY) and (meant or str(key).startswith(NAMESPACE)):
            fix = meant or f"remove it; known here: {KEY}"
            yield plain(f"{name}: {key}: unknown key, which nothing reads; fix: {fix}")


def read_spec(path: Path) -> ClusterSpec:
    """Return a spec out of a file: JSON or YAML, alone or as the configuration of a stack."""
    content = _mapping(path)
    values = content.get("config")
    return parse(values.get(KEY) if isinstance(values, Mapping) else content)


def _mapping(path: Path) -> dict[str, Any]:
    try:
        content = _loaded(path)
    except OSError as error:
        raise UserError(problem("file", str(path), error.strerror or "cannot be read")) from None
    except RecursionError:
        raise UserError(f"{path.name} is nested too deep; fix: copy one of infra/Pulumi.*.yaml and edit it") from None
    except (yaml.YAMLError, ValueError) as error:
        # PyYAML lets dates and numbers that Python refuses through as ValueError.
        where = plain(" ".join(str(error).split()))
        raise UserError(f"{path.name} is not YAML: {where}; fix: correct that line") from None
    if not isinstance(content, dict):
        raise UserError(f"{path.name} holds no keys; fix: copy one of infra/Pulumi.*.yaml and edit it")
    return content


def _loaded(path: Path) -> Any:
    """PyYAML takes the last of two equal keys; Pulumi refuses the file."""
    loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if twice := list(_twice(node, "", set())):
            raise UserError([f"{path.name}: {where}; fix: remove one of the two" for where in twice])
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _twice(node: yaml.Node, where: str, seen: set[int]) -> Iterator[str]:
    """Yield every key that stands twice in one table, with its path and line."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _twice(item, f"{where}{index}.", seen)
    if not isinstance(node, yaml.MappingNode):
        return
    keys: set[tuple[str, str]] = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in keys:
                yield plain(f"{where}{key.value} stands twice, again in line {key.start_mark.line + 1}")
            keys.add((key.tag, key.value))
            yield from _twice(value, f"{where}{key.value}.", seen)
