"""verify.py finds each fault that is planted in an image's tree, and that one only; and passes the image that we build."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from images import verify
from images.verify import CHECKS, Image
from lustrain import leaks
from rehearsal.lab.containers.engine import Engine
from tests.conftest import require
from tests.images.workshop import Made

PINS = {"torch": {"torch": "2.13.0+cpu"}, "app": {"numpy": "2.4.6", "typing_extensions": "4.16.0"}}
NCCL = "2.29.7"
TORCH = "class nccl:\n    version = staticmethod(lambda: ({}))\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The root of a sound cpu image. torch, numpy and a libc are left out: a module of one line and metadata stand for each."""
    root = tmp_path / "root"
    for layer, packages in PINS.items():
        for name, version in packages.items():
            _install(root, layer, name, version)
    _write(root, "opt/lustrain/torch/torch/__init__.py", "")
    code = "opt/lustrain/code/trainer"
    for module in ("__init__.py", "node/__init__.py", "node/launcher.py"):
        _write(root, f"{code}/{module}", "")
    _write(root, f"{code}/loop.py", "import torch\n")
    _write(root, "etc/passwd", f"root:x:0:0::/root:/bin/sh\nlustrain:*:{_uid()}:{_uid()}::/home/lustrain:/bin/sh\n")
    _write(root, "usr/bin/passwd", "").chmod(0o4755)
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    return root


def test_a_sound_image_passes_every_check(tree: Path) -> None:
    assert _failed(_image(tree)) == {}


Plant = Callable[[Path], object]


def _put(path: str, text: str = "", mode: int = 0o644) -> Plant:
    return lambda root: _write(root, path, text).chmod(mode)


def _two_versions(root: Path) -> None:
    _install(root, "torch", "typing_extensions", "4.15.0")
    _pin(root, "torch", {**PINS["torch"], "typing_extensions": "4.15.0"})


def _open_folder(root: Path) -> None:
    (root / "srv").mkdir()
    (root / "srv").chmod(0o1777)


CODE = "opt/lustrain/code"
OPTIM = f"{CODE}/trainer/optim.py"
BODY = base64.b64encode(bytes(range(256))).decode()
KEY = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{BODY[:64]}\n{BODY[64:128]}\n"
NETRC = "machine index login me password hunter22\n"
PIP = "[global]\nindex-url = https://{}index/simple\n"
AWS_KEY = "key = " + "AK" + "IA" + "Q7" * 8 + "\n"
PLANTED: list[tuple[Plant, str, str]] = [
    (lambda root: _install(root, "app", "numpy", "2.4.5"), "versions", "numpy is 2.4.5"),
    (lambda root: _install(root, "app", "leftpad", "1.0"), "versions", "leftpad is 1.0"),
    (lambda root: (root / "opt/lustrain/app/numpy-1.dist-info/METADATA").unlink(), "versions", "numpy is missing"),
    (_two_versions, "versions", "typing-extensions is 4.15.0 in torch and 4.16.0 in app"),
    (lambda root: (root / "opt/lustrain/locks/torch.txt").unlink(), "versions", "/opt/lustrain/locks/torch.txt"),
    (_put(OPTIM, "import a_package_that_nobody_installed\n"), "imports", "trainer.optim: ModuleNotFoundError"),
    (_put(OPTIM, "raise SystemExit(0)\n"), "imports", "trainer.optim: SystemExit"),
    (_put(OPTIM, "import os; os._exit(0)\n"), "imports", "exit code 0"),
    (_put(f"{CODE}/infra/__init__.py"), "only-trainer", f"/{CODE}/infra: "),
    (_put("opt/lustrain/app/infra/__init__.py"), "only-trainer", "infra can be imported"),
    (_put(f"{CODE}/launch/__init__.py"), "only-trainer", f"/{CODE}/launch: "),
    (_put("home/lustrain/key", KEY), "secrets", "/home/lustrain/key: "),
    (_put(f"{CODE}/trainer/notes.txt", AWS_KEY), "secrets", f"/{CODE}/trainer/notes.txt: "),
    (_put("root/.netrc", NETRC), "secrets", "/root/.netrc: "),
    (_put("etc/pip.conf", PIP.format("me:hunter22@")), "secrets", "/etc/pip.conf: "),
    (_put("etc/ssh/ssh_host_ed25519_key", "x"), "secrets", "/etc/ssh/ssh_host_ed25519_key: "),
    (_put("usr/lib/open.so", "", 0o666), "writable", "/usr/lib/open.so: all may write (0666)"),
    (_open_folder, "writable", "/srv: all may write (1777)"),
    (lambda root: (root / CODE / "trainer/loop.py").chmod(0o664), "writable", f"/{CODE}/trainer/loop.py: its group"),
    (_put("usr/bin/sudo", "", 0o4755), "programs", "/usr/bin/sudo: becomes another user"),
    (_put("opt/passwd", "", 0o4755), "programs", "/opt/passwd: becomes another user"),
    (_put("usr/sbin/sshd"), "programs", "/usr/sbin/sshd: a login server"),
    (_put("opt/lustrain/torch/nvidia/nccl/lib/libnccl.so.2"), "one-nccl", "libnccl.so.2: not for cpu"),
    (_put("etc/passwd", "root:x:0:0::/root:/bin/sh\n"), "user", "has no entry in /etc/passwd"),
]


@pytest.mark.parametrize(("plant", "check", "says"), PLANTED)
def test_a_planted_fault_fails_its_check_and_no_other(tree: Path, plant: Plant, check: str, says: str) -> None:
    plant(tree)
    failed = _failed(_image(tree))
    assert list(failed) == [check]
    assert any(says in problem for problem in failed[check]), failed


def test_what_only_looks_like_a_secret_passes(tree: Path) -> None:
    _write(tree, "usr/lib/parser.py", 'HEAD = "-----BEGIN RSA PRIVATE KEY-----"\n')
    _write(tree, "usr/lib/help.txt", "AKIAIOSFODNN7EXAMPLE\n")
    _write(tree, "etc/pip.conf", PIP.format(""))
    assert "secrets" not in _failed(_image(tree))


def test_module_of_an_extra_image_leaves_out_passes_with_a_note(tree: Path) -> None:
    _write(tree, "opt/lustrain/code/trainer/glyphs.py", "import PIL\n")
    outcome = CHECKS["imports"](_image(tree))
    assert not outcome.problems
    assert "trainer.glyphs" in outcome.note


def test_root_is_not_a_user_to_run_as(tree: Path) -> None:
    assert CHECKS["user"](_image(tree, uid=0)).problems == ("runs as root",)


def test_image_over_its_budget_fails_one_within_says_the_rest(tree: Path) -> None:
    with _write(tree, "var/big", "").open("wb") as file:
        file.truncate(3 << 20)
    os.link(tree / "var/big", tree / "var/linked")
    assert CHECKS["size"](_image(tree, budget_mb=4)).note == "4 of 4 MiB"
    (over,) = CHECKS["size"](_image(tree, budget_mb=3)).problems
    assert over.startswith("4 MiB, 3 allowed")


@pytest.fixture
def cuda(tree: Path) -> Path:
    """The same for cuda; the libraries hold nothing of what their names say, the linker's cache is a real one."""
    _install(tree, "torch", "nvidia-nccl-cu13", NCCL)
    _pin(tree, "torch", {**PINS["torch"], "nvidia-nccl-cu13": NCCL})

    _write(tree, "opt/lustrain/torch/torch/__init__.py", "from torch import cuda\n")
    _write(tree, "opt/lustrain/torch/torch/cuda.py", TORCH.format(NCCL.replace(".", ", ")))
    places = {"nvidia/nccl/lib": "libnccl.so.2", "nvidia/cu13/lib": "libcudart.so.13"}
    for place, name in places.items():
        _library(tree / "opt/lustrain/torch" / place / name, name)
    (tree / "opt/lustrain/torch/nvidia/cu13/lib/libcudart.so").symlink_to("libcudart.so.13")
    _write(tree, "etc/ld.so.conf", "".join(f"/opt/lustrain/torch/{place}\n" for place in places))
    _ldconfig(tree)
    return tree


@pytest.mark.slow
def test_a_sound_cuda_image_passes_every_check(cuda: Path) -> None:
    assert _failed(_image(cuda, target="cuda")) == {}


def _no_cache(root: Path) -> None:
    _write(root, "etc/ld.so.conf", "")
    _ldconfig(root)


def _no_link(root: Path) -> None:
    (root / "opt/lustrain/torch/nvidia/cu13/lib/libcudart.so").unlink()
    _ldconfig(root)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (lambda root: _library(root / "usr/lib/libnccl.so.2", "libnccl.so.2"), "2 of libnccl.so: "),
        (_put("opt/lustrain/torch/torch/cuda.py", TORCH.format("2, 28, 1")), "torch uses NCCL 2.28.1"),
        (_no_cache, "the linker does not find libnccl.so.2"),
        (_no_link, "the linker does not find libcudart.so"),
    ],
)
def test_two_nccls_or_one_that_the_linker_does_not_find_fail(cuda: Path, plant: Plant, says: str) -> None:
    plant(cuda)
    failed = _failed(_image(cuda, target="cuda"))
    assert list(failed) == ["one-nccl"]
    assert any(problem.startswith(says) for problem in failed["one-nccl"]), failed


def test_efa_is_what_was_asked_for(tree: Path) -> None:
    check = CHECKS["plugin"]
    assert check(_image(tree, efa="")).problems == ()
    assert check(_image(tree, efa="1.49.0")).problems == ("EFA none, wanted 1.49.0",)
    _write(tree, "opt/amazon/efa_installed_packages", "# EFA installer version: 1.49.0\n")
    assert check(_image(tree)).problems == ("EFA 1.49.0 without libnccl-net-ofi.so",)
    assert check(_image(tree, efa="")).problems == ("EFA 1.49.0, wanted none",)


def test_a_plugin_must_find_its_libraries_and_load(tree: Path) -> None:
    _write(tree, "opt/amazon/efa_installed_packages", "# EFA installer version: 1.49.0\n")
    plugin = tree / "opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so"
    _library(plugin, plugin.name)
    assert CHECKS["plugin"](_image(tree, efa="1.49.0")).problems == ()
    plugin.write_bytes(plugin.read_bytes().replace(b"libc.so.6\0", b"libq.so.6\0"))
    (problem,) = CHECKS["plugin"](_image(tree, efa="1.49.0")).problems
    assert "libq.so.6 => not found" in problem


def test_what_a_vendor_brings_is_not_installed_or_judged(tree: Path) -> None:
    _write(tree, "usr/sbin/sshd", "")
    _write(tree, "home/lustrain/key", KEY)
    (tree / "opt/lustrain/locks/torch.txt").unlink()
    assert _failed(_image(tree, target="gaudi")) == {}
    _install(tree, "app", "torch", "2.13.0")
    _pin(tree, "app", {**PINS["app"], "torch": "2.13.0"})
    assert _failed(_image(tree, target="gaudi"))["versions"] == ["torch: the vendor's image brings its own"]


def test_as_a_command_it_says_pass_or_fail_and_exits_so(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--root", str(tree), "--target", "cpu", "--only", "programs,size"]
    assert verify.main(given) == 0
    assert capsys.readouterr().out.splitlines()[0] == "ok programs"
    _write(tree, "usr/sbin/sshd", "")
    assert verify.main([*given, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert not answer["ok"]
    assert answer["checks"]["programs"]["problems"]
    assert not answer["checks"]["size"]["problems"]


@pytest.mark.parametrize("wrong", [["--only", "pograms"], ["--target", "tpu"], ["--budget-mb", "many"], ["--only", ""]])
def test_a_call_that_makes_no_sense_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        verify.main(["--target", "cpu", *wrong])
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_it_needs_nothing_but_python_and_the_rules_of_leaks(tmp_path: Path) -> None:
    """As below the code, where both are mounted; -S and -E leave Python its standard library alone."""
    (tmp_path / "lustrain").mkdir()
    shutil.copy(leaks.__file__, tmp_path / "lustrain/leaks.py")
    shutil.copy(verify.__file__, tmp_path / "verify.py")
    command = [sys.executable, "-E", "-S", str(tmp_path / "verify.py"), "--help"]
    assert subprocess.run(command, capture_output=True, check=False, cwd="/").returncode == 0


@pytest.mark.slow
def test_the_image_we_build_passes_and_a_fault_on_top_fails(engine: Engine, cpu_image: Made, tmp_path: Path) -> None:
    run = ("run", "--rm", "--network=none", "--read-only")
    found = json.loads(engine.docker(*run, cpu_image.ref, "/opt/lustrain/verify.py", "--json").stdout)
    assert found["ok"], found
    assert found["checks"]["user"]["note"] == "lustrain"
    netrc = tmp_path / ".netrc"
    netrc.write_text(NETRC)
    netrc.chmod(0o644)
    tmp_path.chmod(0o755)
    # Copied, because what is mounted is not in the image.
    name = engine.docker("create", cpu_image.ref, "/opt/lustrain/verify.py", "--json").stdout.strip()
    try:
        engine.docker("cp", netrc, f"{name}:/home/lustrain/.netrc")
        done = engine.docker("start", "--attach", name, check=False)
    finally:
        engine.docker("rm", "--force", name)
    assert done.returncode == 1
    failed = {check: one["problems"] for check, one in json.loads(done.stdout)["checks"].items() if one["problems"]}
    assert failed == {"secrets": ["/home/lustrain/.netrc: holds passwords of hosts"]}


def _image(
    root: Path, target: str = "cpu", efa: str | None = None, budget_mb: int | None = None, uid: int = -1
) -> Image:
    # This machine's Python without its packages, of which an image has none.
    python = root.parent / "python"
    python.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S "$@"\n')
    python.chmod(0o755)
    return Image(root, target, efa, budget_mb, str(python), _uid() if uid == -1 else uid)


def _failed(image: Image) -> dict[str, list[str]]:
    return {name: list(one.problems) for name, one in verify.run(image, list(CHECKS)).items() if one.problems}


def _uid() -> int:
    return os.getuid() or 1000


def _write(root: Path, path: str, text: str) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def _install(root: Path, layer: str, name: str, version: str) -> None:
    _write(root, f"opt/lustrain/{layer}/{name}-1.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")
    if layer in PINS:
        _pin(root, layer, PINS[layer])


def _pin(root: Path, layer: str, pins: dict[str, str]) -> None:
    _write(root, f"opt/lustrain/locks/{layer}.txt", "".join(f"{name}=={version}\n" for name, version in pins.items()))


def _library(path: Path, soname: str) -> None:
    """A real shared library of this machine, without any code of the one whose name it has."""
    require(shutil.which("cc"), "a C compiler; fix: apt-get install gcc")
    path.parent.mkdir(parents=True, exist_ok=True)
    source = "int lustrain_test_library(void) { return 0; }\n"
    command = ["cc", "-shared", "-fPIC", "-Wl,--no-as-needed", "-x", "c", "-", "-o", str(path), f"-Wl,-soname,{soname}"]
    subprocess.run(command, input=source, text=True, check=True)


def _ldconfig(root: Path) -> None:
    subprocess.run(["/sbin/ldconfig", "-r", str(root), "-X"], check=True, capture_output=True)
