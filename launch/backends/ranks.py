"""What the launchers of a run get, on every backend: ports, variables, patience. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from launch.request import RunRequest
from trainer.environment import SILENT
from trainer.node.launcher import LINGER_S

FIRST_PORT, FIRST_PORTS = 20_000, 4_000
"""A run's first port is one of these. They and those of its launches end below what else listens on nodes: the CloudWatch agent
(25888), the metrics of ranks (28400 and more, docs/metrics.md), and what Linux chooses for connections, from 32768:
https://docs.kernel.org/networking/ip-sysctl.html"""
SPARE_S = 10
"""Seconds beside the trainer's own grace, from the signal to the end."""
NOTICE_S = 30.0
"""Seconds beside those of the allowed silence, in which a launcher notices that others are lost, and ends."""
KEPT = (
    "PATH",
    "PYTHONPATH",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL_SQS",
    "GLOO_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    SILENT,
)


def first_port(run: str) -> int:
    """Return the port from which the launches of a run count theirs."""
    return FIRST_PORT + sum(run.encode()) % FIRST_PORTS


def ranks_environment(
    environ: Mapping[str, str], *, efa: bool = False, without: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return what ranks get of `environ`: paths of programs and modules, and of AWS the region and endpoint; and with EFA the
    name of NCCL's plugin."""
    kept = {name: environ[name] for name in KEPT if name in environ and name not in without}
    # Named, because NCCL without the plugin would use TCP, and write no more than a line about it.
    return kept | ({"NCCL_NET_PLUGIN": "ofi"} if efa else {})


def late_s(request: RunRequest) -> int:
    """Return the seconds after the end of the first launcher at which the others are ended.

    Launchers wait for each other, and a last save takes as long as the trainer may need for one. One on a node that does not
    answer would be waited for until Slurm takes the node for lost, five minutes by default:
    https://slurm.schedmd.com/slurm.conf.html#OPT_SlurmdTimeout
    """
    return round(LINGER_S + request.grace_s) + SPARE_S
