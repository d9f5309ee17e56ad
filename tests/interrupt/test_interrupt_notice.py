"""Which notice the loop acts on, and what the deadline and the stop file report."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lustrain.problem import UserError
from tests.lab.servers import S3Place
from trainer.config import InterruptConfig, parse_time
from trainer.interrupt import Notice, NoticeWatcher, config_problems
from trainer.interrupt.deadline import Deadline
from trainer.interrupt.notice import nearer
from trainer.interrupt.outage import MOST_WARNINGS
from trainer.interrupt.stopfile import StopFile
from trainer.storage import StorageError, open_store

notices = st.none() | st.builds(
    Notice, st.sampled_from(["signal", "spot", "stop-file"]), st.text(max_size=3), st.none() | st.floats(0, 1e6)
)


def events() -> tuple[list[tuple[str, dict[str, Any]]], Any]:
    seen: list[tuple[str, dict[str, Any]]] = []
    return seen, lambda kind, fields: seen.append((kind, fields))


@given(st.lists(notices))
def test_first_of_the_notices_with_the_least_time_left_is_kept(arrivals: list[Notice | None]) -> None:
    kept: Notice | None = None
    for notice in arrivals:
        kept = nearer(kept, notice)
    real = [notice for notice in arrivals if notice is not None]
    time_left = lambda notice: float("inf") if notice.deadline is None else notice.deadline  # noqa: E731
    assert kept == (min(real, key=time_left) if real else None)


def test_the_time_remaining_is_never_negative_and_may_be_unknown() -> None:
    assert Notice("spot", "", 100.0).remaining(70.0) == 30.0
    assert Notice("spot", "", 100.0).remaining(170.0) == 0.0
    assert Notice("spot", "", None).remaining(1.0) is None


@pytest.mark.parametrize(
    ("source", "detail", "said", "to_go_on"),
    [
        ("signal", "SIGINT", "SIGINT", "start the same command again to go on"),
        ("data", "damaged data", "damaged data", "start the same command again to go on"),
        ("spot", "terminate at 12:00", "spot notice (terminate at 12:00)", "start the same command again to go on"),
        ("stop-file", "/x exists", "stop file (/x exists)", "remove the stop file, then start the same command again"),
        ("deadline", "capacity ends", "deadline (capacity ends)", "set a later interrupt.deadline, then start"),
    ],
)
def test_a_notice_is_named_by_its_source_with_what_to_do(source: str, detail: str, said: str, to_go_on: str) -> None:
    found = Notice(source, detail, None)
    assert found.summary == said
    assert found.advice.startswith(to_go_on)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_tells_of_a_notice_once_as_soon_as_it_is_there(tmp_path: Path, rank: int) -> None:
    seen, on_event = events()
    stop = tmp_path / "stop"
    with closing(NoticeWatcher(InterruptConfig(stop_uri=str(stop)), rank=rank, on_event=on_event)) as watch:
        stop.touch()
        watch.look()
        watch.report_notice(Notice("signal", "SIGTERM", None).fields())
    assert [(kind, fields["source"], fields["detail"]) for kind, fields in seen] == [
        ("notice", "stop-file", f"stop file ({stop} exists): saving after this step")
    ][rank:]


def test_a_notice_names_the_node_and_when_it_ends() -> None:
    fields = Notice("spot", "terminate", 1100.0, "i-0123").fields(lambda: 1000.0, lambda: 500_000.0)
    assert (fields["source"], fields["host"], fields["instance_id"]) == ("spot", socket.gethostname(), "i-0123")
    assert datetime.fromisoformat(fields["deadline"]).timestamp() == 500_100
    assert Notice("signal", "SIGTERM", None).fields()["deadline"] is None


def test_each_node_that_aws_takes_is_announced_once() -> None:
    seen, on_event = events()
    watch = NoticeWatcher(InterruptConfig(), on_event=on_event)
    spot = Notice("spot", "terminate", None, "i-0").fields()
    known = [Notice("signal", "SIGTERM", None).fields(), Notice("signal", "SIGUSR1", None).fields()]
    for notice in [*known, {**spot, "host": "a"}, {**spot, "host": "b"}, {**spot, "host": "a"}]:
        watch.report_notice(notice)
    assert [(fields["detail"].partition(":")[0], fields["host"]) for _, fields in seen] == [
        ("SIGTERM", socket.gethostname()),
        ("spot notice (terminate) on a", "a"),
        ("spot notice (terminate) on b", "b"),
    ]
    watch.close()


@given(
    st.datetimes(min_value=datetime(1900, 1, 2), max_value=datetime(2200, 1, 1)),
    st.integers(-23 * 60, 23 * 60),
    st.sampled_from("T "),
)
def test_every_time_with_a_zone_is_read_exactly(moment: datetime, offset_minutes: int, separator: str) -> None:
    aware = moment.replace(tzinfo=timezone(timedelta(minutes=offset_minutes)))
    assert parse_time(aware.isoformat(sep=separator)) == aware.timestamp()
    zulu = aware.astimezone(UTC).isoformat(sep=separator).replace("+00:00", "Z")
    assert parse_time(zulu) == aware.timestamp()


@pytest.mark.parametrize(
    "text", ["", "tomorrow", "2026-12-01", "2026-12-01T11:30:00", "2026-13-01T11:30:00Z", "1764588600"]
)
def test_deadline_without_a_time_or_a_zone_is_refused(text: str) -> None:
    with pytest.raises(
        ValidationError, match=r"(is not a time|has no time zone); allowed: a time with its zone"
    ) as caught:
        InterruptConfig(deadline=text)
    assert "isoformat" not in str(caught.value)


@given(st.text(max_size=30))
def test_a_deadline_that_the_config_takes_can_be_watched(text: str) -> None:
    try:
        config = InterruptConfig(deadline=text)
    except ValidationError:
        return
    NoticeWatcher(config).close()


TOO_LONG = "is too long to be looked up; allowed: 255 bytes between two '/'"
NO_FILE = ["s3://bucket", "s3://bucket/", "s3:///key", "s3://bucket/folder/", "http://x/y", "stop/", ""]
LONG = ["/tmp/{}", "absent/{}", "{}/stop", "s3://bucket/{}", "a/" * 2100 + "stop"]


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        *((uri, "") for uri in NO_FILE),
        *((uri.format("é" * 128), TOO_LONG) for uri in LONG),
        ("s3://stop--use1-az4--x-s3/stop", "is a directory bucket"),
    ],
)
def test_stop_uri_that_can_never_be_read_is_a_config_problem(uri: str, why: str) -> None:
    (line,) = config_problems(InterruptConfig(stop_uri=uri))
    assert line.startswith(f"interrupt.stop_uri = '{uri[:40]}")
    assert why in line
    assert config_problems(InterruptConfig(stop_uri=f"/tmp/{'a' * 255}")) == []


def test_all_problems_come_at_once() -> None:
    config = InterruptConfig(stop_uri="s3://bucket", metadata=True)
    with pytest.raises(UserError) as caught:
        NoticeWatcher(config, environ={"AWS_EC2_METADATA_SERVICE_ENDPOINT": "somewhere"})
    assert [line.split(" = ")[0] for line in caught.value.problems] == [
        "interrupt.stop_uri",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    ]


def test_the_deadline_gives_notice_a_margin_before_the_end() -> None:
    now = 1000.0
    seen, on_event = events()
    end = datetime.fromtimestamp(500_060, UTC).isoformat()
    deadline = Deadline(end, 20.0, wall_clock=lambda: 500_000.0, monotonic=lambda: now, on_event=on_event)
    assert deadline.poll() is None
    now = 1039.9
    assert deadline.poll() is None
    now = 1040.0
    assert deadline.poll() == Notice("deadline", f"capacity ends at {end}", 1060.0)
    assert seen == []


def test_a_deadline_that_has_passed_gives_notice_at_once() -> None:
    end = "2001-01-01T00:00:00Z"
    deadline = Deadline(end, 1.0, wall_clock=time.time, monotonic=lambda: 50.0, on_event=events()[1])
    notice = deadline.poll()
    assert notice is not None
    assert notice.remaining(50.0) == 0.0


def test_deadline_waits_for_a_clock_that_is_not_set_yet() -> None:
    told: list[float | None] = [None, None, 500_000.0]
    end = datetime.fromtimestamp(500_060, UTC).isoformat()
    deadline = Deadline(
        end, 90.0, wall_clock=lambda: told.pop(0), monotonic=lambda: 7.0, on_event=lambda kind, fields: None
    )
    ends = Notice("deadline", f"capacity ends at {end}", 67.0)
    assert [deadline.poll() for _ in range(4)] == [None, None, ends, ends]


def test_deadline_falls_back_to_local_clock_without_store_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable() -> float:
        raise StorageError("the store does not answer")

    seen, on_event = events()
    monkeypatch.setattr(time, "time", lambda: 500_000.0)
    soon = datetime.fromtimestamp(500_030, UTC).isoformat()
    deadline = Deadline(soon, 60.0, wall_clock=unreachable, monotonic=lambda: 7.0, on_event=on_event)
    notice = deadline.poll()
    assert notice is not None
    assert notice.remaining(7.0) == 30
    deadline.poll()
    assert [fields["source"] for _, fields in seen] == ["deadline"]


def test_a_stop_file_is_noticed_when_it_appears(tmp_path: Path) -> None:
    seen, on_event = events()
    stop = StopFile(str(tmp_path / "later" / "STOP"), on_event)
    assert stop.poll() is None
    (tmp_path / "later").mkdir()
    assert stop.poll() is None
    (tmp_path / "later" / "STOP").touch()
    assert stop.poll() == Notice("stop-file", f"{tmp_path}/later/STOP exists", None)
    assert seen == []


def test_trouble_with_the_stop_file_is_said_once_per_outage(tmp_path: Path) -> None:
    seen, on_event = events()
    loop = tmp_path / "loop"
    stop = StopFile(str(loop / "STOP"), on_event)
    for _ in range(MOST_WARNINGS + 2):
        loop.symlink_to(loop)
        assert [stop.poll() for _ in range(3)] == [None] * 3
        loop.unlink()
        assert stop.poll() is None
    assert len(seen) == MOST_WARNINGS
    assert all(kind == "warning" and fields["source"] == "stop-file" for kind, fields in seen)


@pytest.mark.slow
def test_a_stop_object_in_s3_is_noticed(moto_s3: S3Place) -> None:
    seen, on_event = events()
    stop = StopFile(moto_s3.uri("control/STOP"), on_event)
    assert stop.poll() is None
    open_store(moto_s3.uri("control")).put("STOP", b"")
    assert stop.poll() is not None
    assert seen == []
