"""Every command treats only real folders named `checkpoint-N` as checkpoints, and each loads as a model folder."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from interrupted_runs import assert_equal_runs
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as logging_of_transformers
from xtk_processes import run_xtk

from xtk.files.run_names import list_checkpoints
from xtk.runs.folder import run_and_step_of_checkpoint

ODD_NAMES = ("checkpoint-of-monday", "checkpoint-backup-6", "checkpoint-", "checkpoint-0", "checkpoint-04",
             "checkpoint--4", "checkpoint-4 ", "checkpoint-4.old", "checkpoint-٤", "checkpoint-1_0", "my-checkpoint-9",
             "best-x")  # fmt: skip


@pytest.fixture
def odd_run(unfinished_run) -> Path:
    """Return the run with added folders of similar names, and a file and a link that are named like checkpoints."""
    for name in ODD_NAMES:
        shutil.copytree(unfinished_run / "checkpoint-2", unfinished_run / name)
    (unfinished_run / "checkpoint-7").write_text("a file")
    (unfinished_run / "checkpoint-8").symlink_to(unfinished_run / "checkpoint-2")
    return unfinished_run


def test_run_resumes_from_and_removes_only_real_checkpoints(finished_run, odd_run):
    result = run_xtk(*finished_run[0], odd_run, "--save-total-limit", 1)
    assert f"resuming from {odd_run}/checkpoint-4" in result.stderr
    assert_equal_runs(odd_run, finished_run[1])
    assert list_checkpoints(odd_run) == [(4, odd_run / "checkpoint-4")]
    for name in (*ODD_NAMES, "checkpoint-7", "checkpoint-8"):
        assert (odd_run / name).exists() or (odd_run / name).is_symlink(), name


def test_other_commands_list_only_real_checkpoints(odd_run, corpus, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (odd_run / name).unlink()
    assert f"{odd_run}/checkpoint-4, or" in run_xtk("evaluate", odd_run, corpus, code=1).stderr
    assert ", or use --checkpoint 4" in run_xtk("export", odd_run, "-o", tmp_path / "out", code=1).stderr
    assert (
        "use --checkpoint with one of 2, 4"
        in run_xtk("export", odd_run, "--checkpoint", 6, "-o", tmp_path / "out", code=1).stderr
    )
    assert (
        "unfinished"
        in json.loads(run_xtk("report", odd_run, "-o", tmp_path / "page.html", "--json").stdout)["runs"][0]["state"]
    )


def test_export_accepts_the_folder_of_a_checkpoint(finished_run, tmp_path):
    run = finished_run[1]
    run_xtk("export", run / "checkpoint-2", "-o", tmp_path / "one")
    run_xtk("export", run, "--checkpoint", 2, "-o", tmp_path / "other")
    assert {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()
    }
    result = run_xtk("export", run / "checkpoint-2", "--checkpoint", 4, "-o", tmp_path / "out", code=2)
    assert "remove --checkpoint 4: it contradicts RUN, which is the checkpoint of step 2" in result.stderr
    result = run_xtk("export", "checkpoint-4", "-o", "../out", cwd=run)
    assert json.loads((run.parent / "out" / "xtk.json").read_text())["steps"] == 4
    assert run_and_step_of_checkpoint(run) is None
    assert run_and_step_of_checkpoint(run / "nothing") is None


def test_transformers_loads_a_checkpoint_folder_without_warnings(finished_run, caplog):
    checkpoint = finished_run[1] / "checkpoint-4"
    assert [path.name for path in checkpoint.glob("*.safetensors")] == ["model.safetensors"]
    assert [path.name for path in checkpoint.iterdir() if path.is_dir()] == ["trainer"]
    logging_of_transformers.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            model, loading_info = AutoModelForCausalLM.from_pretrained(
                checkpoint, dtype=torch.float32, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    finally:
        logging_of_transformers.disable_propagation()
    assert not caplog.records
    assert not any(loading_info.values()), loading_info
    assert model(**tokenizer("Anna has 12 apples.", return_tensors="pt")).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save_steps", "save_total_limit"),
    [(2, 1), *(pytest.param(*values, marks=pytest.mark.long) for values in [(2, 2), (0, 2), (3, 1)])],
)
def test_interrupted_run_ends_with_the_same_checkpoints_as_an_uninterrupted_one(
    run, pair, corpus, tmp_path, save_steps, save_total_limit
):
    command = ["distill", pair.student, corpus, "--loss", "ce", "--max-steps", 6, "--save-steps", save_steps,
               "--save-total-limit", save_total_limit, "-o"]  # fmt: skip
    run(*command, tmp_path / "whole")
    seen = set()
    for _ in range(5):  # one step each
        run(*command, tmp_path / "sliced", "--max-seconds", 0.001, code=75)
        seen |= {path.name for path in (tmp_path / "sliced").glob("checkpoint-*")}
    run(*command, tmp_path / "sliced")
    names = [{path.name for path in (tmp_path / folder).iterdir()} for folder in ("whole", "sliced")]
    assert names[0] == names[1]
    assert {f"checkpoint-{step}" for step in range(1, 6)} <= seen
