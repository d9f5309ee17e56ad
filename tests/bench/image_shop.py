"""Where bench_images makes its images: one folder a variant, engines that begin empty, a registry, and torch's wheel in the
network."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from images.plan import context, versions
from rehearsal.lab.containers import base
from rehearsal.lab.containers.buildkit import BuildKit
from rehearsal.lab.containers.engine import Engine
from rehearsal.lab.containers.registry import Registry
from tests.bench.harness import timed

PEERS = Path(__file__).with_name("image_peers")
FREE_GB = 15
EDITED = "trainer/__main__.py"
VERIFY = ("--target=cpu-verify", "--output=type=cacheonly")
# Wheels of older versions of a small package: https://pypi.org/project/tqdm/#history
BUMPS = {
    "4.69.1": "0a654b96f7a2660cceb615b56f307ec2bef96c515409014a429a561981ab52b4",
    "4.69.0": "9979978912be667a6ef21fd5d8abf54e324e63d82f7f43c360792ebc2bc4e622",
    "4.68.4": "5168118b2368f48c561afda8020fd79195b1bdb0bdf8086b88442c267a315dc2",
    "4.68.3": "39832cc2def2789a6f29df83f172db7416cea70052c0907a57801c5f2fdccb03",
    "4.68.2": "d4240441fb5353290b87d6a85968c9decc131a99b8c7faa28269d829de669ede",
}
_MANIFESTS = "application/vnd.docker.distribution.manifest.v2+json, application/vnd.oci.image.manifest.v1+json"
_PIN = re.compile(r"^([\w.-]+==[^\s;\\]+)", re.MULTILINE)


class Variant:
    """One way to build the image, in a folder of its own that is edited between builds."""

    def __init__(self, name: str, folder: Path, dockerfile: Path, *options: str) -> None:
        self.name = name
        self.folder = folder
        self.options = ("--file", str(dockerfile), *options)
        self._bumps = iter(BUMPS.items())
        self._edits = 0
        self.built = 0

    @property
    def repository(self) -> str:
        """Of its last build into an engine: each has one of its own, because the engine throws away the snapshots of an image
        that loses its tag while the next one is unpacked on them, and because a repository that has a layer takes it in no
        time."""
        return f"{self.name}/{self.built}"

    def edit(self) -> None:
        """Change one file of the trainer."""
        self._edits += 1
        with (self.folder / EDITED).open("a") as file:
            file.write(f"# edit {self._edits}\n")

    def bump(self) -> None:
        """Take another version of one small package, which no build before had."""
        version, digest = next(self._bumps)
        lock, pins = self.folder / "images/locks/app.lock", self.folder / "requirements.txt"
        if lock.exists():
            entry = f"tqdm=={version} \\\n    --hash=sha256:{digest}\n"
            lock.write_text(_changed(r"^tqdm==\S+ \\\n(?:    --hash=\S+(?: \\)?\n)+", entry, lock.read_text()))
        else:
            pins.write_text(_changed(r"^tqdm==\S+$", f"tqdm=={version}", pins.read_text()))


def _changed(pattern: str, new: str, text: str) -> str:
    result, count = re.subn(pattern, lambda _: new, text, flags=re.MULTILINE)
    if count != 1:
        raise RuntimeError(f"{count} pins of tqdm where one was expected")
    return result


@dataclass(frozen=True)
class Pushed:
    """An image's layers in the registry: digest → bytes compressed."""

    layers: dict[str, int]
    unpacked: int
    rest: int
    """Bytes of manifest and configuration, which a node reads too."""

    @property
    def size(self) -> int:
        return sum(self.layers.values())

    def new_since(self, old: Pushed) -> int:
        """Bytes that a node pulls which has the old image."""
        return sum(size for digest, size in self.layers.items() if digest not in old.layers) + self.rest


class Bench:
    """Folders, registry and wheels that outlive the engines."""

    def __init__(self, folder: Path, registry: Registry) -> None:
        self.folder = folder
        self.registry = registry
        self.engine: Engine | None = None
        self.base = ""
        self._engines = 0
        self._common: tuple[str, ...] = ()
        self.ours = self._ours()
        self.bad, self.good, self.textbook = (self._peer(name) for name in ("bad", "good", "textbook"))

    def _ours(self) -> Variant:
        checkout = base.checkout(self.folder / "checkout")
        # The wheel comes over the network, to ours as to the others.
        shutil.rmtree(checkout / context.SITE / "wheels")
        found = context.stage(checkout, "cpu", versions.load(), self.folder / "ours")
        return Variant("ours", found.folder, found.folder / "images/trainer.Dockerfile", "--target", "cpu")

    def _peer(self, name: str) -> Variant:
        folder = self.folder / name
        shutil.copytree(self.ours.folder / "trainer", folder / "trainer")
        locks = [self.ours.folder / "images/locks" / one for one in ("torch-cpu.lock", "app.lock")]
        pins = {pin for lock in locks for pin in _PIN.findall(lock.read_text())}
        (folder / "requirements.txt").write_text("".join(f"{pin}\n" for pin in sorted(pins)))
        return Variant(name, folder, PEERS / f"{name}.Dockerfile")

    @contextmanager
    def empty_engine(self) -> Iterator[Engine]:
        """An engine that has nothing, not even the base."""
        self._engines += 1
        with Engine(self.folder / f"engine-{self._engines}") as engine:
            self.engine = engine
            try:
                yield engine
            finally:
                self.engine = None

    def furnish(self, engine: Engine) -> None:
        """Push a base image from `engine`, and serve torch's wheel on its bridge: the same address to all that follow."""
        tag = f"{self.registry.host}/base/bookworm:minbase"
        engine.docker("import", "--change", 'CMD ["bash"]', base.base_tar(), tag)
        engine.docker("push", "--quiet", tag)
        self.base = engine.docker("image", "inspect", "--format", "{{index .RepoDigests 0}}", tag).stdout.strip()
        handler = partial(_Quiet, directory=str(base.wheels()))
        server = ThreadingHTTPServer((engine.address, 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        links = f"http://{engine.address}:{server.server_port}/"
        arguments = {"BASE_IMAGE": self.base, "TOOLS_IMAGE": self.base, "TORCH_CPU_LINKS": links}
        arguments |= {"WHEELS": links, "PIP_TRUSTED_HOST": engine.address}
        ca = os.environ.get("SSL_CERT_FILE", "")
        secret = ("--secret", f"id=ca,src={ca}") if Path(ca).is_file() else ()
        self._common = (*(f"--build-arg={name}={value}" for name, value in arguments.items()), *secret)

    def ref(self, variant: Variant) -> str:
        """What its last build into an engine is called."""
        return f"{self.registry.host}/{variant.repository}:bench"

    @property
    def cache(self) -> str:
        return f"type=registry,ref={self.registry.host}/cache:cpu"

    def build(self, variant: Variant, *options: str, builder: BuildKit | None = None) -> float:
        """Seconds of one build into the engine, or to where `options` say by a builder of its own. RuntimeError with its last
        lines; ends the bench where the disk gets full."""
        assert self.engine is not None
        free = shutil.disk_usage(tempfile.gettempdir()).free / 1e9
        if free < FREE_GB:
            sys.exit(f"bench_images needs {FREE_GB} GB free in {tempfile.gettempdir()}, {free:.0f} are; fix: make room")
        command = ["buildx", "build", "--provenance=false", "--progress=plain", *variant.options, *self._common]
        tag: tuple[str, ...] = ()
        if VERIFY[0] not in options and builder is None:
            variant.built += 1
            tag = ("--tag", self.ref(variant))
        engine = self.engine
        environment = (builder or engine).environment
        seconds = timed(lambda: engine.docker(*command, *tag, *options, variant.folder, env=environment))
        say(f"{variant.name} {' '.join(one for one in options if one.startswith('--'))}: {seconds:.1f} s")
        return seconds

    def cold(self, variant: Variant) -> float:
        """Seconds of a build and its push in an engine that has nothing."""
        with self.empty_engine():
            # What ran before is written to the disk by then.
            os.sync()
            return self.build(variant, "--push")

    def changed(self, variant: Variant, change: Callable[[], None], *options: str) -> float:
        """Seconds of the build after a change."""
        change()
        return self.build(variant, *options)

    def pushed(self, variant: Variant) -> Pushed:
        """What the registry holds of it, after pushing what the engine has."""
        assert self.engine is not None
        self.engine.docker("push", "--quiet", self.ref(variant))
        body = self._get(f"{variant.repository}/manifests/bench", {"Accept": _MANIFESTS})
        manifest = json.loads(body)
        layers = {one["digest"]: one["size"] for one in manifest["layers"]}
        # The last four bytes of a gzip file are the size of what is in it: https://www.rfc-editor.org/rfc/rfc1952
        ends = [self._get(f"{variant.repository}/blobs/{one}", {"Range": "bytes=-4"}) for one in layers]
        unpacked = sum(int.from_bytes(end, "little") for end in ends)
        return Pushed(layers, unpacked, len(body) + manifest["config"]["size"])

    def layer(self, variant: Variant, digest: str) -> bytes:
        """One layer of it as a node gets it."""
        return self._get(f"{variant.repository}/blobs/{digest}", {})

    def _get(self, path: str, headers: dict[str, str]) -> bytes:
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.registry.url}/v2/{path}", headers=headers)
        ) as answer:
            return bytes(answer.read())


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """The bench has its own lines."""


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
