"""The places of nccl-tests and its launcher on nodes: a command over SSH does not get a login's PATH."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from node_setup.allreduce.nccl_tests import PROGRAM
from node_setup.fleet.session import Session

PLACES: Mapping[str, Sequence[str]] = {
    PROGRAM: (
        f"/usr/local/cuda/efa/test-cuda-*/{PROGRAM}",
        f"/usr/local/cuda-*/efa/test-cuda-*/{PROGRAM}",
        f"/opt/nccl-tests/build/{PROGRAM}",
    ),
    "mpirun": ("/opt/amazon/openmpi/bin/mpirun", "/opt/amazon/openmpi5/bin/mpirun"),
    "srun": ("/opt/slurm/bin/srun", "/usr/local/bin/srun"),
}
"""These places come after PATH. AWS's Deep Learning AMIs have the tests beside each CUDA, `/usr/local/cuda` being the default
one (their release notes, "NCCL Tests Location"); nccl-tests.Dockerfile of awslabs/awsome-distributed-ai builds them in
/opt/nccl-tests; EFA's installer brings Open MPI; HyperPod and ParallelCluster have Slurm in /opt/slurm."""
LIBRARIES = ("/opt/amazon/ofi-nccl/lib", "/opt/amazon/efa/lib", "/opt/amazon/openmpi/lib")
"""The tests of a Deep Learning AMI are run with these, behind their CUDA's own (AWS, "Check EFA" in the DLAMI guide)."""
SECONDS = 20.0


@dataclass(frozen=True)
class Programs:
    """These are paths on the nodes, as flags name them or as the search returns them; None where no flag names one."""

    test: str | None = None
    mpirun: str | None = None


UNNAMED = Programs()


def find(session: Session, name: str, named: str | None) -> str | None:
    """Return where the node of this session has the program; None where it has none, or not where it was `named`. Fault."""
    answer = session.execute(shlex.join(["sh", "-c", _script(name, named)]), b"", SECONDS)
    lines = answer.out.decode(errors="replace").split("\n")
    return lines[0] if not answer.status and lines[0].startswith("/") else None


def _script(name: str, named: str | None) -> str:
    """Return a script that prints of places that match alike the newest first: 12.10 before 12.9."""
    if named:
        return f'for path in {shlex.quote(named)}; do [ -f "$path" ] && [ -x "$path" ] && echo "$path" && exit; done; exit 1'
    places = " ".join(f"$(ls -d {place} 2>/dev/null | sort -rV)" for place in PLACES[name])
    return (
        f"command -v {name} && exit; "
        f'for path in {places}; do [ -f "$path" ] && [ -x "$path" ] && echo "$path" && exit; done; exit 1'
    )


def missing_program(name: str, named: str | None, node: str) -> str:
    """Return the message for a program that `find` did not find."""
    if named:
        return f"{named} is not a program on {node}; fix: name another path"
    flag = {PROGRAM: "--nccl-test PATH", "mpirun": "--mpirun PATH"}.get(name, "PATH of who logs in there")
    return f"no {name} on {node}, in PATH or {', '.join(PLACES[name])}; fix: install it, or say where it is: {flag}"


def libraries(test: str) -> str:
    """Return LD_LIBRARY_PATH for a test that lies beside a CUDA; empty for others, which their owner sets up."""
    cuda, _, rest = test.partition("/efa/test-cuda-")
    return ":".join((f"{cuda}/lib", f"{cuda}/lib64", *LIBRARIES)) if rest else ""
