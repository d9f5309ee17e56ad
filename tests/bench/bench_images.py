"""Images of the trainer against the orders of the seed guide and the textbook: the same packages, base, engine and commands.

Every variant is built by `docker buildx build` in an engine of our own (`rehearsal.lab.containers.engine`), so that empty means
empty: no image, no cached step, no cache mount. Only the Dockerfile differs (`image_peers/` against
`images/trainer.Dockerfile`). In the network are Debian's and PyPI's packages, fetched by whoever needs them; torch's wheel
comes to all from one folder over the engine's bridge, and the registry is on the loopback.

Needs root, Debian's engine and 15 GB of disk. A cold build is done three times, each in an engine and to a repository of its
own, and what takes the peers a minute and more `repetitions // 4` times, at least once: five repetitions take some twenty
minutes.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rehearsal.lab.containers import base
from rehearsal.lab.containers.buildkit import BuildKit
from rehearsal.lab.containers.engine import why_not
from rehearsal.lab.containers.registry import Registry
from tests.bench.harness import Row, interleaved, median, run_bench, timed
from tests.bench.image_shop import BUMPS, EDITED, VERIFY, Bench, Pushed, say

COLD = 3
"""Builds of each variant from nothing: of two, one that the machine's neighbours disturbed would be half the median."""


@dataclass
class Found:
    """Seconds and bytes of the whole run."""

    cold: dict[str, list[float]]
    warm: dict[str, list[float]]
    wiped: list[float]
    uncached: float
    verified: float
    image: dict[str, Pushed]
    pulled: dict[str, int]
    """Bytes that a node pulls: kind of change and variant → bytes."""
    limit: dict[str, float]

    def took(self, name: str) -> float:
        return median(self.warm[name])


def measure(repetitions: int = 5) -> list[dict[str, Any]]:
    if missing := why_not():
        sys.exit(f"bench_images cannot run: {missing}")
    slow = min(max(1, repetitions // 4), len(BUMPS))
    with (
        tempfile.TemporaryDirectory(prefix="lustrain-bench-images-") as name,
        Registry(Path(name, "registry")) as registry,
    ):
        bench = Bench(Path(name), registry)
        with bench.empty_engine() as engine:
            bench.furnish(engine)
        cold = interleaved({one.name: partial(bench.cold, one) for one in (bench.bad, bench.ours)}, COLD)
        with bench.empty_engine():
            found = in_one_engine(bench, cold, slow, repetitions)
        with bench.empty_engine():
            textbook(bench, found)
        wiped(bench, found, min(repetitions, 3))
    return [row.as_dict() for row in rows(found)]


def in_one_engine(bench: Bench, cold: dict[str, list[float]], slow: int, quick: int) -> Found:
    """Changes in turns; the builds before them share no step and no cache mount."""
    bad, good, ours = bench.bad, bench.good, bench.ours
    for one in (bad, ours):
        bench.build(one)
    image = {"bad": bench.pushed(bad), "ours": bench.pushed(ours)}
    # In BAD's order both changes are the same steps, so each stands for the other.
    either = iter([bad.edit, bad.bump] * len(BUMPS))
    peers: dict[str, Callable[[], float]] = {
        "BAD, any change": lambda: bench.changed(bad, next(either)),
        "GOOD, dependency": lambda: bench.changed(good, good.bump),
    }
    bump = {"ours, dependency": lambda: bench.changed(ours, ours.bump)}
    code: dict[str, Callable[[], float]] = {
        "GOOD, code": lambda: bench.changed(good, good.edit),
        "ours, code": lambda: bench.changed(ours, ours.edit),
        "ours, nothing": lambda: bench.build(ours),
    }
    warm = interleaved(peers | bump, slow)
    if (more := min(quick, len(BUMPS)) - slow) > 0:
        warm["ours, dependency"] += interleaved(bump, more)["ours, dependency"]
    pulled = {"dependency, ours": bench.pushed(ours).new_since(image["ours"])}
    warm |= interleaved(code, quick)
    before = bench.pushed(ours)
    bench.changed(ours, ours.edit)
    after = bench.pushed(ours)
    pulled["code, ours"] = after.new_since(before)
    limit = limits(bench, after, image["ours"])
    say("exporting the registry cache")
    limit["export"] = bench.build(ours, "--cache-to", f"{bench.cache},mode=max,image-manifest=true,oci-mediatypes=true")
    # A build machine that is wiped pushes to where the image before it is.
    bench.pushed(ours)
    return Found(cold, warm, [], 0.0, 0.0, image, pulled, limit)


def limits(bench: Bench, image: Pushed, cold: Pushed) -> dict[str, float]:
    """What the hardware takes for the same bytes: unzip, gzip."""
    wheel = next(base.wheels().glob(f"torch-{base.torch_pin()}+cpu-*.whl"))
    unzipped = bench.folder / "unzipped"
    with zipfile.ZipFile(wheel) as file:
        unzip = timed(lambda: file.extractall(unzipped))
        wheel_bytes = sum(one.file_size for one in file.infolist())
    shutil.rmtree(unzipped)
    layers = {one: bench.layer(bench.ours, one) for one in image.layers}
    changed = next(one for one in reversed(image.layers) if image.layers[one] > 1e6)
    plain = zlib.decompress(layers[changed], wbits=31)
    squeeze = timed(lambda: gzip.compress(plain, compresslevel=6))
    cores = len(os.sched_getaffinity(0))
    base_bytes = int.from_bytes(layers[next(iter(image.layers))][-4:], "little")
    added = cold.unpacked - base_bytes
    return {
        "unzip": unzip,
        "gzip": squeeze,
        "cold": unzip + squeeze / len(plain) * added / cores,
        "size": base_bytes + wheel_bytes,
        "edited": len(gzip.compress((bench.ours.folder / EDITED).read_bytes())),
    }


def textbook(bench: Bench, found: Found) -> None:
    """What a node pulls where one COPY takes over packages and code."""
    one = bench.textbook
    bench.build(one)
    before = bench.pushed(one)
    bench.changed(one, one.edit)
    found.pulled["code, textbook"] = bench.pushed(one).new_since(before)


def wiped(bench: Bench, found: Found, repetitions: int) -> None:
    """A code change where the builder has nothing but the registry's cache; the last time with the stage that verifies."""
    before, name = bench.ref(bench.ours).rpartition(":")[0], f"{bench.registry.host}/ours/anew"
    with bench.empty_engine() as engine, BuildKit(engine) as builder:
        found.uncached = bench.build(bench.ours, *_pushed_to(name), builder=builder)
    cached = ("--cache-from", bench.cache)
    for last in [False] * repetitions + [True]:
        with bench.empty_engine() as engine, BuildKit(engine) as builder:
            bench.ours.edit()
            verify = bench.build(bench.ours, *VERIFY, *cached, builder=builder) if last else 0.0
            seconds = verify + bench.build(bench.ours, *_pushed_to(before), *cached, builder=builder)
        if last:
            found.verified = seconds
        else:
            found.wiped.append(seconds)


def _pushed_to(name: str) -> tuple[str, str]:
    """As `fab image-build --push` does where buildx has a builder of its own; the engine's would pull every layer."""
    return "--output", f"type=image,push=true,push-by-digest=true,name-canonical=true,name={name},store=false"


def rows(found: Found) -> list[Row]:
    code, bump = found.took("ours, code"), found.took("ours, dependency")
    bad, ours = found.image["bad"], found.image["ours"]
    nothing = found.took("ours, nothing")
    again = f"GOOD takes {found.took('GOOD, code'):.2g} s"
    share = f"a node pulls {found.pulled['dependency, ours'] / 1e6:.0f} MB of {ours.size / 1e6:.0f}"
    plain = f"with the stage that verifies {found.verified:.1f} s; the cache's export took {found.limit['export']:.0f} s before"
    ours_cold, bad_cold = median(found.cold["ours"]), median(found.cold["bad"])
    cold = (ours_cold, bad_cold, 1.5, found.limit["cold"], "unzip of torch, gzip on all cores")
    gzipped = (found.limit["gzip"], "gzip of its layer")
    return [
        _faster(
            "rebuild after a code change",
            code,
            found.took("BAD, any change"),
            50,
            nothing,
            "nothing changed",
            "BAD",
            again,
        ),
        _faster("rebuild after a dependency bump", bump, found.took("BAD, any change"), 10, *gzipped, "BAD", share),
        _faster("rebuild after a dependency bump", bump, found.took("GOOD, dependency"), 5, *gzipped, "GOOD", share),
        _faster("cold build and push", *cold, "BAD", f"{COLD} each, in an engine of its own; the same network"),
        _less("image unpacked", ours.unpacked, bad.unpacked, 0.6, found.limit["size"], "base and torch's wheel", "BAD"),
        _less("image compressed", ours.size, bad.size, 0.6, None, "", "BAD"),
        _less(
            "bytes a node pulls after a code change",
            found.pulled["code, ours"],
            found.pulled["code, textbook"],
            0.001,
            found.limit["edited"],
            "the file, gzipped",
            "textbook multistage",
        ),
        _faster(
            "code change and push on a wiped builder, registry cache",
            median(found.wiped),
            found.uncached,
            20,
            nothing,
            "nothing changed, nothing wiped",
            "without cache",
            plain,
        ),
    ]


def _faster(
    figure: str, ours: float, theirs: float, bar: float, limit: float, limit_name: str, than: str, note: str = ""
) -> Row:
    return Row(figure, ours, theirs, theirs / ours, bar, limit, "s", than, limit_name, note=note)


def _less(
    figure: str, ours: float, theirs: float, bar: float, limit: float | None, limit_name: str, than: str, note: str = ""
) -> Row:
    limit = None if limit is None else limit / 1e6
    return Row(
        figure, ours / 1e6, theirs / 1e6, ours / theirs, bar, limit, "MB", than, limit_name, at_most=True, note=note
    )


if __name__ == "__main__":
    sys.exit(run_bench(measure))
