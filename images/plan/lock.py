"""The locks of `images/locks`: what pip-style tools install into a layer, each package at one version and with its hashes.

They are made from `versions.toml`, pyproject.toml and `.ci/constraints.txt`, so that an image holds what the tests ran with.
uv notes the hashes of every platform's wheels, but of torch's CPU build only of those that `links` shows: made where the x86_64
wheel alone was at hand, torch-cpu.lock serves linux/amd64 until `resolve(…, platform=ARM64)` sees the other.
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
from lustrain.problem import FAILED, UserError, plain, problem

ROOT = Path(__file__).parents[2]
FOLDER = Path("images/locks")
CONSTRAINTS = Path(".ci/constraints.txt")
SITE_WHEELS = Path("images/site/wheels")
TORCH = ("torch-cpu", "torch-cuda")
NAMES = ("tools", *TORCH, "app")
"""In the order they are made: app must agree with what torch brings."""
AMD64, ARM64 = "x86_64-manylinux_2_28", "aarch64-manylinux_2_28"
"""As uv calls them; 2_28 is the oldest glibc that torch's wheels run with."""
RENEW = "fab image-lock"
PATIENCE_S = 300.0

_FROM = "# from: "
_HEAD = f"# Made by `{RENEW}`; edit what it is made from instead."
_PIN = re.compile(r"([a-z0-9]+(?:-[a-z0-9]+)*)==(\d[A-Za-z0-9.!+]*)")
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")


@dataclass(frozen=True)
class Pin:
    """One package of a lock."""

    name: str
    """Normalised: small letters, digits, single dashes."""
    version: str
    hashes: tuple[str, ...]
    """sha256:… of each file of that version."""


@dataclass(frozen=True)
class Lock:
    """A lock file."""

    inputs: tuple[str, ...]
    """What it was made from, a requirement or an option of the resolver each."""
    pins: tuple[Pin, ...]

    @property
    def versions(self) -> dict[str, str]:
        return {pin.name: pin.version for pin in self.pins}

    def text(self) -> str:
        """As a file that pip and uv read."""
        lines = [_HEAD, *(f"{_FROM}{one}" for one in self.inputs)]
        for pin in self.pins:
            lines.append(" \\\n".join([f"{pin.name}=={pin.version}", *(f"    --hash={one}" for one in pin.hashes)]))
        return "\n".join(lines) + "\n"


def parse(text: str, path: str) -> Lock:
    """Read a lock's text; UserError with one line for each that is not exactly one version with its hashes."""
    inputs: list[str] = []
    pins: list[Pin] = []
    problems: list[str] = []
    for number, line in _logical_lines(text):
        place = f"{path}:{number}"
        if line.startswith(_FROM):
            inputs.append(line.removeprefix(_FROM))
        if line.startswith("#"):
            continue
        first, *rest = line.split()
        pin, hashes = _PIN.fullmatch(first), [_HASH.fullmatch(one) for one in rest]
        if not pin or None in hashes:
            form = "name==version with --hash=sha256:… for each file"
            problems.append(problem(place, line, "is not a pinned package", allowed=form, fix=RENEW))
        elif not hashes:
            problems.append(problem(place, line, "has no hash, so anything could be installed for it", fix=RENEW))
        elif any(one.name == pin[1] for one in pins):
            problems.append(problem(place, first, "is there twice", fix=RENEW))
        else:
            pins.append(Pin(pin[1], pin[2], tuple(one[1] for one in hashes if one)))
    if problems:
        raise UserError(problems)
    return Lock(tuple(inputs), tuple(pins))


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text, with what a backslash continues joined; neither empty lines nor blanks around."""
    for match in re.finditer(r"(?:[^\n]*\\[ \t]*\n)*[^\n]*", text):
        if line := " ".join(re.sub(r"\\[ \t]*(\n|$)", " ", match[0]).split()):
            yield text.count("\n", 0, match.start()) + 1, line


def read(name: str, root: Path = ROOT) -> Lock:
    """Return the lock `name` as it is on disk. UserError where it is missing or no lock."""
    path = FOLDER / f"{name}.lock"
    try:
        return parse((root / path).read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(plain(f"{path}: cannot be read: {error}; fix: {RENEW}")) from None


def inputs(name: str, versions: Versions, root: Path = ROOT, platform: str = AMD64) -> tuple[str, ...]:
    """Return what the lock `name` is made from today."""
    depends = sorted(_dependencies(root))
    numpy = [one for one in depends if _name(one) == "numpy"]
    wanted = {
        "tools": (f"uv=={versions.uv}",),
        # torch uses numpy where it is there, and it changes as rarely: in this layer it costs no one a pull.
        "torch-cpu": (f"torch=={versions.torch}+cpu", *numpy),
        "torch-cuda": (f"torch=={versions.torch}", *numpy),
        "app": tuple(one for one in depends if _name(one) != "torch"),
    }
    if name not in wanted:
        raise UserError(problem("lock", name, "unknown", allowed=", ".join(NAMES)))
    return (f"--python-version {versions.python} --python-platform {platform}", *wanted[name])


def check(root: Path = ROOT, versions: Versions | None = None) -> Sequence[str]:
    """Which locks are stale and why, one line each; needs no network. Nothing: all are as they should be."""
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


def _changed(name: str, lock: Lock, now: Sequence[str]) -> list[str]:
    gone, new = [one for one in lock.inputs if one not in now], [one for one in now if one not in lock.inputs]
    if not gone and not new:
        return []
    why = f"is stale: made from {', '.join(gone) or 'less'}, now asked for {', '.join(new) or 'less'}"
    return [f"{FOLDER / name}.lock {why}; fix: {RENEW}"]


def _untested(name: str, lock: Lock, tested: Mapping[str, str]) -> list[str]:
    return [
        problem(f"{FOLDER / name}.lock {pin.name}", pin.version, f"{CONSTRAINTS} tests {tested[pin.name]}", fix=RENEW)
        for pin in lock.pins
        if pin.name in tested and pin.version.partition("+")[0] != tested[pin.name]
    ]


def _disagreeing(locks: Mapping[str, Lock]) -> Sequence[str]:
    lines = []
    for name, version in locks["app"].versions.items():
        theirs = {one: locks[one].versions[name] for one in TORCH if name in locks[one].versions}
        path = f"{FOLDER}/app.lock {name}"
        if any(other != version for other in theirs.values()):
            lines.append(
                problem(path, version, f"the locks of torch hold {theirs}, and one would hide the other", fix=RENEW)
            )
        elif len(theirs) == len(TORCH):
            lines.append(
                problem(path, version, "the locks of torch hold it already: it would be shipped twice", fix=RENEW)
            )
    return lines


def _not_as_written(cuda: Lock, versions: Versions) -> Sequence[str]:
    """versions.toml says what torch's wheels bring; they decide."""
    brings = cuda.versions
    nccl = brings.get(f"nvidia-nccl-cu{versions.cuda.partition('.')[0]}", "none")
    runtime = brings.get("nvidia-cuda-runtime", "none")
    lines = []
    for key, value, found in (("nccl", versions.nccl, nccl), ("cuda", versions.cuda, runtime)):
        if found != value and not found.startswith(f"{value}."):
            why = f"torch-cuda.lock brings {found}"
            lines.append(problem(f"versions.toml {key}", value, why, fix="write what the lock brings"))
    return lines


def resolve(
    name: str,
    versions: Versions,
    root: Path = ROOT,
    *,
    platform: str = AMD64,
    agree_with: Sequence[Lock] = (),
    links: str | None = None,
    upgrade: bool = False,
) -> Lock:
    """Ask the package index for a lock: what the present one holds stays, unless `upgrade` or the constraints say otherwise.

    `links` is where the CPU build of torch is found, a page or a folder of wheels; default: `torch_cpu_links` and, before it,
    the site's wheels. UserError where there is no solution or no index.
    """
    asked = inputs(name, versions, root, platform)
    with tempfile.TemporaryDirectory() as folder:
        out, wanted, agreed = (Path(folder) / one for one in ("lock", "in", "constraints"))
        if not upgrade and (root / FOLDER / f"{name}.lock").exists():
            out.write_text(read(name, root).text(), encoding="utf-8")
        wanted.write_text("\n".join(asked[1:]) + "\n", encoding="utf-8")
        pins = [pin for lock in agree_with for pin in lock.pins]
        agreed.write_text("".join(f"{pin.name}=={pin.version.partition('+')[0]}\n" for pin in pins), encoding="utf-8")
        options = [*asked[0].split(), "--constraint", str(root / CONSTRAINTS), "--constraint", str(agreed)]
        if name == "torch-cpu":
            site = [str(root / SITE_WHEELS)] if any((root / SITE_WHEELS).glob("*.whl")) else []
            for place in [links] if links else [*site, versions.torch_cpu_links]:
                options += ["--find-links", place]
        _compile(name, [*options, "--output-file", str(out), str(wanted)])
        found = parse(out.read_text(encoding="utf-8"), str(FOLDER / f"{name}.lock"))
    shared = _in_all(agree_with)
    return Lock(asked, tuple(pin for pin in found.pins if shared.get(pin.name) != pin.version))


def write_all(
    root: Path = ROOT,
    *,
    links: str | None = None,
    upgrade: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Resolve every lock and write those that changed, all or none; their names. `say` hears which one is being resolved."""
    versions = all_versions.load(root / "images/versions.toml")
    locks: dict[str, Lock] = {}
    for name in NAMES:
        say(f"{name}: asking the package index")
        torch = [locks[one] for one in TORCH] if name == "app" else []
        locks[name] = resolve(name, versions, root, agree_with=torch, links=links, upgrade=upgrade)
    if wrong := [*_disagreeing(locks), *_not_as_written(locks["torch-cuda"], versions)]:
        raise UserError(wrong, FAILED)
    changed = []
    for name, lock in locks.items():
        path = root / FOLDER / f"{name}.lock"
        if not path.exists() or path.read_text(encoding="utf-8") != lock.text():
            changed.append(name)
            write_whole(path, lock.text().encode())
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
            f"{path}: the package index did not answer within {PATIENCE_S:.0f} s; fix: try again", FAILED
        ) from None
    if done.returncode:
        why = " ".join(done.stderr.split())
        raise UserError(plain(f"{path}: cannot be resolved: {why[:1000]}"), FAILED)


def _in_all(locks: Sequence[Lock]) -> dict[str, str]:
    """Return what every one of the locks holds at the same version."""
    if not locks:
        return {}
    first, *others = (lock.versions for lock in locks)
    return {name: version for name, version in first.items() if all(one.get(name) == version for one in others)}


def _dependencies(root: Path) -> list[str]:
    try:
        table = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        return [str(one) for one in table["project"]["dependencies"]]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError) as error:
        raise UserError(plain(f"pyproject.toml: [project] dependencies cannot be read: {error}")) from None


def _constraints(root: Path) -> dict[str, str]:
    """Name → version that the tests ran with."""
    try:
        text = (root / CONSTRAINTS).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(plain(f"{CONSTRAINTS}: cannot be read: {error}")) from None
    lines = [line.partition("#")[0].strip().partition("==") for line in text.splitlines()]
    return {canonicalize_name(name): version for name, same, version in lines if same}


def _name(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)
