"""The JSON object that every command of the agent prints."""

from __future__ import annotations

import os
import sys
from typing import Any

from node_setup.agent.wire.identity import Identity

VERSION = 1


def empty_answer(identity: Identity) -> dict[str, Any]:
    """Return an empty answer with every key that answers have; `seconds` holds the time of each phase."""
    return {
        "version": VERSION,
        "agent": identity.sha256,
        "host": os.uname().nodename,
        "python": sys.version.split()[0],
        "profile": None,
        "profile_why": None,
        "group": None,
        "rows": [],
        "refused": None,
        "reboot": [],
        "lint": [],
        "unplanned": [],
        "errors": [],
        "seconds": {"facts": 0.0, "plan": 0.0, "apply": 0.0},
    }
