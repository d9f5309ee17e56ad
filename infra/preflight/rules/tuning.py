"""TUN: the tuning that the cluster asks for, checked against the settings of the node agent.

The agent judges the same on the node, where a mistake would cost a boot.
"""

from __future__ import annotations

from infra.config import ClusterSpec
from infra.finding import Problems, finding
from infra.preflight.rule import Context, Family, listed
from lustrain.problem import did_you_mean
from node_setup.agent.settings import allowed, catalog

SETTINGS = "node_setup/settings/"
SWITCHES = ("on", "off")
RULES = Family()


@RULES.add("TUN-001", "Profiles name existing groups.", "lustrain/cluster.py")
def profile_of_unknown_group(spec: ClusterSpec, context: Context) -> Problems:
    names = [group.name for group in spec.all_groups]
    for name in spec.tuning.profiles:
        if name not in names:
            fix = f"name one of {listed(names)}, or remove it"
            yield finding(f"tuning.profiles.{name}", "no group has this name", fix)


@RULES.add("TUN-002", "Settings of nodes are ones that the node agent knows.", SETTINGS, essential=True)
def unknown_setting(spec: ClusterSpec, context: Context) -> Problems:
    known = [setting.id for setting in catalog.load()]
    for name in spec.tuning.settings:
        if name not in known:
            fix = did_you_mean(name, known) or f"remove it; known ones are in {SETTINGS}"
            yield finding(f"tuning.settings.{name}", "no setting has this id", fix)


@RULES.add("TUN-003", "Values of settings keep to their range, or are on or off.", SETTINGS, essential=True)
def setting_out_of_range(spec: ClusterSpec, context: Context) -> Problems:
    known = {setting.id: setting for setting in catalog.load()}
    for name, value in spec.tuning.settings.items():
        setting = known.get(name)
        if setting and value not in SWITCHES and not allowed.accepts(setting.allowed, value):
            fix = f"give {setting.allowed}, or on or off"
            yield finding(f"tuning.settings.{name}", f"{value!r} is not a value of this setting", fix)
