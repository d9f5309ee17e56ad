"""Reads what Pulumi would read: region and cluster of a stack, from Pulumi.<stack>.yaml, without Pulumi."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from infra.config import KEY, ClusterSpec, parse
from infra.problems import InfraError, problem

PROGRAM = Path(__file__).parents[1]
REGION = "aws:region"


@dataclass(frozen=True)
class Stack:
    """`region` is None where neither the file nor the environment names one."""

    name: str
    region: str | None
    spec: ClusterSpec


def stacks(folder: Path = PROGRAM) -> list[str]:
    """Names of the stacks whose configuration lies in `folder`."""
    return sorted(path.name.removeprefix("Pulumi.").removesuffix(".yaml") for path in folder.glob("Pulumi.*.yaml"))


def read(stack: str, folder: Path = PROGRAM) -> Stack:
    """The stack's region and spec; InfraError lists all that is wrong with the file, one line each."""
    path = folder / f"Pulumi.{stack}.yaml"
    if not path.is_file():
        close = get_close_matches(stack, stacks(folder), 1)
        there = ", ".join(stacks(folder)) or "none"
        fix = f"did you mean {close[0]}?" if close else f"copy one of {there} to {path.name} and edit it"
        raise InfraError(problem("stack", stack, f"there is no {path}", fix=fix))
    values = _mapping(path).get("config")
    if not isinstance(values, Mapping):
        raise InfraError(
            f"{path.name}: config is missing or no table; fix: copy one of infra/Pulumi.*.yaml and edit it"
        )
    region = values.get(REGION) or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return Stack(stack, str(region) if region else None, parse(values.get(KEY)))


def read_spec(path: Path) -> ClusterSpec:
    """A spec out of a file: JSON or YAML, alone or as the configuration of a stack."""
    found = _mapping(path)
    values = found.get("config")
    return parse(values.get(KEY) if isinstance(values, Mapping) else found)


def _mapping(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InfraError(problem("file", str(path), error.strerror or "cannot be read")) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise InfraError(f"{path.name} is no YAML: {where}; fix: correct that line") from None
    if not isinstance(found, dict):
        raise InfraError(f"{path.name} holds no table; fix: copy one of infra/Pulumi.*.yaml and edit it")
    return found
