"""`python -m rehearsal.lab`: nodes on this machine until SIGTERM or SIGINT; prints what to export, so that `fab` finds them."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from lustrain.cluster import to_json
from rehearsal.lab.cluster import cluster_of
from rehearsal.lab.hardware import KINDS, LEFT_OUT
from rehearsal.lab.nodes import Lab, why_not

MOST = 64


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m rehearsal.lab", description=__doc__)
    parser.add_argument("--nodes", type=int, default=3, metavar="N", help=f"how many, 1 to {MOST} (3)")
    parser.add_argument("--kind", choices=sorted(KINDS), default="p5", help="what they pretend to be made of (p5)")
    args = parser.parse_args(words)
    if not 1 <= args.nodes <= MOST:
        parser.error(f"--nodes = {args.nodes}: out of range; allowed: 1..{MOST}")
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    folder = Path(tempfile.mkdtemp(prefix="lustrain-lab-"))
    try:
        with Lab(args.nodes, args.kind, metadata=True) as lab:
            print("\n".join(announced(lab, folder)), flush=True)
            ended.wait()
    finally:
        shutil.rmtree(folder)
    return 0


def announced(lab: Lab, folder: Path) -> list[str]:
    """Write the Cluster and the host keys into `folder`; the lines that tell of them."""
    cluster, known = folder / "cluster.json", folder / "known_hosts"
    cluster.write_text(json.dumps(to_json(cluster_of(lab)), indent=1), encoding="utf-8")
    known.write_text(Path(lab.known_hosts).read_text(encoding="utf-8"), encoding="utf-8")
    return [
        f"# {', '.join(f'{node.name} {node.address}' for node in lab.nodes)}; Ctrl-C ends them",
        f"# left out of {LEFT_OUT}",
        f"export LUSTRAIN_CLUSTER={cluster}",
        f"export FABRIC_NODE_SETUP_KNOWN_HOSTS={known}",
    ]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
