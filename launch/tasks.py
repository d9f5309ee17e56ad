"""`fab train`, `status`, `report`, `stop`.

Imports of what a task does stand in it: every `fab` loads this file.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
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
        job = waiting[0]
        why = f"job {job.number} of Slurm still waits or runs for it"
        fix = f"fab stop {asked.run} --now, or let it go on"
        if job.held:
            why, fix = (
                f"job {job.number} of Slurm is held ({job.held})",
                f"{job.release}; or fab stop {asked.run} --now",
            )
        raise UserError(problem("--resume" if flags.resume else "run.uri", asked.run, why, fix=fix))
    plan = {slurm.SCRIPT: text}
    store = records.claim(asked, resume=flags.resume, plan=plan)
    try:
        number = slurm.submit(text, folder, asked)
    except UserError as error:
        # Where Slurm did not answer, the job may be there all the same.
        if not flags.resume and error.exit_code != UNREACHABLE:
            records.release(store, plan)
        raise
    records.submitted(store, {"slurm": {"job": number, "log": log}})
    lines = [f"{asked.run}: job {number} of Slurm", f"log: {log}", f"next: fab status {asked.run}"]
    return Answer(lines, {"run": asked.run, "job": number, "log": log})


def _on_kubernetes(asked: Asked, flags: TrainWish, *, dry: bool) -> Answer:
    from launch import kubernetes, records

    wish = asked.kubernetes
    assert wish is not None
    text = kubernetes.manifest(asked, wish, os.environ)
    if dry:
        path = f"{asked.run}/{kubernetes.OBJECTS}"
        command = ["kubectl", f"--namespace={wish.namespace}", "create", "--filename=-"]
        lines = [f"{asked.config_uri}:", asked.config, f"{path}:", text, "command:", shlex.join(command)]
        return Answer(lines, {"files": {asked.config_uri: asked.config, path: text}, "commands": [command]})
    kubernetes.ready(text, asked, wish, resume=flags.resume)
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
    """Tell how a run is: state, step, loss, speed, checkpoints, attempts, and whether Slurm holds its job."""
    from launch import slurm
    from launch import status as telling

    store = _store(flags)
    found = telling.read(store)
    if found["on"] == "slurm" and found["state"] not in telling.OVER and shutil.which("squeue"):
        try:
            found = telling.with_jobs(found, slurm.jobs(store.uri, store.uri.rpartition("/")[2]))
        except UserError as error:
            _say(str(error))
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
        for one in slurm.jobs(store.uri, store.uri.rpartition("/")[2]):
            slurm.cancel(one.number)
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
