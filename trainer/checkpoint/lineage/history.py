"""The checkpoints that a run holds, and which of them count, for commands that only read."""

from __future__ import annotations

from dataclasses import dataclass

from lustrain.problem import UserError, problem
from trainer.checkpoint.format.layout import LEASE, ManifestId
from trainer.checkpoint.lineage.lease import LeaseRecord, committed, live_manifests, read_lease
from trainer.storage import ObjectStore


@dataclass(frozen=True)
class History:
    """The commits of a run, newest first: `live` ones may be resumed from, `dead` ones lie beside its history."""

    lease: LeaseRecord
    live: list[ManifestId]
    dead: list[ManifestId]


def read_history(store: ObjectStore) -> History:
    """Read the run's commits; UserError when the place holds no run."""
    lease = read_lease(store)
    if lease is None:
        fix = "give the run.uri of a training; if only the lease was lost, the next job of the run rebuilds it"
        raise UserError(problem("RUN_URI", store.uri, f"holds no run: there is no {LEASE}", fix=fix))
    commits = committed(store)
    live = live_manifests(commits, lease.lineage, lease.generation)
    dead = sorted(set(commits) - set(live), reverse=True)
    return History(lease, live, dead)


def choose(history: History, uri: str, step: int | None) -> ManifestId:
    """Choose the newest live checkpoint, or that of `step`, live before dead; UserError when the run has none."""
    if step is None:
        if not history.live:
            raise UserError(problem("RUN_URI", uri, "holds no checkpoint yet"))
        return history.live[0]
    for manifest_id in (*history.live, *history.dead):
        if manifest_id.step == step:
            return manifest_id
    steps = ", ".join(str(i.step) for i in history.live[:12]) + (", …" if len(history.live) > 12 else "")
    raise UserError(problem("--step", step, f"{uri} has no checkpoint of this step", allowed=steps or "none yet"))
