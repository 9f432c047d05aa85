"""A run skips and names a corrupt checkpoint and resumes from the previous one; without any, it ends with an error."""

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
from interrupted_runs import assert_equal_runs
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from xtk_processes import run_xtk

from xtk.errors import CorruptError
from xtk.files.atomic_files import canonical_json, sha256
from xtk.runs.folder import file_entries, read_recipe, read_run_manifest, verify_files, write_run_manifest
from xtk.runs.resume_point import find_checkpoint

pytestmark = pytest.mark.slow

STATE_FILE = "trainer/rank-00000-of-00001.safetensors"


def find_resume_point(run: Path) -> Any:
    return find_checkpoint(run, read_recipe(run), needs_best=False)


def sign(folder: Path, **changes: Any) -> None:
    """Change values of a manifest and write a matching checksum."""
    content = json.loads((folder / "xtk.json").read_text()) | changes
    content.pop("checksum")
    (folder / "xtk.json").write_text(json.dumps({**content, "checksum": sha256(canonical_json(content))}))


def swap_weights(folder: Path) -> None:
    shutil.copyfile(folder.parent / "checkpoint-2" / "model.safetensors", folder / "model.safetensors")


def swap_state(folder: Path) -> None:
    shutil.copyfile(folder.parent / "checkpoint-2" / STATE_FILE, folder / STATE_FILE)


def replace_with_other_step(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "checkpoint-2", folder)


def truncate_state(folder: Path) -> None:
    with (folder / STATE_FILE).open("r+b") as stream:
        stream.truncate(1000)


def link_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")


def link_trainer_folder(folder: Path) -> None:
    (folder / "trainer").rename(folder.parent / "elsewhere")
    (folder / "trainer").symlink_to(folder.parent / "elsewhere")


def add_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/model"}')


def change_state(folder: Path, key: str, change: Callable[[dict[str, Any], dict[str, Any], str], None]) -> None:
    """Change the tensors of the optimizer state and their entries in the header, and write matching checksums."""
    with safe_open(folder / STATE_FILE, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    header = json.loads(metadata["xtk"])
    stored = header["sharded_state"]
    name = next(name for name in sorted(stored) if stored[name]["tensor"].startswith(f"{key}."))
    change(tensors, stored, name)
    save_file(tensors, folder / STATE_FILE, {"xtk": json.dumps(header)})
    folders = {"trainer": file_entries(folder / "trainer", [Path(STATE_FILE).name])}
    sign(folder, folders=folders)


def drop_tensor(tensors: dict[str, Any], stored: dict[str, Any], name: str) -> None:
    del tensors[name], stored[name]


def to_bfloat16(tensors: dict[str, Any], stored: dict[str, Any], name: str) -> None:
    tensors[name], stored[name]["dtype"] = tensors[name].bfloat16(), "bfloat16"


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("exp_avg", drop_tensor, "has no exp_avg"), ("step", drop_tensor, "has no step"),
        ("exp_avg_sq", to_bfloat16, "has the dtype torch.bfloat16, not torch.float32"),
        ("step", to_bfloat16, "has the dtype torch.bfloat16, not torch.float32"),
    ],
)  # fmt: skip
def test_incomplete_optimizer_state_is_refused(finished_run, unfinished_run, key, change, message):
    change_state(unfinished_run / "checkpoint-4", key, change)
    arguments, _ = finished_run
    stderr = " ".join(run_xtk(*arguments, unfinished_run, code=1).stderr.split())
    assert message in stderr
    assert "Traceback" not in stderr


ATTACKS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: flip(folder / STATE_FILE, 5000, 6), "does not match its checksum"),
    (lambda folder: flip(folder / "model.safetensors", 9000, 0), "does not match its checksum"),
    (lambda folder: flip(folder / "config.json", 40, 1), "does not match its checksum"),
    (swap_weights, "does not match its checksum"),
    (swap_state, "does not match its checksum"),
    (replace_with_other_step, "manifest is for step 2"),
    (truncate_state, "this file has 1,000 bytes"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "but it is missing"),
    (lambda folder: shutil.rmtree(folder / "trainer"), "this folder is listed in the manifest, but it is missing"),
    (lambda folder: (folder / "xtk.json").unlink(), "this folder has no manifest"),
    (lambda folder: (folder / "xtk.json").write_text("[" * 20_000), "nested more than 100 levels deep"),
    (lambda folder: (folder / "xtk.json").write_text("[]"), "must contain a JSON object"),
    (link_weights, "this is not a regular file"),
    (link_trainer_folder, "this folder is listed in the manifest, but it is missing"),
    (add_adapter, "is not listed in the manifest of its folder"),
    (lambda folder: (folder / "model-9.safetensors").write_bytes(b"x"), "is not listed in the manifest of its folder"),
    (lambda folder: (folder / "trainer" / "more").write_bytes(b"x"), "is not listed in the manifest of its folder"),
    (lambda folder: sign(folder, run_fingerprint="sha256:0"), "the checkpoint was written by a run with other options"),
]


@pytest.mark.parametrize(("attack", "message"), ATTACKS)
def test_corrupt_checkpoint_is_reported_and_the_previous_one_is_used(unfinished_run, capsys, attack, message):
    attack(unfinished_run / "checkpoint-4")
    resume_point = find_resume_point(unfinished_run)
    assert (resume_point.step, resume_point.damaged) == (2, (unfinished_run / "checkpoint-4",))
    stderr = capsys.readouterr().err
    assert "distill: warning: skipping checkpoint-4" in stderr
    assert message in stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"files": []}, {"files": {"model.safetensors": 5}}, {"files": {"../../passwd": {"bytes": 1, "checksum": ""}}},
        {"files": {"/etc/passwd": {"bytes": 1, "checksum": ""}}}, {"files": {"xtk.json": {"bytes": 1, "checksum": ""}}},
        {"files": {"model.safetensors": {"bytes": True, "checksum": "x"}}}, {"folders": {"..": {}}}, {"folders": 7},
        {"folders": {}}, {"folders": {"trainer": {}}}, {"step": "4"}, {"step": -4}, {"num_processes": 10**12},
        {"num_processes": 2}, {"num_processes": None}, {"parallel": 3}, {"kind": None}, {"kind": ["checkpoint"]},
        {"run_fingerprint": None}, {"version": 2}, {"version": "x"},
    ],
)  # fmt: skip
def test_invalid_values_in_a_checkpoint_manifest_are_skipped_or_refused(unfinished_run, finished_run, changes):
    """An attacker writes a matching checksum."""
    sign(unfinished_run / "checkpoint-4", **changes)
    result = run_xtk(*finished_run[0], unfinished_run, code=None)
    assert "Traceback" not in result.stderr
    if result.returncode:
        assert "checkpoint-4" in result.stderr
    else:
        assert "skipping checkpoint-4" in result.stderr
        assert_equal_runs(unfinished_run, finished_run[1])


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": {}}, {"recipe": 5}, {"metrics": {"loss": "x"}}, {"metrics": []}, {"steps": "6"}, {"steps": None},
        {"best": {"step": "x"}}, {"best": []}, {"files": {"../model.safetensors": {"bytes": 1, "checksum": ""}}},
        {"recipe": {"losses": ["ce"], "inputs": {"student": {"weights": "", "tokenizer": ""}}, "student_model": 7}},
    ],
)  # fmt: skip
def test_invalid_values_in_a_run_manifest_are_refused(finished_run, tmp_path, changes):
    run = Path(shutil.copytree(finished_run[1], tmp_path / "run"))
    sign(run, **changes)
    for command in (
        ["inspect", run], ["export", run, "-o", tmp_path / "out"], ["report", run, "-o", tmp_path / "page.html"],
        [*finished_run[0], run],
    ):  # fmt: skip
        result = run_xtk(*command, code=1)
        assert "Traceback" not in result.stderr
        assert "run/xtk.json" in result.stderr
        assert result.stdout == ""


def test_flipped_bit_in_the_optimizer_state_resumes_from_the_previous_checkpoint(finished_run, unfinished_run):
    """Regression test: this flip once gave a loss of 4e31 and exit code 0."""
    state_file = unfinished_run / "checkpoint-4" / STATE_FILE
    tensors = load_file(state_file)
    name = next(name for name in tensors if name.startswith("exp_avg_sq") and tensors[name].numel() > 100)
    content = state_file.read_bytes()
    offset = content.index(tensors[name].numpy().tobytes()) + 3
    flip(state_file, offset, 6)
    result = run_xtk(*finished_run[0], unfinished_run)
    assert "warning: skipping checkpoint-4: this file does not match its checksum" in result.stderr
    assert str(state_file) in result.stderr
    assert "resuming from" in result.stderr
    assert "checkpoint-2" in result.stderr
    assert_equal_runs(unfinished_run, finished_run[1])
    manifest = read_run_manifest(unfinished_run / "checkpoint-4", ("checkpoint",))
    verify_files(unfinished_run / "checkpoint-4", manifest)  # the checkpoint was written again


def test_corrupt_checkpoint_does_not_displace_an_intact_one(finished_run, unfinished_run):
    flip(unfinished_run / "checkpoint-4" / STATE_FILE, 5000, 6)
    run_xtk(
        *finished_run[0], unfinished_run, "--save-steps", 3, "--save-total-limit", 1, "--max-seconds", 0.001, code=75
    )
    assert sorted(path.name for path in unfinished_run.glob("checkpoint-*")) == ["checkpoint-3"]
    run_xtk(*finished_run[0], unfinished_run)
    assert_equal_runs(unfinished_run, finished_run[1])


def test_run_with_only_corrupt_checkpoints_restarts_only_with_force(finished_run, unfinished_run):
    for step in (2, 4):
        flip(unfinished_run / f"checkpoint-{step}" / "model.safetensors", 7000, 3)
    result = run_xtk(*finished_run[0], unfinished_run, code=1)
    assert "all checkpoints of this run are corrupt" in result.stderr
    assert "--force to train again from step 0" in result.stderr
    run_xtk(*finished_run[0], unfinished_run, "--force")
    assert_equal_runs(unfinished_run, finished_run[1])


def test_checkpoint_and_recipe_of_older_versions_are_refused(finished_run, unfinished_run):
    sign(unfinished_run / "checkpoint-4", version=2)
    result = run_xtk(*finished_run[0], unfinished_run, code=1)
    assert "this checkpoint has version 2; this xtk reads version 4" in result.stderr
    recipe = json.loads((unfinished_run / "recipe.json").read_text())
    (unfinished_run / "recipe.json").write_text(json.dumps({**recipe, "version": 1}))
    result = run_xtk(*finished_run[0], unfinished_run, code=1)
    assert "this recipe of xtk distill has version 1; this xtk reads version 3" in result.stderr


def test_corrupt_best_weights_are_found_before_the_run_resumes(unfinished_run):
    checkpoint, best = unfinished_run / "checkpoint-4", unfinished_run / "best-3"
    best.mkdir()
    shutil.copyfile(checkpoint / "model.safetensors", best / "model.safetensors")
    fingerprint = read_run_manifest(checkpoint)["run_fingerprint"]
    write_run_manifest(
        best, {"kind": "best", "step": 3, "run_fingerprint": fingerprint}, file_entries(best, ["model.safetensors"])
    )
    sign(checkpoint, best_step=3, best_bits_per_byte=2.5)
    assert find_checkpoint(unfinished_run, read_recipe(unfinished_run), needs_best=True).step == 4
    flip(best / "model.safetensors", 5000, 2)
    assert find_checkpoint(unfinished_run, read_recipe(unfinished_run), needs_best=True).step == 2
    assert find_checkpoint(unfinished_run, read_recipe(unfinished_run), needs_best=False).step == 4


def test_inspect_and_export_verify_all_files(finished_run, tmp_path):
    run = Path(shutil.copytree(finished_run[1], tmp_path / "run"))
    for folder in (run, run / "checkpoint-4"):
        record = json.loads(run_xtk("inspect", folder, "--verify", "--json").stdout)
        assert record["statistics"]["files_verified"] >= 5
    weights = load_file(run / "checkpoint-2" / "model.safetensors")
    weights["model.norm.weight"] += torch.eye(len(weights["model.norm.weight"]))[0] / 1024
    save_file(weights, run / "checkpoint-2" / "model.safetensors", {"format": "pt"})
    flip(run / "checkpoint-4" / STATE_FILE, 5000, 6)
    flip(run / "model.safetensors", 9000, 0)
    for folder in ("", "checkpoint-2", "checkpoint-4"):
        result = run_xtk("inspect", run / folder, "--verify", code=1)
        assert "this file does not match its checksum" in result.stderr
        result = run_xtk("export", run, "--checkpoint", folder.partition("-")[2] or 0, "-o", tmp_path / "out", code=1)
        assert "this file does not match its checksum" in result.stderr
        assert not (tmp_path / "out").exists()


def test_manifest_of_a_finished_run_lists_every_file(finished_run):
    manifest = read_run_manifest(finished_run[1], ("student",))
    other_files = {path.name for path in finished_run[1].iterdir() if path.is_file()} - {"xtk.json"}
    assert set(manifest["files"]) == other_files
    assert {"recipe.json", "metrics.jsonl", "README.md", "config.json", "model.safetensors"} <= other_files
    verify_files(finished_run[1], manifest)


def assert_all_detected(tally: Tally, record_property: Any) -> None:
    print(tally)
    record_property("flips", str(tally))
    assert not tally.wrong
    assert not tally.tracebacks


def test_random_bit_flips_are_detected(unfinished_run, finished_run, record_property):
    tally = flip_checkpoint(unfinished_run, 4, 4 * len(files_of(unfinished_run / "checkpoint-4")))
    assert_all_detected(tally + flip_student(finished_run[1], 40), record_property)


@pytest.mark.long
def test_hundreds_of_random_bit_flips_are_detected(unfinished_run, finished_run, record_property):
    tally = flip_checkpoint(unfinished_run, 4, 500, seed=1) + flip_student(finished_run[1], 300, seed=1)
    assert tally.flips == 800
    assert_all_detected(tally, record_property)


def test_tally_counts_undetected_flips(tmp_path):
    """A reader that accepts everything makes every flip wrong, so that the tests above would fail."""
    (tmp_path / "numbers").write_bytes(bytes(100))
    tally = flip_randomly([tmp_path / "numbers"], (tmp_path / "numbers").read_bytes, 10, 0)
    assert (tally.flips, len(tally.wrong), tally.refused) == (10, 10, 0)
    with pytest.raises(CorruptError):
        raise CorruptError(str(tally))
