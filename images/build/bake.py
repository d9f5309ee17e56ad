"""Builds by `docker buildx bake`, from a generated bake file."""

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
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from images.build import engine
from images.build.failure import failure
from images.build.output import read_lines
from images.build.steps import Steps
from images.model import BuildObserver, Built, Context, Output, Plan
from images.plan.references import parse
from images.registry import tags
from images.registry.client import connect
from images.registry.credentials import docker_config
from lustrain.problem import FAILED, UserError, plain, problem

OLDEST = (0, 13)
"""This is the first buildx with `--progress=rawjson`: https://github.com/docker/buildx/releases/tag/v0.13.0"""
_END_S = 15.0


class Bake:
    """This is the CLI with its buildx plugin, as `environment` (else this process's) locates and configures them."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.environment = dict(os.environ if environment is None else environment)

    @cached_property
    def driver(self) -> str:
        """Return the driver of the builder in use; `docker` is the engine's own."""
        driver = re.search(r"^Driver:\s*(\S+)", self._ask("buildx", "inspect"), re.MULTILINE)
        return driver[1] if driver else "docker"

    def check(self, plan: Plan) -> None:
        """Check with the plugin and the engine that the plan can be built here; UserError in one line, with the fix."""
        version = self._ask("buildx", "version")
        if not version:
            raise UserError("docker with the buildx plugin is not on PATH; fix: install docker-buildx")
        number = re.search(r"\sv?(\d+)\.(\d+)", version)
        # A plugin that was built from a branch names a commit instead.
        if number and (int(number[1]), int(number[2])) < OLDEST:
            why, fix = "too old", "update docker-buildx"
            raise UserError(problem("buildx", number[0].strip(), why, allowed=">= 0.13", fix=fix))
        needs = {"export its cache to a registry": plan.cache_to, "make attestations": plan.attestations}
        needed = ", ".join(words for words, value in needs.items() if value)
        if needed and not self._chooses_types():
            own = "docker buildx create --driver docker-container --use"
            fix = f'set {{"features": {{"containerd-snapshotter": true}}}} in daemon.json, or {own}'
            raise UserError(f"buildx: this engine's image store cannot {needed}; fix: {fix}")

    def build(self, plan: Plan, context: Context, target: str, output: Output, watch: BuildObserver) -> Built:
        """Build one stage of the plan's Dockerfile. UserError with the failed step's last lines where it fails."""
        steps, began = Steps(watch), time.monotonic()
        bases = [plan.arguments[name] for name in ("BASE_IMAGE", "TOOLS_IMAGE") if plan.arguments.get(name)]
        pushed = plan.tags if output in (Output.PUSH, Output.PUSH_BY_DIGEST) else ()
        refs = (*pushed, *bases, *plan.cache_from, *filter(None, [plan.cache_to]))
        hosts = {parse(ref).registry for ref in refs}
        export = self._export(plan, output)
        with (
            tempfile.TemporaryDirectory(prefix="lustrain-bake-") as name,
            docker_config(hosts, self.environment) as login,
        ):
            folder = Path(name)
            file, metadata = folder / "bake.json", folder / "metadata.json"
            # buildx knows a context by its folder's name alone, and does not send a file again that has the same size and time:
            # staged files have one time, and a changed digit leaves the size.
            link = folder / _sum(context.folder)
            link.symlink_to(context.folder.absolute(), target_is_directory=True)
            wanted = bake_file(plan, target, export, str(link), types=self._chooses_types())
            # HCL's templates are switched off, which its JSON has as well:
            # https://github.com/hashicorp/hcl/blob/main/json/spec.md#expressions
            file.write_text(json.dumps(wanted).replace("${", "$${").replace("%{", "%%{"))
            words = ["docker", "buildx", "bake", "-f", str(file), "--progress=rawjson"]
            words += [f"--metadata-file={metadata}", target]
            status, messages = self._run(words, context.folder, login, steps, watch)
            if status:
                messages = messages or [f"docker buildx ended with {status} without a message"]
                raise failure(target, steps, messages, pushed)
            report = json.loads(metadata.read_text()).get(target) or {} if metadata.exists() else {}
        digest, image_id = self._result(plan, output, export, report)
        return Built(steps.ended(), round(time.monotonic() - began, 3), digest, image_id)

    def _run(
        self, words: list[str], folder: Path, login: Mapping[str, str], steps: Steps, watch: BuildObserver
    ) -> tuple[int, list[str]]:
        """Run buildx, in a process group that has ended when this does; its progress goes to `steps`.

        Return the exit status and the lines that are not progress.
        """
        # buildx asks for permission to read secrets outside of its folder; this program has named them itself.
        # https://docs.docker.com/build/release-notes/#0200
        variables = {**self.environment, "BUILDX_BAKE_ENTITLEMENTS_FS": "0", **login}
        messages: list[str] = []
        child = subprocess.Popen(
            words,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        )
        assert child.stderr is not None

        def silent(seconds: float) -> None:
            watch.log(steps.running() or "", f"no output for {seconds:.0f} s")

        try:
            for item in documents(read_lines(child.stderr, silent)):
                if isinstance(item, str):
                    messages.append(item)
                    continue
                try:
                    steps.add(item)
                except ValueError:
                    messages.append(json.dumps(item)[:500])
            return child.wait(_END_S), messages
        finally:
            # Interrupted first: buildx then has the engine cancel the build.
            for number in (signal.SIGINT, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_END_S)

    def _export(self, plan: Plan, output: Output) -> Output:
        """Return how buildx exports the image.

        buildx pushes a tag without a look at the image that has it. So a builder of its own pushes by digest, and the tag
        follows; the engine's own builder cannot, and pushes new tags only.
        """
        if output is not Output.PUSH:
            return output
        if self.driver != "docker":
            return Output.PUSH_BY_DIGEST
        return Output.LOAD if any(connect(tag).digest_of(tag) for tag in plan.tags) else Output.PUSH

    def _result(
        self, plan: Plan, output: Output, export: Output, report: Mapping[str, Any]
    ) -> tuple[str | None, str | None]:
        """Return the digest and the image's id, after the tags of a push were put on or confirmed."""
        # An engine of the older store reports the configuration's digest in place of a manifest's.
        digest, image_id = (report.get("containerimage.descriptor") or {}).get("digest"), None
        if export is Output.LOAD or (export is Output.PUSH and digest is None):
            image_id = self._ask("image", "inspect", "--format", "{{.Id}}", plan.tags[0]).strip() or None
        if export is Output.PUSH_BY_DIGEST and digest is None:
            why = f"{plan.repository}: buildx pushed and did not report the digest; fix: update docker-buildx"
            raise UserError(why, FAILED)
        if output is Output.PUSH:
            put = tags.tag if export is Output.PUSH_BY_DIGEST else tags.confirm
            digests = [put(tag, str(digest or image_id)) for tag in plan.tags]
            digest = digests[0]
        return digest, image_id

    def _chooses_types(self) -> bool:
        """Return whether the builder can choose media types: a BuildKit of its own, or an engine with containerd's store."""
        return self.driver != "docker" or engine.facts(self.environment).containerd_store

    def _ask(self, *words: str) -> str:
        """Return what the docker command prints; nothing where it fails."""
        code, output, _ = engine.docker(self.environment, *words)
        return "" if code else output


def bake_file(plan: Plan, target: str, output: Output, folder: str = ".", *, types: bool = True) -> dict[str, Any]:
    """Return the bake file that builds `target` as planned from the context in `folder`.

    `types`: the builder can choose media types.
    """
    wanted: dict[str, Any] = {
        "context": folder,
        "dockerfile": plan.dockerfile,
        "target": target,
        "platforms": [plan.platform],
        "args": plan.build_arguments,
        "labels": dict(plan.labels),
        "tags": list(plan.tags) if output in (Output.LOAD, Output.PUSH) else [],
        "output": [_output(plan, output, types)],
        "cache-from": [_csv(["type=registry", f"ref={ref}"]) for ref in plan.cache_from],
        "secret": [_csv([f"id={name}", f"src={path.absolute()}"]) for name, path in sorted(plan.secrets.items())],
        "attest": ["type=provenance,mode=max", "type=sbom"] if plan.attestations else ["type=provenance,disabled=true"],
        "no-cache": plan.no_cache,
    }
    if plan.cache_to and output is not Output.CHECK:
        more = ["mode=max", "image-manifest=true", "oci-mediatypes=true", "ignore-error=true"]
        wanted["cache-to"] = [_csv(["type=registry", f"ref={plan.cache_to}", *more])]
    return {"target": {target: wanted}}


def _sum(folder: Path) -> str:
    """Return a sum of the names, modes and bytes of all files in a folder."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.relative_to(folder)}\0{path.stat().st_mode:o}\0{content}\n".encode())
    return total.hexdigest()


def _output(plan: Plan, output: Output, types: bool) -> str:
    if output is Output.CHECK:
        return "type=cacheonly"
    # enroot and pyxis read neither zstd layers nor OCI indexes: https://github.com/NVIDIA/pyxis/issues/180 and
    # https://github.com/NVIDIA/JAX-Toolbox/issues/310; attestations need an OCI index.
    media = [f"oci-mediatypes={str(plan.attestations).lower()}", "compression=gzip"] if types else []
    if output is Output.LOAD:
        return _csv(["type=docker", *media])
    # Kept in no store: for that a builder would fetch the layers that it knows from a cache alone.
    by_digest = ["push-by-digest=true", "name-canonical=true", f"name={plan.repository}", "store=false"]
    return _csv(["type=image", "push=true", *(by_digest if output is Output.PUSH_BY_DIGEST else []), *media])


def _csv(fields: list[str]) -> str:
    """Return a record of CSV, as which BuildKit reads its flags: a path may hold a comma."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(fields)
    return text.getvalue()


def documents(lines: Iterable[str]) -> Iterator[dict[str, Any] | str]:
    """Yield objects of JSON, on one line or on many, and the lines between them."""
    pending = ""
    for line in lines:
        if pending or line.startswith("{"):
            pending += line
            # Indented output closes an object with a brace in the first column.
            if line.startswith(("{", "}")):
                with suppress(ValueError):
                    document = json.loads(pending)
                    pending = ""
                    yield document
        elif line.strip():
            yield plain(line.rstrip())
    yield from (plain(line.rstrip()) for line in pending.splitlines())
