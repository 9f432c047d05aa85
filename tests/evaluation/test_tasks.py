"""Tasks of lm-evaluation-harness: scores are those of a plain computation, offline, on a model that xtk has loaded."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from pathlib import Path

import lm_eval_tasks
import numpy as np
import pytest
import sentencepiece
import small_inputs
import torch
from answer_lookup_model import make_oracle
from safetensors.torch import load_file, save_file

from xtk.commands.evaluate import EvaluateOptions
from xtk.commands.evaluate_tasks import _print_task_results
from xtk.errors import XtkError
from xtk.evaluation.evaluation_result_files import read_results
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.task_evaluation import TaskEvaluator, parse_eval_tasks

pytest.importorskip("lm_eval", reason="pip install '.[evaluation]'")

from xtk.evaluation.lm_eval_harness import Harness, HarnessConfig, HarnessResults
from xtk.evaluation.lm_eval_model import harness_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return lm_eval_tasks.write_tasks(tmp_path_factory.mktemp("tasks"))


def chosen(model: Path) -> list[bool]:
    """Whether a model finds the right sum likelier, from full logits in float64."""
    tokenizer, network = Tokenizer(model), load_causal_lm(model, dtype=torch.float64).eval()
    found = []
    for row in lm_eval_tasks.rows():
        sums = []
        for choice in row["choices"]:
            before, whole = (one.ids.astype(np.int64) for one in tokenizer.encode(
                [str(row["question"]), f"{row['question']} {choice}"]))  # fmt: skip
            with torch.no_grad():
                logprobs = network(input_ids=torch.from_numpy(whole)[None]).logits[0].log_softmax(-1)
            rest = np.arange(len(before), len(whole))
            sums.append(float(logprobs[rest - 1, whole[rest]].sum()))
        found.append(int(np.argmax(sums)) == row["gold"])
    return found


def test_models_side_by_side_score_what_full_logits_say(run, pair, folder, tmp_path):
    asked = ["evaluate", pair.student, "--tasks", "choose_sum,write_sum", "--include-path", folder,
             "--compare-to", pair.teacher]  # fmt: skip
    done = run(*asked, "--json", "-o", "answers.jsonl", cwd=tmp_path)
    first, second = map(json.loads, done.stdout.splitlines())
    ours, theirs = chosen(pair.student), chosen(pair.teacher)
    assert first["results"]["choose_sum"]["acc"] == np.mean(ours)
    assert second["results"]["choose_sum"]["acc"] == np.mean(theirs)
    gains = np.array(ours, float) - np.array(theirs, float)
    assert 0 < abs(gains).sum() < len(gains)
    scores = second["results"]["choose_sum"]
    assert scores["acc_difference"] == pytest.approx(gains.mean())
    assert scores["acc_difference_error"] == pytest.approx(gains.std(ddof=1) / len(gains) ** 0.5)
    assert scores["acc_error"] == pytest.approx(np.std(theirs, ddof=1) / len(theirs) ** 0.5)
    assert (scores["problems"], scores["num_fewshot"]) == (lm_eval_tasks.COUNT, 0)
    assert first["results"]["write_sum"]["exact_match,number"] < 0.2  # a model that knows nothing
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    told = [bool(one["acc"]) for one in answers if one["task"] == "choose_sum" and one["model"] == str(pair.student)]
    assert told == ours
    assert "evaluate: 80 requests" in done.stderr
    assert "%|" not in done.stderr  # no bars of others
    (tmp_path / "results.jsonl").write_text(done.stdout)
    read = {(one.model, one.data, one.metric): one for one in read_results(tmp_path / "results.jsonl")}
    assert read[str(pair.teacher), "choose_sum", "acc"].error == scores["acc_error"]
    # Who shows several models takes differences itself.
    assert {metric for *_, metric in read} == {"acc", "exact_match,number"}


def test_each_model_has_the_same_examples_and_random_numbers_stay(pair, folder):
    harness = Harness(HarnessConfig(("sums",), str(folder), num_fewshot=2, limit=5, batch_size=3))
    model, tokenizer = load_causal_lm(pair.student).train(), Tokenizer(pair.student)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first, second = (harness.evaluate(model, tokenizer) for _ in range(2))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert model.training
    assert first.samples == second.samples
    assert (first.top_level_tasks, first.num_problems["choose_sum"], first.num_fewshot["choose_sum"]) == (
        ["sums"],
        5,
        2,
    )
    (text, _), _ = next(one["prompt"] for one in first.samples if one["task"] == "choose_sum")
    assert text.count(" =") == 3
    other = Harness(HarnessConfig(("sums",), str(folder), num_fewshot=2, limit=5, seed=7)).evaluate(model, tokenizer)
    assert [one["prompt"] for one in other.samples] != [one["prompt"] for one in first.samples]


def test_in_the_chat_template_examples_are_turns(pair, folder, tmp_path):
    harness = Harness(HarnessConfig(("choose_sum",), str(folder), num_fewshot=1, limit=1, apply_chat_template=True))
    model, tokenizer = load_causal_lm(pair.student), Tokenizer(pair.student)
    with pytest.raises(XtkError, match="chat template"):
        harness.evaluate(model, tokenizer)
    chats = tmp_path / "chats"
    chats.mkdir()
    for name, content in tokenizer.to_files().items():
        (chats / name).write_bytes(content)
    (chats / "chat_template.jinja").write_text(
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (sample,) = harness.evaluate(model, Tokenizer(chats)).samples
    text = sample["prompt"][0][0]
    assert text.count("<user>") == text.count("<assistant>") == 2
    assert text.endswith("0 + 0 =<assistant>")


@pytest.mark.slow
def test_what_cannot_be_asked_is_told(run, pair, folder, tmp_path, monkeypatch):
    for names, message in [("choose_sums", "did you mean choose_sum?"), ("run_sum", "executes generated code")]:
        with pytest.raises(XtkError) as refused:
            Harness(HarnessConfig((names,), str(folder)))
        assert message in str(refused.value)
    (tmp_path / "missing.yaml").write_text(lm_eval_tasks.task("missing", tmp_path / "nowhere.jsonl"))
    with pytest.raises(XtkError, match="cannot load the tasks"):
        Harness(HarnessConfig(("missing",), str(tmp_path)))
    with pytest.raises(XtkError, match=r"the folder of custom tasks \(include_path\) does not exist"):
        Harness(HarnessConfig(("choose_sum",), str(tmp_path / "nowhere")))
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(XtkError, match=r"pip install '\.\[evaluation\]'"):
        Harness(HarnessConfig(("choose_sum",), str(folder)))
    for arguments, message in [
        ((), "DATA is missing"),
        (("x.jsonl", "--tasks", "a"), "remove DATA"),
        (("--tasks", "a", "--reward", "exact"), "remove --reward"),
        (("--tasks", "a", "--stop", "x"), "--stop applies only to --reward"),
        (("--tasks", "a", "--backend", "vllm"), "--backend applies only to --reward"),
        (("--tasks", " , "), "has no task"),
        (("x.jsonl", "--reward", "exact", "--top-p", 0.5, "--top-k", 3), "--top-p and --top-k has no effect"),
        (("x.jsonl", "--max-length", -5), "--max-length"),
    ]:
        told = run("evaluate", pair.student, *arguments, code=2, cwd=tmp_path, env={"COLUMNS": "200"}).stderr
        assert message in told, told


def test_a_model_without_finite_logits_has_no_scores(run, pair, folder, tmp_path):
    """The likeliest of values that are no numbers is the first: right in a part of all choices."""
    broken = shutil.copytree(pair.student, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)  # finite; the logits are not
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    (tmp_path / "texts.jsonl").write_text('{"text": "Anna has 12 apples"}\n')
    for arguments, message in (
        (("evaluate", broken, "--tasks", "choose_sum", "--include-path", folder), "that are not a number"),
        (("evaluate", broken, "problems.jsonl", "--reward", "exact"), "that are not finite"),
        (("transplant", broken, pair.teacher, "--eval-data", "texts.jsonl", "-o", "out"), "that are not finite"),
    ):
        done = run(*arguments, code=1, cwd=tmp_path)
        assert message in done.stderr
        assert done.stdout == ""
    assert not (tmp_path / "out").exists()


def test_a_student_without_finite_logits_has_no_metrics_while_it_trains(pair, folder, capsys):
    """Its run goes on: steps that are not finite are skipped too."""
    network = load_causal_lm(pair.student)
    torch.nn.init.constant_(network.model.norm.weight, 3e38)
    tasks = parse_eval_tasks([f"choose_sum:include_path={folder}"])
    assert TaskEvaluator(tasks, BackboneWithHead(network), Tokenizer(pair.student), "no")() == {}
    assert "no metrics of choose_sum" in capsys.readouterr().err


def test_a_metric_that_is_no_number_is_null_and_stays_in_the_table(capsys):
    results = {
        name: HarnessResults({"ppl": {"perplexity": (value, math.nan)}}, {"ppl": 3}, {"ppl": 0}, ["ppl"], {})
        for name, value in (("one", math.nan), ("two", 3.5))
    }
    assert results["one"].to_json()["ppl"]["perplexity"] is None
    _print_task_results(results, ("ppl",), EvaluateOptions(model="one"))
    table = capsys.readouterr().out
    assert "not a number" in table
    assert "3.5000" in table


def test_examples_that_a_task_does_not_take_are_told(run, pair, folder, tmp_path):
    (tmp_path / "tasks").mkdir()
    form = {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
            "doc_to_target": "gold", "metric_list": [{"metric": "acc"}], "num_fewshot": 0}  # fmt: skip
    zero = lm_eval_tasks.task("zero_shot", folder / "sums.jsonl", **form)
    (tmp_path / "tasks" / "zero.yaml").write_text(zero)
    done = run("evaluate", pair.student, "--tasks", "zero_shot", "--include-path", "tasks", "--num-fewshot", 2,
               "--max-prompts", 2, cwd=tmp_path)  # fmt: skip
    assert "--num-fewshot does not apply to zero_shot" in done.stderr


def test_results_of_the_harness_itself_are_read_with_their_errors(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"model_name": "m", "results": {"gsm8k": {
        "alias": "gsm8k", "sample_len": 9, "exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": 0.1,
        "acc,none": 0.25, "acc_stderr,none": 0.05, "mean_squared_error,none": 2.0}},
        "config": {"limit": 10.0}}))  # fmt: skip
    read = list(read_results(tmp_path / "results.json"))
    found = {one.metric: (one.value, one.error) for one in read}
    assert found == {
        "exact_match,strict-match": (0.5, 0.1), "acc": (0.25, 0.05), "mean_squared_error": (2.0, None),
    }  # fmt: skip
    assert all(one.settings == ("the first 10",) for one in read)


def test_text_after_the_end_is_no_answer_also_in_a_batch(run, tmp_path):
    """A row that has ended goes on while others of its batch write."""
    questions = {"2 + 3 =": "5", "20 + 30 =": "twenty and thirty make, if I count them one by one, 50"}
    model = make_oracle(tmp_path / "oracle", questions)
    tokenizer = Tokenizer(model)
    table = json.loads((model / "table.json").read_text())
    (more,) = tokenizer.encode([" and 7 and 7 and 7"])
    (model / "table.json").write_text(json.dumps([[asked, [*said, *more.ids.tolist()]] for asked, said in table]))
    data = tmp_path / "sums.jsonl"
    rows = [{"question": question, "answer": answer.split()[-1]} for question, answer in questions.items()]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    last_number = [{"function": "regex", "regex_pattern": "([0-9]+)", "group_select": -1}, {"function": "take_first"}]
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "last.yaml").write_text(lm_eval_tasks.task(
        "last_number", data, output_type="generate_until", doc_to_text="{{question}}", doc_to_target="answer",
        generation_kwargs={"until": ["Q:"], "max_gen_toks": 80}, metric_list=[{"metric": "exact_match"}],
        filter_list=[{"name": "number", "filter": last_number}],
    ))  # fmt: skip
    done = run("evaluate", model, "--tasks", "last_number", "--include-path", tmp_path / "tasks", "--json",
               "--trust-remote-code", cwd=tmp_path)  # fmt: skip
    found = json.loads(done.stdout)["results"]["last_number"]
    assert [value for name, value in found.items() if name.startswith("exact_match") and "error" not in name] == [1.0]


@pytest.mark.parametrize("adds", [None, True, False])
def test_models_of_sentencepiece_files_read_a_start_token_in_tasks(tmp_path, adds):
    (tmp_path / "text").write_text("\n".join(small_inputs.sentences(800)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=420, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    if adds is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": adds}))
    tokenizer = Tokenizer(tmp_path)
    (plain,) = tokenizer.encode(["Anna has"])
    start = [] if adds is False else [tokenizer.start_id]
    assert harness_tokenizer(tokenizer)("Anna has").input_ids == [*start, *plain.ids.tolist()]
