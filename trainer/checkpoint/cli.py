"""`python -m trainer checkpoints list | verify | prune | export RUN_URI`: inspect and prune a run's checkpoints."""

from __future__ import annotations

import argparse
import json
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lustrain.problem import UserError, problem
from lustrain.progress import BYTES, Progress, amount_text
from lustrain.schema import problems_of
from lustrain.tables import table
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.lineage.audit import audit
from trainer.checkpoint.lineage.history import History, choose, read_history
from trainer.checkpoint.lineage.prune import PruneReport, metric_of, prune
from trainer.checkpoint.load.export import export
from trainer.checkpoint.load.parts import read_manifest
from trainer.checkpoint.load.verify import VerifyReport, verify_checkpoint
from trainer.checkpoint.stored_config import KEY, read_stored
from trainer.config import CheckpointConfig, TaskConfig
from trainer.errors import EXIT_DONE
from trainer.metrics.runlog import append_event
from trainer.metrics.timeline import PRUNED
from trainer.storage import CorruptObjectError, ObjectStore, open_store
from trainer.tasks import make_task

EXIT_DAMAGED = 1
_THREADS = 8
_PRUNE_HELP = """\
Remove checkpoints that the run's own settings (or the flags) do not keep, and leftovers older than a day. Safe beside a
running job: only checkpoints of the run's live history count, the newest ones always stay, and pruning ends when another
job takes the run."""


@dataclass(frozen=True)
class Listed:
    """One row of `list`; the fields of a damaged manifest are None."""

    generation: int
    step: int
    state: str
    """`live`, `dead` (beside the run's history) or `damaged` (its manifest cannot be read)."""
    created: str | None = None
    bytes: int | None = None
    ranks: int | None = None
    eval_loss: float | None = None
    problem: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="what the run holds, newest first")
    verify = actions.add_parser(
        "verify", help="read and check every byte; exit 1 and the place when one is damaged or lost"
    )
    verify.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="only the checkpoint of this step (default: all live ones, config and log)",
    )
    pruning = actions.add_parser("prune", help="remove checkpoints that need not be kept", description=_PRUNE_HELP)
    pruning.add_argument("--dry-run", action="store_true", help="list what would be removed, remove nothing")
    pruning.add_argument("--keep-last", type=int, metavar="N", help="newest checkpoints to keep, at least 2")
    pruning.add_argument("--keep-every-steps", type=int, metavar="N", help="also keep one every N steps; 0: none")
    pruning.add_argument("--keep-best", action=argparse.BooleanOptionalAction, help="also keep the best by eval loss")
    exporting = actions.add_parser("export", help="write the model's weights as safetensors")
    exporting.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    exporting.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    exporting.add_argument(
        "--names",
        choices=("task", "own"),
        default="task",
        help="task: those of Hugging Face libraries, where the run's Task knows them; own: ours (%(default)s)",
    )
    for action in (listing, verify, pruning, exporting):
        action.add_argument("run", metavar="RUN_URI", help="a run's folder or s3:// address")
        action.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Run one action; returns 0, or 1 when `verify` found damage; UserError for a mistake of the user."""
    store = open_store(args.run, create=False, name="RUN_URI")
    actions = {"list": _list, "verify": _verify, "prune": _prune, "export": _export}
    return actions[args.action](store, args)


def listed(store: ObjectStore, history: History) -> list[Listed]:
    """Describe every checkpoint of the run, newest first."""
    live = set(history.live)

    def row(manifest_id: ManifestId) -> Listed:
        try:
            manifest = read_manifest(store, manifest_id)
        except CorruptObjectError as error:
            return Listed(manifest_id.generation, manifest_id.step, "damaged", problem=str(error))
        return Listed(
            generation=manifest_id.generation,
            step=manifest_id.step,
            state="live" if manifest_id in live else "dead",
            created=manifest.created,
            bytes=manifest.data_bytes,
            ranks=manifest.world_size,
            eval_loss=metric_of(manifest),
        )

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(row, sorted([*history.live, *history.dead], reverse=True)))


def _list(store: ObjectStore, args: argparse.Namespace) -> int:
    history = read_history(store)
    rows = listed(store, history)
    if args.json:
        _print_json(
            {"run": store.uri, "generation": history.lease.generation, "checkpoints": [asdict(r) for r in rows]}
        )
        return EXIT_DONE
    cells = [
        (
            str(row.step),
            str(row.generation),
            row.state,
            row.created or "-",
            "-" if row.bytes is None else amount_text(row.bytes, BYTES),
            "-" if row.ranks is None else str(row.ranks),
            "-" if row.eval_loss is None else f"{row.eval_loss:.4f}",
        )
        for row in rows
    ]
    heads = ("step", "generation", "state", "saved", "size", "ranks", "eval loss")
    print("\n".join([store.uri, *table(heads, cells, right=("size", "eval loss"))]))
    for row in rows:
        if row.problem:
            print(row.problem)
    return EXIT_DONE


def _verify(store: ObjectStore, args: argparse.Namespace) -> int:
    history = read_history(store)
    wanted = history.live if args.step is None else [choose(history, store.uri, args.step)]
    beside = audit(store, history, lambda: keep_options(store, args)) if args.step is None else []
    if not wanted and not beside:
        raise UserError(problem("RUN_URI", store.uri, "holds no checkpoint yet"))
    reports = []
    with Progress("verify", sum(_size(store, manifest_id) for manifest_id in wanted), BYTES) as progress:
        for manifest_id in wanted:
            reports.append(verify_checkpoint(store, manifest_id, progress.advance))
    whole = all(report.ok for report in reports) and not beside
    if args.json:
        rows = [{**asdict(report), "id": asdict(report.id), "ok": report.ok} for report in reports]
        _print_json({"run": store.uri, "ok": whole, "checkpoints": rows, "beside": beside})
    else:
        print(verify_text(reports, beside))
    return EXIT_DONE if whole else EXIT_DAMAGED


def verify_text(reports: Sequence[VerifyReport], beside: Sequence[str]) -> str:
    """Render reports as lines for people; `beside` are problems of the run and not of one checkpoint."""
    lines = []
    for report in reports:
        verdict = "whole" if report.ok else "DAMAGED"
        size = amount_text(report.bytes, BYTES)
        lines.append(f"step {report.id.step} (generation {report.id.generation}): {verdict}, {size}")
        lines += [f"  {line}" for line in report.problems]
    if beside:
        lines += ["beside the checkpoints: DAMAGED or lost", *(f"  {line}" for line in beside)]
    return "\n".join(lines)


def _prune(store: ObjectStore, args: argparse.Namespace) -> int:
    history = read_history(store)
    report = prune(store, keep_options(store, args), dry_run=args.dry_run)
    if report.removed_keys and not args.dry_run:
        fields = {"removed": report.removed_keys, "bytes": report.bytes}
        append_event(store, history.lease.generation, PRUNED, fields)
    if args.json:
        _print_json({"run": store.uri, "dry_run": args.dry_run, **asdict(report)})
    else:
        print(prune_text(report, args.dry_run))
    return EXIT_DONE


def keep_options(store: ObjectStore, args: argparse.Namespace) -> CheckpointConfig:
    """Return what to keep: the run's own settings, and over them the flags."""
    stored = read_stored(store)
    settings = stored.settings if stored else {}
    names = ("keep_last", "keep_every_steps", "keep_best")
    keep = {name: settings[f"checkpoint.{name}"] for name in names if f"checkpoint.{name}" in settings}
    keep |= {name: flag for name in names if (flag := getattr(args, name, None)) is not None}
    try:
        return CheckpointConfig(**keep)
    except ValidationError as error:
        raise UserError(problems_of(error, CheckpointConfig, "checkpoint")) from None


def prune_text(report: PruneReport, dry_run: bool) -> str:
    """Render the report as lines for people."""
    verb = "would remove" if dry_run else "removed"
    steps = ", ".join(f"step {i.step}" for i in report.removed) or "no checkpoint"
    lines = [f"{verb} {steps}; kept {', '.join(f'step {i.step}' for i in report.kept) or 'none'}"]
    if report.removed_dead:
        lines.append(f"{verb} outside the run's history: {', '.join(i.key for i in report.removed_dead)}")
    if report.removed_orphans:
        lines.append(f"{verb} unfinished saves: {', '.join(report.removed_orphans)}")
    lines.append(f"{amount_text(report.bytes, BYTES)} {'would be ' if dry_run else ''}freed")
    if report.stopped:
        lines.append(f"ended early: {report.stopped}")
    return "\n".join(lines)


def _export(store: ObjectStore, args: argparse.Namespace) -> int:
    manifest_id = choose(read_history(store), store.uri, args.step)
    names, config, files = task_names(store) if args.names == "task" else ({}, {}, {})
    with Progress("export", None, BYTES) as progress:
        done = export(store, manifest_id, Path(args.out), names, config=config, files=files, on_bytes=progress.advance)
    if args.json:
        _print_json({"run": store.uri, "step": manifest_id.step, **asdict(done), "folder": str(done.folder)})
    else:
        print(
            f"step {manifest_id.step}: {amount_text(done.bytes, BYTES)} in {', '.join(done.files)} under {done.folder}"
        )
    return EXIT_DONE


def task_names(store: ObjectStore) -> tuple[dict[str, str], dict[str, Any], dict[str, str]]:
    """Return how the run's Task names parameters, its `config.json` and other files; UserError when it cannot be opened."""
    if read_stored(store) is None:
        raise UserError(problem("RUN_URI", store.uri, f"has no {KEY} that names its Task", fix="--names own"))
    config_file = tomllib.loads(store.read(KEY)[0].decode())
    try:
        task = make_task(TaskConfig.model_validate(config_file["task"]), seed=config_file["run"]["seed"])
        with tempfile.TemporaryDirectory(prefix="lustrain-export-") as folder:
            task.open(Path(folder))
            model = task.build_model()
            names, config, files = task.export_names(model), task.export_config(model), task.export_files()
            task.close()
    except UserError as error:
        why = "the Task cannot name the weights without its data"
        hint = problem("--names", "task", why, fix="make the data readable here, or --names own")
        raise UserError([*error.problems, hint]) from error
    return names, config, files


def _size(store: ObjectStore, manifest_id: ManifestId) -> int:
    try:
        return read_manifest(store, manifest_id).data_bytes
    except CorruptObjectError:
        return 0


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))
