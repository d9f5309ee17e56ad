"""A plan: the same for the same code, named by what is in it, and refused with every mistake at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images.model import Plan
from images.plan import plan, versions
from images.wish import BuildWish
from lustrain.image_file import GitState
from lustrain.problem import UserError

VERSIONS = versions.load()
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CLEAN = GitState(COMMIT, dirty=False)
DIRTY = GitState(COMMIT, dirty=True, changed=("trainer/loop.py",))
INPUTS = {"base": {"BASE_IMAGE": "x"}, "code": {"trainer/loop.py": "ab"}}
REPOSITORY = "127.0.0.1:5000/team/trainer"
PINNED = "registry.example.com/base@sha256:" + "0" * 64
GAUDI = {"base": f"{VERSIONS.gaudi.image}@sha256:{'1' * 64}"}


def made(target: str = "cpu", git: GitState = CLEAN, inputs: Any = INPUTS, **more: Any) -> Plan:
    wish = BuildWish(target, **({"repository": REPOSITORY} | more))
    plan.check(wish)
    return plan.make(wish, VERSIONS, git, inputs)


def tag(**more: Any) -> str:
    [found] = made(**more).tags
    head, _, found = found.rpartition(":")
    assert head == REPOSITORY
    assert re.fullmatch(r"\w[\w.-]{0,127}", found, re.ASCII)
    return found


def refusal(**more: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        made(**more)
    assert caught.value.exit_code == 2
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


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
    assert tag(git=DIRTY, inputs=INPUTS | {"code": {"trainer/loop.py": "cd"}}) != first


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


def test_labels_say_where_an_image_comes_from_and_nothing_of_when() -> None:
    found = made("cuda").labels
    standard = "org.opencontainers.image"
    assert found[f"{standard}.revision"] == COMMIT
    assert found[f"{standard}.licenses"] == "Apache-2.0"
    assert found[f"{standard}.title"] == "lustrain-trainer-cuda"
    assert found[f"{standard}.version"] == tag(target="cuda")
    assert f"{found[f'{standard}.base.name']}@{found[f'{standard}.base.digest']}" == VERSIONS.base
    assert found["dev.lustrain.target"] == "cuda"
    assert found["dev.lustrain.git.dirty"] == "false"
    assert found["dev.lustrain.versions.efa"] == VERSIONS.efa.version
    assert re.fullmatch("[0-9a-f]{12}", found["dev.lustrain.inputs.code"])
    assert f"{standard}.created" not in found
    assert list(found) == sorted(found)
    assert made(git=DIRTY).labels["dev.lustrain.git.dirty"] == "true"


def test_labels_claim_nothing_that_is_not_known() -> None:
    found = made(git=GitState(None, dirty=False), base="127.0.0.1:5000/base:bookworm").labels
    assert found["org.opencontainers.image.base.name"] == "127.0.0.1:5000/base:bookworm"
    for name in ("base.digest", "revision", "source"):
        assert f"org.opencontainers.image.{name}" not in found
    assert "dev.lustrain.git.dirty" not in found


def test_a_labels_sum_changes_with_its_layer_alone() -> None:
    before, after = made().labels, made(inputs=INPUTS | {"code": {"trainer/loop.py": "cd"}}).labels
    assert {name for name in after if after[name] != before[name]} == {"dev.lustrain.inputs.code"}


def test_arguments_come_from_versions_and_flags_take_their_place() -> None:
    assert made().arguments == {
        "BASE_IMAGE": VERSIONS.base,
        "TOOLS_IMAGE": VERSIONS.tools,
        "TORCH_CPU_LINKS": VERSIONS.torch_cpu_links,
        "BUDGET_MB": str(VERSIONS.budget_mb.cpu),
    }
    cuda = made("cuda").arguments
    assert (cuda["EFA_VERSION"], cuda["EFA_SHA256"], cuda["EFA_URL"]) == (
        VERSIONS.efa.version,
        VERSIONS.efa.sha256,
        VERSIONS.efa.url,
    )
    found = made(base=PINNED, tools="localhost:5000/tools:1", arg=("TORCH_CPU_LINKS=",)).arguments
    assert (found["BASE_IMAGE"], found["TOOLS_IMAGE"], found["TORCH_CPU_LINKS"]) == (
        PINNED,
        "localhost:5000/tools:1",
        "",
    )


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
    [line] = refusal(target="gaudi")
    assert "versions.toml gaudi.digest" in line
    assert f"--base {VERSIONS.gaudi.image}@sha256:" in line
    assert made("gaudi", **GAUDI).arguments["BASE_IMAGE"] == GAUDI["base"]


@pytest.mark.parametrize(
    "base", [PINNED, "127.0.0.1:5000/base:bookworm", "127.9.9.9/base", "localhost/base:1", "localhost:5000/base"]
)
def test_a_base_by_digest_or_on_this_machine_is_taken(base: str) -> None:
    assert made(base=base, tools=base).arguments["BASE_IMAGE"] == base


@pytest.mark.parametrize(
    "base",
    ["debian:bookworm", "python", "registry.example.com/base:1", "10.0.0.1:5000/base:1", "localhost.evil/base:1"],
)
def test_a_base_that_may_be_another_one_tomorrow_is_refused_unless_allowed(base: str) -> None:
    lines = refusal(base=base, tools=base)
    assert [line.partition(" ")[0] for line in lines] == ["--base", "--tools"]
    assert all("tomorrow" in line and "@sha256:" in line and "--unpinned" in line for line in lines)
    assert made(base=base, unpinned=True).arguments["BASE_IMAGE"] == base


def test_arm64_is_refused_until_there_are_locks_for_it() -> None:
    for target in ("cpu", "cuda"):
        [line] = refusal(target=target, platform="linux/arm64")
        assert f"locks/torch-{target}.lock is made for x86_64; allowed: linux/amd64" in line
    [line] = refusal(target="gaudi", platform="linux/arm64", **GAUDI)
    assert "allowed: linux/amd64 for gaudi" in line
    assert "platform = 'windows/amd64'" in refusal(platform="windows/amd64")[0]


def test_the_lock_that_keeps_arm64_out_has_one_wheel_of_torch() -> None:
    lock = (Path(plan.__file__).parents[1] / "locks/torch-cpu.lock").read_text()
    hashes = re.search(r"^torch==\S+ \\\n((?:    --hash=.*\n)+)", lock, re.MULTILINE)
    assert hashes
    assert hashes[1].count("--hash") == 1, (
        "there are wheels for more than x86_64 now: allow the platform in images/plan/plan.py"
    )


@pytest.mark.parametrize(
    ("repository", "told"),
    [
        ("https://127.0.0.1:5000/team", "an address"),
        ("127.0.0.1:5000/Team/trainer", "not a repository's name"),
        ("127.0.0.1:5000/team/trainer:latest", "tags are made from versions and commit"),
        (PINNED, "tags are made from versions and commit"),
        ("", "repository = ''"),
        ("team/trainer; rm -rf /", "not a repository's name"),
        ("team//trainer", "not a repository's name"),
        (f"127.0.0.1/{'a' * 300}", "characters"),
        ("127.0.0.1:5000/team\n", "not"),
    ],
)
def test_a_repository_is_a_name_without_a_tag(repository: str, told: str) -> None:
    [line] = refusal(repository=repository)
    assert told in line


@pytest.mark.parametrize(
    "repository", ["lustrain/trainer", "123456789012.dkr.ecr.us-east-1.amazonaws.com/a/b", "[::1]:5000/x"]
)
def test_names_of_repositories_are_kept_as_they_were_given(repository: str) -> None:
    assert made(repository=repository).repository == repository


def test_caches_are_tags_of_their_own() -> None:
    cache = f"{REPOSITORY}:cache-main"
    found = made(cache_to=cache, cache_from=(cache, PINNED, cache))
    assert (found.cache_to, found.cache_from) == (cache, (cache, PINNED))
    assert "no reference" in refusal(cache_to="a b")[0] or "not a repository's name" in refusal(cache_to="a b")[0]
    assert "has no tag" in refusal(cache_to=REPOSITORY)[0]
    assert "has no tag" in refusal(cache_from=(REPOSITORY,))[0]
    assert "nothing can be written to" in refusal(cache_to=PINNED)[0]
    assert "looks like the tag of an image" in refusal(cache_to=made().tags[0])[0]


def test_secrets_are_files_that_a_stage_asks_for(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    (tmp_path / "netrc").write_text("x")
    given = {"ca": tmp_path / "ca.pem", "netrc": tmp_path / "netrc"}
    assert made(ca=str(given["ca"]), netrc=str(given["netrc"])).secrets == given
    lines = refusal(ca=str(tmp_path / "missing"), netrc=str(tmp_path))
    assert [line.partition(": ")[2].partition(";")[0] for line in lines] == ["does not exist", "is a folder"]
    [line] = refusal(ca=str(tmp_path / "netrc"))
    assert line.endswith("holds no certificate; allowed: a PEM file of certificates")


@pytest.mark.parametrize(
    ("name", "value"),
    [("PIP_PASSWORD", "hunter2"), ("GITHUB_TOKEN", "hunter2"), ("INDEX", "https://me:hunter2@pypi.example.com/")],
)
def test_a_secret_is_no_argument_and_is_not_repeated(name: str, value: str) -> None:
    [line] = refusal(arg=(f"{name}={value}",))
    assert line.startswith(f"--arg {name} = ")
    assert "hunter2" not in line


def test_arguments_have_names_and_do_not_pass_by_a_check() -> None:
    assert "is not the name of an argument" in refusal(arg=("A-B=1",))[0]
    assert "fix: --base debian:latest" in refusal(arg=("BASE_IMAGE=debian:latest",))[0]
    assert [line.partition(":")[0] for line in refusal(arg=("A", "B"))] == ["--arg = 'A'", "--arg = 'B'"]


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    lines = refusal(
        target="tpu",
        repository="Bad Name",
        base="debian",
        cache_to="x",
        ca=str(tmp_path / "missing"),
        arg=("MY_TOKEN=x",),
    )
    assert [line.partition(" = ")[0] for line in lines] == [
        "target",
        "repository",
        "--base",
        "--cache-to",
        "--ca",
        "--arg MY_TOKEN",
    ]


def test_what_was_asked_for_is_in_the_plan() -> None:
    found = made("cuda", attest=True, no_cache=True)
    assert (found.target, found.platform, found.dockerfile) == ("cuda", "linux/amd64", "images/trainer.Dockerfile")
    assert (found.attestations, found.no_cache) == (True, True)
    assert made("gaudi", **GAUDI).dockerfile == "images/gaudi.Dockerfile"


def test_an_image_was_made_when_its_commit_was() -> None:
    plan = made(git=GitState(COMMIT, dirty=False, time=1_700_000_000))
    assert (plan.epoch, plan.build_arguments["SOURCE_DATE_EPOCH"]) == (1_700_000_000, "1700000000")


def test_the_same_commit_can_be_built_anew_under_a_tag_of_its_own() -> None:
    assert made(suffix="r2").tags[0] == f"{made().tags[0]}-r2"
    for bad in ("-r2", "a b", "x" * 31, "r/2"):
        with pytest.raises(UserError, match="cannot end a tag"):
            made(suffix=bad)


def test_another_base_or_argument_is_another_image_of_the_commit_and_has_another_tag() -> None:
    plain = made().tags[0]
    others = [made(base=f"debian@sha256:{'2' * 64}"), made(arg=("TORCH_CPU_LINKS=",))]
    assert all(other.tags[0].startswith(f"{plain}-o") for other in others)
    assert len({other.tags[0] for other in others}) == 2
