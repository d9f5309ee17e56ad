"""What a Cluster may say where its words become names, addresses and words of commands."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lustrain.cluster import parse
from lustrain.problem import UserError

CLUSTER: dict[str, Any] = {
    "name": "train",
    "backend": "machines",
    "nodes": {"addresses": ["10.0.0.1"]},
    "reach": {"via": "ssh", "user": "ubuntu", "jump": "me@bastion.example.com:2222"},
    "groups": {"train": {"type": "p5.48xlarge", "count": 1}},
    "buckets": {"data": "team-data", "checkpoints": "team.checkpoints", "lifecycle": "sagemaker-team"},
    "runs_uri": "s3://team.checkpoints/runs/",
    "capacity": {"mode": "owned"},
    "image_repository": "123456789012.dkr.ecr.us-east-1.amazonaws.com/team/trainer",
}
LEAVES = ("name", "reach.user", "reach.jump", "buckets.data", "buckets.checkpoints", "runs_uri", "image_repository")


def edited(path: str, value: str) -> dict[str, Any]:
    cluster = copy.deepcopy(CLUSTER)
    table, _, key = path.rpartition(".")
    (cluster[table] if table else cluster)[key] = value
    return cluster


def test_names_addresses_and_repositories_are_taken() -> None:
    assert parse(CLUSTER).name == "train"
    for path, value in (
        ("reach.jump", "bastion"),
        ("reach.jump", "me@[::1]"),
        ("runs_uri", "/fsx/runs"),
        ("runs_uri", "runs"),
        ("image_repository", "127.0.0.1:5000/team/trainer"),
    ):
        parse(edited(path, value))


HOSTILE = ("", "-oProxyCommand=x", "a b", "\x1b[2J", "a\nb")
FOR_A_SHELL = ("$(reboot)", "a;b", "`x`")
"""A folder of runs may be called so: it is never a word of a shell."""


@pytest.mark.parametrize(
    ("path", "value"),
    [(path, value) for path in LEAVES for value in (*HOSTILE, *(() if path == "runs_uri" else FOR_A_SHELL))],
)
def test_no_text_that_a_command_could_take_for_more_than_a_word(path: str, value: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(edited(path, value))
    (line,) = caught.value.problems
    assert line.startswith(f"cluster.{path} = ")
    assert line.isprintable()
