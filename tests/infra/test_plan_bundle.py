"""The lifecycle bundle has one name for one content, tells nodes of their cluster, and holds nothing that fails on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.components.bundle import written
from infra.plan.nodes.bundle import (
    AGENT,
    DOCUMENT,
    EXPORTERS,
    FOLDER,
    HOME_MOUNT,
    LOGS,
    LOGS_CONFIGURATION,
    MAX_BYTES,
    ON_CONFIGURED,
    ON_CREATE,
    ON_INIT,
    PACKAGES,
    SLURM,
    Bundle,
    bundle,
    gathered,
)
from infra.plan.nodes.document import node_document
from lustrain.problem import UserError
from tests.infra.edits import STACKS, spec_of
from tests.infra.mistakes import PROXY

SCRIPT = b"#!/bin/bash\necho here\n"
FILES = st.dictionaries(
    st.sampled_from(["a", "b", "ab", "d/a", "d/b"]), st.text("abd/\n\0", max_size=4).map(str.encode), min_size=1
)


def filled(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def of(folder: Path, files: dict[str, bytes]) -> Bundle:
    return gathered(filled(folder, files), entries=())


@pytest.mark.parametrize("stack", STACKS)
def test_our_own_bundle_holds_both_entries_agent_and_its_data(stack: str) -> None:
    spec = spec_of(stack, {})
    ours = bundle(spec)
    files = {file.path: file for file in ours.files}
    generated = {AGENT, DOCUMENT, *([SLURM] if spec.scheduler else [])}
    generated |= {HOME_MOUNT} if stack == "hyperpod-slurm-p5" else set()
    generated |= {LOGS.name, LOGS_CONFIGURATION, PACKAGES.name} if spec.backend != "hyperpod-eks" else set()
    generated |= {EXPORTERS.name} if spec.monitor else set()
    assert {ON_INIT, ON_CREATE, "node.sh", "container_data.sh", "fill_homes.sh", *generated} == set(files)
    assert ours.prefix == f"lifecycle/{ours.sha}"
    assert {name for name, file in files.items() if file.source is None} == generated
    assert all(file.source.is_relative_to(FOLDER) for file in ours.files if file.source)
    assert json.loads(files[DOCUMENT].content) == node_document(spec)
    assert len(files[AGENT].content) < 200_000


def test_the_packed_agent_of_the_bundle_runs_alone(tmp_path: Path) -> None:
    agent = next(file for file in bundle(spec_of("rehearsal", {})).files if file.path == AGENT)
    path = written(agent, tmp_path)
    command = [sys.executable, "-I", str(path), "version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, agent.sha256 in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize("stack", ["ec2-spot-g6e", "hyperpod-eks-g6e-spot", "hyperpod-slurm-p5"])
def test_proxy_is_on_nodes_and_metadata_s3_and_vpc_stay_direct(stack: str) -> None:
    spec = spec_of(stack, {"network.proxy": PROXY})
    found = {
        file.path: file.content.decode() for file in bundle(spec, region="us-west-2").files if "root/" in file.path
    }
    variables = dict(line.split("=", 1) for line in found["root/etc/lustrain/proxy.env"].splitlines())
    assert variables["HTTPS_PROXY"] == variables["http_proxy"] == PROXY["http"]
    direct = variables["no_proxy"].split(",")
    needed = {"169.254.169.254", spec.network.cidr, ".s3.us-west-2.amazonaws.com", ".example.com"}
    assert needed <= set(direct)
    assert (".us-west-2.eks.amazonaws.com" in direct) == (spec.backend == "hyperpod-eks")
    units = {path.split("/")[4] for path in found if "/systemd/" in path}
    assert {"docker.service.d", "containerd.service.d"} <= units
    assert ("amazon-ssm-agent.service.d" in units) == (spec.backend == "ec2")


def test_users_script_is_in_bundle_once_and_its_content_counts(tmp_path: Path) -> None:
    own = tmp_path / "ours.sh"
    own.write_bytes(SCRIPT)
    spec = spec_of("rehearsal", {"boot.on_configured": str(own)})
    before = bundle(spec)
    assert {file.path: file.content for file in before.files}[ON_CONFIGURED] == SCRIPT
    own.write_bytes(SCRIPT + b"# edited\n")
    assert bundle(spec).sha != before.sha
    own.write_bytes(b"echo no first line\r\n")
    with pytest.raises(UserError, match=r"boot\.on_configured = .*Windows line ends"):
        bundle(spec)


@pytest.mark.parametrize(
    ("edit", "same"),
    [
        ({}, True),
        ({"groups.0.count": 9}, True),
        ({"budget.monthly_usd": 5}, True),
        ({"tuning.settings": {"sysctl.vm.max_map_count": "1048576"}}, False),
        ({"tuning.profiles": {"train": "cpu"}}, False),
        ({"groups.0.instance_type": "g6e.24xlarge"}, False),
        ({"storage.lustre.mount_path": "/lustre"}, False),
    ],
)
def test_bundle_differs_exactly_where_nodes_boot_otherwise(edit: dict[str, Any], same: bool) -> None:
    before, after = bundle(spec_of("ec2-spot-g6e", {})), bundle(spec_of("ec2-spot-g6e", edit))
    assert (before.sha == after.sha) is same
    assert [one.path for one in before.files] == [one.path for one in after.files]


def test_a_file_that_would_hide_the_generated_one_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lifecycle/tuning\.json = '': is generated for each cluster"):
        gathered(filled(tmp_path, {DOCUMENT: b"{}"}), entries=(), generated={DOCUMENT: b"{}"})


def test_a_generated_file_is_written_once_and_whole(tmp_path: Path) -> None:
    file = gathered(tmp_path, entries=(), generated={"deep/a": b"x"}).files[0]
    path = written(file, tmp_path / "build")
    os.utime(path, (0, 0))
    assert written(file, tmp_path / "build") == path
    assert (path.read_bytes(), path.stat().st_mtime) == (b"x", 0)
    assert [one for one in (tmp_path / "build").rglob("*") if one.is_file()] == [path]


def test_a_build_folder_that_takes_no_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "build").touch()
    file = gathered(tmp_path, entries=(), generated={"a": b"x"}).files[-1]
    with pytest.raises(UserError, match="cannot be written"):
        written(file, tmp_path / "build")


@given(FILES, FILES)
def test_names_are_equal_exactly_when_paths_and_contents_are(
    tmp_path_factory: pytest.TempPathFactory, left: dict[str, bytes], right: dict[str, bytes]
) -> None:
    folder = tmp_path_factory.mktemp("bundles")
    shas = [of(folder / side, files).sha for side, files in (("left", left), ("right", right))]
    assert (shas[0] == shas[1]) == (left == right)


def test_hidden_files_and_caches_do_not_change_the_name(tmp_path: Path) -> None:
    plain = of(tmp_path, {"a.sh": SCRIPT})
    assert of(tmp_path, {".a.sh.swp": b"x", "__pycache__/a.pyc": b"x"}) == plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.sh": b"#!/bin/bash\r\necho here\r\n"}, "lifecycle/a.sh = 'CRLF': "),
        ({"facts.json": b"{}\r\n"}, "lifecycle/facts.json = 'CRLF': "),
        ({"a.sh": b"\xef\xbb\xbf#!/bin/bash\n"}, "lifecycle/a.sh = 'BOM': "),
        ({"a.sh": b"echo here\n"}, "lifecycle/a.sh = 'echo here': "),
        ({"a.sh": b""}, "lifecycle/a.sh = '': "),
        ({"big.pyz": bytes(MAX_BYTES + 1)}, f"lifecycle/ = {MAX_BYTES + 1}: "),
    ],
)
def test_what_would_fail_on_a_node_is_told_before(tmp_path: Path, files: dict[str, bytes], said: str) -> None:
    with pytest.raises(UserError) as told:
        of(tmp_path, files)
    assert [line[: len(said)] for line in told.value.problems] == [said]


def test_all_problems_come_at_once_and_missing_entries_by_name(tmp_path: Path) -> None:
    filled(tmp_path, {ON_INIT: b"echo\r\n"})
    with pytest.raises(UserError) as told:
        gathered(tmp_path)
    names = [line.split(" = ")[0] for line in told.value.problems]
    assert names == [f"lifecycle/{name}" for name in (ON_CREATE, ON_INIT, ON_INIT)]


def test_a_packed_agent_may_hold_any_bytes(tmp_path: Path) -> None:
    assert of(tmp_path, {"node_setup.pyz": b"PK\r\n\xef\xbb\xbf", "full": bytes(MAX_BYTES - 7)})


def test_a_link_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, {"a.sh": SCRIPT})
    (tmp_path / "b.sh").symlink_to("a.sh")
    with pytest.raises(UserError, match=r"lifecycle/b\.sh = 'link'"):
        gathered(tmp_path, entries=())
