"""What README.md and docs/ say exists: tasks, flags, targets, files, links, configurations, exit codes, messages, imports."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import fabfile
from infra.config import ClusterSpec
from infra.preflight import stackfile
from lustrain import cluster, problem
from node_setup.agent.verify.expected import type_table
from trainer import __main__ as trainer_main
from trainer import config as trainer_config
from trainer import errors
from trainer.node import launcher
from trainer.tasks import SHIPPED, make_task

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = ("lustrain", "infra", "images", "node_setup", "trainer", "launch", "planner", "rehearsal")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
LONGEST_README = 150
OF_OTHER_PROGRAMS = {
    *("--exclude", "--exclude-dependents", "--exclude-protected", "--local", "--policy-pack", "--refresh"),  # pulumi
    *("--driver", "--ipc", "--link", "--shm-size", "--ulimit"),  # docker
    *("--instance-types", "--product-descriptions"),  # aws
    *("--dry", "--help", "--list"),  # fab
    *("--container-image", "--array", "--kill-on-bad-exit", "--no-kill"),  # Pyxis, sbatch, srun
    *("--from-file", "--preemption-policy", "--value"),  # kubectl
    *("--shutdown-timeout", "--snapshot-update", "--strict"),  # torchrun, syrupy, mypy
    *("--kind", "--nodes", "--nproc", "--only", "--textfile"),  # our own modules
}


def blocks(page: Path, kind: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text(encoding="utf-8")) if found == kind]


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def commands(page: Path) -> Iterator[list[str]]:
    """Every command of its `sh` blocks and its code spans, as words."""
    texts = [line for block in blocks(page, "sh") for line in block.splitlines()] + SPAN.findall(prose(page))
    for text in texts:
        for part in re.split(r"&&|\||[()]", text.partition(" #")[0].split(" > ")[0]):
            words = shlex.split(part) if part.count("'") % 2 == 0 else []
            while words and (re.fullmatch(r"[A-Z_]+=.*", words[0]) or words[0] == "export"):
                words.pop(0)
            if words:
                yield words


def everywhere() -> Iterator[tuple[str, list[str]]]:
    return ((page.name, words) for page in PAGES for words in commands(page))


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def rows(page: Path, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, or below a line of text."""
    below = page.read_text(encoding="utf-8").split(heading, 1)[1]
    table = re.findall(r"^\|.*\|$(?:\n^\|.*\|$)*", below, re.MULTILINE)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@functools.cache
def tracked() -> frozenset[str]:
    """Files of this repository and the folders that they are in."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return frozenset(str(place) for file in listed.splitlines() for place in (Path(file), *Path(file).parents))


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= LONGEST_README
    linked = set(re.findall(r"\]\((docs/\w[\w-]*\.md)", prose(PAGES[0])))
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= linked


def test_every_link_leads_somewhere() -> None:
    dead = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if re.match(r"https?://", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                dead.append((page.name, link))
    assert dead == []


def test_every_file_that_is_named_exists() -> None:
    made = {"rehearsal/report.md"}
    gone = []
    for page in PAGES:
        spans = {
            span.rstrip("/") for span in SPAN.findall(prose(page)) if re.fullmatch(r"[\w.][\w./-]*/[\w./-]*", span)
        }
        named = {span for span in spans if span.split("/")[0] in (*ROOMS, "tests", "docs", ".ci")}
        gone += [(page.name, span) for span in sorted(named - tracked() - set(planned()) - made)]
    assert gone == []


def test_every_task_of_fab_and_its_flags_exist() -> None:
    known = {name: flags_of(task) for name, task in fabfile.namespace.tasks.items()}
    wrong = []
    for page, words in everywhere():
        if words[0] == "fab":
            words = [word for word in words[1:] if word not in ("--list", "--dry", "--help", "TASK")]
            flags = {word.partition("=")[0] for word in words if word.startswith("--")}
            if words and not (words[0] in known and flags <= known[words[0]]):
                wrong.append((page, *words))
    assert wrong == []


def test_every_named_flag_is_one_of_a_task_or_a_program_beside() -> None:
    known = OF_OTHER_PROGRAMS.union(*map(flags_of, fabfile.namespace.tasks.values()))
    known |= set(re.findall(r"--[\w-]+", options(launcher.flags())))
    for module, _ in trainer_main.COMMANDS.values():
        parser = argparse.ArgumentParser()
        importlib.import_module(module).add_arguments(parser)
        known |= set(re.findall(r"--[\w-]+", options(parser)))
    wrong = []
    for page in PAGES:
        texts = [line for kind in ("sh", "text") for block in blocks(page, kind) for line in block.splitlines()]
        named = {
            flag for text in texts + SPAN.findall(prose(page)) for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", text)
        }
        wrong += [(page.name, flag) for flag in sorted(named - known)]
    assert wrong == []


def options(parser: argparse.ArgumentParser) -> str:
    """Help of a parser and of its actions."""
    inner = [one for action in parser._actions if isinstance(action.choices, dict) for one in action.choices.values()]
    return "\n".join([parser.format_help(), *map(options, inner)])


def flags_of(task: Any) -> set[str]:
    return {"--" + flag.replace("_", "-") for argument in task.get_arguments() for flag in argument.names}


def test_every_command_of_the_trainer_is_understood() -> None:
    understood = 0
    for _, words in everywhere():
        if words[:3] == ["python", "-m", "trainer.node.launcher"] and len(words) > 3:
            launcher.flags().parse_args(words[3:])
        if words[1:3] == ["-m", "trainer.node.launcher"] and "--" in words:
            words = ["python", "-m", "trainer", *words[words.index("--") + 1 :]]
        if words[:3] == ["python", "-m", "trainer"] and len(words) > 4:
            module, _ = trainer_main.COMMANDS[words[3]]
            parser = argparse.ArgumentParser(exit_on_error=False)
            importlib.import_module(module).add_arguments(parser)
            parser.parse_args(words[4:])
            understood += 1
    assert understood > 10


def test_every_module_and_target_of_make_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    wrong = []
    for page, words in everywhere():
        if words[0] == "make" and not {word for word in words[1:] if "=" not in word and word != "…"} <= targets:
            wrong.append((page, *words))
        if words[:2] == ["python", "-m"] and words[2].split(".")[0] in ROOMS and not importlib.util.find_spec(words[2]):
            wrong.append((page, *words))
    assert wrong == []


def test_every_configuration_loads(tmp_path: Path) -> None:
    found = [(page.stem, *block) for page in PAGES for block in BLOCK.findall(page.read_text(encoding="utf-8"))]
    for number, (name, kind, text) in enumerate(found):
        file = tmp_path / f"{number}-{name}.{kind}"
        file.write_text(text, encoding="utf-8")
        match kind:
            case "toml":
                task = trainer_config.load(file, []).task
                if task.name in SHIPPED:
                    make_task(task, seed=1)
            case "json":
                cluster.read(file)
            case "yaml":
                for item in yaml.safe_load_all(text):
                    match item:
                        case {"scrape_configs": _}:  # of Prometheus, no stack
                            pass
                        case {
                            "apiVersion": _
                        }:  # for a Kubernetes: tests/launch/test_launch_kubernetes.py gives it to one
                            pass
                        case stack:
                            ClusterSpec.model_validate(stack["config"][stackfile.KEY])
            case "python":
                ast.parse(text)
            case _:
                assert kind in ("sh", "bash", "text", "mermaid"), file.name


def test_the_machines_by_hand_are_of_a_type_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example, own_slurm = blocks(ROOT / "docs/nodes.md", "json")
    (code,) = blocks(ROOT / "docs/nodes.md", "python")
    (tmp_path / "machines.json").write_text(example, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(code, found)
    machines = found["machines"]
    group = machines.groups["train"]
    known = type_table(group.type)
    assert known is not None
    assert (group.gpus, group.efa, group.nvme) == (known["gpus"], known["efa"], known["nvme"])
    assert len(machines.nodes.addresses) == group.count
    with_slurm = cluster.decoded(own_slurm, "slurm.json")
    assert with_slurm.slurm is not None
    assert with_slurm.slurm.controller in with_slurm.nodes.addresses


def test_the_task_by_hand_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the loop does, without its processes: batches by id, a summed loss, a fingerprint in JSON."""
    page = ROOT / "docs/train.md"
    (code,) = blocks(page, "python")
    _, config = blocks(page, "toml")
    (tmp_path / "lines.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    table = tomllib.loads(config)
    task = make_task(trainer_config.TaskConfig.model_validate(table["task"]), seed=1)
    task.open(tmp_path)
    model = task.build_model()
    losses = []
    for step in range(table["train"]["steps"]):
        ids = torch.arange(64).add(64 * step).remainder(task.train_samples).numpy()
        found = task.loss(model, task.train_batch(ids))
        losses.append(float(found.total.detach()) / found.count)
        gradients = torch.autograd.grad(found.total / found.count, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= table["optimizer"]["lr"] * gradient
    assert losses[-1] < 0.05 < losses[0]
    assert json.loads(json.dumps(task.fingerprint())) == task.fingerprint()


def test_the_tables_of_exit_codes_are_those_of_the_code() -> None:
    page = ROOT / "docs/troubleshoot.md"
    of_fab = [int(row[0]) for row in rows(page, "Every `fab` task:")]
    assert of_fab == [problem.DONE, problem.FAILED, problem.USAGE, problem.UNREACHABLE, problem.DIFFERS]
    codes = sorted(value for name, value in vars(errors).items() if name.startswith("EXIT_"))
    assert [int(row[0]) for row in rows(page, "`python -m trainer`, ")] == codes
    assert [int(row[0]) for row in rows(ROOT / "docs/train.md", "## Start it on several nodes")] == codes


def test_every_message_of_the_troubleshooter_is_in_the_code() -> None:
    """A message is quoted as a part that stands in the source; `…` is what differs each time."""
    files = [ROOT / name for name in tracked() if name.startswith((*ROOMS, ".ci")) and (ROOT / name).is_file()]
    source = "\n".join(file.read_text(encoding="utf-8") for file in files if file.suffix in (".py", ".sh", ""))
    text = (ROOT / "docs/troubleshoot.md").read_text(encoding="utf-8").split("## Setup")[1]
    quoted = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    assert len(quoted) > 20
    assert [one for one in quoted if any(part.strip(" ") not in source for part in one.split("…"))] == []


def test_the_promises_of_the_readme_are_those_of_the_rehearsal() -> None:
    claims = [row[1] for row in rows(PAGES[0], "## What the rehearsal shows")]
    assert [claim for claim in claims if claim not in "".join(code("rehearsal")).replace('"\n            "', "")] == []


def imports(module: str) -> set[str]:
    """Rooms with a file that imports this module."""
    parent, _, name = module.rpartition(".")
    pattern = re.compile(
        rf"^\s*(?:from|import) {re.escape(module)}\b|^\s*from {re.escape(parent)} import [^\n]*\b{name}\b", re.MULTILINE
    )
    return {room for room in ROOMS for text in code(room) if pattern.search(text)}


@functools.cache
def code(room: str) -> tuple[str, ...]:
    return tuple(file.read_text(encoding="utf-8") for file in sorted((ROOT / room).rglob("*.py")))


def drawn(arrow: str) -> set[tuple[str, ...]]:
    (picture,) = blocks(ROOT / "docs/architecture.md", "mermaid")
    return set(re.findall(arrow, picture, re.MULTILINE))


def test_the_picture_shows_the_imports_as_they_are() -> None:
    pattern = re.compile(rf"^\s*(?:from|import) ({'|'.join(ROOMS)})\b", re.MULTILINE)
    there = {(room, other) for room in ROOMS for text in code(room) for other in pattern.findall(text)}
    assert drawn(r"^ *(\w+) --> (\w+)$") == {(one, other) for one, other in there if one != other}


def test_what_picture_does_not_show_is_forbidden_by_a_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contracts = settings["importlinter"]["contracts"]
    forbidden = {
        (source, other)
        for contract in contracts
        for source in contract.get("source_modules", ())
        for other in contract.get("forbidden_modules", ())
    }
    every = {(one, other) for one in ROOMS for other in ROOMS if one != other}
    shown = drawn(r"^ *(\w+) --> (\w+)$")
    assert every - shown == every & forbidden


def test_data_between_rooms_have_a_contract_that_both_ends_read() -> None:
    contracts = {row[0]: row[1].strip("`") for row in rows(ROOT / "docs/architecture.md", "## What the rooms hand")}
    for one, label, other in drawn(r"^ *(\w+) -\. (\w+) \.-> (\w+)$"):
        path = contracts[label]
        module = path.removesuffix(".py").replace("/", ".")
        users = imports(module) | {path.split("/")[0]}
        users |= imports("lustrain.deployed") if label == "Cluster" else set()
        assert {one, other} <= users, label


def planned() -> list[str]:
    """Paths of parts that are not built yet."""
    cells = [row[1] for row in rows(ROOT / "docs/architecture.md", "## What is not built yet")]
    return [span.rstrip("/") for cell in cells for span in SPAN.findall(cell) if re.fullmatch(r"[\w./]+/[\w./]*", span)]


def test_what_is_not_built_yet_is_not_there() -> None:
    assert [path for path in planned() if (ROOT / path).exists()] == []
