"""Findings in the node's variables for NCCL, libfabric, CUDA, PyTorch and Gaudi."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from node_setup.agent.model import Facts
from node_setup.agent.settings import condition, data

HARMS = ("harmful", "obsolete", "useless", "debug")
LONGEST = 120
"""At most so many characters of a value are shown; a search path may be very long."""


def lint(facts: Facts) -> list[dict[str, Any]]:
    """Return findings `{where, line, name, value, why, fix, harm}`, harmful ones first, by `settings/variables.toml`.

    A variable that no rule names is left alone and its value never shown, whatever it may hold.
    """
    findings = [finding for variable in facts.get("environment") or () for finding in _judge(variable, facts)]
    return sorted(
        findings,
        key=lambda finding: (HARMS.index(finding["harm"]), finding["where"], finding["line"] or 0, finding["name"]),
    )


def _judge(variable: Mapping[str, Any], facts: Facts) -> Iterator[dict[str, Any]]:
    table = data.tables().get("variables", {})
    if any(_fits(rule, variable, facts) for rule in table.get("allow", ())):
        return
    for rule in table.get("variable", ()):
        if _fits(rule, variable, facts):
            yield {
                "where": str(variable["where"]),
                "line": variable.get("line"),
                "name": str(variable["name"]),
                "value": _shown(str(variable["value"])),
                "why": rule["why"],
                "fix": rule["fix"],
                "harm": rule["harm"],
            }
            return


def _fits(rule: Mapping[str, Any], variable: Mapping[str, Any], facts: Facts) -> bool:
    if not fnmatchcase(str(variable["name"]), rule["name"]):
        return False
    if "value" in rule and not re.fullmatch(rule["value"], _unquoted(str(variable["value"])), re.IGNORECASE):
        return False
    if rule.get("files") and not _is_for_everybody(str(variable["where"])):
        return False
    judged = (condition.judge(condition.parse(text), facts) for text in rule.get("when", ()))
    return all(outcome.status == condition.HOLDS for outcome in judged)


def _is_for_everybody(where: str) -> bool:
    """Distinguish a file that sets it for all users from the environment of a running job, which Slurm and launchers add to."""
    return where.startswith("/")


def _unquoted(value: str) -> str:
    return value.strip().strip("\"'")


def _shown(value: str) -> str:
    plain = "".join(character if character.isprintable() else "?" for character in _unquoted(value))
    return plain if len(plain) <= LONGEST else plain[:LONGEST] + "…"
