"""References are read as docker reads them, and what is none is said in one line."""

from __future__ import annotations

import docker.auth
import pytest
from hypothesis import given
from hypothesis import strategies as st

from images.plan.references import Reference, is_digest, is_loopback, parse
from lustrain.problem import UserError

DIGEST = "sha256:" + "a" * 64
ECR = "123456789012.dkr.ecr.us-east-1.amazonaws.com"

_WORD = st.from_regex(r"[a-z0-9]{1,6}([._-][a-z0-9]{1,4})?", fullmatch=True)
_REPOSITORIES = st.lists(_WORD, min_size=2, max_size=4).map("/".join)
_REGISTRIES = st.sampled_from(["127.0.0.1:5000", "localhost", "localhost:5000", ECR, "ghcr.io", "[::1]:5000", "Upper"])
_TAGS = st.none() | st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)


@given(_REGISTRIES, _REPOSITORIES, _TAGS, st.sampled_from([None, DIGEST, "sha512:" + "b" * 128]))
def test_what_is_written_out_is_read_back_the_same(
    registry: str, path: str, tag: str | None, digest: str | None
) -> None:
    reference = Reference(registry, path, tag, digest)
    assert parse(str(reference)) == reference


@given(st.text(max_size=60) | st.from_regex(r"[a-zA-Z0-9./:@_-]{1,60}", fullmatch=True))
def test_any_text_is_a_reference_or_one_line(text: str) -> None:
    try:
        found = parse(text)
    except UserError as error:
        told = error
    else:
        assert parse(str(found)) == found
        return
    (line,) = told.problems
    assert ("\n" in line, told.exit_code) == (False, 2)


@pytest.mark.slow
@given(_REGISTRIES.filter(lambda one: one != "Upper"), _REPOSITORIES)
def test_the_registry_is_the_one_that_docker_s_own_library_finds(registry: str, path: str) -> None:
    assert docker.auth.resolve_repository_name(f"{registry}/{path}") == (registry, path)
    assert parse(f"{registry}/{path}").registry == registry


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("debian", Reference("docker.io", "library/debian")),
        ("debian:12", Reference("docker.io", "library/debian", "12")),
        ("team/tool", Reference("docker.io", "team/tool")),
        ("index.docker.io/debian", Reference("docker.io", "library/debian")),
        ("localhost/a:1", Reference("localhost", "a", "1")),
        ("host:65535/a", Reference("host:65535", "a")),
        (f"{ECR}/team/trainer:1@{DIGEST}", Reference(ECR, "team/trainer", "1", DIGEST)),
        (f"ghcr.io/{'a' * 255}:{'t' * 128}", Reference("ghcr.io", "a" * 255, "t" * 128)),
    ],
)
def test_short_names_mean_what_docker_means(text: str, expected: Reference) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "https://ghcr.io/a", "ghcr.io/Team/a", "ghcr.io/a:", f"ghcr.io/a:{'t' * 129}", "ghcr.io/a@sha256:12"),
        *(
            "ghcr.io/a@",
            "a" * 64,
            f"ghcr.io/{'a' * 256}",
            "host:99999/a",
            "host:65536/a",
            "host:0/a",
            "-x.io/a",
            "ghcr.io/a\n",
            "ghcr.io//a",
        ),
    ],
)
def test_what_is_no_reference_is_told_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"^--image = "):
        parse(text, "--image")


def test_only_this_machine_is_loopback() -> None:
    for host in ("localhost", "localhost:5000", "127.0.0.1", "127.200.3.4:443"):
        assert is_loopback(host), host
    elsewhere = "10.0.0.1 127.evil.com 127.0.0.1.evil.com localhost.evil.com:80 0.0.0.0 ghcr.io 128.0.0.1"
    assert not [host for host in elsewhere.split() if is_loopback(host)]


def test_a_digest_is_of_an_algorithm_that_can_be_checked() -> None:
    assert is_digest(DIGEST)
    assert not any(is_digest(one) for one in ("md5:" + "a" * 32, "sha256:" + "A" * 64, "sha256:abc", f"{DIGEST}\n"))


def test_the_target_is_the_digest_then_the_tag_then_latest() -> None:
    assert [parse(f"h.io/a{end}").wanted for end in ("", ":1", f":1@{DIGEST}")] == ["latest", "1", DIGEST]
    assert str(parse("h.io/a:1").at(DIGEST)) == f"h.io/a@{DIGEST}"
