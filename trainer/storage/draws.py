"""botocore draws from Python's own random stream, from which a Task's numbers may come: a retry would change the losses."""

from __future__ import annotations

import inspect
import random

from botocore import retryhandler, utils
from botocore.retries.standard import ExponentialBackoff

from lustrain.backoff import JITTER


def draw_apart() -> None:
    """Have all clients that this process makes from now on, and those that botocore makes for credentials, draw elsewhere."""
    begin = ExponentialBackoff.__init__
    given = [one for one in inspect.signature(begin).parameters.values() if one.default is not one.empty]
    begin.__defaults__ = tuple(JITTER if one.name == "random" else one.default for one in given)
    # Retries under AWS_RETRY_MODE=legacy, and credentials that the instance metadata has not renewed.
    for module in (retryhandler, utils):
        vars(module)["random"] = random.SystemRandom()
