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
from node_setup.agent.facts.reading import MachineReading
from node_setup.agent.facts.wanted import Wanted
from node_setup.agent.host import Host


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "BUDGET_SECONDS", 300.0)


NOW = 1768978843.0
"""21 Jan 2026 07:00:43 GMT."""


def asked(root: Path) -> dict[str, Any]:
    return metadata.collect(MachineReading(Host(str(root)), Wanted()))


def notice(root: Path) -> Any:
    found = asked(root)["metadata"]
    assert found["reachable"], found
    return found["notice"]


def test_a_quiet_instance_tells_who_it_is_and_announces_nothing(imds: LocalMetadata, tmp_path: Path) -> None:
    found = asked(tmp_path)
    assert found["metadata"] == {"reachable": True, "notice": None, "error": None}
    reading = MachineReading(Host(str(tmp_path)), Wanted())
    assert instance.collect(reading, found["_imds"]) == {
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


def event(hours: float, code: str, **more: str) -> dict[str, str]:
    at = time.strftime("%d %b %Y %H:%M:%S GMT", time.gmtime(NOW + hours * 3600))
    return {"NotBefore": at, "Code": code, "EventId": "i-e", "State": "active", **more}


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([event(2, "system-reboot")], ("system-reboot", "21 Jan 2026 09:00:43 GMT", 2.0)),
        ([event(2, "system-reboot", State="completed")], None),
        ([], None),
        ([event(300, "system-reboot"), event(2, "instance-stop")], ("instance-stop", "21 Jan 2026 09:00:43 GMT", 2.0)),
        ([event(2, "instance-stop"), event(2, "system-reboot", NotBefore="soon")], ("system-reboot", "soon", None)),
    ],
)
def test_next_active_maintenance_is_reported_with_its_hours(
    events: list[dict[str, str]], told: tuple[Any, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node_setup.agent.facts.metadata.time.time", lambda: NOW)
    said = metadata.read_notice("maintenance", json.dumps(events))
    assert (said and (said["kind"], said["action"], said["at"], said["in_hours"])) == (told and ("maintenance", *told))


@pytest.mark.parametrize("body", ["", "null", "[]", '"terminate"', '{"action": "terminate"}', "<html>"])
def test_unreadable_notice_is_an_error_not_its_absence(body: str) -> None:
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


@pytest.mark.parametrize(
    "answer",
    [None, b"", b"hello\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", b"HTTP/1.1 200 OK\r\nContent-Le"],
)
def test_no_answer_in_time_or_half_of_one_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: bytes | None
) -> None:
    if answer is None:
        monkeypatch.setattr(metadata, "BUDGET_SECONDS", 0.1)
    with listener(answer) as endpoint:
        monkeypatch.setenv(metadata.ENDPOINT_VARIABLE, endpoint)
        found = asked(tmp_path)["metadata"]
    assert (found["reachable"], found["notice"], bool(found["error"])) == (False, None, True)


def test_metadata_is_not_read_off_ec2_and_unknown_when_disabled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(metadata.ENDPOINT_VARIABLE, raising=False)
    assert asked(tmp_path) == {"metadata": {"reachable": False, "notice": None, "error": None}, "_imds": {}}
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
