"""Only real folders named `checkpoint-N` are checkpoints, for every command; and each opens as a model folder."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from interrupted_runs import assert_same
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as logging_of_transformers
from xtk_processes import run_xtk

from xtk.artifacts.run_folders import list_checkpoints, run_and_step_of_checkpoint

ODD = ("checkpoint-of-monday", "checkpoint-backup-6", "checkpoint-", "checkpoint-0", "checkpoint-04", "checkpoint--4",
       "checkpoint-4 ", "checkpoint-4.old", "checkpoint-٤", "checkpoint-1_0", "my-checkpoint-9", "best-x")  # fmt: skip


@pytest.fixture
def odd(unfinished) -> Path:
    """The run with folders of the user's that look like checkpoints, a file and a link of this name."""
    for name in ODD:
        shutil.copytree(unfinished / "checkpoint-2", unfinished / name)
    (unfinished / "checkpoint-7").write_text("a file")
    (unfinished / "checkpoint-8").symlink_to(unfinished / "checkpoint-2")
    return unfinished


def test_a_run_goes_on_from_the_true_one_and_prunes_only_such(trained, odd):
    done = run_xtk(*trained[0], odd, "--save-total-limit", 1)
    assert f"resuming from {odd}/checkpoint-4" in done.stderr
    assert_same(odd, trained[1])
    assert list_checkpoints(odd) == [(4, odd / "checkpoint-4")]
    for name in (*ODD, "checkpoint-7", "checkpoint-8"):
        assert (odd / name).exists() or (odd / name).is_symlink(), name


def test_other_commands_know_the_same_ones(odd, corpus, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (odd / name).unlink()
    assert f"{odd}/checkpoint-4, or" in run_xtk("evaluate", odd, corpus, code=1).stderr
    assert ", or use --checkpoint 4" in run_xtk("export", odd, "-o", tmp_path / "out", code=1).stderr
    assert (
        "use --checkpoint with one of 2, 4"
        in run_xtk("export", odd, "--checkpoint", 6, "-o", tmp_path / "out", code=1).stderr
    )
    assert (
        "unfinished"
        in json.loads(run_xtk("report", odd, "-o", tmp_path / "page.html", "--json").stdout)["runs"][0]["state"]
    )


def test_a_checkpoint_is_exported_by_its_folder(trained, tmp_path):
    run = trained[1]
    run_xtk("export", run / "checkpoint-2", "-o", tmp_path / "one")
    run_xtk("export", run, "--checkpoint", 2, "-o", tmp_path / "other")
    assert {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()
    }
    done = run_xtk("export", run / "checkpoint-2", "--checkpoint", 4, "-o", tmp_path / "out", code=2)
    assert "remove --checkpoint 4: it contradicts RUN, which is the checkpoint of step 2" in done.stderr
    done = run_xtk("export", "checkpoint-4", "-o", "../out", cwd=run)
    assert json.loads((run.parent / "out" / "xtk.json").read_text())["steps"] == 4
    assert run_and_step_of_checkpoint(run) is None
    assert run_and_step_of_checkpoint(run / "nothing") is None


def test_transformers_opens_a_checkpoint_as_it_is_without_a_warning(trained, caplog):
    checkpoint = trained[1] / "checkpoint-4"
    assert [path.name for path in checkpoint.glob("*.safetensors")] == ["model.safetensors"]
    assert [path.name for path in checkpoint.iterdir() if path.is_dir()] == ["trainer"]
    logging_of_transformers.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            model, found = AutoModelForCausalLM.from_pretrained(
                checkpoint, dtype=torch.float32, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    finally:
        logging_of_transformers.disable_propagation()
    assert not caplog.records
    assert not any(found.values()), found
    assert model(**tokenizer("Anna has 12 apples.", return_tensors="pt")).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "limit"), [(2, 1), *(pytest.param(*other, marks=pytest.mark.long) for other in [(2, 2), (0, 2), (3, 1)])]
)
def test_a_run_that_was_interrupted_ends_with_the_checkpoints_of_one_that_was_not(
    run, pair, corpus, tmp_path, every, limit
):
    command = ["distill", pair.student, corpus, "--loss", "ce", "--max-steps", 6, "--save-steps", every,
               "--save-total-limit", limit, "-o"]  # fmt: skip
    run(*command, tmp_path / "whole")
    seen = set()
    for _ in range(5):  # a step each
        run(*command, tmp_path / "sliced", "--max-seconds", 0.001, code=75)
        seen |= {path.name for path in (tmp_path / "sliced").glob("checkpoint-*")}
    run(*command, tmp_path / "sliced")
    names = [{path.name for path in (tmp_path / folder).iterdir()} for folder in ("whole", "sliced")]
    assert names[0] == names[1]
    assert {f"checkpoint-{step}" for step in range(1, 6)} <= seen
