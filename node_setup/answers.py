"""The agent's answers as checked models: the JSON of another program, or half an answer, is not a report of a node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from lustrain.schema import problems_of
from lustrain.status import Status
from node_setup.agent.model import EXIT_DRIFT, EXIT_IN_SYNC


class _Part(BaseModel):
    """Facts hold far more than reports take apart: what has no field here is kept as it came."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class Row(_Part):
    """This is one setting or one part of it; `needs` and `severity` are as in `settings/*.toml`."""

    setting: str
    status: Status
    why: str
    part: str | None = None
    target: str | None = None
    current: str | None = Field(None, alias="found")
    wanted: str | None = None


class Trouble(_Part):
    """This is an error of the agent and where it met it."""

    where: str
    why: str


class Finding(_Part):
    """This is a variable of the environment that does harm."""

    where: str
    line: int | None = None
    name: str
    value: str
    why: str
    fix: str
    harm: str


class Check(_Part):
    """This is one check of `verify`."""

    check: str
    status: Status
    why: str
    actual: str | None = Field(None, alias="found")
    expected: str | None = None


class Job(_Part):
    kind: str
    id: str


class RunningAgent(_Part):
    sha256: str | None = None


class System(_Part):
    id: str | None = None
    version: str | None = None


class Kernel(_Part):
    release: str | None = None


class Processors(_Part):
    count: int | None = None


class Memory(_Part):
    gib: FiniteFloat | None = None


class Instance(_Part):
    type: str | None = None


class Devices(_Part):
    devices: tuple[Any, ...] | None = None


class Lustre(_Part):
    mounts: tuple[Any, ...] | None = None


class Boot(_Part):
    boot_id: str | None = None
    pid1_start: int | None = None


class AgentResponse(_Part):
    """This is the answer to any command: each fills its own fields, and one that failed may have errors alone.

    `agent` is the SHA-256 of the agent that answered. `drain` is a reason for scontrol, `did` what `node-reboot` made of it.
    """

    version: Literal[1]
    agent: str | RunningAgent | None = None
    host: str | Mapping[str, Any] | None = None
    group: str | None = None
    profile: str | None = None
    refused: str | None = None
    errors: tuple[Trouble, ...] = ()

    rows: tuple[Row, ...] | None = None
    reboot: tuple[str, ...] = ()
    unplanned: tuple[str, ...] = ()
    lint: tuple[Finding, ...] = ()

    results: tuple[Check, ...] | None = None
    facts_digest: Mapping[str, Any] | None = None
    ready: bool | None = None
    drain: str | None = None
    jobs: tuple[Job, ...] | None = None

    slurm: Mapping[str, Any] | None = None

    boot: Boot | None = None
    did: str | None = None

    os: System = System()
    kernel: Kernel | None = None
    instance: Instance = Instance()
    cpu: Processors = Processors()
    memory: Memory = Memory()
    gpu: Devices = Devices()
    efa: Devices = Devices()
    lustre: Lustre = Lustre()

    def to_json(self) -> dict[str, Any]:
        """Return the fields that the agent sent, unchanged."""
        return self.model_dump(mode="json", exclude_unset=True, by_alias=True)


_NEEDED: Mapping[str, tuple[str, ...]] = {
    "facts": ("agent", "host", "kernel"),
    "plan": ("agent", "rows"),
    "tune": ("agent", "rows"),
    "verify": ("results", "facts_digest", "ready"),
    "reboot-check": ("agent", "boot"),
    "slurm-facts": ("agent", "slurm"),
    "slurm-apply": ("agent", "rows"),
    "slurm-state": ("agent", "slurm"),
}
"""Each command answers with these fields when it came to its end."""


class NoAnswerError(Exception):
    """A text is not an answer of our agent; the message says why."""


def parse(body: Mapping[str, Any]) -> AgentResponse:
    """Read the answer in a decoded JSON object. NoAnswerError."""
    # Strict mode takes tuples and enums only from JSON itself. A file's name may hold half of a surrogate pair, which pydantic
    # refuses.
    text = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    try:
        return AgentResponse.model_validate_json(text)
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":
            raise NoAnswerError("it has too many levels") from None
        raise NoAnswerError(problems_of(error, AgentResponse)[0].partition("; fix: ")[0]) from None


def response_to(command: str, status: int, sha: str, body: Mapping[str, Any]) -> AgentResponse:
    """Return the answer of the agent with this SHA-256 to `command`, which ended with `status`. NoAnswerError."""
    answer = parse(body)
    agent = answer.agent.sha256 if isinstance(answer.agent, RunningAgent) else answer.agent
    if "agent" in answer.model_fields_set and agent != sha:
        raise NoAnswerError(f"agent = {agent}: not the agent that was called, {sha}")
    needed = _NEEDED.get(command.partition(" ")[0], ()) if status in (EXIT_IN_SYNC, EXIT_DRIFT) else ()
    if missing := [name for name in needed if getattr(answer, name) is None]:
        raise NoAnswerError(f"{missing[0]} is missing")
    return answer
