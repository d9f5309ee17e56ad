"""What a node would pull: by digest, each layer once, with the instruction that made it."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from images.check.diff import as_json, diff, lines
from images.model import Image, Layer
from tests.images.shelf import digest_of


def made(*names: str, **sizes: int) -> Image:
    """Of layers that are named by their content, and after a ~ by how they were compressed."""
    layers = [(name, digest_of(name.encode()), digest_of(name.split("~")[0].encode())) for name in names]
    told = tuple(Layer(digest, sizes.get(name, 1000), own, f"COPY {name} # buildkit") for name, digest, own in layers)
    return Image("r/x:1", digest_of(repr(names).encode()), "linux/amd64", told, {})


def test_the_same_image_is_nothing_to_pull() -> None:
    found = diff(made("base", "code"), made("base", "code"))
    assert found.same
    assert lines(found) == [f"nothing to pull: both are {found.b.digest}"]
    assert as_json(found)["pull_bytes"] == 0


def test_another_configuration_alone_pulls_no_layer() -> None:
    found = diff(made("base", "code"), made("code", "base"))
    assert (found.same, found.bytes) == (False, 0)
    assert "nothing to pull but the configuration" in lines(found)[0]


def test_code_change_pulls_its_layer_and_names_the_instruction() -> None:
    found = diff(made("base", "torch", "code1"), made("base", "torch", "code2", torch=998_000, code2=1000))
    assert [one.created_by for one in found.pulled] == ["COPY code2 # buildkit"]
    told = lines(found)
    assert told[0].endswith("COPY code2")
    assert told[1] == "1 of 3 layers to pull, 1 kB of 1 MB (0.1 %)"


def test_the_same_files_compressed_anew_are_pulled_and_named() -> None:
    found = diff(made("base"), made("base~again"))
    assert found.bytes == 1000
    assert lines(found)[0].endswith("(same files, compressed again)")
    assert [one["recompressed"] for one in as_json(found)["pull"]] == [True]


def test_instructions_of_strangers_stay_on_their_line() -> None:
    layer = Layer(digest_of(b"l"), 5, digest_of(b"t"), "RUN a\n\x1b[2Jb " + "x" * 500)
    (line, _) = lines(diff(made(), Image("r/x:1", digest_of(b""), "linux/amd64", (layer,), {})))
    assert line.isprintable()
    assert len(line) == 96, "digest, size and 72 characters of the step"


@given(st.lists(st.sampled_from("abcdef"), max_size=8), st.lists(st.sampled_from("abcdef"), max_size=8))
def test_what_is_pulled_and_kept_is_whole_image_each_layer_once(one: list[str], other: list[str]) -> None:
    a, b = made(*one), made(*other)
    found = diff(a, b)
    pulled, kept = [x.digest for x in found.pulled], [x.digest for x in found.kept]
    assert sorted(pulled + kept) == sorted({x.digest for x in b.layers})
    assert set(kept) == {x.digest for x in a.layers} & {x.digest for x in b.layers}
    assert found.bytes == 1000 * len(pulled)
    assert json.loads(json.dumps(as_json(found)))["pull_bytes"] == found.bytes
