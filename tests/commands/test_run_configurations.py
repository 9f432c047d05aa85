"""A run's recipe is a file of its options: it makes the run again, to the bit, or names what was changed since."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from interrupted_runs import told
from small_inputs import write_jsonl
from xtk_processes import run_xtk

from xtk.artifacts.atomic_files import write_json

STEPS = ["--max-steps", 3, "--logging-steps", 1, "--learning-rate", 1e-3, "--per-device-train-batch-size", 4]


def files(run: Path) -> dict[str, bytes]:
    """Return what a run gives: weights, adapters, configuration, tokenizer."""
    found = [*run.glob("*.safetensors"), *run.glob("*.json"), *run.glob("adapter/*.safetensors")]
    names = {path: str(path.relative_to(run)) for path in found if path.name not in ("xtk.json", "recipe.json")}
    return {name: path.read_bytes() for path, name in names.items()}


def curve(run: Path) -> list[dict[str, object]]:
    """Return the metrics without clocks."""
    return [{name: value for name, value in line.items() if not name.endswith("_seconds")} for line in told(run)]


def assert_again(run: Path, output: Path, *more: object, cwd: Path | None = None) -> None:
    """Run `xtk distill --config RUN/recipe.json` and compare everything."""
    run_xtk("distill", "--config", run / "recipe.json", *more, "-o", output, cwd=cwd)
    assert files(output) == files(run)
    assert curve(output) == curve(run)
    old, new = (json.loads((one / "recipe.json").read_text()) for one in (run, output))
    assert old == new


@pytest.fixture(scope="module")
def several(pair, cache, corpus, projection, tmp_path_factory) -> Path:
    """LoRA from two teachers, one with the student's tokenizer; made in the folder of its inputs, by relative paths."""
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


def test_a_recipe_makes_its_run_again_to_the_bit_from_any_folder(several, tmp_path):
    recipe = json.loads((several / "run" / "recipe.json").read_text())
    assert recipe["cache"] == [str(several / "large"), str(several / "same")]
    assert recipe["student"] == str(several / "student")
    assert str(several) not in json.dumps(recipe["identity"])
    assert yaml.safe_load((several / "run" / "recipe.json").read_text())["learning_rate"] in (0.001, "0.001")
    assert_again(several / "run", tmp_path / "again", cwd=tmp_path)


@pytest.mark.slow
def test_inputs_that_were_moved_are_the_same_and_others_are_named(several, tmp_path):
    moved = Path(shutil.copytree(several, tmp_path / "moved"))
    (moved / "student").rename(moved / "pupil")
    recipe = json.loads((moved / "run" / "recipe.json").read_text())
    recipe |= {"student": str(moved / "pupil"), "cache": [str(moved / name) for name in ("large", "same")]}
    recipe |= {"projection": [str(moved / "p.safetensors")]}
    (moved / "recipe.json").write_text(json.dumps(recipe))
    command = ["distill", "--config", moved / "recipe.json", "-o"]
    run_xtk(*command, tmp_path / "out")
    assert files(tmp_path / "out") == files(several / "run")

    # The same paths, and something else behind one of them.
    config = json.loads((moved / "pupil" / "config.json").read_text())
    (moved / "pupil" / "config.json").write_text(json.dumps(config | {"rope_theta": 10_001.0, "rms_norm_eps": 1e-5}))
    done = run_xtk(*command, tmp_path / "changed", code=1)
    assert "the inputs have changed since this recipe was written: inputs.student.weights" in done.stderr
    assert not (tmp_path / "changed").exists()
    # Without its identity a recipe is a file of options like any other.
    options = {name: value for name, value in recipe.items() if name not in ("kind", "version", "identity")}
    (tmp_path / "options.yaml").write_text(json.dumps(options))
    run_xtk("distill", "--config", tmp_path / "options.yaml", "-o", tmp_path / "meant")
    assert files(tmp_path / "meant") != files(several / "run")
    # An input that is named on the command line wins over the recipe.
    recipe["student"] = "gone"
    (moved / "recipe.json").write_text(json.dumps(recipe))
    named = (moved / "pupil", moved / "large", moved / "same")
    done = run_xtk("distill", *named, *command[1:], tmp_path / "other", "--max-steps", 1)
    assert "inputs differ from" in done.stderr
    assert "inputs.student.weights" in done.stderr
    assert json.loads((tmp_path / "other" / "xtk.json").read_text())["steps"] == 1


@pytest.mark.slow
def test_an_option_that_was_edited_in_a_recipe_is_named_and_one_on_the_command_line_wins(several, tmp_path):
    recipe = json.loads((several / "run" / "recipe.json").read_text())
    (tmp_path / "recipe.json").write_text(json.dumps(recipe | {"learning_rate": 0.01}))
    done = run_xtk("distill", "--config", tmp_path / "recipe.json", "-o", tmp_path / "out", code=1)
    assert "learning_rate: 0.001 in the recipe, 0.01 now" in done.stderr
    run_xtk("distill", "--config", several / "run" / "recipe.json", "--learning-rate", 0.01, "-o", tmp_path / "out")
    assert files(tmp_path / "out") != files(several / "run")


def test_a_recipe_of_an_older_version_is_refused_by_its_version(several, tmp_path):
    old = json.loads((several / "run" / "recipe.json").read_text())["identity"]
    (tmp_path / "recipe.json").write_text(json.dumps(old))
    done = run_xtk("distill", "--config", tmp_path / "recipe.json", "-o", tmp_path / "out", code=1)
    assert "this recipe of xtk distill has version 1; this xtk reads version 3" in done.stderr
    mutated = {"kind": "recipe", "version": 3, "identity": {"losses": 5, "inputs": []}}
    for content in (
        mutated,
        mutated | {"version": "x"},
        mutated | {"identity": None},
        {**mutated, "student": {"a": 1}},
    ):
        (tmp_path / "recipe.json").write_text(json.dumps(content))
        done = run_xtk("distill", "--config", tmp_path / "recipe.json", "-o", tmp_path / "out", code=1)
        assert "Traceback" not in done.stderr
        assert "recipe" in done.stderr
        run_xtk("report", tmp_path, "-o", tmp_path / "page.html", code=1)


def test_a_report_prints_the_command_that_makes_the_run_again(several, tmp_path):
    done = run_xtk("report", several / "run", "-o", tmp_path / "page.html", "--json")
    command = json.loads(done.stdout)["runs"][0]["command"]
    assert command == f"xtk distill --config {several}/run/recipe.json -o NEW"
    assert command in done.stderr
    assert command in (tmp_path / "page.html").read_text()
    run_xtk(*shlex.split(command)[1:], cwd=tmp_path)
    assert files(tmp_path / "NEW") == files(several / "run")


def test_letters_that_yaml_reads_otherwise_come_through_a_recipe(pair, cache, tmp_path):
    """JSON is YAML, but for some letters."""
    odd = 'a\x7f\x85\u2028\u2029\ufeff\U0001f600"\\: #,é\t-\u00a0' + os.fsdecode(b"\xff")
    write_json(tmp_path / "odd.json", {"text": odd, "list": [odd]})
    assert json.loads((tmp_path / "odd.json").read_text()) == {"text": odd, "list": [odd]}
    assert yaml.safe_load((tmp_path / "odd.json").read_text(encoding="utf-8")) == {"text": odd, "list": [odd]}


@pytest.mark.slow
def test_so_it_is_with_a_student_that_writes_and_code_of_the_user(pair, tmp_path):
    write_jsonl(tmp_path / "prompts.jsonl", [f"{n} plus {n} is" for n in range(12)])
    (tmp_path / "reward.py").write_text("def polite(completion, prompt, row):\n    return float(len(completion) % 3)\n")
    run_xtk(
        "distill", pair.student, "prompts.jsonl", "--on-policy", "--teacher", pair.teacher, "--loss", "byte-kl",
        "--loss", "policy-gradient", "--reward", "reward.py:polite", "--num-generations", 2,
        "--max-completion-length", 12, "--steps-per-generation", 2, "--save-steps", 2, *STEPS, "-o", "run",
        cwd=tmp_path,
    )  # fmt: skip
    (tmp_path / "elsewhere").mkdir()
    assert_again(tmp_path / "run", tmp_path / "again", cwd=tmp_path / "elsewhere")
    (tmp_path / "reward.py").write_text("def polite(completion, prompt, row):\n    return 1.0\n")
    done = run_xtk("distill", "--config", "run/recipe.json", "-o", "changed", cwd=tmp_path, code=1)
    assert "since this recipe was written: on_policy.rewards" in done.stderr


@pytest.mark.slow
@pytest.mark.long  # two runs of two processes
def test_so_it_is_with_live_teachers_and_two_processes(pair, corpus, tmp_path):
    run_xtk(
        "distill", pair.student, corpus, "--teacher", f"{pair.teacher}:top_k=8", "--loss", "byte-kl", *STEPS,
        "--num-processes", 2, "-o", tmp_path / "run", fresh=True,
    )  # fmt: skip
    run_xtk("distill", "--config", tmp_path / "run" / "recipe.json", "-o", tmp_path / "again", fresh=True)
    assert files(tmp_path / "again") == files(tmp_path / "run")
