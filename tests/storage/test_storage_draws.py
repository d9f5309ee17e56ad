"""What botocore draws comes from elsewhere than a Task's numbers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from botocore.retries.standard import ExponentialBackoff, RetryContext
from botocore.retryhandler import delay_exponential
from botocore.utils import InstanceMetadataFetcher

from trainer.storage.draws import draw_apart


def standard_retry() -> None:
    ExponentialBackoff().delay_amount(RetryContext(1))


def legacy_retry() -> None:
    delay_exponential("rand", 2, 1)


def credentials_that_are_not_renewed() -> None:
    InstanceMetadataFetcher()._evaluate_expiration({"expiry_time": "2026-01-01T00:00:00Z"})


@pytest.mark.parametrize("draw", [standard_retry, legacy_retry, credentials_that_are_not_renewed])
def test_botocore_draws_nothing_from_a_tasks_stream(draw: Callable[[], None]) -> None:
    for _ in range(2):
        draw_apart()
    random.seed(7)
    draw()
    assert random.random() == random.Random(7).random()
