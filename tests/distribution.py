"""Which process runs a test, where there are several: a file stays in one, and all files that share the embedded AWS too.

pytest-xdist's own `--dist loadgroup` writes groups into the ids of tests, which pytest 9.2 does not take (pytest-xdist 3.8 sets
`item._nodeid`, which nothing reads any more). Here the group follows from the file.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

EMBEDDED = "the embedded AWS"


def group_of(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return EMBEDDED if file.startswith("tests/infra/test_local_") else file


class ByGroup(LoadScopeScheduling):
    """Gives a process all tests of a group at once."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByGroup:
    return ByGroup(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    # A million objects of torch, Pulumi and botocore stay until the end; every full collection would walk through them again.
    gc.collect()
    gc.freeze()
