#!/usr/bin/python3 -B
"""Checks of a trainer image from inside, as its last build step and as a command: verify.py [--json].

It prints a line for each check, ok or failed. Exit code: 1 where a check failed, 2 for wrong arguments. It runs on the
standard library and `lustrain/leaks.py` alone, because it must report what is missing. Without a GPU and without EFA it
cannot try them: it checks that what they need is in the image, once, and loads.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path

from lustrain.leaks import secrets_in

HOME = "opt/lustrain"
LAYERS = ("torch", "app", "code")
TARGETS = ("cpu", "cuda", "gaudi")
FOREIGN = ("infra", "node_setup", "images", "launch", "planner", "rehearsal", "tests", "pulumi", "moto", "fabric")
# From extras of pyproject.toml that the image leaves out; only modules for these extras import it.
LEFT_OUT = ("PIL",)
PLUGIN = "libnccl-net-ofi.so"
# The container runtime mounts the driver's from the node; the wheels' come through the linker's cache.
FROM_DRIVER = ("libcuda.so", "libnvidia-")
# What Debian's essential packages set: https://packages.debian.org/bookworm/passwd, mount, util-linux, libpam-modules.
SETUID = ("chage", "chfn", "chsh", "expiry", "gpasswd", "mount", "newgrp", "passwd", "su", "umount", "unix_chkpwd")
_VENDORS = ("torch", "habana", "triton", "nvidia")
_MB = 1 << 20
_SMALL = 1 << 18
_TIMEOUT_S = 300
_SHOWN = 6


@dataclass(frozen=True)
class Image:
    """The image under check; a test plants a fault in a folder and gives it as the root."""

    root: Path
    target: str
    efa: str | None = None
    """The release that must be in it: empty for none, None for any."""
    budget_mb: int | None = None
    """The most MiB that its files may take together."""
    python: str = sys.executable
    uid: int = field(default_factory=os.getuid)

    @property
    def ours(self) -> Path:
        """The folder that we answer for: all of the image, or on a vendor's image only what we add."""
        return self.home() if self.target == "gaudi" else self.root

    def home(self, *parts: str) -> Path:
        return self.root.joinpath(HOME, *parts)

    def shown(self, path: Path) -> str:
        return f"/{path.relative_to(self.root)}"


@dataclass(frozen=True)
class Outcome:
    """The result of a check: it fails where there are `problems`; `note` is what it passed on."""

    problems: tuple[str, ...] = ()
    note: str = ""


def imports(image: Image) -> Outcome:
    """Import every module of the trainer by the image's Python, in a separate process."""
    code = image.home("code")
    names = sorted(
        ".".join(file.relative_to(code).with_suffix("").parts).removesuffix(".__init__")
        for file in code.joinpath("trainer").rglob("*.py")
    )
    if not names:
        return Outcome((f"{image.shown(code)}/trainer holds no module",))
    failed = _run_python(image, _IMPORT, *names)
    if isinstance(failed, str):
        return Outcome((failed,))
    optional = [name for name, error in failed if any(f"No module named '{extra}'" in error for extra in LEFT_OUT)]
    problems = tuple(f"{name}: {error}" for name, error in failed if name not in optional)
    without = f", {len(optional)} for extras that the image leaves out: {', '.join(optional)}" if optional else ""
    return Outcome(problems, f"{len(names)} modules{without}")


def versions(image: Image) -> Outcome:
    """Compare installed packages with the locks: nothing else, no other version, no package in two versions."""
    problems, count = [], 0
    seen: dict[str, tuple[str, str]] = {}
    for layer in ("app",) if image.target == "gaudi" else ("torch", "app"):
        lock = image.home("locks", f"{layer}.txt")
        pinned_lines = lock.read_text().split() if lock.exists() else []
        pins = {_normal(name): version for name, _, version in (line.partition("==") for line in pinned_lines)}
        if not pins:
            problems.append(f"{image.shown(lock)} holds no pins to compare with")
        installed = _installed(image.home(layer))
        count += len(pins)
        for name in sorted(pins.keys() | installed.keys()):
            pinned, version = pins.get(name), installed.get(name)
            if pinned != version:
                problems.append(
                    f"{layer}: {name} is {version or 'missing'}, its lock has {pinned or 'no such package'}"
                )
            where, other = seen.setdefault(name, (layer, version or ""))
            if version and other not in ("", version):
                problems.append(f"{name} is {other} in {where} and {version} in {layer}")
            if image.target == "gaudi" and name.startswith(_VENDORS):
                problems.append(f"{name}: the vendor's image brings its own")
    return Outcome(tuple(problems), f"{count} packages")


def one_nccl(image: Image) -> Outcome:
    """Check that a CUDA image holds one NCCL, the same for torch, linker and wheel, and one cudart; others none."""
    libraries = {name: _called(image.root, name) for name in ("libnccl.so", "libcudart.so")}
    if image.target != "cuda":
        excess = [image.shown(file) for files in libraries.values() for file in files]
        return Outcome(tuple(f"{file}: not for {image.target}" for file in excess), "none, as it should be")
    problems = []
    for name, files in libraries.items():
        if len(files) != 1:
            problems.append(f"{len(files)} of {name}: {', '.join(map(image.shown, files)) or 'none'}")
    problems += _linked(image, {"libnccl.so.2": libraries["libnccl.so"], "libcudart.so": libraries["libcudart.so"]})
    wheel = _installed(image.home("torch")).get("nvidia-nccl-cu13", "none")
    answer = _run_python(image, _NCCL)
    torch = answer if isinstance(answer, str) else ".".join(map(str, answer))
    if torch != wheel:
        problems.append(f"torch uses NCCL {torch}, the wheel is {wheel}")
    return Outcome(tuple(problems), f"NCCL {wheel}")


def plugin(image: Image) -> Outcome:
    """Check that EFA is the wanted release, and that its NCCL plugin finds its libraries and loads."""
    packages = image.root / "opt/amazon/efa_installed_packages"
    match = re.search(r"EFA installer version: (\S+)", packages.read_text()) if packages.is_file() else None
    version = match[1] if match else ""
    if image.efa is not None and image.efa != version:
        return Outcome((f"EFA {version or 'none'}, wanted {image.efa or 'none'}",))
    if not version:
        return Outcome(note="no EFA in this image")
    files = _called(image.root / "opt/amazon", PLUGIN)
    if not files:
        return Outcome((f"EFA {version} without {PLUGIN}",))
    ldd = subprocess.run(["ldd", str(files[0])], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    libraries = [line.strip() for line in (ldd.stdout + ldd.stderr).splitlines()]
    missing = [line for line in libraries if "not found" in line and not line.startswith(FROM_DRIVER)]
    if not missing and (error := _run_python(image, _LOAD, str(files[0]))):
        missing = [str(error)]
    return Outcome(
        tuple(f"{image.shown(files[0])}: {line}" for line in missing), f"EFA {version}, {files[0].name} loads"
    )


def only_trainer(image: Image) -> Outcome:
    """Check that no code of the operator's side is in the image or can be imported in it."""
    code = image.home("code")
    foreign = [path for path in code.glob("*") if path.name not in ("lustrain", "trainer")]
    problems = [f"{image.shown(path)}: not for the trainer's image" for path in sorted(foreign)]
    present = _run_python(image, _FIND, *FOREIGN)
    problems += [present] if isinstance(present, str) else [f"{name} can be imported" for name in present]
    return Outcome(tuple(problems))


def secrets(image: Image) -> Outcome:
    """Look for keys, tokens and credentials in every file that this user can read."""
    texts = (
        (image.shown(path), path.read_bytes())
        for path, status in _files(image.ours)
        if status.st_size <= _SMALL and path.suffix != ".so" and os.access(path, os.R_OK)
    )
    return Outcome(tuple(f"{leak.where}: holds {leak.what}" for leak in secrets_in(texts)))


def writable(image: Image) -> Outcome:
    """Check that only root may write files: only /tmp, /var/tmp and /run/lock are for all."""
    problems = []
    for path, status in _walk(image.ours, skip={image.root / name for name in ("tmp", "var/tmp", "run/lock")}):
        ours = image.home() in path.parents
        who = "all" if status.st_mode & stat.S_IWOTH else "its group" if ours and status.st_mode & stat.S_IWGRP else ""
        if who and not stat.S_ISLNK(status.st_mode):
            problems.append(f"{image.shown(path)}: {who} may write ({stat.S_IMODE(status.st_mode):04o})")
    return Outcome(tuple(problems))


def programs(image: Image) -> Outcome:
    """Check that there is no login server, and no setuid program but those of Debian's essential packages."""
    if image.target == "gaudi":
        return Outcome(note="the vendor's image")
    problems = []
    for path, status in _files(image.root):
        binary = path.parent.name in ("bin", "sbin")
        if status.st_mode & (stat.S_ISUID | stat.S_ISGID) and not (binary and path.name in SETUID):
            problems.append(f"{image.shown(path)}: becomes another user ({stat.S_IMODE(status.st_mode):04o})")
        if binary and path.name == "sshd":
            problems.append(
                f"{image.shown(path)}: a login server; ranks need none (torchrun), and people enter with docker exec"
            )
    return Outcome(tuple(problems))


def user(image: Image) -> Outcome:
    """Check that the image runs as a user other than root who has a name."""
    if image.uid == 0:
        return Outcome(("runs as root",))
    lines = [line.split(":") for line in (image.root / "etc/passwd").read_text().splitlines()]
    name = next((line[0] for line in lines if line[2] == str(image.uid)), None)
    return Outcome((), name) if name else Outcome((f"uid {image.uid} has no entry in /etc/passwd",))


def size(image: Image) -> Outcome:
    """Check that the files together, each counted once, are within the target's budget."""
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

# In a separate process, since an import may end it.
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
    problem = ""
except OSError as error:
    problem = "" if "libcuda.so" in str(error) else str(error)
print("\\n" + json.dumps(problem))
"""
_FIND = """
import importlib.util, json, sys
print("\\n" + json.dumps([name for name in sys.argv[1:] if importlib.util.find_spec(name)]))
"""


def _run_python(image: Image, code: str, *arguments: str) -> list[list[str]] | str:
    """Return the JSON in the last line that the code prints; a text with the reason where there is none."""
    environment = dict(os.environ)
    if image.root != Path("/"):
        environment["PYTHONPATH"] = os.pathsep.join(str(image.home(layer)) for layer in LAYERS)
    # -P, because the working folder is not part of the image.
    command = [image.python, "-B", "-P", "-c", code, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment, check=False)
        answer: list[list[str]] | str = json.loads((done.stdout.splitlines() or [""])[-1])
        return answer
    except subprocess.TimeoutExpired:
        return f"python: no answer within {_TIMEOUT_S} s"
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return f"python: {last[0]}"


def _linked(image: Image, wanted: dict[str, list[Path]]) -> Iterator[str]:
    """Compare where the linker's cache leads for each name with the files of that name."""
    command = ["/sbin/ldconfig", "-p", "-C", str(image.root / "etc/ld.so.cache")]
    cache = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False).stdout
    for name, files in wanted.items():
        places = re.findall(rf"^\s*{re.escape(name)} .*=> (\S+)$", cache, re.MULTILINE)
        real = {image.root.joinpath(place.lstrip("/")).resolve() for place in places}
        if not places:
            yield f"the linker does not find {name}"
        elif real - {file.resolve() for file in files}:
            yield f"the linker finds {name} as {', '.join(places)}"


def _called(root: Path, name: str) -> list[Path]:
    """Return the files called `name` or `name`.N below a folder; links do not count."""
    wanted = re.compile(rf"{re.escape(name)}(\.\d+)*")
    return sorted(path for path, _ in _files(root) if wanted.fullmatch(path.name))


def _files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    return ((path, status) for path, status in _walk(root) if stat.S_ISREG(status.st_mode))


def _walk(root: Path, skip: Collection[Path] = ()) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield all below a folder that is in the image: no mounts such as /proc, nothing that cannot be read."""
    for folder, folders, files in os.walk(root):
        paths = [Path(folder, name) for name in sorted([*folders, *files])]
        kept = [path for path in paths if path not in skip and not path.is_mount()]
        folders[:] = [path.name for path in kept if path.name in folders]
        yield from ((path, path.lstat()) for path in kept)


def _installed(folder: Path) -> dict[str, str]:
    packages = [package for package in distributions(path=[str(folder)]) if package.read_text("METADATA")]
    return {_normal(package.name): package.version for package in packages}


def _normal(name: str) -> str:
    """Follow https://packaging.python.org/en/latest/specifications/name-normalization/."""
    return re.sub(r"[-_.]+", "-", name).lower()


def run(image: Image, names: Sequence[str]) -> dict[str, Outcome]:
    """Run the checks of those names; a check that cannot be carried out has failed."""
    outcomes = {}
    for name in names:
        try:
            outcomes[name] = CHECKS[name](image)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            outcomes[name] = Outcome((f"could not be checked: {type(error).__name__}: {error}",))
    return outcomes


def lines(outcomes: dict[str, Outcome]) -> Iterator[str]:
    """Yield ok or failed, the check, and its problems or its note."""
    for name, outcome in outcomes.items():
        yield from (f"failed {name}: {problem}" for problem in outcome.problems[:_SHOWN])
        if len(outcome.problems) > _SHOWN:
            yield f"failed {name}: and {len(outcome.problems) - _SHOWN} more; --json shows all"
        if not outcome.problems:
            yield f"ok {name}" + (f": {outcome.note}" if outcome.note else "")


def _checks(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := ", ".join(name for name in names if name not in CHECKS) or ("" if names else "nothing"):
        raise argparse.ArgumentTypeError(f"{text}: {unknown}: unknown; allowed: {', '.join(CHECKS)}")
    return names


def _mebibytes(text: str) -> int | None:
    if text and not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: not a number of MiB")
    return int(text) if text else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="verify.py", description="Checks a trainer image from inside.")
    target = os.environ.get("LUSTRAIN_TARGET")
    parser.add_argument("--target", choices=TARGETS, default=target, help="default: LUSTRAIN_TARGET, which images set")
    parser.add_argument("--only", type=_checks, default=list(CHECKS), help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--efa", help="the release that must be in the image; empty: no EFA")
    parser.add_argument("--budget-mb", type=_mebibytes, help="the most MiB that the files may take; empty: no budget")
    parser.add_argument("--root", type=Path, default=Path("/"), help="root of an image that is unpacked elsewhere")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    if given.target is None:
        parser.error(f"--target: not given, and LUSTRAIN_TARGET is not set; allowed: {', '.join(TARGETS)}")
    outcomes = run(Image(given.root, given.target, given.efa, given.budget_mb), given.only)
    failed = any(outcome.problems for outcome in outcomes.values())
    if given.json:
        checks = {name: asdict(outcome) for name, outcome in outcomes.items()}
        print(json.dumps({"target": given.target, "ok": not failed, "checks": checks}, indent=2))
    else:
        print("\n".join(lines(outcomes)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
