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


@pytest.mark.parametrize("target", dockerfile.PATHS)
def test_an_image_is_made_for_every_node_and_its_check_leaves_nothing(target: str) -> None:
    image: dict[str, Any] = {
        "output": ["type=image,oci-mediatypes=false,compression=gzip"],
        "tags": [f"lustrain/trainer:{target}-dev"],
    }
    wanted = {target: image, f"{target}-verify": {"output": ["type=cacheonly"]}}
    found = bake(*wanted)
    for name, one in found.items():
        assert set(one.pop("attest")) == {"type=provenance,disabled=true", "type=sbom,disabled=true"}
        assert dockerfile.parse((ROOT / one["dockerfile"]).read_text()).for_image(target)
        wanted[name] |= {"context": ".", "platforms": ["linux/amd64"]}
        wanted[name] |= {"dockerfile": dockerfile.PATHS[target], "target": name}
    # The Dockerfile's own defaults hold for all that is not here.
    assert found == wanted


def test_variables_reach_the_stages_that_declare_them(tmp_path: Path) -> None:
    names = ("TOOLS_IMAGE", "BASE_IMAGE", "TORCH_CPU_LINKS", "EFA_VERSION", "EFA_SHA256", "EFA_URL")
    for name in ("ca", "netrc"):
        (tmp_path / name).write_text("secret")
    site = {"CA": f"{tmp_path}/ca", "NETRC": f"{tmp_path}/netrc"}
    (cuda,) = bake("cuda", **site, **{name: f"my-{name}" for name in names}).values()
    assert cuda["args"] == {name: f"my-{name}" for name in names}
    assert cuda["secret"] == [f"id=ca,src={tmp_path}/ca", f"id=netrc,src={tmp_path}/netrc"]
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


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfiles_defaults_are_the_versions_of_the_one_place(dockerfile: Path) -> None:
    known = versions.load()
    written = {"BASE_IMAGE": known.base, "TOOLS_IMAGE": known.tools, "TORCH_CPU_LINKS": known.torch_cpu_links}
    written |= {"EFA_VERSION": known.efa.version, "EFA_SHA256": known.efa.sha256, "EFA_URL": known.efa.url}
    found = re.findall(r"^ARG (\w+)=(\S+)$", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
    for name, value in found:
        assert written.get(name, value) == value, name
        assert name in written or not re.search(r"\d\.\d|[0-9a-f]{12}", value), f"{name} is a version"
    if dockerfile.name == "trainer.Dockerfile":
        assert set(written) <= {name for name, _ in found}, "a build without this project finds every default"


def test_no_other_file_repeats_a_version() -> None:
    known = versions.load()
    flat = [*known.model_dump().values(), *known.efa.model_dump().values(), *known.gaudi.model_dump().values()]
    # Those that cannot be taken for something else.
    numbers = {one for one in flat if isinstance(one, str) and re.search(r"\..*\.|[0-9a-f]{64}|\d{8}", one)}
    written = re.compile(rf"(?<![\d.])(?:{'|'.join(map(re.escape, sorted(numbers)))})(?![\d.]*\d)")
    left_out = {"versions.toml", "__pycache__", "locks", "site"}
    files = [path for path in IMAGES.rglob("*") if path.is_file() and not left_out & set(path.parts)]
    assert len(files) > 10
    found = []
    for path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            if path.suffix == ".Dockerfile" and line.startswith("ARG "):
                continue
            code = path.suffix not in (".py", ".md")
            own = re.findall(r"python3\.\d+|py3\d+|sha256:[0-9a-f]{12,}", line) if code else []
            found += [f"{path.name}: {one}" for one in [*written.findall(line), *own]]
    assert found == []
