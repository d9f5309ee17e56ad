"""Tags of what a build pushed; a tag never moves to a different image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from images.build import engine
from images.model import Watch
from images.plan.references import parse
from images.registry import merge, push
from images.registry.client import connect


def loaded(tags: Sequence[str], environment: Mapping[str, str] | None, watch: Watch) -> str:
    """Push what the engine has under each of `tags`; the digest that the registry holds then."""
    _, client = engine.connect(environment)
    try:
        digests = [push.push(tag, client, watch) for tag in tags]
    finally:
        client.close()
    return digests[0]


def there(tag: str) -> str | None:
    """The digest that a tag stands for in its registry; None where it is free."""
    reference = parse(tag)
    return connect(reference).digest_of(reference)


def tagged(tags: Sequence[str], digest: str) -> str:
    """Name what was pushed by digest; answers what the first name stands for. UserError, exit code 2, where one is taken."""
    named = [merge.name(tag, digest) for tag in tags]
    return named[0]
