"""A damaged checkpoint is named and the one before is taken; where none is left the run ends with an error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bit_flips import Tally, flip, flip_randomly
from checkpoint_bit_flips import files_of, flip_checkpoint, flip_student
from interrupted_runs import assert_same
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from xtk_processes import run_xtk

from xtk.artifacts.atomic_files import canonical_json, sha256
from xtk.artifacts.run_folders import file_entries, read_recipe, read_run_manifest, verify_files, write_run_manifest
from xtk.errors import CorruptError
from xtk.training.resume_point import find_checkpoint

pytestmark = pytest.mark.slow

PART = "trainer/rank-00000-of-00001.safetensors"


def use(run: Path) -> Any:
    return find_checkpoint(run, read_recipe(run), needs_best=False)


def sign(folder: Path, **changes: Any) -> None:
    """Change values of a manifest, and write the checksum that fits them."""
    content = json.loads((folder / "xtk.json").read_text()) | changes
    content.pop("checksum")
    (folder / "xtk.json").write_text(json.dumps({**content, "checksum": sha256(canonical_json(content))}))


def swap_weights(folder: Path) -> None:
    shutil.copyfile(folder.parent / "checkpoint-2" / "model.safetensors", folder / "model.safetensors")


def swap_state(folder: Path) -> None:
    shutil.copyfile(folder.parent / "checkpoint-2" / PART, folder / PART)


def other_step(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "checkpoint-2", folder)


def cut_short(folder: Path) -> None:
    with (folder / PART).open("r+b") as stream:
        stream.truncate(1000)


def link(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")


def link_of_a_folder(folder: Path) -> None:
    (folder / "trainer").rename(folder.parent / "elsewhere")
    (folder / "trainer").symlink_to(folder.parent / "elsewhere")


def extra_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/model"}')


def change_state(folder: Path, key: str, change: Callable[[dict[str, Any], dict[str, Any], str], None]) -> None:
    """Change the tensors of an optimizer's state and what the header states of them, with right checksums."""
    with safe_open(folder / PART, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    header = json.loads(metadata["xtk"])
    stored = header["sharded_state"]
    name = next(name for name in sorted(stored) if stored[name]["tensor"].startswith(f"{key}."))
    change(tensors, stored, name)
    save_file(tensors, folder / PART, {"xtk": json.dumps(header)})
    folders = {"trainer": file_entries(folder / "trainer", [Path(PART).name])}
    sign(folder, folders=folders)


def drop(tensors: dict[str, Any], stored: dict[str, Any], name: str) -> None:
    del tensors[name], stored[name]


def to_bfloat16(tensors: dict[str, Any], stored: dict[str, Any], name: str) -> None:
    tensors[name], stored[name]["dtype"] = tensors[name].bfloat16(), "bfloat16"


@pytest.mark.parametrize(
    ("key", "change", "told"),
    [
        ("exp_avg", drop, "has no exp_avg"), ("step", drop, "has no step"),
        ("exp_avg_sq", to_bfloat16, "has the dtype torch.bfloat16, not torch.float32"),
        ("step", to_bfloat16, "has the dtype torch.bfloat16, not torch.float32"),
    ],
)  # fmt: skip
def test_an_incomplete_state_of_the_optimizer_ends_in_a_sentence(trained, unfinished, key, change, told):
    change_state(unfinished / "checkpoint-4", key, change)
    arguments, _ = trained
    stderr = " ".join(run_xtk(*arguments, unfinished, code=1).stderr.split())
    assert told in stderr
    assert "Traceback" not in stderr


ATTACKS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: flip(folder / PART, 5000, 6), "does not match its checksum"),
    (lambda folder: flip(folder / "model.safetensors", 9000, 0), "does not match its checksum"),
    (lambda folder: flip(folder / "config.json", 40, 1), "does not match its checksum"),
    (swap_weights, "does not match its checksum"),
    (swap_state, "does not match its checksum"),
    (other_step, "manifest is for step 2"),
    (cut_short, "this file has 1,000 bytes"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "but it is missing"),
    (lambda folder: shutil.rmtree(folder / "trainer"), "this folder is listed in the manifest, but it is missing"),
    (lambda folder: (folder / "xtk.json").unlink(), "this folder has no manifest"),
    (lambda folder: (folder / "xtk.json").write_text("[" * 20_000), "this file is not JSON"),
    (lambda folder: (folder / "xtk.json").write_text("[]"), "must contain a JSON object"),
    (link, "this is not a regular file"),
    (link_of_a_folder, "this folder is listed in the manifest, but it is missing"),
    (extra_adapter, "is not listed in the manifest of its folder"),
    (lambda folder: (folder / "model-9.safetensors").write_bytes(b"x"), "is not listed in the manifest of its folder"),
    (lambda folder: (folder / "trainer" / "more").write_bytes(b"x"), "is not listed in the manifest of its folder"),
    (lambda folder: sign(folder, run_fingerprint="sha256:0"), "the checkpoint was written by a run with other options"),
]


@pytest.mark.parametrize(("attack", "told"), ATTACKS)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(unfinished, capsys, attack, told):
    attack(unfinished / "checkpoint-4")
    resumed = use(unfinished)
    assert (resumed.step, resumed.damaged) == (2, (unfinished / "checkpoint-4",))
    noted = capsys.readouterr().err
    assert "distill: warning: skipping checkpoint-4" in noted
    assert told in noted


@pytest.mark.parametrize(
    "changes",
    [
        {"files": []}, {"files": {"model.safetensors": 5}}, {"files": {"../../passwd": {"bytes": 1, "checksum": ""}}},
        {"files": {"/etc/passwd": {"bytes": 1, "checksum": ""}}}, {"files": {"xtk.json": {"bytes": 1, "checksum": ""}}},
        {"files": {"model.safetensors": {"bytes": True, "checksum": "x"}}}, {"folders": {"..": {}}}, {"folders": 7},
        {"folders": {}}, {"folders": {"trainer": {}}}, {"step": "4"}, {"step": -4}, {"num_processes": 10**12},
        {"num_processes": 2}, {"num_processes": None}, {"parallel": 3}, {"kind": None}, {"kind": ["checkpoint"]},
        {"run_fingerprint": None}, {"metrics_file": {"bytes": "x"}}, {"best_step": "x"}, {"tokens": -1},
        {"tokens": 1e300}, {"skipped_steps": {}}, {"best_bits_per_byte": "nan"}, {"version": 2}, {"version": "x"},
    ],
)  # fmt: skip
def test_values_of_a_manifest_are_checked_before_they_are_used(unfinished, trained, changes):
    """A writer with bad intentions writes a checksum that fits."""
    sign(unfinished / "checkpoint-4", **changes)
    done = run_xtk(*trained[0], unfinished, code=None)
    assert "Traceback" not in done.stderr
    if done.returncode:
        assert "checkpoint-4" in done.stderr
    else:
        assert "skipping checkpoint-4" in done.stderr or changes.keys() <= {"metrics_file"}
        assert_same(unfinished, trained[1])


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": {}}, {"recipe": 5}, {"metrics": {"loss": "x"}}, {"metrics": []}, {"steps": "6"}, {"steps": None},
        {"best": {"step": "x"}}, {"best": []}, {"files": {"../model.safetensors": {"bytes": 1, "checksum": ""}}},
        {"recipe": {"losses": ["ce"], "inputs": {"student": {"weights": "", "tokenizer": ""}}, "student_model": 7}},
    ],
)  # fmt: skip
def test_values_of_a_finished_run_are_checked_before_they_are_used(trained, tmp_path, changes):
    run = Path(shutil.copytree(trained[1], tmp_path / "run"))
    sign(run, **changes)
    for command in (
        ["inspect", run], ["export", run, "-o", tmp_path / "out"], ["report", run, "-o", tmp_path / "page.html"],
        [*trained[0], run],
    ):  # fmt: skip
        done = run_xtk(*command, code=1)
        assert "Traceback" not in done.stderr
        assert "run/xtk.json" in done.stderr
        assert done.stdout == ""


def test_a_flipped_bit_in_the_optimizer_costs_two_steps_and_no_number(trained, unfinished):
    """It gave a loss of 4e31 and exit code 0."""
    part = unfinished / "checkpoint-4" / PART
    state = load_file(part)
    name = next(name for name in state if name.startswith("exp_avg_sq") and state[name].numel() > 100)
    before = part.read_bytes()
    place = before.index(state[name].numpy().tobytes()) + 3
    flip(part, place, 6)
    done = run_xtk(*trained[0], unfinished)
    assert "warning: skipping checkpoint-4: this file does not match its checksum" in done.stderr
    assert str(part) in done.stderr
    assert "resuming from" in done.stderr
    assert "checkpoint-2" in done.stderr
    assert_same(unfinished, trained[1])
    stated = read_run_manifest(unfinished / "checkpoint-4", ("checkpoint",))
    verify_files(unfinished / "checkpoint-4", stated)  # it was written again


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(trained, unfinished):
    flip(unfinished / "checkpoint-4" / PART, 5000, 6)
    run_xtk(*trained[0], unfinished, "--save-steps", 3, "--save-total-limit", 1, "--max-seconds", 0.001, code=75)
    assert sorted(path.name for path in unfinished.glob("checkpoint-*")) == ["checkpoint-3"]
    run_xtk(*trained[0], unfinished)
    assert_same(unfinished, trained[1])


def test_where_no_checkpoint_is_left_the_run_does_not_begin_again_silently(trained, unfinished):
    for step in (2, 4):
        flip(unfinished / f"checkpoint-{step}" / "model.safetensors", 7000, 3)
    done = run_xtk(*trained[0], unfinished, code=1)
    assert "all checkpoints of this run are corrupt" in done.stderr
    assert "--force to train again from step 0" in done.stderr
    run_xtk(*trained[0], unfinished, "--force")
    assert_same(unfinished, trained[1])


def test_metrics_that_were_altered_are_not_certified(trained, unfinished):
    lines = (unfinished / "metrics.jsonl").read_text()
    (unfinished / "metrics.jsonl").write_text(lines.replace('"loss": 6', '"loss": 2', 1))
    done = run_xtk(*trained[0], unfinished, code=1)
    assert "the metrics file has changed since checkpoint-4 was written" in done.stderr
    (unfinished / "metrics.jsonl").unlink()
    run_xtk(*trained[0], unfinished)
    assert (unfinished / "model.safetensors").read_bytes() == (trained[1] / "model.safetensors").read_bytes()


def test_an_older_checkpoint_and_an_older_run_are_refused_by_their_versions(trained, unfinished):
    sign(unfinished / "checkpoint-4", version=2)
    done = run_xtk(*trained[0], unfinished, code=1)
    assert "this checkpoint has version 2; this xtk reads version 4" in done.stderr
    (unfinished / "recipe.json").write_text(json.dumps(read_recipe(unfinished)))
    done = run_xtk(*trained[0], unfinished, code=1)
    assert "this recipe of xtk distill has version 1; this xtk reads version 3" in done.stderr


def test_best_weights_that_are_damaged_are_found_before_the_run_goes_on(unfinished):
    checkpoint, best = unfinished / "checkpoint-4", unfinished / "best-3"
    best.mkdir()
    shutil.copyfile(checkpoint / "model.safetensors", best / "model.safetensors")
    run = read_run_manifest(checkpoint)["run_fingerprint"]
    write_run_manifest(
        best, {"kind": "best", "step": 3, "run_fingerprint": run}, file_entries(best, ["model.safetensors"])
    )
    sign(checkpoint, best_step=3, best_bits_per_byte=2.5)
    assert find_checkpoint(unfinished, read_recipe(unfinished), needs_best=True).step == 4
    flip(best / "model.safetensors", 5000, 2)
    assert find_checkpoint(unfinished, read_recipe(unfinished), needs_best=True).step == 2
    assert find_checkpoint(unfinished, read_recipe(unfinished), needs_best=False).step == 4


def test_inspect_and_export_compare_all_files(trained, tmp_path):
    run = Path(shutil.copytree(trained[1], tmp_path / "run"))
    for place in (run, run / "checkpoint-4"):
        told = json.loads(run_xtk("inspect", place, "--verify", "--json").stdout)
        assert told["statistics"]["files_verified"] >= 5
    weights = load_file(run / "checkpoint-2" / "model.safetensors")
    weights["model.norm.weight"] += torch.eye(len(weights["model.norm.weight"]))[0] / 1024
    save_file(weights, run / "checkpoint-2" / "model.safetensors", {"format": "pt"})
    flip(run / "checkpoint-4" / PART, 5000, 6)
    flip(run / "model.safetensors", 9000, 0)
    for place in ("", "checkpoint-2", "checkpoint-4"):
        done = run_xtk("inspect", run / place, "--verify", code=1)
        assert "this file does not match its checksum" in done.stderr
        done = run_xtk("export", run, "--checkpoint", place.partition("-")[2] or 0, "-o", tmp_path / "out", code=1)
        assert "this file does not match its checksum" in done.stderr
        assert not (tmp_path / "out").exists()


def test_a_finished_run_states_every_file_of_it(trained):
    stated = read_run_manifest(trained[1], ("student",))
    beside = {path.name for path in trained[1].iterdir() if path.is_file()} - {"xtk.json"}
    assert set(stated["files"]) == beside
    assert {"recipe.json", "metrics.jsonl", "README.md", "config.json", "model.safetensors"} <= beside
    verify_files(trained[1], stated)


def counted(tally: Tally, record_property: Any) -> None:
    print(tally)
    record_property("flips", str(tally))
    assert not tally.wrong
    assert not tally.tracebacks


def test_of_some_random_flips_none_is_used(unfinished, trained, record_property):
    tally = flip_checkpoint(unfinished, 4, 4 * len(files_of(unfinished / "checkpoint-4")))
    counted(tally + flip_student(trained[1], 40), record_property)


@pytest.mark.long
def test_so_it_is_with_hundreds(unfinished, trained, record_property):
    tally = flip_checkpoint(unfinished, 4, 500, seed=1) + flip_student(trained[1], 300, seed=1)
    assert tally.flips == 800
    counted(tally, record_property)


def test_a_tally_counts_what_is_wrong(tmp_path):
    """The tests above fail where a reader takes what is damaged: here one that takes everything."""
    (tmp_path / "numbers").write_bytes(bytes(100))
    tally = flip_randomly([tmp_path / "numbers"], (tmp_path / "numbers").read_bytes, 10, 0)
    assert (tally.flips, len(tally.wrong), tally.refused) == (10, 10, 0)
    with pytest.raises(CorruptError):
        raise CorruptError(str(tally))
