"""The write probe: on a real folder, on one that refuses, and on one that never answers."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node_setup.agent.host import Done, Host
from node_setup.agent.model import Request
from node_setup.agent.run import lock
from node_setup.agent.verify import probes
from node_setup.agent.verify.expected import expected_hardware
from node_setup.agent.verify.lustre import transport
from node_setup.agent.verify.result import Result
from tests.conftest import require
from tests.node_setup.machines import DOCUMENT, facts_of
from tests.node_setup.recorded_host import recorded
from tests.processes import wait_until


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "SECONDS", 300.0)
    monkeypatch.setattr(probes, "STARTS_WITHIN_S", 300.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Stands where Lustre would be mounted; it takes direct I/O as Lustre does."""
    place = tmp_path / "fsx"
    place.mkdir()
    try:
        os.close(os.open(place / "try", os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600))
        taken = True
    except OSError:
        taken = False
    require(taken, "the temporary folder's file system takes no direct I/O")
    (place / "try").unlink()
    return place


def probes_of(folder: Path, host: Host) -> list[Result]:
    """Of the node whose Lustre would be that folder."""
    facts, request = (
        facts_of("p5"),
        Request(document={**DOCUMENT, "lustre": {**DOCUMENT["lustre"], "path": str(folder)}}),
    )
    facts["lustre"]["mounts"][0]["target"] = str(folder)
    return probes.write_probe(host, facts, expected_hardware(facts, request), request)


def probe(folder: Path, tmp_path: Path) -> Result:
    return probes_of(folder, Host(str(tmp_path / "root")))[0]


@pytest.mark.slow
def test_probe_deletes_its_own_file_and_no_other_nodes(folder: Path, tmp_path: Path) -> None:
    (folder / ".lustrain-verify-ip-10-1-0-18").write_text("of another node's probe")
    said = probe(folder, tmp_path)
    assert said.status in ("ok", "warning"), said
    assert [one.name for one in folder.iterdir()] == [".lustrain-verify-ip-10-1-0-18"]


def test_what_is_not_mounted_is_not_written_to(tmp_path: Path) -> None:
    facts, request = facts_of("p5"), Request(document=DOCUMENT)
    facts["lustre"]["mounts"] = []
    (said,) = probes.write_probe(Host(str(tmp_path)), facts, expected_hardware(facts, request), request)
    assert (said.status, list(tmp_path.iterdir())) == ("unknown", [])


def test_host_that_refuses_its_own_folder_is_unknown(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file in the place of a folder")
    assert probe(folder, tmp_path).status == "unknown"


def test_a_folder_that_is_not_there_fails_with_what_dd_said(tmp_path: Path) -> None:
    said = probe(tmp_path / "away", tmp_path)
    assert said.status == "failed"
    assert re.match("write failed: dd: failed to open .*: No such file or directory", said.why)


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[Path]:
    """A folder in which the probe's file never answers: a pipe that nobody reads blocks whoever opens it."""
    pipe = tmp_path / ".lustrain-verify-ip-10-1-0-17"
    os.mkfifo(pipe)
    yield tmp_path
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    wait_until(lambda: "failed" in (tmp_path / "root" / probes.ANSWER.lstrip("/")).read_text())
    os.close(reader)


@pytest.mark.slow
def test_silent_file_system_is_reported_in_time_and_probed_once(stuck: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "SECONDS", 1.0)
    first = probe(stuck, stuck)
    assert (first.status, first.why) == ("failed", "writing did not end within 1 s: Lustre does not answer")
    second = probe(stuck, stuck)
    assert second.status == "failed"
    assert re.match(rf"a probe started before still hangs \(pid {os.getpid()} since ", second.why)


@pytest.mark.slow
def test_concurrent_probes_wait_for_each_other_and_pass(folder: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda _: probe(folder, tmp_path), range(4)))
    assert {one.status for one in said} <= {"ok", "warning"}, said
    assert list(folder.iterdir()) == []


def test_a_node_whose_probes_only_queue_is_not_drained(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two others have the lock one after the other, each for less than a probe may take."""
    host, note = Host(str(tmp_path / "root")), tmp_path / "root" / probes.LOCK.lstrip("/")
    clock = SimpleNamespace(
        monotonic=lambda: 1000.0 if "pid 7 " in note.read_text() else 0.0,
        sleep=lambda seconds: note.write_text("pid 7 since later\n"),
    )
    with lock.hold(host, 0.0, probes.LOCK):
        monkeypatch.setattr(lock, "time", clock)
        said = probe(folder, tmp_path)
    assert (said.status, said.why) == ("unknown", "not tried: other probes of this node took the 300 s")


def test_other_bytes_than_were_written_are_a_failure(tmp_path: Path) -> None:
    """The real script, with a `dd` that gives back one byte less than it reads."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "dd").write_text('#!/bin/sh\ncase $1 in if=*) head -c -1 "${1#if=}";; *) cat >"${1#of=}";; esac\n')
    (programs / "dd").chmod(0o755)
    answer, file = tmp_path / "answer", tmp_path / "file"
    command = ["sh", "-c", probes.SCRIPT, "sh", "node", str(answer), str(file), "1"]
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    assert subprocess.run(command, env=environment, check=False, timeout=300).returncode == 1
    assert answer.read_text().splitlines() == ["wrote", "failed compare"]
    assert not file.exists()


@pytest.mark.parametrize(
    ("said", "seconds", "status", "why"),
    [
        ("wrote\nread\ndone\n", 0.5, "ok", "64 MiB written, read back and deleted"),
        ("wrote\nread\ndone\n", 20.0, "warning", "slow"),
        ("wrote\nfailed compare\n", 0.5, "failed", "compare failed: other bytes came back"),
        ("dd: error writing '/fsx/x': No space left\nfailed write\n", 0.5, "failed", "write failed: dd: error writing"),
        ("wrote\n", 0.5, "failed", "reading did not end"),
        ("", 0.5, "failed", "writing did not end"),
    ],
)
def test_what_the_probe_said_last_decides(said: str, seconds: float, status: str, why: str) -> None:
    result = probes.judge(said, seconds)
    assert (result.status, result.why[: len(why)]) == (status, why)


def nets(efa: int, tcp: int, recv: int | None = None) -> list[Any]:
    half = [efa // 2, efa - efa // 2]
    return [
        {"net": "lo", "nids": [{"send": 9, "recv": 9}]},
        {"net": "tcp", "nids": [{"send": tcp, "recv": tcp}]},
        {"net": "efa", "nids": [{"send": one, "recv": one if recv is None else recv} for one in half]},
    ]


@pytest.mark.parametrize(
    ("before", "after", "over_efa", "status"),
    [
        (nets(100, 10), nets(200, 10), True, "ok"),
        (nets(100, 10), nets(101, 10), True, "ok"),
        (nets(100, 10), nets(100, 200), True, "failed"),
        (nets(100, 10), nets(100, 10), True, "unknown"),
        (nets(100, 10), nets(100, 200), False, "ok"),
        (nets(100, 10), nets(200, 10), False, "failed"),
        (nets(100, 10), None, True, "unknown"),
        (nets(100, 10, recv=5), nets(200, 10, recv=5), True, "unknown"),
    ],
)
def test_io_network_is_judged_by_sums_over_all_interfaces(
    before: list[Any], after: list[Any] | None, over_efa: bool, status: str
) -> None:
    assert transport(before, after, over_efa).status == status


def test_messages_that_lnet_drops_meanwhile_are_a_warning() -> None:
    def dropping(efa: int, count: int) -> list[Any]:
        found = nets(efa, 10)
        for net in found:
            net["nids"] = [{**nid, "drop": 0} for nid in net["nids"]]
        found[2]["nids"][1]["drop"] = count
        return found

    result = transport(dropping(100, 11), dropping(200, 14), over_efa=True)
    assert (result.status, result.why) == ("warning", "LNet dropped 3 messages meanwhile")
    assert transport(dropping(100, 11), dropping(200, 11), over_efa=True).status == "ok"


class Answering(Host):
    """Lets the probe run for real and answers `lnetctl` with recorded output whose counters then grow."""

    def __init__(self, root: str, grown: str) -> None:
        super().__init__(root)
        self.answers = [recorded("lnetctl_net_show_v.txt"), grown]

    def run(self, command: Any, timeout: float = 10.0, stdin: str = "") -> Done:
        if command[0] == "lnetctl":
            return Done(0, self.answers.pop(0), "")
        return super().run(command, timeout, stdin)


@pytest.mark.slow
def test_probe_reports_both_the_file_and_the_network(folder: Path, tmp_path: Path) -> None:
    grown = recorded("lnetctl_net_show_v.txt").replace("_count: ", "_count: 1")
    said = probes_of(folder, Answering(str(tmp_path / "root"), grown))
    assert [result.check for result in said] == ["lustre-write", "lustre-transport"]
    assert said[0].status in ("ok", "warning")
