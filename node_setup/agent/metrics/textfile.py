"""One pass of reading a node and writing its metrics; it changes nothing else and needs no lock."""

from __future__ import annotations

from typing import Any

from lustrain.problem import UserError, problem
from node_setup.agent.host import Host
from node_setup.agent.metrics.readings import LUSTRE_PARAMETERS, readings
from node_setup.agent.metrics.text import render
from node_setup.agent.model import EXIT_IN_SYNC, Request
from node_setup.agent.run import tune
from node_setup.agent.run.plan import plan, rows
from node_setup.agent.settings import catalog
from node_setup.agent.slurm.queue import collect
from node_setup.agent.wire.answer import empty_answer
from node_setup.agent.wire.identity import Identity

FOLDER = "/var/lib/prometheus/node-exporter"
"""Debian's node exporter reads this folder (prometheus-node-exporter, /etc/default/prometheus-node-exporter)."""
NAME = "lustrain.prom"


def write(host: Host, request: Request, identity: Identity, folder: str) -> tuple[dict[str, Any], int]:
    """Replace the file in `folder` by what the node shows now; a reader sees the old file or the new one. UserError."""
    if not host.path(folder).is_dir():
        fix = "install node_exporter, or name the folder of its --collector.textfile.directory"
        raise UserError(problem("--textfile", folder, "is not a folder", fix=fix))
    settings = catalog.load()
    facts = tune.facts(host, request, identity, settings, LUSTRE_PARAMETERS)
    current = plan(settings, facts, request)
    queue = collect(host)
    if queue and queue.error:
        facts["errors"] = [*facts["errors"], {"where": "slurm", "why": queue.error}]
    path = f"{folder.rstrip('/')}/{NAME}"
    try:
        host.write(path, render(readings(facts, rows(current), queue)))
    except OSError as error:
        raise UserError(problem("--textfile", path, f"cannot be written: {error.strerror}")) from None
    answer = {**empty_answer(identity), "profile": current.profile, "profile_why": current.profile_why}
    return {**answer, "group": current.group, "errors": facts["errors"], "textfile": path}, EXIT_IN_SYNC
