"""Gives pods the files of this machine, where no image of the trainer is: also as a kubectl that does so with what it creates.

`python host_pods.py SETTINGS KUBECTL WORDS…`; standard library only, because each call of kubectl starts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

KEPT = ("LUSTRAIN_ATTEMPT",)
"""Variables of a container that stay."""


def adapt(pod: dict[str, Any], settings: dict[str, Any]) -> None:
    """Change the spec of a pod. `settings`: image, variables, paths of this machine, and the folder that its claim is."""
    del pod["securityContext"]
    (container,) = pod["containers"]
    container |= {"image": settings["image"], "imagePullPolicy": "Never", "command": ["/usr/bin/env"]}
    kept = [one for one in container["env"] if one["name"] in KEPT]
    container["env"] = kept + [{"name": name, "value": value} for name, value in settings["variables"].items()]
    for volume in pod["volumes"]:
        if volume.pop("persistentVolumeClaim", None):
            volume["hostPath"] = {"path": settings["folder"]}
    for number, path in enumerate(dict.fromkeys(settings["paths"])):
        pod["volumes"].append({"name": f"host{number}", "hostPath": {"path": path}})
        container["volumeMounts"].append({"name": f"host{number}", "mountPath": path})


def main() -> int:
    settings, kubectl, *words = sys.argv[1:]
    if "create" not in words or "--dry-run=server" in words:
        os.execv(kubectl, [kubectl, *words])
    text = sys.stdin.read()
    made = json.loads(text)
    for item in made.get("items", ()):
        if item["kind"] == "Pod":
            adapt(item["spec"], json.loads(Path(settings).read_text()))
    return subprocess.run([kubectl, *words], input=json.dumps(made), text=True, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
