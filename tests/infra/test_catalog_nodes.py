"""The node agent's table of instance types is the catalogue's."""

from __future__ import annotations

import tomllib
from pathlib import Path

import node_setup
from infra.catalog.instances import snapshot
from infra.catalog.nodes import table

WRITTEN = Path(node_setup.__file__).parent / "settings" / "instances.toml"


def test_the_written_table_is_what_the_catalogue_says_now() -> None:
    assert WRITTEN.read_text(encoding="utf-8") == table(), (
        "fix: python -m infra.catalog.nodes > node_setup/settings/instances.toml"
    )


def test_every_type_is_in_it_once() -> None:
    written = tomllib.loads(table())
    plain = [name for names in written["plain"].values() for name in names]
    assert sorted([*written["instance"], *plain]) == sorted(snapshot().types)
    assert written["instance"]["p5.48xlarge"] == {"gpus": 8, "gpu": "NVIDIA H100", "efa": 32, "nvme": 8}
    assert written["instance"]["trn1.32xlarge"]["neuron"] == 16
    assert "c7i.4xlarge" in written["plain"]["0"]
