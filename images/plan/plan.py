"""The plan of an image: arguments, labels and tag, computed from data before anything is built.

Tags and labels as https://github.com/opencontainers/image-spec/blob/main/annotations.md and
https://github.com/opencontainers/distribution-spec/blob/main/spec.md want them. Nothing here depends on the clock, so that
building twice gives one image; of the disk it asks only whether the files of secrets can be read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

from images.flags import BuildFlags
from images.model import Plan
from images.plan.dockerfile import PATHS
from images.plan.references import Reference, is_loopback, parse
from images.plan.versions import Versions
from lustrain.image_file import GitState
from lustrain.problem import UserError, problem

PLATFORM = "linux/amd64"
"""The locks have wheels for it alone; an arm64 image needs torch's wheel for that in locks/torch-cpu.lock."""
LICENSE = "Apache-2.0"
TARGET = "dev.lustrain.target"
VERSIONS = "dev.lustrain.versions."
DIRTY = "dev.lustrain.git.dirty"
INPUTS = "dev.lustrain.inputs."
"""These labels hold short sums of what each layer was made from."""

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_SECRETS = {"ca": "certificates of a proxy", "netrc": "credentials of a private index"}
_BROUGHT_BY_EFA = ("efa", "libfabric", "rdma-core", "aws-ofi-nccl")
_IMAGE_TAG = re.compile("-(g|nogit-)[0-9a-f]{12}")
_SUFFIX = re.compile(r"\w[\w.]{0,29}", re.ASCII)
_ARGUMENT = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NAMES_A_SECRET = re.compile(r"pass(word|wd)?|secret|token|credential|api_?key|private_?key", re.IGNORECASE)
_LOGIN = re.compile(r"://[^/\s:@]+:[^/\s@]+@")
_CACHE = "registry/name:tag, like 127.0.0.1:5000/team/trainer:cache-main"


def check(flags: BuildFlags) -> None:
    """Refuse flags that make no image: UserError with all problems at once, exit code 2."""
    problems = [
        *_of_target(flags.target),
        *_of_references(flags),
        *_of_secrets(flags.secrets),
        *(line for word in flags.arg for line in _of_argument(word)),
        *_of_suffix(flags.suffix),
    ]
    if problems:
        raise UserError(problems)


def make(flags: BuildFlags, versions: Versions, git: GitState, inputs: Mapping[str, Mapping[str, str]]) -> Plan:
    """Return everything that a build with these flags needs, once they were checked; `inputs` are those of its context.

    UserError where the base of the target is not known.
    """
    arguments = arguments_of(flags, versions)
    content = versions_of(flags.target, versions, arguments)
    # For Gaudi there is no base but the one that is given.
    named = {"base": None if flags.target == "gaudi" else flags.base, "tools": flags.tools} | flags.arguments
    changed = {name: value for name, value in named.items() if value is not None and name != "EFA_VERSION"}
    # Another base or argument is another image of the same commit, under a tag of its own.
    apart = f"o{_sum(changed)[:6]}" if changed else ""
    tag = tag_of(flags.target, content, git, inputs, "-".join(filter(None, [apart, flags.suffix])))
    return Plan(
        target=flags.target,
        platform=PLATFORM,
        dockerfile=PATHS[flags.target],
        tags=(f"{flags.name}:{tag}",),
        arguments=arguments,
        labels=_labels(flags.target, content, git, inputs, tag, arguments["BASE_IMAGE"]),
        cache_from=tuple(dict.fromkeys(flags.cache_from)),
        cache_to=flags.cache_to,
        secrets=flags.secrets,
        attestations=flags.attest,
        no_cache=flags.no_cache,
        epoch=git.time,
    )


def arguments_of(flags: BuildFlags, versions: Versions) -> dict[str, str]:
    """Return the build arguments: the target's, and those given. UserError where the base is not known."""
    target = flags.target
    given = {"BASE_IMAGE": flags.base or (versions.gaudi.pinned if target == "gaudi" else versions.base)}
    given["TOOLS_IMAGE"] = flags.tools or versions.tools
    if target == "cpu":
        given["TORCH_CPU_LINKS"] = versions.torch_cpu_links
    if target == "cuda":
        given |= {"EFA_VERSION": versions.efa.version, "EFA_URL": versions.efa.url, "EFA_SHA256": versions.efa.sha256}
    if target in versions.budgets:
        given["BUDGET_MB"] = str(versions.budgets[target])
    return given | flags.arguments


def versions_of(target: str, versions: Versions, arguments: Mapping[str, str]) -> dict[str, str]:
    """Return what is in the image: with another EFA installer, or none, nothing is claimed of what ours would have brought."""
    content = versions.of(target)
    efa = arguments.get("EFA_VERSION", versions.efa.version)
    if "efa" in content and efa != versions.efa.version:
        content = {name: value for name, value in content.items() if name not in _BROUGHT_BY_EFA} | (
            {"efa": efa} if efa else {}
        )
    return content


def tag_of(
    target: str, content: Mapping[str, str], git: GitState, inputs: Mapping[str, Mapping[str, str]], suffix: str = ""
) -> str:
    """`cuda-torch<v>-cu<v>-efa<v>-py<v>-g<commit>`; a hash of the inputs tells builds apart where no commit does, and
    `suffix` where a commit is built again with this week's system packages."""
    parts = [target]
    for name, short in (("gaudi", "synapse"), ("torch", "torch"), ("cuda", "cu"), ("efa", "efa"), ("python", "py")):
        if name in content:
            # cu130 and py311 are what torch's wheels and pip call them.
            value = content[name].replace(".", "") if short in ("cu", "py") else content[name]
            parts.append(f"{short}{value.partition('+')[0]}")
    if git.commit:
        parts.append(f"g{git.commit[:12]}")
    if git.dirty or not git.commit:
        parts += ["dirty" if git.commit else "nogit", _sum(inputs)]
    return "-".join([*parts, suffix] if suffix else parts)


def _sum(of: object) -> str:
    return sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:12]


def _labels(
    target: str,
    versions: Mapping[str, str],
    git: GitState,
    inputs: Mapping[str, Mapping[str, str]],
    tag: str,
    base: str,
) -> dict[str, str]:
    standard = "org.opencontainers.image"
    labels = {
        f"{standard}.title": f"lustrain-trainer-{target}",
        f"{standard}.version": tag,
        f"{standard}.licenses": LICENSE,
        f"{standard}.base.name": base.partition("@")[0],
        TARGET: target,
    }
    if "@" in base:
        labels[f"{standard}.base.digest"] = base.partition("@")[2]
    if git.commit:
        labels |= {f"{standard}.revision": git.commit, DIRTY: str(git.dirty).lower()}
    labels |= {f"{VERSIONS}{name}": value for name, value in versions.items()}
    labels |= {f"{INPUTS}{layer}": _sum(dict(names)) for layer, names in inputs.items()}
    return dict(sorted(labels.items()))


def _of_target(target: str) -> Iterator[str]:
    if target not in PATHS:
        yield problem("target", target, "unknown", allowed=", ".join(PATHS))


def _of_references(flags: BuildFlags) -> Iterator[str]:
    single = [
        ("repository", flags.name),
        ("--base", flags.base),
        ("--tools", flags.tools),
        ("--cache-to", flags.cache_to),
    ]
    for flag, ref in [*single, *(("--cache-from", ref) for ref in dict.fromkeys(flags.cache_from))]:
        try:
            if ref is not None:
                yield from _of_reference(flag, ref, parse(ref, flag), flags)
        except UserError as error:
            yield from error.problems


def _of_reference(flag: str, ref: str, image: Reference, flags: BuildFlags) -> Iterator[str]:
    head, _, last = ref.partition("@")[0].rpartition("/")
    name = "/".join(filter(None, [head, last.partition(":")[0]]))
    if flag == "repository":
        if image.tag or image.digest:
            why = "names one image of it, and tags are made from versions and commit"
            yield problem(flag, ref, why, allowed="registry/name, like 127.0.0.1:5000/team/trainer", fix=name)
    elif flag in ("--base", "--tools"):
        if not (image.digest or is_loopback(image.registry) or flags.unpinned):
            why = "is a tag, which may name a different image tomorrow"
            yield problem(flag, ref, why, allowed=f"{image.name}@sha256:…", fix="give its digest, or --unpinned")
    elif not image.tag and not image.digest:
        yield problem(flag, ref, "has no tag, and latest would be taken", allowed=_CACHE)
    elif flag == "--cache-to" and image.digest:
        yield problem(flag, ref, "is a digest, which nothing can be written to", allowed=_CACHE)
    elif flag == "--cache-to" and name == flags.name and _IMAGE_TAG.search(image.tag or ""):
        yield problem(
            flag, ref, "looks like the tag of an image", fix="give the cache a tag of its own, like cache-main"
        )


def _of_secrets(secrets: Mapping[str, Path]) -> Iterator[str]:
    for name, path in secrets.items():
        if not path.is_file():
            why = "is a folder" if path.is_dir() else "does not exist" if not path.exists() else "is not a file"
            yield problem(f"--{name}", str(path), why, allowed=f"a file, {_SECRETS[name]}")
        elif not os.access(path, os.R_OK):
            yield problem(f"--{name}", str(path), "cannot be read by this user", fix="a copy of your own, or chmod")
        elif name == "ca" and _CERTIFICATE not in path.read_bytes():
            yield problem("--ca", str(path), "holds no certificate", allowed="a PEM file of certificates")


def _of_argument(word: str) -> Iterator[str]:
    name, given, value = word.partition("=")
    if not given:
        yield problem("--arg", word, "has no value", allowed="NAME=VALUE")
    elif not _ARGUMENT.fullmatch(name):
        yield problem("--arg", name, "is not the name of an argument", allowed="letters, digits and _")
    elif _NAMES_A_SECRET.search(name) or _LOGIN.search(value):
        yield problem(
            f"--arg {name}", "…", "everyone who has the image can read its build arguments", fix="--netrc FILE"
        )
    elif name in ("BASE_IMAGE", "TOOLS_IMAGE"):
        yield problem("--arg", name, "has a flag of its own", fix=f"--{name.partition('_')[0].lower()} {value}")


def _of_suffix(suffix: str) -> Iterator[str]:
    if suffix and not _SUFFIX.fullmatch(suffix):
        allowed = "up to 30 letters, digits, . and _"
        yield problem("--suffix", suffix, "cannot end a tag", allowed=allowed, fix="like r2")
