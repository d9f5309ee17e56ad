"""Building through the engine's HTTP interface alone, where there is no docker command: BuildKit, but without a session.

The engine fetches the context as a tar from this process, over loopback: `POST /build?version=2&remote=http://127.0.0.1:…`,
https://docs.docker.com/reference/api/engine/version/v1.45/#tag/Image/operation/ImageBuild. Without a session there are no
secrets, no cache export and no attestations; what it tells of its steps comes as `moby.buildkit.trace` records.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import shutil
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import docker
import requests
from docker.errors import DockerException

from images import engine, upload
from images.failure import failure
from images.records import Built, Context, Output, Plan
from images.silence import LONGEST_SILENCE_S, heard
from images.trace import Steps, decode
from images.watch import Silent, Watch
from lustrain.problem import FAILED, UserError, plain

CA = "images/site/ca.crt"
"""Where a build finds a certificate authority that it cannot have as a secret; mounted in RUN, never in a layer."""
_ANSWER_S = 30.0


class EngineApi:
    """The engine that `environment` (else this process's) names."""

    name = "sdk"

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment

    def cannot(self, plan: Plan, output: Output) -> str | None:
        """As in Backend; asks the engine only where it is."""
        wishes = [
            (bool(set(plan.secrets) - {"ca"}), "pass build secrets other than ca"),
            (bool(plan.cache_to), "export its cache to a registry"),
            (plan.attestations, "make attestations"),
            (output is Output.PUSH_BY_DIGEST, "push by digest"),
        ]
        if wished := [words for wish, words in wishes if wish]:
            return f"backend sdk: cannot {', '.join(wished)}; fix: install docker-buildx and use --backend buildx"
        found = engine.facts(self._environment)
        if not found.local:
            why = f"backend sdk: the engine at {found.host} cannot fetch the context from this machine's loopback"
            return f"{why}; fix: install docker-buildx and use --backend buildx"
        return None

    def build(self, plan: Plan, context: Context, target: str, output: Output, watch: Watch) -> Built:
        """As in Backend."""
        keeps = engine.facts(self._environment).containerd_store
        steps, began = Steps(watch), time.monotonic()
        _, connected = engine.connect(self._environment, timeout_s=LONGEST_SILENCE_S)
        client = connected.api
        try:
            with _served(context.folder, plan.secrets.get("ca")) as (address, asked):
                image_id = self._run(client, _words(plan, target, output, address, keeps), target, steps, watch, asked)
            if output is Output.CHECK and image_id:
                _forget(client, image_id)
        finally:
            client.close()
        digest = image_id if keeps else None
        if output is Output.CHECK:
            digest = image_id = None
        elif output is Output.PUSH:
            digest = upload.loaded(plan.tags, self._environment, watch)
        return Built(steps.ended(), round(time.monotonic() - began, 3), digest, image_id)

    def _run(
        self,
        client: docker.APIClient,
        words: Mapping[str, Any],
        target: str,
        steps: Steps,
        watch: Watch,
        asked: threading.Event,
    ) -> str | None:
        """Id of what came of it; the engine hears of it when we stop listening."""
        build = secrets.token_hex(16)
        image_id, troubles = None, []

        def silent(seconds: float) -> None:
            watch.log(steps.running() or "", f"no output for {seconds:.0f} s")

        finished = False
        try:
            for message in heard(_messages(client, {**words, "buildid": build}), silent):
                aux = message.get("aux")
                if message.get("id") == "moby.buildkit.trace":
                    with suppress(ValueError):
                        steps.take(decode(base64.b64decode(str(aux))))
                elif message.get("id") == "moby.image.id" and isinstance(aux, Mapping):
                    image_id = str(aux.get("ID"))
                elif "error" in message or "errorDetail" in message:
                    troubles.append(str(message.get("error") or message["errorDetail"]))
            finished = True
        finally:
            if not finished:
                _cancel(client, build)
        if troubles:
            raise _unreached(target, troubles[-1]) if not asked.is_set() else failure(target, steps, troubles[-1:])
        return image_id


def _words(plan: Plan, target: str, output: Output, address: str, keeps: bool) -> dict[str, Any]:
    """Parameters of the request."""
    words: dict[str, Any] = {
        "version": "2",
        "remote": address,
        "dockerfile": plan.dockerfile,
        "target": target,
        "platform": plan.platform,
        "buildargs": json.dumps(plan.build_arguments),
        "labels": json.dumps(dict(plan.labels)),
        "cachefrom": json.dumps(list(plan.cache_from)),
    }
    if plan.no_cache:
        words["nocache"] = "1"
    if output is not Output.CHECK:
        words["t"] = list(plan.tags)
    if keeps and output is Output.CHECK:
        words["outputs"] = json.dumps([{"Type": "image", "Attrs": {"store": "false"}}])
    elif keeps:
        attributes = {"oci-mediatypes": "false", "compression": "gzip"}
        words["outputs"] = json.dumps([{"Type": "moby", "Attrs": attributes}])
    return words


def _messages(client: docker.APIClient, words: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What the engine says, one object at a time; UserError where it refuses, or is gone in the middle."""
    address = f"{client.base_url}/v{client.api_version}/build"
    try:
        # Its read time-out is for one piece of the answer, which a silent step delays.
        with client.post(address, params=words, stream=True, timeout=(_ANSWER_S, LONGEST_SILENCE_S)) as answer:
            if answer.status_code >= 400:
                yield {"error": _said(answer.text)}
                return
            for line in answer.iter_lines(chunk_size=None):
                if line:
                    yield json.loads(line)
    except ValueError:
        raise UserError(
            "the engine's answer is no JSON: something else is at its address; fix: look at DOCKER_HOST", FAILED
        ) from None
    except (requests.RequestException, DockerException, OSError) as error:
        why = plain(" ".join(str(error).split()))[:200]
        raise UserError(
            f"the engine is gone in the middle of the build: {why}; fix: start it, build again", FAILED
        ) from None


def _said(text: str) -> str:
    with suppress(ValueError, AttributeError, KeyError):
        return str(json.loads(text)["message"])
    return text[:500] or "refused without a word"


def _unreached(target: str, trouble: str) -> UserError:
    if "127.0.0.1" not in trouble:
        return failure(target, Steps(Silent()), [trouble])
    why = "the engine could not fetch the context from us: its loopback is not ours (rootless, Docker Desktop, a container)"
    return UserError(f"build {target}: {why}; fix: install docker-buildx and use --backend buildx", FAILED)


def _cancel(client: docker.APIClient, build: str) -> None:
    # Whatever made us stop is told; that the engine could not be told to stop as well adds nothing to that.
    with suppress(requests.RequestException, OSError):
        client.post(f"{client.base_url}/v{client.api_version}/build/cancel", params={"id": build}, timeout=_ANSWER_S)


def _forget(client: docker.APIClient, image_id: str) -> None:
    """The older image store has no build without an image; one that has a name was there before."""
    with suppress(DockerException, requests.RequestException, OSError):
        if not client.inspect_image(image_id).get("RepoTags"):
            client.remove_image(image_id)


_SECRET_MOUNT = re.compile(r"--mount=type=secret,\S*required=false\S* (?:\\\n\s*)?")


def packed(folder: Path, ca: Path | None, into: IO[bytes]) -> None:
    """Write a context as a tar that is the same for the same files; `ca` goes where a build looks for it, unless one is there.

    GNU's format, because engines do not take one with PAX headers for an archive."""
    with tarfile.open(fileobj=into, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(folder.rglob("*")):
            name = str(path.relative_to(folder))
            if path.suffix != ".Dockerfile":
                archive.add(path, name, recursive=False, filter=_owned_by_root)
                continue
            # A mount of a secret fails without a session to ask for it, also one that need not be there.
            text = _SECRET_MOUNT.sub("", path.read_text(encoding="utf-8")).encode()
            entry = _owned_by_root(archive.gettarinfo(path, name))
            entry.size = len(text)
            archive.addfile(entry, BytesIO(text))
        if ca is not None and not (folder / CA).exists():
            entry = tarfile.TarInfo(CA)
            data = ca.read_bytes()
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, BytesIO(data))


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


@contextmanager
def _served(folder: Path, ca: Path | None) -> Iterator[tuple[str, threading.Event]]:
    """Address of the context as a tar, which only who knows it can read, and whether somebody did."""
    asked = threading.Event()
    with tempfile.TemporaryFile(prefix="lustrain-context-") as tar:
        packed(folder, ca, tar)
        size = tar.tell()
        path = f"/{secrets.token_urlsafe(32)}.tar"

        class Handler(BaseHTTPRequestHandler):
            timeout = _ANSWER_S

            def do_GET(self) -> None:
                if self.path != path:
                    self.send_error(404)
                    return
                asked.set()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-tar")
                self.send_header("Content-Length", str(size))
                self.end_headers()
                tar.seek(0)
                shutil.copyfileobj(tar, self.wfile, 1 << 20)

            def log_message(self, format: str, *args: Any) -> None:
                """The address is a secret."""

        # One client at a time, so that nobody moves the file under another.
        with HTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, name="build context", daemon=True)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}{path}", asked
            finally:
                server.shutdown()
                thread.join()
