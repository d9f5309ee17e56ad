"""The bake file serves a person with buildx alone, and no file but versions.toml decides a version."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from images.plan import dockerfile, versions
from tests.conftest import require

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"
BAKE = "images/docker-bake.hcl"
DOCKER = shutil.which("docker", path=f"/usr/bin:{os.environ.get('PATH', '')}")
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))


def bake(*arguments: str, **variables: str) -> dict[str, Any]:
    """What buildx makes of the bake file: its targets. Needs the plugin, not an engine."""
    require(
        DOCKER and subprocess.run([DOCKER, "buildx", "version"], capture_output=True).returncode == 0, "docker buildx"
    )
    command = [str(DOCKER), "buildx", "bake", "-f", BAKE, *arguments, "--print"]
    ours = re.findall(r'^variable "(\w+)"', (ROOT / BAKE).read_text(), re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if name not in ours} | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout)["target"])


def test_without_a_target_the_smallest_image_is_built() -> None:
    assert list(bake()) == ["cpu"]


@pytest.mark.parametrize("target", dockerfile.PATHS)
def test_an_image_is_made_for_every_node_and_its_check_leaves_nothing(target: str) -> None:
    found = bake(target, f"{target}-verify")
    image, check = found[target], found[f"{target}-verify"]
    assert (image["target"], check["target"]) == (target, f"{target}-verify")
    assert (ROOT / image["context"]) == ROOT
    assert image["dockerfile"] == check["dockerfile"]
    assert image["output"] == ["type=image,oci-mediatypes=false,compression=gzip"]
    assert check["output"] == ["type=cacheonly"]
    assert image["tags"] == [f"lustrain/trainer:{target}-dev"]
    assert not {"tags", "cache-to"} & set(check)
    for one in (image, check):
        assert set(one["attest"]) == {"type=provenance,disabled=true", "type=sbom,disabled=true"}
        assert not {"args", "secret", "cache-from"} & set(one), "the Dockerfile's own defaults hold"


@pytest.mark.parametrize("target", dockerfile.PATHS)
def test_every_stage_that_is_named_exists(target: str) -> None:
    for one in bake(target, f"{target}-verify").values():
        stages = re.findall(r"^FROM \S.* AS (\S+)$", (ROOT / one["dockerfile"]).read_text(), re.MULTILINE)
        assert one["target"] in stages


def test_variables_reach_the_stages_that_declare_them(tmp_path: Path) -> None:
    names = ("TOOLS_IMAGE", "BASE_IMAGE", "TORCH_CPU_LINKS", "EFA_VERSION", "EFA_SHA256", "EFA_URL")
    (cuda,) = bake("cuda", **{name: f"my-{name}" for name in names}).values()
    assert cuda["args"] == {name: f"my-{name}" for name in names}
    declared = re.findall(r"^ARG (\w+)", (ROOT / cuda["dockerfile"]).read_text(), re.MULTILINE)
    assert set(names) <= set(declared), "an argument that no stage declares would be ignored silently"


def test_efa_can_be_left_out_and_a_check_told_its_budget() -> None:
    found = bake("cuda", "cuda-verify", EFA_VERSION="none", BUDGET_MB="1")
    assert found["cuda"]["args"] == {"EFA_VERSION": ""}
    assert found["cuda-verify"]["args"] == {"EFA_VERSION": "", "BUDGET_MB": "1"}


@pytest.mark.slow
def test_gaudi_never_gets_the_base_of_the_others() -> None:
    (plain,) = bake("gaudi", BASE_IMAGE="debian").values()
    assert "args" not in plain
    (given,) = bake("gaudi", GAUDI_IMAGE="vault@sha256:1").values()
    assert given["args"] == {"BASE_IMAGE": "vault@sha256:1"}


def test_what_a_site_brings_goes_in_as_secrets_and_never_as_arguments(tmp_path: Path) -> None:
    for name in ("ca", "netrc"):
        (tmp_path / name).write_text("secret")
    (cpu,) = bake("cpu", CA=f"{tmp_path}/ca", NETRC=f"{tmp_path}/netrc").values()
    assert cpu["secret"] == [f"id=ca,src={tmp_path}/ca", f"id=netrc,src={tmp_path}/netrc"]
    assert "args" not in cpu


def test_a_cache_is_left_where_ecr_takes_it_and_a_check_only_reads_it() -> None:
    found = bake("cpu", "cpu-verify", CACHE_FROM="r/x:cache", CACHE_TO="r/x:cache")
    assert found["cpu"]["cache-to"] == [
        "type=registry,ref=r/x:cache,mode=max,image-manifest=true,oci-mediatypes=true,ignore-error=true"
    ]
    assert "cache-to" not in found["cpu-verify"]
    assert found["cpu-verify"]["cache-from"] == ["type=registry,ref=r/x:cache"]


def test_a_push_keeps_the_form_that_nodes_can_read() -> None:
    found = bake("--push", "cuda", "cuda-verify", REPOSITORY="r.example.com/x", TAG="try", PLATFORM="linux/arm64")
    assert found["cuda"]["output"][0].startswith("type=image,oci-mediatypes=false,compression=gzip,push=true")
    assert found["cuda"]["tags"] == ["r.example.com/x:cuda-try"]
    assert found["cuda"]["platforms"] == ["linux/arm64"]
    assert found["cuda-verify"]["output"] == ["type=cacheonly"]


def defaults(dockerfile: Path) -> list[tuple[str, str]]:
    return re.findall(r"^ARG (\w+)=(\S+)$", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)


def written() -> dict[str, str]:
    """Argument → the value that versions.toml gives it."""
    known = versions.load()
    return {
        "BASE_IMAGE": known.base,
        "TOOLS_IMAGE": known.tools,
        "TORCH_CPU_LINKS": known.torch_cpu_links,
        "EFA_VERSION": known.efa.version,
        "EFA_SHA256": known.efa.sha256,
        "EFA_URL": known.efa.url,
    }


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfiles_defaults_are_the_versions_of_the_one_place(dockerfile: Path) -> None:
    known = written()
    for name, value in defaults(dockerfile):
        assert known.get(name, value) == value, f"{dockerfile.name}: ARG {name}"
        assert name in known or not re.search(r"\d\.\d|[0-9a-f]{12}", value), (
            f"{dockerfile.name}: ARG {name} is a version"
        )


def test_a_build_without_this_project_finds_every_default() -> None:
    """All that versions.toml gives an argument for has it as its default too, somewhere in the trainer's Dockerfile."""
    assert set(written()) <= {name for name, _ in defaults(IMAGES / "trainer.Dockerfile")}


def numbers() -> set[str]:
    """Every version and digest of versions.toml that cannot be taken for something else."""
    known = versions.load()
    flat = [*known.model_dump().values(), *known.efa.model_dump().values(), *known.gaudi.model_dump().values()]
    texts = [text for text in flat if isinstance(text, str)]
    return {text for text in texts if text.count(".") >= 2 or re.search(r"[0-9a-f]{64}|\d{8}", text)}


def elsewhere() -> list[Path]:
    left_out = {"versions.toml", "__pycache__", "locks", "site"}
    return sorted(path for path in IMAGES.rglob("*") if path.is_file() and not left_out & set(path.parts))


def test_no_other_file_repeats_a_version() -> None:
    assert len(elsewhere()) > 10
    found, known = [], re.compile(rf"(?<![\d.])(?:{'|'.join(map(re.escape, sorted(numbers())))})(?![\d.]*\d)")
    for path in elsewhere():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if path.suffix == ".Dockerfile" and line.startswith("ARG "):
                continue
            repeated = known.findall(line)
            if path.suffix not in (".py", ".md"):
                repeated += re.findall(r"python3\.\d+|py3\d+|sha256:[0-9a-f]{12,}", line)
            found += [f"{path.relative_to(ROOT)}:{number}: {one}" for one in repeated]
    assert found == []
