"""Speculative decoding: the text has the target's distribution; acceptance, lengths and costs are those of formulas."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from small_inputs import make_teacher, sentences
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)
from xtk_processes import run_here

from xtk.errors import XtkError
from xtk.evaluation.draft_acceptance import (
    BlockSizeMeasures,
    StepCosts,
    break_even_acceptance,
    expected_length,
    failures_by_category,
    token_categories,
)
from xtk.evaluation.speculative_decoding import (
    ACCEPTED,
    ADDED,
    REPLACED,
    CachedModel,
    SpeculativeCompletion,
    SpeculativeDecoder,
    check_croppable,
    next_token_probs,
)
from xtk.rollouts.generator_interface import SamplingConfig
from xtk.text.tokenizer import Tokenizer

PROMPT = np.array([3, 2, 3], np.int32)
GREEDY = SamplingConfig(temperature=0.0)


def make_model(kind: str, vocab_size: int, seed: int) -> torch.nn.Module:
    """Return a small random model with pronounced distributions; `gemma` has a sliding window of 8 tokens."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 48,
             "num_hidden_layers": 2 if kind == "gemma" else 1, "num_attention_heads": 2, "num_key_value_heads": 1,
             "initializer_range": 0.25, "tie_word_embeddings": False}  # fmt: skip
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, head_dim=16, sliding_window=8, layer_types=layers)).eval()


def near_copy(model: torch.nn.Module, kind: str, vocab_size: int, share: float) -> torch.nn.Module:
    """Return a draft: the target's weights, mixed with others."""
    other = make_model(kind, vocab_size, seed=7)
    mixed = {name: torch.lerp(weight, model.state_dict()[name], share) for name, weight in other.state_dict().items()}
    other.load_state_dict(mixed)
    return other


def make_decoder(kind: str, vocab_size: int, sampling: SamplingConfig, share: float = 0.8, stop: int = -1):
    target = make_model(kind, vocab_size, seed=3)
    draft = near_copy(target, kind, vocab_size, share)
    return SpeculativeDecoder(
        CachedModel(target, vocab_size), CachedModel(draft, vocab_size), sampling, frozenset({stop})
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_greedy_text_is_exactly_that_of_the_target_alone(kind):
    decoder = make_decoder(kind, 60, GREEDY)
    target = decoder.target.model
    target.generation_config.eos_token_id = None
    reference = target.generate(torch.from_numpy(PROMPT)[None].long(), max_new_tokens=48, do_sample=False)[0, 3:]
    origins = set()
    for size in (0, 1, 2, 4, 8):
        completion = decoder.generate(PROMPT, size, 40, seed=0)
        assert completion.ids.tolist() == reference[: len(completion.ids)].tolist()
        assert 40 <= len(completion.ids) <= 40 + size
        origins |= set(completion.origins.tolist())
    assert origins == {ACCEPTED, REPLACED, ADDED}
    assert len(set(reference.tolist())) > 3


def test_greedy_acceptance_is_agreement_of_the_most_likely_tokens():
    decoder = make_decoder("llama", 60, GREEDY)
    completion = decoder.generate(PROMPT, 1, 40, seed=0)
    ids = torch.from_numpy(np.concatenate([PROMPT, completion.ids])).long()[None]
    with torch.no_grad():
        target, draft = (one.model(ids).logits[0].argmax(-1) for one in (decoder.target, decoder.draft))
    agree = (target == draft)[len(PROMPT) - 1 : -1].numpy()
    proposed = completion.origins != ADDED
    assert (completion.origins[proposed] == ACCEPTED).tolist() == agree[proposed].tolist()


SAMPLINGS = [SamplingConfig(temperature=1.0), SamplingConfig(temperature=1.3, top_k=3, top_p=0.9)]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "filtered"])
def test_sampled_text_has_the_distribution_of_the_target(sampling):
    vocab_size, length, count = 4, 2, 300
    decoder = make_decoder("llama", vocab_size, sampling, share=0.7)
    seen: dict[tuple[int, ...], int] = {}
    accepted = proposed = 0
    for seed in range(count):
        completion = decoder.generate(PROMPT, 2, length, seed)
        text = tuple(completion.ids[:length].tolist())
        seen[text] = seen.get(text, 0) + 1
        proposed += int((completion.origins != ADDED).sum())
        accepted += int((completion.origins == ACCEPTED).sum())
    assert 0.2 < accepted / proposed < 0.98  # both ways are taken
    statistic = freedom = 0
    for text in itertools.product(range(vocab_size), repeat=length):
        expected = count * sequence_probability(decoder.target.model, text, sampling)
        if expected == 0:
            assert text not in seen
        elif expected >= 2:
            statistic += (seen.get(text, 0) - expected) ** 2 / expected
            freedom += 1
    assert freedom >= 4
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def sequence_probability(model: torch.nn.Module, text: tuple[int, ...], sampling: SamplingConfig) -> float:
    ids = torch.tensor([[*PROMPT.tolist(), *text]])
    with torch.no_grad():
        probs = next_token_probs(model(ids).logits[0, len(PROMPT) - 1 : -1], sampling)
    return float(np.prod([float(row[token]) for row, token in zip(probs, text, strict=True)]))


def test_acceptance_is_the_overlap_of_the_filtered_distributions():
    sampling = SamplingConfig(temperature=0.9, top_k=6)
    decoder = make_decoder("llama", 20, sampling)
    completions = [decoder.generate(PROMPT, 1, 1, seed) for seed in range(150)]
    with torch.no_grad():
        ids = torch.from_numpy(PROMPT)[None].long()
        logits = [one.model(ids).logits[0, -1:] for one in (decoder.target, decoder.draft)]
    p, q = (next_token_probs(one, sampling)[0] for one in logits)
    overlap = float(torch.minimum(p, q).sum())
    measured = np.mean([completion.origins[0] == ACCEPTED for completion in completions])
    assert 0.1 < overlap < 0.95
    assert abs(measured - overlap) < 4 * math.sqrt(overlap * (1 - overlap) / len(completions))


def test_a_stop_token_ends_the_text_also_inside_of_a_block():
    free = make_decoder("llama", 60, GREEDY, share=1.0).generate(PROMPT, 4, 30, seed=0)
    stop = int(free.ids[6])
    end = free.ids.tolist().index(stop) + 1
    stopped = make_decoder("llama", 60, GREEDY, share=1.0, stop=stop).generate(PROMPT, 4, 30, seed=0)
    assert stopped.ids.tolist() == free.ids[:end].tolist()
    assert len(stopped.positions) == len(stopped.origins) == end


def test_a_draft_equal_to_the_target_is_always_accepted():
    completion = make_decoder("llama", 30, SamplingConfig(temperature=1.0), share=1.0).generate(PROMPT, 4, 40, seed=1)
    assert REPLACED not in completion.origins
    assert completion.num_blocks == len(completion.ids) / 5


def test_recurrent_models_are_refused():
    model = MambaForCausalLM(MambaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(XtkError, match="attention layers only"):
        check_croppable(model)


def completion_of(blocks: list[int], size: int, seconds: float) -> SpeculativeCompletion:
    """Return a completion with this number of accepted proposals in each block."""
    positions = np.concatenate([np.arange(accepted + 1) for accepted in blocks])
    last = [REPLACED if accepted < size else ADDED for accepted in blocks]
    origins = [origin for accepted, end in zip(blocks, last, strict=True) for origin in [*[ACCEPTED] * accepted, end]]
    count = len(positions)
    return SpeculativeCompletion(
        np.zeros(count, np.int32), positions.astype(np.int16), np.array(origins, np.int8), seconds
    )


def test_measures_of_known_blocks():
    alone = [completion_of([0] * 10, 0, 10.0), completion_of([0] * 4, 0, 4.0)]
    spoken = [completion_of([2, 0, 1], 2, 3.0), completion_of([2, 2], 2, 3.0)]
    measures = BlockSizeMeasures(2, spoken, alone)
    assert measures.acceptance.value == pytest.approx(7 / 9)
    assert [one.value for one in measures.acceptance_by_position] == pytest.approx([4 / 5, 3 / 4])
    assert measures.accepted_length.value == pytest.approx(12 / 5)
    assert measures.speed_up.value == pytest.approx(1.0 / (6 / 12))
    record = measures.to_json(StepCosts(0.02, 0.1, {2: 0.15}), [0.05])
    assert record["expected_speed_up"] == pytest.approx(2.4 / (2 * 0.2 + 1.5))
    assert record["by_cost_ratio"]["0.05"]["expected_speed_up"] == pytest.approx(2.4 / 1.1)


def test_the_difference_of_two_drafts_is_paired_over_prompts():
    alone = [completion_of([0] * 4, 0, 4.0) for _ in range(3)]
    good = BlockSizeMeasures(2, [completion_of(blocks, 2, 1.0) for blocks in ([2, 2], [2, 1], [1, 0])], alone)
    poor = BlockSizeMeasures(2, [completion_of(blocks, 2, 1.0) for blocks in ([1, 1], [1, 0], [0, 0])], alone)
    difference = good.acceptance_minus(poor)
    assert difference.value == pytest.approx(good.acceptance.value - poor.acceptance.value)
    unpaired = math.hypot(good.acceptance.finite_error, poor.acceptance.finite_error)
    assert 0 < difference.finite_error < unpaired
    assert good.acceptance_minus(good).finite_error == 0


def test_break_even_is_where_the_expected_length_is_the_cost():
    assert expected_length(0.5, 2) == pytest.approx((1 - 0.5**3) / (1 - 0.5))
    assert expected_length(1.0, 3) == 4
    for size, cost in itertools.product((1, 4, 8), (1.05, 1.4, 1.9)):
        assert expected_length(break_even_acceptance(size, cost), size) == pytest.approx(cost)
    assert break_even_acceptance(2, 3.0) is None


def test_rejections_are_counted_by_the_category_of_the_text(pair):
    tokenizer = Tokenizer(pair.teacher)
    (encoded,) = tokenizer.encode(["x = 3\n```\nfoo(3)\n```\n日"])
    ids = np.append(encoded.ids, tokenizer.special_token_ids["eos"]).astype(np.int32)
    categories = token_categories(ids, tokenizer)
    assert len(categories) == len(ids)
    assert {"Latin", "punctuation", "digits", "code", "special tokens", "Han"} <= set(categories)
    assert categories[-1] == "special tokens"
    origins = np.full(len(ids), ACCEPTED, np.int8)
    origins[categories.index("digits")] = REPLACED
    origins[-1] = ADDED
    table = failures_by_category([SpeculativeCompletion(ids, np.zeros(len(ids), np.int16), origins, 1.0)], tokenizer)
    assert table["digits"] == (1, 1)
    assert "special tokens" not in table
    assert sum(rejected for _, rejected in table.values()) == 1


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target and a draft with the same tokenizer, and prompts."""
    folder = tmp_path_factory.mktemp("draft")
    make_teacher(folder / "target")
    make_teacher(folder / "draft", seed=2)
    make_teacher(folder / "other", seed=3)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text[:30]}) + "\n" for text in sentences(3)))
    return folder


def test_the_command_writes_results_and_a_page(models):
    arguments = ["evaluate-draft", "draft", "target", "prompts.jsonl", "--num-draft-tokens", "2,1",
                 "--max-completion-length", 8, "--temperature", 1]  # fmt: skip
    done = run_here(*arguments, "--html", "draft.html", "--json", cwd=models)
    (record,) = map(json.loads, done.stdout.splitlines())
    assert [block["num_draft_tokens"] for block in record["block_sizes"]] == [1, 2]
    assert record["prompts"] == 3
    for block in record["block_sizes"]:
        assert 1 <= block["accepted_length"] <= block["num_draft_tokens"] + 1
        assert len(block["acceptance_by_position"]) == block["num_draft_tokens"]
        assert set(block["by_cost_ratio"]) == {"0.05", "0.1"}
    page = (models / "draft.html").read_text()
    assert page.count("<svg") == 1
    assert "draft as a draft of target" in page
    again = json.loads(run_here(*arguments, "--json", cwd=models).stdout)
    same = ("acceptance", "accepted_length")
    assert [[block[name] for name in same] for block in again["block_sizes"]] == [
        [block[name] for name in same] for block in record["block_sizes"]
    ]
    assert again["compared"] == []
    printed = run_here(*arguments, cwd=models).stdout
    assert "acceptance by position in the block" in printed
    assert "a draft step costs" in printed


def test_drafts_are_compared_on_the_same_prompts(models):
    arguments = ["target", "prompts.jsonl", "--num-draft-tokens", "2", "--max-completion-length", 8, "--temperature", 1]
    alone = {
        name: json.loads(run_here("evaluate-draft", name, *arguments, "--json", cwd=models).stdout)
        for name in ("draft", "other")
    }
    together = ["evaluate-draft", "draft", *arguments, "--compare-to", "other"]
    record = json.loads(run_here(*together, "--json", cwd=models).stdout)
    (block,), (compared,) = record["block_sizes"], record["compared"]
    (other,) = compared["block_sizes"]
    for name, one in {"draft": record, "other": compared}.items():
        assert one["draft"] == name
        for key in ("acceptance", "accepted_length"):
            assert one["block_sizes"][0][key] == alone[name]["block_sizes"][0][key]
    assert other["acceptance_difference"] == pytest.approx(block["acceptance"] - other["acceptance"])
    assert "draft minus other" in run_here(*together, cwd=models).stdout
    assert "given twice" in run_here(*together, "--compare-to", "other", cwd=models, code=1).stderr


def test_a_draft_with_another_vocabulary_is_refused(models, pair):
    done = run_here("evaluate-draft", pair.student, "target", "prompts.jsonl", cwd=models, code=1)
    assert "another vocabulary" in done.stderr
    assert f"xtk transplant {pair.student} target -o DRAFT" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-draft-tokens", "0,2"], "--num-draft-tokens"),
        (["--num-draft-tokens", "1.5"], "whole numbers"),
        (["--cost-ratios", "x"], "--cost-ratios"),
        (["--top-p", "0.9"], "--temperature 0 does not sample"),
    ],
)
def test_invalid_options_are_refused(models, arguments, message):
    assert (
        message in run_here("evaluate-draft", "draft", "target", "prompts.jsonl", *arguments, cwd=models, code=2).stderr
    )
