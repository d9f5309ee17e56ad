"""The locks of `images/locks`: what pip-style tools install into a layer, each package at one version and with its hashes.

They are made from `versions.toml`, pyproject.toml and `.ci/constraints.txt`, so that an image holds what the tests ran with.
uv notes the hashes of every platform's wheels, but of torch's CPU build only of those that `links` shows: torch-cpu.lock, made
where the x86_64 wheel alone was at hand, serves linux/amd64.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from images.plan import versions as all_versions
from images.plan.versions import Versions
from lustrain.files import write_whole
from lustrain.problem import FAILED, UNREACHABLE, UserError, plain, problem

ROOT = Path(__file__).parents[2]
FOLDER = Path("images/locks")
CONSTRAINTS = Path(".ci/constraints.txt")
SITE_WHEELS = Path("images/site/wheels")
TORCH = ("torch-cpu", "torch-cuda")
NAMES = ("tools", *TORCH, "app")
"""Locks stand in the order in which they are made: app must agree with what torch brings."""
PLATFORM = "x86_64-manylinux_2_28"
"""linux/amd64, as uv calls it; 2_28 is the oldest glibc that torch's wheels run with."""
RENEW = "fab image-lock"
PATIENCE_S = 300.0

_FROM = "# from: "
_HEAD = f"# Made by `{RENEW}`; edit what it is made from instead."
_PIN = re.compile(r"([a-z0-9]+(?:-[a-z0-9]+)*)==(\d[A-Za-z0-9.!+]*)(?: --hash=sha256:[0-9a-f]{64})+")


@dataclass(frozen=True)
class Lock:
    """A lock file, as pip and uv read it."""

    inputs: tuple[str, ...]
    """What it was made from, a requirement or an option of the resolver each."""
    versions: Mapping[str, str]
    """By package; names have small letters, digits, single dashes."""
    text: str


def parse(text: str, path: str) -> Lock:
    """Read a lock's text; UserError with one line for each that is not exactly one version with its hashes."""
    inputs: list[str] = []
    versions: dict[str, str] = {}
    problems: list[str] = []
    for number, line in _logical_lines(text):
        if line.startswith(_FROM):
            inputs.append(line.removeprefix(_FROM))
        elif line.startswith("#"):
            continue
        elif not (pin := _PIN.fullmatch(line)):
            form = "name==version with --hash=sha256:… for each file"
            problems.append(problem(f"{path}:{number}", line, "is not a pinned package", allowed=form, fix=RENEW))
        elif pin[1] in versions:
            problems.append(problem(f"{path}:{number}", f"{pin[1]}=={pin[2]}", "is there twice", fix=RENEW))
        else:
            versions[pin[1]] = pin[2]
    if problems:
        raise UserError(problems)
    return Lock(tuple(inputs), versions, text)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text, with what a backslash continues joined; neither empty lines nor blanks around."""
    for match in re.finditer(r"(?:[^\n]*\\[ \t]*\n)*[^\n]*", text):
        if line := " ".join(re.sub(r"\\[ \t]*(\n|$)", " ", match[0]).split()):
            yield text.count("\n", 0, match.start()) + 1, line


def read(name: str, root: Path = ROOT) -> Lock:
    """Return the lock `name` as it is on disk. UserError where it is missing or no lock."""
    path = f"{FOLDER / name}.lock"
    return parse(_text(root, path, RENEW), path)


def inputs(name: str, versions: Versions, root: Path = ROOT) -> tuple[str, ...]:
    """Return what the lock `name` is made from today."""
    depends = sorted(_dependencies(root))
    numpy = [depend for depend in depends if _name(depend) == "numpy"]
    wanted = {
        "tools": (f"uv=={versions.uv}",),
        # torch uses numpy where it is there, and it changes as rarely: in this layer it costs no one a pull.
        "torch-cpu": (f"torch=={versions.torch}+cpu", *numpy),
        "torch-cuda": (f"torch=={versions.torch}", *numpy),
        "app": tuple(item for item in depends if _name(item) != "torch"),
    }
    if name not in wanted:
        raise UserError(problem("lock", name, "unknown", allowed=", ".join(NAMES)))
    return (f"--python-version {versions.python} --python-platform {PLATFORM}", *wanted[name])


def check(root: Path = ROOT, versions: Versions | None = None) -> Sequence[str]:
    """Return which locks are stale and why, one line each; none where all are as they should be. It needs no network."""
    versions = versions or all_versions.load()
    locks: dict[str, Lock] = {}
    lines: list[str] = []
    for name in NAMES:
        try:
            locks[name] = read(name, root)
        except UserError as error:
            lines += error.problems
    tested = _constraints(root)
    for name, lock in locks.items():
        lines += _changed(name, lock, inputs(name, versions, root))
        lines += _untested(name, lock, tested)
    if len(locks) == len(NAMES):
        lines += _disagreeing(locks)
        lines += _not_as_written(locks["torch-cuda"], versions)
    return lines


def _changed(name: str, lock: Lock, now: Sequence[str]) -> Iterator[str]:
    gone, new = [line for line in lock.inputs if line not in now], [line for line in now if line not in lock.inputs]
    if gone or new:
        why = f"is stale: made from {', '.join(gone) or 'less'}, now configured: {', '.join(new) or 'less'}"
        yield f"{FOLDER / name}.lock {why}; fix: {RENEW}"


def _untested(name: str, lock: Lock, tested: Mapping[str, str]) -> list[str]:
    return [
        problem(f"{FOLDER / name}.lock {package}", version, f"{CONSTRAINTS} tests {tested[package]}", fix=RENEW)
        for package, version in lock.versions.items()
        if package in tested and version.partition("+")[0] != tested[package]
    ]


def _disagreeing(locks: Mapping[str, Lock]) -> Iterator[str]:
    for name, version in locks["app"].versions.items():
        theirs = {torch: locks[torch].versions[name] for torch in TORCH if name in locks[torch].versions}
        why = ""
        if any(other != version for other in theirs.values()):
            why = f"the locks of torch hold {theirs}, and one would hide the other"
        elif len(theirs) == len(TORCH):
            why = "the locks of torch hold it already: it would be shipped twice"
        if why:
            yield problem(f"{FOLDER}/app.lock {name}", version, why, fix=RENEW)


def _not_as_written(cuda: Lock, versions: Versions) -> Iterator[str]:
    """versions.toml says what torch's wheels bring; they decide."""
    packages = {"nccl": f"nvidia-nccl-cu{versions.cuda.partition('.')[0]}", "cuda": "nvidia-cuda-runtime"}
    for key, package in packages.items():
        value, brought = getattr(versions, key), cuda.versions.get(package, "none")
        if not f"{brought}.".startswith(f"{value}."):
            fix = "write what the lock brings"
            yield problem(f"versions.toml {key}", value, f"torch-cuda.lock brings {brought}", fix=fix)


def resolve(
    name: str,
    versions: Versions,
    root: Path = ROOT,
    *,
    agree_with: Sequence[Lock] = (),
    links: str | None = None,
    upgrade: bool = False,
) -> Lock:
    """Ask the package index for a lock: what the present one holds stays, unless `upgrade` or the constraints say otherwise.

    `links` is where the CPU build of torch lies, a page or a folder of wheels; default: `torch_cpu_links` and, before it,
    the site's wheels. UserError where there is no solution or no index.
    """
    options, *requirements = inputs(name, versions, root)
    command = [*options.split(), "--constraint", str(root / CONSTRAINTS)]
    shared = set.intersection(*(set(lock.versions) for lock in agree_with)) if agree_with else set()
    for package in sorted(shared):
        command += ["--no-emit-package", package]
    if name == "torch-cpu":
        site = [str(root / SITE_WHEELS)] if any((root / SITE_WHEELS).glob("*.whl")) else []
        for place in [links] if links else [*site, versions.torch_cpu_links]:
            command += ["--find-links", place]
    with tempfile.TemporaryDirectory() as folder:
        out, wanted, agreed = (Path(folder) / file for file in ("lock", "in", "constraints"))
        if not upgrade and (root / FOLDER / f"{name}.lock").exists():
            out.write_text(read(name, root).text, encoding="utf-8")
        wanted.write_text("\n".join(requirements) + "\n", encoding="utf-8")
        pins = [pin for lock in agree_with for pin in lock.versions.items()]
        agreed.write_text("".join(f"{package}=={version.partition('+')[0]}\n" for package, version in pins))
        _compile(name, [*command, "--constraint", str(agreed), "--output-file", str(out), str(wanted)])
        head = "\n".join([_HEAD, *(f"{_FROM}{line}" for line in (options, *requirements))])
        return parse(f"{head}\n{out.read_text(encoding='utf-8')}", str(FOLDER / f"{name}.lock"))


def write_all(
    root: Path = ROOT,
    *,
    links: str | None = None,
    upgrade: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Resolve every lock and write those that changed, all or none; return their names. `say` is called with the one being
    resolved."""
    versions = all_versions.load(root / "images/versions.toml")
    locks: dict[str, Lock] = {}
    for name in NAMES:
        say(f"{name}: asking the package index")
        torch = [locks[item] for item in TORCH] if name == "app" else []
        locks[name] = resolve(name, versions, root, agree_with=torch, links=links, upgrade=upgrade)
    if wrong := [*_disagreeing(locks), *_not_as_written(locks["torch-cuda"], versions)]:
        raise UserError(wrong, FAILED)
    changed = []
    for name, lock in locks.items():
        path = root / FOLDER / f"{name}.lock"
        if not path.exists() or path.read_text(encoding="utf-8") != lock.text:
            changed.append(name)
            write_whole(path, lock.text.encode())
    return changed


def _compile(name: str, options: Sequence[str]) -> None:
    path = f"{FOLDER / name}.lock"
    try:
        from uv import find_uv_bin

        command = [find_uv_bin(), "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate"]
        done = subprocess.run(
            [*command, "--generate-hashes", *options], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except (ImportError, FileNotFoundError):
        raise UserError(f"{path}: uv is not installed; fix: pip install -e '.[dev]'", FAILED) from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{path}: the package index did not answer within {PATIENCE_S:.0f} s; fix: try again", UNREACHABLE
        ) from None
    if done.returncode:
        why = " ".join(done.stderr.split())
        raise UserError(plain(f"{path}: cannot be resolved: {why[:1000]}"), FAILED)


def _dependencies(root: Path) -> list[str]:
    try:
        return [str(line) for line in tomllib.loads(_text(root, "pyproject.toml"))["project"]["dependencies"]]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise UserError(plain(f"pyproject.toml: [project] dependencies cannot be read: {error}")) from None


def _constraints(root: Path) -> dict[str, str]:
    """Name → version that the tests ran with."""
    lines = [line.partition("#")[0].strip().partition("==") for line in _text(root, CONSTRAINTS).splitlines()]
    return {canonicalize_name(name): version for name, same, version in lines if same}


def _text(root: Path, path: str | Path, fix: str = "run this in a complete checkout") -> str:
    try:
        return (root / path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(plain(f"{path}: cannot be read: {error}; fix: {fix}")) from None


def _name(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)
