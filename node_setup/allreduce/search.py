"""The search for a slow node: an all-reduce of all nodes, and where that is slow, of pairs until the node is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from node_setup.allreduce.nccl_tests import Judgement, judge, parse
from node_setup.allreduce.outliers import find_slow_hosts
from node_setup.allreduce.pairs import Pair, Suspects, next_round, suspects

Runner = Callable[[Sequence[tuple[str, ...]]], Sequence[str]]
"""It runs one all-reduce for each set of nodes, all at once since no node is in two of them, and returns what each printed, in
order."""

BAD_PAIRS = 28
"""This is every pair of eight nodes. Where so many were bad and none good, more pairs name no node: were half of the nodes
well, a pair would be good one time in four."""
SILENT_PAIRS = 8
"""Pairs that ended without a result may each have cost all the time that a node has, so fewer of them are enough."""


@dataclass(frozen=True)
class Measurement:
    """This is what was measured: `all_nodes` is the run of all nodes; `pairs` are empty where that was good. Culprits are named
    in `suspects`; `ended` says why the search for them did, where that was before its end."""

    all_nodes: Judgement
    pairs: Mapping[Pair, Judgement]
    suspects: Suspects
    ended: str = ""


def measure(
    nodes: Sequence[str], instance_type: str, efa: int, run: Runner, over: Callable[[], str] = lambda: ""
) -> Measurement:
    """Measure nodes of one type with `efa` EFA devices each; `over` returns why no further round may begin, or nothing.

    ValueError for fewer than two nodes.
    """
    if len(nodes) < 2:
        raise ValueError(f"nodes = {', '.join(nodes)}: an all-reduce between nodes takes two or more")
    (printed,) = run([tuple(nodes)])
    all_nodes = judge(parse(printed), instance_type, len(nodes), efa)
    pairs: dict[Pair, Judgement] = {}
    if all_nodes.status == "ok":
        return Measurement(all_nodes, pairs, Suspects(tuple(nodes), (), ()))
    ended = ""
    if len(nodes) == 2:
        pairs[frozenset(nodes)] = all_nodes
    while not ended and (wanted := next_round(nodes, outcomes(pairs))):
        ended = reason_to_end(pairs) or over()
        if not ended:
            sets = [tuple(sorted(pair)) for pair in wanted]
            for pair, text in zip(wanted, run(sets), strict=True):
                pairs[pair] = judge(parse(text), instance_type, 2, efa)
    return Measurement(all_nodes, pairs, suspects(nodes, outcomes(pairs)), ended)


def reason_to_end(pairs: Mapping[Pair, Judgement]) -> str:
    """Return why more pairs would not find the node; empty where they may. A silent run of all nodes does not count: one dead
    node does that, and it is the pairs that name it."""
    if not pairs or any(outcomes(pairs).values()):
        return ""
    silent = sum(verdict.status == "failed" and verdict.busbw is None for verdict in pairs.values())
    if len(pairs) < (SILENT_PAIRS if silent == len(pairs) else BAD_PAIRS):
        return ""
    what = "ended without a result" if silent == len(pairs) else "was bad"
    return f"every one of {len(pairs)} pairs {what}: not the fault of a single node; look at what they share"


def outcomes(pairs: Mapping[Pair, Judgement]) -> dict[Pair, bool]:
    """Return which pairs are good: those that reach the floor, or for a type without a floor, are not far below the other
    pairs."""
    unmeasured = {
        " ".join(sorted(pair)): verdict.busbw for pair, verdict in pairs.items() if verdict.status == "unmeasured"
    }
    slow = find_slow_hosts(unmeasured).slow
    return {
        pair: verdict.status == "ok" or (verdict.status == "unmeasured" and " ".join(sorted(pair)) not in slow)
        for pair, verdict in pairs.items()
    }
