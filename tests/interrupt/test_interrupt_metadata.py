"""The watcher against real metadata servers: the emulated service, and one that misbehaves in every way we know."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from infra.local.metadata import LocalMetadata
from tests.processes import wait_until
from trainer.config import InterruptConfig
from trainer.interrupt import Notice, NoticeWatcher
from trainer.interrupt.metadata import (
    LIFECYCLE_PATH,
    SPOT_PATH,
    TOKEN_PATH,
    Metadata,
    Response,
    endpoint,
    spot_deadline,
)

HOUR = 3600.0
METADATA = InterruptConfig(metadata=True)
STARTED, NOW = 1_800_000_000.0, 1000.0
"""What the clocks of the service and of its client show, always."""


IN_90_S = datetime.fromtimestamp(STARTED + 90, UTC).isoformat()


class Scripted:
    """A metadata server whose every answer is given, or which hangs instead of answering."""

    def __init__(self, answers: dict[str, str], *, hangs: bool = False, dropped: str = "") -> None:
        """`dropped` is the method of requests that end without an answer."""
        self.answers, self.hangs, self.dropped = answers, hangs, dropped
        self.released = threading.Event()

    @contextmanager
    def serving(self) -> Iterator[dict[str, str]]:
        """The environment that leads a client here."""
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if scripted.hangs:
                    scripted.released.wait()
                if scripted.hangs or self.command == scripted.dropped:
                    return
                body = "token" if self.path == TOKEN_PATH else scripted.answers.get(self.path)
                self.send_response_only(200 if body is not None else 404)
                self.end_headers()
                self.wfile.write((body or "").encode())

            do_PUT = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{server.server_port}/"}
        finally:
            self.released.set()
            server.shutdown()
            server.server_close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may not let a server that is there answer within a second."""
    monkeypatch.setattr("trainer.interrupt.metadata.TIMEOUT_S", 300.0)


def poller(
    environ: dict[str, str], *, rebalance: bool = False, monotonic: Callable[[], float] = lambda: NOW
) -> tuple[Metadata, list[str]]:
    """A poller and the warnings it gives."""
    warnings: list[str] = []
    metadata = Metadata(
        environ,
        rebalance=rebalance,
        monotonic=monotonic,
        wall_clock=lambda: STARTED,
        on_event=lambda kind, fields: warnings.append(f"{kind} {fields['source']}: {fields['detail']}"),
    )
    return metadata, warnings


def left(notice: Notice | None) -> float:
    assert notice is not None
    remaining = notice.remaining(NOW)
    assert remaining is not None
    return remaining


def test_a_spot_notice_is_seen_with_its_time(imds: LocalMetadata) -> None:
    metadata, warnings = poller(imds.environment)
    assert metadata.poll() is None
    began = time.monotonic()
    imds.spot_notice("terminate", in_s=120)
    notice = metadata.poll()
    ended = time.monotonic()
    assert began + 117 < ended + left(notice)
    assert left(notice) <= 120
    assert notice is not None
    assert notice.source == "spot"
    assert notice.detail.startswith("terminate at 20")
    assert metadata.poll() is notice
    assert warnings == []


@pytest.mark.parametrize(
    ("local_off_s", "server_time", "expected"),
    [
        *((off, STARTED, 89.0) for off in (0.0, HOUR, -HOUR, 400 * 24 * HOUR)),  # the header may be a second old
        *((off, None, left_s) for off, left_s in ((0.0, 90.0), (HOUR, 0.0), (-HOUR, 120.0))),
    ],
)
def test_the_time_remaining_is_the_services_or_the_local_clocks(
    local_off_s: float, server_time: float | None, expected: float
) -> None:
    assert spot_deadline(IN_90_S, Response(200, "", NOW, server_time), STARTED + local_off_s) == NOW + expected


@pytest.mark.parametrize(("when", "deadline"), [("shortly", None), (IN_90_S, NOW + 90)])
def test_spot_notice_without_a_readable_time_is_a_notice(when: str, deadline: float | None) -> None:
    with Scripted({SPOT_PATH: f'{{"action": "stop", "time": "{when}"}}'}).serving() as environ:
        metadata, _ = poller(environ)
        assert metadata.poll() == Notice("spot", f"stop at {when}", deadline)


@pytest.mark.parametrize("body", ["<html>login</html>", "[]", '"x"', "{}", "null", '{"action": "terminate"}'])
def test_an_answer_that_is_no_notice_is_one_warning(body: str) -> None:
    with Scripted({SPOT_PATH: body}).serving() as environ:
        metadata, warnings = poller(environ)
        assert [metadata.poll() for _ in range(3)] == [None] * 3
        assert len(warnings) == 1
        assert SPOT_PATH in warnings[0]


def test_a_rebalance_recommendation_counts_only_by_option(imds: LocalMetadata) -> None:
    careless, _ = poller(imds.environment)
    careful, _ = poller(imds.environment, rebalance=True)
    assert careless.poll() is careful.poll() is None
    imds.rebalance()
    assert careless.poll() is None
    notice = careful.poll()
    assert notice is not None
    assert (notice.source, notice.deadline) == ("rebalance", None)


def test_recommendation_from_before_the_start_stops_nothing(imds: LocalMetadata) -> None:
    """It stays with the instance: a launcher that starts exit code 85 again would restore and stop forever."""
    imds.rebalance()
    restarted, warnings = poller(imds.environment, rebalance=True)
    assert restarted.poll() is restarted.poll() is None
    assert len(warnings) == 1
    assert "rebalance was recommended before this start" in warnings[0]


def test_auto_scaling_gives_notice_when_the_target_is_terminated(imds: LocalMetadata) -> None:
    metadata, warnings = poller(imds.environment)
    imds.lifecycle_state("InService")
    assert metadata.poll() is None
    imds.lifecycle_state("Terminated")
    notice = metadata.poll()
    assert notice is not None
    assert (notice.source, notice.deadline) == ("autoscaling", None)
    assert imds.requests[LIFECYCLE_PATH] == 2
    assert warnings == []


def test_of_several_notices_the_one_with_a_deadline_stays(
    imds: LocalMetadata,
) -> None:
    imds.lifecycle_state("Terminated")
    imds.spot_notice()
    metadata, _ = poller(imds.environment)
    notice = metadata.poll()
    assert notice is not None
    assert notice.source == "spot"
    imds.fail(10)
    assert metadata.poll() is notice


def test_token_serves_many_polls_its_renewal_misses_no_notice(imds: LocalMetadata) -> None:
    metadata, warnings = poller(imds.environment)
    for _ in range(5):
        assert metadata.poll() is None
    assert imds.requests[TOKEN_PATH] == 1
    imds.expire_tokens()
    imds.spot_notice()
    assert metadata.poll() is not None
    assert imds.requests[TOKEN_PATH] == 2
    assert warnings == []


def test_a_token_is_renewed_before_its_time_is_over(imds: LocalMetadata) -> None:
    now = [0.0]
    metadata, _ = poller(imds.environment, monotonic=lambda: now[0])
    metadata.poll()
    now[0] = 6 * HOUR - 1
    metadata.poll()
    assert imds.requests[TOKEN_PATH] == 2


def test_failing_metadata_service_is_one_warning_and_no_notice(imds: LocalMetadata) -> None:
    metadata, warnings = poller(imds.environment)
    imds.spot_notice()
    imds.fail(4, status=503)
    assert [metadata.poll() for _ in range(4)] == [None] * 4
    assert len(warnings) == 1
    assert "503" in warnings[0]
    assert metadata.poll() is not None
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1"}, "http://127.0.0.1:1"),
        ({"AWS_EC2_METADATA_DISABLED": "True"}, "AWS_EC2_METADATA_DISABLED is true"),
    ],
    ids=["nobody listens", "switched off"],
)
def test_a_service_that_is_not_there_is_one_warning(imds: LocalMetadata, variables: dict[str, str], named: str) -> None:
    imds.spot_notice()
    metadata, warnings = poller({**imds.environment, **variables})
    assert [metadata.poll() for _ in range(3)] == [None] * 3
    assert len(warnings) == 1
    assert named in warnings[0]
    assert not imds.requests


@pytest.mark.slow
def test_service_that_never_answers_is_one_warning_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.interrupt.metadata.TIMEOUT_S", 0.2)
    with Scripted({}, hangs=True).serving() as environ:
        metadata, warnings = poller(environ)
        assert [metadata.poll(), metadata.poll()] == [None, None]
        assert len(warnings) == 1
        assert "hop limit" not in warnings[0]


def test_token_that_alone_never_arrives_points_at_the_hop_limit() -> None:
    with Scripted({}, dropped="PUT").serving() as environ:
        metadata, warnings = poller(environ)
        assert metadata.poll() is None
        assert "HttpPutResponseHopLimit to 2" in warnings[0]


def test_a_proxy_in_the_environment_is_not_used(imds: LocalMetadata, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    metadata, warnings = poller(imds.environment)
    imds.spot_notice()
    assert metadata.poll() is not None
    assert warnings == []


def test_the_endpoint_follows_the_variables_of_the_sdks() -> None:
    assert endpoint({}) == "http://169.254.169.254"
    assert endpoint({"AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE": "IPv6"}) == "http://[fd00:ec2::254]"
    assert endpoint({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9/"}) == "http://127.0.0.1:9"


def watcher(
    config: InterruptConfig, environ: dict[str, str], seen: list[Any] | None = None, **ranks: int
) -> NoticeWatcher:
    """A watch whose clocks stand, and whose thread is not started."""
    return NoticeWatcher(
        config,
        environ=environ,
        on_event=lambda kind, fields: None if seen is None else seen.append((kind, fields)),
        local_clock=lambda: STARTED,
        monotonic=lambda: NOW,
        **ranks,
    )


def test_watch_tells_a_notice_with_the_time_that_is_left() -> None:
    seen: list[Any] = []
    body = json.dumps({"action": "terminate", "time": IN_90_S})
    with Scripted({SPOT_PATH: body}).serving() as environ, closing(watcher(METADATA, environ, seen)) as watch:
        watch.look()
        watch.look()
        notice = watch.notice()
    assert notice is not None
    assert (notice.source, notice.deadline) == ("spot", NOW + 90)
    ends = datetime.fromtimestamp(STARTED + 90, UTC).isoformat().replace("+00:00", "Z")
    assert [(kind, fields["source"], fields["deadline"]) for kind, fields in seen] == [("notice", "spot", ends)]


@pytest.mark.slow
def test_thread_of_the_watch_sees_a_notice(imds: LocalMetadata) -> None:
    config = InterruptConfig(metadata=True, poll_s=0.05)
    with NoticeWatcher(config, environ=imds.environment) as watch:
        assert watch.notice() is None
        imds.spot_notice(in_s=60)
        wait_until(watch.notice)
        notice = watch.notice()
    assert notice is not None
    assert notice.instance_id == "i-0123456789abcdef0"


def test_stop_file_without_a_deadline_gives_way_to_a_spot_notice(imds: LocalMetadata, tmp_path: Any) -> None:
    stop = tmp_path / "STOP"
    config = InterruptConfig(metadata=True, stop_uri=str(stop))
    with closing(watcher(config, imds.environment)) as watch:
        sources = []
        for happen in (stop.touch, imds.spot_notice):
            happen()
            watch.look()
            notice = watch.notice()
            sources.append(notice and notice.source)
    assert sources == ["stop-file", "spot"]


@pytest.mark.parametrize(
    ("rank", "local_rank", "metadata", "source"),
    [(9, 1, True, None), (8, 0, True, "spot"), (0, 0, False, "stop-file")],
)
def test_only_local_rank_0_polls_and_only_rank_0_reads_stop_file(
    imds: LocalMetadata, tmp_path: Any, rank: int, local_rank: int, metadata: bool, source: str | None
) -> None:
    (tmp_path / "STOP").touch()
    imds.spot_notice()
    config = InterruptConfig(metadata=metadata, stop_uri=str(tmp_path / "STOP"))
    with closing(watcher(config, imds.environment, rank=rank, local_rank=local_rank)) as watch:
        watch.look()
        notice = watch.notice()
    assert (notice and notice.source) == source
    assert bool(imds.requests) is (source == "spot")
