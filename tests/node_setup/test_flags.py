"""A flag that is given and empty, as a shell makes it of a variable that is not set, never means everything."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from fabric.main import make_program

from lustrain.problem import USAGE, UserError
from node_setup.fleet.flags import Flags
from node_setup.fleet.inventory import Source, inventory
from node_setup.request import wanted
from tests.node_setup.test_inventory import described

TEXTS = [field.name for field in fields(Flags) if field.default is None]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("text", ["", " ", ",", " , "])
def test_an_empty_flag_is_one_line_that_names_it(name: str, text: str) -> None:
    given: dict[str, Any] = {name: text}
    with pytest.raises(UserError) as caught:
        Flags(**given).source()
    flag = f"--{name.replace('_', '-')}"
    assert caught.value.problems == [f"{flag} = {text!r}: is empty; fix: name something, or leave the flag out"]
    assert caught.value.exit_code == USAGE


def test_flags_that_are_not_given_are_not_empty() -> None:
    assert Flags().source() == Source()
    assert Flags(group="train, login,").source().groups == ("train", "login")


@pytest.mark.parametrize(
    "words",
    [
        ["node-tune", "--nodes", ""],
        ["node-tune", "--hosts-file", ""],
        ["node-reboot", "--group", ""],
        ["node-reboot", "--group", ","],
        ["node-reboot", "--node", ""],
        ["node-tune", "--only", ""],
        ["node-tune", "--skip", ""],
        ["node-tune", "--profile", ""],
    ],
)
def test_with_a_cluster_at_hand_no_task_takes_an_empty_flag_for_all_of_it(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.json"
    # Whoever asked it would be refused at once, and say so in the report.
    file.write_text(json.dumps(described(nodes={"addresses": ["127.0.0.1:1"]})))
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LUSTRAIN_CLUSTER", str(file))
    with pytest.raises(SystemExit) as ended:
        make_program().run(["fab", *words])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (USAGE, "")
    assert err.strip() == f"{words[1]} = {words[2]!r}: is empty; fix: name something, or leave the flag out"


def test_an_empty_source_takes_no_nodes_of_a_cluster_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(described()))
    for source in (Source(cluster=str(file), nodes=""), Source(cluster=str(file), hosts_file="")):
        with pytest.raises(UserError):
            inventory(source)


@pytest.mark.parametrize("given", [([""], []), (["sysctl.*", ","], []), ([], [" "])])
def test_of_settings_too_an_empty_word_is_not_all(given: tuple[list[str], list[str]]) -> None:
    only, skip = given
    with pytest.raises(UserError, match="is empty"):
        wanted(only, skip, [], None)
