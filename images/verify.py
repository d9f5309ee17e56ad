#!/usr/bin/python3 -B
"""Checks a trainer image from inside, as its last build step and as a command: verify.py [--json].

One line per check, PASS or FAIL; exit code 1 where one failed, 2 for a call that makes no sense. It runs on the standard
library alone, because it must tell what is missing. Without a GPU and without EFA it cannot tell whether they work: it tells
that what they need is there, once, and loads.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

HOME = "opt/lustrain"
LAYERS = ("torch", "app", "code")
TARGETS = ("cpu", "cuda", "gaudi")
FOREIGN = ("infra", "node_setup", "images", "rehearsal", "tests", "pulumi", "moto", "fabric")
# Extras of pyproject.toml that the image leaves out; a module that only they use says so when it is asked for.
LEFT_OUT = ("PIL",)
PLUGIN = "libnccl-net-ofi.so"
# The driver's, which the container runtime mounts from the node; and the wheels', found through the linker's cache.
FROM_DRIVER = ("libcuda.so", "libnvidia-")
# What Debian's essential packages set: https://packages.debian.org/bookworm/passwd, mount, util-linux, libpam-modules.
SETUID = ("chage", "chfn", "chsh", "expiry", "gpasswd", "mount", "newgrp", "passwd", "su", "umount", "unix_chkpwd")
_VENDORS = ("torch", "habana", "triton", "nvidia")
_MB = 1 << 20
_SMALL = 1 << 18
_TIMEOUT_S = 300
_SHOWN = 6

# A key's armour with a key in it; of AWS's documentation, keys contain EXAMPLE, and botocore ships thousands.
_KEYS = (
    re.compile(rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----\s+(?:[\w-]+: .*\n)*\s*[A-Za-z0-9+/=]{40}"),
    re.compile(rb"(?<![A-Za-z0-9/+=_])A[KS]IA(?![A-Z0-9]*EXAMPLE)[A-Z2-7]{16}(?![A-Za-z0-9/+=_])"),
)
_MARKS = (b"PRIVATE KEY", b"AKIA", b"ASIA")
_LOGIN = re.compile(rb"://[^/\s:@]+:[^/\s@]+@|^\s*password\s*=\s*\S", re.MULTILINE)
_CREDENTIALS: tuple[tuple[re.Pattern[str], re.Pattern[bytes]], ...] = (
    (re.compile(r"(^|/)[._]?netrc$"), re.compile(rb"\bpassword\s+\S+")),
    (re.compile(r"(^|/)(pip\.conf|\.?pypirc|uv\.toml|\.git-credentials)$|(^|/)\.git/config$"), _LOGIN),
    (re.compile(r"(^|/)\.aws/(credentials|config)$"), re.compile(rb"aws_(secret_access_key|session_token)\s*=\s*\S")),
    (re.compile(r"(^|/)\.docker/config\.json$|(^|/)\.dockercfg$"), re.compile(rb'"(auth|identitytoken|password)"')),
    (re.compile(r"(^|/)etc/ssh/ssh_host_[^/]*_key$"), re.compile(rb"\S")),
)


@dataclass(frozen=True)
class Image:
    """What the checks look at; a test plants a fault in a folder and calls it the root."""

    root: Path
    target: str
    efa: str | None = None
    """The release that must be in it, empty for none, None for whatever is there."""
    budget_mb: int | None = None
    """MiB that its files may take together."""
    python: str = sys.executable
    uid: int = field(default_factory=os.getuid)

    @property
    def ours(self) -> Path:
        """Where what we answer for lies: a vendor's image is the vendor's."""
        return self.home() if self.target == "gaudi" else self.root

    def home(self, *parts: str) -> Path:
        return self.root.joinpath(HOME, *parts)

    def shown(self, path: Path) -> str:
        return f"/{path.relative_to(self.root)}"


@dataclass(frozen=True)
class Outcome:
    """What a check found: `problems` fail it, `note` says on what it passed."""

    problems: tuple[str, ...] = ()
    note: str = ""


def imports(image: Image) -> Outcome:
    """Every module of the trainer is imported by the image's Python, in a process of its own."""
    code = image.home("code")
    names = sorted(
        ".".join(file.relative_to(code).with_suffix("").parts).removesuffix(".__init__")
        for file in code.joinpath("trainer").rglob("*.py")
    )
    if not names:
        return Outcome((f"{image.shown(code)}/trainer holds no module",))
    said = _run_python(image, _IMPORT, *names)
    if isinstance(said, str):
        return Outcome((said,))
    optional = [name for name, error in said if any(f"No module named '{one}'" in error for one in LEFT_OUT)]
    problems = tuple(f"{name}: {error}" for name, error in said if name not in optional)
    without = f", {len(optional)} of them for extras that are not in it: {', '.join(optional)}" if optional else ""
    return Outcome(problems, f"{len(names)} modules{without}")


def versions(image: Image) -> Outcome:
    """Check that what is installed is what the locks say: nothing else, no other version, and no package twice in two
    versions."""
    problems, count = [], 0
    seen: dict[str, tuple[str, str]] = {}
    for layer in ("app",) if image.target == "gaudi" else ("torch", "app"):
        lock = image.home("locks", f"{layer}.txt")
        pinned_lines = lock.read_text().split() if lock.exists() else []
        pins = {_normal(name): version for name, _, version in (line.partition("==") for line in pinned_lines)}
        if not pins:
            problems.append(f"{image.shown(lock)} holds no pins to compare with")
        there = _installed(image.home(layer))
        count += len(pins)
        for name in sorted(pins.keys() | there.keys()):
            pinned, version = pins.get(name), there.get(name)
            if pinned != version:
                problems.append(f"{layer}: {name} is {version or 'missing'}, its lock says {pinned or 'nothing of it'}")
            where, other = seen.setdefault(name, (layer, version or ""))
            if version and other not in ("", version):
                problems.append(f"{name} is {other} in {where} and {version} in {layer}")
            if image.target == "gaudi" and name.startswith(_VENDORS):
                problems.append(f"{name}: the vendor's image brings its own")
    return Outcome(tuple(problems), f"{count} packages")


def one_nccl(image: Image) -> Outcome:
    """CUDA images hold one NCCL and one cudart, and torch, the linker and the wheel name the same; others hold none."""
    found = {name: _called(image.root, name) for name in ("libnccl.so", "libcudart.so")}
    if image.target != "cuda":
        many = [image.shown(file) for files in found.values() for file in files]
        return Outcome(tuple(f"{file}: not for {image.target}" for file in many), "none, as it should be")
    problems = []
    for name, files in found.items():
        if len(files) != 1:
            problems.append(f"{len(files)} of {name}: {', '.join(map(image.shown, files)) or 'none'}")
    problems += _linked(image, {"libnccl.so.2": found["libnccl.so"], "libcudart.so": found["libcudart.so"]})
    wheel = _installed(image.home("torch")).get("nvidia-nccl-cu13", "none")
    said = _run_python(image, _NCCL)
    torch = said if isinstance(said, str) else ".".join(map(str, said))
    if torch != wheel:
        problems.append(f"torch says NCCL {torch}, the wheel is {wheel}")
    return Outcome(tuple(problems), f"NCCL {wheel}")


def plugin(image: Image) -> Outcome:
    """EFA is the release that was asked for, and its NCCL plugin finds every library and can be loaded."""
    packages = image.root / "opt/amazon/efa_installed_packages"
    there = re.search(r"EFA installer version: (\S+)", packages.read_text()) if packages.is_file() else None
    version = there[1] if there else ""
    if image.efa is not None and image.efa != version:
        return Outcome((f"EFA {version or 'none'}, wanted {image.efa or 'none'}",))
    if not version:
        return Outcome(note="no EFA in this image")
    files = _called(image.root / "opt/amazon", PLUGIN)
    if not files:
        return Outcome((f"EFA {version} without {PLUGIN}",))
    said = subprocess.run(["ldd", str(files[0])], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    lines = [line.strip() for line in (said.stdout + said.stderr).splitlines()]
    missing = [line for line in lines if "not found" in line and not line.startswith(FROM_DRIVER)]
    if not missing and (loaded := _run_python(image, _LOAD, str(files[0]))):
        missing = [str(loaded)]
    return Outcome(
        tuple(f"{image.shown(files[0])}: {line}" for line in missing), f"EFA {version}, {files[0].name} loads"
    )


def only_trainer(image: Image) -> Outcome:
    """None of the operator's rooms is in the image or can be imported in it."""
    code = image.home("code")
    foreign = [path for path in code.glob("*") if path.name not in ("lustrain", "trainer")]
    foreign += [path for path in code.glob("trainer/launch/*") if path.name not in ("__init__.py", "local.py")]
    problems = [f"{image.shown(path)}: not for the trainer's image" for path in sorted(foreign)]
    said = _run_python(image, _FIND, *FOREIGN)
    problems += [said] if isinstance(said, str) else [f"{name} can be imported" for name in said]
    return Outcome(tuple(problems))


def secrets(image: Image) -> Outcome:
    """No private key, AWS key or file of credentials that this user can read."""
    problems = []
    for path, status in _files(image.ours):
        if status.st_size > _SMALL or path.suffix == ".so" or not os.access(path, os.R_OK):
            continue
        text = path.read_bytes()
        name = image.shown(path)
        if any(mark in text for mark in _MARKS) and any(rule.search(text) for rule in _KEYS):
            problems.append(f"{name}: holds a key")
        if any(file.search(name) and rule.search(text) for file, rule in _CREDENTIALS):
            problems.append(f"{name}: holds credentials")
    return Outcome(tuple(problems))


def writable(image: Image) -> Outcome:
    """Nobody but root changes a file of the image: only /tmp, /var/tmp and /run/lock are for all, ours are root's."""
    problems = []
    for path, status in _walk(image.ours, skip={image.root / one for one in ("tmp", "var/tmp", "run/lock")}):
        ours = image.home() in path.parents
        who = "all" if status.st_mode & stat.S_IWOTH else "its group" if ours and status.st_mode & stat.S_IWGRP else ""
        if who and not stat.S_ISLNK(status.st_mode):
            problems.append(f"{image.shown(path)}: {who} may write ({stat.S_IMODE(status.st_mode):04o})")
    return Outcome(tuple(problems))


def programs(image: Image) -> Outcome:
    """No server for logins, and no program that becomes another user but those of Debian's essential packages."""
    if image.target == "gaudi":
        return Outcome(note="the vendor's image")
    problems = []
    for path, status in _files(image.root):
        binary = path.parent.name in ("bin", "sbin")
        if status.st_mode & (stat.S_ISUID | stat.S_ISGID) and not (binary and path.name in SETUID):
            problems.append(f"{image.shown(path)}: becomes another user ({stat.S_IMODE(status.st_mode):04o})")
        if binary and path.name == "sshd":
            problems.append(f"{image.shown(path)}: ranks find each other by torchrun, people come in by the engine")
    return Outcome(tuple(problems))


def user(image: Image) -> Outcome:
    """Check that the image runs as somebody who is not root and has a name."""
    if image.uid == 0:
        return Outcome(("runs as root",))
    lines = [line.split(":") for line in (image.root / "etc/passwd").read_text().splitlines()]
    name = next((line[0] for line in lines if line[2] == str(image.uid)), None)
    return Outcome((), name) if name else Outcome((f"uid {image.uid} has no entry in /etc/passwd",))


def size(image: Image) -> Outcome:
    """Check that the files together stay in the target's budget, each counted once."""
    taken = {(status.st_dev, status.st_ino): status.st_size for _, status in _files(image.root)}
    used = -(-sum(taken.values()) // _MB)
    if image.budget_mb is None:
        return Outcome(note=f"{used} MiB, no budget given")
    over = f"{used} MiB, {image.budget_mb} allowed: raise budget_mb in versions.toml with the reason, or leave something out"
    return Outcome((over,) if used > image.budget_mb else (), f"{used} of {image.budget_mb} MiB")


CHECKS: dict[str, Callable[[Image], Outcome]] = {
    check.__name__.replace("_", "-"): check
    for check in (imports, versions, one_nccl, plugin, only_trainer, secrets, writable, programs, user, size)
}

# In a process apart, which an import may end.
_IMPORT = """
import importlib, json, sys
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed.append((name, f"{type(error).__name__}: {error}"))
print("\\n" + json.dumps(failed))
"""
_NCCL = "import json, torch; print('\\n' + json.dumps(torch.cuda.nccl.version()))"
# libcuda.so.1 is the driver's; a node brings it, a build machine has none.
_LOAD = """
import ctypes, json, os, sys
try:
    ctypes.CDLL(sys.argv[1], mode=os.RTLD_LAZY)
    said = ""
except OSError as error:
    said = "" if "libcuda.so" in str(error) else str(error)
print("\\n" + json.dumps(said))
"""
_FIND = """
import importlib.util, json, sys
print("\\n" + json.dumps([name for name in sys.argv[1:] if importlib.util.find_spec(name)]))
"""


def _run_python(image: Image, code: str, *arguments: str) -> list[list[str]] | str:
    """Return what the code prints as its last line of JSON; a text that says why, where there is none."""
    environment = dict(os.environ)
    if image.root != Path("/"):
        environment["PYTHONPATH"] = os.pathsep.join(str(image.home(layer)) for layer in LAYERS)
    # -P, because a folder one happens to stand in is not the image.
    command = [image.python, "-B", "-P", "-c", code, *arguments]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment, check=False)
        answer: list[list[str]] | str = json.loads((said.stdout.splitlines() or [""])[-1])
        return answer
    except subprocess.TimeoutExpired:
        return f"python: no answer within {_TIMEOUT_S} s"
    except ValueError:
        last = said.stderr.strip().splitlines()[-1:] or [f"exit code {said.returncode}"]
        return f"python: {last[0]}"


def _linked(image: Image, wanted: dict[str, list[Path]]) -> Iterator[str]:
    """Where the linker's cache leads for a name, against the one file there is."""
    command = ["/sbin/ldconfig", "-p", "-C", str(image.root / "etc/ld.so.cache")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    for name, files in wanted.items():
        places = re.findall(rf"^\s*{re.escape(name)} .*=> (\S+)$", said.stdout, re.MULTILINE)
        real = {image.root.joinpath(place.lstrip("/")).resolve() for place in places}
        if not places:
            yield f"the linker does not find {name}"
        elif real - {file.resolve() for file in files}:
            yield f"the linker finds {name} as {', '.join(places)}"


def _called(root: Path, name: str) -> list[Path]:
    """Real files called `name` or `name`.N below a folder; links to them do not count."""
    there = re.compile(rf"{re.escape(name)}(\.\d+)*")
    return sorted(path for path, _ in _files(root) if there.fullmatch(path.name))


def _files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    return ((path, status) for path, status in _walk(root) if stat.S_ISREG(status.st_mode))


def _walk(root: Path, skip: Sequence[Path] | set[Path] = ()) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything below a folder that lies in the image: no mounts such as /proc, nothing that cannot be read."""
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except (PermissionError, FileNotFoundError):
            continue
        for entry in entries:
            path = Path(entry.path)
            if path in skip or path.is_mount():
                continue
            yield path, entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                waiting.append(path)


def _installed(folder: Path) -> dict[str, str]:
    found = {}
    for metadata in folder.glob("*.dist-info/METADATA"):
        text = metadata.read_text(errors="replace")
        name, version = (re.search(rf"^{key}: (.+)$", text, re.MULTILINE) for key in ("Name", "Version"))
        if name and version:
            found[_normal(name[1].strip())] = version[1].strip()
    return found


def _normal(name: str) -> str:
    """As https://packaging.python.org/en/latest/specifications/name-normalization/ says."""
    return re.sub(r"[-_.]+", "-", name).lower()


def run(image: Image, names: Sequence[str]) -> dict[str, Outcome]:
    """Run the checks of those names; a check that breaks has failed."""
    found = {}
    for name in names:
        try:
            found[name] = CHECKS[name](image)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            found[name] = Outcome((f"could not look: {type(error).__name__}: {error}",))
    return found


def lines(found: dict[str, Outcome]) -> Iterator[str]:
    """PASS or FAIL, the check, and what it found."""
    for name, outcome in found.items():
        yield from (f"FAIL {name}: {one}" for one in outcome.problems[:_SHOWN])
        if len(outcome.problems) > _SHOWN:
            yield f"FAIL {name}: and {len(outcome.problems) - _SHOWN} more; --json shows all"
        if not outcome.problems:
            yield f"PASS {name}" + (f": {outcome.note}" if outcome.note else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="verify.py", description="Checks a trainer image from inside.")
    parser.add_argument(
        "--target", choices=TARGETS, default=os.environ.get("LUSTRAIN_TARGET"), help="default: the image's"
    )
    parser.add_argument("--only", default=",".join(CHECKS), help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--efa", help="release that must be in it; empty: none must be")
    parser.add_argument("--budget-mb", default="", help="MiB that the files may take; empty: no budget")
    parser.add_argument("--root", type=Path, default=Path("/"), help="another image's root, unpacked")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    names = [name for name in given.only.split(",") if name]
    unknown = [name for name in names if name not in CHECKS]
    if unknown or not names:
        parser.error(f"--only {given.only}: {', '.join(unknown) or 'nothing'}: unknown; allowed: {', '.join(CHECKS)}")
    if given.target is None:
        parser.error(f"--target: not given, and LUSTRAIN_TARGET is not set; allowed: {', '.join(TARGETS)}")
    if given.budget_mb and not given.budget_mb.isdigit():
        parser.error(f"--budget-mb {given.budget_mb}: not a number of MiB")
    budget = int(given.budget_mb) if given.budget_mb else None
    found = run(Image(given.root, given.target, given.efa, budget), names)
    failed = any(outcome.problems for outcome in found.values())
    if given.json:
        shown = {name: asdict(outcome) for name, outcome in found.items()}
        print(json.dumps({"target": given.target, "ok": not failed, "checks": shown}, indent=2))
    else:
        print("\n".join(lines(found)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
