"""An announced end is seen, and a service that does not answer is not mistaken for a quiet one."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.local.metadata import LocalMetadata
from node_setup.agent.facts import instance, metadata
from node_setup.agent.facts.scene import Scene
from node_setup.agent.facts.wanted import Wanted
from node_setup.agent.host import Host


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "BUDGET_SECONDS", 300.0)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """21 Jan 2026 07:00:43 GMT, which it is as long as the test runs."""
    monkeypatch.setattr(metadata.time, "time", lambda: 1768978843.0)
    return 1768978843.0


def asked(root: Path) -> dict[str, Any]:
    return metadata.collect(Scene(Host(str(root)), Wanted()))


def notice(root: Path) -> Any:
    found = asked(root)["metadata"]
    assert found["reachable"], found
    return found["notice"]


def test_a_quiet_instance_tells_who_it_is_and_announces_nothing(imds: LocalMetadata, tmp_path: Path) -> None:
    found = asked(tmp_path)
    assert found["metadata"] == {"reachable": True, "notice": None, "error": None}
    scene = Scene(Host(str(tmp_path)), Wanted())
    assert instance.collect(scene, found["_imds"]) == {
        "instance": {
            "type": "p5.48xlarge",
            "id": "i-0123456789abcdef0",
            "life_cycle": "spot",
            "zone_id": "use1-az1",
            "source": "imds",
        },
        "group": None,
    }


def test_each_kind_of_notice_is_seen(imds: LocalMetadata, tmp_path: Path) -> None:
    imds.rebalance()
    assert notice(tmp_path)["kind"] == "rebalance"
    imds.lifecycle_state("InService")
    assert notice(tmp_path)["kind"] == "rebalance"
    imds.lifecycle_state("Terminated")
    assert notice(tmp_path) == {"kind": "lifecycle", "action": "terminate", "at": None, "in_hours": None}
    imds.spot_notice("stop")
    seen = notice(tmp_path)
    assert (seen["kind"], seen["action"]) == ("spot", "stop")
    assert seen["at"].endswith("Z")


def test_planned_maintenance_counts_only_while_it_is_active(now: float) -> None:
    event = '[{"NotBefore":"21 Jan 2026 09:00:43 GMT","Code":"system-reboot","EventId":"i-e","State":"%s"}]'
    assert metadata.read_notice("maintenance", event % "active") == {
        "kind": "maintenance",
        "action": "system-reboot",
        "at": "21 Jan 2026 09:00:43 GMT",
        "in_hours": 2.0,
    }
    assert metadata.read_notice("maintenance", event % "completed") is None
    assert metadata.read_notice("maintenance", "[]") is None


def test_of_several_events_the_next_is_told_and_how_far_it_is(now: float) -> None:
    def event(hours: float, code: str) -> dict[str, str]:
        at = time.strftime("%d %b %Y %H:%M:%S GMT", time.gmtime(now + hours * 3600))
        return {"NotBefore": at, "Code": code, "EventId": "i-e", "State": "active"}

    said = metadata.read_notice("maintenance", json.dumps([event(300, "system-reboot"), event(2, "instance-stop")]))
    assert said is not None
    assert (said["action"], said["in_hours"]) == ("instance-stop", 2.0)
    unread = [event(2, "instance-stop"), {**event(2, "system-reboot"), "NotBefore": "soon"}]
    said = metadata.read_notice("maintenance", json.dumps(unread))
    assert said is not None
    assert (said["action"], said["in_hours"]) == ("system-reboot", None)


@pytest.mark.parametrize("body", ["", "null", "[]", '"terminate"', '{"action": "terminate"}', "<html>"])
def test_a_notice_that_cannot_be_read_is_an_error_not_its_absence(body: str) -> None:
    with pytest.raises(metadata.MetadataError, match="unreadable answer"):
        metadata.read_notice("spot", body)


def test_a_token_that_has_run_out_is_replaced_once(imds: LocalMetadata) -> None:
    service = metadata.Service(imds.endpoint, time.monotonic() + 300)
    imds.expire_tokens()
    assert service.get("instance-type") == "p5.48xlarge"
    assert imds.requests["/latest/api/token"] == 2
    imds.fail(3, 401)
    with pytest.raises(metadata.MetadataError, match="401"):
        service.get("instance-type")


@pytest.mark.parametrize("status", [500, 503, 403])
def test_a_failing_service_is_an_error_not_a_quiet_one(imds: LocalMetadata, tmp_path: Path, status: int) -> None:
    imds.spot_notice()
    imds.fail(2, status)
    found = asked(tmp_path)["metadata"]
    assert (found["reachable"], found["notice"]) == (False, None)
    assert str(status) in found["error"]


@contextmanager
def listener(answer: bytes | None) -> Iterator[str]:
    """Takes connections; answers each with the same bytes, or with nothing at all."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        links: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    link, _ = server.accept()
                except OSError:
                    return
                links.append(link)
                if answer is not None:
                    link.recv(65536)
                    link.sendall(answer)
                    link.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        for link in links:
            link.close()


def test_a_service_that_hangs_costs_one_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(metadata, "BUDGET_SECONDS", 0.1)
    with listener(None) as endpoint:
        monkeypatch.setenv(metadata.ENDPOINT_VARIABLE, endpoint)
        found = asked(tmp_path)["metadata"]
    assert not found["reachable"]
    assert "did not answer" in found["error"]


@pytest.mark.parametrize(
    "answer",
    [b"", b"hello\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", b"HTTP/1.1 200 OK\r\nContent-Le"],
)
def test_half_an_answer_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: bytes) -> None:
    with listener(answer) as endpoint:
        monkeypatch.setenv(metadata.ENDPOINT_VARIABLE, endpoint)
        found = asked(tmp_path)["metadata"]
    assert (found["reachable"], found["notice"]) == (False, None)
    assert found["error"]


def test_nobody_is_asked_on_a_machine_that_is_not_ec2s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(metadata.ENDPOINT_VARIABLE, raising=False)
    assert asked(tmp_path) == {"metadata": {"reachable": False, "notice": None, "error": None}, "_imds": {}}


def test_where_metadata_is_switched_off_on_ec2_a_notice_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(metadata.ENDPOINT_VARIABLE, raising=False)
    monkeypatch.setenv(metadata.DISABLED_VARIABLE, "true")
    folder = tmp_path / "sys/devices/virtual/dmi/id"
    folder.mkdir(parents=True)
    (folder / "sys_vendor").write_text("Amazon EC2\n")
    assert metadata.DISABLED_VARIABLE in asked(tmp_path)["metadata"]["error"]


@pytest.mark.parametrize("endpoint", ["169.254.169.254", "https://x", "http://x/path", "http://x:99999999"])
def test_an_endpoint_that_is_no_address_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, endpoint: str
) -> None:
    monkeypatch.setenv(metadata.ENDPOINT_VARIABLE, endpoint)
    assert endpoint in asked(tmp_path)["metadata"]["error"]


def test_no_proxy_is_used(imds: LocalMetadata, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert asked(tmp_path)["metadata"]["reachable"]
