"""No fact is read for nothing: a check, a setting or a report reads it, or a line here says what it is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import pytest

from node_setup.agent.host import Host
from node_setup.agent.lint import lint
from node_setup.agent.model import Request
from node_setup.agent.run.plan import plan
from node_setup.agent.run.refusal import at_boot, refusal
from node_setup.agent.settings import catalog
from node_setup.agent.verify import verify
from node_setup.agent.verify.lustre import transport
from tests.node_setup.machines import DOCUMENT, MACHINES, facts_of

FOR_PEOPLE = {
    "agent.*": "which Python answered, and how long it took",
    "host.boot_id": "node-reboot tells one boot from the next by it",
    "host.pid1_start": "as boot_id, where containers share the kernel's",
    "instance.id": "names the machine to AWS",
    "instance.life_cycle": "how it was bought",
    "instance.zone_id": "where it is",
    "cpu.model": "names the part",
    "blocks.model": "names the part; what is instance store is judged when it is read",
    "blocks.bytes": "names the part",
    "*.devices.uuid": "names the part to whoever exchanges it",
    "*.devices.pci": "names the part to whoever exchanges it",
    "hpu.devices.module": "names the part to whoever exchanges it",
    "gpu.devices.clocks*": "what it runs at now, beside the judged `applications`; says nothing while it idles",
    "hpu.devices.used_mib": "Intel names no limit; `jobs` says what runs",
    "hpu.devices.celsius": "Intel names no limit",
    "efa.devices.counters*": "since the boot; a peer that died leaves errors as well, so a person has to compare",
    "disk./etc.free_*": "as of /, which is judged; of /etc matters whether it can be written",
    "lustre.lctl": "why there are no parameters",
    "lustre.loaded": "why there are no parameters",
    "lustre.interface": "only read where LNet has no network yet (lnet_efa)",
    "lustre.nets.nids.nid": "only read to name an interface that is down",
}
"""Facts that no check, setting or report reads on a node that is well, and what they are for."""

BY_KEY = (
    *("sysctl", "sysctl_files", "modules.parameters", "services", "packages.installed", "kernel.cmdline", "files"),
    *("lustre.parameters", "lustre.stripes"),
)
"""What has a key for each thing that was wanted: what the settings ask for is what they read."""


class Noted(Mapping[str, Any]):
    """Notes the paths of what is read from it."""

    def __init__(self, found: dict[str, Any], path: str, read: set[str]) -> None:
        self._found = {key: noted(value, joined(path, key), read) for key, value in found.items()}
        self._path, self._read = path, read

    def __getitem__(self, key: str) -> Any:
        self._read.add(joined(self._path, key))
        return self._found[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def noted(value: Any, path: str, read: set[str]) -> Any:
    if isinstance(value, dict):
        return Noted(value, path, read)
    return [noted(one, path, read) for one in value] if isinstance(value, list) else value


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """Paths of all values; entries of a list have its path."""
    if path in BY_KEY:
        return
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, joined(path, key))
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for one in value:
            yield from leaves(one, path)
    else:
        yield path


def grown(net: Mapping[str, Any]) -> dict[str, Any]:
    """A network of LNet that has carried one more message on each interface."""
    return {
        "net": net["net"],
        "nids": [{key: 1 + (nid[key] or 0) for key in ("send", "recv", "drop")} for nid in net["nids"]],
    }


@pytest.fixture(scope="module")
def unread() -> set[str]:
    """Facts of the recorded machines that nothing reads."""
    read: set[str] = set()
    there: set[str] = set()
    for name in MACHINES:
        there |= set(leaves(facts_of(name)))
        facts = noted(facts_of(name), "", read)
        request = Request(document=DOCUMENT)
        plan(catalog.load(), facts, request)
        verify(Host("/nonexistent"), facts, request, "facts")
        lint(facts)
        refusal(facts, to_reboot=True)
        at_boot(facts)
        nets = facts["lustre"]["nets"] or []
        transport(nets, [grown(net) for net in nets], over_efa=True)
    return there - read


def test_every_fact_is_read_or_has_a_reason(unread: set[str]) -> None:
    assert sorted(path for path in unread if not any(fnmatchcase(path, pattern) for pattern in FOR_PEOPLE)) == []


def test_no_reason_is_left_of_a_fact_that_is_read_or_gone(unread: set[str]) -> None:
    assert [pattern for pattern in FOR_PEOPLE if not any(fnmatchcase(path, pattern) for path in unread)] == []
