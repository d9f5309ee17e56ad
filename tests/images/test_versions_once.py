"""versions.toml is the only file that decides a version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from images.plan import versions

IMAGES = Path(__file__).parents[2] / "images"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_defaults_are_the_versions_of_the_one_place(dockerfile: Path) -> None:
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
