"""Checks of an image in a registry, without pulling it: what was built, and what nodes can run.

What needs the files themselves is not seen here: `verify.py` looked at them when the image was built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from images.check.diff import amount
from images.plan.leaks import secrets_of
from images.plan.plan import DIRTY, INPUTS, TARGET, VERSIONS
from images.registry.client import Registry
from images.registry.read import INDEXES, Found, find
from lustrain.image_file import Record
from lustrain.problem import UserError, plain

OK, WARN, FAIL = "OK", "WARN", "FAIL"
VERSION = 1
REBUILD = "build and push it again: fab image-build --push"
_REVISION = "org.opencontainers.image.revision"
_MOST_LAYERS = 127
"""overlay2 mounts 128 lower folders and no more: https://docs.docker.com/engine/storage/drivers/overlayfs-driver/"""


@dataclass(frozen=True)
class Limits:
    """What is still fine."""

    oldest_days: int = 90
    """Debian's security updates come weekly; an image of a season lacks a dozen of them."""
    budget_mb: Mapping[str, int] = field(default_factory=dict)
    """By target, MiB to pull. A budget for the unpacked size is a bound for it too."""


@dataclass(frozen=True)
class Row:
    """One finding; `fix` is empty where there is nothing to do."""

    check: str
    state: str
    what: str
    fix: str = ""
    platform: str = ""


@dataclass(frozen=True)
class Report:
    """What was found about one reference."""

    ref: str
    digest: str
    """Of what the reference stands for, an index or an image; empty where it could not be read."""
    rows: tuple[Row, ...]

    @property
    def exit_code(self) -> int:
        return int(any(row.state == FAIL for row in self.rows))


def verify(
    registry: Registry,
    ref: str,
    *,
    platform: str | None = None,
    record: Record | None = None,
    limits: Limits | None = None,
    now: datetime | None = None,
) -> Report:
    """Everything that the registry tells of `ref`, compared with image.json where it is given.

    An image that cannot be read is a FAIL like others; only a reference or platform that was mistyped raises (exit code 2).
    """
    try:
        found = find(registry, ref, platform)
    except UserError as error:
        if error.exit_code == 2:
            raise
        return Report(ref, "", tuple(Row("manifest", FAIL, line) for line in error.problems))
    first = found[0]
    digest = first.index.digest if first.index else first.image.digest
    rows = [*_identity(digest, found, record, platform)]
    for one in found:
        of = rows_of(one, record=record, limits=limits, now=now)
        rows += [Row(**{**asdict(row), "platform": one.image.platform}) for row in of]
    return Report(ref, digest, tuple(rows))


def rows_of(
    found: Found,
    *,
    record: Record | None = None,
    limits: Limits | None = None,
    now: datetime | None = None,
) -> list[Row]:
    """Return what is right and wrong with the image of one platform. Pure."""
    bounds = limits or Limits()
    config = found.image.config.get("config")
    settings: Mapping[str, Any] = config if isinstance(config, dict) else {}
    labels: Mapping[str, str] = settings.get("Labels") or {}
    return [
        _readable_by_enroot(found),
        *_labels(labels, record),
        _age(found.created, bounds.oldest_days, now or datetime.now(UTC)),
        *_size(found, labels.get(TARGET), bounds.budget_mb),
        _user(str(settings.get("User") or "")),
        _entrypoint(settings.get("Entrypoint") or []),
        _healthcheck(settings.get("Healthcheck") or {}),
        *_secrets(found),
    ]


def lines(report: Report) -> list[str]:
    """For people: one line a finding, with what to do where there is something."""
    several = len({row.platform for row in report.rows if row.platform}) > 1
    width = max((len(row.check) for row in report.rows), default=0)
    told = []
    for row in report.rows:
        place = f"{row.platform}: " if several and row.platform else ""
        told.append(
            plain(f"{row.state:<4}  {row.check:<{width}}  {place}{row.what}{f'; fix: {row.fix}' * bool(row.fix)}")
        )
    return told


def as_json(report: Report) -> dict[str, Any]:
    """One object for a program."""
    return {
        "version": VERSION,
        "ref": report.ref,
        "digest": report.digest,
        "exit": report.exit_code,
        "rows": [asdict(row) for row in report.rows],
    }


def _identity(digest: str, found: Sequence[Found], record: Record | None, platform: str | None) -> Iterator[Row]:
    if record and record.digest != digest:
        what = f"{digest}, but image.json says {record.digest}: the tag names a different image now"
        yield Row("digest", FAIL, what, f"deploy {record.deployable}, or push again")
    else:
        yield Row("digest", OK, digest + (", as in image.json" if record else ""))
    there = [one.image.platform for one in found]
    wanted = [one for one in (record.platforms if record else ()) if platform in (None, one)]
    if missing := [one for one in wanted if one not in there]:
        yield Row("platforms", FAIL, f"{', '.join(there)}; {', '.join(missing)} of image.json missing", REBUILD)
    else:
        yield Row("platforms", OK, ", ".join(there))


def _readable_by_enroot(found: Found) -> Row:
    """https://github.com/NVIDIA/pyxis/issues/180 (zstd), https://github.com/NVIDIA/JAX-Toolbox/issues/310 (OCI index)"""
    compressed = {kind.rpartition("tar")[2].lstrip(".+") or "plain" for kind in found.layer_types}
    if "zstd" in compressed:
        return Row("media types", FAIL, "layers in zstd, which enroot cannot unpack", f"{REBUILD} (it writes gzip)")
    if found.index and found.index.attestations:
        what = f"an index with {found.index.attestations} attestations, which enroot before 3.4.1 mistakes for images"
        return Row("media types", WARN, what, "build without attestations")
    if "plain" in compressed:
        return Row("media types", WARN, "layers that are not compressed: nodes pull several times the bytes", REBUILD)
    kind = "docker" if "docker" in found.media_type else "OCI"
    listed = " in an index" if found.index and found.index.media_type in INDEXES else ""
    return Row("media types", OK, f"{kind} manifest{listed}, gzip")


def _labels(labels: Mapping[str, str], record: Record | None) -> Iterator[Row]:
    revision = labels.get(_REVISION)
    commit = record.git.commit if record else None
    if not revision:
        yield Row(
            "revision", FAIL, f"no label {_REVISION}: the code it was built from is unknown", f"commit, then {REBUILD}"
        )
    elif commit and commit != revision:
        yield Row("revision", FAIL, f"{revision}, but image.json says {commit}", REBUILD)
    elif labels.get(DIRTY) == "true":
        yield Row("revision", WARN, f"{revision} with changes that are in no commit", f"commit, then {REBUILD}")
    else:
        yield Row("revision", OK, revision)
    held = {key.removeprefix(VERSIONS): value for key, value in labels.items() if key.startswith(VERSIONS)}
    wanted = record.versions if record else {}
    wrong = [
        f"{name} {held.get(name, 'unsaid')}, not {value}" for name, value in wanted.items() if held.get(name) != value
    ]
    if not held or wrong:
        what = ", ".join(wrong) or f"no labels {VERSIONS}*"
        yield Row("versions", FAIL, what, REBUILD)
    else:
        yield Row("versions", OK, ", ".join(f"{name} {value}" for name, value in sorted(held.items())))
    layers = {key.removeprefix(INPUTS) for key in labels if key.startswith(INPUTS)}
    missing = sorted(set(record.inputs if record else ()) - layers)
    if not layers or missing:
        yield Row(
            "inputs", FAIL, f"no labels {INPUTS}{','.join(missing) or '*'}: what it was built from is unknown", REBUILD
        )
    else:
        yield Row("inputs", OK, ", ".join(sorted(layers)))


def _age(created: str, oldest: int, now: datetime) -> Row:
    try:
        # Go writes nanoseconds, which Python before 3.11 refused and later cuts.
        made = datetime.fromisoformat(created)
        made = made if made.tzinfo else made.replace(tzinfo=UTC)
    except ValueError:
        return Row("age", WARN, f"unknown: made at {created!r}", REBUILD)
    age = now - made
    if age < -timedelta(days=1) or made.year < 2013:
        return Row("age", WARN, f"unknown: made at {created}, which is impossible", "set the clock of the builder")
    if age > timedelta(days=oldest):
        fix = f"{REBUILD} --no-cache, of a newer commit or with --suffix"
        return Row("age", WARN, f"{age.days} days since its commit, without the security updates since", fix)
    return Row("age", OK, f"{max(age.days, 0)} days")


def _size(found: Found, target: str | None, budgets: Mapping[str, int]) -> Iterator[Row]:
    layers, size = len(found.image.layers), found.image.size
    if layers > _MOST_LAYERS:
        yield Row("layers", FAIL, f"{layers}: nodes cannot mount more than {_MOST_LAYERS}", "join instructions")
    else:
        yield Row("layers", OK, str(layers))
    budget = budgets.get(target or "")
    if budget is not None and size > budget << 20:
        what = f"{amount(size)} to pull, over the budget of {budget} MiB"
        yield Row("size", FAIL, what, "see which layer grew with `fab image-diff`, or raise budget_mb in versions.toml")
    else:
        note = f", no budget for target {target}" if budgets and budget is None else ""
        yield Row("size", OK, f"{amount(size)} to pull{note}")


def _user(user: str) -> Row:
    name = user.partition(":")[0]
    if name in ("", "root") or (name.isdigit() and int(name) == 0):
        return Row("user", FAIL, "runs as root", "USER 1000:1000 in the Dockerfile")
    if not name.isdigit():
        what = f"{user} is a name: Kubernetes cannot tell that it is not root"
        return Row("user", WARN, what, "USER with numbers in the Dockerfile")
    return Row("user", OK, user)


def _entrypoint(words: Sequence[str]) -> Row:
    if not words:
        return Row(
            "entrypoint",
            FAIL,
            "none: the command is PID 1 and gets no SIGTERM without a handler",
            "ENTRYPOINT with tini",
        )
    if list(words[1:2]) == ["-c"]:
        return Row(
            "entrypoint", FAIL, f"{words[0]} -c: a shell, which does not pass SIGTERM on", "ENTRYPOINT as a JSON list"
        )
    return Row("entrypoint", OK, " ".join(words))


def _healthcheck(check: Mapping[str, Any]) -> Row:
    words = check.get("Test") or []
    if words and words[0] != "NONE":
        what = "a HEALTHCHECK: it takes a long checkpoint for a failure"
        return Row("healthcheck", WARN, what, "HEALTHCHECK NONE in the Dockerfile")
    return Row("healthcheck", OK, "none")


def _secrets(found: Found) -> Iterator[Row]:
    leaks = secrets_of(found.image.config)
    for leak in leaks:
        fix = "revoke it, hand it over as --netrc, and delete this image from the registry"
        yield Row("secrets", FAIL, f"{leak.where}: {leak.what}", fix)
    if not leaks:
        yield Row("secrets", OK, "none in history, environment, labels and commands")
