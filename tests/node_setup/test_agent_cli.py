"""The agent's command line as a process: JSON on standard output, one line for a mistake, an exit status for programs."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lustrain.problem import UserError
from node_setup.agent.cli import COMMANDS
from node_setup.agent.model import Request
from node_setup.agent.wire import request as requests
from tests.conftest import require
from tests.node_setup.agents import run
from tests.processes import wait_until

NOBODY = 65534


def digest(agent: Path) -> str:
    return hashlib.sha256(agent.read_bytes()).hexdigest()


def test_the_agent_that_was_asked_for_answers(agent: Path) -> None:
    done = run(agent, "version", "--sha", digest(agent))
    assert (done.returncode, json.loads(done.stdout)["agent"]) == (0, digest(agent))


@pytest.mark.parametrize("command", ["plan", "tune", "boot"])
def test_another_agent_ends_with_96_and_says_and_does_nothing(command: str, agent: Path) -> None:
    done = run(agent, command, "--sha", "00" * 32, "--request", "-", stdin="{}")
    assert (done.returncode, done.stdout, done.stderr) == (96, "", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "stdin", "line"),
    [
        (["paln"], "", "did you mean plan?"),
        (["plan", "--requst", "-"], "", "did you mean --request?"),
        (["plan", "--request"], "", "its value is missing"),
        (["plan", "--request", "-"], "{not json", "is not JSON"),
        (["plan", "--request", "-"], b"\xff\xfe{}", "--request = '-': not UTF-8"),
        (["plan", "--request", "-"], "[1]", "wrong type; allowed: one object"),
        (["plan", "--request", "-"], '{"documnet": {}}', "did you mean document?"),
        (["plan", "--request", "-"], '{"force": "yes"}', "request.force = 'yes': wrong type; allowed: true, false"),
        (["plan", "--request", "-"], '{"only": "a"}', "allowed: a list of texts"),
        (["plan", "--request", "-"], '{"only": ["sysctl.vm.max_map"]}', "did you mean sysctl.vm.max_map_count"),
        (["plan", "--request", "-"], '{"document": {"version": 7}}', "not a version that this agent reads"),
        (["plan", "--request", "-"], '{"document": {"groups": []}}', "allowed: an object of objects"),
        (["plan", "--request=/nowhere"], "", "No such file or directory"),
        (["tune", "--wait", "-1"], "", "must be a whole number of seconds"),
        (["boot", "--mount-wait", "5m"], "", "--mount-wait = '5m': must be a whole number of seconds"),
        (["boot", "--backend", "ec2"], "", "option = '--backend': unknown"),
        (["verify", "--tier", "all"], "", "allowed: facts, fast"),
    ],
)
def test_a_mistake_is_one_line_in_the_log_and_in_the_answer(
    arguments: list[str], stdin: str | bytes, line: str, agent: Path
) -> None:
    done = run(agent, *arguments, stdin=stdin)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert line in done.stderr
    [error] = json.loads(done.stdout)["errors"]
    assert line in error["why"]


def test_help_names_every_command_and_every_status(agent: Path) -> None:
    done = run(agent, "--help")
    assert done.returncode == 0
    assert all(command in done.stderr for command in COMMANDS)
    assert "96 another agent" in done.stderr
    assert run(agent).returncode == 1


@pytest.mark.slow
def test_ordinary_user_may_plan_but_not_tune(agent: Path) -> None:
    require(os.geteuid() == 0, "root, to become an ordinary user")
    # The one that runs the tests may lie where an ordinary user cannot look.
    system = "/usr/bin/python3"
    require(os.access(system, os.X_OK), system)
    # Below pytest's own folders no other user may look.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        copy = Path(shutil.copy(agent, folder))
        nobody: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        for command in ("facts", "plan", "verify", "reboot-check", "version"):
            done = run(copy, command, python=system, **nobody)
            assert (done.returncode in (0, 2, 4), type(json.loads(done.stdout))) == (True, dict), command
        for command in ("tune", "boot"):
            done = run(copy, command, python=system, **nobody)
            assert (done.returncode, done.stderr.count("\n")) == (1, 1)
            assert "needs root and this is uid 65534; fix: run it with sudo" in done.stderr


@pytest.mark.slow
def test_broken_agent_answers_in_json_with_the_place(agent: Path, tmp_path: Path) -> None:
    import zipfile

    broken = tmp_path / "agent.pyz"
    with zipfile.ZipFile(agent) as source, zipfile.ZipFile(broken, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name == "node_setup/agent/run/plan.py":
                content = content.replace(b"def plan(", b"def plan(*_):\n    return {}['a key']\n\n\ndef old_plan(", 1)
            target.writestr(name, content)
    done = run(broken, "plan")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    [error] = json.loads(done.stdout)["errors"]
    assert error["where"].startswith("agent/run/plan.py:")
    assert error["where"].endswith(" in plan")
    assert error["why"] == "KeyError: 'a key'"


@pytest.mark.slow
def test_reboot_check_tells_which_boot_this_is(agent: Path) -> None:
    told = json.loads(run(agent, "reboot-check").stdout)
    assert told["boot"]["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@pytest.mark.slow
def test_a_caller_that_is_gone_gets_no_traceback(agent: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, str(agent), "facts"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_signal_ends_it_with_an_answer_that_says_so(agent: Path) -> None:
    command = [sys.executable, str(agent), "plan", "--request", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        _wait_until_reading(process.pid)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert json.loads(out)["errors"] == [
        {"where": "plan", "why": "stopped by SIGTERM; completed steps stay in place, run it again"}
    ]
    assert b"Traceback" not in err


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_second_signal_does_not_take_the_answer_away(second: signal.Signals) -> None:
    """The agent's own, sent at the worst moment: when the first has just been taken for the reason."""
    code = f"""
import os, sys
from node_setup.agent import cli
from node_setup.agent.wire.identity import Identity
def plan(asked, identity):
    try:
        os.kill(os.getpid(), {int(signal.SIGTERM)})
    finally:
        os.kill(os.getpid(), {int(second)})
cli.COMMANDS["plan"] = plan
sys.exit(cli.main(["plan"], Identity()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1, done.stderr
    assert [one["why"] for one in json.loads(done.stdout)["errors"]] == [
        "stopped by SIGTERM; completed steps stay in place, run it again"
    ]


@pytest.mark.slow
def test_a_signal_that_its_caller_ignores_does_not_stop_it(agent: Path) -> None:
    command = ["nohup", sys.executable, str(agent), "plan", "--request", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        _wait_until_reading(process.pid)
        process.send_signal(signal.SIGHUP)
        out, _ = process.communicate(b'{"profile": "login"}', timeout=300)
    assert process.returncode in (0, 2)
    assert json.loads(out)["profile"] == "login"


def _wait_until_reading(pid: int) -> None:
    """Until the process sleeps in a read of its standard input, which nobody writes to."""
    wait_until(lambda: Path(f"/proc/{pid}/wchan").read_text() in ("pipe_read", "anon_pipe_read"))


@pytest.mark.slow
def test_compiled_modules_serve_their_own_agent_and_python(agent: Path, tmp_path: Path) -> None:
    require(os.geteuid() == 0, "root, for a /run of its own")
    copy = tmp_path / "agent.pyz"
    copy.write_bytes(agent.read_bytes())
    copy_of_another = tmp_path / "another.pyz"
    copy_of_another.write_bytes(_with_comment(agent.read_bytes()))
    found = alone(
        f"""
import sys
from node_setup.agent.compiled import keep
from node_setup.agent.wire.identity import Identity
from tests.node_setup.test_agent_cli import compiled_name, loaded_from
from pathlib import Path
agent, another = Path({str(copy)!r}), Path({str(copy_of_another)!r})
before = loaded_from(agent)
new = keep(Identity(str(agent), "", compiled_name(agent)))
print([before, new, keep(Identity(str(agent), "", new)), loaded_from(agent), loaded_from(another)])
"""
    )
    name = compiled_name(agent)
    assert found == [{str(copy)}, name, None, {name}, {str(copy_of_another)}]


def compiled_name(agent: Path) -> str:
    return f"/run/lustrain/agent-{digest(agent)[:16]}.{sys.implementation.cache_tag}.zip"


def alone(code: str) -> Any:
    """What a script prints that has a /run of its own."""
    script = 'mount -t tmpfs none /run && exec "$0" -c "$1"'
    command = ["unshare", "--mount", "sh", "-c", script, sys.executable, code]
    return ast.literal_eval(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def loaded_from(agent: Path) -> set[str]:
    """The archives that modules of ours are imported from."""
    code = (
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit:\n    pass\n"
        "names = [name for name in sys.modules if name.startswith('node_setup.agent.')]\n"
        "print({sys.modules[name].__spec__.origin.split('/node_setup/')[0] for name in names})"
    )
    command = [sys.executable, "-I", "-S", "-c", f"import runpy, sys; sys.argv = [{str(agent)!r}, 'version']\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(ast.literal_eval(done.stdout.splitlines()[-1]))


def _with_comment(packed: bytes) -> bytes:
    """The same archive under another digest: what comes before an archive is no part of it."""
    return b"# another\n" + packed


def test_a_request_goes_through_json_unchanged() -> None:
    full = Request({"version": 1}, "train", "cpu", {"a": "on"}, ("a", "b*"), True, True, {"lustre_source": "x"})
    table: dict[str, Any] = {**vars(full), "only": list(full.only)}
    assert requests.parse(json.dumps(table)) == full
    assert requests.parse("{}") == Request()
    document = {"lustre": None, "mount": None, "tuning": {"profiles": None, "settings": None}}
    assert requests.parse(json.dumps({"document": document})).document == document


@given(st.text(max_size=60))
def test_any_text_is_a_request_or_a_mistake_of_whole_lines(text: str) -> None:
    problems = mistakes(text)
    assert all(line.isprintable() and line.startswith("request") for line in problems)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["document", "group", "profile", "overrides", "only", "force", "expect", "x"])
DOCUMENT_KEYS = st.sampled_from(["version", "groups", "lustre", "mount", "tuning", "cluster"])


@given(st.dictionaries(KEYS, JSON | st.dictionaries(DOCUMENT_KEYS, JSON, max_size=3), max_size=3))
def test_any_object_is_a_request_or_a_mistake_that_names_its_key(table: dict[str, Any]) -> None:
    problems = mistakes(json.dumps(table))
    assert all(line.startswith("request.") for line in problems)
    assert problems or set(table) <= set(vars(Request()))


def mistakes(text: str) -> Sequence[str]:
    """What is wrong with a request; empty where it is one."""
    try:
        requests.parse(text)
    except UserError as error:
        return error.problems
    return ()
