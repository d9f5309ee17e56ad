"""What is true of this node now: `collect(host, wanted)` gives one dict of plain JSON data and never raises.

A fact that could not be read is None, and `errors` holds {where, why}: where is the fact's path, why one line. What a program
printed when it failed is never read as data. Sections are read side by side; one that hangs costs only itself. Keys:

version, agent {python, seconds}
host {name, boot_id, pid1_start: clock ticks from boot to the start of process 1}
boot_outcome: the last line of the first boot's script, `ready …` or `failed STEP`; None where none ran
os {id, version, family: debian | rhel | other}, kernel {release, arch, cmdline {name: value}, thp}
cpu {count: threads online, vendor, model}
memory {gib, hugepages_total, hugepages_free, hugepage_kib, shm_gib}
instance {type, id, life_cycle, zone_id, source: imds | dmi | hyperpod | node.json}, group: the cluster's group, or None
metadata {reachable, notice: None | {kind: spot | lifecycle | maintenance | rebalance, action, at, in_hours: until `at` of
  maintenance, else None}, error}; on machines that are not EC2's it was not read: reachable False and error None
sysctl {key: value} of the wanted keys that exist, white space as single spaces
sysctl_files [{path, link, values}] in the order of boot, the last wins; `link` is where a linked file leads (/etc/sysctl.conf)
modules {supported, loaded [also what is built in], parameters {module.parameter: value},
  files [{path, options {module: {parameter: value}}}],
  aws_lustre_block: AWS's own block of Lustre options is in one of the files}
limits {slurmd: None | {memlock | nofile | stack: [soft, hard]}, files [{path, lines [[domain, type, item, value]]}]}
blocks [{name, path, model, bytes, instance_store, scheduler, schedulers, fstype, holders, partitions, mountpoints, blank,
  root}]; blank: unused and nothing but zeros in its first and last MiB, None where it cannot be read; mountpoints and root also
  through arrays and logical volumes; arrays [{name, path, level,
  members, fstype, holders, mountpoints, blank}]
mounts [{source, target, fstype, options}]
lustre {client: version of the loaded one, loaded, lctl, lfs, lnetctl, mounts [{target, source, options}],
  parameters {pattern: {name: value}}, nets: None | [{net, nids [{nid, interface, status, send, recv, drop}]}], aws_configured,
  peers: None where nothing is mounted, else [{nids}], preferred: networks that a policy puts first,
  interface: that of the node's own address, else of the default route; None without lnetctl,
  stripes {path: {exists, empty, layout, error}}, osts: None | {count, fullest_percent,
  inactive, read_only, silent [lines]}}
  layout {count, size, offset, pattern, pool, components [{start, end, count, size, offset, pattern, pool}]}, bytes; of a
  composite layout the outer values are the last component's; paths that no Lustre mount holds are not in stripes
efa {devices [{name, driver, state, counters}], pci: adapters on the bus, domains: None | [name], installer, libfabric,
  plugins [path, one of each folder]}
gpu {present, driver, devices [{index, name, uuid, pci, persistence, ecc_volatile_uncorrected, remap_pending, remap_failed,
  clocks | applications | max {graphics, memory}: MHz, throttle [names of gpu.THROTTLES], memory_mib, fabric_state,
  fabric_status}], fabric_manager {version}, nvlinks: None | {index as text: {up, errors}},
  xids: None | [{xid, pci, text, switch}]}
hpu {present, driver, devices [{index, module, pci, name, memory_mib, used_mib, celsius}]}
init systemd | other, services: None | {unit: {load: loaded | not-found …, active, enabled: UnitFileState, result}}; empty
  where there is no systemd; packages {manager: apt | dnf, held [name], installed {name: version}}
time {synchronised, source, offset_s: positive where the clock is behind, leap, folders: None | [those from which chrony reads
  sources]}
jobs: None where it is not known | [{kind: slurm | gpu | hpu | trainer, id}], environment [{where: a file, or
  such as `slurm job 123`, line, name, value}]
files {path: None | {content, mode: 0644}} of `owned.PATHS`, `owned.NOTES` and the wanted mount units
disk {/ | /etc: None | {free_bytes, free_inodes, read_only}}
errors [{where, why}]
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

from node_setup.agent.facts import (
    clock,
    environment,
    files,
    instance,
    jobs,
    kernel,
    lustre,
    machine,
    metadata,
    mounts,
    services,
)
from node_setup.agent.facts.devices import blocks, fabric, gpu, hpu
from node_setup.agent.facts.scene import read_scene, run_side_by_side
from node_setup.agent.facts.wanted import Wanted
from node_setup.agent.host import Host

__all__ = ["DEADLINE_SECONDS", "Wanted", "collect"]

DEADLINE_SECONDS = 75.0
"""All sections together have this long; every program in them has a shorter limit of its own, so that this ends only what no
kill ends."""

_SECTIONS = (machine, kernel, jobs, environment, files, services, clock, metadata, gpu, hpu, fabric, lustre, blocks)
"""Each section has a thread of its own, since many run programs or read devices."""


def collect(host: Host, wanted: Wanted) -> dict[str, Any]:
    """Return all facts of the machine below `host`'s root; `wanted` names the keys that are only read on demand."""
    started = time.monotonic()
    scene = read_scene(host, wanted)
    calls = {_name(module): partial(module.collect, scene) for module in _SECTIONS}
    sections = {name: read or {} for name, read in run_side_by_side(scene, calls, DEADLINE_SECONDS).items()}
    sections["mounts"] = scene.guarded("mounts", lambda: mounts.collect(scene)) or {}
    imds = sections["metadata"].get("_imds", {})
    sections["instance"] = scene.guarded("instance", lambda: instance.collect(scene, imds)) or {}
    facts: dict[str, Any] = {"version": 1, "agent": {}}
    for module in (*_SECTIONS, mounts, instance):
        section = sections[_name(module)]
        facts.update({key: section.get(key, nothing) for key, nothing in module.EMPTY.items()})
    facts["jobs"] = jobs.join_jobs(facts["jobs"], sections["gpu"].get("jobs"))
    of_jobs = scene.guarded("environment.jobs", lambda: environment.of_jobs(scene, facts["jobs"]))
    facts["environment"] = [*facts["environment"], *(of_jobs or ())]
    facts["errors"] = list(scene.errors)
    facts["agent"] = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "seconds": round(time.monotonic() - started, 3),
    }
    return facts


def _name(module: Any) -> str:
    return str(module.__name__).rpartition(".")[2]
