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
    """The text with the machine and the rows of a bench in its section, and below that table what is written there by hand.

    A section that is not there yet follows the one that is before it in `order`.
    """
    head, *sections = re.split(r"(?m)^(?=## )", text or HEAD)
    titles = [section.partition("\n")[0].removeprefix("## ").strip() for section in sections]
    about = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    parts = [f"## {title}", about, table(found["rows"])]
    if title in titles:
        at = titles.index(title)
        if words := _by_hand(sections.pop(at), about):
            parts.append(words)
    else:
        earlier = order[: order.index(title)]
        at = max((index + 1 for index, name in enumerate(titles) if name in earlier), default=0)
    sections.insert(at, "\n\n".join(parts))
    return "\n\n".join(part.strip("\n") for part in (head, *sections)) + "\n"


def _by_hand(section: str, about: str) -> str:
    """What is neither the title, nor the machine, nor the first table; the words above a table too."""

    def is_row(line: str) -> bool:
        return line.startswith("|")

    lines = section.split("\n")[1:]
    above = list(itertools.takewhile(lambda line: not is_row(line), lines))
    below = list(itertools.dropwhile(is_row, lines[len(above) :]))
    start = about.partition(" ")[0] + " "
    words = "\n".join(line for line in above if not line.startswith(start)).strip("\n")
    return "\n\n".join(filter(None, (words, "\n".join(below).strip("\n"))))
