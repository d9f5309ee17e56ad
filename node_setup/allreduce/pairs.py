"""Pairs of nodes for all-reduces, chosen so that a few rounds name the bad nodes; the caller runs them.

A pair runs alone on its two nodes, so the pairs of one round run at once. A node is cleared by one good run, with anyone. A
node is a culprit when two of its runs or more were bad and one of them was with a cleared node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Pair = frozenset[str]
Outcomes = Mapping[Pair, bool]
"""A pair whose run was good has True."""


@dataclass(frozen=True)
class Suspects:
    """These are the nodes by what is known of them; `open` are those of which too little is known, all where every run was
    bad."""

    cleared: tuple[str, ...]
    culprits: tuple[str, ...]
    open: tuple[str, ...]


def tournament(nodes: Sequence[str]) -> list[list[Pair]]:
    """Return every pair once, in rounds in which no node plays twice (the circle method); with an odd number one sits out a
    round."""
    ring: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append([frozenset((a, b)) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def suspects(nodes: Iterable[str], outcomes: Outcomes) -> Suspects:
    """Judge each node by the runs so far, in the order given."""
    nodes = list(nodes)
    cleared = {node for pair, good in outcomes.items() if good for node in pair}
    culprits = [node for node in nodes if node not in cleared and _culprits(node, outcomes, cleared)]
    left = [node for node in nodes if node not in cleared and node not in culprits]
    return Suspects(tuple(node for node in nodes if node in cleared), tuple(culprits), tuple(left))


def _culprits(node: str, outcomes: Outcomes, cleared: set[str]) -> bool:
    bad = [pair for pair, good in outcomes.items() if node in pair and not good]
    return len(bad) >= 2 and any(pair & cleared for pair in bad)


def next_round(nodes: Sequence[str], outcomes: Outcomes) -> list[Pair]:
    """Return the pairs to run next; empty when every node is cleared or a culprit, or nothing more can be learned.

    First every node meets another. Then open nodes meet cleared nodes, and where none is cleared yet, each other.
    """
    known = suspects(nodes, outcomes)
    if not known.open or len(nodes) < 2:
        return []
    if not known.cleared:
        left = ([pair for pair in pairs if pair not in outcomes] for pairs in tournament(nodes))
        return next((pairs for pairs in left if pairs), [])
    free, pairs = list(known.cleared), []
    for node in known.open:
        partner = next((candidate for candidate in free if frozenset((node, candidate)) not in outcomes), None)
        if partner is not None:
            free.remove(partner)
            pairs.append(frozenset((node, partner)))
    return pairs
