"""A timer that writes the node's metrics each minute for node_exporter, where the cluster asks for it."""

from __future__ import annotations

from collections.abc import Sequence

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds.files import owned_unit
from node_setup.agent.kinds.files.removal import plan_removal
from node_setup.agent.kinds.unit import no_systemd
from node_setup.agent.model import RUNTIME, Facts, Remark, Request, Run, Setting, Step

TIMER = owned_unit.name(owned.METRICS_TIMER)
TIMER_UNIT = f"""{owned.HEADER}[Unit]
Description=Metrics of this node, each minute

[Timer]
OnActiveSec=1min
OnUnitInactiveSec=1min

[Install]
WantedBy=timers.target
"""


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    """Plan the timer that writes into the folder `Setting.value`."""
    before = (Run(("systemctl", "stop", TIMER)), Run(("systemctl", "disable", TIMER)))
    after = (Run(("systemctl", "daemon-reload")),)
    planned = plan_removal(owned.METRICS_TIMER, chosen, facts, request, before, after)
    planned += plan_removal(owned.METRICS_UNIT, chosen, facts, request, (), after)
    return planned + [line for setting in chosen if setting.id in selected for line in _plan_one(setting, facts)]


def metrics_unit(folder: str) -> str:
    """Return the unit that one tick of the timer starts; it does nothing on a node without the folder, so without
    node_exporter. A job on the node comes first."""
    return f"""{owned.HEADER}[Unit]
Description=Metrics of this node for node_exporter
ConditionPathIsDirectory={folder}

[Service]
Type=oneshot
ExecStart=/usr/bin/python3 -I -S {owned.AGENT} metrics --textfile {folder}
StandardOutput=null
TimeoutStartSec=120
Nice=19
IOSchedulingClass=idle
"""


def _plan_one(setting: Setting, facts: Facts) -> list[Step | Remark]:
    missing = no_systemd(facts)
    if missing is not None:
        return [Remark(setting.id, *missing)]
    wanted = {owned.METRICS_UNIT: metrics_unit(setting.value), owned.METRICS_TIMER: TIMER_UNIT}
    written = owned_unit.in_place(setting, wanted, owned.METRICS_TIMER, facts)
    planned: list[Step | Remark] = [] if written is None else [written]
    active = (facts["services"].get(TIMER) or {}).get("active")
    if active != "active":
        planned.append(Step(setting.id, RUNTIME, TIMER, active, "active", (Run(("systemctl", "start", TIMER)),)))
    return planned or [Remark(setting.id, Status.OK, f"each minute into {setting.value}")]
