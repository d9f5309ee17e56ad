"""The lifecycle bundle: the files that a node runs at boot, named by their content.

HyperPod reads the bundle again whenever it replaces a node, weeks after the deployment; a prefix that never changes and
is never deleted keeps that node like its neighbours. In it are our scripts, the node agent, and what that has to know of
the cluster. Equal contents have equal names, so that a bundle is another one exactly where a node would boot otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from infra.config import ClusterSpec
from infra.plan.nodes import proxy
from infra.plan.nodes.auto_scaling import fewest_processors
from infra.plan.nodes.controller import records
from infra.plan.nodes.document import node_document, node_groups, shows_metrics
from infra.plan.nodes.logs import agent_configuration, carries_logs
from infra.plan.place import BucketNames
from infra.plan.storage.home import NfsMount, mounted_by_bundle
from infra.plan.storage.s3_mounts import PLACEHOLDERS, unit, unit_name
from lustrain.problem import Problem, UserError, problem
from node_setup.pack import NAME, archive
from node_setup.slurm import dynamic

PROGRAM = Path(__file__).parents[2]
FOLDER = PROGRAM / "lifecycle"
SCRIPT_KEY = "boot.on_configured"
ON_CONFIGURED = "on_configured.sh"
"""The user's script, under a name that does not change with theirs."""
ON_INIT = "on_init.sh"
"""HyperPod with Slurm: runs after the service's own set-up (`OnInitComplete`)."""
ON_CREATE = "on_create.sh"
"""HyperPod on EKS: runs when a node comes up (`OnCreate`)."""
AGENT = NAME
DOCUMENT = "tuning.json"
"""The node document; the agent looks for it beside itself."""
SLURM = "slurm.json"
"""With a scheduler: what nodes have to know of their Slurm, beside the node document."""
HOME_MOUNT = "home.mount"
"""What node.sh mounts for homes: source, path and options in one line."""
HOME_DNS = "{home_dns}"
"""Stands in the bundle for a name that is known after the deployment only: the digits count all but it."""
MOUNT_S3 = Path(__file__).with_name("mount_s3.sh")
"""Only in the bundle of a cluster that mounts buckets: where the image has no mount-s3, it reaches the network."""
LOGS = Path(__file__).with_name("logs.sh")
"""Where logs are carried; where the image has no CloudWatch agent, it reaches the network."""
LOGS_CONFIGURATION = "logs.json"
"""Of the agent, beside it."""
PACKAGES = Path(__file__).with_name("packages.sh")
"""What scripts that install packages need."""
EXPORTERS = Path(__file__).with_name("exporters.sh")
"""Only in the bundle of a cluster with a monitor: where the image has no exporters, it reaches the network."""
S3_MOUNTS = "s3_mounts"
"""Folder of the systemd units of buckets, and of `list`: unit and path in one line."""
NODE_FILES = "root"
"""Folder of files that node.sh copies under the node's root, at the same paths."""
MAX_BYTES = 64 * 1024 * 1024
"""Ours: all nodes of a cluster read the bundle at once, in the minutes that are paid for and compute nothing."""
SHA_DIGITS = 12
BINARY = frozenset({".pyz"})
"""Suffixes that are not text and are not checked as such."""

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class BundleFile:
    """`path` is relative to the bundle, with slashes; `source` is None where the content lies in no file."""

    path: str
    content: bytes = field(repr=False)
    source: Path | None = None

    @property
    def sha256(self) -> str:
        """Of the content, in hex."""
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True)
class Bundle:
    """Files by path, and the first digits of the SHA-256 over their paths and contents."""

    files: tuple[BundleFile, ...]
    sha: str

    @property
    def prefix(self) -> str:
        """Where the bundle lies in its bucket, without a slash at the end."""
        return f"lifecycle/{self.sha}"

    def key(self, file: BundleFile) -> str:
        return f"{self.prefix}/{file.path}"


def bundle(spec: ClusterSpec, folder: Path = FOLDER, *, region: str = "") -> Bundle:
    """Return the files that nodes of this cluster boot with: the scripts in `folder`, the packed agent, the node document,
    and what node.sh copies under each node's root. `region` is needed where there is a proxy or a bucket is mounted."""
    document = json.dumps(node_document(spec), sort_keys=True, indent=1) + "\n"
    for_root = {f"{NODE_FILES}/{path}": content for path, content in proxy.files(spec, region).items()}
    slurm = {SLURM: slurm_document(spec)} if spec.controller else {}
    users = {ON_CONFIGURED: script} if (script := user_script(spec)) is not None else {}
    homes = {HOME_MOUNT: home_mount(mount)} if (mount := mounted_by_bundle(spec)) else {}
    buckets = mount_files(spec, region)
    carried = log_files(spec)
    metrics = {EXPORTERS.name: EXPORTERS.read_bytes()} if shows_metrics(spec) else {}
    packages = {PACKAGES.name: PACKAGES.read_bytes()} if buckets or carried or metrics else {}
    own = {AGENT: archive(), DOCUMENT: document.encode("ascii")}
    generated = {**own, **slurm, **for_root, **users, **homes, **buckets, **carried, **metrics, **packages}
    return gathered(folder, generated=generated)


def slurm_document(spec: ClusterSpec) -> bytes:
    assert spec.scheduler is not None
    to_zero = {group.name: fewest_processors(spec, group) for group in spec.workers if spec.goes_to_zero(group)}
    document = dynamic.document(
        spec.name,
        node_groups(spec),
        spec.scheduler.settings,
        to_zero=to_zero,
        idle_minutes=spec.scheduler.idle_minutes,
        records=records(spec),
    )
    return json.dumps(document).encode("ascii")


def home_mount(mount: NfsMount) -> bytes:
    return f"{HOME_DNS}:{mount.export} {mount.path} {mount.options}\n".encode("ascii")


def log_files(spec: ClusterSpec) -> dict[str, bytes]:
    """Return the script that carries a node's logs, and the agent's configuration; nothing on EKS."""
    if not carries_logs(spec) or spec.backend == "hyperpod-eks":
        return {}
    configuration = json.dumps(agent_configuration(spec), indent=1) + "\n"
    return {LOGS.name: LOGS.read_bytes(), LOGS_CONFIGURATION: configuration.encode("ascii")}


def mount_files(spec: ClusterSpec, region: str) -> dict[str, bytes]:
    """Return the script that mounts buckets, a list of unit and path for it, and the units; nothing without mounts."""
    mounts = spec.storage.s3_mounts
    if not mounts or spec.backend == "hyperpod-eks":
        return {}
    listed = "".join(f"{unit_name(one.path)} {one.path}\n" for one in mounts)
    # A bucket of the user's in place of one of ours is known now, and another one makes another bundle.
    own = {key: getattr(spec.buckets, key) for key in PLACEHOLDERS}
    named = (one.model_copy(update={"bucket": own.get(one.bucket) or one.bucket}) for one in mounts)
    units = {
        f"{S3_MOUNTS}/{unit_name(one.path)}": unit(one, region, proxy.ENVIRONMENT).encode("ascii") for one in named
    }
    return {MOUNT_S3.name: MOUNT_S3.read_bytes(), f"{S3_MOUNTS}/list": listed.encode("ascii"), **units}


def with_names(plain: Bundle, names: BucketNames) -> Bundle:
    """Put the names of the cluster's buckets into the units that mount them. The digits stay: a stack's account does too."""
    own = {PLACEHOLDERS[word]: name for word, name in names.by_word.items()}

    def named(file: BundleFile) -> BundleFile:
        content = file.content
        for placeholder, name in own.items():
            content = content.replace(placeholder.encode(), name.encode())
        return replace(file, content=content)

    folder = f"{S3_MOUNTS}/"
    return replace(plain, files=tuple(named(file) if file.path.startswith(folder) else file for file in plain.files))


def user_script(spec: ClusterSpec) -> bytes | None:
    """Return the script of `boot.on_configured`; UserError says why it cannot be read or would not run on a node."""
    named = spec.boot.on_configured
    if named is None:
        return None
    try:
        content = (PROGRAM / named).read_bytes()
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
        raise UserError(problem(SCRIPT_KEY, named, why, fix="name a file, from the folder infra/")) from None
    if wrong := _wrong(ON_CONFIGURED, content):
        raise UserError([problem(SCRIPT_KEY, named, flaw.why, flaw.allowed, flaw.fix) for flaw in wrong])
    return content


def gathered(
    folder: Path,
    entries: Iterable[str] = (ON_INIT, ON_CREATE),
    generated: Mapping[str, bytes] = MappingProxyType({}),
) -> Bundle:
    """Return the bundle of the files in `folder` and of what is `generated`, by path; UserError lists what would fail on
    a node: a missing entry, Windows line ends, a byte order mark, a script without `#!`, a link, too much in all. Hidden
    files and `__pycache__` are left out."""
    sources = {path.relative_to(folder).as_posix(): path for path in _members(folder)}
    files = [BundleFile(name, path.read_bytes(), path) for name, path in sources.items() if name not in generated]
    files += [BundleFile(name, content) for name, content in generated.items()]
    problems: list[str] = [
        problem(f"lifecycle/{name}", "", "is missing: a node would fail at boot", fix="put it back")
        for name in entries
        if name not in sources
    ]
    problems += [
        problem(
            f"lifecycle/{name}", "", "is generated for each cluster, and this file would not be used", fix="remove it"
        )
        for name in sources
        if name in generated
    ]
    for file in files:
        problems += _wrong(file.path, file.content)
    if (size := sum(len(file.content) for file in files)) > MAX_BYTES:
        fix = "let the image carry what is large"
        problems.append(problem("lifecycle/", size, "too many bytes in all", allowed=f"<= {MAX_BYTES}", fix=fix))
    if problems:
        raise UserError(problems)
    return bundle_of(files)


def bundle_of(files: Iterable[BundleFile]) -> Bundle:
    """Return the files by path, with their digits."""
    ordered = tuple(sorted(files, key=lambda file: file.path))
    return Bundle(ordered, _sha(ordered))


def _members(folder: Path) -> list[Path]:
    paths = [path for path in folder.rglob("*") if not _left_out(path.relative_to(folder))]
    if links := sorted(path.relative_to(folder).as_posix() for path in paths if path.is_symlink()):
        fix = "put the file itself there"
        raise UserError([problem(f"lifecycle/{name}", "link", "S3 holds no links", fix=fix) for name in links])
    return [path for path in paths if path.is_file()]


def _left_out(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _wrong(name: str, content: bytes) -> Sequence[Problem]:
    if Path(name).suffix in BINARY:
        return []
    path = f"lifecycle/{name}"
    problems: list[Problem] = []
    if content.startswith(BOM):
        problems.append(
            problem(path, "BOM", "begins with a byte order mark, and the kernel then finds no `#!`", fix="save without")
        )
    if b"\r" in content:
        problems.append(
            problem(path, "CRLF", "has Windows line ends, which bash reads as part of words", fix="save with LF")
        )
    if name.endswith(".sh") and not content.removeprefix(BOM).startswith(b"#!/"):
        first = content.split(b"\n", 1)[0].decode("utf-8", "replace")
        problems.append(problem(path, first, "has no first line that says what runs it", allowed="#!/bin/bash"))
    return problems


def _sha(files: Iterable[BundleFile]) -> str:
    """Paths and contents both count; a path holds no NUL, so that no two bundles write the same bytes."""
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.path}\0{file.sha256}\n".encode())
    return total.hexdigest()[:SHA_DIGITS]
