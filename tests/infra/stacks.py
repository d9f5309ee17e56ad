"""The seven example stacks under the real engine, brought up side by side once a file: FSx alone waits half a minute each."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest

from infra.config import ClusterSpec
from infra.config import parse as parse_spec
from infra.local.aws import LocalAws
from infra.local.engine import PROGRAM, Engine, engine_missing
from infra.plan.nodes.eks import helm_commands
from lustrain.cluster import Cluster, parse
from tests.conftest import require
from tests.infra.edits import STACKS, place, spec_of

EXAMPLES = list(STACKS)
PACK = PROGRAM / "policy"
AT_ONCE = len(EXAMPLES)
"""Most of the time all wait for FSx; each holds an engine and a provider of some 300 MB."""


def example(stack: str) -> ClusterSpec:
    """The spec of an example stack."""
    return spec_of(stack, {})


def region_of(stack: str) -> str:
    return place(stack).region


@dataclass
class Live:
    """A stack that is up."""

    stack: str
    engine: Engine
    cluster: Cluster
    aws: LocalAws
    said: str
    """What the engine printed when it came up, the policy pack's verdict among it."""
    without_nodes: tuple[str, ...] = ()
    """`hyperpod-eks`: types of what is there after the first of the printed steps, before Helm has run."""

    @property
    def spec(self) -> ClusterSpec:
        return parse_spec(self.engine.spec)

    def client(self, service: str) -> Any:
        """A boto3 client that looks at the embedded AWS where this stack is."""
        return boto3.client(service, region_name=self.cluster.region, endpoint_url=self.aws.endpoint)  # type: ignore[call-overload]

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        """Resources of a type in the stack's state."""
        return [one for one in self.engine.resources() if one["type"] == kind]


def first_round(engine: Engine) -> tuple[str, ...]:
    """Type the first of the steps that the stack prints; the types of what it made."""
    first, *_ = helm_commands(parse_spec(engine.spec), place(engine.stack))
    _, *words = shlex.split(first)
    engine(*words, "--yes", "--skip-preview", "--suppress-outputs")
    assert first in engine.outputs()["firstSteps"], "whoever comes this far cannot read what is next"
    return tuple(one["type"] for one in engine.resources())


@pytest.fixture(scope="module")
def engine_aws() -> Iterator[LocalAws]:
    missing = engine_missing()
    require(not missing, missing)
    with LocalAws() as aws:
        yield aws


@pytest.fixture(scope="module")
def lives(engine_aws: LocalAws, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Live]]:
    """Gives a stack by name, waiting until it is up; all of them come up meanwhile."""

    def bring_up(stack: str, folder: Path) -> Live:
        engine = Engine(folder, stack, engine_aws.environment)
        without_nodes = first_round(engine) if example(stack).backend == "hyperpod-eks" else ()
        said = engine.up("--policy-pack", str(PACK))
        return Live(stack, engine, parse(engine.outputs()["cluster"]), engine_aws, said, without_nodes)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        coming: dict[str, Future[Live]] = {
            stack: pool.submit(bring_up, stack, tmp_path_factory.mktemp(stack) / "pulumi") for stack in EXAMPLES
        }

        yield lambda stack: coming[stack].result()
