"""The cluster's program on a mock monitor, for machines without the engine: `python -m rehearsal.mocked STACK.yaml`.

Prints `{"outputs": …, "resources": [[type, name], …]}`. A process of its own, since Pulumi's state is global.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pulumi
import yaml

from infra.components.stack import declare
from infra.config import KEY, parse
from infra.local.mocks import ACCOUNT, Recorder
from infra.plan.place import Place


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Build the stack that `config` (the `config` table of a stack file) describes."""
    region = str(config["aws:region"])
    recorder = Recorder(region)
    pulumi.runtime.set_mocks(recorder, project="lustrain", stack="mock", preview=False)
    printed: dict[str, Any] = {}

    @pulumi.runtime.test  # type: ignore[untyped-decorator]
    def program() -> pulumi.Output[None]:
        outputs = declare(parse(config[KEY]), Place(region, ACCOUNT))
        return pulumi.Output.all(**outputs).apply(printed.update)

    program()
    return {"outputs": printed, "resources": [[kind, name] for kind, name, _ in recorder.resources]}


def main() -> int:
    stack = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps(run(stack["config"])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
