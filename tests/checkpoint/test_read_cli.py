"""Promises of `python -m trainer checkpoints`: what a run holds, whether it is whole, and mistakes as lines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.checkpoint.loading import Unreachable
from tests.checkpoint.stores import FlippedOnce
from tests.checkpoint.written import (
    flip_bit,
    manifests_of,
    put_lease,
    sample_state,
    split_state,
    write_checkpoint,
    write_steps,
)
from trainer.__main__ import main
from trainer.checkpoint import stored_config
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.lineage.audit import audit, lost_commits
from trainer.checkpoint.lineage.history import History, read_history
from trainer.checkpoint.lineage.lease import LeaseRecord, LineageEntry
from trainer.checkpoint.load.parts import read_manifest
from trainer.checkpoint.load.verify import verify_checkpoint
from trainer.config import CheckpointConfig, Config
from trainer.errors import EXIT_CONFIG
from trainer.metrics.records import encode
from trainer.metrics.runlog import append_event
from trainer.storage import ObjectStore, StorageError
from trainer.storage.local import LocalStore

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A run whose third job went on from step 20 of the first."""
    store = LocalStore(str(tmp_path / "run"))
    write_steps(store, [10, 20, 30], generation=1, metric=2.5)
    write_steps(store, [25], generation=3)
    put_lease(store, 3, (1, None), (3, ManifestId(1, 20)))
    return store


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*words: str) -> tuple[int, str, str]:
        code = main(["checkpoints", *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def damage(store: ObjectStore, manifest_id: ManifestId, rank: int = 1) -> str:
    key = read_manifest(store, manifest_id).parts[rank].data_key
    flip_bit(store, key, 99)
    return key


def test_list_shows_every_checkpoint_and_which_of_them_count(store: LocalStore, call: Call) -> None:
    flip_bit(store, ManifestId(1, 10).key, 40)
    code, out, _ = call("list", store.uri, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["generation"] == 3
    states = [(row["generation"], row["step"], row["state"]) for row in found["checkpoints"]]
    assert states == [(3, 25, "live"), (1, 30, "dead"), (1, 20, "live"), (1, 10, "damaged")]
    assert found["checkpoints"][1]["eval_loss"] == 2.5
    assert found["checkpoints"][0]["ranks"] == 2
    assert found["checkpoints"][0]["bytes"] > 0
    code, out, _ = call("list", store.uri)
    assert code == 0
    assert all(word in out for word in ("25", "dead", "2.5000", "2026-01-02T03:04:05Z", ManifestId(1, 10).key))


@pytest.mark.slow
def test_verify_passes_whole_checkpoints_counting_their_bytes(store: LocalStore, call: Call) -> None:
    code, out, _ = call("verify", store.uri, "--json")
    found = json.loads(out)
    assert (code, found["ok"]) == (0, True)
    assert [row["id"]["step"] for row in found["checkpoints"]] == [25, 20, 10]
    assert found["checkpoints"][0]["bytes"] == read_manifest(store, ManifestId(3, 25)).data_bytes


@pytest.mark.slow
def test_verify_ends_with_1_and_names_the_damaged_place(store: LocalStore, call: Call) -> None:
    key = damage(store, ManifestId(1, 20))
    code, out, err = call("verify", store.uri)
    assert code == 1
    assert f"  rank 1, {key}, block 0: checksum" in out
    assert "step 20 (generation 1): DAMAGED" in out
    assert "step 25 (generation 3): whole" in out
    assert "verify: " in err
    assert call("verify", store.uri, "--step", "25")[0] == 0
    assert call("verify", store.uri, "--step", "20")[0] == 1


@pytest.mark.slow
def test_verify_names_all_damage_of_a_checkpoint_not_first_only(store: LocalStore) -> None:
    manifest = read_manifest(store, ManifestId(1, 20))
    damage(store, manifest.id, 0)
    damage(store, manifest.id, 1)
    assert len(verify_checkpoint(store, manifest.id).problems) == 2
    store.delete(manifest.parts[0].data_key)
    store.delete(manifest.parts[1].index_key)
    problems = verify_checkpoint(store, manifest.id).problems
    assert [("missing" in line) for line in problems] == [True, True]
    store.delete(manifest.id.key)
    assert "the manifest is missing" in verify_checkpoint(store, manifest.id).problems[0]


PART = "metrics/000001-00002.jsonl"


def swap(other: str, store: ObjectStore) -> None:
    store.put(PART, store.read(f"{other}.jsonl")[0])


@pytest.fixture
def told(store: LocalStore) -> LocalStore:
    """The same run with its config and log: every commit is told, and that an older step 15 was pruned."""
    table = {"run": {"uri": "x"}, "task": {"name": "t"}, "train": {"steps": 9, "global_batch": 1, "micro_batch": 1}}
    config = Config.model_validate({**table, "checkpoint": {"keep_last": 2}})
    stored_config.record(store, None, config, {}, {})
    for generation, steps in ((1, (10, 15, 20, 30)), (3, (25,))):
        for step in steps:
            append_event(store, generation, "checkpoint_committed", {"step": step})
    append_event(store, 1, "checkpoints_pruned", {"removed": [ManifestId(1, 15).key]})
    for part in range(3):
        steps = [encode({"step": 3 * part + number, "loss": 2.0, "attempt": 1}) for number in range(3)]
        store.put(f"metrics/000001-{part:05d}.jsonl", b"".join(steps))
    return store


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda store: flip_bit(store, "config.toml", 30), "/config.toml = '…': is damaged: "),
        (lambda store: store.delete("config.toml"), "config.toml: missing"),
        (lambda store: flip_bit(store, "metrics/000001-00002.jsonl", 0), "metrics/000001-00002.jsonl line 1: "),
        (lambda store: flip_bit(store, "events/000003-00000.jsonl", 0), "events/000003-00000.jsonl line 1: "),
        (lambda store: store.delete("metrics/000001-00001.jsonl"), "metrics/000001-00001.jsonl: missing"),
        (
            lambda store: swap("metrics/000001-00000", store),
            f"{PART}: holds the records of metrics/000001-00000.jsonl; ",
        ),
        (lambda store: store.put(PART, encode({"step": 30, "attempt": 1})), f"{PART}: its steps do not follow"),
        (lambda store: store.put(PART, b""), f"{PART}: is empty; "),
        (lambda store: swap("events/000003-00000", store), f"{PART}: holds records of attempt 3; "),
        (lambda store: store.delete(ManifestId(3, 25).key), f"{ManifestId(3, 25).key}: missing, though the run "),
    ],
    ids=[
        "config",
        "no config",
        "metrics",
        "events",
        "no metrics",
        "copy",
        "other steps",
        "empty",
        "other attempt",
        "manifest",
    ],
)
def test_verify_names_what_is_damaged_or_lost_beside_checkpoints(
    told: LocalStore, call: Call, harm: Callable[[ObjectStore], object], named: str
) -> None:
    code, out, _ = call("verify", told.uri)
    assert (code, "DAMAGED" in out) == (0, False), "an old commit that nobody has seen pruned is within the settings"
    harm(told)
    code, out, _ = call("verify", told.uri)
    assert code == 1
    assert out.count("DAMAGED") == 1
    assert named in out.partition("beside the checkpoints: DAMAGED or lost\n")[2]
    assert json.loads(call("verify", told.uri, "--json")[1])["ok"] is False


def test_run_whose_manifests_were_all_deleted_is_not_a_young_one(told: LocalStore, call: Call) -> None:
    for manifest_id in manifests_of(told):
        told.delete(manifest_id.key)
    code, out, _ = call("verify", told.uri)
    assert code == 1
    assert out.count("the run recorded its commit") == 2, "as many as no pruning ever removes"


def test_checkpoint_a_job_began_from_is_missed_without_an_event() -> None:
    began_from = ManifestId(1, 20)
    lineage = (LineageEntry(1, None), LineageEntry(3, began_from))
    history = History(LeaseRecord(3, "job", "now", "nonce", lineage), [ManifestId(3, 25)], [])
    assert lost_commits(history, [], CheckpointConfig(keep_last=2)) == [began_from]


def test_what_the_command_prunes_is_in_the_events_and_not_lost(told: LocalStore, call: Call) -> None:
    raw, etag = told.read("config.toml")
    lines = [line for line in raw.splitlines(keepends=True) if not line.startswith(b"# record_crc64nvme")]
    told.put("config.toml", b"".join(lines).replace(b"keep_last = 2", b"keep_last = 9"), if_match=etag)
    assert call("prune", told.uri, "--keep-last", "2", "--no-keep-best")[0] == 0
    assert ManifestId(1, 10) not in manifests_of(told)
    assert call("verify", told.uri)[0] == 0


def test_what_only_the_wire_damaged_is_read_again(told: LocalStore) -> None:
    assert (
        audit(FlippedOnce(told.uri, "metrics/000001-00000.jsonl", "config.toml"), read_history(told), CheckpointConfig)
        == []
    )


def test_verify_also_checks_that_boxes_make_whole_tensors(store: LocalStore) -> None:
    ranks = split_state(sample_state(40), 2)
    del ranks[1]["model/embed.weight"]
    write_checkpoint(store, 40, ranks, generation=3)
    assert "model/embed.weight" in verify_checkpoint(store, ManifestId(3, 40)).problems[0]


def test_a_store_that_does_not_answer_is_no_damage(store: LocalStore) -> None:
    with pytest.raises(StorageError, match="connection refused"):
        verify_checkpoint(Unreachable(store.uri), ManifestId(1, 20))


def test_prune_keeps_what_the_runs_settings_keep_and_flags_win(store: LocalStore, call: Call) -> None:
    write_steps(store, [35, 45, 55], generation=3)
    config = "[recorded]\nformat = 1\n[checkpoint]\nkeep_last = 4\nkeep_best = false\n"
    store.put("config.toml", config.encode())
    code, out, _ = call("prune", store.uri, "--dry-run", "--json")
    assert code == 0
    assert [row["step"] for row in json.loads(out)["removed"]] == [10, 20]
    code, out, _ = call("prune", store.uri, "--keep-last", "2", "--keep-best")
    assert "removed step 20, step 25, step 35; kept step 55, step 45, step 10" in out
    assert [i.step for i in manifests_of(store)] == [10, 30, 45, 55]


def test_export_writes_the_newest_live_weights_under_our_names(store: LocalStore, call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet" / "there"
    code, out, _ = call("export", store.uri, "--out", str(folder), "--names", "own", "--json")
    assert code == 0
    assert json.loads(out)["step"] == 25
    found = load_file(folder / "model.safetensors")
    expected = sample_state(25)["model/embed.weight"]
    assert found["embed.weight"].equal(expected)


def test_export_without_a_task_says_how_to_go_on(store: LocalStore, call: Call, tmp_path: Path) -> None:
    code, _, err = call("export", store.uri, "--out", str(tmp_path / "weights"))
    assert code == EXIT_CONFIG
    assert "--names own" in err
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["list", "{empty}"], "holds no run: there is no lease.json"),
        (["list", "{empty}/absent"], "there is no such folder"),
        (["verify", "{run}", "--step", "7"], "--step = 7: {run} has no checkpoint of this step; allowed: 25, 20, 10"),
        (["prune", "{run}", "--keep-last", "1"], "checkpoint.keep_last = 1: not allowed; allowed: >= 2"),
        (["prune", "{run}", "--keep-every-steps", "-5"], "checkpoint.keep_every_steps = -5: not allowed"),
        (["export", "{run}", "--out", "{run}", "--names", "own"], "exists and is not an empty folder"),
        (["list", "ftp://x"], "is an unknown kind of URI"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    store: LocalStore, call: Call, tmp_path: Path, words: list[str], expected: str
) -> None:
    (tmp_path / "empty").mkdir()
    names: dict[str, Any] = {"run": store.uri, "empty": tmp_path / "empty"}
    code, _, err = call(*(word.format(**names) for word in words))
    lines = [line for line in err.splitlines() if not line.startswith("export:")]
    assert code == EXIT_CONFIG
    assert len(lines) == 1
    assert expected.format(**names) in lines[0]


def test_a_run_without_a_commit_has_nothing_to_verify_or_export(call: Call, tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "young"))
    put_lease(store, 1, (1, None))
    assert call("verify", store.uri)[0] == EXIT_CONFIG
    assert call("export", store.uri, "--out", str(tmp_path / "weights"))[0] == EXIT_CONFIG
    code, out, _ = call("list", store.uri, "--json")
    assert (code, json.loads(out)["checkpoints"]) == (0, [])


def test_looking_after_a_run_needs_no_torch() -> None:
    code = "import sys, trainer.checkpoint.load.verify, trainer.checkpoint.lineage.history; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
