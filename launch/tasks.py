"""`fab train`, `status`, `report`, `stop`.

Imports of what a task does stand in it: every `fab` loads this file.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.wish import ReportWish, StatusWish, StopWish, TrainWish
from lustrain.problem import UNREACHABLE, UserError, problem
from lustrain.task import Answer, task

if TYPE_CHECKING:
    from launch.asked import Asked


@task("train")
def train(flags: TrainWish, context: Any) -> Answer:
    """Start a run, and start it again after every interruption until it is done. Exit code: the trainer's (docs/launch.md)."""
    from launch import asked as asking
    from lustrain import deployed
    from trainer import config
    from trainer.launch.node import devices

    cluster = deployed.cluster(flags.cluster, flags.stack)
    settings = config.load(Path(flags.config), flags.set)
    asked = asking.ask(flags, settings, cluster, devices(), Path.cwd(), _image(flags.image))
    dry = flags.dry or bool(context.config.run.dry)
    start = {"local": _here, "slurm": _on_slurm, "kubernetes": _on_kubernetes}[asked.on]
    return start(asked, flags, dry=dry)


def _image(named: str) -> tuple[str, str]:
    """Return an image by digest and what it is built for; empty where there is none, which matters on Kubernetes alone."""
    from lustrain import image_file

    if "@" in named:
        return named, ""
    if not Path(named).exists():
        return "", ""
    record = image_file.read(Path(named))
    return record.deployable, record.target


def _here(asked: Asked, flags: TrainWish, *, dry: bool) -> Answer:
    from launch import here, records
    from launch.supervise.decision import Stop
    from launch.supervise.loop import supervise

    if dry:
        command = here.command(asked)
        lines = [f"{asked.config_uri}:", asked.config, "command:", shlex.join(command)]
        return Answer(lines, {"files": {asked.config_uri: asked.config}, "commands": [command]})
    store = records.claim(asked, resume=flags.resume, plan={})
    # Standard output is one JSON value where that is asked for.
    place = here.Here(asked, sys.stderr if flags.json else None)
    end = supervise(place, here.RunJournal(store), asked.rules, _say, give_up_s=asked.give_up_s)
    assert isinstance(end, Stop), "this machine has no queue"
    return Answer([f"{asked.run}: {end.why}"], {"run": asked.run, "exit_code": end.code, "why": end.why}, end.code)


def _on_slurm(asked: Asked, flags: TrainWish, *, dry: bool) -> Answer:
    from launch import records, slurm
    from launch.places import ODD_SIGN

    folder = Path.cwd()
    log = f"{folder}/lustrain-{asked.name}.log" if "://" in asked.run else f"{asked.run}/launch/log"
    if sign := ODD_SIGN.search(log):
        raise UserError(problem("folder", str(folder), f"holds {sign[0]!r}, which an option of sbatch cannot"))
    text = slurm.script(asked, log, slurm.ranks_environment(os.environ))
    if dry:
        script = f"{asked.run}/{slurm.SCRIPT}"
        command = ["sbatch", "--parsable", f"--chdir={folder}"]
        lines = [f"{asked.config_uri}:", asked.config, f"{script}:", text, "command:", shlex.join(command)]
        files = {asked.config_uri: asked.config, script: text}
        return Answer(lines, {"files": files, "commands": [command]})
    slurm.check(text, folder)
    # Also without --resume: whoever lost the answer of sbatch may begin anew.
    if waiting := slurm.jobs(asked.run, asked.name):
        why = f"job {waiting[0]} of Slurm still waits or runs for it"
        key = "--resume" if flags.resume else "run.uri"
        raise UserError(problem(key, asked.run, why, fix=f"fab stop {asked.run} --now, or let it go on"))
    plan = {slurm.SCRIPT: text}
    store = records.claim(asked, resume=flags.resume, plan=plan)
    try:
        job = slurm.submit(text, folder, asked)
    except UserError as error:
        # Where Slurm did not answer, the job may be there all the same.
        if not flags.resume and error.exit_code != UNREACHABLE:
            records.release(store, plan)
        raise
    records.submitted(store, {"slurm": {"job": job, "log": log}})
    lines = [f"{asked.run}: job {job} of Slurm", f"log: {log}", f"next: fab status {asked.run}"]
    return Answer(lines, {"run": asked.run, "job": job, "log": log})


def _on_kubernetes(asked: Asked, flags: TrainWish, *, dry: bool) -> Answer:
    from launch import kubernetes, records

    wish = asked.kubernetes
    assert wish is not None
    text = kubernetes.manifest(asked, wish)
    if dry:
        path = f"{asked.run}/{kubernetes.OBJECTS}"
        command = ["kubectl", f"--namespace={wish.namespace}", "create", "--filename=-"]
        lines = [f"{asked.config_uri}:", asked.config, f"{path}:", text, "command:", shlex.join(command)]
        return Answer(lines, {"files": {asked.config_uri: asked.config, path: text}, "commands": [command]})
    kubernetes.ready(asked, wish, resume=flags.resume)
    plan = {kubernetes.OBJECTS: text}
    store = records.claim(asked, resume=flags.resume, plan=plan)
    try:
        kubernetes.create(text, wish)
    except UserError as error:
        if not flags.resume and error.exit_code != UNREACHABLE:
            records.release(store, plan)
        raise
    where = {"job": asked.name, "namespace": wish.namespace, "context": wish.context}
    records.submitted(store, {"kubernetes": where})
    lines = [f"{asked.run}: job {asked.name} in namespace {wish.namespace}", f"next: fab status {asked.run}"]
    return Answer(lines, {"run": asked.run, "job": asked.name, "namespace": wish.namespace})


@task("status")
def status(flags: StatusWish) -> Answer:
    """Tell how a run is: its state, step, loss, speed, checkpoints and attempts. Reads the run alone, not the cluster."""
    from launch import status as telling

    found = telling.read(_store(flags))
    return Answer(telling.lines(found), found)


@task("report")
def report(flags: ReportWish) -> Answer:
    """Write one page about a run: its state, its attempts, where its time went, and a plot."""
    from launch import report as reporting

    lines, found = reporting.make(_store(flags), Path(flags.output))
    return Answer([*lines, "", f"written: {flags.output}"], found)


@task("stop")
def stop(flags: StopWish) -> Answer:
    """Have a run commit and end; it is not started again until `fab train --resume`."""
    from launch import kubernetes, records, slurm
    from trainer.launch.journal import ASKED, STOP
    from trainer.storage import open_store

    store = _store(flags)
    words = json.dumps({"by": os.environ.get("USER", "")}).encode()
    store.put(STOP, words)
    asked = records.recorded(store, ASKED) or {}
    own = str(asked.get("stop_uri") or "")
    if own and own != f"{asked.get('run')}/{STOP}":
        folder, _, name = own.rpartition("/")
        open_store(folder, name="interrupt.stop_uri").put(name, words)
    job = records.recorded(store, records.SUBMITTED) or {}
    if flags.now and asked.get("on") == "slurm":
        for number in slurm.jobs(store.uri, store.uri.rpartition("/")[2]):
            slurm.cancel(number)
    if flags.now and "kubernetes" in job:
        kubernetes.withdraw(store.uri, job["kubernetes"])
    lines = [f"{store.uri}: asked to commit and end", f"next: fab status {store.uri}"]
    return Answer(lines, {"run": store.uri, "now": flags.now})


def _store(flags: StatusWish | ReportWish | StopWish) -> Any:
    from launch.asked import uri_of
    from launch.records import look
    from lustrain import deployed

    return look(uri_of(flags.run, deployed.cluster(flags.cluster, flags.stack), Path.cwd()))


def _say(line: str) -> None:
    print(f"lustrain: {line}", file=sys.stderr, flush=True)


TASKS = (train, status, report, stop)
