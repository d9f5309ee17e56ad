"""Prove with real parts, scene by scene: `python -m tests.prove [--only NAME,…] [--list]`; `make prove` calls it.

Ends with a table, also as JSON, and with 1 if a scene failed. No second try: a test that fails now and then is a defect.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from lustrain.progress import Progress, duration_text
from lustrain.tables import table
from tests.prove.run import PASSED, SKIPPED, Count, SceneResult, SceneRun, as_dict, kill_orphans
from tests.prove.scenes import SCENES, Scene

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".prove"
_PR_SET_CHILD_SUBREAPER = 36
"""https://man7.org/linux/man-pages/man2/PR_SET_CHILD_SUBREAPER.2const.html"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make prove", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME,…", help="these scenes; ONLY=… of `make prove`")
    parser.add_argument("--list", action="store_true", help="show the scenes and run none; LIST=1 of `make prove`")
    flags = parser.parse_args(argv)
    names = [name for name in flags.only.replace(" ", ",").split(",") if name]
    unknown = sorted(set(names) - {scene.name for scene in SCENES})
    if unknown:
        parser.error(f"ONLY = {', '.join(unknown)}: no such scene; allowed: {', '.join(one.name for one in SCENES)}")
    scenes = [scene for scene in SCENES if scene.name in names or not names]
    if flags.list:
        rows = [(scene.name, str(len(scene.tests)), scene.real) for scene in scenes]
        print(*table(("scene", "entries", "what is real"), rows), sep="\n")
        return 0
    # Daemons that a scene leaves behind become children of this process, which ends them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results: list[SceneResult] = []
    try:
        for number, scene in enumerate(scenes, 1):
            results.append(_run(scene, f"{number}/{len(scenes)} {scene.name}"))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        if results:
            _report(results)
    bad = [one.scene.name for one in results if one.verdict not in (PASSED, SKIPPED)]
    if bad:
        print(f"failed: {', '.join(bad)}; again: make prove ONLY={','.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


def _run(scene: Scene, label: str) -> SceneResult:
    with Progress(label, unit="tests", interval_s=30.0) as progress:

        def show(count: Count) -> None:
            progress.total = count.collected or None
            new = count.ended - progress.done
            progress.advance(new, note=f"{count.failed} failed" if count.failed else None) if new else progress.tick()

        try:
            result = SceneRun(ROOT, FOLDER, on_progress=show).run(scene)
        finally:
            kill_orphans()
    print(f"{label}: {result.verdict}", flush=True)
    for why in result.count.whys[:10]:
        print(f"  {why}", flush=True)
    return result


def _report(results: Sequence[SceneResult]) -> None:
    heads = ("scene", "tests", "time", "verdict", "what was real", "logs")
    rows = [
        (
            one.scene.name,
            f"{one.count.passed} of {one.count.collected}",
            duration_text(one.seconds),
            one.verdict,
            one.scene.real,
            os.path.relpath(one.logs) + (f", {one.kept}" if one.kept else ""),
        )
        for one in results
    ]
    lines = table(heads, rows, right={"time", "tests"})
    lines += [f"{one.scene.name}: {name}: {value}" for one in results for name, value in one.count.figures.items()]
    lines.append(f"{len(results)} scenes in {duration_text(sum(one.seconds for one in results))}")
    print(*lines, sep="\n", flush=True)
    (FOLDER / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (FOLDER / "report.json").write_text(json.dumps([as_dict(one) for one in results], indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
