"""One thing that an update does to what is there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lustrain.problem import LONGEST_VALUE, plain


class Effect(StrEnum):
    """What happens, the mildest first."""

    IN_PLACE = "in place"
    NEW_NODES = "for new nodes only"
    REIMAGES = "re-images root disks"
    WIPES = "wipes local disks"
    DELETES_OBJECTS = "deletes objects"
    REPLACES_ASSOCIATION = "replaces the association"
    REPLACES_NODES = "replaces nodes"
    REPLACES_CLUSTER = "replaces the cluster"
    REPLACES_FILE_SYSTEM = "replaces the file system"
    IMPOSSIBLE = "cannot be done"


@dataclass(frozen=True)
class Change:
    """One difference: `lost` is what does not come back, `instead` what to do; both empty where nothing is lost."""

    path: str
    effect: Effect
    message: str
    lost: str = ""
    instead: str = ""

    def line(self) -> str:
        ends = [f"lost: {self.lost}" if self.lost else "", f"instead: {self.instead}" if self.instead else ""]
        return plain("; ".join([f"{self.effect}: {self.path}: {self.message}", *filter(None, ends)]))


def protected(path: str, what: str) -> Change:
    """Return the change at which the engine would stop in the middle of an update, since the stack protects this."""
    message = f"{what} holds data or money and is protected: the engine would stop there"
    instead = "make a second stack, or let go of it knowingly: pulumi state unprotect, then pulumi state delete"
    return Change(path, Effect.IMPOSSIBLE, message, "", instead)


def shown(value: object) -> str:
    text = "nothing" if value in (None, (), "") else str(value)
    if isinstance(value, tuple) and value:
        text = ", ".join(map(str, value))
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "…"
