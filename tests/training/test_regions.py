"""Training on regions of conversations, with a teacher whose template has other markers."""

import json

import numpy as np
import pytest
import torch
from chat_families import write_family
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from xtk.batches.data_sources import DocumentsFromCaches
from xtk.batches.losses_per_teacher import assign_losses, open_teachers
from xtk.batches.micro_batches import BatchBuilder
from xtk.cache.reader import TeacherCache
from xtk.losses.head import fused_loss
from xtk.losses.spec import parse_losses
from xtk.losses.term import LossTerm
from xtk.models.output_head import OutputHead
from xtk.text.chat.conversation_tokens import REGIONS
from xtk.text.chat.regions import RegionWeights
from xtk.text.tokenizer import Tokenizer

# The student's template adds empty reasoning to it, which is markup.
GREETING = [{"role": "user", "content": "Thanks"}, {"role": "assistant", "content": "Welcome."}]
CITIES = {"Paris": "get_weather", "Berlin": "get_time"}


def write_model(folder, *, seed: int):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def conversation(city: str) -> list[dict]:
    call = {"type": "function", "function": {"name": CITIES[city], "arguments": {"city": city}}}
    return [
        {"role": "user", "content": f"Now in {city}?"},
        {"role": "assistant", "reasoning_content": f"I call {city}.", "content": "", "tool_calls": [call]},
    ]


@pytest.fixture(scope="module")
def student_and_folder(run, tmp_path_factory):
    """A student with `<think>` and `<tool_call>`, and a cache of a teacher that was trained with its own markers."""
    folder = tmp_path_factory.mktemp("regions")
    teacher = write_model(write_family("mistral", folder), seed=1)
    student = write_model(write_family("smollm3", folder), seed=2)
    data = folder / "data.jsonl"
    conversations = [*map(conversation, CITIES), GREETING]
    data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    run("distill", teacher, data, "--loss", "ce", *TRAINING, "-o", folder / "teacher")
    run("cache-teacher", folder / "teacher", data, "-o", folder / "cache")
    return student, folder


TRAINING = ["--max-steps", "150", "--learning-rate", "3e-3", "--max-grad-norm", "1", "--save-steps", "0"]


def generate_answers(student) -> dict[str, str]:
    tokenizer = AutoTokenizer.from_pretrained(student)
    model = AutoModelForCausalLM.from_pretrained(student).eval()
    found = {}
    for city in CITIES:
        prompt = tokenizer.apply_chat_template(
            conversation(city)[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**prompt, max_new_tokens=120, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        found[city] = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :])
    return found


@pytest.mark.slow
def test_student_learns_to_reason_call_tools_and_stop_despite_other_markers(run, student_and_folder, tmp_path):
    student, folder = student_and_folder
    run("distill", student, folder / "cache", *TRAINING, "--logging-steps", "50", "-o", tmp_path / "run")
    for city, answer in generate_answers(tmp_path / "run").items():
        call = json.dumps({"name": CITIES[city], "arguments": {"city": city}})
        assert answer == f"<think>\nI call {city}.\n</think>\n<tool_call>\n{call}\n</tool_call><|im_end|>"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "region_tokens/answer" in line or "region_tokens/tool-call" in line]
    first, last = logged[0], logged[-1]
    for region in ("reasoning", "reasoning-end", "tool-call", "end-of-turn"):
        assert first[f"region_loss/{region}"] > 10 * last[f"region_loss/{region}"]
        assert first[f"region_tokens/{region}"] > 0
    assert first["region_tokens/markup"] > 0


@pytest.mark.slow
def test_without_end_of_turn_the_student_does_not_learn_to_stop(run, student_and_folder, tmp_path):
    student, folder = student_and_folder
    regions = ["--train-on", "answer,reasoning,reasoning-end,tool-call"]
    run("distill", student, folder / "cache", *TRAINING, *regions, "-o", tmp_path / "run")
    for answer in generate_answers(tmp_path / "run").values():
        assert "</think>\n<tool_call>" in answer
        assert "<|im_end|>" not in answer


@pytest.mark.slow
def test_without_reasoning_end_the_student_does_not_learn_to_end_reasoning(run, student_and_folder, tmp_path):
    student, folder = student_and_folder
    regions = ["--train-on", "answer,reasoning,tool-call,end-of-turn"]
    run("distill", student, folder / "cache", *TRAINING, *regions, "-o", tmp_path / "run")
    assert not any("</think>" in answer for answer in generate_answers(tmp_path / "run").values())


def loss_and_gradient(student_and_folder, text: str, regions: RegionWeights):
    student, folder = student_and_folder
    tokenizer, (teacher,) = Tokenizer(student), open_teachers([TeacherCache(folder / "cache")], [], Tokenizer(student))
    ((assigned,), _) = assign_losses(parse_losses([text]), [teacher])
    space = teacher.comparison_space(assigned.rule.comparison_space)
    loss_term = LossTerm(assigned.rule, assigned.loss.make_divergence(), space)
    builder = BatchBuilder(DocumentsFromCaches(teacher.source), tokenizer, [loss_term], 512, region_weights=regions)
    batch = builder.build([0, 1, 2])
    vocab_size = tokenizer.embedding_rows
    torch.manual_seed(0)
    token_logits = torch.randn(batch.input_ids.size, vocab_size, dtype=torch.float64)
    logits = token_logits[batch.loss_positions].requires_grad_()
    term = batch.terms[0].to(torch.device("cpu"), 1.0)
    (_, (total,)) = fused_loss(logits, OutputHead(None), [term], 16)
    fused_loss(logits, OutputHead(None), [term], 16)[0].backward()
    gradient = torch.zeros_like(token_logits)
    gradient[batch.loss_positions] = logits.grad
    return float(total), gradient, batch, term


@pytest.mark.slow
@pytest.mark.parametrize("text", ["ce", "byte-kl", "alm", "uld", "bpm", "escd"])
def test_region_weights_scale_the_gradients_and_denominators_of_their_regions(student_and_folder, text):
    names = ["answer", "reasoning", "reasoning-end", "tool-call", "end-of-turn"]
    factors = dict(zip(names, [1.5, 0.5, 1.0, 3.0, 2.0], strict=True))
    total, gradient, batch, term = loss_and_gradient(student_and_folder, text, RegionWeights(names, factors))
    single_regions = {name: loss_and_gradient(student_and_folder, text, RegionWeights([name])) for name in names}
    expected = sum(factors[name] * found[1] for name, found in single_regions.items())
    torch.testing.assert_close(gradient, expected)
    assert total == pytest.approx(sum(factors[name] * found[0] for name, found in single_regions.items()))
    assert term.denominator == pytest.approx(
        sum(factors[name] * found[3].denominator for name, found in single_regions.items())
    )
    for name, found in single_regions.items():
        number = REGIONS.index(name)
        # Sums by region were added twice: fused_loss was called twice.
        assert float(term.region_sums[number]) / 2 == pytest.approx(factors[name] * found[0])
        assert batch.region_counts[1, number] == pytest.approx(factors[name] * found[3].denominator)
    assert float(term.region_sums[-1]) == 0


def test_markup_is_trained_by_default_and_only_without_a_teacher(student_and_folder):
    names = [name for name in REGIONS if name != "markup"]
    for text, is_trained in (("ce", True), ("byte-kl", False)):
        with_markup, chosen = (
            loss_and_gradient(student_and_folder, text, RegionWeights(*one))[3] for one in ([], [names])
        )
        assert (with_markup.denominator > chosen.denominator) == is_trained
        assert (np.isin(with_markup.regions, REGIONS.index("markup")).any()) == is_trained


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train-on", "answer", "--region-weights", "reasoning=2"], "add reasoning to --train-on"),
        (["--train-on", "answr"], "did you mean answer"),
        (["--train-on", ""], "--train-on has no region"),
        (["--region-weights", "answer=x"], "'x'"),
        (["--region-weights", "answer=0"], "above 0"),
        (["--advantage-clip", "answer=1"], "no loss has any"),
        (["--train-on", "answer,markup", "--loss", "byte-kl"], "add --loss ce"),
    ],
)
def test_invalid_region_options_are_refused(run, student_and_folder, tmp_path, options, message):
    student, folder = student_and_folder
    failed = run("distill", student, folder / "cache", *options, "-o", tmp_path / "run", code=1)
    assert message in failed.stderr
    assert "try:" in failed.stderr or "did you mean" in failed.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_with_selected_regions_is_found_again_and_resumed(run, student_and_folder, tmp_path):
    student, folder = student_and_folder
    command = ("distill", student, folder / "cache", "--train-on", "answer,reasoning", "--max-steps", 2,
               "--save-steps", 1, "--output", tmp_path / "run")  # fmt: skip
    run(*command)
    path = tmp_path / "run" / "model.safetensors"
    weights, written = path.read_bytes(), path.stat().st_mtime_ns
    run(*command)
    assert path.stat().st_mtime_ns == written
    for name in ("xtk.json", "model.safetensors"):
        (tmp_path / "run" / name).unlink()
    run(*command)
    assert path.read_bytes() == weights
