"""Variables that reach jobs from files of the node, and those of running jobs, each with its place, for the linter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from node_setup.agent.facts.jobs import step_of
from node_setup.agent.facts.reading import MachineReading

EMPTY: dict[str, Any] = {"environment": []}
_NAMES = re.compile(r"(NCCL|FI|OFI|HCCL|HABANA|PT_HPU|TORCH|CUDA|OMP|RDMAV)_\w+|LD_LIBRARY_PATH")
SHELL = (
    "/etc/environment",
    "/etc/profile",
    "/etc/bash.bashrc",
    "/etc/bashrc",
    "/etc/sysconfig/slurmd",
    "/etc/default/slurmd",
)
NCCL = "/etc/nccl.conf"
UNITS = ("slurmd", "kubelet", "containerd")
_SLURM = ("/etc/slurm/slurm.conf", "/opt/slurm/etc/slurm.conf", "/usr/local/etc/slurm.conf")
_SYSTEMD = ("/usr/lib/systemd/system", "/lib/systemd/system", "/etc/systemd/system", "/run/systemd/system")


def collect(reading: MachineReading) -> dict[str, Any]:
    entries = [*_shell(reading), *_nccl(reading), *_units(reading), *_prologs(reading)]
    keys = ("where", "line", "name", "value")
    seen = dict.fromkeys(entry for entry in entries if _NAMES.fullmatch(entry[2]))
    return {"environment": [dict(zip(keys, variable)) for variable in seen]}


def _shell(reading: MachineReading) -> Iterator[tuple[str, int, str, str]]:
    profiles = [f"/etc/profile.d/{name}" for name in reading.host.names("/etc/profile.d") if name.endswith(".sh")]
    for path in (*SHELL, *profiles):
        for line, name, value in parse_shell(reading.host.read(path) or ""):
            yield path, line, name, value


_PAIR = r"""(?P<name>[A-Za-z_]\w*)=(?P<value>(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\s;&|"'\\])*)"""
_ASSIGNMENT = re.compile(rf"(?:^|[;&]|\bthen\b|\belse\b|\bdo\b)\s*(?:export\s+|declare\s+-x\s+)?{_PAIR}")
_MORE = re.compile(rf"\s+{_PAIR}")


def parse_shell(text: str) -> list[tuple[int, str, str]]:
    """Return (line, name, value) of the assignments that lines begin with, `export` or not, several in one line too.

    Values lose their quotes and keep their `$`; what only a running shell could tell, as `case` or functions, is not judged.
    """
    assignments = []
    for number, line in enumerate(text.splitlines(), 1):
        line = _uncommented(line)
        for first in _ASSIGNMENT.finditer(line):
            match: re.Match[str] | None = first
            while match is not None:
                assignments.append((number, match["name"], _unquoted(match["value"])))
                match = _MORE.match(line, match.end())
    return assignments


def _uncommented(line: str) -> str:
    """Return the line without its comment: a `#` at the beginning of a word and outside of quotes."""
    quote = ""
    for at, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at]
    return line


def _unquoted(value: str) -> str:
    parts = re.findall(r"\"((?:\\.|[^\"\\])*)\"|'([^']*)'|((?:\\.|[^\"'])+)", value)
    return "".join(
        re.sub(r"\\(.)", r"\1", double) + single + re.sub(r"\\(.)", r"\1", bare) for double, single, bare in parts
    )


def _nccl(reading: MachineReading) -> Iterator[tuple[str, int, str, str]]:
    """NCCL's own file has `NAME=value` lines and no quotes (NCCL user guide, system configuration)."""
    for number, line in enumerate((reading.host.read(NCCL) or "").splitlines(), 1):
        name, equals, value = line.partition("#")[0].strip().partition("=")
        if equals:
            yield NCCL, number, name.strip(), value.strip()


def _units(reading: MachineReading) -> Iterator[tuple[str, int, str, str]]:
    for folder in _SYSTEMD:
        for unit in UNITS:
            drop_ins = f"{folder}/{unit}.service.d"
            names = [f"{drop_ins}/{name}" for name in reading.host.names(drop_ins) if name.endswith(".conf")]
            for path in (f"{folder}/{unit}.service", *names):
                text = reading.host.read(path) or ""
                for line, name, value in parse_unit(text):
                    yield path, line, name, value
                for file in parse_environment_files(text):
                    yield from _named(reading, file)


def _named(reading: MachineReading, file: str) -> Iterator[tuple[str, int, str, str]]:
    """Yield what a unit takes from a file of lines `NAME=value`, unless `_shell` has read that file already."""
    if file not in SHELL:
        for line, name, value in parse_shell(reading.host.read(file) or ""):
            yield file, line, name, value


_WORD = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|[^\s"'])+""")


def parse_unit(text: str) -> list[tuple[int, str, str]]:
    """Return (line, name, value) of every `Environment=` of a unit: words `A=b`, quoted whole or in part (systemd.exec(5))."""
    assignments = []
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r"\s*Environment\s*=(.*)", line)
        for word in _WORD.findall(match[1]) if match else ():
            name, equals, value = _unquoted(word).partition("=")
            if equals:
                assignments.append((number, name, value))
    return assignments


def parse_environment_files(text: str) -> list[str]:
    """Return the absolute paths that a unit names as `EnvironmentFile=`, those that may be missing too; patterns are not
    expanded."""
    paths = re.findall(r"^\s*EnvironmentFile\s*=\s*-?(/\S+)\s*$", text, re.MULTILINE)
    return [path for path in dict.fromkeys(paths) if not set(path) & set("*?[%")]


def _prologs(reading: MachineReading) -> Iterator[tuple[str, int, str, str]]:
    """Read the scripts that Slurm runs before a job; a task prolog gives variables by printing `export A=b`."""
    for path in parse_prologs("\n".join(reading.host.read(path) or "" for path in _SLURM)):
        for line, name, value in parse_shell(_printed(reading.host.read(path) or "")):
            yield path, line, name, value


def _printed(text: str) -> str:
    return re.sub(r"^\s*(?:echo|print)\s+([\"']?)(export .*)\1\s*$", r"\2", text, flags=re.MULTILINE)


def parse_prologs(text: str) -> list[str]:
    """Return the absolute paths of the scripts that slurm.conf names as Prolog, TaskProlog or SrunProlog; patterns are not
    expanded."""
    pattern = r"^\s*(?:Prolog|TaskProlog|SrunProlog)\s*=\s*([^\s#]+)"
    paths = (part for value in re.findall(pattern, text, re.MULTILINE | re.IGNORECASE) for part in value.split(","))
    return list(dict.fromkeys(path for path in paths if path.startswith("/") and "*" not in path))


MOST = 256
"""At most so many processes of a job's step are read; a rank has some ten that load data, all with its own environment."""


def of_jobs(reading: MachineReading, jobs: Sequence[Mapping[str, str]] | None) -> list[dict[str, Any]]:
    """Return the variables that processes of running jobs were started with, each once per job; `where` is like `slurm job
    123`.

    Values of other names than the linter's families never leave this function: they may hold secrets.
    """
    entries: dict[tuple[str, None, str, str], None] = {}
    looked_at: set[str] = set()
    for job in jobs or ():
        for pid in _processes_of(reading, job):
            if pid not in looked_at:
                pairs = parse_environ(reading.host.read(f"/proc/{pid}/environ") or "")
                entries.update({(_place(job), None, name, value): None for name, value in pairs})
                looked_at.add(pid)
    return [dict(zip(("where", "line", "name", "value"), entry)) for entry in entries]


def _place(job: Mapping[str, str]) -> str:
    """Name the job and not its processes, so that a finding shared by nodes and ranks is reported once."""
    return f"slurm job {job['id']}" if job["kind"] == "slurm" else f"running {job['kind']} process"


def _processes_of(reading: MachineReading, job: Mapping[str, str]) -> list[str]:
    if job["kind"] != "slurm":
        return [job["id"]]
    below = [str(process.pid) for process in reading.processes if step_of(process) == job["id"]]
    pids: list[str] = []
    while below and len(pids) < MOST:
        below = [child for pid in below for child in _children(reading, pid)]
        pids += below
    return pids[:MOST]


def _children(reading: MachineReading, pid: str) -> list[str]:
    """List a process's children. The kernel lists them by the thread that started them (proc_pid_children(5))."""
    threads = reading.host.names(f"/proc/{pid}/task")
    texts = (reading.host.read(f"/proc/{pid}/task/{thread}/children") or "" for thread in threads)
    return [child for text in texts for child in text.split()]


def parse_environ(text: str) -> list[tuple[str, str]]:
    """Return (name, value) of the linter's families from what the kernel gives as a process's environment."""
    pairs = (pair.partition("=") for pair in text.split("\0"))
    return [(name, value) for name, equals, value in pairs if equals and _NAMES.fullmatch(name)]
