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
from images.plan import dockerfile
from images.plan.changes import ON
from images.plan.leaks import secrets_in
from images.plan.plan import arguments_of
from images.plan.versions import Versions
from lustrain.problem import UserError, problem

SITE = "images/site"
"""What a site brings: mounted while building, never in a layer, and so no input either."""
CA = f"{SITE}/ca.crt"
LARGEST = 16 << 20
"""Bytes of one file of ours."""
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
_STAYS_OUT = ("trainer/launch/*", "*/__pycache__/*", "*.pyc", "*/.git", "*/.git/*")
_ENTERS_ALL_THE_SAME = ("trainer/launch/__init__.py", "trainer/launch/local.py")

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
class _Found:
    path: str
    data: bytes
    executable: bool

    @property
    def sum(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def stage(
    root: Path,
    target: str,
    versions: Versions,
    into: Path,
    *,
    base: str | None = None,
    tools: str | None = None,
    arguments: Mapping[str, str] | None = None,
) -> Context:
    """Copy what building `target` reads from the repository at `root` to the new or empty folder `into`.

    UserError with all problems, exit code 2, before anything is written: a file that is missing, is no regular file, or
    looks like a secret.
    """
    given = arguments_of(target, versions, base=base, tools=tools) | dict(arguments or {})
    stages = _stages(root, target)
    problems = list(_unknown(target, arguments or {}, dockerfile.parse(_text(root, target))))
    found = [one for path in entering(root, target) if (one := _read(root, path, problems))]
    brought = [path for path in _site_files(root) if _regular(root, path, problems)] if _mounts_site(stages) else []
    leaks = secrets_in((one.path, one.data) for one in found)
    problems += [_secret(leak.where, f"holds {leak.what}") for leak in leaks]
    if into.exists() and any(into.iterdir()):
        problems.append(problem("context", str(into), "is not empty", fix="give a folder of its own"))
    if problems:
        raise UserError(problems)
    into.mkdir(parents=True, exist_ok=True)
    if _mounts_site(stages):
        (into / SITE).mkdir(parents=True)
    for path in brought:
        _bring(root / path, into / path)
    recipe = dockerfile.PATHS[target]
    for one in [_Found(recipe, (root / recipe).read_bytes(), executable=False), *found]:
        _write(into / one.path, one)
    _settle(into)
    return Context(into, _inputs(target, stages, found, given, _text(root, target)))


def entering(root: Path, target: str) -> tuple[str, ...]:
    """Paths of the files that go into an image of `target` or decide how it is built, in order. UserError, exit code 2."""
    found: dict[str, None] = {}
    problems: list[str] = []
    for source in _read_from(root, target):
        before = len(problems)
        below = list(_walk(root, source, problems))
        if not below and len(problems) == before:
            fix = "run this in a complete checkout" if not source.endswith(".lock") else "fab image-lock"
            problems.append(problem(dockerfile.PATHS[target], source, "reads this, and it is not there", fix=fix))
        found |= dict.fromkeys(below)
    if problems:
        raise UserError(problems)
    return tuple(sorted(found))


def sources(root: Path, target: str) -> tuple[str, ...]:
    """Files and folders that decide what an image of `target` is: git is asked about these."""
    return (*_read_from(root, target), dockerfile.PATHS[target], VERSIONS)


def enters(path: str) -> bool:
    """Whether a file at `path` of the repository may enter an image or its build at all."""
    if path in _ENTERS_ALL_THE_SAME:
        return True
    return _any(path, _MAY_ENTER) and not _any(path, _STAYS_OUT)


def _read_from(root: Path, target: str) -> tuple[str, ...]:
    """Return what the Dockerfile copies or mounts, as it writes it, without what a site brings."""
    read = dict.fromkeys(path for one in _stages(root, target) for path in one.reads)
    return tuple(path for path in read if path != SITE and not path.startswith(f"{SITE}/"))


def _any(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _unknown(target: str, arguments: Mapping[str, str], file: dockerfile.Dockerfile) -> Iterator[str]:
    """Yield arguments that no stage declares: the builder only warns of them, and a mistyped one would change nothing."""
    known = {*file.arguments, *(name for one in file.for_image(target) for name in one.arguments)}
    for name in (one for one in arguments if one not in known and one.upper() not in _PREDEFINED):
        yield problem("--arg", name, f"{dockerfile.PATHS[target]} has no such ARG", allowed=", ".join(sorted(known)))


def _text(root: Path, target: str) -> str:
    path = root / dockerfile.PATHS[target]
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            problem("Dockerfile", str(path), f"cannot be read: {error}", fix="run this in a checkout")
        ) from None


def _stages(root: Path, target: str) -> tuple[dockerfile.Stage, ...]:
    if target not in dockerfile.PATHS:
        raise UserError(problem("target", target, "unknown", allowed=", ".join(dockerfile.PATHS)))
    stages = dockerfile.parse(_text(root, target)).for_image(target)
    if not stages:
        raise UserError(problem(dockerfile.PATHS[target], target, "has no stage of this name", fix="name the stage so"))
    return stages


def _mounts_site(stages: Iterable[dockerfile.Stage]) -> bool:
    return any(path == SITE or path.startswith(f"{SITE}/") for one in stages for path in one.reads)


def _site_files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for pattern in _SITE_FILES for path in root.glob(pattern))


def _walk(root: Path, source: str, problems: list[str]) -> Iterator[str]:
    """Files at or below `source` that may enter; links and the like are problems, not ways to somewhere else."""
    try:
        mode = (root / source).lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        if _any(source, _STAYS_OUT) and source not in _ENTERS_ALL_THE_SAME:
            return
        if not enters(source):
            why = "the Dockerfile reads a file that may not enter an image"
            problems.append(problem("context", source, why, allowed=", ".join(_MAY_ENTER)))
        elif _regular(root, source, problems):
            yield source
        return
    if PurePosixPath(source).name != "__pycache__":
        try:
            names = sorted(os.listdir(root / source))
        except OSError as error:
            problems.append(problem("context", source, f"cannot be read: {error.strerror}", fix="mend it"))
            return
        for name in names:
            yield from _walk(root, f"{source}/{name}", problems)


def _regular(root: Path, path: str, problems: list[str]) -> bool:
    status = (root / path).lstat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
        problems.append(
            problem(
                "context", path, f"is {kind}: only regular files may enter an image", fix="put the file itself there"
            )
        )
        return False
    if status.st_size > LARGEST and not path.startswith(f"{SITE}/"):
        why = f"has {status.st_size >> 20} MiB, which is too large for code"
        problems.append(problem("context", path, why, allowed=f"{LARGEST >> 20} MiB", fix="move it out of the folder"))
        return False
    if not path.isprintable():
        problems.append(problem("context", path, "has a name with characters that cannot be printed", fix="rename it"))
        return False
    if _any(PurePosixPath(path).name.lower(), _SECRETS):
        problems.append(_secret(path, "has the name of a file with secrets"))
        return False
    return True


def _secret(path: str, why: str) -> str:
    return problem(
        "context",
        path,
        f"{why}: secrets must not enter an image",
        fix="move it out of the folder, or rename it if it is not one",
    )


def _read(root: Path, path: str, problems: list[str]) -> _Found | None:
    try:
        with open(os.open(root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            data = file.read()
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        problems.append(problem("context", path, f"cannot be read: {error.strerror}", fix="mend it"))
        return None
    return _Found(path, data, executable=bool(mode & stat.S_IXUSR))


def _write(target: Path, one: _Found) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(one.data)
    target.chmod(0o755 if one.executable else 0o644)
    # BuildKit takes a file of a folder that it has seen before as unchanged when size and time stamp are: with one time for
    # all, an edit that keeps the size would build the old file. So the time comes from the content, and from nothing else.
    os.utime(target, (moment := int(one.sum[:8], 16) >> 1, moment))


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
    target: str, stages: Iterable[dockerfile.Stage], found: Iterable[_Found], given: Mapping[str, str], text: str
) -> dict[str, dict[str, str]]:
    """By layer: the images it starts from, the arguments it declares, its part of the Dockerfile, the files it reads.

    `on tools` is a sum over the inputs of the layer below.
    """
    files = {one.path: one.sum + ("+x" if one.executable else "") for one in found}
    defaults = dockerfile.parse(text).arguments
    inputs: dict[str, dict[str, str]] = {}
    below: dict[str, set[str]] = {}
    layers = {one.name: layer_of(one, target) for one in stages}
    for one in stages:
        if name := one.image_argument:
            layers[one.origin] = name.removesuffix("_IMAGE").lower()
            inputs.setdefault(layers[one.origin], {})[name] = given.get(name, defaults.get(name, ""))
        layer = inputs.setdefault(layers[one.name], {})
        layer[f"{dockerfile.PATHS[target]} [{one.name}]"] = one.sum
        layer |= {
            name: given.get(name, defaults.get(name, "")) for name in one.arguments if name in given or name in defaults
        }
        layer |= {path: sum_ for path, sum_ in files.items() if _is_read(path, one.reads)}
        if layers[one.name] != "image":
            below.setdefault(layers[one.name], set()).update(layers[name] for name in one.made_on if name in layers)
    return {layer: dict(sorted((own | _on(layer, inputs, below)).items())) for layer, own in sorted(inputs.items())}


def _on(layer: str, inputs: Mapping[str, Mapping[str, str]], below: Mapping[str, set[str]]) -> dict[str, str]:
    found = {}
    for one in sorted(below.get(layer, set()) - {layer}):
        whole = {**inputs[one], **_on(one, inputs, below)}
        found[f"{ON}{one}"] = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
    return found


def layer_of(stage: dockerfile.Stage, target: str) -> str:
    """Return the layer that a stage makes: torch-cuda makes torch; `image` stands for the image's settings and checks."""
    if stage.name == target:
        return "system" if stage.runs else "image"
    return "image" if stage.name.startswith(f"{target}-") else stage.name.removesuffix(f"-{target}")


def _is_read(path: str, sources: Iterable[str]) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in sources)
