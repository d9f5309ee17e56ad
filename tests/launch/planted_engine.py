"""Not docker: a stand-in for the nodes of a lab, on which no engine runs. It writes down its words, and runs a container's
command on the node itself, with the variables that a container would have, and only where what it would mount is there."""

from __future__ import annotations

import sys
from pathlib import Path

from lustrain.image_file import GitState, ImageRecord, write
from rehearsal.lab.node import Node
from tests.lab.training import ROOT

DIGEST = f"sha256:{'1' * 64}"
IMAGE, DENIED = f"example.org/team/trainer@{DIGEST}", f"example.org/team/denied@{DIGEST}"
RECORD = "/run/docker.calls"
PROGRAM = f"""#!{sys.executable} -I
import os, sys

verb, *words = sys.argv[1:]
with open("{RECORD}", "a") as file:
    file.write(" ".join([verb, *words]) + chr(10))
if verb in ("version", "--version"):
    print("Docker version 26")
elif verb in ("image", "pull") and "denied" in words[-1]:
    sys.exit("Error response from daemon: pull access denied")
elif verb == "run":
    # What the image brings along.
    environ = {{"PATH": "{sys.prefix}/bin:/usr/bin:/bin", "PYTHONPATH": "{ROOT}"}}
    while words[0].startswith("-"):
        option, _, value = words.pop(0).partition("=")
        name, given, text = value.partition("=")
        if option == "--env" and (given or name in os.environ):
            environ[name] = text if given else os.environ[name]
        if option == "--mount" and not os.path.exists(source := value.split(",")[1].partition("=")[2]):
            print("docker: bind source path does not exist:", source, file=sys.stderr)
            sys.exit(125)
    os.chdir("/tmp")
    os.execvpe(words[1], words[1:], environ)
"""


def plant(node: Node) -> None:
    for folder in ("/usr/bin", "/usr/local/bin"):
        node.write(f"{folder}/docker", PROGRAM, 0o755)


def record(file: Path, image: str) -> None:
    """Write the image.json of an image for nodes without GPUs."""
    ref, content = f"{image.partition('@')[0]}:1", f"sha256:{'0' * 64}"
    write(file, ImageRecord(ref, DIGEST, "cpu", ("linux/amd64",), {}, GitState(None, False), content, {}))


def calls(node: Node) -> list[str]:
    """What it was called with on a node."""
    return node.read(RECORD).splitlines()
