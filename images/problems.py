"""What goes wrong with images and what the user can do about it, as one line without a traceback."""

from __future__ import annotations

from collections.abc import Sequence


class ImageError(Exception):
    """Something the user can mend; `problems` are lines in the house form, exit code 2 for bad input and 1 for what failed."""

    def __init__(self, problems: str | Sequence[str], exit_code: int = 1) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.exit_code = exit_code
        super().__init__("\n".join(self.problems))
