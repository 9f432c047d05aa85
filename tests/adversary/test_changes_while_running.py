"""Files that other programs replace between the check of a command and its work."""

from __future__ import annotations

import shutil
from pathlib import Path

import material
import pytest
from command_line import run_xtk

from xtk.artifacts.run_folders import list_checkpoints, read_recipe
from xtk.errors import MismatchError, XtkError
from xtk.losses import parse_losses
from xtk.teachers.cache_build_config import CacheRequest, open_teacher
from xtk.teachers.transformers import TransformersTeacher
from xtk.tokens.teacher_logprobs import make_support
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.checkpoint import ResumePoint, find_existing_run, prepare_run_folder
from xtk.training.distill import distill, open_inputs
from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig


def test_a_run_that_another_command_finished_in_between_is_not_overwritten(pair, corpus, tmp_path):
    output = tmp_path / "run"
    assert find_existing_run(output, {"seed": 1}, force=False) is None  # as each of two commands finds it
    run_xtk("distill", pair.student, corpus, "--loss", "ce", "--max-steps", 2, "--save-steps", 1, "-o", output)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    with pytest.raises(XtkError, match="has a run with other options or inputs"):
        prepare_run_folder(output, {}, {"seed": 1}, ResumePoint(), force=False)
    recipe = read_recipe(output)
    with pytest.raises(XtkError, match="another command has written into the output folder"):
        prepare_run_folder(output, {}, recipe, ResumePoint(), force=False)
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    (output / "xtk.json").unlink()  # unfinished, with a checkpoint that was not there before
    with pytest.raises(XtkError, match="another command has written into the output folder"):
        prepare_run_folder(output, {}, recipe, ResumePoint(), force=False)
    prepare_run_folder(output, {}, recipe, ResumePoint(*list_checkpoints(output)[-1]), force=False)


def test_a_student_that_is_replaced_while_it_is_loaded_is_refused(pair, corpus, tmp_path):
    student = shutil.copytree(pair.student, tmp_path / "student")
    other = material.make_student(tmp_path / "other", seed=9)
    recipe = TrainConfig(losses=tuple(parse_losses(["ce"])), max_steps=1)
    paths = RunPaths(student, (str(corpus),), (), tmp_path / "run")
    inputs = open_inputs(paths, recipe, Tokenizer(student))
    (other / "model.safetensors").replace(student / "model.safetensors")
    with pytest.raises(MismatchError, match="the files of the student were replaced while it was loaded"):
        distill(paths, recipe, LoggingConfig(), inputs, force=False, trust_remote_code=False)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_teacher_that_is_replaced_while_it_is_loaded_is_refused(pair, tmp_path):
    teacher = shutil.copytree(pair.teacher, tmp_path / "teacher")
    stated = TransformersTeacher.weights_identity(teacher, {})
    request = CacheRequest(teacher_folder=teacher, teacher_name="teacher", support=make_support("top-k"))
    open_teacher(request, Tokenizer(teacher), stated)
    (material.make_teacher(tmp_path / "other", seed=9) / "model.safetensors").replace(teacher / "model.safetensors")
    with pytest.raises(MismatchError, match="the files of the teacher were replaced while it was loaded"):
        open_teacher(request, Tokenizer(teacher), stated)


@pytest.mark.parametrize("damage", ["short", "flip"])
def test_damaged_files_of_a_cache_are_not_merged(cache, tmp_path, damage):
    first, second = (shutil.copytree(cache, tmp_path / name) for name in "ab")
    (file,) = second.glob("vocabulary-order-*.arrow")
    content = bytearray(file.read_bytes())
    if damage == "short":
        del content[-8:]
    else:
        content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for order in ((first, second), (second, first)):
        done = run_xtk("cache-teacher", "--merge", *order, "-o", tmp_path / "out", code=1)
        assert f"where: {file}" in done.stderr, done.stderr
        assert not list(Path(tmp_path / "out").glob("manifest.json"))


def test_a_rollout_file_without_all_its_lines_is_not_taken_for_the_finished_one(pair, tmp_path):
    material.write_jsonl(tmp_path / "prompts.jsonl", material.sentences(4, seed=2))
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
