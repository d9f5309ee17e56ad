"""A plan: the same for the same code, named by what is in it, and refused with every mistake at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images.flags import BuildFlags
from images.model import Plan
from images.plan import plan, versions
from lustrain.image_file import GitState
from lustrain.problem import UserError

VERSIONS = versions.load()
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CLEAN = GitState(COMMIT, dirty=False)
DIRTY = GitState(COMMIT, dirty=True, changed=("trainer/loop.py",))
INPUTS = {"base": {"BASE_IMAGE": "x"}, "code": {"trainer/loop.py": "ab"}}
OTHER_INPUTS = INPUTS | {"code": {"trainer/loop.py": "cd"}}
REPOSITORY = "127.0.0.1:5000/team/trainer"
PINNED = "registry.example.com/base@sha256:" + "0" * 64
GAUDI = {"base": f"{VERSIONS.gaudi.image}@sha256:{'1' * 64}"}


def made(target: str = "cpu", git: GitState = CLEAN, inputs: Any = INPUTS, **more: Any) -> Plan:
    flags = BuildFlags(target, **({"repository": REPOSITORY} | more))
    plan.check(flags)
    return plan.make(flags, VERSIONS, git, inputs)


def tag(**more: Any) -> str:
    [found] = made(**more).tags
    head, _, found = found.rpartition(":")
    assert head == REPOSITORY
    assert re.fullmatch(r"\w[\w.-]{0,127}", found, re.ASCII)
    return found


def refusal(**more: Any) -> list[str]:
    """What each problem is about, flag and value."""
    with pytest.raises(UserError) as caught:
        made(**more)
    assert caught.value.exit_code == 2
    assert all("\n" not in line for line in caught.value.problems)
    return [line.partition(": ")[0] for line in caught.value.problems]


@pytest.mark.parametrize(
    ("target", "more", "expected"),
    [
        ("cpu", {}, f"cpu-torch{VERSIONS.torch}-py311-g0123456789ab"),
        ("cuda", {}, f"cuda-torch{VERSIONS.torch}-cu130-efa{VERSIONS.efa.version}-py311-g0123456789ab"),
        ("gaudi", GAUDI, f"gaudi-synapse{VERSIONS.gaudi.release}-torch{VERSIONS.gaudi.torch}-py312-g0123456789ab"),
    ],
)
def test_a_tag_says_what_is_in_the_image(target: str, more: dict[str, str], expected: str) -> None:
    assert tag(target=target, **more) == expected


def test_a_dirty_tree_is_said_and_named_by_what_is_in_it() -> None:
    first = tag(git=DIRTY)
    assert re.fullmatch(rf"{re.escape(tag())}-dirty-[0-9a-f]{{12}}", first)
    assert tag(git=DIRTY) == first
    assert tag(git=DIRTY, inputs=OTHER_INPUTS) != first
    assert made(git=DIRTY).labels["dev.lustrain.git.dirty"] == "true"


def test_code_of_no_repository_is_named_by_what_is_in_it() -> None:
    assert re.fullmatch(r"cpu-torch[\d.]+-py311-nogit-[0-9a-f]{12}", tag(git=GitState(None, dirty=False)))


@given(
    inputs=st.dictionaries(
        st.text(min_size=1), st.dictionaries(st.text(min_size=1), st.text(), max_size=4), max_size=4
    ),
    order=st.randoms(),
)
def test_the_order_of_inputs_changes_nothing(inputs: dict[str, dict[str, str]], order: Any) -> None:
    layers = list(inputs)
    order.shuffle(layers)
    again = {layer: dict(reversed(inputs[layer].items())) for layer in layers}
    assert made(git=DIRTY, inputs=again) == made(git=DIRTY, inputs=inputs)


def test_labels_say_where_an_image_comes_from() -> None:
    """All that does not follow the commit or the base is in tests/golden."""
    found = made("cuda").labels
    assert found["org.opencontainers.image.revision"] == COMMIT
    assert found["org.opencontainers.image.version"] == tag(target="cuda")
    assert found["dev.lustrain.git.dirty"] == "false"
    assert found["org.opencontainers.image.base.name"] == VERSIONS.base.partition("@")[0]
    assert list(found) == sorted(found)


def test_labels_claim_nothing_that_is_not_known() -> None:
    found = made(git=GitState(None, dirty=False), base="127.0.0.1:5000/base:bookworm").labels
    assert found["org.opencontainers.image.base.name"] == "127.0.0.1:5000/base:bookworm"
    for name in ("base.digest", "revision", "source"):
        assert f"org.opencontainers.image.{name}" not in found
    assert "dev.lustrain.git.dirty" not in found


def test_a_labels_sum_changes_with_its_layer_alone() -> None:
    before, after = made().labels, made(inputs=OTHER_INPUTS).labels
    assert {name for name in after if after[name] != before[name]} == {"dev.lustrain.inputs.code"}
    assert re.fullmatch("[0-9a-f]{12}", after["dev.lustrain.inputs.code"])


def test_arguments_come_from_versions_and_flags_take_their_place() -> None:
    known = made().arguments
    assert (known["BASE_IMAGE"], known["TOOLS_IMAGE"]) == (VERSIONS.base, VERSIONS.tools)
    given = {"BASE_IMAGE": PINNED, "TOOLS_IMAGE": "localhost:5000/tools:1", "TORCH_CPU_LINKS": ""}
    found = made(base=PINNED, tools="localhost:5000/tools:1", arg=("TORCH_CPU_LINKS=",)).arguments
    assert found == {**known, **given}


def test_an_image_without_efa_does_not_claim_one() -> None:
    without = made("cuda", arg=("EFA_VERSION=",))
    assert "efa" not in without.tags[0]
    assert not [name for name in without.labels if re.search("efa|libfabric|rdma|ofi", name)]
    other = made("cuda", arg=("EFA_VERSION=1.48.0",))
    assert "-efa1.48.0-" in other.tags[0]
    assert other.labels["dev.lustrain.versions.efa"] == "1.48.0"
    assert "dev.lustrain.versions.libfabric" not in other.labels


def test_gaudi_needs_the_digest_that_nobody_here_knows() -> None:
    assert not VERSIONS.gaudi.digest, "now that it is known, this test wants an image without one"
    assert refusal(target="gaudi") == ["images/versions.toml gaudi.digest = ''"]
    found = made("gaudi", **GAUDI)
    assert (found.arguments["BASE_IMAGE"], found.dockerfile) == (GAUDI["base"], "images/gaudi.Dockerfile")


@pytest.mark.parametrize(
    "base", [PINNED, "127.0.0.1:5000/base:bookworm", "127.9.9.9/base", "localhost/base:1", "localhost:5000/base"]
)
def test_a_base_by_digest_or_on_this_machine_is_taken(base: str) -> None:
    assert made(base=base, tools=base).arguments["BASE_IMAGE"] == base


@pytest.mark.parametrize(
    "base",
    ["debian:bookworm", "python", "registry.example.com/base:1", "10.0.0.1:5000/base:1", "localhost.evil/base:1"],
)
def test_base_that_may_change_tomorrow_is_refused_unless_allowed(base: str) -> None:
    assert refusal(base=base, tools=base) == [f"--base = '{base}'", f"--tools = '{base}'"]
    assert made(base=base, unpinned=True).arguments["BASE_IMAGE"] == base


CACHE = f"{REPOSITORY}:cache-main"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"target": "tpu"}, "target = 'tpu'"),
        ({"repository": "https://127.0.0.1:5000/team"}, "repository = 'https://127.0.0.1:5000/team'"),
        ({"repository": "127.0.0.1:5000/team/trainer:latest"}, "repository = '127.0.0.1:5000/team/trainer:latest'"),
        ({"repository": PINNED}, f"repository = '{PINNED}'"),
        ({"repository": ""}, "repository = ''"),
        ({"cache_to": "a b"}, "--cache-to = 'a b'"),
        ({"cache_to": REPOSITORY}, f"--cache-to = '{REPOSITORY}'"),
        ({"cache_from": (REPOSITORY, REPOSITORY)}, f"--cache-from = '{REPOSITORY}'"),
        ({"cache_to": PINNED}, f"--cache-to = '{PINNED}'"),
        ({"cache_to": f"{REPOSITORY}:x-g0123456789ab"}, f"--cache-to = '{REPOSITORY}:x-g0123456789ab'"),
        ({"arg": ("A",)}, "--arg = 'A'"),
        ({"arg": ("A-B=1",)}, "--arg = 'A-B'"),
        ({"arg": ("BASE_IMAGE=debian:latest",)}, "--arg = 'BASE_IMAGE'"),
        ({"ca": __file__.replace("test_plan", "shelf")}, f"--ca = '{__file__.replace('test_plan', 'shelf')}'"),
        *(({"suffix": bad}, f"--suffix = '{bad}'") for bad in ("-r2", "a b", "x" * 31, "r/2")),
    ],
)
def test_what_no_image_can_come_of_is_refused(flags: dict[str, Any], told: str) -> None:
    assert refusal(**flags) == [told]


@pytest.mark.parametrize(
    ("flags", "path", "why"),
    [
        ({"netrc": "/nowhere"}, "--netrc", "does not exist"),
        ({"netrc": "/"}, "--netrc", "is a folder"),
        ({"netrc": "/dev/null"}, "--netrc", "is not a file"),
    ],
)
def test_a_secrets_file_is_refused_with_the_reason(flags: dict[str, Any], path: str, why: str) -> None:
    with pytest.raises(UserError) as caught:
        made(**flags)
    assert [(one.path, one.why) for one in caught.value.problems] == [(path, why)]


def test_all_mistakes_are_told_at_once() -> None:
    flags = {"target": "tpu", "repository": "Bad Name", "base": "debian", "cache_to": "x", "ca": "/nowhere"}
    told = refusal(**flags, arg=("MY_TOKEN=x", "A", "B"), suffix="-")
    flags = ["target", "repository", "--base", "--cache-to", "--ca", "--arg MY_TOKEN", "--arg", "--arg", "--suffix"]
    assert [head.partition(" = ")[0] for head in told] == flags


def test_what_was_asked_for_is_in_the_plan_as_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    (tmp_path / "netrc").write_text("x")
    secrets = {"ca": tmp_path / "ca.pem", "netrc": tmp_path / "netrc"}
    found = made("cuda", attest=True, no_cache=True, cache_to=CACHE, cache_from=(CACHE, PINNED, CACHE))
    assert (found.target, found.attestations, found.no_cache) == ("cuda", True, True)
    assert (found.cache_to, found.cache_from) == (CACHE, (CACHE, PINNED))
    assert made(ca=str(secrets["ca"]), netrc=str(secrets["netrc"])).secrets == secrets
    for repository in ("lustrain/trainer", "123456789012.dkr.ecr.us-east-1.amazonaws.com/a/b", "[::1]:5000/x"):
        assert made(repository=repository).repository == repository


@pytest.mark.parametrize(
    ("name", "value"),
    [("PIP_PASSWORD", "hunter2"), ("GITHUB_TOKEN", "hunter2"), ("INDEX", "https://me:hunter2@pypi.example.com/")],
)
def test_a_secret_is_no_argument_and_is_not_repeated(name: str, value: str) -> None:
    with pytest.raises(UserError) as caught:
        made(arg=(f"{name}={value}",))
    [line] = caught.value.problems
    assert line.startswith(f"--arg {name} = ")
    assert "hunter2" not in line


def test_an_image_was_made_when_its_commit_was() -> None:
    plan = made(git=GitState(COMMIT, dirty=False, time=1_700_000_000))
    assert (plan.epoch, plan.build_arguments["SOURCE_DATE_EPOCH"]) == (1_700_000_000, "1700000000")


def test_same_commit_can_be_built_anew_under_a_tag_of_its_own() -> None:
    for suffix in ("r2", "x" * 30):
        assert made(suffix=suffix).tags[0] == f"{made().tags[0]}-{suffix}"


def test_another_base_or_argument_makes_another_image_and_tag() -> None:
    plain = made().tags[0]
    others = [made(base=f"debian@sha256:{'2' * 64}"), made(arg=("TORCH_CPU_LINKS=",))]
    assert all(other.tags[0].startswith(f"{plain}-o") for other in others)
    assert len({other.tags[0] for other in others}) == 2
