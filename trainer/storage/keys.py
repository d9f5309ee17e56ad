"""Keys that every backend can hold, and buckets that hold none of them."""

from __future__ import annotations

from lustrain.problem import problem
from trainer.storage import StorageError

MAX_KEY_BYTES = 900
"""S3 allows 1024 bytes of UTF-8 for the whole key; the rest is left to the prefix in the store's URI."""
MAX_SEGMENT_BYTES = 255
"""NAME_MAX of every Linux file system in use."""
PRIVATE = ".lustrain"
"""First segment that a folder keeps for its own unfinished files and its lock; never an object."""

_DIRECTORY_BUCKETS = ("--x-s3", "--xa-s3")
"""Ends of the names of directory buckets (S3 Express One Zone) and of their access points:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/directory-bucket-naming-rules.html"""


def bucket_problems(name: str, uri: str, bucket: str) -> list[str]:
    """Return the line about a bucket that lists neither in key order nor by every prefix; none for any other.

    https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html
    """
    if not bucket.endswith(_DIRECTORY_BUCKETS):
        return []
    why = "is a directory bucket (S3 Express One Zone), whose listings have no order"
    return [problem(name, uri, why, allowed="general purpose buckets", fix="use another bucket, or a file system")]


def check_key(key: str) -> str:
    """Return the key itself; StorageError when some backend could not hold it, or when it would leave the root."""
    why = _unusable(key)
    if why:
        raise StorageError(problem("key", key, why, allowed="segments of printable UTF-8 joined by single '/'"))
    return key


def _unusable(key: str) -> str:
    try:
        raw = key.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode"
    segments = key.split("/")
    if len(raw) > MAX_KEY_BYTES:
        return f"is {len(raw)} bytes long, at most {MAX_KEY_BYTES} fit"
    if any(len(segment.encode()) > MAX_SEGMENT_BYTES for segment in segments):
        return f"has a segment longer than {MAX_SEGMENT_BYTES} bytes"
    if any(segment in ("", ".", "..") for segment in segments):
        return "has an empty, '.' or '..' segment"
    if segments[0] == PRIVATE:
        return f"begins with {PRIVATE}, which is reserved"
    if "\\" in key:
        return "holds a backslash, which some S3 servers take for '/'"
    if any(ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0 or character in "\ufffe\uffff" for character in key):
        return "holds a control character"
    return ""
