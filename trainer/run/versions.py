"""One Lustrain on all ranks: ranks of two versions could commit a checkpoint that lacks what one of them did not store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lustrain.problem import Problem, problem
from trainer import __version__
from trainer.checkpoint.save.protocol import SAVE_PROTOCOL
from trainer.parallel.agree import Json


def this_version() -> Json:
    """Return what ranks compare: the package's version and the number of the protocol by which they save."""
    return {"lustrain": __version__, "save_protocol": SAVE_PROTOCOL}


def version_problems(answers: Mapping[int, Json]) -> Sequence[Problem]:
    """Return a line with each version and its ranks where they differ, by the `this_version` of each rank.

    An empty answer is that of a rank from before versions were compared.
    """
    ranks: dict[str, list[int]] = {}
    for rank, answer in sorted(answers.items()):
        ranks.setdefault(_described(answer), []).append(rank)
    if len(ranks) == 1:
        return []
    (first, its_ranks), *others = ranks.items()
    running = " and ".join(f"{version} on {_listed(some)}" for version, some in others)
    why = f"runs on {_listed(its_ranks)}, but {running}: ranks that save together need one version"
    return [problem("lustrain", first, why, fix="start all nodes from one image, or install one version on all")]


def _described(answer: Json) -> str:
    if "save_protocol" not in answer:
        return "an earlier version"
    return f"{answer['lustrain']} with save protocol {answer['save_protocol']}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
