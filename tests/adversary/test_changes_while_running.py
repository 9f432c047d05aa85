"""Files that other programs replace after a command has checked them and before it uses them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_inputs
from xtk_processes import run_xtk

from xtk.cache.teacher_logprobs import make_support
from xtk.errors import MismatchError, XtkError
from xtk.files.output import Output
from xtk.files.run_names import list_checkpoints
from xtk.losses.spec import parse_losses
from xtk.models.resolver import ModelRef
from xtk.models.student_model_setup import StudentModelConfig
from xtk.publish import student_export
from xtk.runs.checkpoint import CheckpointSaver
from xtk.runs.folder import read_recipe
from xtk.runs.resume_point import RUN_FOLDER, ResumePoint, prepare_run_folder
from xtk.teachers.cache_build_config import CacheRequest, open_teacher
from xtk.teachers.online_teacher import parse_online_teacher
from xtk.teachers.transformers import TransformersTeacher
from xtk.text.tokenizer import Tokenizer
from xtk.training.distill import distill
from xtk.training.kinds.open_inputs import open_inputs
from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig


def test_run_finished_by_another_command_in_between_is_not_overwritten(pair, corpus, tmp_path):
    output = tmp_path / "run"
    assert (
        Output(output, RUN_FOLDER).find_finished({"seed": 1}) is None
    )  # two commands that start together both find none
    run_xtk("distill", pair.student, corpus, "--loss", "ce", "--max-steps", 2, "--save-steps", 1, "-o", output)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    with pytest.raises(XtkError, match="has a run with other options or inputs"):
        prepare_run_folder(output, {}, {"seed": 1}, ResumePoint(), force=False)
    recipe = read_recipe(output)
    with pytest.raises(XtkError, match="another command has written into the output folder"):
        prepare_run_folder(output, {}, recipe, ResumePoint(), force=False)
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    (output / "xtk.json").unlink()  # unfinished, with a checkpoint that did not exist at the check
    with pytest.raises(XtkError, match="another command has written into the output folder"):
        prepare_run_folder(output, {}, recipe, ResumePoint(), force=False)
    prepare_run_folder(output, {}, recipe, ResumePoint(*list_checkpoints(output)[-1]), force=False)


def test_student_replaced_while_it_is_loaded_is_refused(pair, corpus, tmp_path):
    student = shutil.copytree(pair.student, tmp_path / "student")
    other = small_inputs.make_student(tmp_path / "other", seed=9)
    config = TrainConfig(losses=tuple(parse_losses(["ce"])), max_steps=1)
    paths = RunPaths(ModelRef(student), (str(corpus),), (), tmp_path / "run")
    inputs = open_inputs(paths, config, Tokenizer(student))
    (other / "model.safetensors").replace(student / "model.safetensors")
    with pytest.raises(MismatchError, match="the files of the student were replaced since the run started"):
        distill(paths, config, LoggingConfig(), inputs, force=False)
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.fixture(scope="module")
def lora_folder(pair, corpus, tmp_path_factory) -> Path:
    """Return a folder with a student, another student, and a LoRA run of the first."""
    folder = tmp_path_factory.mktemp("lora")
    shutil.copytree(pair.student, folder / "student")
    small_inputs.make_student(folder / "other", seed=9)
    run_xtk("distill", folder / "student", corpus, "--loss", "ce", "--lora-r", 4, "--max-steps", 3, "--save-steps", 2,
            "-o", folder / "run")  # fmt: skip
    return folder


@contextlib.contextmanager
def replaced_student(folder: Path) -> Iterator[None]:
    """Replace the weights of the student by those of the other one inside of the context."""
    weights = folder / "student" / "model.safetensors"
    original = weights.read_bytes()
    weights.write_bytes((folder / "other" / "model.safetensors").read_bytes())
    try:
        yield
    finally:
        weights.write_bytes(original)


def test_checkpoint_adapter_is_not_merged_into_another_model(lora_folder, tmp_path):
    for checkpoint in (("run", "--checkpoint", 2), ("run/checkpoint-2",)):
        with replaced_student(lora_folder):
            stderr = run_xtk("export", *checkpoint, "-o", tmp_path / "exported", code=1, cwd=lora_folder).stderr
        assert "the base model of the adapter is not the one of the run" in stderr
        assert not (tmp_path / "exported" / "model.safetensors").exists()
    run_xtk("export", "run", "--checkpoint", 2, "-o", tmp_path / "exported", cwd=lora_folder)


def test_final_adapter_is_not_merged_into_a_replaced_student(lora_folder, corpus, tmp_path, monkeypatch):
    expected = (lora_folder / "run" / "model.safetensors").read_bytes()
    config = TrainConfig(losses=tuple(parse_losses(["ce"])), max_steps=3, preparation=StudentModelConfig(lora_r=4))
    paths = RunPaths(ModelRef(lora_folder / "student"), (str(corpus),), (), tmp_path / "run")
    logging = LoggingConfig(save_steps=2)
    original_write_final = CheckpointSaver.write_final

    def write_final(self, *args: object) -> None:  # as if another program replaced the student after the last step
        with replaced_student(lora_folder):
            original_write_final(self, *args)

    monkeypatch.setattr(CheckpointSaver, "write_final", write_final)
    inputs = open_inputs(paths, config, Tokenizer(paths.student.folder))
    with pytest.raises(MismatchError, match="the files of the student were replaced since the run started"):
        distill(paths, config, logging, inputs, force=False)
    monkeypatch.undo()
    assert not (tmp_path / "run" / "xtk.json").exists()
    distill(paths, config, logging, inputs, force=False)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == expected


def test_run_replaced_while_it_is_exported_is_refused(lora_folder, pair, corpus, tmp_path, monkeypatch):
    run = tmp_path / "run"
    run_xtk("distill", pair.student, corpus, "--loss", "ce", "--max-steps", 1, "-o", run)
    original_load = student_export.load_causal_lm

    def replace_and_load(folder: Path, **options: object) -> object:
        # As if another program replaced the weights after the check.
        (run / "model.safetensors").write_bytes((lora_folder / "other" / "model.safetensors").read_bytes())
        return original_load(folder, **options)

    monkeypatch.setattr(student_export, "load_causal_lm", replace_and_load)
    config = student_export.ExportConfig(run)
    with pytest.raises(XtkError, match="does not match its checksum"):
        student_export.export_student(config, tmp_path / "exported", force=False)
    assert not (tmp_path / "exported").exists()


def test_online_teacher_replaced_while_it_is_loaded_is_refused(pair, corpus, tmp_path):
    shutil.copytree(pair.teacher, tmp_path / "teacher")
    other = small_inputs.make_teacher(tmp_path / "other", seed=9)
    config = TrainConfig(losses=tuple(parse_losses(["byte-kl"])), max_steps=1)
    teacher = parse_online_teacher(f"{tmp_path / 'teacher'}:top_k=8", long_documents="refuse", trust_remote_code=False)
    paths = RunPaths(ModelRef(pair.student), (str(corpus),), (), tmp_path / "run", online_teachers=(teacher,))
    inputs = open_inputs(paths, config, Tokenizer(pair.student))
    (other / "model.safetensors").replace(tmp_path / "teacher" / "model.safetensors")
    with pytest.raises(MismatchError, match="the files of the teacher were replaced while it was loaded"):
        distill(paths, config, LoggingConfig(), inputs, force=False)


def test_user_file_with_the_name_of_the_run_manifest_is_kept(pair, corpus, tmp_path):
    output = tmp_path / "run"
    command = ("distill", pair.student, corpus, "--loss", "ce", "--max-steps", 3, "--save-steps", 1, "-o", output)
    run_xtk(*command, "--max-seconds", 0.001, code=75)
    (output / "xtk.json").write_text("notes of the user")
    run_xtk(*command, code=1)
    assert (output / "xtk.json").read_text() == "notes of the user"
    run_xtk(*command, "--force")
    assert (tmp_path / "run.replaced-1" / "xtk.json").read_text() == "notes of the user"
    run_xtk("inspect", output, "--verify")


@pytest.mark.parametrize("command", ["inspect", "doctor"])
def test_fifo_instead_of_the_weight_file_is_refused(pair, tmp_path, command):
    model = shutil.copytree(pair.student, tmp_path / "model")
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    other_models = (pair.teacher,) if command == "doctor" else ()
    result = run_xtk(command, model, *other_models, code=1)
    assert "the weight file is not a regular file" in result.stdout + result.stderr


def test_evaluate_reports_text_that_the_tokenizer_drops(pair, tmp_path):
    model = shutil.copytree(pair.student, tmp_path / "model")
    content = json.loads((model / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[b-z]"}, "content": ""}
    (model / "tokenizer.json").write_text(json.dumps(content))
    data = small_inputs.write_jsonl(tmp_path / "data.jsonl", small_inputs.sentences(4, seed=2))
    assert "dropped characters count as bytes but cost no bits" in run_xtk("evaluate", model, data).stderr
    assert "dropped" not in run_xtk("evaluate", pair.student, data).stderr


def test_teacher_replaced_while_it_is_loaded_is_refused(pair, tmp_path):
    teacher = shutil.copytree(pair.teacher, tmp_path / "teacher")
    identity = TransformersTeacher.weights_identity(ModelRef(teacher), {})
    request = CacheRequest(ModelRef(teacher, name="teacher"), support=make_support("top-k"))
    open_teacher(request, Tokenizer(teacher), identity)
    (small_inputs.make_teacher(tmp_path / "other", seed=9) / "model.safetensors").replace(teacher / "model.safetensors")
    with pytest.raises(MismatchError, match="the files of the teacher were replaced while it was loaded"):
        open_teacher(request, Tokenizer(teacher), identity)


@pytest.mark.parametrize("damage", ["short", "flip"])
def test_merge_refuses_corrupt_files_of_a_cache(cache, tmp_path, damage):
    first, second = (shutil.copytree(cache, tmp_path / name) for name in "ab")
    (file,) = second.glob("vocabulary-order-*.arrow")
    content = bytearray(file.read_bytes())
    if damage == "short":
        del content[-8:]
    else:
        content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for order in ((first, second), (second, first)):
        result = run_xtk("cache", "merge", *order, "-o", tmp_path / "out", code=1)
        assert f"where: {file}" in result.stderr, result.stderr
        assert not list(Path(tmp_path / "out").glob("manifest.json"))


def test_rollout_file_with_missing_repeated_or_reordered_lines_is_refused(pair, tmp_path):
    small_inputs.write_jsonl(tmp_path / "prompts.jsonl", small_inputs.sentences(4, seed=2))
    path = tmp_path / "r.jsonl"
    command = ("rollout", pair.student, tmp_path / "prompts.jsonl", "--num-generations", 2,
               "--max-completion-length", 6, "-o", path)  # fmt: skip
    run_xtk(*command)
    lines = path.read_text().splitlines(keepends=True)
    changes = [lines[:-1], lines[1:], lines[:2] + lines[3:], [*lines, lines[0]], lines[::-1], [lines[0], *lines]]
    for changed in changes:
        path.write_text("".join(changed))
        assert "lines of the output file were removed, repeated or reordered" in run_xtk(*command, code=1).stderr
        assert '"has_all_lines": false' in run_xtk("inspect", path, "--json").stdout
    path.write_text("".join(lines))
    run_xtk(*command)
    assert '"has_all_lines": true' in run_xtk("inspect", path, "--json").stdout
    run_xtk(*command, "--seed", 4, "--force")
    assert path.read_text() != "".join(lines)
