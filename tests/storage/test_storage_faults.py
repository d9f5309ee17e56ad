"""An S3 that fails, breaks off or lies costs time, never data: bounded retries, then the right bytes or one clear error."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from awscrt.checksums import crc64nvme

from tests.lab.faulty_proxy import Answer, Cut, Delay, Fault, FaultyProxy, Reset, Swap, shorten_throttling
from tests.lab.servers import S3Place
from trainer.storage import CorruptObjectError, PreconditionError, StorageError, open_store
from trainer.storage.s3 import S3Store

ATTEMPTS = 4
PART_BYTES = 5 << 20
"""The least that S3 takes but for the last (https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html)."""
SIZE = 2 * PART_BYTES + (1 << 20) + 3
PARTS = 3


@dataclass
class Lab:
    """A store whose every request passes a proxy that breaks on command."""

    store: S3Store
    proxy: FaultyProxy
    place: S3Place

    def uploads(self) -> int:
        """Unfinished uploads that the server still holds."""
        return len(self.place.client().list_multipart_uploads(Bucket=self.place.bucket).get("Uploads", []))


Proxied = Callable[[S3Place], FaultyProxy]


def opened(path: str, place: S3Place, port_80: Proxied, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", str(ATTEMPTS))
    shorten_throttling(monkeypatch)
    monkeypatch.setattr("trainer.storage.bulk.LONGEST_PAUSE", 0.1)
    # Servers written in Python take most of the time for bytes.
    for module in ("bulk", "crt", "s3"):
        monkeypatch.setattr(f"trainer.storage.{module}.PART_BYTES", PART_BYTES)
    with FaultyProxy(place.endpoint) as plain:
        proxy = port_80(place) if path == "crt" else plain
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = open_store(place.uri())
        assert isinstance(store, S3Store)
        yield Lab(store, proxy, place)


@pytest.fixture(params=["boto3", "crt"])
def lab(
    request: pytest.FixtureRequest, moto_s3: S3Place, port_80: Proxied, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lab]:
    yield from opened(request.param, moto_s3, port_80, monkeypatch)


@pytest.fixture(params=["boto3", "crt"])
def strict_lab(
    request: pytest.FixtureRequest, weed_s3: S3Place, port_80: Proxied, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lab]:
    """In front of a server that verifies checksums."""
    yield from opened(request.param, weed_s3, port_80, monkeypatch)


@pytest.fixture(scope="module")
def body() -> bytes:
    return random.Random(7).randbytes(SIZE)


@pytest.fixture
def source(body: bytes) -> Iterator[str]:
    fd = os.memfd_create("staged")
    os.write(fd, body)
    yield f"/proc/self/fd/{fd}"
    os.close(fd)


def fetched(store: S3Store, key: str, size: int) -> bytes:
    buffer = bytearray(size)
    store.read_into(key, memoryview(buffer))
    return bytes(buffer)


BREAKING: list[Fault] = [Answer(500, "InternalError"), Answer(503, "SlowDown"), Reset()]
PASSING: list[tuple[Fault, int]] = [*((fault, 2) for fault in BREAKING), (Reset(after=True), 2), (Delay(0.2), 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "times"), PASSING, ids=str)
def test_a_passing_fault_costs_an_upload_nothing_but_time(
    lab: Lab, source: str, body: bytes, fault: Fault, times: int
) -> None:
    lab.proxy.inject(fault, times=times, method="PUT")
    lab.proxy.inject(fault, times=1, method="POST", key="uploadId")
    lab.store.put_file("data", source, SIZE, crc64nvme(body))
    assert lab.proxy.did[type(fault).__name__] == times + 1
    assert fetched(lab.store, "data", SIZE) == body


@pytest.mark.slow
def test_retry_draws_nothing_from_a_tasks_stream(lab: Lab) -> None:
    lab.store.put("key", b"body")
    random.seed(7)
    lab.proxy.inject(Answer(500, "InternalError"), times=2, method="GET")
    assert lab.store.read("key")[0] == b"body"
    assert random.random() == random.Random(7).random()


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "times"), [*PASSING, (Cut(), 2), (Cut(0.0), 1)], ids=str)
def test_a_passing_fault_costs_a_download_nothing_but_time(
    lab: Lab, source: str, body: bytes, fault: Fault, times: int
) -> None:
    lab.store.put_file("data", source, SIZE, crc64nvme(body))
    lab.proxy.inject(fault, times=times, method="GET")
    assert fetched(lab.store, "data", SIZE) == body
    assert lab.proxy.did[type(fault).__name__] == times


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*BREAKING, Cut()], ids=str)
@pytest.mark.parametrize("lab", ["boto3"], indirect=True)
def test_a_passing_fault_costs_a_small_object_nothing(lab: Lab, fault: Fault) -> None:
    lab.proxy.inject(fault, times=2)
    etag = lab.store.put("lease.json", b"{}" * 500)
    lab.proxy.inject(fault, times=2)
    assert lab.store.read("lease.json") == (b"{}" * 500, etag)
    lab.proxy.inject(fault, times=2)
    assert [info.key for info in lab.store.list()] == ["lease.json"]
    lab.proxy.inject(fault, times=2)
    lab.store.delete("lease.json")


@pytest.mark.slow
@pytest.mark.parametrize("fault", BREAKING, ids=str)
def test_a_lasting_fault_ends_an_upload_after_bounded_attempts(
    lab: Lab, source: str, body: bytes, fault: Fault
) -> None:
    lab.proxy.inject(fault, method="PUT")
    with pytest.raises(StorageError, match=r"/data'|/run'") as caught:
        lab.store.put_file("data", source, SIZE, crc64nvme(body))
    assert "\n" not in str(caught.value)
    assert lab.proxy.requests["PUT"] <= ATTEMPTS * PARTS
    lab.proxy.heal()
    assert lab.uploads() == 0, "nothing unfinished is left to be paid for"
    assert list(lab.store.list()) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*BREAKING, Cut()], ids=str)
def test_a_lasting_fault_ends_a_download_after_bounded_attempts(
    lab: Lab, source: str, body: bytes, fault: Fault
) -> None:
    lab.store.put_file("data", source, SIZE, crc64nvme(body))
    before = lab.proxy.requests["GET"]
    lab.proxy.inject(fault, method="GET")
    with pytest.raises(StorageError, match=r"/data'|/run'"):
        fetched(lab.store, "data", SIZE)
    assert lab.proxy.requests["GET"] - before <= (ATTEMPTS + 1) * PARTS
    lab.proxy.heal()
    assert fetched(lab.store, "data", SIZE) == body


@pytest.mark.parametrize("lab", ["boto3"], indirect=True)
def test_lasting_cut_of_a_small_object_is_the_networks_fault(lab: Lab) -> None:
    lab.store.put("lease.json", b"x" * 1000)
    lab.proxy.inject(Cut(), method="GET")
    with pytest.raises(StorageError, match=f"cut short {ATTEMPTS} times") as caught:
        lab.store.read("lease.json")
    assert not isinstance(caught.value, CorruptObjectError)
    assert lab.proxy.did["Cut"] == ATTEMPTS


@pytest.mark.parametrize("lab", ["boto3"], indirect=True)
def test_a_lost_answer_to_a_commit_is_seen_as_the_own_success(lab: Lab) -> None:
    """The retry finds the object there: the caller compares the body, and it is its own."""
    lab.proxy.inject(Reset(after=True), times=1, method="PUT", key="manifests/")
    with pytest.raises(PreconditionError):
        lab.store.put("manifests/1.json", b"mine", if_absent=True)
    assert lab.proxy.did["Reset"] == 1
    assert lab.store.read("manifests/1.json")[0] == b"mine"


@pytest.mark.slow
@pytest.mark.parametrize("lab", ["boto3"], indirect=True)
def test_a_conflict_with_a_put_in_flight_is_tried_again(lab: Lab) -> None:
    lab.proxy.inject(Answer(409, "ConditionalRequestConflict"), times=2, method="PUT")
    lab.store.put("manifests/1.json", b"mine", if_absent=True)
    assert lab.proxy.did["Answer"] == 2
    lab.proxy.inject(Answer(409, "ConditionalRequestConflict"), method="PUT")
    with pytest.raises(StorageError, match="ConditionalRequestConflict") as caught:
        lab.store.put("manifests/2.json", b"mine", if_absent=True)
    assert not isinstance(caught.value, PreconditionError), "nobody has won yet"


@pytest.mark.slow
def test_bytes_that_change_on_the_way_up_are_refused(strict_lab: Lab, source: str, body: bytes) -> None:
    strict_lab.proxy.inject(Swap(request=True), times=1, method="PUT")
    with pytest.raises(CorruptObjectError):
        strict_lab.store.put_file("data", source, SIZE, crc64nvme(body))
    assert strict_lab.uploads() == 0
    strict_lab.proxy.inject(Swap(request=True), times=1, method="PUT")
    with pytest.raises(CorruptObjectError):
        strict_lab.store.put("small", b"x" * 1000)
    assert list(strict_lab.store.list()) == []


@pytest.mark.slow
@pytest.mark.parametrize("strict_lab", ["boto3"], indirect=True)
def test_record_bytes_that_change_on_the_way_are_requested_again(strict_lab: Lab) -> None:
    strict_lab.store.put("lease.json", b"x" * 1000)
    strict_lab.proxy.inject(Swap(), times=2, method="GET")
    assert strict_lab.store.read("lease.json")[0] == b"x" * 1000
    assert strict_lab.proxy.did["Swap"] == 2
    strict_lab.proxy.inject(Swap(), method="GET")
    with pytest.raises(CorruptObjectError, match="wrong checksum"):
        strict_lab.store.read("lease.json")


@pytest.mark.slow
@pytest.mark.parametrize("at", [rb"<LastModified>....-..-", rb"<Size>."], ids=["time", "size"])
@pytest.mark.parametrize("lab", ["boto3"], indirect=True)
def test_listing_that_cannot_be_parsed_is_retried_then_one_line(lab: Lab, at: bytes) -> None:
    """It has no checksum: what the wire did to it shows when botocore reads it, as a plain ValueError."""
    lab.store.put("lease.json", b"{}")
    lab.proxy.inject(Swap(at=at), times=ATTEMPTS - 1)
    assert [info.key for info in lab.store.list()] == ["lease.json"]
    assert lab.proxy.did["Swap"] == ATTEMPTS - 1
    lab.proxy.inject(Swap(at=at))
    with pytest.raises(StorageError, match=f"cannot be read .*{ATTEMPTS} attempts") as caught:
        list(lab.store.list())
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_under_random_faults_every_call_tells_the_truth(lab: Lab, source: str, body: bytes, seed: int) -> None:
    """What was reported as stored is there and whole; what was reported as failed may be either, but never half."""
    chance = random.Random(seed)
    for fault in (Answer(500), Answer(503, "SlowDown"), Reset(), Reset(after=True), Cut(chance.random())):
        lab.proxy.inject(fault, probability=0.05)
    stored: dict[str, bytes] = {}
    tried: dict[str, bytes] = {}
    for i in range(12):
        small = chance.random() < 0.7
        key, content = f"k{i}", (b"%d" % i) * 100 if small else body
        tried[key] = content
        try:
            if small:
                lab.store.put(key, content)
            else:
                lab.store.put_file(key, source, SIZE, crc64nvme(body))
            stored[key] = content
        except StorageError:
            continue
    lab.proxy.heal()
    there = {info.key: fetched(lab.store, info.key, info.size) for info in lab.store.list()}
    assert stored.items() <= there.items()
    assert there.items() <= tried.items()
    assert len(stored) > 6
