"""On-policy training: the student generates rollout batches, its teachers score them, and it trains on them."""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import small_inputs
import torch
from interrupted_runs import deterministic_metrics, signal_at_checkpoint, start_run, wait_for_path
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from xtk_processes import run_xtk

from xtk.cache.reader import TeacherCache
from xtk.errors import XtkError
from xtk.losses.spec import parse_losses
from xtk.models.resolver import ModelRef
from xtk.models.student_model_setup import StudentModelConfig
from xtk.rewards.reward_spec import parse_reward
from xtk.rollouts.generator_interface import SamplingConfig
from xtk.runs.metrics_file import read_metrics
from xtk.teachers.online_teacher import parse_online_teacher
from xtk.text import token_sequence
from xtk.text.tokenizer import Tokenizer
from xtk.training import on_policy_loop
from xtk.training.distill import distill
from xtk.training.kinds.open_inputs import open_inputs
from xtk.training.on_policy_config import (
    OnPolicyConfig,
    PromptSampler,
    count_repeated_ngrams,
    reward_weights,
)
from xtk.training.student_generator import StudentGenerator, check_engine_can_load
from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig

HEADERS = (
    "{{ bos_token }}{% for message in messages %}<|pad|>{{ message['role'] }}<|pad|>\n\n"
    "{{ message['content'] }}<|end_of_text|>{% endfor %}"
)
TURNS = "{% for message in messages %}<|im_end|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
GENERATION = {
    HEADERS: "{% if add_generation_prompt %}<|pad|>assistant<|pad|>\n\n{% endif %}",
    TURNS: "{% if add_generation_prompt %}<|im_end|>assistant\n{% endif %}",
}
SIZES = np.array([5, 9, 2, 7, 4, 8, 1], np.int64)
USABLE = np.array([0, 1, 2, 3, 5, 6])


# --- the documents of a step


@pytest.mark.parametrize("lmbda", [1.0, 0.0, 0.4])
def test_prompts_are_used_equally_often_and_with_all_their_completions(lmbda):
    on_policy = OnPolicyConfig(num_generations=2, steps_per_generation=3, num_iterations=2, lmbda=lmbda)
    sampler = PromptSampler(USABLE, SIZES, 4, 7, on_policy)
    steps = range(6 * 40)
    uses: dict[int, int] = {}
    for first in range(0, len(steps), 6):
        # The second iteration has the same documents.
        assert [sampler.documents_of_step(step) for step in range(first, first + 3)] == [
            sampler.documents_of_step(step) for step in range(first + 3, first + 6)
        ]
    for step in steps:
        numbers = sampler.documents_of_step(step)
        assert len(numbers) == 4
        assert sampler.micro_batches_of_rank(step, 0, 2, 2) + sampler.micro_batches_of_rank(step, 1, 2, 2) == [
            numbers[:2],
            numbers[2:],
        ]
        if sampler.is_on_policy(step):
            prompts = [number // 2 for number in numbers]
            assert prompts[::2] == prompts[1::2]
            assert [number % 2 for number in numbers] == [0, 1] * 2
        else:
            prompts = [number - 2 * len(SIZES) for number in numbers]
        assert set(prompts) <= set(USABLE.tolist())
        for prompt in prompts:
            uses[prompt] = uses.get(prompt, 0) + 1
    on_policy_fraction = np.mean([sampler.is_on_policy(step) for step in steps])
    assert on_policy_fraction == pytest.approx(lmbda, abs=0.15 if 0 < lmbda < 1 else 0)
    if lmbda in (0, 1):
        assert max(uses.values()) - min(uses.values()) <= 4
    assert [sampler.documents_of_step(step) for step in range(12)] == [
        PromptSampler(USABLE, SIZES, 4, 7, on_policy).documents_of_step(step) for step in range(12)
    ]


def test_prompts_of_a_step_come_with_the_number_of_their_earlier_uses():
    sampler = PromptSampler(USABLE, SIZES, 4, 7, OnPolicyConfig(num_generations=2))
    earlier_uses: dict[int, list[int]] = {}
    for step in range(12):
        for prompt, number in sampler.prompts_of_step(step):
            earlier_uses.setdefault(prompt, []).append(number)
    assert all(numbers == list(range(len(numbers))) for numbers in earlier_uses.values())


def test_a_batch_that_would_split_a_group_is_refused():
    with pytest.raises(XtkError, match=r"the documents per step \(6\) must be a multiple of --num-generations 4"):
        OnPolicyConfig(num_generations=4).check_batch(6)


# --- reward weights, repetition and stop conditions


def test_reward_weights_equal_values_computed_by_hand():
    weights = reward_weights([1.0, 0.0, math.nan, 1.0], [0, 0, 0, 1], 0.5)
    mean = 0.5  # of the completions that have a reward
    powers = np.exp(np.array([1.0, 0.0, mean]) / 0.5)
    np.testing.assert_allclose(weights[:3], 3 * powers / powers.sum())
    assert weights[3] == 1.0
    # With one completion per prompt, weights are relative to the whole step, and their mean is 1.
    step_weights = reward_weights([3.0, 1.0, 2.0], [0, 1, 2], 1.0)
    np.testing.assert_allclose(step_weights, 3 * np.exp([3.0, 1.0, 2.0]) / np.exp([3.0, 1.0, 2.0]).sum())
    np.testing.assert_array_equal(reward_weights([math.nan] * 2, [0, 0], 1.0), [1, 1])
    np.testing.assert_allclose(reward_weights([1e6, 0.0], [0, 0], 1e-3), [2, 0], atol=1e-12)


def test_repeated_ngrams_are_counted():
    assert count_repeated_ngrams([1, 2, 3, 4, 5]) == (0, 2)
    assert count_repeated_ngrams([7] * 6) == (2, 3)
    assert count_repeated_ngrams([1, 2]) == (0, 0)


@pytest.mark.parametrize(
    "options",
    [{"num_generations": 0}, {"lmbda": 1.5}, {"reward_beta": 1.0}, {"reward_beta": -1.0}, {"backend": "vlm"},
     {"num_iterations": 0}],
)  # fmt: skip
def test_invalid_on_policy_options_are_refused(options):
    with pytest.raises(XtkError):
        OnPolicyConfig(**options)
    assert OnPolicyConfig(reward_beta=1.0, rewards=(parse_reward("gsm8k"),)).identity()["rewards"] == ["gsm8k"]


# --- runs

OPTIONS = ["--learning-rate", 1e-3, "--logging-steps", 1, "--per-device-train-batch-size", 4,
           "--num-generations", 2, "--max-completion-length", 12]  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    names = ["Anna", "Bert", "Clara", "Dora", "Emil"]
    rows = [
        {"prompt": f"{name} has {12 + at} apples and", "completion": f" gives {at} to Ida.", "answer": str(at)}
        for at, name in enumerate(names)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(pair, prompts: Path, output: Path, *options: object, code: int = 0):
    return run_xtk(
        "distill-on-policy",
        pair.student,
        prompts,
        "--teacher",
        f"{pair.teacher}:top_k=16",
        *OPTIONS,
        *options,
        "-o",
        output,
        code=code,
    )


def command_of_reference_run(pair, prompts: Path) -> list[object]:
    """Return the command line of `reference_run`, without its output."""
    return ["distill-on-policy", pair.student, prompts, "--teacher", f"{pair.teacher}:top_k=16", *OPTIONS,
            "--max-steps", 8, "--save-steps", 3, "--steps-per-generation", 2, "--loss", "byte-kl",
            "--reward", "regex:pattern=apples", "-o"]  # fmt: skip


@pytest.fixture(scope="module")
def reference_run(pair, prompts, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "out"
    done = run(pair, prompts, folder, "--max-steps", 8, "--save-steps", 3, "--steps-per-generation", 2,
               "--loss", "byte-kl", "--reward", "regex:pattern=apples")  # fmt: skip
    assert done.stdout == f"{folder}\n"
    return folder


@pytest.mark.slow
def test_a_run_writes_metrics_rollouts_and_its_recipe(reference_run):
    lines = read_metrics(reference_run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["staleness_steps"] for line in lines] == [0, 1] * 4
    for name in ("entropy", "length", "truncated_fraction", "repeated_4gram_fraction", "unusable_fraction", "turns"):
        assert all(f"rollout_{name}" in line for line in lines)
    assert all(0 <= line["reward"] <= 1 for line in lines)
    assert lines[-1]["generation_seconds"] > 0
    assert lines[-1]["teacher_seconds"] > 0
    assert not (reference_run / "rollout_batches").exists()
    rollouts = [json.loads(line) for line in (reference_run / "rollouts.jsonl").read_text().splitlines()]
    assert [rollout["step"] for rollout in rollouts] == [0, 2, 4, 6]
    recipe = json.loads((reference_run / "recipe.json").read_text())["identity"]
    assert recipe["on_policy"]["num_generations"] == 2
    assert recipe["on_policy"]["rewards"] == ["regex:pattern=apples"]


@pytest.mark.slow
def test_a_killed_run_resumes_within_its_rollout_batch(pair, prompts, reference_run, tmp_path):
    """Rollout batch 2 is steps 5 and 6; the checkpoint of step 6 is at its end, that of step 3 is within batch 1."""
    output = tmp_path / "out"
    arguments = command_of_reference_run(pair, prompts)
    process = start_run([*arguments, output])
    wait_for_path(output / "checkpoint-3", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    rollouts_file = output / "rollout_batches" / "000001" / "rollouts-00000-of-00001.jsonl"
    content, inode = rollouts_file.read_bytes(), rollouts_file.stat().st_ino
    resumed = start_run([*arguments, output])
    inodes = set()
    while resumed.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            inodes.add(rollouts_file.stat().st_ino)
        time.sleep(0.02)
    assert resumed.returncode == 0, resumed.communicate()[1]
    resumed.communicate()
    assert content
    assert inodes == {inode}  # the rollouts are read, and not written again
    assert (output / "model.safetensors").read_bytes() == (reference_run / "model.safetensors").read_bytes()
    timing_metrics = {"generation_seconds", "teacher_seconds"}
    resumed_metrics, expected_metrics = (
        [
            {key: value for key, value in line.items() if key not in timing_metrics}
            for line in deterministic_metrics(one)
        ]
        for one in (output, reference_run)
    )
    assert resumed_metrics == expected_metrics


@pytest.mark.slow
def test_a_resumed_batch_has_the_log_probabilities_of_a_self_teacher_that_has_changed(pair, tmp_path):
    """A teacher with the student's current weights would compute others after some steps of the batch."""
    data = tmp_path / "privileged.jsonl"
    prompts = [f"Anna has {at} apples and" for at in range(4)]
    write_rows(data, [{"prompt": prompt, "teacher_prompt": f"She has 12. {prompt}"} for prompt in prompts])
    arguments = ["distill-on-policy", pair.student, data, "--teacher", "self:top_k=16", *OPTIONS, "--max-steps", 8,
                 "--steps-per-generation", 4, "--loss", "forward-kl", "--learning-rate", 1e-2, "-o"]  # fmt: skip
    run_xtk(*arguments, tmp_path / "whole", "--save-steps", 0)
    output = tmp_path / "out"
    signal_at_checkpoint(arguments, output, signal.SIGKILL, "--save-steps", 1, step=6)
    for later in (7, 8):  # even if the signal came late, the run resumes within the batch of steps 5 to 8
        shutil.rmtree(output / f"checkpoint-{later}", ignore_errors=True)
    batch = output / "rollout_batches" / "000001"
    assert sorted(path.name for path in batch.iterdir()) == [
        "rollouts-00000-of-00001.jsonl",
        "scores-00000-00000.arrow",
    ]
    assert "resuming from" in run_xtk(*arguments, output, "--save-steps", 1).stderr
    assert (output / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert not batch.parent.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("teacher", "loss"), [("top_k=8", "byte-kl"), ("support=candidates,top_k=8", "p-kl:divergence=reverse-kl")]
)
def test_each_rollout_is_tokenized_once_by_each_side_and_written_once(
    pair, prompts, tmp_path, monkeypatch, teacher, loss
):
    tokenized: dict[str, int] = {}
    written: list[int] = []
    original, original_write = token_sequence.sampled_tokens_for, on_policy_loop.write_rollouts

    def count(tokenizer, document):
        if document.sampled_tokens is not None:
            tokenized[tokenizer.name] = tokenized.get(tokenizer.name, 0) + 1
        return original(tokenizer, document)

    def count_written(path, rollouts, run):
        written.append(len(rollouts))
        original_write(path, rollouts, run)

    monkeypatch.setattr(token_sequence, "sampled_tokens_for", count)
    monkeypatch.setattr(on_policy_loop, "write_rollouts", count_written)
    sampling = SamplingConfig(max_completion_length=12, top_logprobs=8)
    config = OnPolicyConfig(sampling=sampling, num_generations=2, steps_per_generation=2, num_iterations=2)
    recipe = TrainConfig(
        losses=tuple(parse_losses([loss])), max_steps=8, per_device_train_batch_size=4, on_policy=config
    )
    online_teacher = parse_online_teacher(f"{pair.teacher}:{teacher}", long_documents="refuse", trust_remote_code=False)
    paths = RunPaths(ModelRef(pair.student), (str(prompts),), (), tmp_path / "out", online_teachers=(online_teacher,))
    inputs = open_inputs(paths, recipe, Tokenizer(pair.student))
    distill(paths, recipe, LoggingConfig(), inputs, force=False)
    assert written == [8, 6]  # two batches of two steps, each trained twice; one prompt is twice in the second
    assert tokenized == {str(pair.student): 14, str(pair.teacher): 14}


@pytest.mark.slow
def test_engine_is_put_to_sleep_in_every_block_also_where_nothing_is_generated(pair, prompts, tmp_path, monkeypatch):
    events: list[str] = []
    for name in ("sleep", "generate"):
        method = getattr(StudentGenerator, name)
        monkeypatch.setattr(
            StudentGenerator, name, lambda *given, name=name, method=method: (events.append(name), method(*given))[1]
        )
    config = OnPolicyConfig(sampling=SamplingConfig(max_completion_length=4), num_generations=1, lmbda=0.5)
    recipe = TrainConfig(
        losses=tuple(parse_losses(["byte-kl"])), max_steps=8, per_device_train_batch_size=2, on_policy=config
    )
    teacher = parse_online_teacher(f"{pair.teacher}:top_k=4", long_documents="refuse", trust_remote_code=False)
    paths = RunPaths(ModelRef(pair.student), (str(prompts),), (), tmp_path / "out", online_teachers=(teacher,))
    distill(paths, recipe, LoggingConfig(), open_inputs(paths, recipe, Tokenizer(pair.student)), force=False)
    assert events.count("sleep") == 8
    assert 0 < events.count("generate") < 8


@pytest.mark.slow
def test_two_processes_train_the_same_student_as_one(pair, prompts, reference_run, tmp_path):
    output = tmp_path / "two"
    done = run(pair, prompts, output, "--max-steps", 8, "--save-steps", 3, "--steps-per-generation", 2,
               "--loss", "byte-kl", "--reward", "regex:pattern=apples", "--num-processes", 2,
               "--per-device-train-batch-size", 2)  # fmt: skip
    assert "2 processes" in done.stderr
    for one, other in zip(*(read_metrics(folder / "metrics.jsonl") for folder in (output, reference_run)), strict=True):
        assert one["rollout_length"] == other["rollout_length"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    expected = load_file(reference_run / "model.safetensors")
    for name, weight in load_file(output / "model.safetensors").items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-4 * float(expected[name].abs().max()))


@pytest.mark.slow
def test_rollout_cache_teacher_and_distill_equal_one_on_policy_command(pair, prompts, tmp_path):
    """One rollout batch, whose documents are all in one step."""
    sampling = ["--num-generations", 2, "--max-completion-length", 12, "--seed", 42]
    rollouts, cache = tmp_path / "rollouts.jsonl", tmp_path / "cache"
    run_xtk("rollout", pair.student, prompts, *sampling, "-o", rollouts)
    run_xtk("cache-teacher", pair.teacher, rollouts, "--top-k", 16, "--precision", "float32", "-o", cache)
    rows = TeacherCache(cache)
    assert 0 < len(rows) <= 10  # empty completions are not written, and have no weight
    training = ["--loss", "byte-kl", "--max-steps", 1, "--learning-rate", 1e-3, "--warmup-ratio", 0, "--seed", 42,
                "--per-device-train-batch-size"]  # fmt: skip
    run_xtk("distill", pair.student, cache, *training, len(rows), "-o", tmp_path / "pipeline")
    run_xtk("distill-on-policy", pair.student, prompts, "--teacher", f"{pair.teacher}:top_k=16", *sampling[:-2],
            *training, 10, "-o", tmp_path / "command")  # fmt: skip
    student = Tokenizer(pair.student)
    assert all(
        rows.read_document(number).document.sampled_tokens.tokenizer_fingerprint == student.fingerprint
        for number in range(len(rows))
    )
    command_metrics, pipeline_metrics = (
        read_metrics(tmp_path / name / "metrics.jsonl")[0] for name in ("command", "pipeline")
    )
    assert command_metrics["loss"] == pytest.approx(pipeline_metrics["loss"], rel=1e-5)
    assert command_metrics["gradient_norm"] == pytest.approx(pipeline_metrics["gradient_norm"], rel=1e-5)
    # AdamW's first step is the sign of the gradient, or of rounding errors where it is zero: so logits are compared.
    ids = torch.arange(2, 42)[None]
    initial_logits, command_logits, pipeline_logits = (
        AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        for folder in (pair.student, tmp_path / "command", tmp_path / "pipeline")
    )
    assert (command_logits - pipeline_logits).norm() < 0.02 * (command_logits - initial_logits).norm()


@pytest.mark.slow
def test_splitting_a_step_into_micro_batches_changes_nothing(pair, prompts, tmp_path):
    """Reward weights are relative to the step, not to a micro-batch, in which they would cancel."""
    reward_file = tmp_path / "judge.py"
    reward_file.write_text("def length(completion, prompt, row):\n    return len(completion) % 7 / 7\n")
    options = ["--loss", "byte-kl", "--loss", "policy-gradient", "--reward", f"{reward_file}:length", "--reward-beta",
               0.5, "--max-steps", 2, "--save-steps", 0, "--offload-student"]  # fmt: skip
    for size in (4, 1):
        run(pair, prompts, tmp_path / str(size), *options, "--per-device-train-batch-size", size,
            "--gradient-accumulation-steps", 4 // size)  # fmt: skip
    reference_run, split_run = (read_metrics(tmp_path / name / "metrics.jsonl") for name in "41")
    for one, other in zip(reference_run, split_run, strict=True):
        for name in ("loss", "byte-kl", "policy-gradient", "importance_ratio", "clip_fraction", "gradient_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)
    assert reference_run[0]["importance_ratio"] == pytest.approx(
        1, abs=1e-4
    )  # trainer and generator assign the sampled tokens the same probability
    assert reference_run[0]["clip_fraction"] == 0
    run(pair, prompts, tmp_path / "alike", *options[:6], *options[8:])
    without_reward_beta = read_metrics(tmp_path / "alike" / "metrics.jsonl")
    assert without_reward_beta[0]["byte-kl"] != pytest.approx(reference_run[0]["byte-kl"], rel=1e-3)


@pytest.mark.slow
def test_a_prompt_that_fills_the_context_is_refused_before_training(pair, tmp_path):
    data = small_inputs.write_jsonl(tmp_path / "prompts.jsonl", ["Anna has", "12 and 30 and " * 400])
    done = run(pair, data, tmp_path / "out", "--loss", "byte-kl", "--max-steps", 2, code=1)
    assert "1 of 2 prompts leave no space for a completion" in " ".join(done.stderr.split())
    assert "row 1 of the data" in done.stderr
    assert not (tmp_path / "out" / "rollout_batches").exists()


@pytest.mark.slow
def test_rollouts_above_the_maximum_length_are_refused_or_truncated(pair, prompts, tmp_path):
    options = ["--loss", "byte-kl", "--max-steps", 1, "--max-length", 14]
    done = run(pair, prompts, tmp_path / "out", *options, code=1)
    assert "more than --max-length 14" in " ".join(done.stderr.split())
    run(pair, prompts, tmp_path / "cut", *options, "--long-documents", "truncate")


@pytest.mark.parametrize("fields", [{"lora_r": 4, "load_in_4bit": True}, {"lora_r": 4, "load_in_8bit": True}])
def test_an_engine_is_refused_for_weights_that_it_cannot_load(fields):
    config = OnPolicyConfig(backend="server", server=("http://127.0.0.1:9",))
    with pytest.raises(XtkError, match="cannot load weights with"):
        check_engine_can_load(config, StudentModelConfig(**fields))
    check_engine_can_load(OnPolicyConfig(), StudentModelConfig(**fields))


@pytest.mark.long
def test_a_teacher_on_separate_devices_gives_the_same_losses(pair, prompts, tmp_path):
    options = ["--loss", "byte-kl", "--max-steps", 2, "--save-steps", 0]
    run(pair, prompts, tmp_path / "with", *options)
    done = run(pair, prompts, tmp_path / "apart", *options, "--devices", "teacher=0")
    assert "in a subprocess on devices 0" in done.stderr
    one, other = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("with", "apart"))
    assert [line["loss"] for line in one] == pytest.approx([line["loss"] for line in other], rel=1e-6)
    for invalid in ("teachr=0", "teacher=x", "teacher=0,rollout=0", "teacher=0,teacher=1"):
        run(pair, prompts, tmp_path / "wrong", *options, "--devices", invalid, code=1)
    done = run(pair, prompts, tmp_path / "wrong", *options, "--devices", "rollout=0", code=1)
    assert "--rollout-backend vllm" in done.stderr


@pytest.mark.long
def test_a_run_killed_at_random_times_ends_bitwise_equal(pair, prompts, reference_run, tmp_path):
    arguments = command_of_reference_run(pair, prompts)
    rng = random.Random(5)
    for number in range(20):
        output = tmp_path / str(number)
        for _ in range(2):
            process = start_run([*arguments, output])
            wait_for_path(output / "recipe.json", process)
            time.sleep(rng.uniform(0, 4))
            process.kill()
            process.communicate()
        process = start_run([*arguments, output])
        _, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
        assert (output / "model.safetensors").read_bytes() == (reference_run / "model.safetensors").read_bytes()
        shutil.rmtree(output)


@pytest.mark.slow
def test_lmbda_mixes_on_policy_steps_and_steps_on_the_data(pair, prompts, tmp_path):
    run(pair, prompts, tmp_path / "out", "--max-steps", 12, "--save-steps", 0, "--lmbda", 0.5, "--loss", "ce",
        "--loss", "byte-kl", "--num-iterations", 2)  # fmt: skip
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    # Cross-entropy is computed on the data's completions: on-policy steps have none.
    on_policy = ["ce" not in line for line in lines]
    assert any(on_policy)
    assert not all(on_policy)
    assert on_policy[::2] == on_policy[1::2]
    assert all(line["byte-kl"] > 0 for line in lines)
    assert [line["is_on_policy_step"] == 1 for line in lines] == on_policy
    for line, is_on_policy in zip(lines, on_policy, strict=True):  # only on-policy steps have metrics of rollouts
        assert any(name.startswith("rollout_") for name in line) == is_on_policy


@pytest.mark.slow
def test_a_prompt_template_trains_like_data_with_rendered_prompts(pair, tmp_path):
    """With a prompt template, a chat template and its arguments, and steps on the data's completions."""
    student, teacher, other = (tmp_path / name for name in ("student", "teacher", "other"))
    thinking = "{% if add_generation_prompt and not enable_thinking | default(true) %}<none>{% endif %}"
    for folder, source, template in (
        (student, pair.student, HEADERS + GENERATION[HEADERS] + thinking),
        (other, pair.student, HEADERS + GENERATION[HEADERS].replace("{% endif %}", "<none>{% endif %}")),
        (teacher, pair.teacher, TURNS + GENERATION[TURNS]),
    ):
        shutil.copytree(source, folder)
        (folder / "chat_template.jinja").write_text(template)
    names = ["Anna", "Bert", "Clara", "Dora", "Emil"]
    completions = [f" {at} apples are left." for at in range(len(names))]
    write_rows(
        tmp_path / "rows.jsonl",
        [{"who": person, "left": text} for person, text in zip(names, completions, strict=True)],
    )
    questions = [f"{person} gives some.\nHow many?" for person in names]
    write_rows(
        tmp_path / "talks.jsonl",
        [
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in zip(questions, completions, strict=True)
        ],
    )
    (tmp_path / "form.jinja").write_text("{{who}} gives some.\nHow many?\n")
    common = ["--teacher", f"{teacher}:top_k=16", *OPTIONS, "--max-steps", 6, "--save-steps", 0, "--lmbda", 0.5,
              "--loss", "ce", "--loss", "byte-kl"]  # fmt: skip
    template_options = ["--prompt-template", tmp_path / "form.jinja", "--apply-chat-template", "--chat-template-kwargs",
                        '{"enable_thinking": false}', "--columns", "completion=left"]  # fmt: skip
    run_xtk("distill-on-policy", student, tmp_path / "rows.jsonl", *common, *template_options, "-o", tmp_path / "out")
    run_xtk("distill-on-policy", other, tmp_path / "talks.jsonl", *common, "-o", tmp_path / "same")
    lines, expected = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("out", "same"))
    assert {"ce" not in line for line in lines} == {True, False}
    assert [line["loss"] for line in lines] == [line["loss"] for line in expected]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "same")]
    assert weights[0] == weights[1]
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())["identity"]["on_policy"]
    assert recipe["prompt_template"] == "{{who}} gives some.\nHow many?"
    refused = run_xtk(
        "distill-on-policy",
        student,
        tmp_path / "rows.jsonl",
        *common,
        *template_options[:-2],
        "-o",
        tmp_path / "x",
        code=1,
    )
    assert "the completion (column completion of the data) is missing; the record has who, left" in refused.stderr
    assert "--lmbda 1" in refused.stderr
    # The data's completions are part of the run's identity: with others, the existing output is of another run.
    refused = run_xtk(
        "distill-on-policy",
        student,
        tmp_path / "rows.jsonl",
        *common,
        *template_options[:-1],
        "completion=who",
        "-o",
        tmp_path / "out",
        code=1,
    )
    assert "--force" in refused.stderr
    refused = run_xtk(
        "distill-on-policy",
        pair.student,
        tmp_path / "rows.jsonl",
        *common,
        *template_options,
        "-o",
        tmp_path / "x",
        code=1,
    )
    assert "chat template" in refused.stderr
    assert not (tmp_path / "x").exists()


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_reverse_kl_on_the_students_candidates_is_zero_for_its_initial_weights(pair, prompts, tmp_path):
    """The support is the student's top-8 tokens; the teacher has the student's initial weights."""
    teacher = f"{pair.student}:support=candidates,top_k=8"
    done = run_xtk("distill-on-policy", pair.student, prompts, "--teacher", teacher, *OPTIONS,
                   "--loss", "reverse-kl", "--max-steps", 4, "--num-iterations", 2, "--save-steps", 0,
                   "--learning-rate", 1e-2, "--warmup-steps", 0, "-o", tmp_path / "out")  # fmt: skip
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert done.returncode == 0
    assert lines[0]["reverse-kl"] == pytest.approx(0, abs=1e-5)
    assert [line["staleness_steps"] for line in lines] == [0, 1, 0, 1]


@pytest.mark.slow
def test_self_teacher_with_privileged_prompts_has_current_averaged_or_fixed_weights(pair, tmp_path):
    data = tmp_path / "privileged.jsonl"
    rows = [
        {"prompt": f"Anna has {at} apples and", "teacher_prompt": f"She has 12. Anna has {at} apples and"}
        for at in range(4)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [*OPTIONS, "--max-steps", 3, "--save-steps", 0, "--learning-rate", 1e-2, "--warmup-steps", 0]
    losses = {}
    for name, teacher, more in (
        ("live", "self:top_k=16", []),
        ("ema", "self:weights=ema,top_k=16", ["--ema-decay", 0.5]),
        ("folder", f"{pair.student}:top_k=16", []),
    ):
        run_xtk("distill-on-policy", pair.student, data, "--teacher", teacher, *options, *more, "--loss", "forward-kl",
                "-o", tmp_path / name)  # fmt: skip
        losses[name] = [line["forward-kl"] for line in read_metrics(tmp_path / name / "metrics.jsonl")]
    # The first losses are equal; then the teacher has the student's current, averaged or initial weights.
    assert losses["live"][0] == pytest.approx(losses["folder"][0], rel=1e-5)
    assert losses["ema"][0] == pytest.approx(losses["folder"][0], rel=1e-5)
    assert losses["live"][0] > 0
    assert len({round(value[2], 7) for value in losses.values()}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mixture", "route", "sum"])
def test_several_teachers_score_the_rollouts_of_the_student(pair, tmp_path, method):
    data = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"Anna has {at} apples and", "by": ["teacher", "other"][at % 2]} for at in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = small_inputs.make_teacher(tmp_path / "other", seed=9)
    routes = ["--route-column", "by"] if method == "route" else []
    run_xtk(
        "distill-on-policy",
        pair.student,
        data,
        "--teacher",
        f"{pair.teacher}:top_k=16",
        "--teacher",
        f"{other}:top_k=16",
        "--combine-teachers",
        method,
        *routes,
        *OPTIONS,
        "--loss",
        "byte-kl",
        "--max-steps",
        3,
        "--save-steps",
        0,
        "-o",
        tmp_path / "out",
    )
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    names = ["byte-kl"] if method == "mixture" else ["byte-kl/teacher", "byte-kl/other"]
    assert all(line[name] > 0 for line in lines for name in names)


@pytest.mark.slow
def test_all_tokens_can_be_candidates_but_zero_tokens_cannot(pair, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text(json.dumps({"prompt": "Anna has 12 apples"}) + "\n")
    command = [
        "distill-on-policy",
        pair.student,
        data,
        *OPTIONS,
        "--loss",
        "byte-kl",
        "--max-steps",
        1,
        "--save-steps",
        0,
    ]
    teacher = f"{pair.teacher}:support=candidates,top_k"
    assert (
        "top_k is 0, but must be at least 1"
        in run_xtk(*command, "--teacher", f"{teacher}=0", "-o", tmp_path / "no", code=1).stderr
    )
    run_xtk(*command, "--teacher", f"{teacher}=all", "-o", tmp_path / "out")
    assert read_metrics(tmp_path / "out" / "metrics.jsonl")[-1]["byte-kl"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (["", "teacher", "other"], "the --route-column of a document is empty"),
        (["teacher", "other", "typo"], "has 'typo', which is not the name of a teacher"),
        (["teacher", "teacher"], "no document has the teacher other in its --route-column"),
    ],
)
def test_prompts_that_no_teacher_would_score_are_refused(pair, tmp_path, routes, message):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": "Anna has 12 apples", "by": name}) + "\n" for name in routes))
    other = small_inputs.make_teacher(tmp_path / "other", seed=9)
    command = [
        "distill-on-policy",
        pair.student,
        data,
        "--teacher",
        pair.teacher,
        "--teacher",
        other,
        "--combine-teachers",
        "route",
        *OPTIONS,
        "--loss",
        "byte-kl",
        "--max-steps",
        3,
        "-o",
        tmp_path / "out",
    ]
    assert message in run_xtk(*command, "--route-column", "by", code=1).stderr
    assert "the --route-column of a document is empty" in run_xtk(*command, code=1).stderr
    assert not (tmp_path / "out").exists()


COUNTDOWN = """
class Countdown:
    role = "tool"

    def reset(self, record):
        self.left = record["turns"]
        return None

    def step(self, text):
        self.left -= 1
        return f" ({self.left} left) ", self.left == 0

    def reward(self):
        return 1.0
"""


def test_a_prompt_that_fills_the_context_with_its_environment_is_refused(pair, tmp_path):
    (tmp_path / "countdown.py").write_text(COUNTDOWN)
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": "Anna has 12 " * size, "turns": 1}) + "\n" for size in (1, 4000)))
    command = (
        "distill-on-policy",
        pair.student,
        data,
        "--teacher",
        f"{pair.teacher}:top_k=16",
        *OPTIONS,
        "--max-steps",
        2,
        "--environment",
        tmp_path / "countdown.py:Countdown",
        "--loss",
        "byte-kl",
        "--long-documents",
        "truncate",
        "-o",
        tmp_path / "out",
    )
    refused = run_xtk(*command, code=1).stderr
    assert "1 prompts with the first message of the environment leave no space" in refused
    assert "row 1 of the data" in refused


@pytest.mark.slow
@pytest.mark.parametrize("is_chat", [False, True])
def test_turns_with_an_environment_train_only_the_students_tokens(pair, tmp_path, is_chat):
    student, teacher = (shutil.copytree(one, tmp_path / one.name) for one in (pair.student, pair.teacher))
    for folder, template in ((student, HEADERS), (teacher, TURNS)):
        (folder / "chat_template.jinja").write_text(template + GENERATION[template])
    (tmp_path / "countdown.py").write_text(COUNTDOWN)
    prompt = [{"role": "user", "content": "Anna has 12 apples and"}] if is_chat else "Anna has 12 apples and"
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt, "turns": turns}) + "\n" for turns in (1, 2, 3)))
    run_xtk("distill-on-policy", student, data, "--teacher", f"{teacher}:top_k=16",
            "--per-device-train-batch-size", 3, "--max-completion-length", 30, "--stop", "a", "--stop", "e",
            "--environment", tmp_path / "countdown.py:Countdown", "--loss", "policy-gradient", "--loss", "byte-kl",
            "--max-steps", 2, "--logging-steps", 1, "--save-steps", 0, "-o", tmp_path / "out")  # fmt: skip
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert lines[-1]["rollout_turns"] > 1
    assert 0 < lines[-1]["rollout_environment_token_fraction"] < 1
    assert lines[-1]["reward"] == 1


@pytest.mark.slow
def test_a_reward_that_can_score_no_row_is_refused_and_missing_scores_are_reported(pair, prompts, tmp_path):
    output = tmp_path / "out"
    done = run(pair, prompts, output, "--max-steps", 1, "--reward", "gsm8k:column=answr", code=1)
    assert "--reward gsm8k:column=answr cannot score any row of the data" in done.stderr
    assert "prompt, completion, answer" in done.stderr
    assert not output.exists()
    done = run_xtk(
        "rollout", pair.student, prompts, "--reward", "gsm8k:column=answr", "-o", tmp_path / "out.jsonl", code=1
    )
    assert "cannot score any row of the data" in done.stderr
    (tmp_path / "own.py").write_text("def nothing(completion, prompt, row):\n    return None\n")
    done = run(pair, prompts, output, "--max-steps", 2, "--reward", f"{tmp_path / 'own.py'}:nothing")
    assert done.stderr.count("warning: none of 4 completions was scored by --reward") == 2


@pytest.mark.slow
def test_invalid_on_policy_commands_are_refused(pair, prompts, tmp_path):
    output = tmp_path / "out"
    done = run_xtk("distill-on-policy", pair.student, prompts, "-o", output, code=1)
    assert "distill-on-policy needs --teacher" in done.stderr
    done = run(pair, prompts, output, "--num-generations", 3, "--max-steps", 1, code=1)
    assert "a multiple of --num-generations" in done.stderr
    for option in (("--temperature", 0), ("--stop", "x"), ("--reward", "gsm8k"), ("--no-scale-rewards",)):
        done = run_xtk("distill", pair.student, prompts, "--teacher", pair.teacher, *option, "-o", output, code=2)
        assert f"no option called {option[0]}" in done.stderr
    done = run_xtk("distill", pair.student, prompts, "--teacher", pair.teacher, "--devices", "rollout=0",
                   "-o", output, code=1)  # fmt: skip
    assert "only xtk distill-on-policy has --devices rollout=..." in done.stderr
    bare = tmp_path / "bare.jsonl"
    bare.write_text(json.dumps({"prompt": "Anna has"}) + "\n")
    done = run(pair, bare, output.with_name("other"), "--max-steps", 1, "--lmbda", 0.5, code=1)
    assert "prompt and completion" in done.stderr
    done = run_xtk(
        "distill-on-policy",
        pair.student,
        prompts,
        "--teacher",
        "self:weights=base",
        *OPTIONS,
        "--max-steps",
        1,
        "-o",
        output.with_name("third"),
        code=1,
    )
    assert "needs a student with an adapter" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--loss", "ce"), "--teacher is given, but no --loss uses a teacher"),
        (("--rollout-dtype", "bfloat16"), "--rollout-dtype needs --rollout-backend vllm"),
        (("--max-turns", 3), "--max-turns needs --environment"),
        (("--rollout-dtype", "int8", "--rollout-backend", "vllm"), "no value of --rollout-dtype called 'int8'"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(pair, prompts, tmp_path, options, message):
    done = run(pair, prompts, tmp_path / "out", "--max-steps", 1, *options, code=1)
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_long_documents_of_the_data_are_refused_or_skipped(pair, tmp_path):
    answers = ["12.", *("12 and " * 20 for _ in range(3)), "7.", "5.", "3."]
    rows = [{"prompt": f"Anna has {at}", "completion": answer} for at, answer in enumerate(answers)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--max-steps", 1, "--lmbda", 0, "--max-length", 24)
    done = run(pair, data, tmp_path / "out", *options, code=1)
    assert "3 of 7 documents have more tokens than the limit of 24" in done.stderr
    done = run(pair, data, tmp_path / "out", *options, "--long-documents", "skip")
    assert "more tokens than the limit of 24: --long-documents skip" in done.stderr
    assert "4 documents" in done.stderr


@pytest.mark.slow
def test_rollout_batches_with_more_documents_than_completions_are_noted(pair, prompts, tmp_path):
    done = run(pair, prompts, tmp_path / "out", "--max-steps", 1, "--steps-per-generation", 8)
    assert "it trains some of them several times" in done.stderr
