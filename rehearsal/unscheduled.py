"""The run that is interrupted, by processes of this machine that the script starts again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from rehearsal import proof
from rehearsal.channel import notice_arrived
from rehearsal.provision import instances_in_service
from rehearsal.stages import EVERY_STEPS, INTERRUPTED, NOTICE_S, RANKS, Journey, finish, newest, newest_step
from trainer.metrics.reader import read_steps
from trainer.node.launcher import LocalJob


def train(journey: Journey, at_rest: Callable[[], None]) -> None:
    """Train through a notice and the death of all ranks, started again by hand each time; `at_rest` is called when nothing
    trains or writes the run."""
    notice_at = interrupt_by_notice(journey)
    kill_all_ranks(journey, notice_at)
    at_rest()
    resume_run(journey)


def interrupt_by_notice(journey: Journey) -> int:
    """Attempt 1: a spot notice at a random step; returns the step that was saved."""
    at = journey.draw_notice()
    title = f"attempt 1: spot notice around step {at}, to the node and to the event bus"
    real = "IMDSv2 protocol, save, commit, exit code; EventBridge rule to SQS where the stack is up"
    with journey.stage(title, real=real, emulated="EC2, metadata service, S3") as stage:
        job = journey.train(INTERRUPTED, RANKS)
        wait_for_step(journey, job, at)
        if journey.watch:
            journey.watch.before_notice(lambda: job.running() and newest_step(journey) < journey.steps // 2)
        journey.noticed, noticed = time.time(), time.monotonic()
        node = take_by_spot(journey)
        code = job.wait()
        took = time.monotonic() - noticed
        if journey.watch:
            journey.watch.after_notice()
        journey.metadata.clear()
        saved = newest(journey.store(INTERRUPTED)).step
        if journey.provisioned and journey.provisioned.engine:
            arrived = bool(node) and notice_arrived(journey.cluster, node)
            figure = f"spot interruption of {node}" if node else "the cluster has no node in service"
            journey.promise("the notice is in the interruption queue", arrived, figure)
        stage["outcome"] = f"exit {code} {took:.1f} s after the notice, step {saved} committed"
        journey.promise_notice_saved(code, took, saved, at)
        return saved


def take_by_spot(journey: Journey) -> str:
    """Announce the end of one of the cluster's nodes as EC2 does: to the node and to the event bus; returns its id, empty
    where the cluster is on a mock monitor and has no nodes."""
    node = next(iter(instances_in_service(journey.cluster)), "")
    if node:
        journey.aws.events.spot(node, in_s=NOTICE_S, metadata=journey.metadata.control)
    else:
        journey.metadata.spot_notice(in_s=NOTICE_S)
    return node


def kill_all_ranks(journey: Journey, notice_at: int) -> None:
    """Attempt 2: resumes, then every process of the job dies at once, without any notice."""
    at = journey.draw_loss(notice_at)
    title = f"attempt 2: node lost around step {at} (SIGKILL, no notice)"
    with journey.stage(title, real="resume, SIGKILL", emulated="S3") as stage:
        job = journey.train(INTERRUPTED, RANKS)
        wait_for_step(journey, job, at)
        job.send(signal.SIGKILL)
        code = job.wait()
        store = journey.store(INTERRUPTED)
        last_seen, left = read_steps(store)[-1]["step"], newest(store)
        stage["outcome"] = (
            f"all ranks dead (job exit {code}) after step {last_seen}; newest checkpoint: step {left.step}"
        )
        journey.promises.append(proof.lost_at_most(EVERY_STEPS, last_seen, left.step))


def resume_run(journey: Journey) -> None:
    title = f"attempt 3: resume on new capacity, {RANKS} ranks, to the end"
    with journey.stage(title, real="verified load, resume", emulated="S3") as stage:
        stage["outcome"] = finish(journey, INTERRUPTED, journey.train(INTERRUPTED, RANKS))
        if journey.watch:
            journey.watch.at_end()


def wait_for_step(journey: Journey, job: LocalJob, step: int) -> None:
    """Wait until the run has logged `step` or the job has ended before it, which the promises then show."""
    while job.running() and newest_step(journey) < step:
        time.sleep(0.3)
