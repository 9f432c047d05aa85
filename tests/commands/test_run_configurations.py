"""recipe.json of a run: it reproduces the run bit for bit, or names the inputs and options that have changed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from interrupted_runs import deterministic_metrics
from small_inputs import write_jsonl
from xtk_processes import run_here, run_xtk

from xtk.commands.recorded_run_options import rerun_command
from xtk.files.atomic_files import write_json

STEPS = ["--max-steps", 3, "--logging-steps", 1, "--learning-rate", 1e-3, "--per-device-train-batch-size", 4]


def output_files(run: Path) -> dict[str, bytes]:
    """Return {name: content} of the output files of a run: weights, adapters, configuration, tokenizer."""
    paths = [*run.glob("*.safetensors"), *run.glob("*.json"), *run.glob("adapter/*.safetensors")]
    names = {path: str(path.relative_to(run)) for path in paths if path.name not in ("xtk.json", "recipe.json")}
    return {name: path.read_bytes() for path, name in names.items()}


def metrics_without_times(run: Path) -> list[dict[str, object]]:
    """Return the metrics without elapsed times."""
    return [
        {name: value for name, value in line.items() if not name.endswith("_seconds")}
        for line in deterministic_metrics(run)
    ]


def assert_reproduced(run: Path, output: Path, *options: object, cwd: Path | None = None) -> None:
    """Run the command that a report prints for a run, and compare weights, metrics and recipe."""
    xtk, *words = shlex.split(rerun_command(run))
    assert (xtk, words[-2:]) == ("xtk", ["-o", "NEW"])
    run_xtk(*words[:-1], output, *options, cwd=cwd)
    assert output_files(output) == output_files(run)
    assert metrics_without_times(output) == metrics_without_times(run)
    old, new = (json.loads((one / "recipe.json").read_text()) for one in (run, output))
    assert old == new


@pytest.fixture(scope="module")
def two_teacher_run(pair, cache, corpus, projection, tmp_path_factory) -> Path:
    """Return a folder with a LoRA run from two teachers, one with the student's tokenizer, made with relative paths."""
    folder = tmp_path_factory.mktemp("several")
    for name, path in (("student", pair.student), ("large", cache)):
        shutil.copytree(path, folder / name)
    shutil.copyfile(projection, folder / "p.safetensors")
    shutil.copyfile(corpus, folder / "corpus.jsonl")
    run_xtk("cache-teacher", "student", "corpus.jsonl", "--top-k", 8, "-o", "same", cwd=folder)
    run_xtk(
        "distill", "student", "large", "./same", "--loss", "ce:weight=0.5", "--loss", "p-kl", "--loss", "forward-kl",
        "--projection", "p.safetensors", "--teacher-weights", "0.7,0.3", "--lora-r", 4, "--lora-modules-to-save",
        "lm_head", "--lora-dropout", 0.1, "--eval-data", "corpus.jsonl", *STEPS, "-o", "run", cwd=folder,
    )  # fmt: skip
    return folder


@pytest.mark.slow
def test_a_recipe_reproduces_its_run_bit_for_bit_from_any_folder(two_teacher_run, tmp_path):
    recipe = json.loads((two_teacher_run / "run" / "recipe.json").read_text())
    assert recipe["cache"] == [str(two_teacher_run / "large"), str(two_teacher_run / "same")]
    assert recipe["student"] == str(two_teacher_run / "student")
    assert str(two_teacher_run) not in json.dumps(recipe["identity"])
    assert yaml.safe_load((two_teacher_run / "run" / "recipe.json").read_text())["learning_rate"] in (0.001, "0.001")
    assert_reproduced(two_teacher_run / "run", tmp_path / "again", cwd=tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run_xtk("distill", "--config", tmp_path / "recipe.yaml", "-o", tmp_path / "from-yaml")
    assert output_files(tmp_path / "from-yaml") == output_files(two_teacher_run / "run")


@pytest.mark.slow
def test_moved_inputs_are_accepted_and_changed_inputs_are_named(two_teacher_run, tmp_path):
    moved = Path(shutil.copytree(two_teacher_run, tmp_path / "moved"))
    (moved / "student").rename(moved / "pupil")
    recipe = json.loads((moved / "run" / "recipe.json").read_text())
    recipe |= {"student": str(moved / "pupil"), "cache": [str(moved / name) for name in ("large", "same")]}
    recipe |= {"projection": [str(moved / "p.safetensors")]}
    (moved / "recipe.json").write_text(json.dumps(recipe))
    command = ["distill", "--config", moved / "recipe.json", "-o"]
    run_xtk(*command, tmp_path / "out")
    assert output_files(tmp_path / "out") == output_files(two_teacher_run / "run")

    # The same paths, but other content at one of them.
    config = json.loads((moved / "pupil" / "config.json").read_text())
    (moved / "pupil" / "config.json").write_text(json.dumps(config | {"rope_theta": 10_001.0, "rms_norm_eps": 1e-5}))
    done = run_xtk(*command, tmp_path / "changed", code=1)
    assert "the inputs have changed since this recipe was written: inputs.student.weights" in done.stderr
    assert not (tmp_path / "changed").exists()
    # Without its identity, a recipe is an ordinary file of options.
    options = {name: value for name, value in recipe.items() if name not in ("kind", "version", "identity")}
    (tmp_path / "options.yaml").write_text(json.dumps(options))
    run_xtk("distill", "--config", tmp_path / "options.yaml", "-o", tmp_path / "meant")
    assert output_files(tmp_path / "meant") != output_files(two_teacher_run / "run")
    # An input on the command line overrides the recipe.
    recipe["student"] = "gone"
    (moved / "recipe.json").write_text(json.dumps(recipe))
    named = (moved / "pupil", moved / "large", moved / "same")
    done = run_xtk("distill", *named, *command[1:], tmp_path / "other", "--max-steps", 1)
    assert "inputs differ from" in done.stderr
    assert "inputs.student.weights" in done.stderr
    assert json.loads((tmp_path / "other" / "xtk.json").read_text())["steps"] == 1


@pytest.mark.slow
def test_an_edited_recipe_is_refused_and_command_line_options_override_a_recipe(two_teacher_run, tmp_path):
    recipe = json.loads((two_teacher_run / "run" / "recipe.json").read_text())
    (tmp_path / "recipe.json").write_text(json.dumps(recipe | {"learning_rate": 0.01}))
    done = run_xtk("distill", "--config", tmp_path / "recipe.json", "-o", tmp_path / "out", code=1)
    assert "learning_rate: 0.001 in the recipe, 0.01 now" in done.stderr
    run_xtk(
        "distill", "--config", two_teacher_run / "run" / "recipe.json", "--learning-rate", 0.01, "-o", tmp_path / "out"
    )
    assert output_files(tmp_path / "out") != output_files(two_teacher_run / "run")


@pytest.mark.slow
def test_recipes_of_another_version_or_with_invalid_content_are_refused(two_teacher_run, tmp_path):
    recipe = json.loads((two_teacher_run / "run" / "recipe.json").read_text())
    (tmp_path / "recipe.json").write_text(json.dumps({**recipe, "version": 1}))
    done = run_here("distill", "--config", tmp_path / "recipe.json", "-o", tmp_path / "out", code=1)
    assert "this recipe of xtk distill has version 1; this xtk reads version 3" in done.stderr
    mutated = {"kind": "recipe", "version": 3, "identity": {"losses": 5, "inputs": []}}
    for content in (
        mutated,
        mutated | {"version": "x"},
        mutated | {"identity": None},
        {**mutated, "student": {"a": 1}},
    ):
        (tmp_path / "recipe.json").write_text(json.dumps(content))
        done = run_here("distill", "--config", tmp_path / "recipe.json", "-o", tmp_path / "out", code=1)
        assert "Traceback" not in done.stderr
        assert "recipe" in done.stderr
        run_here("report", tmp_path, "-o", tmp_path / "page.html", code=1)


@pytest.mark.slow
def test_a_report_prints_the_command_that_reproduces_the_run(two_teacher_run, tmp_path):
    done = run_xtk("report", two_teacher_run / "run", "-o", tmp_path / "page.html", "--json")
    command = json.loads(done.stdout)["runs"][0]["command"]
    assert command == f"xtk distill --config {two_teacher_run}/run/recipe.json -o NEW"
    assert command in done.stderr
    assert command in (tmp_path / "page.html").read_text()
    run_xtk(*shlex.split(command)[1:], cwd=tmp_path)
    assert output_files(tmp_path / "NEW") == output_files(two_teacher_run / "run")


def test_json_files_keep_special_characters_when_read_as_json_or_yaml(tmp_path):
    """JSON is YAML except for some characters."""
    special_text = 'a\x7f\x85\u2028\u2029\ufeff\U0001f600"\\: #,é\t-\u00a0' + os.fsdecode(b"\xff")
    write_json(tmp_path / "odd.json", {"text": special_text, "list": [special_text]})
    assert json.loads((tmp_path / "odd.json").read_text()) == {"text": special_text, "list": [special_text]}
    assert yaml.safe_load((tmp_path / "odd.json").read_text(encoding="utf-8")) == {
        "text": special_text,
        "list": [special_text],
    }


@pytest.mark.slow
def test_an_on_policy_run_with_user_code_is_reproduced(pair, tmp_path):
    write_jsonl(tmp_path / "prompts.jsonl", [f"{n} plus {n} is" for n in range(12)])
    (tmp_path / "reward.py").write_text("def polite(completion, prompt, row):\n    return float(len(completion) % 3)\n")
    run_xtk(
        "distill-on-policy", pair.student, "prompts.jsonl", "--teacher", pair.teacher, "--loss", "byte-kl",
        "--loss", "policy-gradient", "--reward", "reward.py:polite", "--num-generations", 2,
        "--max-completion-length", 12, "--steps-per-generation", 2, "--save-steps", 2, *STEPS, "-o", "run",
        cwd=tmp_path,
    )  # fmt: skip
    (tmp_path / "elsewhere").mkdir()
    assert_reproduced(tmp_path / "run", tmp_path / "again", cwd=tmp_path / "elsewhere")
    (tmp_path / "reward.py").write_text("def polite(completion, prompt, row):\n    return 1.0\n")
    done = run_xtk("distill-on-policy", "--config", "run/recipe.json", "-o", "changed", cwd=tmp_path, code=1)
    assert "since this recipe was written: on_policy.rewards" in done.stderr


@pytest.mark.slow
@pytest.mark.long  # two runs of two processes
def test_a_two_process_run_with_an_online_teacher_is_reproduced(pair, corpus, tmp_path):
    run_xtk(
        "distill", pair.student, corpus, "--teacher", f"{pair.teacher}:top_k=8", "--loss", "byte-kl", *STEPS,
        "--num-processes", 2, "-o", tmp_path / "run", fresh=True,
    )  # fmt: skip
    run_xtk("distill", "--config", tmp_path / "run" / "recipe.json", "-o", tmp_path / "again", fresh=True)
    assert output_files(tmp_path / "again") == output_files(tmp_path / "run")
