"""Whether the machines of a Slurm are in order: one line with its fix for each that is not. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lustrain.problem import Problem, problem
from node_setup.agent.facts.scheduler import UNUSABLE, is_registered, without_sockets
from node_setup.agent.slurm.gres import gres
from node_setup.slurm.machines import SlurmMachine

RESUME = "scontrol update NodeName={} State=RESUME, once it is mended"


def problems(
    machines: Sequence[SlurmMachine], facts: Mapping[str, Mapping[str, Any]], states: Mapping[str, Any]
) -> dict[str, list[Problem]]:
    """Return the lines by the machine's name. `facts` are those of now by machine, `states` what `slurm-state` answered."""
    digests = [facts[machine.node.name]["munge_key"] for machine in machines if machine.controls]
    by_machine = {}
    for machine in machines:
        name = machine.node.name
        lines = [*_daemon_problems(machine, facts[name], digests)]
        if machine.computes:
            lines += _state_problems(machine, states["nodes"].get(machine.host)) if not states["error"] else []
        if machine.controls and states["error"]:
            lines.append(
                problem(f"slurmctld of {name}", states["error"], "does not answer", fix="journalctl -u slurmctld")
            )
        if lines:
            by_machine[name] = lines
    return by_machine


def _daemon_problems(
    machine: SlurmMachine, facts: Mapping[str, Any], digests: Sequence[str | None]
) -> Iterator[Problem]:
    name = machine.node.name
    # The cluster's key is not known where the controller reported no facts.
    if facts["munge_key"] is None or (digests and facts["munge_key"] not in digests):
        seen = "another" if facts["munge_key"] else None
        yield problem(f"munge key of {name}", seen, "is not the controller's", fix="fab slurm-up")
    elif facts["munge"] != "ok":
        yield problem(f"munge of {name}", facts["munge"], "makes no credentials", fix="systemctl restart munge there")
    daemons = {"controller": "slurmctld.service", "compute": "slurmd.service"}
    for duty in machine.duties:
        unit = daemons.get(duty)
        if unit and facts["units"][unit]["active"] != "active":
            fix = f"fab slurm-up; journalctl -u {unit} there says why"
            yield problem(f"{unit} of {name}", facts["units"][unit]["active"], "does not run", fix=fix)


def _state_problems(machine: SlurmMachine, node: Mapping[str, Any] | None) -> list[Problem]:
    path, reason = f"Slurm's node {machine.host}", (node or {}).get("reason")
    if node is None:
        return [problem(path, None, "is not known to the controller", fix="fab slurm-up")]
    lines = []
    if not is_registered(dict(node)):
        fix = "open TCP 6817 and 6818 among the machines; journalctl -u slurmd there"
        lines.append(problem(path, node["state"], _why("has not registered, or does not answer", reason), fix=fix))
    elif any(word in node["state"] for word in UNUSABLE):
        lines.append(problem(path, node["state"], _why("takes no jobs", reason), fix=RESUME.format(machine.host)))
    wanted = gres(machine.facts["gpus"]) or None
    shown = without_sockets(node["gres"])
    if shown != wanted:
        lines.append(problem(f"devices of {machine.host}", shown, "are not as planned", str(wanted), "fab slurm-up"))
    return lines


def _why(text: str, reason: str | None) -> str:
    return f"{text}: {reason}" if reason else text
