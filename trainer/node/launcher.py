"""Start the ranks of one node: `python -m trainer.node.launcher --nproc 2 -- train CONFIG.toml`.

What it does that torchrun does not: it hands the trainer's own exit code on (torchrun answers 1 to everything, and a scheduler
could not tell 85, requeue, from a failure), and it passes signals on and then waits as long as the ranks need. If it is killed,
no rank stays behind beside the next job: those that train save and stop, those still starting end at once.

Without `--master` this machine is the whole job. With it every node runs a launcher. They wait for each other before a rank
starts, so that slow nodes cost no time-out of the ranks. While the ranks run, the launchers exchange heartbeats
(`trainer.node.heartbeat`): when a node is silent for five seconds (or LUSTRAIN_SILENT_S), all others kill their ranks, which
would wait for it until a collective's time-out, and end with 75. All nodes end with the job's exit code, not their own.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from lustrain.ports import hold_port
from lustrain.problem import UserError, problem
from trainer.environment import NODE_LIST, launch_attempt, max_silence_s
from trainer.errors import EXIT_FAILURE, EXIT_PEERS
from trainer.node.exit_report import NodeExit, report_exit
from trainer.node.heartbeat import SILENT_S, Heartbeat, HeartbeatClient, HeartbeatServer, NoPeers
from trainer.node.output import RankOutput
from trainer.node.ranks import FORWARDED, Ranks
from trainer.node.watchdog import MIN_HUNG_S

GRACE_S = 20.0
"""How long the other ranks may go on once one of them has failed: they notice a lost peer within a collective."""
LINGER_S = 60.0
"""How long a launcher whose ranks have ended waits for those of other nodes, which may still write their parts."""
POLL_S = 0.05
LOOPBACK = "127.0.0.1"
"""Ranks that meet there are all on this machine."""


@dataclass(frozen=True)
class Placement:
    """Which ranks of a job this node starts."""

    nproc: int
    """Ranks of each node."""
    master: tuple[str, int]
    """Host and port where ranks meet."""
    nodes: int = 1
    node: int = 0
    node_list: str = ""
    held: socket.socket | None = None
    """Keeps the port of ranks that meet on this machine."""

    @classmethod
    def alone(cls, nproc: int) -> Placement:
        """Return the placement of a job that is on this machine alone. Its port is its own for as long as this object lives."""
        held = hold_port(LOOPBACK)
        return cls(nproc, (LOOPBACK, held.getsockname()[1]), held=held)

    def environments(self, base: Mapping[str, str]) -> list[dict[str, str]]:
        """Return what `torch.distributed` reads, for each of this node's ranks."""
        numbers = {
            "WORLD_SIZE": self.nodes * self.nproc,
            "LOCAL_WORLD_SIZE": self.nproc,
            "MASTER_ADDR": self.master[0],
            "MASTER_PORT": self.master[1],
        }
        usual = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.nproc))}
        usual |= {"GLOO_SOCKET_IFNAME": "lo"} if self.master[0] == LOOPBACK else {}
        common = {**usual, **base, **{name: str(value) for name, value in numbers.items()}, NODE_LIST: self.node_list}
        first = self.node * self.nproc
        return [{**common, "RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(self.nproc)]


class LocalJob(Ranks):
    """All ranks of a job, on this machine."""

    def __init__(self, arguments: Sequence[str], nproc: int, environment: Mapping[str, str] | None = None) -> None:
        base = os.environ if environment is None else environment
        self._placement = Placement.alone(nproc)
        super().__init__(arguments, self._placement.environments(base))

    def wait(self) -> int:
        """Wait for all ranks and return the job's exit code; after one failed, the rest get `GRACE_S` and are then killed."""
        return supervise(self, NoPeers(), "").code


def devices(environ: Mapping[str, str] = os.environ, folder: Path = Path("/dev")) -> int:
    """Count the GPUs that ranks of this node may use; 1 where there is none: a rank on the CPU."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return max(1, len([name for name in visible.split(",") if name.strip()]))
    return max(1, sum(1 for path in folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)))


def supervise(ranks: Ranks, heartbeat: Heartbeat, say: str) -> NodeExit:
    """Wait until the ranks have ended, here and on the other nodes."""
    kill_at: float | None = None
    lost = False
    while ranks.running():
        status = heartbeat.check()
        if status.silent:
            if not lost:
                print(
                    f"{say}: {status.silent} was silent for {heartbeat.silent_s:g} s: its ranks are lost",
                    file=sys.stderr,
                )
            lost = True
            ranks.kill()
        elif (ranks.failed() or status.failed) and kill_at is None:
            kill_at = time.monotonic() + GRACE_S
        if kill_at is not None and time.monotonic() > kill_at:
            ranks.kill()
        ranks.kill_if_hung()
        time.sleep(POLL_S)
    code = ranks.exit_code()
    heartbeat.ended(code)
    ranks.close_output()
    until = time.monotonic() + LINGER_S
    while (status := heartbeat.check()).code is None and not status.silent and time.monotonic() < until:
        time.sleep(POLL_S)
    return NodeExit(code if status.code is None else status.code, code, status.silent, ranks.error_line())


def _scheduler_number(*names: str) -> int | None:
    """Return the number that a scheduler has put into the environment; None without one."""
    return next((int(value) for name in names if (value := os.environ.get(name, "")).isdecimal()), None)


def _scheduler_index(roster: str) -> int | None:
    """Return which node of the job this is, by its scheduler; None without one.

    By its name where the roster has it: Slurm counts dynamic nodes in the order of their registration, and squeue sorts them.
    """
    names, name = roster.split(","), os.environ.get("SLURMD_NODENAME", "")
    return names.index(name) if name and name in names else _scheduler_number("SLURM_NODEID", "JOB_COMPLETION_INDEX")


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.node.launcher", description=__doc__)
    parser.add_argument(
        "--nproc", type=int, default=devices(), help="ranks of a node; default: one for each GPU, else 1"
    )
    parser.add_argument(
        "--master", metavar="HOST:PORT", help="where node 0 listens; PORT + 1 is used too; default: this node is alone"
    )
    nodes = _scheduler_number("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    parser.add_argument("--nnodes", type=int, default=nodes, help="nodes of the job; default: Slurm's")
    parser.add_argument("--node-rank", type=int, help="which it is, from 0; default: Slurm's, Kubernetes'")
    parser.add_argument("--run", default="", metavar="URI", help="where to record why a launch failed")
    parser.add_argument("--roster", default="", help="names the nodes of this launch; the same text on all of them")
    parser.add_argument(
        "--hung-s", type=float, default=MIN_HUNG_S, help="a step of more seconds, and ten times the usual, hangs"
    )
    parser.add_argument("--wait-s", type=float, default=600.0, help="how long to wait for the other nodes")
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="keep what ranks print in FILE too, unless they print to a terminal"
    )
    parser.add_argument(
        "--output-limit", type=int, metavar="BYTES", help="of what its ranks print; of more, only the end is passed on"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="--, then the arguments of `python -m trainer`")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = flags()
    args = parser.parse_args(argv)
    args.node_rank = _scheduler_index(args.roster) if args.node_rank is None else args.node_rank
    arguments = [word for word in args.arguments if word != "--"]
    if not arguments:
        parser.error("the arguments of `python -m trainer` are missing after --, e.g. -- train CONFIG.toml")
    placement = _placement(args)
    stopping: list[int] = []
    started: list[Ranks] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        stopping.append(number)
        for ranks in started:
            ranks.send(number)

    peers = _heartbeat(args, placement)
    for number in FORWARDED:
        signal.signal(number, forward)
    peers.start()
    name = f"node {peers.node} of {peers.nodes}"
    try:
        if problem_text := _wait_for_all(peers, args.wait_s, stopping):
            missing = "" if stopping else peers.missing_nodes()
            print(f"{name}: {problem_text}{f'; missing: {missing}' if missing else ''}", file=sys.stderr)
            report_exit(args.run, peers.node, NodeExit(EXIT_PEERS, EXIT_PEERS, missing))
            return EXIT_PEERS
        # A signal waits until there is someone to pass it on to; ranks begin with it held, and let go once they listen.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            ranks = Ranks(arguments, placement.environments(os.environ), hung_s=args.hung_s, output=_output(args))
            started.append(ranks)
            # One that came before the ranks were there.
            for early in stopping:
                ranks.send(early)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        end = supervise(ranks, peers, name)
        report_exit(args.run, peers.node, end)
        return end.code
    finally:
        peers.close()


def _placement(args: argparse.Namespace) -> Placement:
    """Return the job that the flags describe; UserError with everything that is wrong with them."""
    lines = []
    if args.nproc < 1:
        lines.append(problem("--nproc", args.nproc, "a node needs at least one rank", allowed=">= 1"))
    if args.output_limit is not None and args.output_limit < 1:
        lines.append(problem("--output-limit", args.output_limit, "is not a number of bytes", allowed=">= 1"))
    for flag, seconds in (("--wait-s", args.wait_s), ("--hung-s", args.hung_s)):
        if not 0 < seconds < float("inf"):
            lines.append(problem(flag, seconds, "is not a time to wait", allowed="seconds above 0"))
    if args.nnodes is not None and args.nnodes < 1:
        lines.append(problem("--nnodes", args.nnodes, "a job needs at least one node", allowed=">= 1"))
    elif args.master is None:
        if args.nnodes is not None and args.nnodes > 1:
            fix = "give --master HOST:PORT, or --nnodes 1 for ranks on this machine alone"
            lines.append(problem("--master", None, f"the job's {args.nnodes} nodes have to meet", fix=fix))
    elif args.nnodes is None or args.node_rank is None:
        missing = "--nnodes" if args.nnodes is None else "--node-rank"
        lines.append(problem(missing, None, "is needed with --master", fix="give it, or start it as a step of Slurm"))
    elif not 0 <= args.node_rank < args.nnodes:
        allowed = f"0 .. {args.nnodes - 1}"
        lines.append(problem("--node-rank", args.node_rank, f"is not below --nnodes {args.nnodes}", allowed=allowed))
    host, _, port = (args.master or "localhost:1").rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65_535:
        allowed = "HOST:PORT with a port in 1 .. 65534"
        lines.append(problem("--master", args.master, "is not an address with a port", allowed=allowed))
    if lines:
        raise UserError(lines)
    if args.master is None:
        return Placement.alone(args.nproc)
    return Placement(args.nproc, (host.strip("[]"), int(port)), args.nnodes, args.node_rank, args.roster)


def _output(args: argparse.Namespace) -> RankOutput | None:
    """Return what passes on the ranks' output; None where they print it themselves: a bar on a terminal needs one."""
    if args.master is None and (args.log is None or sys.stdout.isatty()):
        return None
    return RankOutput(launch_attempt(), args.log, limit=args.output_limit)


def _heartbeat(args: argparse.Namespace, placement: Placement) -> Heartbeat:
    if args.master is None:
        return NoPeers()
    job = f"{launch_attempt() or 0}/{placement.node_list}"
    address = (placement.master[0], placement.master[1] + 1)
    silent_s = max_silence_s(SILENT_S)
    if placement.node:
        return HeartbeatClient(job, placement.node, placement.nodes, address, silent_s=silent_s)
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", address[1]), family=family, backlog=placement.nodes, dualstack_ipv6=both)
    except OSError as error:
        why = f"cannot listen on port {address[1]}: {os.strerror(error.errno or 0)}"
        raise UserError(problem("--master", args.master, why, fix="choose another port"), EXIT_FAILURE) from None
    return HeartbeatServer(job, placement.nodes, listener, silent_s=silent_s)


def _wait_for_all(heartbeat: Heartbeat, wait_s: float, stopping: Sequence[int]) -> str:
    """Wait for the other nodes; return why they are not all there, else nothing."""
    until = time.monotonic() + wait_s
    while not heartbeat.check().all_here:
        if stopping:
            return f"{signal.Signals(stopping[0]).name} before all nodes were there; no rank was started"
        if time.monotonic() > until:
            return f"not all nodes came within {wait_s:g} s; no rank was started"
        time.sleep(POLL_S)
    return ""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
