"""Scored answers: correct answers score 1, estimates are unbiased, and models are compared problem by problem."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from scripted_generator import ScriptedGenerator

from xtk.data.corpus_reader import Corpus
from xtk.errors import XtkError
from xtk.evaluation.generated_answers import (
    AnswerScores,
    evaluate_answers,
    pass_at_k,
    powers_of_two_up_to,
)
from xtk.evaluation.standard_errors import Estimate
from xtk.rewards.reward_spec import WeightedRewards, parse_reward
from xtk.rewards.sandbox import Sandbox
from xtk.rollouts.generator_interface import SamplingConfig
from xtk.rollouts.prompts import check_rewards_apply, read_prompts
from xtk.text.tokenizer import Tokenizer


def make_scores(scores: list[list[float]]) -> AnswerScores:
    score_array = np.array(scores)
    return AnswerScores(score_array, 1.0, np.ones(score_array.shape, np.int64), 0.0, 0)


def rewards(text: str) -> WeightedRewards:
    return WeightedRewards([parse_reward(text)])


def test_pass_at_k_is_the_fraction_of_subsets_with_a_correct_answer():
    for num_samples in range(1, 7):
        for num_correct, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
            is_correct = [True] * num_correct + [False] * (num_samples - num_correct)
            passes = [any(subset) for subset in itertools.combinations(is_correct, k)]
            assert pass_at_k(k, num_samples, num_correct) == pytest.approx(sum(passes) / len(passes), abs=1e-12)
    assert pass_at_k(1, 5, 2) == pytest.approx(0.4)
    assert powers_of_two_up_to(1) == [1]
    assert powers_of_two_up_to(6) == [1, 2, 4, 6]
    assert powers_of_two_up_to(8) == [1, 2, 4, 8]


def test_standard_errors_are_over_problems_and_differences_are_paired():
    one = make_scores([[1, 1], [0, 0], [1, 0], [0, math.nan]])
    assert one.mean_reward() == Estimate(0.5, pytest.approx(0.5 / math.sqrt(3)))  # 1, 0, 0.5: std 0.5 over three
    assert one.pass_at(1).value == pytest.approx(0.5)
    assert one.pass_at(2).value == pytest.approx(2 / 3)
    assert one.to_json()["unscored"] == 1
    same = one.difference(one)
    assert (same.value, same.error) == (0.0, 0.0)
    worse = make_scores([[1, 0], [0, 0], [0, 0], [1, 1]])
    # differences 0.5, 0, 0.5; a problem that is unscored for one model is left out
    error = pytest.approx(np.std([0.5, 0, 0.5], ddof=1) / 3**0.5)
    assert one.difference(worse) == Estimate(pytest.approx(1 / 3), error)
    assert one.difference(worse).value == -worse.difference(one).value


def test_oracle_answers_to_gsm8k_score_one_and_modified_ones_zero(pair, real_data):
    corpus = Corpus([str(real_data / "corpora" / "gsm8k_test.jsonl")], {"prompt": "question"})
    prompts = read_prompts(corpus, 100)
    tokenizer = Tokenizer(pair.student)
    answers = {str(prompt.record["question"]): str(prompt.record["answer"]) for prompt in prompts}
    start = tokenizer.special_token_names[tokenizer.start_ids[0]]

    def script(full_text: str, key: tuple[int, ...]) -> tuple[str, bool]:
        text = answers[full_text.removeprefix(start)]
        return (text if key[1] % 4 or key[2] else text + "1"), True  # the first answer to every fourth is wrong

    generator = ScriptedGenerator(tokenizer, script)
    sampling = SamplingConfig(temperature=1.0, max_completion_length=4096)
    found = evaluate_answers(prompts, generator, tokenizer, sampling, rewards("gsm8k"), num_generations=2)
    assert found.mean_reward().value == pytest.approx(1 - 25 / 200)
    assert found.pass_at(1).value == pytest.approx(1 - 25 / 200)
    assert found.pass_at(2).value == 1.0
    assert (found.truncated_fraction, found.prompts_too_long) == (0.0, 0)
    assert set(found.scores[:, 1]) == {1.0}
    with pytest.raises(XtkError, match="at --temperature 0 all 2 answers"):
        evaluate_answers(
            prompts, generator, tokenizer, SamplingConfig(temperature=0.0), rewards("gsm8k"), num_generations=2
        )
    with pytest.raises(XtkError, match="cannot score any row of the data"):
        evaluate_answers(prompts[:2], generator, tokenizer, sampling, rewards("gsm8k:column=nowhere"))


def test_problems_without_context_for_an_answer_score_zero(pair, tmp_path):
    tokenizer = Tokenizer(pair.student)
    path = tmp_path / "problems.jsonl"
    rows = [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "1 + 1 + " * 60, "answer": "2"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    generator = ScriptedGenerator(tokenizer, lambda text, key: ("#### 2", True), context=64)
    found = evaluate_answers(
        read_prompts(Corpus([str(path)])), generator, tokenizer, SamplingConfig(), rewards("gsm8k")
    )
    assert found.scores.tolist() == [[1.0], [0.0]]
    assert found.prompts_too_long == 1
    assert found.to_json()["problems"] == 2
    assert found.to_json()["mean_length"] == len(tokenizer.encode(["#### 2"])[0].ids) + 1  # over answered problems


def test_oracle_passes_the_unit_tests_of_human_eval(pair, real_data, tmp_path):
    try:
        Sandbox().close()
    except XtkError as error:
        pytest.skip(f"no sandbox here: {error.where}")
    path = tmp_path / "human-eval.jsonl"
    lines = gzip.decompress((real_data / "corpora" / "HumanEval.jsonl.gz").read_bytes()).splitlines()[:4]
    path.write_bytes(b"\n".join(lines) + b"\n")
    tokenizer = Tokenizer(pair.student)
    solutions = {row["prompt"]: row["canonical_solution"] for row in map(json.loads, lines)}
    start = tokenizer.special_token_names[tokenizer.start_ids[0]]
    oracle = ScriptedGenerator(tokenizer, lambda text, key: (solutions[text.removeprefix(start)], True))
    wrong = ScriptedGenerator(tokenizer, lambda text, key: ("    return None\n", True))
    prompts, sampling = read_prompts(Corpus([str(path)])), SamplingConfig(max_completion_length=4096)
    assert (
        evaluate_answers(prompts, oracle, tokenizer, sampling, rewards("tests:seconds=60")).mean_reward().value == 1.0
    )
    assert evaluate_answers(prompts, wrong, tokenizer, sampling, rewards("tests:seconds=60")).mean_reward().value == 0.0


@pytest.mark.slow
def test_evaluate_command_compares_two_models_by_reward(run, pair, tmp_path):
    rows = [{"prompt": f"{n} + {n} =", "answer": f"#### {2 * n}00"} for n in range(5)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["evaluate-answers", pair.student, "problems.jsonl", "--compare-to", pair.teacher, "--reward", "gsm8k",
                 "--max-completion-length", 6, "--num-generations", 2, "--temperature", 1, "--quiet"]  # fmt: skip
    lines = run(*arguments, "--json", "-o", "answers.jsonl", cwd=tmp_path).stdout.splitlines()
    first, second = map(json.loads, lines)
    assert (first["model"], second["model"]) == (str(pair.student), str(pair.teacher))
    assert first["avg@2"] == second["avg@2"] == 0.0  # untrained models
    assert (second["difference"], second["difference_error"]) == (0.0, 0.0)
    assert "difference" not in first
    assert second["difference_of"] == f"{pair.student} minus {pair.teacher}"
    assert "difference_of" not in first
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [(one["problem"], one["sample"]) for one in answers[:10]] == [
        (n, sample) for n in range(5) for sample in range(2)
    ]
    assert {one["model"] for one in answers} == {str(pair.student), str(pair.teacher)}
    assert [one["prompt"] for one in answers[:10:2]] == [row["prompt"] for row in rows]
    table = run(*arguments, cwd=tmp_path).stdout
    assert "pass@2" in table
    assert f"{pair.student} minus {pair.teacher}" in table
    refused_run = run(*arguments, "-o", "answers.jsonl", cwd=tmp_path, code=1)
    assert "the output file exists already" in refused_run.stderr
    both = run("evaluate", pair.student, "problems.jsonl", "--compare-to", pair.teacher, "--columns", "text=prompt",
               "--json", cwd=tmp_path)  # fmt: skip
    assert [json.loads(line)["model"] for line in both.stdout.splitlines()] == [str(pair.student), str(pair.teacher)]


def test_scored_answer_ends_before_the_stop_string(pair, tmp_path):
    tokenizer = Tokenizer(pair.student)
    (tmp_path / "problems.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "answer": "2"}) + "\n")
    prompts = read_prompts(Corpus([str(tmp_path / "problems.jsonl")]))
    generator = ScriptedGenerator(tokenizer, lambda text, key: (" 2\nQuestion: 7 + 7 = 14", False))
    mean_rewards = [evaluate_answers(prompts, generator, tokenizer, SamplingConfig(stop=stop),
        rewards("gsm8k:last_number_fallback=true")).mean_reward().value
                    for stop in ((), ("\nQuestion: 7",), ("\nAnswer",))]  # fmt: skip
    assert mean_rewards == [0.0, 1.0, 0.0]


def test_data_that_no_reward_can_score_is_refused_before_generation(run, pair, tmp_path):
    rows = [{"prompt": "1 + 1 =", "question": "?", "answer": None}, {"prompt": "2 + 2 =", "test_list": []}]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = read_prompts(Corpus([str(tmp_path / "problems.jsonl")]))
    for reward in ("gsm8k", "boxed:compare=strings", "regex:pattern=.,column=answer", "tests"):
        with pytest.raises(XtkError, match="cannot score any row of the data") as raised:
            check_rewards_apply(rewards(reward), prompts)
        assert "prompt, question, answer, test_list" in str(raised.value)
    check_rewards_apply(rewards("json"), prompts)
    (tmp_path / "own.py").write_text("def own(completion, prompt, row):\n    raise ValueError\n")
    check_rewards_apply(rewards(f"{tmp_path / 'own.py'}:own"), prompts)  # cannot be checked in advance
    result = run(
        "evaluate-answers", pair.student, "problems.jsonl", "--reward", "gsm8k", "--quiet", cwd=tmp_path, code=1
    )
    assert "cannot score any row of the data" in result.stderr


def test_all_models_are_checked_before_the_first_evaluation(run, pair, tmp_path):
    """A missing tokenizer, truncated weights, too few embedding rows, and the same model twice are refused first."""
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    without_tokenizer, truncated, small_vocabulary = (
        Path(shutil.copytree(pair.student, tmp_path / name)) for name in ("bare", "cut", "small")
    )
    (without_tokenizer / "tokenizer.json").unlink()
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    configuration = json.loads((small_vocabulary / "config.json").read_text())
    (small_vocabulary / "config.json").write_text(json.dumps({**configuration, "vocab_size": 100}))
    for name, message in (
        ("bare", "folder has no tokenizer.json"), ("cut", "the weight file cannot be read"),
        ("small", "only 100 rows"), (f"{pair.student}", "name the same model"),
    ):  # fmt: skip
        for command, *options in (
            ("evaluate-answers", "--reward", "gsm8k", "-o", "lost.jsonl"), ("evaluate", "--columns", "text=prompt"),
        ):  # fmt: skip
            arguments = (pair.student, "problems.jsonl", *options, "--compare-to", name)
            result = run(command, *arguments, cwd=tmp_path, code=1)
            assert message in result.stderr
            assert "evaluate:" not in result.stderr, "no process has worked"
