"""The real Pulumi engine over a program, its state in a folder of its own and every call sent to the embedded AWS.

For tests and the rehearsal. A user types `pulumi up` and needs none of this.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from infra.clock import NOW
from infra.config import KEY

PROGRAM = Path(__file__).parents[1]
COMMAND_SECONDS = 900.0
"""Longer than any wait inside the provider that these stacks meet."""
STOP_SECONDS = 5.0

DAY_OF_EXAMPLES = "2026-11-22T12:00:00Z"
"""The capacity that the example stacks name has not ended on it, nor the support of their Kubernetes version."""


class EngineError(RuntimeError):
    """A command of the engine failed; the text is what it printed."""


class Engine:
    """One stack: Pulumi.<stack>.yaml of `program`, copied as it is and set up by the commands that docs/cluster.md shows.

    `environment` points at the embedded AWS. Nothing of the user's Pulumi home or state is read or written.
    """

    def __init__(self, folder: Path, stack: str, environment: Mapping[str, str], program: Path = PROGRAM) -> None:
        self.stack = stack
        self.folder = folder
        for name in ("state", "tmp"):
            (folder / name).mkdir(parents=True)
        # A project of its own that only points at the program: the engine writes a salt beside Pulumi.yaml.
        project = yaml.safe_load((program / "Pulumi.yaml").read_text(encoding="utf-8"))
        project["main"] = str(program)
        project["runtime"]["options"]["virtualenv"] = sys.prefix
        self._project = project
        self._write_project()
        self.config_file = Path(shutil.copy(program / f"Pulumi.{stack}.yaml", folder))
        region = self._config()["config"]["aws:region"]
        self.environment = {
            NOW: DAY_OF_EXAMPLES,
            **os.environ,
            **environment,
            "AWS_REGION": region,
            "AWS_DEFAULT_REGION": region,
            # The provider copies what it uploads to a path named by the content and empties that first: of two engines that
            # share the folder, one would cut off what the other is sending.
            "TMPDIR": str(folder / "tmp"),
            "PULUMI_HOME": str(folder / "home"),
            "PULUMI_BACKEND_URL": f"file://{folder / 'state'}",
            "PULUMI_CONFIG_PASSPHRASE": "test",
            "PULUMI_SKIP_UPDATE_CHECK": "1",
            "PULUMI_AUTOMATION_API_SKIP_VERSION_CHECK": "1",
            "NO_COLOR": "1",
        }
        self("stack", "init", stack)
        # The provider retries for minutes what an emulation does not implement.
        self("config", "set", "aws:maxRetries", "2")

    def __call__(self, *words: str) -> str:
        """Return the command's output; EngineError when it failed or took too long."""
        done = self._run(*words)
        return done.stdout + done.stderr

    def change(self, spec: Mapping[str, Any]) -> None:
        """Replace what stands under lustrain:cluster, as somebody does who edits the file that the engine has rewritten."""
        config = self._config()
        config["config"][KEY] = dict(spec)
        self.config_file.write_text(yaml.safe_dump(config), encoding="utf-8")

    @property
    def spec(self) -> dict[str, Any]:
        """A copy of what stands under lustrain:cluster, to edit and give to `change`."""
        return json.loads(json.dumps(self._config()["config"][KEY], default=str))  # type: ignore[no-any-return]

    def use(self, program: Path) -> None:
        """From now on run another program: a copy of this package in which a test has changed something."""
        self._project["main"] = str(program)
        self._write_project()
        self.environment["PYTHONPATH"] = str(program.parent)

    def up(self, *more: str) -> str:
        return self("up", "--yes", "--skip-preview", "--suppress-outputs", *more)

    def steps(self) -> dict[str, str]:
        """Preview an update: return the operation for each resource's name, those that stay left out."""
        return changes(json.loads(self._run("preview", "--json").stdout)["steps"])

    def outputs(self) -> dict[str, Any]:
        return json.loads(self._run("stack", "output", "--json").stdout)  # type: ignore[no-any-return]

    def state(self) -> list[dict[str, Any]]:
        """Everything in the stack's state, also what only the engine knows: the stack itself, components, providers."""
        found = json.loads(self._run("stack", "export").stdout)
        return found["deployment"].get("resources", [])  # type: ignore[no-any-return]

    def resources(self) -> list[dict[str, Any]]:
        """Return the resources of the state that are in AWS."""
        return [item for item in self.state() if item.get("custom") and not item["type"].startswith("pulumi:")]

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = ["pulumi", *words, "--cwd", str(self.folder), "--non-interactive", "--color", "never"]
        pipe = subprocess.PIPE
        # In a group of its own: a Ctrl-C reaches it once, from here, and not from the terminal as well.
        with subprocess.Popen(
            command, env=self.environment, stdout=pipe, stderr=pipe, text=True, process_group=0
        ) as engine:
            try:
                out, err = engine.communicate(timeout=COMMAND_SECONDS)
            except BaseException as end:
                _stop(engine)
                if isinstance(end, subprocess.TimeoutExpired):
                    raise EngineError(f"{' '.join(command)} did not end within {end.timeout:.0f} s") from None
                raise
        if engine.returncode:
            raise EngineError(f"{' '.join(command)} ended with {engine.returncode}\n{out}{err}")
        return subprocess.CompletedProcess(command, 0, out, err)

    def _write_project(self) -> None:
        (self.folder / "Pulumi.yaml").write_text(yaml.safe_dump(self._project), encoding="utf-8")

    def _config(self) -> dict[str, Any]:
        """Return what stands in the stack's file now, the salt of its secrets too."""
        return yaml.safe_load(self.config_file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def changes(steps: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    return {step["urn"].rpartition("::")[2]: step["op"] for step in steps if step["op"] != "same"}


def _stop(engine: subprocess.Popen[str]) -> None:
    """First as one Ctrl-C does, then a second: killed at once it would leave its plug-ins, in groups of their own, behind."""
    for _ in range(2):
        engine.send_signal(signal.SIGINT)
        end = time.monotonic() + STOP_SECONDS
        while engine.poll() is None and time.monotonic() < end:
            # Reads on, or a full pipe would hold it up; a plug-in may keep the pipe open for longer.
            with suppress(subprocess.TimeoutExpired):
                engine.communicate(timeout=0.1)
        if engine.poll() is not None:
            return
    engine.kill()


def engine_missing() -> str:
    """Why the engine cannot run here; empty where it can."""
    if shutil.which("pulumi") is None:
        return "pulumi is not on PATH"
    if shutil.which("pulumi-resource-aws") is None and not (Path.home() / ".pulumi" / "plugins").is_dir():
        return "pulumi has no AWS plugin: pulumi plugin install resource aws 7.51.1"
    if sys.prefix == sys.base_prefix:
        return "not in a virtual environment, which pulumi runs the program in"
    return ""
