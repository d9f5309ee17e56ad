"""Builds by `docker buildx bake`, from the context's bake file and a generated one."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from images.build import engine
from images.build.failure import failure
from images.build.output import read_lines
from images.build.steps import Steps
from images.model import Built, Context, Output, Plan, Watch
from images.plan.references import parse
from images.registry import merge
from images.registry.client import connect
from images.registry.credentials import docker_config
from lustrain.problem import FAILED, UserError, plain, problem

BAKE_FILE = Path(__file__).parents[1] / "docker-bake.hcl"
OLDEST = (0, 13)
"""The first with `--progress=rawjson`: https://github.com/docker/buildx/releases/tag/v0.13.0"""
_END_S = 15.0


class Bake:
    """The CLI with its buildx plugin, as `environment` (else this process's) finds and configures them."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(os.environ if environment is None else environment)

    def version(self) -> tuple[int, ...] | None:
        """Of the plugin; None where the CLI or the plugin is missing."""
        answer = self._ask("buildx", "version")
        number = re.search(r"\sv?(\d+)\.(\d+)", answer)
        # A plugin that was built from a branch names a commit instead.
        return (int(number[1]), int(number[2])) if number else OLDEST if answer else None

    def cannot(self, plan: Plan, output: Output) -> str | None:
        """Why the plan cannot be built here, in one line with the fix; None where it can. Asks the plugin and the engine."""
        version = self.version()
        if version is None:
            return "docker with the buildx plugin is not on PATH; fix: install docker-buildx"
        if version < OLDEST:
            return problem(
                "buildx",
                ".".join(map(str, version)),
                "too old",
                allowed=">= 0.13",
                fix="update docker-buildx",
            )
        for name, path in plan.secrets.items():
            if not path.is_file():
                return problem(f"secret {name}", str(path), "is not a file")
        return self._beyond_builder(plan, output)

    def build(self, plan: Plan, context: Context, target: str, output: Output, watch: Watch) -> Built:
        """Build one stage of the plan's Dockerfile. UserError with the failed step's last lines where it fails."""
        steps, began = Steps(watch), time.monotonic()
        bases = [plan.arguments[name] for name in ("BASE_IMAGE", "TOOLS_IMAGE") if plan.arguments.get(name)]
        pushed = plan.tags if output in (Output.PUSH, Output.PUSH_BY_DIGEST) else ()
        asked = (*pushed, *bases, *plan.cache_from, *filter(None, [plan.cache_to]))
        hosts = {parse(ref).registry for ref in asked}
        with (
            tempfile.TemporaryDirectory(prefix="lustrain-bake-") as found,
            docker_config(hosts, self._environment) as logged_in,
        ):
            folder = Path(found)
            wanted, metadata = folder / "override.json", folder / "metadata.json"
            # buildx knows a context by its folder's name alone, and takes a file of it that has the size and the time of the
            # one it sent last for the same: staged files have one time, and a changed digit has the same size.
            named = folder / _sum(context.folder)
            named.symlink_to(context.folder.absolute(), target_is_directory=True)
            made = self._route(plan, output)
            wanted.write_text(json.dumps(override(plan, target, made, str(named), keeps=self._keeps())))
            words = ["buildx", "bake", "-f", str(BAKE_FILE), "-f", str(wanted), "--progress=rawjson"]
            words += [f"--metadata-file={metadata}", target]
            status, prose = self._run(
                words, context.folder, self._variables(plan.attestations) | logged_in, steps, watch
            )
            if status:
                raise failure(target, steps, prose or [f"docker buildx ended with {status} without a message"], pushed)
            told = json.loads(metadata.read_text()).get(target) or {} if metadata.exists() else {}
        return self._built(plan, output, made, steps, told, began)

    def _run(
        self, words: list[str], folder: Path, variables: Mapping[str, str], steps: Steps, watch: Watch
    ) -> tuple[int, list[str]]:
        """Exit status, and what was no JSON."""
        prose: list[str] = []

        def silent(seconds: float) -> None:
            watch.log(steps.running() or "", f"no output for {seconds:.0f} s")

        with _child(["docker", *words], folder, variables) as child:
            assert child.stderr is not None
            for one in documents(read_lines(child.stderr, silent)):
                if isinstance(one, str):
                    prose.append(one)
                    continue
                try:
                    steps.take(one)
                except ValueError:
                    prose.append(json.dumps(one)[:500])
            return child.wait(_END_S), prose

    def _variables(self, attestations: bool) -> dict[str, str]:
        # It asks for leave to read secrets outside of its folder; it was this program that named them.
        # https://docs.docker.com/build/release-notes/#0200
        more = {"BUILDX_BAKE_ENTITLEMENTS_FS": "0"}
        if not attestations:
            more["BUILDX_NO_DEFAULT_ATTESTATIONS"] = "1"
        # The plan has decided; a CA or a TAG that happens to be in the environment would set the bake file's variables.
        ours = set(re.findall(r'^variable "(\w+)"', BAKE_FILE.read_text(), re.MULTILINE))
        return {name: value for name, value in self._environment.items() if name not in ours} | more

    def _route(self, plan: Plan, output: Output) -> Output:
        """Return what buildx is asked for. It pushes without asking whether a tag is another image's: so a builder that can
        pushes by digest, to be named afterwards, and the engine's own builder pushes new tags only."""
        if output is not Output.PUSH:
            return output
        if self._driver() != "docker":
            return Output.PUSH_BY_DIGEST
        return Output.LOAD if any(connect(tag).digest_of(tag) for tag in plan.tags) else Output.PUSH

    def _built(
        self, plan: Plan, output: Output, made: Output, steps: Steps, told: Mapping[str, Any], began: float
    ) -> Built:
        # An engine of the older store tells the configuration's digest in place of a manifest's.
        digest, image_id = (told.get("containerimage.descriptor") or {}).get("digest"), None
        if made is Output.LOAD or (made is Output.PUSH and digest is None):
            image_id = self._ask("image", "inspect", "--format", "{{.Id}}", plan.tags[0]).strip() or None
        if made is Output.PUSH_BY_DIGEST and digest is None:
            raise UserError(
                f"{plan.repository}: buildx pushed and did not report the digest; fix: update docker-buildx", FAILED
            )
        if output is Output.PUSH:
            named = merge.tag if made is Output.PUSH_BY_DIGEST else merge.confirm
            digests = [named(tag, str(digest or image_id)) for tag in plan.tags]
            digest = digests[0]
        return Built(steps.ended(), round(time.monotonic() - began, 3), digest, image_id)

    def _beyond_builder(self, plan: Plan, output: Output) -> str | None:
        """Return why the engine's built-in builder cannot build this; a builder in a container of its own can build all."""
        wishes = [(bool(plan.cache_to), "export its cache to a registry"), (plan.attestations, "make attestations")]
        wished = [words for wish, words in wishes if wish]
        if not wished and output is not Output.PUSH_BY_DIGEST:
            return None
        own = "docker buildx create --driver docker-container --use"
        if output is Output.PUSH_BY_DIGEST and self._driver() == "docker":
            # https://github.com/docker/buildx/blob/v0.13.1/build/build.go refuses it.
            return f"buildx: the engine's own builder does not push by digest; fix: {own}"
        if not wished or self._keeps():
            return None
        fix = f'set {{"features": {{"containerd-snapshotter": true}}}} in daemon.json, or {own}'
        return f"buildx: this engine's image store cannot {', '.join(wished)}; fix: {fix}"

    def _driver(self) -> str:
        driver = re.search(r"^Driver:\s*(\S+)", self._ask("buildx", "inspect"), re.MULTILINE)
        return driver[1] if driver else "docker"

    def _keeps(self) -> bool:
        """Return whether the builder handles images as a registry has them: a BuildKit of its own, or an engine with
        containerd's store."""
        return self._driver() != "docker" or engine.facts(self._environment).containerd_store

    def _ask(self, *words: str) -> str:
        """Return what the docker command prints; nothing where it fails."""
        code, output, _ = engine.docker(self._environment, *words)
        return "" if code else output


def override(plan: Plan, target: str, output: Output, folder: str = ".", *, keeps: bool = True) -> dict[str, Any]:
    """Return the bake file, as JSON, that makes `target` what the plan says from the context in `folder`. `keeps`: the
    builder has media types to choose."""
    wanted: dict[str, Any] = {
        "context": folder,
        "dockerfile": plan.dockerfile,
        "target": target,
        "platforms": [plan.platform],
        "args": plan.build_arguments,
        "labels": dict(plan.labels),
        "tags": list(plan.tags) if output in (Output.LOAD, Output.PUSH) else [],
        "output": [_output(plan, output, keeps)],
        "cache-from": [_csv(["type=registry", f"ref={ref}"]) for ref in plan.cache_from],
        "secret": [_csv([f"id={name}", f"src={path.absolute()}"]) for name, path in sorted(plan.secrets.items())],
        "attest": ["type=provenance,mode=max", "type=sbom"] if plan.attestations else ["type=provenance,disabled=true"],
        "no-cache": plan.no_cache,
    }
    if plan.cache_to and output is not Output.CHECK:
        more = ["mode=max", "image-manifest=true", "oci-mediatypes=true", "ignore-error=true"]
        wanted["cache-to"] = [_csv(["type=registry", f"ref={plan.cache_to}", *more])]
    found: dict[str, Any] = _literal({"target": {target: wanted}})
    return found


def _sum(folder: Path) -> str:
    """Of the names, modes and bytes of all files in it."""
    total = hashlib.sha256()
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.relative_to(folder)}\0{path.stat().st_mode:o}\0{content}\n".encode())
    return total.hexdigest()


def _output(plan: Plan, output: Output, keeps: bool) -> str:
    if output is Output.CHECK:
        return "type=cacheonly"
    # enroot and pyxis read neither zstd layers nor OCI indexes: https://github.com/NVIDIA/pyxis/issues/180 and
    # https://github.com/NVIDIA/JAX-Toolbox/issues/310; attestations need an OCI index.
    media = [f"oci-mediatypes={str(plan.attestations).lower()}", "compression=gzip"] if keeps else []
    if output is Output.LOAD:
        return _csv(["type=docker", *media])
    # Kept in no store: for that a builder would fetch the layers that it knows from a cache alone.
    by_digest = ["push-by-digest=true", "name-canonical=true", f"name={plan.repository}", "store=false"]
    return _csv(["type=image", "push=true", *(by_digest if output is Output.PUSH_BY_DIGEST else []), *media])


def _csv(fields: list[str]) -> str:
    """As BuildKit's flags are read: one record of CSV, so that a path may hold a comma."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(fields)
    return text.getvalue()


def _literal(value: Any) -> Any:
    """With HCL's templates switched off, which its JSON has as well:
    https://github.com/hashicorp/hcl/blob/main/json/spec.md#expressions"""
    if isinstance(value, str):
        return value.replace("${", "$${").replace("%{", "%%{")
    if isinstance(value, Mapping):
        return {key: _literal(one) for key, one in value.items()}
    return [_literal(one) for one in value] if isinstance(value, list) else value


def documents(lines: Iterable[str]) -> Iterator[dict[str, Any] | str]:
    """Objects of JSON, on one line or on many, and the lines between them."""
    pending: list[str] = []
    for line in lines:
        if not pending and not line.startswith("{"):
            if line.strip():
                yield plain(line.rstrip())
            continue
        pending.append(line)
        # Indented output closes an object with a brace in the first column.
        if len(pending) > 1 and not line.startswith("}"):
            continue
        with suppress(ValueError):
            found = json.loads("".join(pending))
            pending.clear()
            yield found
    yield from (plain(line.rstrip()) for line in pending)


@contextmanager
def _child(words: list[str], folder: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a child in a group of its own, all of which has ended when this does."""
    child = subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
    )
    try:
        yield child
    finally:
        # Interrupted first: buildx then has the engine cancel the build.
        for number in (signal.SIGINT, signal.SIGKILL):
            if child.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_END_S)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
