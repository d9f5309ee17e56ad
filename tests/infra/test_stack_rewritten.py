"""What `pulumi stack init` and `pulumi config set` make of a stack's file: they write it anew, and it still says the same."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from infra.config import parse
from infra.local.engine import PROGRAM, Engine, engine_missing
from infra.preflight import stackfile
from tests.conftest import require
from tests.infra.edits import edited
from tests.infra.stacks import EXAMPLES, example

NOON = datetime(2027, 3, 1, 12, tzinfo=UTC)
WITH_TIMES = "ec2-capacity-block-p5en"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("2027-03-01 12:00:00 +0000 UTC", NOON),
        ("2027-03-01 12:00:00.25 +0000 UTC", NOON + timedelta(seconds=0.25)),
        ("2027-03-01 13:00:00 +0100 CET", NOON),
        ("2027-03-01 09:00:00 -0300 -03", NOON),
        ("2027-03-01 17:30:00 +0530 +0530", NOON.astimezone(timezone(timedelta(hours=5.5)))),
    ],
)
def test_a_time_in_gos_spelling_is_the_time_that_was_written(written: str, meant: datetime) -> None:
    found = parse(edited(WITH_TIMES, {"job_ends_at": written, "groups.0.capacity.ends_at": written}))
    assert found.job_ends_at == found.ends_at == meant


@pytest.mark.slow
@pytest.mark.parametrize("stack", EXAMPLES)
def test_the_example_stacks_read_the_same_after_pulumis_rewrite(tmp_path: Path, stack: str) -> None:
    require(not engine_missing(), engine_missing())
    engine = Engine(tmp_path / "pulumi", stack, {})
    assert "encryptionsalt" in engine.config_file.read_text(encoding="utf-8"), "the engine has written the file"
    assert stackfile.read(stack, engine.folder).spec == parse(engine.spec) == example(stack)


@pytest.mark.slow
def test_times_without_quotes_survive_the_rewriting(tmp_path: Path) -> None:
    require(not engine_missing(), engine_missing())
    program = tmp_path / "program"
    program.mkdir()
    shutil.copy(PROGRAM / "Pulumi.yaml", program)
    name = f"Pulumi.{WITH_TIMES}.yaml"
    text = (PROGRAM / name).read_text(encoding="utf-8")
    (program / name).write_text(re.sub(r'ends_at: "(.*)"', r"ends_at: \1", text), encoding="utf-8")
    engine = Engine(tmp_path / "pulumi", WITH_TIMES, {}, program=program)
    assert "job_ends_at: 2027-02-14 09:00:00 +0000 UTC" in engine.config_file.read_text(encoding="utf-8")
    assert stackfile.read(WITH_TIMES, engine.folder).spec == example(WITH_TIMES)
