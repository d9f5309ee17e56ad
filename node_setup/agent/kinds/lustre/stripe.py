"""Layouts of directories on Lustre, for files made in them later; a directory that holds files is left alone.

All nodes of a cluster do this at once to the same directories. `mkdir -p` and `lfs setstripe` on an empty directory come to
the same on every node and in every run; a node that reads the directory between the two finds it empty and sets the
layout once more. A file that a job makes in that instant keeps the file system's default, as every file before it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lustrain.problem import UserError
from lustrain.status import Status
from node_setup.agent.kinds.lustre.mount import lustre_at
from node_setup.agent.model import PERSISTED, Facts, Remark, Request, Run, Setting, Step

ALIGNMENT = 64 * 1024
"""Stripe sizes and components' ends are multiples of so many bytes (lfs-setstripe(1), -S and -E)."""
LARGEST_SIZE = 4 * 1024**3
"""A stripe is smaller than this, in bytes (lfs-setstripe(1), -S)."""
MOST_TARGETS = 2000
"""One file has at most so many stripes (Lustre manual, ManagingStripingFreeSpace)."""
UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4, "p": 1024**5}
NAMES = {"--stripe-count": "-c", "--stripe-size": "-S", "--component-end": "-E"}
END = -1
"""This is the end of a file, and as a count of targets all there are."""

Layout = Mapping[str, Any]
"""A layout is `{"components": [{"end", "count", "size"}]}`: `end` in bytes, -1 for the file's end; `count` of storage targets,
-1 for all; `size` of a stripe in bytes. None is the file system's default. A plain layout has one component."""


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    """Plan one step or remark for each directory that the cluster's document names."""
    return [line for setting in chosen if setting.id in selected for line in _plan_one(setting, facts, request)]


def layout_of(options: Sequence[str]) -> dict[str, Any]:
    """Return the layout that `lfs setstripe OPTIONS` makes. A component has what the one before it had unless it says otherwise
    (lustre-release lustre/utils/lfs.c, setstripe_args_init_inherit). UserError for what lfs would refuse, and for options
    beyond -c, -S and -E, whose effect `plan` could not compare."""
    shown = " ".join(options)
    components: list[dict[str, int | None]] = []
    current: dict[str, int | None] = {"end": None, "count": None, "size": None}
    for name, text in _pairs(options, shown):
        if name == "-c":
            current["count"] = _count(text, shown)
        elif name == "-S":
            current["size"] = _size(text, shown)
        else:
            if current["end"] is not None:
                components.append(current)
            current = {**current, "end": _end(text, shown)}
    if current["end"] is None:
        current["end"] = END
    components.append(current)
    _check(components, shown)
    return {"components": components}


def layout_of_fact(fact: Mapping[str, Any]) -> Layout:
    """Return a layout from the facts (`node_setup.agent.facts.lustre.parse_layout`): a plain one has no components there, and
    the end of a file is None."""
    parts = fact["components"] or [{**fact, "end": None}]
    ends = [END if part["end"] is None else part["end"] for part in parts]
    return {
        "components": [{"end": end, "count": part["count"], "size": part["size"]} for end, part in zip(ends, parts)]
    }


def same(wanted: Layout, current: Layout) -> bool:
    """Check that `current` is all that `wanted` says; what `wanted` leaves open may be anything."""
    pairs = list(zip(wanted["components"], current["components"]))
    return len(wanted["components"]) == len(current["components"]) == len(pairs) and all(
        want[key] is None or want[key] == have[key] for want, have in pairs for key in ("end", "count", "size")
    )


def text_of(layout: Layout) -> str:
    """Write a layout for a person: `to 100M on 1, to the end on all in 16M`."""
    return ", ".join(_component_text(component) for component in layout["components"])


def _plan_one(setting: Setting, facts: Facts, request: Request) -> list[Step | Remark]:
    lustre = request.document.get("lustre") or {}
    stripes = lustre.get("stripes") or ()
    if not stripes:
        return [Remark(setting.id, Status.SKIPPED, "the cluster names no directories with a layout of their own")]
    root = str(lustre["path"])
    if lustre_at(facts, root) is None:
        return [
            Remark(
                setting.id,
                Status.SKIPPED,
                f"Lustre is not mounted at {root}: a directory made now would lie beneath it",
            )
        ]
    if not facts["lustre"]["lfs"]:
        return [
            Remark(setting.id, Status.FAILED, "there is no lfs on this node; fix: install the Lustre client's tools")
        ]
    return [_directory(setting, root, stripe, facts) for stripe in stripes]


def _directory(setting: Setting, root: str, stripe: Mapping[str, Any], facts: Facts) -> Step | Remark:
    path, options = str(stripe["path"]), tuple(str(option) for option in stripe["options"])
    layout = layout_of(options)
    wanted = text_of(layout)
    if not path.startswith(f"{root}/") or ".." in path.split("/"):
        return Remark(
            setting.id, Status.FAILED, f"{path} is not below {root}; fix: storage.lustre of the cluster", wanted=wanted
        )
    striped = Run(("lfs", "setstripe", *options, path))
    state = (facts["lustre"]["stripes"] or {}).get(path)
    if state is None or state["exists"] is None:
        why = state["error"] if state and state.get("error") else "it was not read"
        return Remark(setting.id, Status.UNKNOWN, f"{path}: {why}", wanted=wanted)
    if not state["exists"]:
        # As /scratch: of whom root's new directory would be, no job could write into it. One that is there keeps its mode.
        made = Run(("mkdir", "-p", "-m", "1777", path))
        return Step(setting.id, PERSISTED, path, "missing", f"{wanted}, for all to write in (1777)", (made, striped))
    if state["layout"] is None or state["empty"] is None:
        why = state.get("error") or "its layout could not be read"
        return Remark(setting.id, Status.UNKNOWN, f"{path}: {why}", wanted=wanted)
    current = layout_of_fact(state["layout"])
    shown = text_of(current)
    if same(layout, current):
        return Remark(setting.id, Status.OK, f"{path} has its layout", shown, wanted)
    if not state["empty"]:
        why = (
            f"{path} holds files and stays as it is; fix: `lfs setstripe` for new files, `lfs migrate` for those there"
        )
        return Remark(setting.id, Status.SKIPPED, why, shown, wanted)
    return Step(setting.id, PERSISTED, path, shown, wanted, (striped,))


def _pairs(options: Sequence[str], shown: str) -> list[tuple[str, str]]:
    """Return options and their values, in the three ways getopt takes them: `-c 1`, `-c1`, `--stripe-count=1`."""
    pairs: list[tuple[str, str]] = []
    left = list(options)
    while left:
        word = left.pop(0)
        name, equals, text = word.partition("=")
        if not word.startswith("--"):
            name, text = word[:2], word[2:]
        short = NAMES.get(name, name)
        if short not in NAMES.values():
            raise _bad(shown, f"{word!r} is not understood", "-c COUNT, -S SIZE, -E END")
        if not text and not equals:
            if not left:
                raise _bad(shown, f"{word} has no value", "-c COUNT, -S SIZE, -E END")
            text = left.pop(0)
        pairs.append((short, text))
    if not pairs:
        raise _bad(shown, "is empty", "-c COUNT, -S SIZE, -E END")
    return pairs


def _count(text: str, shown: str) -> int | None:
    number = _decimal(text.lstrip("-"))
    if number is None or (text.startswith("-") and text != "-1") or number > MOST_TARGETS:
        raise _bad(shown, f"-c {text}", f"-1 for all targets, 0 for the default, 1 to {MOST_TARGETS}")
    return END if text == "-1" else number or None


def _size(text: str, shown: str) -> int | None:
    size = _bytes(text)
    if size is None or size % ALIGNMENT or size >= LARGEST_SIZE:
        raise _bad(shown, f"-S {text}", "multiples of 64k below 4G, 0 for the default")
    return size or None


def _end(text: str, shown: str) -> int:
    if text in ("-1", "eof", "EOF"):
        return END
    size = _bytes(text)
    if not size or size % ALIGNMENT:
        raise _bad(shown, f"-E {text}", "multiples of 64k, -1 or eof for the file's end")
    return size


def _bytes(text: str) -> int | None:
    unit = text[-1:].lower() if text[-1:].isalpha() else ""
    number = _decimal(text[: len(text) - len(unit)])
    return number * UNITS[unit] if number is not None and unit in UNITS else None


def _decimal(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


def _check(components: Sequence[Mapping[str, int | None]], shown: str) -> None:
    """Check as lfs does: each component begins where the last one ended, and ends with a whole stripe."""
    begin = 0
    for component in components:
        end, size = component["end"], component["size"]
        if end is None or begin == END or (end != END and end <= begin):
            raise _bad(shown, "a component ends before it begins", "growing ends, -1 for the last")
        if size and end != END and end % size:
            raise _bad(
                shown, f"the end {_short(end)} must be a multiple of its stripe size, {_short(size)}", "whole stripes"
            )
        begin = end


def _bad(shown: str, why: str, allowed: str) -> UserError:
    return UserError(f"lustre.stripes.options = {shown!r}: {why}; allowed: {allowed}; fix: the cluster's stripes")


def _component_text(component: Mapping[str, int | None]) -> str:
    end, count, size = component["end"], component["count"], component["size"]
    targets = "the default" if count is None else "all" if count == END else str(count)
    stripes = f" in {_short(size)}" if size else ""
    return f"to {'the end' if end == END or end is None else _short(end)} on {targets}{stripes}"


def _short(size: int) -> str:
    unit = next((unit for unit in "tgmk" if size % UNITS[unit] == 0), "")
    return f"{size // UNITS[unit]}{unit.upper()}"
