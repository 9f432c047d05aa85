"""Tasks of lm-evaluation-harness: scores equal a direct computation, offline, on a model loaded by xtk."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
import weakref
from pathlib import Path

import lm_eval_tasks
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_inputs
import torch
from answer_lookup_model import make_oracle
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from xtk_processes import run_here

from xtk.commands.evaluate_tasks import EvaluateTasksOptions, _print_task_results
from xtk.errors import XtkError
from xtk.evaluation.evaluation_result_files import read_results
from xtk.models import causal_lm
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef
from xtk.rollouts import transformers_generator
from xtk.text.tokenizer import Tokenizer
from xtk.training.task_evaluation import TaskEvaluator, parse_eval_tasks

pytest.importorskip("lm_eval", reason="pip install '.[evaluation]'")

import lm_eval.tasks
from lm_eval.models.huggingface import HFLM

from xtk.evaluation.generated_answers import ProcessShare
from xtk.evaluation.lm_eval_harness import Harness, HarnessConfig, HarnessModel, HarnessResults, harness_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return lm_eval_tasks.write_tasks(tmp_path_factory.mktemp("tasks"))


def reference_correct(model: Path) -> list[bool]:
    """Return for each row whether the model assigns the correct sum a higher log-probability, in float64."""
    tokenizer, network = Tokenizer(model), load_causal_lm(ModelRef(model, dtype="float64")).eval()
    is_correct = []
    for row in lm_eval_tasks.make_problems():
        sums = []
        for choice in row["choices"]:
            prompt_ids, full_ids = (np.array([*tokenizer.start_ids, *one.ids.tolist()]) for one in tokenizer.encode(
                [str(row["question"]), f"{row['question']} {choice}"]))  # fmt: skip
            with torch.no_grad():
                logprobs = network(input_ids=torch.from_numpy(full_ids)[None]).logits[0].log_softmax(-1)
            continuation = np.arange(len(prompt_ids), len(full_ids))
            sums.append(float(logprobs[continuation - 1, full_ids[continuation]].sum()))
        is_correct.append(int(np.argmax(sums)) == row["gold"])
    return is_correct


@pytest.mark.slow
def test_mmlu_on_own_files_equals_full_logits(run, pair, tmp_path):
    """A task file that includes the harness's and replaces its data needs no network."""
    rows = [{"question": f"What is {n} plus {n}?", "subject": "virology", "answer": n % 4,
             "choices": [str(2 * n + (position - n) % 4) for position in range(4)]} for n in range(8)]  # fmt: skip
    for split, count in (("test", 8), ("dev", 5)):
        pq.write_table(pa.Table.from_pylist(rows[:count]), tmp_path / f"{split}.parquet")
    files = {split: str(tmp_path / f"{split}.parquet") for split in ("test", "dev")}
    own = Path(lm_eval.tasks.__file__).parent / "mmlu" / "default" / "mmlu_virology.yaml"
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "virology.yaml").write_text(json.dumps(
        {"include": str(own), "task": "mmlu_virology", "dataset_path": "parquet", "dataset_name": None,
         "dataset_kwargs": {"data_files": files}}))  # fmt: skip
    result = run("evaluate-tasks", pair.student, "mmlu_virology", "--include-path", "tasks", "--num-fewshot", 1,
                 "-o", "answers.jsonl", "--json", cwd=tmp_path)  # fmt: skip
    scores = json.loads(result.stdout)["results"]["mmlu_virology"]
    assert (scores["problems"], scores["num_fewshot"]) == (8, 1)
    prompts = [json.loads(line)["prompt"][0][0] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]

    def format_question(row: dict) -> str:
        choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
        return f"{row['question']}\n{choices}\nAnswer:"

    header = "The following are multiple choice questions (with answers) about virology.\n\n"
    example = f"{format_question(rows[0])} {'ABCD'[rows[0]['answer']]}\n\n"
    assert prompts == [f"{header}{example}{format_question(row)}" for row in rows]
    is_correct = [choice == row["answer"]
                  for choice, row in zip(reference_choices(pair.student, prompts), rows, strict=True)]  # fmt: skip
    assert scores["acc"] == np.mean(is_correct)


def reference_choices(model: Path, texts: list[str]) -> list[int]:
    """Return the most likely letter of a model after each text, from full logits in float64."""
    tokenizer, network = Tokenizer(model), load_causal_lm(ModelRef(model, dtype="float64")).eval()
    choices = []
    for text in texts:
        sums = []
        for letter in "ABCD":
            prompt_ids, full_ids = (one.ids.astype(np.int64) for one in tokenizer.encode([text, f"{text} {letter}"]))
            with torch.no_grad():
                logprobs = network(input_ids=torch.from_numpy(full_ids)[None]).logits[0].log_softmax(-1)
            continuation = np.arange(len(prompt_ids), len(full_ids))
            sums.append(float(logprobs[continuation - 1, full_ids[continuation]].sum()))
        choices.append(int(np.argmax(sums)))
    return choices


@pytest.mark.slow
def test_task_scores_of_two_models_equal_those_of_full_logits(run, pair, folder, tmp_path):
    arguments = ["evaluate-tasks", pair.student, "choose_sum,write_sum", "--include-path", folder,
                 "--compare-to", pair.teacher]  # fmt: skip
    result = run(*arguments, "--json", "-o", "answers.jsonl", cwd=tmp_path)
    first, second = map(json.loads, result.stdout.splitlines())
    student_correct, teacher_correct = reference_correct(pair.student), reference_correct(pair.teacher)
    assert first["results"]["choose_sum"]["acc"] == np.mean(student_correct)
    assert second["results"]["choose_sum"]["acc"] == np.mean(teacher_correct)
    differences = np.array(student_correct, float) - np.array(teacher_correct, float)
    assert 0 < abs(differences).sum() < len(differences)
    scores = second["results"]["choose_sum"]
    assert scores["acc_difference"] == pytest.approx(differences.mean())
    assert scores["acc_difference_error"] == pytest.approx(differences.std(ddof=1) / len(differences) ** 0.5)
    assert scores["acc_error"] == pytest.approx(np.std(teacher_correct, ddof=1) / len(teacher_correct) ** 0.5)
    assert (scores["problems"], scores["num_fewshot"]) == (lm_eval_tasks.NUM_PROBLEMS, 0)
    assert first["results"]["write_sum"]["exact_match,number"] < 0.2  # an untrained model
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    reported = [
        bool(one["acc"]) for one in answers if one["task"] == "choose_sum" and one["model"] == str(pair.student)
    ]
    assert reported == student_correct
    assert "evaluate: 80 requests" in result.stderr
    assert "%|" not in result.stderr  # no progress bars of libraries
    (tmp_path / "results.jsonl").write_text(result.stdout)
    results = {(one.model, one.data, one.metric): one for one in read_results(tmp_path / "results.jsonl")}
    assert results[str(pair.teacher), "choose_sum", "acc"].error == scores["acc_error"]
    # A report of several models computes the differences itself.
    assert {metric for *_, metric in results} == {"acc", "exact_match,number"}


def test_tasks_during_training_run_in_the_precision_of_the_run(pair):
    tokenizer = Tokenizer(pair.student)
    model = AutoModelForCausalLM.from_pretrained(pair.student, dtype=torch.float32)
    for dtype in (torch.bfloat16, None):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            harness = HarnessModel(
                model, tokenizer, batch_size=1, max_length=None, template_arguments={}, stderr=sys.stderr,
                process_share=ProcessShare(0, 1), apply_chat_template=False,
            )  # fmt: skip
            assert harness._model_call(torch.ones(1, 3, dtype=torch.int64)).dtype == (dtype or torch.float32)


@pytest.mark.slow
def test_first_model_is_freed_before_the_second_one_is_loaded(pair, folder, tmp_path, monkeypatch):
    def load(*arguments, **options):
        assert all(model() is None for model in loaded)
        model = load_causal_lm(*arguments, **options)
        loaded.append(weakref.ref(model))
        return model

    for module in (causal_lm, transformers_generator):
        monkeypatch.setattr(module, "load_causal_lm", load)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    for command in (
        ("evaluate-tasks", pair.student, "choose_sum", "--include-path", folder, "--max-prompts", 2),
        ("evaluate-answers", pair.student, tmp_path / "prompts.jsonl", "--reward", "gsm8k", "--num-generations", 1),
    ):
        loaded = []
        run_here(*command, "--compare-to", pair.teacher)
        assert len(loaded) == 2


def test_fewshot_examples_are_the_same_for_every_model_and_random_states_are_kept(pair, folder):
    harness = Harness(HarnessConfig(("sums",), str(folder), num_fewshot=2, limit=5, batch_size=3))
    model, tokenizer = load_causal_lm(ModelRef(pair.student)).train(), Tokenizer(pair.student)
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
    other_seed = Harness(HarnessConfig(("sums",), str(folder), num_fewshot=2, limit=5, seed=7)).evaluate(
        model, tokenizer
    )
    assert [one["prompt"] for one in other_seed.samples] != [one["prompt"] for one in first.samples]


def test_fewshot_examples_are_turns_in_the_chat_template(pair, folder, tmp_path, monkeypatch):
    original = HFLM.tok_encode
    harness = Harness(HarnessConfig(("choose_sum",), str(folder), num_fewshot=1, limit=1, apply_chat_template=True))
    model, tokenizer = load_causal_lm(ModelRef(pair.student)), Tokenizer(pair.student)
    with pytest.raises(XtkError, match="chat template"):
        harness.evaluate(model, tokenizer)
    chat_folder = tmp_path / "chats"
    chat_folder.mkdir()
    for name, content in tokenizer.to_files().items():
        (chat_folder / name).write_bytes(content)
    (chat_folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    chat_tokenizer, encoded = Tokenizer(chat_folder), []
    assert chat_tokenizer.start_ids

    def tok_encode(*given, **options):
        encoded.append(original(*given, **options))
        return encoded[-1]

    monkeypatch.setattr(HFLM, "tok_encode", tok_encode)
    (sample,) = harness.evaluate(model, chat_tokenizer).samples
    assert encoded
    assert all(ids[0] != chat_tokenizer.start_ids[0] for ids in encoded)
    text = sample["prompt"][0][0]
    assert text.count("<user>") == text.count("<assistant>") == 2
    assert text.endswith("0 + 0 =<assistant>")


@pytest.mark.slow
def test_invalid_tasks_and_options_are_refused(run, pair, folder, tmp_path, monkeypatch):
    for names, message in [("choose_sums", "did you mean choose_sum?"), ("run_sum", "executes generated code")]:
        with pytest.raises(XtkError) as raised:
            Harness(HarnessConfig((names,), str(folder)))
        assert message in str(raised.value)
    (tmp_path / "missing.yaml").write_text(lm_eval_tasks.make_task_yaml("missing", tmp_path / "nowhere.jsonl"))
    with pytest.raises(XtkError, match="cannot load the tasks"):
        Harness(HarnessConfig(("missing",), str(tmp_path)))
    with pytest.raises(XtkError, match=r"the folder of custom tasks \(include_path\) does not exist"):
        Harness(HarnessConfig(("choose_sum",), str(tmp_path / "nowhere")))
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(XtkError, match=r"pip install '\.\[evaluation\]'"):
        Harness(HarnessConfig(("choose_sum",), str(folder)))
    for arguments, message in [
        (("evaluate", pair.student), "DATA... is missing"),
        (("evaluate-tasks", pair.student, " , "), "has no task"),
        (("evaluate-tasks", pair.student, "a", "--stop", "x"), "no option called --stop"),
        (("evaluate-answers", pair.student, "x.jsonl"), "--reward NAME[:KEY=VALUE,...]|FILE.py:FUNCTION is missing"),
        (
            ("evaluate-answers", pair.student, "x.jsonl", "--reward", "gsm8k", "--top-p", 0.5, "--top-k", 3),
            "does not sample; remove --top-p and --top-k",
        ),
        (("evaluate", pair.student, "x.jsonl", "--max-length", -5), "--max-length"),
    ]:
        stderr = run(*arguments, code=2, cwd=tmp_path, env={"COLUMNS": "200"}).stderr
        assert message in stderr, stderr


@pytest.mark.slow
def test_model_with_nonfinite_logits_is_refused(run, pair, folder, tmp_path):
    """An argmax over NaN returns the first choice, which is correct for some rows."""
    broken = shutil.copytree(pair.student, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)  # finite; the logits are not
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    (tmp_path / "texts.jsonl").write_text('{"text": "Anna has 12 apples"}\n')
    for arguments, message in (
        (("evaluate-tasks", broken, "choose_sum", "--include-path", folder), "that are not a number"),
        (("evaluate-answers", broken, "problems.jsonl", "--reward", "gsm8k"), "that are not finite"),
        (("transplant", broken, pair.teacher, "--eval-data", "texts.jsonl", "-o", "out"), "that are not finite"),
    ):
        result = run(*arguments, code=1, cwd=tmp_path)
        assert message in result.stderr
        assert result.stdout == ""
    assert not (tmp_path / "out").exists()


def test_student_with_nonfinite_logits_has_no_task_metrics_during_training(pair, folder, capsys):
    """The run continues: steps that are not finite are skipped too."""
    network = load_causal_lm(ModelRef(pair.student))
    torch.nn.init.constant_(network.model.norm.weight, 3e38)
    tasks = parse_eval_tasks([f"choose_sum:include_path={folder}"])
    assert TaskEvaluator(tasks, BackboneWithHead(network), Tokenizer(pair.student), "no")() == {}
    assert "no metrics of choose_sum" in capsys.readouterr().err


def test_nonfinite_metric_is_null_in_json_and_stays_in_the_table(capsys):
    results = {
        name: HarnessResults({"ppl": {"perplexity": (value, math.nan)}}, {"ppl": 3}, {"ppl": 0}, ["ppl"], {})
        for name, value in (("one", math.nan), ("two", 3.5))
    }
    assert results["one"].to_json()["ppl"]["perplexity"] is None
    _print_task_results(results, ("ppl",), EvaluateTasksOptions(model="one", tasks=("ppl",)))
    table = capsys.readouterr().out
    assert "not a number" in table
    assert "3.5000" in table


@pytest.mark.slow
def test_num_fewshot_of_a_zero_shot_task_is_reported(run, pair, folder, tmp_path):
    (tmp_path / "tasks").mkdir()
    task_options = {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
                    "doc_to_target": "gold", "metric_list": [{"metric": "acc"}], "num_fewshot": 0}  # fmt: skip
    task_yaml = lm_eval_tasks.make_task_yaml("zero_shot", folder / "sums.jsonl", **task_options)
    (tmp_path / "tasks" / "zero.yaml").write_text(task_yaml)
    result = run("evaluate-tasks", pair.student, "zero_shot", "--include-path", "tasks", "--num-fewshot", 2,
                 "--max-prompts", 2, cwd=tmp_path)  # fmt: skip
    assert "--num-fewshot does not apply to zero_shot" in result.stderr


def test_result_files_of_the_harness_are_read_with_their_errors(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"model_name": "m", "results": {"gsm8k": {
        "alias": "gsm8k", "sample_len": 9, "exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": 0.1,
        "acc,none": 0.25, "acc_stderr,none": 0.05, "mean_squared_error,none": 2.0}},
        "config": {"limit": 10.0}}))  # fmt: skip
    results = list(read_results(tmp_path / "results.json"))
    found = {one.metric: (one.value, one.error) for one in results}
    assert found == {
        "exact_match,strict-match": (0.5, 0.1), "acc": (0.25, 0.05), "mean_squared_error": (2.0, None),
    }  # fmt: skip
    assert all(one.settings == ("the first 10",) for one in results)


@pytest.mark.slow
def test_text_after_the_end_token_is_ignored_in_a_batch(run, tmp_path):
    """A finished row continues while other rows of its batch are generated."""
    answers_by_question = {"2 + 3 =": "5", "20 + 30 =": "twenty and thirty make, if I count them one by one, 50"}
    model = make_oracle(tmp_path / "oracle", answers_by_question)
    tokenizer = Tokenizer(model)
    table = json.loads((model / "table.json").read_text())
    (extra,) = tokenizer.encode([" and 7 and 7 and 7"])
    (model / "table.json").write_text(
        json.dumps([[question_ids, [*answer_ids, *extra.ids.tolist()]] for question_ids, answer_ids in table])
    )
    data = tmp_path / "sums.jsonl"
    rows = [{"question": question, "answer": answer.split()[-1]} for question, answer in answers_by_question.items()]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    last_number = [{"function": "regex", "regex_pattern": "([0-9]+)", "group_select": -1}, {"function": "take_first"}]
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "last.yaml").write_text(lm_eval_tasks.make_task_yaml(
        "last_number", data, output_type="generate_until", doc_to_text="{{question}}", doc_to_target="answer",
        generation_kwargs={"until": ["Q:"], "max_gen_toks": 80}, metric_list=[{"metric": "exact_match"}],
        filter_list=[{"name": "number", "filter": last_number}],
    ))  # fmt: skip
    result = run("evaluate-tasks", model, "last_number", "--include-path", tmp_path / "tasks", "--json",
                 "--trust-remote-code", cwd=tmp_path)  # fmt: skip
    found = json.loads(result.stdout)["results"]["last_number"]
    assert [value for name, value in found.items() if name.startswith("exact_match") and "error" not in name] == [1.0]


@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_sentencepiece_models_get_a_start_token_in_tasks(tmp_path, add_bos_token):
    small_inputs.write_sentencepiece_model(tmp_path)
    if add_bos_token is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": add_bos_token}))
    tokenizer = Tokenizer(tmp_path)
    (encoded,) = tokenizer.encode(["Anna has"])
    start = [1] if add_bos_token else []
    assert harness_tokenizer(tokenizer)("Anna has").input_ids == [*start, *encoded.ids.tolist()]
    with_eos = harness_tokenizer(tokenizer.with_start_token("eos"))
    assert with_eos("Anna has").input_ids == [tokenizer.end_id, *encoded.ids.tolist()]
