"""Runs one scene: pytest in a process of its own, with a time limit, and nothing of it left running afterwards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.processes import children_of
from tests.prove.scenes import Scene

PASSED, SKIPPED, FAILED, TIMED_OUT = "passed", "skipped", "FAILED", "TIMED OUT"
GRACE_S = 120.0
"""A scene that is interrupted has this long to take its daemons down."""
POLL_S = 0.2


@dataclass(frozen=True)
class Count:
    """What the tests of a scene came to, so far."""

    collected: int = 0
    passed: int = 0
    skipped: int = 0
    failed: int = 0
    whys: tuple[str, ...] = ()
    """A line for each test that failed or was skipped."""
    figures: Mapping[str, object] = field(default_factory=dict)
    """What the tests have measured, by its name."""

    @property
    def ended(self) -> int:
        return self.passed + self.skipped + self.failed


@dataclass(frozen=True)
class SceneResult:
    """What became of a scene."""

    scene: Scene
    verdict: str
    count: Count
    seconds: float
    logs: Path
    kept: Path | None = None
    """Temporary files of the tests, where the scene failed."""


@dataclass
class SceneRun:
    """Where and how scenes run; `folder` gets a folder of logs for each."""

    root: Path
    folder: Path
    on_progress: Callable[[Count], None] = lambda count: None
    limit_min: float = 120
    """Ends a scene that hangs past the time-outs of its tests: four times what the longest takes beside two endless loops."""

    def run(self, scene: Scene) -> SceneResult:
        """Run a scene to its end or its limit. KeyboardInterrupt ends the scene before it goes on."""
        logs = self.folder / scene.name
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        # Outside of the repository: a path below it may be too long for the sockets of daemons.
        scratch = Path(os.environ.get("TMPDIR", "/tmp"), f"lustrain-prove-{os.getpid()}", scene.name)
        scratch.parent.mkdir(exist_ok=True)
        results, began = logs / "results.jsonl", time.monotonic()
        command = [
            *(sys.executable, "-m", "pytest", "-m", "not torture", "-rfE", "--durations=10"),
            *("-p", "tests.prove.results", "--scene-results", str(results), f"--basetemp={scratch}", *scene.tests),
        ]
        variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}
        with (logs / "log").open("w") as log:
            pytest = subprocess.Popen(
                command, cwd=self.root, env=variables, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = self._watch(pytest, results, began + 60.0 * self.limit_min)
            finally:
                end(pytest)
        count = read(results)
        verdict = judge(code, count)
        return SceneResult(
            scene, verdict, count, time.monotonic() - began, logs, None if tidy(scratch, verdict) else scratch
        )

    def _watch(self, pytest: subprocess.Popen[bytes], results: Path, ends: float) -> int | None:
        """Wait for the end of pytest; its exit code, None at the limit."""
        while (code := pytest.poll()) is None:
            if time.monotonic() > ends:
                pytest.send_signal(signal.SIGUSR1)
                return None
            self.on_progress(read(results))
            time.sleep(POLL_S)
        return code


def judge(code: int | None, count: Count) -> str:
    """Return the verdict on a scene by pytest's exit code (None: it was ended at its limit) and what its tests came to."""
    if code is None:
        return TIMED_OUT
    if code or count.failed or not count.collected or count.ended < count.collected:
        return FAILED
    return PASSED if count.passed else SKIPPED


def read(results: Path) -> Count:
    """Count what a scene has written; a last line that is not whole yet is left out."""
    if not results.exists():
        return Count()
    rows = [json.loads(line) for line in results.read_text().splitlines(keepends=True) if line.endswith("\n")]
    outcomes = [row["outcome"] for row in rows if "outcome" in row]
    return Count(
        next((row["collected"] for row in rows if "collected" in row), 0),
        *(outcomes.count(outcome) for outcome in ("passed", "skipped", "failed")),
        tuple(f"{row['test']}: {row['why']}" for row in rows if row.get("outcome") in ("skipped", "failed")),
        {name: value for row in rows for name, value in row.get("figures", {}).items()},
    )


def end(pytest: subprocess.Popen[bytes]) -> None:
    """Interrupt pytest so that fixtures take down what they started; kill what does not end by then."""
    if pytest.poll() is None:
        pytest.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            pytest.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(pytest.pid, signal.SIGKILL)
    pytest.wait()


def kill_orphans() -> None:
    """Kill all children of this process and theirs: daemons that a scene left running, where this process adopts orphans."""
    while orphans := children_of(os.getpid()):
        for pid in _with_descendants(orphans):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _with_descendants(pids: Iterable[int]) -> list[int]:
    return [one for pid in pids for one in (pid, *_with_descendants(children_of(pid)))]


def tidy(scratch: Path, verdict: str) -> bool:
    """Whether a scene's temporary files are gone; those of one that failed stay, and so does what is mounted there."""
    if verdict not in (PASSED, SKIPPED) or f" {scratch}/" in Path("/proc/self/mountinfo").read_text():
        return not scratch.exists()
    shutil.rmtree(scratch, ignore_errors=True)
    with suppress(OSError):
        scratch.parent.rmdir()
    return True


def as_dict(result: SceneResult) -> dict[str, Any]:
    """Return a row of the report in JSON."""
    return {
        "scene": result.scene.name,
        "verdict": result.verdict,
        "tests": result.count.collected,
        "passed": result.count.passed,
        "skipped": result.count.skipped,
        "failed": result.count.failed,
        "seconds": round(result.seconds, 1),
        "real": result.scene.real,
        "logs": str(result.logs),
        "kept": str(result.kept) if result.kept else None,
        "whys": list(result.count.whys),
        "figures": dict(result.count.figures),
    }
