"""Every task of `fab` has one form: help for each flag, one line and exit code 2 for a mistake, the same in JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fabric.main import program

import fabfile

HOUSE = Path(__file__).parents[1]
MISTAKES = {
    "preflight": ("--stack", "nowhere"),
    "cost": ("--stack", "nowhere"),
    "explain-change": ("--stack", "nowhere"),
    "deployer-policy": ("--stack", "nowhere", "--account", "123456789012"),
    "node-policy": ("--stack", "nowhere", "--account", "123456789012"),
    "rehearse": ("--steps", "1"),
    "image-plan": ("--arg", "EFA_VERSION"),
    "image-build": ("--arg", "EFA_VERSION"),
    "image-push": ("--arg", "EFA_VERSION"),
    "image-verify": ("--max-age", "old"),
    "image-diff": ("a image", "b"),
    "image-scan": ("--threshold", "LOUD"),
    "node-facts": ("--cluster", "nowhere.json"),
    "node-tune": ("--set", "x"),
    "node-verify": ("--tier", "x"),
    "node-reboot": ("--cluster", "nowhere.json"),
    "plan-training": ("--cluster", "nowhere.json", "config.toml", "1B"),
    "slurm-up": ("--limit", "1"),
    "train": ("--cluster", "nowhere.json", "config.toml"),
    "sweep": ("--at-once", "x", "config.toml"),
    "sweep-status": ("--cluster", "nowhere.json", "sweep"),
    "spot-advice": ("nowhere.json",),
    "run-cost": ("--cluster", "nowhere.json", "run"),
    "dashboards": ("--gpu-hour-usd", "x", "--output", "nowhere"),
    "status": ("--cluster", "nowhere.json", "run"),
    "report": ("--cluster", "nowhere.json", "run"),
    "logs": ("--rank", "x", "run"),
    "stop": ("--cluster", "nowhere.json", "run"),
}
WITHOUT_MISTAKES = {"alert-rules", "aws-local", "image-lock"}
TASKS = fabfile.namespace.tasks
# Invoke forgets a flag's help once it was asked for it.
ARGUMENTS = {name: task.get_arguments() for name, task in TASKS.items()}


def test_each_task_is_here() -> None:
    assert set(TASKS) == MISTAKES.keys() | WITHOUT_MISTAKES


@pytest.mark.parametrize("name", sorted(TASKS))
def test_each_flag_has_help(name: str) -> None:
    task = TASKS[name]
    assert (task.__doc__ or "").strip().endswith(".")
    assert [argument.name for argument in ARGUMENTS[name] if not argument.help] == []


@pytest.mark.parametrize("name", sorted(MISTAKES))
def test_a_mistake_is_one_line_and_exit_code_2(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HOUSE)
    with pytest.raises(SystemExit) as ended:
        program.run(["fab", name, *MISTAKES[name]])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(
        (MISTAKES[name][0], MISTAKES[name][0].lstrip("-").replace("-", "_"), "image = 'a image'", "stack", "HISTORY")
    ), err
    if "json" in (argument.name for argument in ARGUMENTS[name]):
        with pytest.raises(SystemExit):
            program.run(["fab", name, *MISTAKES[name], "--json"])
        printed = json.loads(capsys.readouterr().out)
        assert printed == {"error": err.splitlines(), "exit_code": 2}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("prefligt",), "No idea what 'prefligt' is; fix: did you mean preflight?"),
        (("preflight", "--stak", "x"), "--stak is not a flag of preflight; fix: did you mean --stack?"),
        (("train", "--nodez", "2"), "--nodez is not a flag of train; fix: did you mean --nodes?"),
        (
            ("train", "--echo", "config.toml", "--nodez", "2"),
            "--nodez is not a flag of train; fix: did you mean --nodes?",
        ),
        (("train", "config.toml", "--anything"), "--anything is not a flag of train; fix: fab --help train"),
        (("preflight", "--stack"), "Flag --stack needed value"),
        (("image-diff", "a"), "did not receive required positional arguments: 'b'"),
    ],
)
def test_a_mistyped_command_line_is_one_line_and_exit_code_2(
    words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HOUSE)
    for json_too in ((), ("--json",)) if words != ("preflight", "--stack") else ((),):
        with pytest.raises(SystemExit) as ended:
            program.run(["fab", *words, *json_too])
        out, err = capsys.readouterr()
        assert ended.value.code == 2
        assert why in err
        assert len(err.splitlines()) == 1
        assert bool(out) == bool(json_too)


@pytest.mark.parametrize(
    "words", [("--help", "train"), ("train", "--help"), ("train", "-h"), ("preflight", "logs", "--follow", "--help")]
)
def test_help_is_of_the_task_before_it(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HOUSE)
    with pytest.raises(SystemExit) as ended:
        program.run(["fab", *words])
    name = "logs" if "logs" in words else "train"
    assert (ended.value.code, f"fab [--core-opts] {name} " in capsys.readouterr().out) == (0, True)


@pytest.mark.parametrize("words", [("--help", "train"), ("--list",)])
def test_help_whose_reader_has_left_is_no_error(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HOUSE)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", gone)
        with pytest.raises(SystemExit) as ended:
            program.run(["fab", *words])
        gone.flush()
    assert ended.value.code == 0


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(HOUSE)
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            program.run(["fab", "preflight", "--list"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines() == ["this machine: No space left on device"]


@pytest.mark.slow
def test_a_reader_that_has_read_enough_is_no_failure() -> None:
    fab = Path(sys.executable).with_name("fab")
    with subprocess.Popen(
        [fab, "preflight", "--list"], cwd=HOUSE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as task:
        assert task.stdout is not None
        assert task.stderr is not None
        task.stdout.close()
        assert (task.stderr.read(), task.wait()) == (b"", 0)


@pytest.mark.slow
def test_fab_starts_without_what_only_a_task_needs() -> None:
    """And keeps what Python compiles, which Invoke would not."""
    heavy = ("boto3", "torch", "moto", "pulumi", "docker", "node_setup.answers", "node_setup.agent", "infra.config")
    code = f"import sys; sys.dont_write_bytecode = True; import fabfile; found = set({heavy}) & set(sys.modules)"
    ask = [sys.executable, "-c", f"{code}; print(sys.dont_write_bytecode, sorted(found))"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(ask, cwd=HOUSE, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False []\n"
