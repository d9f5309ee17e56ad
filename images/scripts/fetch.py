"""Fetches a file and refuses it unless its sha256 is the given one: fetch.py URL SHA256 INTO. A path is taken as it is.

fetch.py --there URL only asks: exit code 0 where it is, 1 with one line where it is not.

Python's standard library does it, so that no image carries a program for downloads.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

TRIES = 4
TIMEOUT_S = 30
_CHUNK = 1 << 20


def fetch(url: str, into: Path) -> None:
    """Download to `into`; a few tries, since a build that fails after minutes of others' work for one lost packet is dear."""
    if "://" not in url:
        shutil.copyfile(url, into)
        return
    for left in reversed(range(TRIES)):
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply, into.open("wb") as file:
                shutil.copyfileobj(reply, file, _CHUNK)
            return
        except OSError as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code in (401, 403, 404, 410)
            if left == 0 or refused:
                raise
            print(f"fetch: {url}: {error}; {left} tries left", file=sys.stderr)
            time.sleep((TRIES - left) * random.uniform(0.5, 1.5))


def main(url: str, sha256: str, into: str) -> int:
    """Return 0, or 1 with one line on stderr and no file left."""
    target = Path(into)
    try:
        fetch(url, target)
        digest = hashlib.sha256()
        with target.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except (OSError, ValueError) as error:
        target.unlink(missing_ok=True)
        print(f"fetch: {url}: {error}", file=sys.stderr)
        return 1
    if digest.hexdigest() != sha256:
        target.unlink()
        print(f"fetch: {url}: sha256 is {digest.hexdigest()}, wanted {sha256 or 'one, got none'}", file=sys.stderr)
        return 1
    return 0


def there(url: str) -> int:
    """Return 0 where the address answers, 1 with one line on stderr where it does not, after one try."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT_S):
            return 0
    except (OSError, ValueError) as error:
        print(f"fetch: {url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--there":
        sys.exit(there(sys.argv[2]))
    if len(sys.argv) != 4:
        sys.exit("usage: fetch.py URL SHA256 INTO")
    sys.exit(main(*sys.argv[1:]))
