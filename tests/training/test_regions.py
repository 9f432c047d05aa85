"""What a student learns from each region of conversations, from a teacher with other markers."""

import json

import numpy as np
import pytest
import torch
from chat_families import write_family
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from xtk.artifacts.teacher_cache import TeacherCache
from xtk.losses.fused_head_and_loss import fused_loss
from xtk.losses.loss_spec import parse_losses
from xtk.losses.loss_term import LossTerm
from xtk.models.output_head import OutputHead
from xtk.tokens.conversation_tokens import REGIONS
from xtk.tokens.token_regions import RegionWeights
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.data_sources import CacheSource
from xtk.training.losses_per_teacher import assign_losses, open_teachers
from xtk.training.micro_batches import BatchBuilder

# The student's template writes an empty thought into it, which is markup.
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
def taught(run, tmp_path_factory):
    """A student with `<think>` and `<tool_call>`, and a cache of a teacher that was trained to answer with its own."""
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


def answers(student) -> dict[str, str]:
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


def test_it_learns_to_reason_to_call_a_tool_and_to_stop_from_a_teacher_with_other_markers(run, taught, tmp_path):
    student, folder = taught
    run("distill", student, folder / "cache", *TRAINING, "--logging-steps", "50", "-o", tmp_path / "run")
    for city, answer in answers(tmp_path / "run").items():
        call = json.dumps({"name": CITIES[city], "arguments": {"city": city}})
        assert answer == f"<think>\nI call {city}.\n</think>\n<tool_call>\n{call}\n</tool_call><|im_end|>"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "region_tokens/answer" in line or "region_tokens/tool-call" in line]
    first, last = logged[0], logged[-1]
    for region in ("reasoning", "reasoning-end", "tool-call", "end-of-turn"):
        assert first[f"region_loss/{region}"] > 10 * last[f"region_loss/{region}"]
        assert first[f"region_tokens/{region}"] > 0
    assert "region_tokens/markup" not in first


def test_without_the_end_of_turn_it_does_not_learn_to_stop(run, taught, tmp_path):
    student, folder = taught
    regions = ["--train-on", "answer,reasoning,reasoning-end,tool-call"]
    run("distill", student, folder / "cache", *TRAINING, *regions, "-o", tmp_path / "run")
    for answer in answers(tmp_path / "run").values():
        assert "</think>\n<tool_call>" in answer
        assert "<|im_end|>" not in answer


def test_without_the_end_of_reasoning_it_does_not_learn_to_close_it(run, taught, tmp_path):
    student, folder = taught
    regions = ["--train-on", "answer,reasoning,tool-call,end-of-turn"]
    run("distill", student, folder / "cache", *TRAINING, *regions, "-o", tmp_path / "run")
    assert not any("</think>" in answer for answer in answers(tmp_path / "run").values())


def terms_of(taught, text: str, regions: RegionWeights):
    student, folder = taught
    tokenizer, (teacher,) = Tokenizer(student), open_teachers([TeacherCache(folder / "cache")], [], Tokenizer(student))
    ((taken,), _) = assign_losses(parse_losses([text]), [teacher])
    space = teacher.comparison_space(taken.rule.comparison_space)
    objective = LossTerm(taken.rule, taken.loss.make_divergence(), space)
    builder = BatchBuilder(CacheSource(teacher.source), tokenizer, [objective], 512, region_weights=regions)
    batch = builder.build([0, 1, 2])
    size = tokenizer.embedding_rows
    torch.manual_seed(0)
    of_token = torch.randn(batch.input_ids.size, size, dtype=torch.float64)
    logits = of_token[batch.loss_positions].requires_grad_()
    term = batch.terms[0].to(torch.device("cpu"), 1.0)
    (_, (total,)) = fused_loss(logits, OutputHead(None), [term], 16)
    fused_loss(logits, OutputHead(None), [term], 16)[0].backward()
    gradient = torch.zeros_like(of_token)
    gradient[batch.loss_positions] = logits.grad
    return float(total), gradient, batch, term


@pytest.mark.parametrize("text", ["ce", "byte-kl", "alm", "uld", "bpm", "escd"])
def test_weights_of_regions_are_weights_of_their_gradients_and_of_their_denominators(taught, text):
    names = ["answer", "reasoning", "reasoning-end", "tool-call", "end-of-turn"]
    factors = dict(zip(names, [1.5, 0.5, 1.0, 3.0, 2.0], strict=True))
    total, gradient, batch, term = terms_of(taught, text, RegionWeights(names, factors))
    alone = {name: terms_of(taught, text, RegionWeights([name])) for name in names}
    expected = sum(factors[name] * found[1] for name, found in alone.items())
    torch.testing.assert_close(gradient, expected)
    assert total == pytest.approx(sum(factors[name] * found[0] for name, found in alone.items()))
    assert term.denominator == pytest.approx(sum(factors[name] * found[3].denominator for name, found in alone.items()))
    for name, found in alone.items():
        number = REGIONS.index(name)
        # Sums by region were added twice: there were two passes.
        assert float(term.region_sums[number]) / 2 == pytest.approx(factors[name] * found[0])
        assert batch.region_counts[1, number] == pytest.approx(factors[name] * found[3].denominator)
    assert float(term.region_sums[-1]) == 0


def test_markup_is_trained_when_asked_and_only_without_a_teacher(taught):
    names = [*REGIONS]
    for text, is_more in (("ce", True), ("byte-kl", False)):
        default, asked = (terms_of(taught, text, RegionWeights(*one))[3] for one in ([], [names]))
        assert (asked.denominator > default.denominator) == is_more
        assert (np.isin(asked.regions, REGIONS.index("markup")).any()) == is_more


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
def test_options_of_regions_that_mean_nothing_are_refused(run, taught, tmp_path, options, message):
    student, folder = taught
    failed = run("distill", student, folder / "cache", *options, "-o", tmp_path / "run", code=1)
    assert message in failed.stderr
    assert "try:" in failed.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_with_chosen_regions_is_found_again_and_continued(run, taught, tmp_path):
    student, folder = taught
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
