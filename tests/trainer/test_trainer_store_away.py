"""A store that cannot be reached while a run starts: a wrong setting of a first start, a passing fault under a supervisor."""

from __future__ import annotations

from pathlib import Path

import pytest

from lustrain.problem import UserError
from trainer.errors import EXIT_CONFIG, EXIT_FAILURE
from trainer.run.config_file import config_file
from trainer.run.start import proven_settings_exit_1
from trainer.storage import ObjectMissingError, PassingError, RefusedError, StorageError

ANY = "LUSTRAIN_ATTEMPT"


@pytest.mark.parametrize(
    ("attempt", "error", "code"),
    [
        (None, StorageError, EXIT_CONFIG),
        (None, PassingError, EXIT_FAILURE),
        ("1", StorageError, EXIT_FAILURE),
        ("2", PassingError, EXIT_FAILURE),
        ("2", RefusedError, EXIT_CONFIG),
        ("2", ObjectMissingError, EXIT_CONFIG),
    ],
)
def test_what_a_store_that_fails_before_the_run_is_claimed_means(
    monkeypatch: pytest.MonkeyPatch, attempt: str | None, error: type[StorageError], code: int
) -> None:
    monkeypatch.delenv(ANY, raising=False)
    if attempt:
        monkeypatch.setenv(ANY, attempt)
    with pytest.raises(UserError) as seen, proven_settings_exit_1():
        raise error("away")
    assert seen.value.exit_code == code


@pytest.mark.slow
@pytest.mark.parametrize(("attempt", "code"), [("", EXIT_CONFIG), ("2", EXIT_FAILURE)])
def test_settings_in_a_store_that_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attempt: str, code: int
) -> None:
    # A port of this machine that nobody listens at.
    for name, value in {
        ANY: attempt,
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "2",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as seen, config_file("s3://bucket/run/launch/config.toml"):
        pass
    assert seen.value.exit_code == code
