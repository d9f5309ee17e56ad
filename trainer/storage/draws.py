"""botocore draws from Python's own random stream, from which a Task's numbers may come: a retry would change the losses."""

from __future__ import annotations

import inspect
import random

from botocore import utils
from botocore.retries.standard import ExponentialBackoff

from lustrain.backoff import JITTER


def draw_apart() -> None:
    """Have all clients of this process that are made from now on draw the pauses of standard retries elsewhere."""
    begin = ExponentialBackoff.__init__
    given = [one for one in inspect.signature(begin).parameters.values() if one.default is not one.empty]
    begin.__defaults__ = tuple(JITTER if one.name == "random" else one.default for one in given)
    # For credentials that the instance metadata has not renewed.
    vars(utils)["random"] = random.SystemRandom()
