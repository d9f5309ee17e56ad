"""`make prove` tells a scene that passed from one that failed, hung or did nothing, and leaves nothing running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.processes import alive
from tests.prove import __main__ as prove
from tests.prove.run import FAILED, PASSED, SKIPPED, TIMED_OUT, SceneRun
from tests.prove.scenes import SCENES, Scene, scene_of

ROOT = Path(__file__).parents[2]
DAEMON = """
import subprocess
def test_that_leaves_a_daemon():
    daemon = subprocess.Popen(["sleep", "100000"], start_new_session=True)
    open("pid", "w").write(str(daemon.pid))
"""
HANGS = """
import time
def test_before():
    pass
def test_that_hangs():
    time.sleep(100000)
"""


@pytest.fixture
def scene_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SceneRun:
    """Runs scenes of a repository without settings."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = torture\n")
    return SceneRun(tmp_path, tmp_path / "logs")


def scene(folder: Path, text: str) -> Scene:
    (folder / "test_it.py").write_text(text)
    return Scene("one", "nothing", ("test_it.py",))


@pytest.mark.slow
def test_a_scene_that_passes_leaves_no_files(scene_run: SceneRun, tmp_path: Path) -> None:
    result = scene_run.run(scene(tmp_path, "def test_a(tmp_path): (tmp_path / 'x').touch()\ndef test_b(): pass\n"))
    assert (result.verdict, result.count.passed, result.count.collected, result.kept) == (PASSED, 2, 2, None)
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.slow
def test_a_failure_is_named_and_its_files_are_kept(scene_run: SceneRun, tmp_path: Path) -> None:
    text = "def test_a(): pass\ndef test_b(tmp_path):\n    (tmp_path / 'daemon.log').touch()\n    assert 1 == 2, 'so it is'\n"
    result = scene_run.run(scene(tmp_path, text))
    assert (result.verdict, result.count.passed, result.count.failed) == (FAILED, 1, 1)
    assert result.count.whys[0].startswith("test_it.py::test_b: ")
    assert result.kept is not None
    assert list(result.kept.rglob("daemon.log"))
    assert "so it is" in (result.logs / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["import nothing_like_it\n", "x = 1\n"], ids=["not collected", "no test"])
def test_a_scene_without_tests_fails(scene_run: SceneRun, tmp_path: Path, text: str) -> None:
    assert scene_run.run(scene(tmp_path, text)).verdict == FAILED


@pytest.mark.slow
def test_a_scene_whose_tests_all_skip_is_called_skipped(scene_run: SceneRun, tmp_path: Path) -> None:
    result = scene_run.run(scene(tmp_path, "import pytest\ndef test_a(): pytest.skip('no such program')\n"))
    assert (result.verdict, result.count.skipped) == (SKIPPED, 1)
    assert "no such program" in result.count.whys[0]


@pytest.mark.slow
def test_a_scene_that_dies_in_the_middle_fails(scene_run: SceneRun, tmp_path: Path) -> None:
    result = scene_run.run(scene(tmp_path, "import os\ndef test_a(): os._exit(0)\n"))
    assert (result.verdict, result.count.ended) == (FAILED, 0)


@pytest.mark.slow
def test_a_scene_that_hangs_ends_at_its_limit_with_stacks(scene_run: SceneRun, tmp_path: Path) -> None:
    result = replace(scene_run, limit_min=5 / 60).run(scene(tmp_path, HANGS))
    assert result.verdict == TIMED_OUT
    # A machine may be so slow that nothing was collected by then; the stacks are shown where pytest had come to the test.
    if result.count.passed:
        assert "test_that_hangs" in (result.logs / "stacks").read_text()


@pytest.mark.slow
def test_a_table_names_what_failed_and_no_daemon_is_left(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(DAEMON)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = torture\n")
    code = (
        "import sys; from pathlib import Path; from tests.prove import __main__ as prove; "
        "from tests.prove.scenes import Scene; prove.ROOT, prove.FOLDER = Path(), Path('logs'); "
        "prove.SCENES = (Scene('none', '', ('test_none.py',)), Scene('one', '', ('test_it.py',))); sys.exit(prove.main([]))"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    rows = json.loads((tmp_path / "logs/report.json").read_text())
    assert [(row["scene"], row["verdict"], row["tests"]) for row in rows] == [("none", FAILED, 0), ("one", PASSED, 1)]
    assert "failed: none; again: make prove ONLY=none" in done.stderr
    assert not alive(int((tmp_path / "pid").read_text()))


def test_scenes_are_listed_and_a_name_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert prove.main(["--list", "--only", "slurm,image"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["scene", "image", "slurm"]
    with pytest.raises(SystemExit) as ended:
        prove.main(["--only", "slrum"])
    assert ended.value.code == 2
    assert "slrum: no such scene; allowed: stacks, " in capsys.readouterr().err


def test_each_test_of_a_scene_is_there_and_in_one_scene() -> None:
    listed = [test for one in SCENES for test in one.tests]
    assert len(listed) == len(set(listed))
    for test in listed:
        file, _, function = test.partition("::")
        assert (f"def {function}(" if function else "def test_") in (ROOT / file).read_text()


@pytest.mark.parametrize(
    ("nodeid", "name"),
    [
        ("tests/infra/test_stacks.py::test_a[x::y]", "stacks"),
        ("tests/images/test_verify.py::test_a", None),
        ("tests/images/test_tasks.py::test_image_goes_from_its_plan_to_a_registry_and_into_record", "image"),
    ],
)
def test_a_file_or_a_function_belongs_to_a_scene(nodeid: str, name: str | None) -> None:
    assert scene_of(nodeid) == name
