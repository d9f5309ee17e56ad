"""TUN: what the cluster wants of its nodes, held against the settings that the node agent knows.

The agent judges the same on the node, where a mistake would cost a boot.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from infra.config import ClusterSpec
from infra.preflight.finding import Finding
from infra.preflight.rule import Context, OfflineRule, listed
from node_setup.agent import allowed, catalog

SETTINGS = "node_setup/settings/"
SWITCHES = ("on", "off")


class ProfileOfNoGroup(OfflineRule):
    code = "TUN-001"
    checks = "Profiles are given to groups that there are."
    source = "lustrain/cluster.py"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        names = [group.name for group in spec.groups]
        for name in spec.tuning.profiles:
            if name not in names:
                fix = f"name one of {listed(names)}, or remove it"
                yield self.finding(f"tuning.profiles.{name}", "there is no group of this name", fix)


class UnknownSetting(OfflineRule):
    code = "TUN-002"
    checks = "Settings of nodes are ones that the node agent knows."
    source = SETTINGS
    essential = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        known = [setting.id for setting in catalog.load()]
        for name in spec.tuning.settings:
            if name not in known:
                close = get_close_matches(name, known, 3)
                fix = f"did you mean {' or '.join(close)}?" if close else f"remove it; known ones are in {SETTINGS}"
                yield self.finding(f"tuning.settings.{name}", "no setting has this id", fix)


class SettingOutOfRange(OfflineRule):
    code = "TUN-003"
    checks = "Values of settings keep to their range, or are on or off."
    source = SETTINGS
    essential = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        known = {setting.id: setting for setting in catalog.load()}
        for name, value in spec.tuning.settings.items():
            setting = known.get(name)
            if setting and value not in SWITCHES and not allowed.accepts(setting.allowed, value):
                fix = f"give {setting.allowed}, or on or off"
                yield self.finding(f"tuning.settings.{name}", f"{value!r} is no value of this setting", fix)


RULES = (ProfileOfNoGroup(), UnknownSetting(), SettingOutOfRange())
