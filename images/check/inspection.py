"""Checks of an image in a registry, without pulling it: what was built, and what nodes can run.

What needs the files themselves is not seen here: `verify.py` looked at them when the image was built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from images.plan.plan import DIRTY, INPUTS, TARGET, VERSIONS
from images.registry.client import Registry
from images.registry.read import RegistryImage, find
from lustrain.image_file import ImageRecord
from lustrain.leaks import secrets_of
from lustrain.problem import UNREACHABLE, USAGE, UserError
from lustrain.progress import BYTES, amount_text
from lustrain.status import Status
from lustrain.tables import table

OK, WARNING, FAILED = Status.OK, Status.WARNING, Status.FAILED
VERSION = 2
REBUILD = "build and push it again: fab image-build --push"
_REVISION = "org.opencontainers.image.revision"
_MOST_LAYERS = 127
"""overlay2 mounts 128 lower folders and no more: https://docs.docker.com/engine/storage/drivers/overlayfs-driver/"""


@dataclass(frozen=True)
class Row:
    """One finding; `fix` is empty where there is nothing to do."""

    check: str
    status: Status
    what: str
    fix: str = ""
    platform: str = ""


@dataclass(frozen=True)
class Report:
    """All findings about one reference."""

    ref: str
    digest: str
    """Of what the reference stands for, an index or an image; empty where it could not be read."""
    rows: tuple[Row, ...]

    @property
    def exit_code(self) -> int:
        return int(any(row.status == FAILED for row in self.rows))


def verify(
    registry: Registry,
    ref: str,
    *,
    record: ImageRecord | None = None,
    oldest_days: int = 90,
    budgets: Mapping[str, int] | None = None,
    now: datetime | None = None,
) -> Report:
    """Check all that the registry knows of `ref`, against image.json where it is given.

    `oldest_days`: Debian's security updates come weekly, and a quarter-old image lacks a dozen of them. `budgets` are MiB to
    pull, by target. An image that cannot be read has failed like others; a mistyped reference
    raises (exit code 2), and so does a registry that does not answer (3).
    """
    try:
        images = find(registry, ref)
    except UserError as error:
        if error.exit_code in (USAGE, UNREACHABLE):
            raise
        return Report(ref, "", tuple(Row("manifest", FAILED, line) for line in error.problems))
    digest = images[0].index.digest if images[0].index else images[0].image.digest
    rows = [_digest(digest, record), _platforms([each.image.platform for each in images], record)]
    for each in images:
        inner = each.image.config.get("config")
        settings: Mapping[str, Any] = inner if isinstance(inner, dict) else {}
        labels: Mapping[str, str] = settings.get("Labels") or {}
        checks = [
            _readable_by_enroot(each),
            _revision(labels, record.git.commit if record else None),
            _versions(labels, record.versions if record else {}),
            _inputs(labels, record.inputs if record else ()),
            _age(each.created, oldest_days, now or datetime.now(UTC)),
            _layers(len(each.image.layers)),
            _size(each.image.size, labels.get(TARGET), budgets or {}),
            _user(str(settings.get("User") or "")),
            _entrypoint(settings.get("Entrypoint") or []),
            _healthcheck((settings.get("Healthcheck") or {}).get("Test") or []),
            *_secrets(each.image.config),
        ]
        rows += [replace(row, platform=each.image.platform) for row in checks]
    return Report(ref, digest, tuple(rows))


def lines(report: Report) -> list[str]:
    """Return one line a finding, with its fix."""
    several = len({row.platform for row in report.rows if row.platform}) > 1
    rows = []
    for row in report.rows:
        where, fix = f"{row.platform}: " if several and row.platform else "", f"; fix: {row.fix}" if row.fix else ""
        rows.append((str(row.status), row.check, f"{where}{row.what}{fix}"))
    return table(("", "", ""), rows)[1:]


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON data."""
    return {"version": VERSION, "exit": report.exit_code, **asdict(report)}


def _digest(digest: str, record: ImageRecord | None) -> Row:
    if record and record.digest != digest:
        what = f"{digest}, but image.json has {record.digest}: the tag names a different image now"
        return Row("digest", FAILED, what, f"deploy {record.deployable}, or push again")
    return Row("digest", OK, digest + (", as in image.json" if record else ""))


def _platforms(present: Sequence[str], record: ImageRecord | None) -> Row:
    if missing := [name for name in (record.platforms if record else ()) if name not in present]:
        return Row("platforms", FAILED, f"{', '.join(present)}; {', '.join(missing)} of image.json missing", REBUILD)
    return Row("platforms", OK, ", ".join(present))


def _readable_by_enroot(image: RegistryImage) -> Row:
    """Check the media types.

    Sources: https://github.com/NVIDIA/pyxis/issues/180 (zstd), https://github.com/NVIDIA/JAX-Toolbox/issues/310 (OCI index).
    """
    compressed = {kind.rpartition("tar")[2].lstrip(".+") or "plain" for kind in image.layer_types}
    if "zstd" in compressed:
        return Row("media types", FAILED, "layers in zstd, which enroot cannot unpack", f"{REBUILD} (it writes gzip)")
    if image.index and image.index.attestations:
        what = f"an index with {image.index.attestations} attestations, which enroot before 3.4.1 mistakes for images"
        return Row("media types", WARNING, what, "build without attestations")
    if "plain" in compressed:
        return Row(
            "media types", WARNING, "layers that are not compressed: nodes pull several times the bytes", REBUILD
        )
    kind = "docker" if "docker" in image.media_type else "OCI"
    listed = " in an index" if image.index else ""
    return Row("media types", OK, f"{kind} manifest{listed}, gzip")


def _revision(labels: Mapping[str, str], commit: str | None) -> Row:
    revision = labels.get(_REVISION)
    if not revision:
        return Row("revision", FAILED, f"no label {_REVISION}: its source commit is unknown", f"commit, then {REBUILD}")
    if commit and commit != revision:
        return Row("revision", FAILED, f"{revision}, but image.json has {commit}", REBUILD)
    if labels.get(DIRTY) == "true":
        return Row("revision", WARNING, f"{revision} with changes that are in no commit", f"commit, then {REBUILD}")
    return Row("revision", OK, revision)


def _versions(labels: Mapping[str, str], wanted: Mapping[str, str]) -> Row:
    held = {key.removeprefix(VERSIONS): value for key, value in labels.items() if key.startswith(VERSIONS)}
    wrong = [
        f"{name} {held.get(name, 'unknown')}, not {value}" for name, value in wanted.items() if held.get(name) != value
    ]
    if wrong or not held:
        return Row("versions", FAILED, ", ".join(wrong) or f"no labels {VERSIONS}*", REBUILD)
    return Row("versions", OK, ", ".join(f"{name} {value}" for name, value in sorted(held.items())))


def _inputs(labels: Mapping[str, str], wanted: Iterable[str]) -> Row:
    layers = {key.removeprefix(INPUTS) for key in labels if key.startswith(INPUTS)}
    missing = ",".join(sorted(set(wanted) - layers))
    if missing or not layers:
        return Row(
            "inputs", FAILED, f"no labels {INPUTS}{missing or '*'}: the files it was built from are unknown", REBUILD
        )
    return Row("inputs", OK, ", ".join(sorted(layers)))


def _age(created: str, oldest: int, now: datetime) -> Row:
    try:
        # Go writes nanoseconds, which Python cuts to microseconds.
        made = datetime.fromisoformat(created)
        made = made if made.tzinfo else made.replace(tzinfo=UTC)
    except ValueError:
        return Row("age", WARNING, f"unknown: made at {created!r}", REBUILD)
    age = now - made
    if age < -timedelta(days=1) or made.year < 2013:
        return Row("age", WARNING, f"unknown: made at {created}, which is impossible", "set the clock of the builder")
    if age > timedelta(days=oldest):
        fix = f"{REBUILD} --no-cache, of a newer commit or with --suffix"
        return Row("age", WARNING, f"{age.days} days since its commit, without the security updates since", fix)
    return Row("age", OK, f"{max(age.days, 0)} days")


def _layers(count: int) -> Row:
    if count > _MOST_LAYERS:
        return Row("layers", FAILED, f"{count}: nodes cannot mount more than {_MOST_LAYERS}", "join instructions")
    return Row("layers", OK, str(count))


def _size(size: int, target: str | None, budgets: Mapping[str, int]) -> Row:
    budget = budgets.get(target or "")
    pull = f"{amount_text(size, BYTES)} to pull"
    if budget is not None and size > budget << 20:
        fix = "see which layer grew with `fab image-diff`, or raise budget_mb in versions.toml"
        return Row("size", FAILED, f"{pull}, over the budget of {budget} MiB", fix)
    return Row("size", OK, pull + (f", no budget for target {target}" if budgets and budget is None else ""))


def _user(user: str) -> Row:
    name = user.partition(":")[0]
    if name in ("", "root") or (name.isdigit() and int(name) == 0):
        return Row("user", FAILED, "runs as root", "USER 1000:1000 in the Dockerfile")
    if not name.isdigit():
        what = f"{user} is a name: Kubernetes cannot know that it is not root"
        return Row("user", WARNING, what, "USER with numbers in the Dockerfile")
    return Row("user", OK, user)


def _entrypoint(words: Sequence[str]) -> Row:
    if not words:
        what = "none: the command is PID 1 and gets no SIGTERM without a handler"
        return Row("entrypoint", FAILED, what, "ENTRYPOINT with tini")
    if list(words[1:2]) == ["-c"]:
        what = f"{words[0]} -c: a shell, which does not pass SIGTERM on"
        return Row("entrypoint", FAILED, what, "ENTRYPOINT as a JSON list")
    return Row("entrypoint", OK, " ".join(words))


def _healthcheck(test: Sequence[str]) -> Row:
    if test and test[0] != "NONE":
        what = "a HEALTHCHECK: it mistakes a long checkpoint for a failure"
        return Row("healthcheck", WARNING, what, "HEALTHCHECK NONE in the Dockerfile")
    return Row("healthcheck", OK, "none")


def _secrets(config: Mapping[str, Any]) -> list[Row]:
    fix = "revoke it, pass it as --netrc, and delete this image from the registry"
    leaks = [Row("secrets", FAILED, f"{leak.where}: {leak.what}", fix) for leak in secrets_of(config)]
    return leaks or [Row("secrets", OK, "none in history, environment, labels and commands")]
