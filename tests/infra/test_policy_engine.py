"""The policy pack under the real engine: it stops a program that breaks every rule, and lets a sound one pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from infra.local.aws import LocalAws
from infra.local.engine import Engine, EngineError
from infra.policy import checks, relations
from tests.infra.stacks import PACK

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
CODES = {rule.code for rule in (*checks.RULES, *relations.RULES)}


def reported(said: str) -> set[str]:
    """Codes of the violations that the engine lists as mandatory."""
    return set(re.findall(r"\[mandatory\]\s+(POL-\d{3})", said))


def test_program_with_every_fault_is_stopped_by_every_rule(engine_aws: LocalAws, tmp_path: Path) -> None:
    engine = Engine(tmp_path / "bad", "test", engine_aws.environment, program=HERE / "planted_bad")
    with pytest.raises(EngineError) as stopped:
        engine("preview", "--policy-pack", str(PACK))
    assert reported(str(stopped.value)) == CODES


def test_a_sound_program_passes(engine_aws: LocalAws, tmp_path: Path) -> None:
    """The example stacks are judged where they come up, in test_stacks.py."""
    engine = Engine(tmp_path / "good", "test", engine_aws.environment, program=HERE / "well_made")
    said = engine("preview", "--policy-pack", str(PACK))
    assert "lustrain@v" in said, "the pack was loaded"
    assert "POL-" not in said
