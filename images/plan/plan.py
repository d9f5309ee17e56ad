"""The plan of an image: arguments, labels and tag, computed from data before anything is built.

Tags and labels as https://github.com/opencontainers/image-spec/blob/main/annotations.md and
https://github.com/opencontainers/distribution-spec/blob/main/spec.md want them. Nothing here depends on the clock, so that
building twice gives one image; of the disk it asks only whether secrets are there.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from images.model import Plan
from images.plan.dockerfile import PATHS
from images.plan.references import Reference, is_loopback, parse
from images.plan.versions import Versions
from lustrain.image_file import GitState
from lustrain.problem import UserError, problem

PLATFORMS = dict.fromkeys(PATHS, ("linux/amd64",))
"""What the locks have wheels for. An arm64 one of cpu needs torch's wheel for it in locks/torch-cpu.lock."""
ARM64 = "linux/arm64"
_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
SECRETS = {"ca": "certificates of a proxy", "netrc": "credentials of a private index"}
LICENSE = "Apache-2.0"
TARGET = "dev.lustrain.target"
VERSIONS = "dev.lustrain.versions."
DIRTY = "dev.lustrain.git.dirty"
INPUTS = "dev.lustrain.inputs."
"""Labels of what each layer was made from, short sums."""
_OF_EFA = ("efa", "libfabric", "rdma-core", "aws-ofi-nccl")

_OURS = re.compile("-(g|nogit-)[0-9a-f]{12}")
_SUFFIX = re.compile(r"\w[\w.]{0,29}", re.ASCII)
_ARGUMENT = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_TELLING = re.compile(r"pass(word|wd)?|secret|token|credential|api_?key|private_?key", re.IGNORECASE)
_LOGIN = re.compile(r"://[^/\s:@]+:[^/\s@]+@")


def make(
    target: str,
    versions: Versions,
    git: GitState,
    context_inputs: Mapping[str, Mapping[str, str]],
    *,
    repository: str,
    platform: str = "linux/amd64",
    base: str | None = None,
    tools: str | None = None,
    cache_to: str | None = None,
    cache_from: Sequence[str] = (),
    secrets: Mapping[str, Path] | None = None,
    attestations: bool = False,
    no_cache: bool = False,
    arguments: Mapping[str, str] | None = None,
    unpinned: bool = False,
    suffix: str = "",
) -> Plan:
    """Everything that is needed to build `target`.

    `base` and `tools` take the place of the images in versions.toml; `unpinned` allows them without a digest. UserError with
    all problems at once, exit code 2.
    """
    secrets, own = dict(secrets or {}), dict(arguments or {})
    problems = [
        *_of_target(target, platform, versions, base),
        *_of_repository(repository),
        *_of_image("--base", base, unpinned),
        *_of_image("--tools", tools, unpinned),
        *_of_caches(cache_to, cache_from, repository),
        *_of_secrets(secrets),
        *_of_arguments(own),
        *_of_suffix(suffix),
    ]
    if problems:
        raise UserError(problems)
    given = arguments_of(target, versions, base=base, tools=tools) | own
    found = versions_of(target, versions, given)
    # For Gaudi there is no base but the one that is given.
    named = {"base": None if target == "gaudi" else base, "tools": tools} | {
        name: value for name, value in own.items() if name != "EFA_VERSION"
    }
    changed = {name: value for name, value in named.items() if value is not None}
    # Another base or argument is another image of the same commit, under a tag of its own.
    apart = f"o{_sum(changed)[:6]}" if changed else ""
    tag = tag_of(target, found, git, context_inputs, "-".join(filter(None, [apart, suffix])))
    return Plan(
        target=target,
        platform=platform,
        dockerfile=PATHS[target],
        tags=(f"{repository}:{tag}",),
        arguments=given,
        labels=_labels(target, found, git, context_inputs, tag, given["BASE_IMAGE"]),
        cache_from=tuple(dict.fromkeys(cache_from)),
        cache_to=cache_to,
        secrets=secrets,
        attestations=attestations,
        no_cache=no_cache,
        epoch=git.time,
    )


def arguments_of(
    target: str, versions: Versions, *, base: str | None = None, tools: str | None = None
) -> dict[str, str]:
    """Return the build arguments of `target`. UserError where its base is not known."""
    found = {"BASE_IMAGE": base or (versions.gaudi.pinned if target == "gaudi" else versions.base)}
    found["TOOLS_IMAGE"] = tools or versions.tools
    if target == "cpu":
        found["TORCH_CPU_LINKS"] = versions.torch_cpu_links
    if target == "cuda":
        found |= {"EFA_VERSION": versions.efa.version, "EFA_URL": versions.efa.url, "EFA_SHA256": versions.efa.sha256}
    budget = versions.budgets.get(target)
    return found | ({} if budget is None else {"BUDGET_MB": str(budget)})


def versions_of(target: str, versions: Versions, arguments: Mapping[str, str]) -> dict[str, str]:
    """Return what is in the image: with another EFA installer, or none, nothing is claimed of what ours would have brought."""
    found = versions.of(target)
    efa = arguments.get("EFA_VERSION", versions.efa.version)
    if "efa" in found and efa != versions.efa.version:
        found = {name: value for name, value in found.items() if name not in _OF_EFA} | ({"efa": efa} if efa else {})
    return found


def tag_of(
    target: str, found: Mapping[str, str], git: GitState, inputs: Mapping[str, Mapping[str, str]], suffix: str = ""
) -> str:
    """`cuda-torch<v>-cu<v>-efa<v>-py<v>-g<commit>`; what no commit tells apart is told by a sum over the inputs, and by the
    `suffix` of whoever builds a commit anew, with this week's packages of the system."""
    parts = [target]
    for name, short in (("gaudi", "synapse"), ("torch", "torch"), ("cuda", "cu"), ("efa", "efa"), ("python", "py")):
        if name in found:
            # cu130 and py311 are what torch's wheels and pip call them.
            value = found[name].replace(".", "") if short in ("cu", "py") else found[name]
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
    found: Mapping[str, str],
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
    labels |= {f"{VERSIONS}{name}": value for name, value in found.items()}
    labels |= {f"{INPUTS}{layer}": _sum(dict(one)) for layer, one in inputs.items()}
    return dict(sorted(labels.items()))


def _of_target(target: str, platform: str, versions: Versions, base: str | None) -> Iterator[str]:
    if target not in PATHS:
        yield problem("target", target, "unknown", allowed=", ".join(PATHS))
        return
    if platform not in PLATFORMS[target]:
        why, fix = "is not built", ""
        if platform == ARM64 and target != "gaudi":
            why = f"images/locks/torch-{target}.lock is made for x86_64"
            fix = "make locks for aarch64 first (images/plan/lock.py, resolve with platform=ARM64)"
        yield problem("platform", platform, why, allowed=f"{', '.join(PLATFORMS[target])} for {target}", fix=fix)
    if target == "gaudi" and base is None:
        try:
            _ = versions.gaudi.pinned
        except UserError as error:
            yield from error.problems


def _of_repository(repository: str) -> Iterator[str]:
    name = _parsed(repository, "repository")
    if isinstance(name, str):
        yield name
    elif name.tag or name.digest:
        why = "names one image of it, and tags are made from versions and commit"
        yield problem(
            "repository",
            repository,
            why,
            allowed="registry/name, like 127.0.0.1:5000/team/trainer",
            fix=_bare(repository),
        )


def _of_image(flag: str, ref: str | None, unpinned: bool) -> Iterator[str]:
    if ref is None:
        return
    name = _parsed(ref, flag)
    if isinstance(name, str):
        yield name
    elif not (name.digest or is_loopback(name.registry) or unpinned):
        why = "is a tag, which may name a different image tomorrow"
        yield problem(flag, ref, why, allowed=f"{name.name}@sha256:…", fix="give its digest, or --unpinned")


def _of_caches(cache_to: str | None, cache_from: Sequence[str], repository: str) -> Iterator[str]:
    example = "registry/name:tag, like 127.0.0.1:5000/team/trainer:cache-main"
    flags = [("--cache-to", cache_to), *(("--cache-from", ref) for ref in dict.fromkeys(cache_from))]
    for flag, ref in flags:
        if ref is None:
            continue
        name = _parsed(ref, flag)
        if isinstance(name, str):
            yield name
        elif flag == "--cache-to" and name.digest:
            yield problem(flag, ref, "is a digest, which nothing can be written to", allowed=example)
        elif not name.tag and not name.digest:
            yield problem(flag, ref, "has no tag, and latest would be taken", allowed=example)
        elif flag == "--cache-to" and _bare(ref) == repository and _OURS.search(name.tag or ""):
            yield problem(
                flag, ref, "looks like the tag of an image", fix="give the cache a tag of its own, like cache-main"
            )


def _of_secrets(secrets: Mapping[str, Path]) -> Iterator[str]:
    for name, path in secrets.items():
        if name not in SECRETS:
            allowed = ", ".join(f"{one} ({what})" for one, what in SECRETS.items())
            yield problem("secret", name, "no stage asks for this secret", allowed=allowed)
        elif not path.is_file():
            why = "is a folder" if path.is_dir() else "does not exist" if not path.exists() else "is not a file"
            yield problem(f"--{name}", str(path), why, allowed=f"a file, {SECRETS[name]}")
        elif not os.access(path, os.R_OK):
            yield problem(f"--{name}", str(path), "cannot be read by this user", fix="a copy of your own, or chmod")
        elif name == "ca" and _CERTIFICATE not in path.read_bytes():
            yield problem("--ca", str(path), "holds no certificate", allowed="a PEM file of certificates")


def _of_suffix(suffix: str) -> Iterator[str]:
    if suffix and not _SUFFIX.fullmatch(suffix):
        yield problem(
            "--suffix", suffix, "cannot end a tag", allowed="up to 30 letters, digits, . and _", fix="like r2"
        )


def _of_arguments(arguments: Mapping[str, str]) -> Iterator[str]:
    for name, value in arguments.items():
        if not _ARGUMENT.fullmatch(name):
            yield problem("--arg", name, "is not a name of an argument", allowed="letters, digits and _")
        elif _TELLING.search(name) or _LOGIN.search(value):
            why = "everyone who has the image can read its build arguments"
            yield problem(f"--arg {name}", "…", why, fix="--netrc FILE")
        elif name in ("BASE_IMAGE", "TOOLS_IMAGE"):
            yield problem("--arg", name, "has a flag of its own", fix=f"--{name.partition('_')[0].lower()} {value}")


def _parsed(ref: str, path: str) -> Reference | str:
    """Return the reference, or what is wrong with it."""
    try:
        return parse(ref, path)
    except UserError as error:
        return error.problems[0]


def _bare(ref: str) -> str:
    """As it is written, without tag and digest."""
    head, _, last = ref.partition("@")[0].rpartition("/")
    return "/".join(filter(None, [head, last.partition(":")[0]]))
