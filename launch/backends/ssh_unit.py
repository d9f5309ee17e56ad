"""A launch on a node that is reached over SSH: its transient unit of systemd, and how the unit's state is read. Pure."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from launch.container import Container, Engine, replacing, run_words
from lustrain.problem import UserError, problem
from trainer.environment import ATTEMPT
from trainer.errors import EXIT_FAILURE, EXIT_PEERS, job_exit_code

ENVIRONMENT_FOLDER = "/run/lustrain"
LOG_FOLDER = "/var/log/lustrain"
TRANSIENT = "/run/systemd/transient"
"""Where systemd keeps the units of systemd-run: https://www.freedesktop.org/software/systemd/man/latest/systemd.unit.html"""
LOCK_S = 60
"""How long a start waits on a node for another one."""
KEPT_LOGS = 50
"""Launches, of any run, whose logs a node keeps."""
LOG_LIMIT = 200 << 20
"""Bytes of one launch's ranks that a node keeps: 10 GiB for all of them."""
NAME_PREFIX = "lustrain-run-"
SUPERVISOR_PREFIX = "lustrain-supervisor-"
FORBIDDEN_CHARACTER = re.compile(r"[^!-~]|[\"'$%\\]")
"""In a word of a unit's command: white space, quotes, and what systemd expands
(https://www.freedesktop.org/software/systemd/man/latest/systemd.service.html#Command%20lines)."""
LIMITS = {"LimitMEMLOCK": "infinity", "LimitNOFILE": "131072", "LimitSTACK": "infinity", "TasksMax": "infinity"}
"""As slurmd has them, for EFA's memory, sockets and loaders of all ranks (node_setup/settings/limits.toml; TasksMax:
https://github.com/SchedMD/slurm/blob/master/etc/slurmd.service.in)."""
_EXITED = "1"
"""ExecMainCode of a process that ended by itself: CLD_EXITED of siginfo.h."""
_SHOWN = "".join(f" --property={name}" for name in ("Id", "ActiveState", "SubState", "ExecMainCode", "ExecMainStatus"))


@dataclass(frozen=True)
class Runner:
    """Who runs the launcher of a node."""

    user: str = ""
    """The name of the user who logs in."""
    engine: Engine | None = None
    """What starts the launcher in a container; root starts it then, because no other user need have access to a daemon."""


@dataclass(frozen=True)
class Launcher:
    """What a launch runs on each of its nodes."""

    unit: str
    python: str
    run: str
    config: str
    nodes: tuple[str, ...]
    """Names, by rank."""
    master: str
    """HOST:PORT where ranks meet."""
    ranks: int
    """Ranks of one node."""
    stop_s: int
    """Seconds from SIGTERM to SIGKILL when the unit is stopped."""
    container: Container | None
    variables: tuple[str, ...]
    """Names of the variables that a container gets."""

    def command(self, rank: int, runner: Runner) -> list[str]:
        """Return the command of the node with this rank. Variables are in a file of root's, which it names."""
        properties = {
            "EnvironmentFile": environment_file(self.unit),
            # Only the launcher gets SIGTERM, which it passes on to its ranks once.
            "KillMode": "mixed",
            # Its state can be read after its end, too.
            "RemainAfterExit": "yes",
            "StandardError": f"append:{log_file(self.unit)}",
            "StandardOutput": f"append:{log_file(self.unit)}",
            "TimeoutStopSec": str(self.stop_s),
            **LIMITS,
        }
        prefix: list[str] = []
        if self.container is not None and runner.engine is not None:
            # A container outlives a client that was killed.
            properties["ExecStopPost"] = f"-{runner.engine.program} rm --force {self.unit}"
            prefix = run_words(runner.engine, self.container, (*self.variables, ATTEMPT), self.unit)
        options = [] if prefix else [f"--uid={runner.user}"]
        options += [f"--property={name}={value}" for name, value in properties.items()]
        launcher = [
            self.python,
            "-m",
            "trainer.node.launcher",
            "--nnodes",
            str(len(self.nodes)),
            "--node-rank",
            str(rank),
        ]
        launcher += ["--master", self.master, "--roster", ",".join(self.nodes), "--nproc", str(self.ranks)]
        launcher += ["--output-limit", str(LOG_LIMIT), "--run", self.run, "--", "train", self.config]
        return ["systemd-run", "--quiet", f"--unit={self.unit}", *options, "--", *prefix, *launcher]


@dataclass(frozen=True)
class NodeState:
    """A launch on one node. What is not known has not ended: its connection is lost, and the launch may go on there."""

    kind: Literal["starting", "running", "ended", "lost", "unknown"]
    """`starting`: the unit is not there, and may be at any moment. `lost`: the node answers and knows nothing of the unit,
    because it rebooted, or did not start it."""
    code: int | None = None
    """The launcher's exit code, of one that has ended."""


STARTING, RUNNING = NodeState("starting"), NodeState("running")
LOST, UNKNOWN = NodeState("lost"), NodeState("unknown")


@dataclass(frozen=True)
class Patience:
    """Seconds that are waited for the other nodes of a launch, once one has ended or is lost."""

    unknown_s: float
    """For nodes that do not answer: their launchers end by themselves, because they do not hear the others."""
    lost_s: float
    """For nodes that have to notice that another is lost."""
    running_s: float
    """For nodes that still save."""


@dataclass(frozen=True)
class SshPlan:
    """What all launches of a run have in common."""

    run: str
    config: str
    python: str
    ranks: int
    port: int
    variables: Mapping[str, str]
    patience: Patience
    stop_s: int
    container: Container | None = None

    def launcher(self, launch: int, nodes: tuple[str, ...], master: str) -> Launcher:
        """Return what the launch runs on these nodes, whose ranks meet at `master`."""
        return Launcher(
            unit=unit_name(self.run, launch),
            python=self.python,
            run=self.run,
            config=self.config,
            nodes=nodes,
            master=master,
            ranks=self.ranks,
            stop_s=self.stop_s,
            container=self.container,
            variables=tuple(self.variables),
        )


Step = Literal["wait", "stop", "over"]


def next_step(states: Sequence[NodeState], waited_s: float, patience: Patience) -> Step:
    """Return what to do about a launch whose first node ended, or was lost, `waited_s` ago."""
    kinds = {state.kind for state in states}
    if not kinds & {"ended", "lost"}:
        return "wait"
    if kinds & {"starting", "running"}:
        limit = patience.lost_s if "lost" in kinds else patience.running_s
        return "stop" if waited_s > limit else "wait"
    return "wait" if "unknown" in kinds and waited_s <= patience.unknown_s else "over"


def launch_code(states: Sequence[NodeState]) -> int:
    """Return the exit code of a launch that is over: launchers end with that of the job."""
    codes = [state.code for state in states if state.code is not None]
    return job_exit_code(codes) if codes else EXIT_PEERS


def unit_prefix(run: str) -> str:
    """Return what the names of a run's units begin with; runs of one name in two places have different ones."""
    return f"{NAME_PREFIX}{_run_words(run)}-"


def supervisor_unit(run: str) -> str:
    """Return the unit of a run's supervisor, on the node that it was handed over to; none of a launch's begins so."""
    return f"{SUPERVISOR_PREFIX}{_run_words(run)}"


def supervisor_log(run: str) -> str:
    """Return the file of all that supervisors of the run have printed on a node."""
    return log_file(supervisor_unit(run))


def _run_words(run: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_.]", "_", run.rpartition("/")[2])[:60]
    return f"{name}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"


def unit_name(run: str, launch: int) -> str:
    return f"{unit_prefix(run)}{launch:06d}"


def launch_of_unit(run: str, unit: str) -> int | None:
    """Return the launch of a run that a unit, or its log, is of; None where it is another run's."""
    match = re.fullmatch(rf"{re.escape(unit_prefix(run))}(\d{{6,}})(\.service|\.log)?", unit)
    return int(match[1]) if match else None


def environment_file(unit: str) -> str:
    return f"{ENVIRONMENT_FOLDER}/{unit}.env"


def log_file(unit: str) -> str:
    return f"{LOG_FOLDER}/{unit}.log"


def check_variables(variables: Mapping[str, str]) -> None:
    """Refuse values that a line of a file cannot hold. UserError."""
    bad = [name for name, value in variables.items() if not value.isprintable()]
    if bad:
        raise UserError([problem(name, variables[name], "holds a control character", fix="unset it") for name in bad])


def environment_text(variables: Mapping[str, str], launch: int) -> str:
    """Return the file of variables: https://www.freedesktop.org/software/systemd/man/latest/systemd.exec.html#EnvironmentFile="""
    values = {**variables, ATTEMPT: str(launch)}
    quoted = {name: re.sub(r"""(["\\$`])""", r"\\\1", value) for name, value in values.items()}
    return "".join(f'{name}="{value}"\n' for name, value in quoted.items())


def start_script(launcher: Launcher, rank: int, runner: Runner) -> str:
    """Return the script, for root, that starts the unit; its input is the file of variables.

    What earlier launches of the run have left on the node, as one that was cut off, is taken away. A script that runs late,
    beside a unit of a later launch, starts nothing; nor does one whose input was cut off.
    """
    environment, (prefix, _, number) = environment_file(launcher.unit), launcher.unit.rpartition("-")
    # Where the daemon did not answer its unit's end, a container is left without one.
    removal = shlex.join(replacing(runner.engine, f"{prefix}-", ["true"])) if runner.engine else ""
    return f"""set -e
umask 077
mkdir -p {ENVIRONMENT_FOLDER}
{_receive(environment)}
exec 9<{ENVIRONMENT_FOLDER}
flock -w {LOCK_S} 9 || {{ echo "another launcher is being started here" >&2; exit 1; }}
for file in {TRANSIENT}/{prefix}-*.service; do
    [ -e "$file" ] || continue
    unit=${{file##*/}}
    unit=${{unit%.service}}
    [ "${{unit##*-}}" -lt {number} ] || {{ echo "$unit is here already; fix: systemctl stop $unit" >&2; exit 1; }}
done
{_remove(f"{prefix}-")}
{removal}
umask 022
mkdir -p {LOG_FOLDER}
{prune_script()}
{shlex.join(launcher.command(rank, runner))}
trap - EXIT
"""


def supervisor_script(unit: str, words: Sequence[str], user: str, stop_s: int) -> str:
    """Return the script, for root, that starts a run's supervisor as this user; its input is the file of variables.

    It starts nothing beside a supervisor that runs, nor where its input was cut off.
    """
    environment = environment_file(unit)
    properties = {
        "CollectMode": "inactive-or-failed",
        "EnvironmentFile": environment,
        "StandardError": f"append:{log_file(unit)}",
        "StandardOutput": f"append:{log_file(unit)}",
        # At SIGTERM it lets the launch commit first.
        "TimeoutStopSec": str(2 * stop_s),
    }
    command = ["systemd-run", "--quiet", f"--unit={unit}", f"--uid={user}"]
    command += [f"--property={name}={value}" for name, value in properties.items()]
    return f"""set -e
umask 077
mkdir -p {ENVIRONMENT_FOLDER}
{_receive(environment)}
case "$(systemctl is-active {unit}.service)" in
    active | activating | deactivating) echo "{unit} is here already" >&2; exit 1 ;;
esac
systemctl reset-failed {unit}.service 2>/dev/null || true
umask 022
mkdir -p {LOG_FOLDER}
{prune_script(SUPERVISOR_PREFIX)}
{shlex.join([*command, "--", *words])}
"""


def _receive(environment: str) -> str:
    """Return the lines that read the file of variables, and refuse a cut one; the file goes with the shell."""
    return f"""cat >{environment}
trap 'rm -f {environment}' EXIT
tail -n 1 {environment} | grep -q '^{ATTEMPT}=' || {{ echo "its variables did not arrive" >&2; exit 1; }}"""


def prune_script(prefix: str = NAME_PREFIX) -> str:
    """Return the script that deletes the oldest logs, so that there is room for one more."""
    logs = f"ls -1t {LOG_FOLDER}/{prefix}*.log 2>/dev/null"
    return f'{logs} | tail -n +{KEPT_LOGS} | while read -r old; do rm -f "$old"; done'


def state_script(unit: str) -> str:
    return f"systemctl show{_SHOWN} {unit}.service"


def parse_states(text: str) -> dict[str, NodeState]:
    """Return the state of each unit that `systemctl show` describes."""
    states = {}
    for block in text.split("\n\n"):
        shown = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" in shown:
            states[shown["Id"].removesuffix(".service")] = _state(shown)
    return states


def _state(shown: Mapping[str, str]) -> NodeState:
    active, sub = shown.get("ActiveState", ""), shown.get("SubState", "")
    if active == "failed" or (active, sub) == ("active", "exited"):
        ended_itself = shown.get("ExecMainCode") == _EXITED
        return NodeState("ended", int(shown.get("ExecMainStatus") or 1) if ended_itself else EXIT_FAILURE)
    return LOST if active == "inactive" else RUNNING


def signal_script(unit: str, name: str, *, whole: bool) -> str:
    """Return the script that signals the launcher, or with `whole` all that the unit runs."""
    return f"systemctl kill --kill-who={'all' if whole else 'main'} --signal={name} {unit}.service"


def remove_script(prefix: str) -> str:
    """Return the script, for root, that stops the units whose names begin so, and prints their names."""
    return f"{_remove(prefix)}\nexit 0\n"


def _remove(prefix: str) -> str:
    return f"""for file in {TRANSIENT}/{prefix}*.service; do
    [ -e "$file" ] || continue
    unit=${{file##*/}}
    echo "${{unit%.service}}"
    systemctl stop "$unit" || true
    systemctl reset-failed "$unit" 2>/dev/null || true
    rm -f "{ENVIRONMENT_FOLDER}/${{unit%.service}}.env"
done"""


def inspect_script(python: str | None) -> str:
    """Return the script that says whether a node is ready; its input are lines NAME=VALUE, the variables of a launcher. Without
    `python` the trainer need not be there."""
    load = f"exec {shlex.quote(python)} -c 'import trainer.node.launcher' 2>&1" if python else "exit 0"
    return f"""[ -d /run/systemd/system ] && command -v systemd-run >/dev/null || echo systemd=no
[ "$(id -u)" = 0 ] || LC_ALL=C sudo -n true 2>/dev/null || echo sudo=no
set -- ${{SSH_CONNECTION:-}}
case "${{3:-}}" in "" | 127.* | ::1) set -- x x $(hostname -I) ;; esac
echo "address=${{3:-}}"
echo "user=$(id -un) $(id -u):$(id -g) $(id -G)"
loaded=$(
    while IFS= read -r line; do export "$line"; done
    {load}
) || echo "python=$(echo "$loaded" | tail -n 1)"
echo
for file in {TRANSIENT}/{NAME_PREFIX}*.service; do
    [ -e "$file" ] || continue
    systemctl show{_SHOWN} "${{file##*/}}"
    echo
done
exit 0
"""


@dataclass(frozen=True)
class Inspection:
    """What a node says of itself: `why` it is not ready (empty: it is) and what mends that."""

    address: str
    """Where other nodes reach it."""
    units: Mapping[str, NodeState]
    why: str = ""
    fix: str = ""
    runner: Runner = Runner()
    ids: str = ""
    """UID:GID of the user who logs in."""
    groups: tuple[str, ...] = ()
    """Numbers of the user's groups."""

    def running(self) -> Iterator[str]:
        """Yield the units that run."""
        return (unit for unit, state in self.units.items() if state == RUNNING)


def parse_inspection(text: str, python: str, user: str) -> Inspection:
    head, _, rest = text.partition("\n\n")
    facts = dict(line.split("=", 1) for line in head.splitlines() if "=" in line)
    why = fix = ""
    if "systemd" in facts:
        why, fix = "it does not run systemd", "use a machine that boots with systemd, or start the launchers by hand"
    elif "sudo" in facts:
        why, fix = f"user {user} may not start a unit", f"let {user} use sudo with NOPASSWD"
    elif "python" in facts:
        why = f"{python} cannot load the trainer: {facts['python']}"
        fix = "install the trainer there, or name its interpreter by --python"
    name, ids, *groups = facts.get("user", "").split() or [user, ""]
    return Inspection(facts.get("address", ""), parse_states(rest), why, fix, Runner(name), ids, tuple(groups))


def with_engine(found: Inspection, line: str) -> Inspection:
    """Return what is known of a node with the engine that `trial_script` named."""
    kind, program = line.split(maxsplit=1)
    engine = Engine(kind, program.strip(), found.ids, found.groups)
    return replace(found, runner=replace(found.runner, engine=engine))
