"""Who runs what when tests run in several processes: a file stays in one, and so do files that share a costly thing.

pytest-xdist's own `--dist loadgroup` writes groups into the ids of tests, which pytest 9.2 does not take (pytest-xdist 3.8 sets
`item._nodeid`, which nothing reads any more). Here the group follows from the file.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

STACKS = "the stacks that are up"
PROOFS = "the trainer's image, built once"
ENGINE = "a container engine"
FAULTS = "trainings that were never disturbed"
EMBEDDED = "the embedded AWS"
SHARED = {
    "tests/infra/test_stacks.py": STACKS,
    # Ends the stacks that the file before looks at.
    "tests/infra/test_stacks_change.py": STACKS,
    **{
        f"tests/images/test_{what}.py": PROOFS
        for what in ("verify", "read_back", "tasks", "context", "context_refused")
    },
    **{f"tests/images/test_proof_{what}.py": PROOFS for what in ("cache", "layers", "run", "same", "secrets")},
    **{f"tests/images/test_{what}.py": ENGINE for what in ("bake", "builder", "dockerfiles", "push")},
    "tests/lab/test_engines.py": ENGINE,
    **{
        f"tests/torture/test_faults_{what}.py": FAULTS
        for what in ("damage", "disk", "notice", "ranks", "store", "two_jobs")
    },
}
"""Group of a file that does not stand alone."""
LONGEST = (
    STACKS,
    PROOFS,
    ENGINE,
    FAULTS,
    "tests/launch/test_launch_slurm.py",
    "tests/torture/test_torture_kills.py",
    "tests/node_setup/test_kills_lab.py",
    "tests/launch/test_launch_kubernetes.py",
)
"""Groups and files that have to begin first, or everything else waits for them at the end."""


def group_of(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return EMBEDDED if file.startswith("tests/infra/test_local_") else SHARED.get(file, file)


class ByGroup(LoadScopeScheduling):
    """Gives a process all tests of a group at once."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByGroup:
    return ByGroup(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)
    first = [groups.pop(name) for name in LONGEST if name in groups]
    items[:] = [item for group in (*first, *groups.values()) for item in group]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    # A million objects of torch, Pulumi and botocore stay until the end; every full collection would walk through them again.
    gc.collect()
    gc.freeze()
