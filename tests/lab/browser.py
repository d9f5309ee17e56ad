"""A page as Debian's Chromium shows it, without a network."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
from PIL import Image

from tests.conftest import require

PATIENCE_S = 300.0
WIDTH, HEIGHT = 1600, 3000
NEAR = 12
"""Of 255 in each channel, by which an edge that is smoothed may differ from its line's colour."""


class Screen:
    """What a window of WIDTH x HEIGHT shows of the page in a file; `picture`, a PNG, and Chromium's log are in its folder."""

    def __init__(self, page: Path, folder: Path) -> None:
        program = shutil.which("chromium")
        require(program, "Chromium; fix: apt-get install chromium")
        self.picture = folder / "screen.png"
        # Its sandbox refuses root.
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += [f"--user-data-dir={folder / 'profile'}", f"--window-size={WIDTH},{HEIGHT}"]
        command = ["unshare", "--net", str(program), *flags, f"--screenshot={self.picture}", page.absolute().as_uri()]
        with (folder / "chromium.log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=log, timeout=PATIENCE_S, check=True)
        shutil.rmtree(folder / "profile", ignore_errors=True)
        with Image.open(self.picture) as picture:
            self._pixels = np.asarray(picture.convert("RGB"), dtype=np.int16)

    def extent(self, colour: str) -> tuple[int, int]:
        """Return the width and height of the box around all that has a colour, like #2563ab; 0 and 0 where nothing has."""
        wanted = np.array(list(bytes.fromhex(colour.removeprefix("#"))), dtype=np.int16)
        rows, columns = np.nonzero((np.abs(self._pixels - wanted) <= NEAR).all(axis=2))
        return (int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1) if len(rows) else (0, 0)
