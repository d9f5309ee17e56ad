"""The real Pulumi engine with a program, a state folder of its own, and all calls sent to the embedded AWS.

Tests and the rehearsal use it; users run `pulumi up` instead.
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
"""The limit is longer than any wait inside the provider that these stacks reach."""
STOP_SECONDS = 5.0

DAY_OF_EXAMPLES = "2026-11-22T12:00:00Z"
"""On this day the capacity in the example stacks has not ended, and their Kubernetes version is supported."""


class EngineError(RuntimeError):
    """A command of the engine failed; the message contains its output."""


class Engine:
    """A stack: a copy of Pulumi.<stack>.yaml of `program`, initialised by the commands that docs/cluster.md shows.

    `environment` points at the embedded AWS. Nothing of the user's Pulumi home or state is read or written.
    """

    def __init__(self, folder: Path, stack: str, environment: Mapping[str, str], program: Path = PROGRAM) -> None:
        self.stack = stack
        self.folder = folder
        for name in ("state", "tmp"):
            (folder / name).mkdir(parents=True)
        # A separate project that points at the program, because the engine writes a salt beside Pulumi.yaml.
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
            # The provider copies an upload to a path named by its content and truncates it first, so engines that share
            # the folder would truncate each other's uploads.
            "TMPDIR": str(folder / "tmp"),
            "PULUMI_HOME": str(folder / "home"),
            "PULUMI_BACKEND_URL": f"file://{folder / 'state'}",
            "PULUMI_CONFIG_PASSPHRASE": "test",
            "PULUMI_SKIP_UPDATE_CHECK": "1",
            "PULUMI_AUTOMATION_API_SKIP_VERSION_CHECK": "1",
            "NO_COLOR": "1",
        }
        self("stack", "init", stack)
        # The provider would retry unimplemented actions for minutes.
        self("config", "set", "aws:maxRetries", "2")

    def __call__(self, *arguments: str) -> str:
        """Return the command's output; EngineError when it failed or took too long."""
        process = self._run(*arguments)
        return process.stdout + process.stderr

    def change(self, spec: Mapping[str, Any]) -> None:
        """Replace the value of lustrain:cluster, as a user does who edits the file that the engine has rewritten."""
        config = self._config()
        config["config"][KEY] = dict(spec)
        self.config_file.write_text(yaml.safe_dump(config), encoding="utf-8")

    @property
    def spec(self) -> dict[str, Any]:
        """A copy of the value of lustrain:cluster, to edit and pass to `change`."""
        return json.loads(json.dumps(self._config()["config"][KEY], default=str))  # type: ignore[no-any-return]

    def use(self, program: Path) -> None:
        """Switch to `program`, a copy of this package that a test has modified."""
        self._project["main"] = str(program)
        self._write_project()
        self.environment["PYTHONPATH"] = str(program.parent)

    def up(self, *options: str) -> str:
        return self("up", "--yes", "--skip-preview", "--suppress-outputs", *options)

    def steps(self) -> dict[str, str]:
        """Preview an update and return the operation for each resource that changes, by name."""
        return changes(json.loads(self._run("preview", "--json").stdout)["steps"])

    def outputs(self) -> dict[str, Any]:
        return json.loads(self._run("stack", "output", "--json").stdout)  # type: ignore[no-any-return]

    def state(self) -> list[dict[str, Any]]:
        """Return all resources in the stack's state, including the stack itself, components and providers."""
        export = json.loads(self._run("stack", "export").stdout)
        return export["deployment"].get("resources", [])  # type: ignore[no-any-return]

    def resources(self) -> list[dict[str, Any]]:
        """Return the resources of the state that are in AWS."""
        return [
            resource
            for resource in self.state()
            if resource.get("custom") and not resource["type"].startswith("pulumi:")
        ]

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["pulumi", *arguments, "--cwd", str(self.folder), "--non-interactive", "--color", "never"]
        pipe = subprocess.PIPE
        # A separate process group: Ctrl-C reaches the engine once, from `_stop`, and not from the terminal as well.
        with subprocess.Popen(
            command, env=self.environment, stdout=pipe, stderr=pipe, text=True, process_group=0
        ) as engine:
            try:
                out, err = engine.communicate(timeout=COMMAND_SECONDS)
            except BaseException as error:
                _stop(engine)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise EngineError(f"{' '.join(command)} did not end within {error.timeout:.0f} s") from None
                raise
        if engine.returncode:
            raise EngineError(f"{' '.join(command)} ended with {engine.returncode}\n{out}{err}")
        return subprocess.CompletedProcess(command, 0, out, err)

    def _write_project(self) -> None:
        (self.folder / "Pulumi.yaml").write_text(yaml.safe_dump(self._project), encoding="utf-8")

    def _config(self) -> dict[str, Any]:
        """Return the content of the stack's file, including the salt of its secrets."""
        return yaml.safe_load(self.config_file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def changes(steps: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    return {step["urn"].rpartition("::")[2]: step["op"] for step in steps if step["op"] != "same"}


def _stop(engine: subprocess.Popen[str]) -> None:
    """Interrupt the engine as two Ctrl-C do, then kill it; killed at once it would leave its plug-ins running."""
    for _ in range(2):
        engine.send_signal(signal.SIGINT)
        deadline = time.monotonic() + STOP_SECONDS
        while engine.poll() is None and time.monotonic() < deadline:
            # Keep reading, or a full pipe would block the engine; a plug-in may hold the pipe open longer.
            with suppress(subprocess.TimeoutExpired):
                engine.communicate(timeout=0.1)
        if engine.poll() is not None:
            return
    engine.kill()


def engine_missing() -> str:
    """Return why the engine cannot run on this machine, empty when it can."""
    if shutil.which("pulumi") is None:
        return "pulumi is not on PATH"
    if shutil.which("pulumi-resource-aws") is None and not (Path.home() / ".pulumi" / "plugins").is_dir():
        return "pulumi has no AWS plugin: pulumi plugin install resource aws 7.51.1"
    if sys.prefix == sys.base_prefix:
        return "not in a virtual environment, which pulumi runs the program in"
    return ""
