"""Checks of the shared file system: the right one, mounted, over the right transport, with room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lustrain.status import Status
from node_setup.agent.kinds.lustre.lnet_efa import servers_without_efa
from node_setup.agent.kinds.lustre.mount import same_source
from node_setup.agent.model import Facts, Request
from node_setup.agent.verify.expected import ExpectedHardware
from node_setup.agent.verify.result import NONE, Result, fact_at, unread_result

EKS = "hyperpod-eks"
FULL_PERCENT, NEARLY_FULL_PERCENT = 98, 90
"""A target at 90 % slows writes down, a full one refuses them. Every node sees the same, so only what stops jobs fails."""


def mount(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check that the cluster's file system is at its path; another one, or none, would take a job's checkpoints elsewhere."""
    path = fact_at(request.document, "lustre", "path")
    if not path:
        return Result("lustre-mount", Status.SKIPPED, "the cluster has no Lustre")
    mounts = fact_at(facts, "lustre", "mounts")
    if mounts is None:
        return unread_result("lustre-mount", facts, "lustre", "mounts")
    here = [mount for mount in mounts if mount.get("target") == path]
    if not here and any(
        mount.get("target") == path and mount.get("fstype") == "autofs" for mount in facts.get("mounts") or ()
    ):
        return Result(
            "lustre-mount", Status.UNKNOWN, f"{path} is mounted on demand, and not yet mounted; fix: ls {path}"
        )
    if not here:
        return Result("lustre-mount", Status.FAILED, f"nothing of type lustre is mounted at {path}", expected=path)
    current, options = here[-1], here[-1].get("options") or ()
    if "ro" in options:
        return Result("lustre-mount", Status.FAILED, f"{path} is mounted read-only", actual=current.get("source"))
    wanted = _source(request)
    if wanted and not same_source(str(current.get("source")), wanted):
        return Result(
            "lustre-mount", Status.FAILED, f"another file system is at {path}", NONE, current.get("source"), wanted
        )
    why = f"at {path}" if wanted else f"at {path}; which file system it should be is not known"
    return Result("lustre-mount", Status.OK, why, actual=current.get("source"), expected=wanted)


def _source(request: Request) -> str | None:
    if request.expect.get("lustre_source"):
        return str(request.expect["lustre_source"])
    wanted = request.document.get("mount") or {}
    if wanted.get("dns_name") and wanted.get("mount_name"):
        return f"{wanted['dns_name']}@tcp:/{wanted['mount_name']}"
    return None


def network(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check that, where the cluster's file system takes EFA, LNet has as many EFA interfaces as the group gives to Lustre, all
    of them up, and knows the servers of what is mounted by their EFA addresses. On EKS pods mount, over the node's LNet."""
    check, wanted = "lustre-network", efa_interfaces(request, want)
    if not wanted:
        return Result(check, Status.SKIPPED, _why_tcp(request, want))
    nets = fact_at(facts, "lustre", "nets")
    if nets is None:
        return unread_result(check, facts, "lustre.nets", "LNet's networks")
    efa = [nid for net in nets if str(net["net"]).startswith("efa") for nid in net["nids"]]
    if not efa:
        return Result(check, Status.FAILED, "LNet has no EFA network: I/O goes over TCP; fix: fab node-tune")
    down = [str(nid["nid"]) for nid in efa if nid.get("status") not in (None, "up")]
    if down:
        return Result(check, Status.FAILED, f"EFA interfaces of LNet are down: {', '.join(down)}")
    if len(efa) < wanted:
        why = "LNet has fewer EFA interfaces than this type gives to Lustre; fix: fab node-tune"
        return Result(check, Status.FAILED, why, NONE, str(len(efa)), str(wanted))
    if servers_without_efa(facts):
        why = "LNet has EFA, but knows the servers over TCP only, as where Lustre was mounted first; fix: fab node-tune"
        return Result(check, Status.FAILED, why)
    return Result(check, Status.OK, f"{len(efa)} EFA interfaces", actual=str(len(efa)))


def efa_interfaces(request: Request, want: ExpectedHardware) -> int:
    """Return how many EFA interfaces LNet needs at least: one where the node document of an older cluster gives no number."""
    group = (request.document.get("groups") or {}).get(want.group) or {}
    if "lustre_efa" in group:
        return min(int(group["lustre_efa"]), want.efa if want.efa is not None else int(group["lustre_efa"]))
    return int(bool(fact_at(request.document, "lustre", "efa") and want.efa))


def _why_tcp(request: Request, want: ExpectedHardware) -> str:
    lustre = request.document.get("lustre")
    if not lustre:
        return "the cluster has no Lustre" if request.document.get("backend") != EKS else "pods mount Lustre over TCP"
    if not lustre.get("efa"):
        return "over TCP: the file system takes no EFA"
    return (
        "over TCP: no EFA here"
        if not want.efa
        else "over TCP: this group gets none of the file system's EFA connections"
    )


def targets(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    if not request.document.get("lustre"):
        return Result("lustre-targets", Status.SKIPPED, "the cluster has no Lustre")
    osts = fact_at(facts, "lustre", "osts")
    if osts and osts.get("silent"):
        first, *more = osts["silent"]
        why = f"targets do not answer: {first}{f' (and {len(more)} more)' if more else ''}"
        return Result("lustre-targets", Status.FAILED, why, NONE, str(len(more) + 1), "0")
    if osts is None or osts.get("fullest_percent") is None:
        return unread_result("lustre-targets", facts, "lustre.osts", "lfs df")
    full, shown = osts["fullest_percent"], f"{osts['fullest_percent']} %"
    limit = f"< {NEARLY_FULL_PERCENT} %"
    if full >= FULL_PERCENT:
        return Result(
            "lustre-targets", Status.FAILED, "a storage target is full: writes to it fail", NONE, shown, limit
        )
    if osts.get("inactive"):
        return Result(
            "lustre-targets", Status.WARNING, f"{osts['inactive']} of {osts['count']} targets are switched off"
        )
    if osts.get("read_only"):
        return Result("lustre-targets", Status.WARNING, f"{osts['read_only']} of {osts['count']} targets are read-only")
    if full >= NEARLY_FULL_PERCENT:
        return Result("lustre-targets", Status.WARNING, "a storage target is nearly full", NONE, shown, limit)
    return Result("lustre-targets", Status.OK, f"the fullest of {osts['count']} targets", NONE, shown, limit)


def transport(before: Sequence[Any] | None, after: Sequence[Any] | None, over_efa: bool) -> Result:
    """Check which network carried the probe's I/O, by the messages that LNet counted meanwhile, summed over all its interfaces.

    awslabs/awsome-distributed-ai `mount_fsx.sh` reads one line of counters; where there are several EFA devices its shell
    comparison fails, and with it the check passes.
    """
    check = "lustre-transport"
    if before is None or after is None:
        return Result(check, Status.UNKNOWN, "LNet's counters could not be read")
    moved = {name: _moved(before, after, name) for name in ("efa", "tcp")}
    if None in moved.values():
        return Result(check, Status.UNKNOWN, "LNet counts nothing for some interface")
    shown = ", ".join(f"{name} {number}" for name, number in moved.items())
    wanted = "efa" if over_efa else "tcp"
    if not moved[wanted]:
        unwanted = "tcp" if over_efa else "efa"
        why = f"I/O went over {unwanted}" if moved[unwanted] else "no message was counted on any network"
        return Result(check, Status.FAILED if moved[unwanted] else Status.UNKNOWN, why, NONE, shown, wanted)
    dropped = _dropped(before, after)
    if dropped:
        return Result(check, Status.WARNING, f"LNet dropped {dropped} messages meanwhile", NONE, shown, wanted)
    return Result(check, Status.OK, f"I/O went over {wanted}", NONE, shown, wanted)


def _moved(before: Sequence[Any], after: Sequence[Any], name: str) -> int | None:
    """Return messages sent or received, whichever is fewer: a path that only sends carries nothing. None where not counted."""
    directions = []
    for key in ("send", "recv"):
        sums = [_sum(nets, name, key) for nets in (before, after)]
        if sums[0] is None or sums[1] is None:
            return None
        directions.append(sums[1] - sums[0])
    return max(0, min(directions))


def _dropped(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Return messages dropped on all networks; 0 where some interface does not count them."""
    sums = [_sum(nets, "", "drop") for nets in (before, after)]
    return 0 if sums[0] is None or sums[1] is None else max(0, sums[1] - sums[0])


def _sum(nets: Sequence[Any], name: str, key: str) -> int | None:
    counts = [nid.get(key) for net in nets if str(net["net"]).startswith(name) for nid in net["nids"]]
    return None if None in counts else sum(counts)


CHECKS = (mount, network, targets)
