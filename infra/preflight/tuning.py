"""TUN: what the cluster wants of its nodes, held against the settings that the node agent knows.

The agent judges the same on the node, where a mistake would cost a boot.
"""

from __future__ import annotations

from difflib import get_close_matches

from infra.config import ClusterSpec
from infra.finding import finding
from infra.preflight.rule import Context, Family, Problems, listed
from node_setup.agent.settings import allowed, catalog

SETTINGS = "node_setup/settings/"
SWITCHES = ("on", "off")
RULES = Family()


@RULES.add("TUN-001", "Profiles are given to groups that there are.", "lustrain/cluster.py")
def profile_of_no_group(spec: ClusterSpec, context: Context) -> Problems:
    names = [group.name for group in spec.groups]
    for name in spec.tuning.profiles:
        if name not in names:
            fix = f"name one of {listed(names)}, or remove it"
            yield finding(f"tuning.profiles.{name}", "there is no group of this name", fix)


@RULES.add("TUN-002", "Settings of nodes are ones that the node agent knows.", SETTINGS, essential=True)
def unknown_setting(spec: ClusterSpec, context: Context) -> Problems:
    known = [setting.id for setting in catalog.load()]
    for name in spec.tuning.settings:
        if name not in known:
            close = get_close_matches(name, known, 3)
            fix = f"did you mean {' or '.join(close)}?" if close else f"remove it; known ones are in {SETTINGS}"
            yield finding(f"tuning.settings.{name}", "no setting has this id", fix)


@RULES.add("TUN-003", "Values of settings keep to their range, or are on or off.", SETTINGS, essential=True)
def setting_out_of_range(spec: ClusterSpec, context: Context) -> Problems:
    known = {setting.id: setting for setting in catalog.load()}
    for name, value in spec.tuning.settings.items():
        setting = known.get(name)
        if setting and value not in SWITCHES and not allowed.accepts(setting.allowed, value):
            fix = f"give {setting.allowed}, or on or off"
            yield finding(f"tuning.settings.{name}", f"{value!r} is not a value of this setting", fix)
