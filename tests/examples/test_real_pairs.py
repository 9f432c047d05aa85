"""`examples/real_pairs`: its settings, its intervals, and all its commands with small models."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import small_inputs
from scipy import stats

from xtk.rewards.reward_spec import parse_reward

EXAMPLE = Path(__file__).parents[2] / "examples" / "real_pairs"


@pytest.fixture(scope="module")
def modules():
    """The modules of the example, which are in its folder as they are for its users."""
    sys.path.insert(0, str(EXAMPLE))
    import pair_results
    import pair_tables
    import pair_texts
    import pairs
    import run

    yield {"pairs": pairs, "results": pair_results, "run": run, "tables": pair_tables, "texts": pair_texts}
    sys.path.remove(str(EXAMPLE))


@pytest.mark.parametrize("count", [2, 5, 10])
def test_intervals_are_students_t(modules, count):
    values = [0.1 * number**2 for number in range(count)]
    mean, half = modules["results"].interval(values)
    low, high = stats.t.interval(0.95, count - 1, loc=mean, scale=stats.sem(values))
    assert (mean - half, mean + half) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))


def test_differences_are_paired_by_seed_and_one_seed_has_no_interval(modules):
    difference = modules["results"].paired_difference
    assert difference({0: 2.0, 1: 3.0, 2: 9.0}, {1: 2.5, 0: 1.5}) == (0.5, 0.0)
    assert difference({0: 2.0}, {0: 1.5}) == (0.5, math.inf)
    assert difference({0: 2.0}, {1: 1.5}) is None


def test_lines_of_the_default_and_of_the_grid_share_their_runs(modules):
    line = modules["pairs"]._with_ce("byte-kl")
    assert line.has_grid
    assert line.with_weight(0.3).name == modules["pairs"].DEFAULT.name
    assert line.with_weight(0).losses == ("byte-kl",)
    # Other lines of a pair never share the folder of their runs.
    for pair in modules["pairs"].PAIRS.values():
        names = [modules["results"].file_name_part(line.name) for line in pair.lines]
        assert len(set(names)) == len(names)


def test_right_answers_are_conversations(modules):
    rows = [{"prompt": "1+1?"}, {"prompt": "2+2?"}, {"prompt": "3+3?"}]
    answers = [("3", 0.0, True), (" 4\n", 1.0, True), ("6", 1.0, False), ("6", 1.0, True)]
    rollouts = [{"prompt_number": min(number, 2), "completion": text, "reward": reward, "complete": complete}
                for number, (text, reward, complete) in enumerate(answers)]  # fmt: skip
    kept = [row["messages"] for row in modules["run"].right_answers(rows, rollouts, 5)]
    assert [[message["content"] for message in messages] for messages in kept] == [["2+2?", "4"], ["3+3?", "6"]]
    assert len(list(modules["run"].right_answers(rows, rollouts, 1))) == 1


def test_small_functions_pass_their_tests_and_others_do_not(modules):
    tasks = list(modules["texts"].small_functions())
    reward = parse_reward("tests").load_reward()
    assert len(tasks) == len({task["entry_point"] for task in tasks}) == 36
    for task in tasks:
        assert task["prompt"].endswith('"""\n')
        assert reward(task["canonical_solution"], task["prompt"], task) == 1
        assert reward("    return None\n", task["prompt"], task) == 0


def test_a_reference_is_the_file_of_another_model_than_the_teacher(modules, tmp_path):
    run, pairs = modules["run"], modules["pairs"]
    (line,) = (line for line in pairs.ON_POLICY if "--reference" in line.options)
    results = modules["results"].Results(tmp_path)
    experiment = run.Experiment("maths", pairs.PAIRS["maths"], tmp_path, tmp_path / "models", run.Size(), results)
    words = experiment._distill_arguments(run.Candidate(line, 1e-4), 0)
    assert words[words.index("--reference") + 1] == tmp_path / "models" / pairs.QWEN_SMALL
    assert words[words.index("--teacher") + 1] == tmp_path / "models" / pairs.QWEN


def test_figure_of_spans_compares_chosen_lines_by_category(modules, tmp_path):
    """Partial results: bpm has two weights, strict no seed 1, escd no other loss's seeds."""
    results, tables = modules["results"].Results(tmp_path), modules["tables"]

    def add(line: str, seed: int, dev: float, **figures: float) -> None:
        for measure, values in (("dev", {"bits_per_byte": dev}), ("test", figures)):
            results.add(("code", f"{line} lr=0.0001", seed, measure), values, 0.0)

    for seed in (0, 1):
        add("ce:weight=0.3+byte-kl", seed, 1.0, bits_per_byte=1.0 + seed, digits=3.0)
        add("ce:weight=1+bpm", seed, 0.9, bits_per_byte=0.9 + seed, digits=3.5)
        add("ce:weight=3+bpm", seed, 0.95, bits_per_byte=0.5, digits=0.5)
    add("ce:weight=1+strict:divergence=forward-kl", 0, 1.0, bits_per_byte=1.2)
    add("ce:weight=1+escd", 2, 1.0, bits_per_byte=1.2)
    add("bpm (prompts)", 0, 0.1, bits_per_byte=0.1)
    assert tables.chosen_line(results, "code", "bpm") == "ce:weight=1+bpm lr=0.0001"
    assert tables.chosen_line(results, "code", "alm") == ""
    differences = tables.span_differences(results, ["code"])
    assert differences == {
        ("all text", "code: bpm minus byte-kl"): (pytest.approx(-0.1), pytest.approx(0)),
        ("all text", "code: bpm minus strict"): (pytest.approx(-0.3), math.inf),
        ("digits", "code: bpm minus byte-kl"): (0.5, 0.0),
    }
    assert tables.draw("title", differences).count("<circle") == 3


def write_corpora(folder: Path) -> Path:
    """Write small files with the names and fields of GSM8K, HumanEval and WikiText-2."""
    import gzip

    corpora = folder / "corpora"
    corpora.mkdir()
    for name in ("train", "test"):
        rows = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(8)]
        (corpora / f"gsm8k_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("valid", "test"):
        (corpora / f"wikitext2-{name}.txt").write_text(
            "\n".join(small_inputs.sentences(9, seed=1)[n] * 9 for n in range(9))
        )
    with gzip.open(corpora / "HumanEval.jsonl.gz", "wt") as file:
        for number in range(5):
            file.write(json.dumps({"prompt": f"def f{number}():\n", "canonical_solution": "    return 1\n"}) + "\n")
    return folder


@pytest.mark.long
def test_a_pair_is_trained_measured_and_continued(modules, run, pair, tmp_path, monkeypatch, capsys):
    models, output = tmp_path / "models", tmp_path / "output"
    models.mkdir()
    for source, name in ((pair.student, modules["pairs"].SMOLLM2), (pair.teacher, modules["pairs"].QWEN_SMALL)):
        shutil.copytree(source, models / name)
        config = json.loads((models / name / "config.json").read_text())
        (models / name / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    monkeypatch.setenv("XTK_DATA", str(write_corpora(tmp_path)))
    monkeypatch.setattr(modules["run"], "_run", lambda words: run(*words[2:], timeout=900).stdout.strip())
    sizes = ["--weights", "0.3", "--documents", "4", "--held-out", "4", "--steps", "2"]
    arguments = [str(output), "--short", "--models", str(models), *sizes]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    modules["run"].main()
    printed = capsys.readouterr().out
    assert "**code**" in printed
    assert "| `ce lr=0.0001` |" in printed
    assert (output / "differences.svg").read_text().count("<circle") == 2  # ce, and the default at 0
    rows = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    assert {row["measure"] for row in rows} == {"dev", "test", "humaneval", "wikitext", "documents"}
    assert (output / "spans.svg").is_file()
    # A second run prints no command that trains or measures again; another size is refused.
    modules["run"].main()
    again = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("$ xtk")]
    assert not [words for words in again if words[2] in ("evaluate", "rollout")]
    assert [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()] == rows
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments[:-1], "3"])
    with pytest.raises(SystemExit, match="other steps"):
        modules["run"].main()
