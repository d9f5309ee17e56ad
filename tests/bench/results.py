"""RESULTS.md: a section for each bench, which `renewed` writes anew and leaves all others as they stand."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.bench.harness import table

HEAD = """# Results

Written by `make bench`. Every ratio is taken within one run on one machine, from medians of interleaved repetitions;
absolute figures are for orientation. "limit" is what the hardware allows for the same bytes.
"""


def renewed(text: str, title: str, found: Mapping[str, Any], order: Sequence[str]) -> str:
    """The text with the machine and the rows of a bench in its section, and what is written by hand below that table.

    A section that is not there yet follows the one that is before it in `order`.
    """
    head, *sections = re.split(r"(?m)^(?=## )", text or HEAD)
    titles = [section.partition("\n")[0].removeprefix("## ").strip() for section in sections]
    about = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    parts = [f"## {title}", about, table(found["rows"])]
    if title in titles:
        at = titles.index(title)
        if words := _below_table(sections.pop(at)):
            parts.append(words)
    else:
        earlier = order[: order.index(title)]
        at = max((index + 1 for index, name in enumerate(titles) if name in earlier), default=0)
    sections.insert(at, "\n\n".join(parts))
    return "\n\n".join(part.strip("\n") for part in (head, *sections)) + "\n"


def _below_table(section: str) -> str:
    def is_row(line: str) -> bool:
        return line.startswith("|")

    lines = itertools.dropwhile(lambda line: not is_row(line), section.splitlines())
    return "\n".join(itertools.dropwhile(is_row, lines)).strip("\n")
