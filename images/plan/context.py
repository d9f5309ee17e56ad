"""The build context: the files that may enter an image, in a folder that is the same for every checkout of the same code."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from images.model import Context
from images.plan.changes import ON
from images.plan.dockerfile import PATHS, Dockerfile, Stage, parse
from lustrain.leaks import secrets_in
from lustrain.problem import UserError, problem

SITE = "images/site"
"""A site brings these files: mounted while building, never in a layer, and so no input either."""
CA = f"{SITE}/ca.crt"
LARGEST = 16 << 20
"""One file of ours has at most so many bytes."""
_SITE_FILES = (CA, f"{SITE}/wheels/*.whl", f"{SITE}/aws-efa-installer-*.tar.gz")
VERSIONS = "images/versions.toml"
_MAY_ENTER = (
    *(
        "images/locks/*.lock",
        "images/scripts/*.sh",
        "images/scripts/*.py",
        "images/verify.py",
        "lustrain/*",
        "trainer/*",
    ),
    *("images/*.Dockerfile", VERSIONS),
)
_STAYS_OUT = ("*/__pycache__/*", "*.pyc", "*/.git", "*/.git/*")

# https://docs.docker.com/reference/dockerfile/#predefined-args
_PREDEFINED = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY", "SOURCE_DATE_EPOCH")

_SECRETS = (
    *(".env", ".env.*", "*.env", ".netrc", "netrc", ".pypirc", ".npmrc", ".git-credentials", ".dockerconfigjson"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.kdbx", "*.keytab", "kubeconfig", "credentials", "secrets"),
    *(
        f"{name}.{end}"
        for name in ("credentials", "secrets")
        for end in ("json", "toml", "yaml", "yml", "ini", "csv", "txt")
    ),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk"),
)


@dataclass(frozen=True)
class _File:
    path: str
    data: bytes
    executable: bool

    @property
    def sum(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def stage(root: Path, target: str, arguments: Mapping[str, str], into: Path) -> Context:
    """Copy what building `target` reads from the repository at `root` to the new or empty folder `into`.

    UserError with all problems, exit code 2, before anything is written: a file that is missing, is not a regular file, or
    looks like a secret; an argument that the Dockerfile does not declare.
    """
    dockerfile = _dockerfile(root, target)
    stages = dockerfile.for_image(target)
    problems = list(_undeclared(target, arguments, dockerfile))
    entering = [file for path in _entering(root, target, stages) if (file := _read(root, path, problems))]
    mounts_site = any(path == SITE or path.startswith(f"{SITE}/") for stage in stages for path in stage.reads)
    site = sorted(path.relative_to(root).as_posix() for glob in _SITE_FILES for path in root.glob(glob) if mounts_site)
    problems += filter(None, (_unfit(root, path) for path in site))
    leaks = secrets_in((file.path, file.data) for file in entering)
    problems += [_secret(leak.where, f"holds {leak.what}") for leak in leaks]
    if into.exists() and any(into.iterdir()):
        problems.append(problem("context", str(into), "is not empty", fix="give a folder of its own"))
    if problems:
        raise UserError(problems)
    into.mkdir(parents=True, exist_ok=True)
    if mounts_site:
        (into / SITE).mkdir(parents=True)
    for path in site:
        _bring(root / path, into / path)
    recipe = _File(PATHS[target], (root / PATHS[target]).read_bytes(), executable=False)
    for file in (recipe, *entering):
        _write(into / file.path, file)
    _settle(into)
    return Context(into, _inputs(target, dockerfile, entering, arguments))


def sources(root: Path, target: str) -> tuple[str, ...]:
    """Return the files and folders that decide what an image of `target` is; their git state goes into its tag."""
    return (*_copied(_dockerfile(root, target).for_image(target)), PATHS[target], VERSIONS)


def enters(path: str) -> bool:
    """Check whether a file at `path` of the repository may enter an image or its build at all."""
    return _any(path, _MAY_ENTER) and not _any(path, _STAYS_OUT)


def _entering(root: Path, target: str, stages: Iterable[Stage]) -> list[str]:
    """Return the paths of the files that go into an image or decide how it is built, in order. UserError, exit code 2."""
    paths: set[str] = set()
    problems: list[str] = []
    for source in _copied(stages):
        before = len(problems)
        below = list(_walk(root, source, problems))
        if not below and len(problems) == before:
            fix = "run this in a complete checkout" if not source.endswith(".lock") else "fab image-lock"
            problems.append(problem(PATHS[target], source, "reads this, and it is missing", fix=fix))
        paths.update(below)
    if problems:
        raise UserError(problems)
    return sorted(paths)


def _copied(stages: Iterable[Stage]) -> list[str]:
    """Return what the Dockerfile copies or mounts, as it writes it, without the site's files."""
    paths = dict.fromkeys(path for stage in stages for path in stage.reads)
    return [path for path in paths if path != SITE and not path.startswith(f"{SITE}/")]


def _any(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _undeclared(target: str, arguments: Mapping[str, str], dockerfile: Dockerfile) -> Iterator[str]:
    """Yield a problem for each argument that no stage declares: the builder only warns, and a mistyped one changes nothing."""
    stages = dockerfile.for_image(target)
    known = {*dockerfile.arguments, *(name for stage in stages for name in stage.arguments)}
    for name in arguments:
        if name not in known and name.upper() not in _PREDEFINED:
            yield problem("--arg", name, f"{PATHS[target]} has no such ARG", allowed=", ".join(sorted(known)))


def _dockerfile(root: Path, target: str) -> Dockerfile:
    path = root / PATHS[target]
    try:
        dockerfile = parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        fix = "run this in a checkout"
        raise UserError(problem("Dockerfile", str(path), f"cannot be read: {error}", fix=fix)) from None
    if not dockerfile.for_image(target):
        raise UserError(problem(PATHS[target], target, "has no stage of this name", fix="name the stage so"))
    return dockerfile


def _walk(root: Path, source: str, problems: list[str]) -> Iterator[str]:
    """Yield the files at or below `source` that may enter; what is there and may not is a problem."""
    path = root / source
    if path.is_dir() and not path.is_symlink():
        try:
            names = sorted(os.listdir(path))
        except OSError as error:
            names = []
            problems.append(problem("context", source, f"cannot be read: {error.strerror}", fix="mend it"))
        for name in names:
            yield from _walk(root, f"{source}/{name}", problems) if name != "__pycache__" else ()
    elif os.path.lexists(path) and (enters(source) or not _any(source, _STAYS_OUT)):
        if unfit := _unfit(root, source):
            problems.append(unfit)
        else:
            yield source


def _unfit(root: Path, path: str) -> str | None:
    """Return the problem with a file that may not enter an image."""
    status, site = (root / path).lstat(), path.startswith(f"{SITE}/")
    why = allowed = ""
    fix = "move it out of the folder"
    if not (site or enters(path)):
        why, allowed, fix = "the Dockerfile reads a file that may not enter an image", ", ".join(_MAY_ENTER), ""
    elif not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
        why, fix = f"is {kind}: only regular files may enter an image", "put the file itself there"
    elif status.st_size > LARGEST and not site:
        why = f"has {status.st_size >> 20} MiB, which is too large for code"
        allowed = f"{LARGEST >> 20} MiB"
    elif not path.isprintable():
        why, fix = "has a name with characters that cannot be printed", "rename it"
    elif _any(PurePosixPath(path).name.lower(), _SECRETS):
        return _secret(path, "has the name of a file with secrets")
    return problem("context", path, why, allowed, fix) if why else None


def _secret(path: str, why: str) -> str:
    fix = "move it out of the folder, or rename it if it is not one"
    return problem("context", path, f"{why}: secrets must not enter an image", fix=fix)


def _read(root: Path, path: str, problems: list[str]) -> _File | None:
    try:
        with open(os.open(root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return _File(path, file.read(), executable=bool(os.fstat(file.fileno()).st_mode & stat.S_IXUSR))
    except OSError as error:
        problems.append(problem("context", path, f"cannot be read: {error.strerror}", fix="mend it"))
        return None


def _write(target: Path, file: _File) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(file.data)
    target.chmod(0o755 if file.executable else 0o644)
    # BuildKit takes a file of a folder that it has seen before as unchanged when size and time stamp are: with one time for
    # all, an edit that keeps the size would build the old file. So the time comes from the content, and from nothing else.
    os.utime(target, (moment := int(file.sum[:8], 16) >> 1, moment))


def _bring(source: Path, target: Path) -> None:
    """Link a wheel, which has hundreds of megabytes, where that changes nothing of the first name; copy it elsewhere."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_IMODE(source.stat().st_mode) == 0o644:
        try:
            return os.link(source, target, follow_symlinks=False)
        except OSError:
            pass
    shutil.copyfile(source, target, follow_symlinks=False)
    target.chmod(0o644)
    moment = int(source.stat().st_mtime)
    return os.utime(target, (moment, moment))


def _settle(folder: Path) -> None:
    for path, _, _ in os.walk(folder):
        os.chmod(path, 0o755)
        os.utime(path, (0, 0))


def _inputs(
    target: str, dockerfile: Dockerfile, files: Iterable[_File], given: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Return, by layer, the images it starts from, the arguments it declares, its part of the Dockerfile, the files it reads.

    `on tools` is a sum over the inputs of the layer below.
    """
    stages = dockerfile.for_image(target)
    values = {**dockerfile.arguments, **given}
    inputs: dict[str, dict[str, str]] = {}
    below: dict[str, set[str]] = {}
    layers = {stage.name: layer_of(stage, target) for stage in stages}
    for stage in stages:
        if name := stage.image_argument:
            layers[stage.origin] = name.removesuffix("_IMAGE").lower()
            inputs.setdefault(layers[stage.origin], {})[name] = values.get(name, "")
        layer = inputs.setdefault(layers[stage.name], {})
        layer[f"{PATHS[target]} [{stage.name}]"] = stage.sum
        layer |= {name: values[name] for name in stage.arguments if name in values}
        for file in files:
            if any(file.path == source or file.path.startswith(f"{source}/") for source in stage.reads):
                layer[file.path] = file.sum + ("+x" if file.executable else "")
        if layers[stage.name] != "image":
            below.setdefault(layers[stage.name], set()).update(layers[name] for name in stage.made_on if name in layers)
    return {layer: dict(sorted((own | _on(layer, inputs, below)).items())) for layer, own in sorted(inputs.items())}


def _on(layer: str, inputs: Mapping[str, Mapping[str, str]], below: Mapping[str, set[str]]) -> dict[str, str]:
    sums = {}
    for lower in sorted(below.get(layer, set()) - {layer}):
        whole = {**inputs[lower], **_on(lower, inputs, below)}
        sums[f"{ON}{lower}"] = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
    return sums


def layer_of(stage: Stage, target: str) -> str:
    """Return the layer that a stage makes: torch-cuda makes torch; `image` stands for the image's settings and checks."""
    if stage.name == target:
        return "system" if stage.runs else "image"
    return "image" if stage.name.startswith(f"{target}-") else stage.name.removesuffix(f"-{target}")
