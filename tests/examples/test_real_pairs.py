"""`examples/real_pairs`: its settings, its intervals, and all its commands with small models."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
from pathlib import Path

import pytest
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


@pytest.mark.parametrize("count", [2, 5, 10, 11, 60])
def test_intervals_are_students_t(modules, count):
    values = [0.1 * number**2 for number in range(count)]
    mean, half = modules["results"].interval(values)
    expected = stats.t.ppf(0.975, count - 1) * stats.sem(values)
    assert (mean, half) == (pytest.approx(sum(values) / count), pytest.approx(expected, rel=2e-3))


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


@pytest.mark.slow
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
    for bf16, dtype in ((0, ""), (1, ":dtype=bfloat16")):
        size = run.Size(bf16=bf16)
        experiment = run.Experiment("maths", pairs.PAIRS["maths"], tmp_path, tmp_path / "models", size, results)
        words = experiment._distill_arguments(run.Candidate(line, 1e-4), 0)
        assert words[words.index("--reference") + 1] == f"{tmp_path / 'models' / pairs.QWEN_SMALL}{dtype}"
        assert words[words.index("--teacher") + 1] == f"{tmp_path / 'models' / pairs.QWEN}{dtype}"


def test_trl_gets_the_weight_of_cross_entropy(modules, tmp_path, monkeypatch):
    run, pairs, commands = modules["run"], modules["pairs"], []
    monkeypatch.setattr(run, "_run", commands.append)
    monkeypatch.setattr(run, "resolve_model_folder", lambda name, **_: Path(name))
    results = modules["results"].Results(tmp_path)
    experiment = run.Experiment("code", pairs.PAIRS["code"], tmp_path, tmp_path / "models", run.Size(), results)
    for line in (line for line in pairs.LINES if line.source == "trl"):
        for candidate in experiment.candidates(line):
            experiment._train_with_trl(candidate, 0, tmp_path / "student")
    weights = [command[command.index("--ce") + 1] for command in commands]
    assert weights == ["0", "0.3", "1", "3"] * 2


def test_another_set_of_texts_is_refused_and_nothing_is_overwritten(modules, tmp_path):
    texts, results = modules["texts"], modules["results"].Results(tmp_path)
    first, second = {"code-train": [{"text": "a\u2028\x85"}]}, {"code-train": [{"text": "b"}]}
    results.check_settings({"texts": texts.checksum(first), "python": "3.11.1", "seeds": 1})
    results.check_settings({"texts": texts.checksum(first), "python": "3.11.2", "seeds": 2})
    with pytest.raises(SystemExit, match="made with other texts"):
        results.check_settings({"texts": texts.checksum(second), "python": "3.11.2", "seeds": 2})
    texts.write_texts(tmp_path / "data", first)
    texts.write_texts(tmp_path / "data", first)
    with pytest.raises(SystemExit, match="other texts"):
        texts.write_texts(tmp_path / "data", second)
    (tmp_path / "settings.json").write_text("{}")  # of a version without a checksum
    with pytest.raises(SystemExit, match="made with other texts"):
        results.check_settings({"texts": texts.checksum(first), "seeds": 2})


def test_answers_are_checked_by_a_reward_that_exists(modules):
    reward = parse_reward(modules["run"].REWARD).load_reward()
    row = modules["texts"].gsm8k_problem({"question": "6 * 7?", "answer": "It is 42.\n#### 42"})
    assert [reward(text, row["prompt"], row) for text in ("So #### 42", "It is 42", "It is 41")] == [1, 1, 0]


def write_wikipedia(corpora: Path, num_articles: int) -> None:
    """Write files in the format of WikiText-2, with separated tokens."""
    for name in ("valid", "test"):
        lines = []
        for number in range(num_articles):
            sentence = f'In {name} {number} , a crew of 1 @,@ {number:03} " well @-@ known " men left together . '
            unknown = "The <unk> came . "
            lines += [f" = Article {name} {number} = ", "", f" {sentence * 4}{unknown}{sentence * 5}", " = = Part = = "]
        (corpora / f"wikitext2-{name}.txt").write_text("\n".join(lines), encoding="utf-8")


def test_sentences_of_wikipedia_are_plain_text_and_parts_share_no_article(modules, tmp_path):
    write_wikipedia(tmp_path, 16)
    parts = modules["texts"].article_parts(tmp_path)
    assert [len(texts) for texts in parts.values()] == [2 * 20, 2 * 4, 2 * 8]
    articles = [{text.split(",")[0] for text in texts} for texts in parts.values()]
    assert [len(one) for one in articles] == [20, 4, 8]
    assert len(set.union(*articles)) == 32
    first, *_ = parts["dev"]
    number = first.split(",")[0].removeprefix("In valid ")
    assert first == " ".join([f'In valid {number}, a crew of 1,{int(number):03} "well-known" men left together.'] * 4)


def test_measured_documents_begin_after_the_first_word(modules):
    texts = ["def f(x):\n    return x\n", "  spaces first", "word"]
    rows = modules["texts"]._measured(texts)
    assert [row["prompt"] for row in rows] == ["def", "  spaces", "word"]
    assert [modules["texts"].whole_text(row) for row in rows] == texts


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
    write_wikipedia(corpora, 16)
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
    monkeypatch.setitem(modules["pairs"].START_TOKENS, modules["pairs"].SMOLLM2, "<|end_of_text|>")
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
