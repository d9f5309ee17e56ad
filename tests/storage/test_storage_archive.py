"""Objects that S3 has moved to an archive: told apart by a listing and by a look, and refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.servers import S3Place
from trainer.storage import ArchivedError, ObjectInfo, open_store
from trainer.storage.archive import INTELLIGENT_TIERING, archive_in_head, archive_in_listing, refuse_archived


@pytest.mark.parametrize(
    ("item", "archive"),
    [
        ({"StorageClass": "STANDARD"}, ""),
        ({"StorageClass": "GLACIER_IR"}, ""),
        ({"StorageClass": INTELLIGENT_TIERING}, ""),
        ({"StorageClass": "GLACIER"}, "GLACIER"),
        ({"StorageClass": "DEEP_ARCHIVE", "RestoreStatus": {"IsRestoreInProgress": True}}, "DEEP_ARCHIVE"),
        ({"StorageClass": "GLACIER", "RestoreStatus": {"IsRestoreInProgress": False}}, ""),
    ],
)
def test_listing_names_the_archive_of_what_is_not_restored(item: dict[str, Any], archive: str) -> None:
    assert archive_in_listing(item) == archive


@pytest.mark.parametrize(
    ("answer", "archive"),
    [
        ({}, ""),
        ({"StorageClass": INTELLIGENT_TIERING}, ""),
        ({"StorageClass": INTELLIGENT_TIERING, "ArchiveStatus": "ARCHIVE_ACCESS"}, "ARCHIVE_ACCESS"),
        ({"StorageClass": "GLACIER", "Restore": 'ongoing-request="true"'}, "GLACIER"),
        ({"StorageClass": "GLACIER", "Restore": 'ongoing-request="false", expiry-date="…"'}, ""),
    ],
)
def test_head_names_the_archive_of_what_is_not_restored(answer: dict[str, Any], archive: str) -> None:
    assert archive_in_head(answer) == archive


def test_archived_object_is_listed_as_such_and_its_read_refused(moto_s3: S3Place) -> None:
    store = open_store(moto_s3.uri())
    store.put("plain", b"x")
    store.put("cold", b"x")
    moto_s3.archive("run/cold", "DEEP_ARCHIVE")
    assert {info.key: info.archive for info in store.list()} == {"cold": "DEEP_ARCHIVE", "plain": ""}
    assert store.stat("cold").archive == "DEEP_ARCHIVE"
    with pytest.raises(ArchivedError, match="/run/cold': lies in an archive storage class"):
        store.read("cold")


def test_count_is_lower_bound_where_listing_hides_archive_tiers() -> None:
    infos = [ObjectInfo("a", 1, "", 0.0, storage_class=INTELLIGENT_TIERING, archive=tier) for tier in ("X", "", "")]
    with pytest.raises(
        ArchivedError, match=r"at least 1 of 3 objects cannot be read .* such as a in X; fix: .*--key a "
    ):
        refuse_archived("run", "s3://bucket", infos)
    refuse_archived("run", "s3://bucket", infos[1:])
