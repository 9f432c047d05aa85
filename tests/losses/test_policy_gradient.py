"""policy-gradient: its expected gradient, PPO clipping, and the tokens of a rollout that are trained."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from reference_losses import Case, make_teacher_logprobs, predicted_spans, random_case, reference_policy_gradient
from small_vocabularies import greedy_encode
from torch import Tensor

from xtk.errors import XtkError
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.head import fused_loss
from xtk.losses.interface import LossInputs
from xtk.losses.spec import parse_losses
from xtk.models.output_head import OutputHead
from xtk.projection.projection import SparseProjection

CPU = torch.device("cpu")
UNCLIPPED = "policy-gradient:clip=1000,epsilon=1,epsilon_high=1000"


def cells_of(text: str, example: LossInputs, space: object = None) -> LossCells:
    (spec,) = parse_losses([text])
    return dataclasses.replace(spec.make_loss().build_cells(example, space), divergence=spec.make_divergence())


def loss_sum(cells: LossCells, logits: Tensor, scale: float = 1.0) -> Tensor:
    return fused_loss(logits, OutputHead(None), [cells.to(CPU, scale)], 64)[0]


# --- expected gradients


Ids = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ToyModels:
    """Two models with few possible completions: at most `length` tokens; token 0 is the start and the end of a text.

    With `one_span` a text is one span. Otherwise each student token is a span, and the teacher encodes it separately.
    """

    student: tuple[bytes, ...]
    teacher: tuple[bytes, ...]
    length: int
    one_span: bool = False

    @functools.cached_property
    def completions(self) -> list[Ids]:
        def extend(prefix: Ids) -> Iterator[Ids]:
            if len(prefix) == self.length or prefix[-1:] == (0,):
                yield prefix
                return
            for token in range(len(self.student)):
                yield from extend((*prefix, token))

        return list(extend(()))

    @functools.cached_property
    def prefixes(self) -> dict[Ids, int]:
        """Return the row of the student's logits for each prefix."""
        found = {ids[:stop]: None for ids in self.completions for stop in range(len(ids))}
        return {prefix: number for number, prefix in enumerate(found)}

    @functools.cached_property
    def logits(self) -> Tensor:
        generator = torch.Generator().manual_seed(len(self.student))
        return torch.randn(len(self.prefixes), len(self.student), generator=generator, dtype=torch.float64)

    def teacher_logprobs_after(self, prefix: Ids) -> np.ndarray:
        logits = np.random.default_rng([7, *prefix]).normal(0, 1.5, len(self.teacher))
        return logits - np.log(np.exp(logits).sum())

    def teacher_tokens(self, ids: Ids) -> Ids:
        """Return the teacher's tokens for a completion of the student."""
        text = b"".join(self.student[token] for token in ids if token)
        return (*greedy_encode(list(self.teacher), text), *(token for token in ids if not token))

    def teacher_logprob(self, ids: Ids, prefix: Ids = ()) -> float:
        return sum(self.teacher_logprobs_after((*prefix, *ids[:index]))[token] for index, token in enumerate(ids))

    def example(self, ids: Ids) -> LossInputs:
        teacher_ids = self.teacher_tokens(ids)
        positions = np.arange(1, len(ids) + 1), np.arange(1, len(teacher_ids) + 1)
        edges = [(1 + index, 1 + len(self.teacher_tokens(ids[:index]))) for index in range(len(ids) + 1)]
        edges = [edges[0], edges[-1]] if self.one_span else edges
        spans = np.array([[s0, s1, t0, t1] for (s0, t0), (s1, t1) in itertools.pairwise(edges)], np.int32)
        logprobs = np.stack([self.teacher_logprobs_after(teacher_ids[:index]) for index in range(len(teacher_ids))])
        teacher_logprobs = make_teacher_logprobs(logprobs, positions[1], np.array(teacher_ids), 99)
        sampling_logprobs = torch.log_softmax(self.logits[self.rows(ids)], 1)[range(len(ids)), list(ids)]
        return LossInputs(
            np.array([0, *ids], np.int32), positions[0] - 1, spans, np.array([0, *teacher_ids], np.int32),
            teacher_logprobs, sampling_logprobs.numpy().astype(np.float32),
        )  # fmt: skip

    def rows(self, ids: Ids) -> list[int]:
        return [self.prefixes[ids[:index]] for index in range(len(ids))]

    def logprob(self, ids: Ids, logprobs: Tensor) -> Tensor:
        return logprobs[self.rows(ids), list(ids)].sum()

    def expected_gradient(self, cells_of_example: Callable[[Ids, LossInputs], LossCells]) -> Tensor:
        """Return the expected gradient of a loss over all completions of the student."""
        logits = self.logits.clone().requires_grad_()
        logprobs = torch.log_softmax(self.logits, 1)
        for ids in self.completions:
            probability = float(self.logprob(ids, logprobs).exp())
            loss_sum(cells_of_example(ids, self.example(ids)), logits[self.rows(ids)], probability).backward()
        return logits.grad

    def gradient_of_kl(self) -> Tensor:
        """Return the gradient of KL(student || teacher): over texts, or over next tokens with each fixed prefix."""
        logits = self.logits.clone().requires_grad_()
        logprobs, total = torch.log_softmax(logits, 1), torch.zeros((), dtype=torch.float64)
        if self.one_span:
            for ids in self.completions:
                student_logprob = self.logprob(ids, logprobs)
                total = total + student_logprob.exp() * (
                    student_logprob - self.teacher_logprob(self.teacher_tokens(ids))
                )
        else:
            for prefix, row in self.prefixes.items():
                teacher_prefix = self.teacher_tokens(prefix)
                teacher_logprobs = [
                    self.teacher_logprob(self.teacher_tokens((token,)), teacher_prefix)
                    for token in range(len(self.student))
                ]
                kl = (logprobs[row].exp() * (logprobs[row] - torch.tensor(teacher_logprobs, dtype=torch.float64))).sum()
                total = total + self.logprob(prefix, logprobs.detach()).exp() * kl
        total.backward()
        return logits.grad


SIX = tuple(letter.encode() for letter in ("", "a", "b", "c", "d", "e"))
LETTERS, PACKED = (b"", b"a", b"b"), (b"", b"a", b"b", b"ab")
TOYS = {
    "one token": ToyModels(SIX, SIX, 1),
    "one tokenizer": ToyModels(SIX[:4], SIX[:4], 3),
    "one tokenizer, whole texts": ToyModels(SIX[:4], SIX[:4], 3, one_span=True),
    "a teacher of letters": ToyModels(PACKED, LETTERS, 3),
    "a teacher of letters, whole texts": ToyModels(PACKED, LETTERS, 3, one_span=True),
    "a student of letters, whole texts": ToyModels(LETTERS, PACKED, 3, one_span=True),
}
every_toy = pytest.mark.parametrize("toy", TOYS.values(), ids=list(TOYS))


@every_toy
def test_expected_gradient_is_that_of_the_reverse_kl(toy):
    """The KL is over whole texts if a text is one span; if each token is a span, over next tokens with a fixed prefix.

    A teacher with other tokens scores a student token by its own tokens for the same bytes.
    """
    found = toy.expected_gradient(lambda ids, example: cells_of(UNCLIPPED, example))
    expected = toy.gradient_of_kl()
    assert float(expected.abs().max()) > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # log-probabilities are stored in fp32


def test_kl_gradients_of_token_spans_and_whole_texts_differ():
    token_spans, whole_texts = TOYS["one tokenizer"], TOYS["one tokenizer, whole texts"]
    assert float((token_spans.gradient_of_kl() - whole_texts.gradient_of_kl()).abs().max()) > 1e-2


@every_toy
def test_a_detached_divergence_as_advantage_has_expected_gradient_0(toy):
    """The advantage does not depend on the sampled token, and E[grad ln s] = 0."""

    def with_divergence(ids: Ids, example: LossInputs) -> LossCells:
        cells = cells_of(UNCLIPPED, example)
        logprobs = torch.log_softmax(toy.logits[toy.rows(ids)], 1)
        # Any function of the text before the span: here the KL to the uniform distribution.
        row_kl = ((logprobs.exp() * logprobs).sum(1) + math.log(len(toy.student))).numpy()
        values = -row_kl[: cells.num_items]
        return dataclasses.replace(cells, advantages=torch.from_numpy(values))

    assert float(toy.expected_gradient(with_divergence).abs().max()) < 1e-7


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("advantage=reverse-kl", "no option of the loss policy-gradient called 'advantage'"),
        ("clip=0", "clip of the loss policy-gradient must be above 0 and finite, not 0.0"),
        ("clip=inf", "clip of the loss policy-gradient must be above 0 and finite, not inf"),
        ("epsilon=0", "epsilon of the loss policy-gradient must be above 0 and at most 1, not 0.0"),
        ("epsilon=2", "epsilon of the loss policy-gradient must be above 0 and at most 1, not 2.0"),
        ("epsilon_high=-1", "epsilon_high of the loss policy-gradient must be above 0 and finite, not -1.0"),
        ("epsilon_high=x", "epsilon_high of the loss policy-gradient:epsilon_high=x is 'x', but must be a number"),
        ("teacher_weight=-1", "teacher_weight of the loss policy-gradient must be at least 0 and finite, not -1.0"),
        (
            "teacher_weight=0,reward_weight=0",
            "teacher_weight and reward_weight of the loss policy-gradient are both 0, so nothing would be learned",
        ),
        ("divergence=jsd", "no option of the loss policy-gradient called 'divergence'"),
        ("offset=-1", "offset of the loss policy-gradient must be at least 0 and finite, not -1.0"),
        ("teacher=none,unlikely=2", "unlikely of the loss policy-gradient must be above 0 and at most 1, not 2.0"),
        ("unlikely=0.2", "unlikely=0.2 of the loss policy-gradient has no effect with teacher=scored"),
        ("teacher=none,offset=0.5", "offset=0.5 of the loss policy-gradient has no effect with teacher=none"),
        ("teacher=none,credit=dpca", "credit=dpca of the loss policy-gradient has no effect with teacher=none"),
        ("credit=token", "no value of credit of the loss policy-gradient:credit=token called 'token'"),
    ],
)
def test_invalid_options_are_refused(options, what):
    with pytest.raises(XtkError) as raised:
        parse_losses([f"policy-gradient:{options}"])
    assert raised.value.what == what


# --- clipping

OPTIONS = {
    "policy-gradient": {},
    "policy-gradient:epsilon=0.1": {"epsilon": 0.1, "epsilon_high": 0.1},
    "policy-gradient:epsilon=0.1,epsilon_high=0.4,clip=1": {"epsilon": 0.1, "epsilon_high": 0.4, "clip": 1.0},
    "policy-gradient:teacher_weight=0.5,reward_weight=2,clip=3": {"teacher": 0.5, "reward": 2.0, "clip": 3.0},
    "policy-gradient:teacher_weight=0": {"teacher": 0.0},
    "policy-gradient:reward_weight=0": {"reward": 0.0},
    "policy-gradient:credit=dpca,clip=2": {"credit": "dpca", "clip": 2.0},
}


def value_and_gradients(total: Tensor, case: Case) -> list[Tensor]:
    return [total.detach(), *torch.autograd.grad(total, (case.states, case.weight))]


@pytest.mark.parametrize("text", list(OPTIONS))
def test_options_match_the_reference_for_clipped_and_unclipped_ratios(text):
    covered = set()
    for seed in range(6):
        case = random_case(seed, K=3, spans=12)
        # All tokens were sampled by an old student, whose distance grows with the seed.
        sampling_logprobs = torch.log_softmax(case.states @ case.weight.T, 1)[
            range(len(case.example.positions)), case.example.student_ids[case.example.positions + 1]
        ] + torch.randn(len(case.example.positions)) * (0.1 + 0.1 * seed)
        example = dataclasses.replace(case.example, sampling_logprobs=sampling_logprobs.numpy().astype(np.float32))
        case = dataclasses.replace(
            case, example=example, states=case.states.requires_grad_(), weight=case.weight.requires_grad_()
        )
        probs = torch.softmax(case.states @ case.weight.T, 1)
        items = reference_policy_gradient(case, probs, **OPTIONS[text])
        cells = cells_of(text, example)
        assert cells.num_items == len(items)
        term = cells.to(CPU, 1.0)
        found, _ = fused_loss(case.states, OutputHead(case.weight), [term], 3)
        for found_tensor, expected_tensor in zip(
            value_and_gradients(found, case), value_and_gradients(sum(items), case), strict=True
        ):
            torch.testing.assert_close(found_tensor, expected_tensor, rtol=1e-9, atol=1e-9)
        clipped, ratios = 0, 0.0
        for item, advantage in zip(items, cells.advantages.tolist(), strict=True):
            ratio, bounds = -float(item.detach()) / advantage, (cells.min_ratio, cells.max_ratio)
            covered.add((advantage > 0, "clipped" if min(abs(ratio - bound) for bound in bounds) < 1e-12 else "free"))
            clipped += min(abs(ratio - bound) for bound in bounds) < 1e-12
        row_of = {row + 1: n for n, row in enumerate(example.positions.tolist())}
        spans = [tokens for tokens, _ in predicted_spans(example)]
        token_spans = [[n] for tokens in spans for n in tokens]
        for tokens in token_spans if "dpca" in text else spans:
            span_prob = math.prod(float(probs.detach()[row_of[n], example.student_ids[n]]) for n in tokens)
            ratios += span_prob / math.exp(sum(float(example.sampling_logprobs[row_of[n]]) for n in tokens))
        assert term.ratio_statistics.tolist() == pytest.approx([len(items), ratios, clipped], rel=1e-5)
    assert covered == set(itertools.product((False, True), ("clipped", "free")))


def one_token(
    token: int, probability: float, sampling_prob: float, reward: float, teacher_prob: float = 0.1
) -> tuple[LossInputs, Tensor]:
    """Return an example with one sampled token of two, and logits that assign it the given probability."""
    logprobs = np.log([[teacher_prob, 1 - teacher_prob] if token == 0 else [1 - teacher_prob, teacher_prob]])
    ids, span = np.array([0, token], np.int32), np.array([[1, 2, 1, 2]], np.int32)
    teacher_logprobs = make_teacher_logprobs(logprobs, np.array([1]), np.array([token]), 2)
    rollout = np.array([math.log(sampling_prob)], np.float32), np.array([reward], np.float32)
    logits = torch.tensor([[probability, 1 - probability]], dtype=torch.float64).log()
    return LossInputs(ids, np.array([0]), span, ids, teacher_logprobs, *rollout), (
        logits if token == 0 else logits.flip(1)
    )


@pytest.mark.parametrize(
    ("probability", "sampling_prob", "reward", "value", "slope"),
    [
        # By hand: rewards 1 and 0 in a group of two have the advantages 1 and -1. slope: of the token's own logit,
        # -A ratio (1 - p), 0 where it is clipped.
        (0.5, 0.5, 1.0, -1.0, -0.5),
        (0.55, 0.5, 1.0, -1.1, -0.495),
        (0.75, 0.5, 1.0, -1.2, 0.0),
        (0.25, 0.5, 1.0, -0.5, -0.375),
        (0.5, 0.5, -1.0, 1.0, 0.5),
        (0.75, 0.5, -1.0, 1.5, 0.375),
        (0.25, 0.5, -1.0, 0.8, 0.0),
        (0.75, 0.5, 0.0, 0.0, 0.0),
    ],
)
def test_rewards_alone_give_the_grpo_surrogate(probability, sampling_prob, reward, value, slope):
    example, logits = one_token(1, probability, sampling_prob, reward)
    logits.requires_grad_()
    total = loss_sum(cells_of("policy-gradient:teacher_weight=0", example), logits)
    total.backward()
    assert float(total.detach()) == pytest.approx(value, abs=1e-7)
    np.testing.assert_allclose(logits.grad, [[-slope, slope]], atol=1e-7)


def test_teacher_and_reward_add_up_and_only_the_teacher_is_clipped():
    for teacher_prob, log_ratio in ((0.1, math.log(0.1 / 0.5)), (1e-9, -5.0), (0.9, math.log(0.9 / 0.5))):
        example, logits = one_token(0, 0.5, 0.5, 7.0, teacher_prob)
        assert float(loss_sum(cells_of("policy-gradient", example), logits)) == pytest.approx(-log_ratio - 7, rel=1e-6)
        half = cells_of("policy-gradient:teacher_weight=0.5,reward_weight=0.1", example)
        assert float(loss_sum(half, logits)) == pytest.approx(-log_ratio / 2 - 0.7, rel=1e-6)


def test_zero_probabilities_affect_only_their_own_item():
    """Teacher probability 0 gives the clipped advantage; a token with sampling probability 0 is not an item."""
    example, text = random_case(2, K=3, spans=12).example, "policy-gradient:reward_weight=0,clip=1000"
    original = cells_of(text, example).advantages.numpy()
    num_changed = []
    for index in range(len(example.teacher_logprobs)):
        observed_logprobs = example.teacher_logprobs.observed_logprobs.copy()
        observed_logprobs[index] = -np.inf
        changed_example = dataclasses.replace(
            example, teacher_logprobs=dataclasses.replace(example.teacher_logprobs, observed_logprobs=observed_logprobs)
        )
        advantages = cells_of(text, changed_example).advantages.numpy()
        num_changed.append((advantages != original).sum())
        assert set(advantages[advantages != original]) <= {-1000.0}
        assert np.isfinite(cells_of("alm", changed_example).teacher_probs.numpy()).all()
    assert sorted(set(num_changed)) == [0, 1]
    assert sum(num_changed) >= len(original)
    num_removed = []
    for index in range(len(example.positions)):
        sampling_logprobs = example.sampling_logprobs.copy()
        sampling_logprobs[index] = -np.inf
        kept = cells_of(text, dataclasses.replace(example, sampling_logprobs=sampling_logprobs)).advantages.tolist()
        assert kept in [original.tolist(), *(np.delete(original, item).tolist() for item in range(len(original)))]
        num_removed.append(len(original) - len(kept))
    assert sum(num_removed) >= len(original)


def test_a_huge_ratio_is_finite_in_fp32():
    example, logits = one_token(0, 1 - 1e-6, 1e-40, -1.0)
    example.sampling_logprobs[:] = -300
    cells = cells_of("policy-gradient:teacher_weight=0", example)
    logits = logits.float().requires_grad_()
    total = loss_sum(cells, logits)
    total.backward()
    assert float(total.detach()) == pytest.approx(math.exp(20), rel=1e-5)
    assert torch.isfinite(logits.grad).all()


def test_dpca_distributes_a_span_advantage_by_token_log_probabilities():
    """(L_T / L_S - 1) ln p: tokens of 0.5 and 0.25 with one teacher token of 0.5; a span of probability 1."""
    ids, span = np.array([0, 1, 1, 1, 1], np.int32), np.array([[1, 3, 1, 2], [3, 5, 2, 3]], np.int32)
    sampling_logprobs = np.array([math.log(0.5), math.log(0.25), 0, 0], np.float32)
    teacher_logprobs = make_teacher_logprobs(np.log([[0.5, 0.5], [0.9, 0.1]]), np.array([1, 2]), np.array([1, 1]), 2)
    example = LossInputs(ids, np.arange(4), span, np.array([0, 1, 1], np.int32), teacher_logprobs, sampling_logprobs)
    cells = cells_of("policy-gradient:credit=dpca", example)
    ratio = math.log(0.5) / math.log(0.125) - 1
    expected = [ratio * math.log(0.5), ratio * math.log(0.25), math.log(0.1) / 2, math.log(0.1) / 2]
    assert cells.advantages.tolist() == pytest.approx(expected, rel=1e-6)
    span_advantages = cells_of("policy-gradient", example).advantages.tolist()
    assert span_advantages == pytest.approx([sum(expected[:2]), sum(expected[2:])], rel=1e-6)
    assert cells.sampling_logprobs.tolist() == sampling_logprobs.tolist()
    assert cells.rows.tolist() == [0, 1, 2, 3]


def test_dpca_treats_log_probabilities_above_0_as_0():
    """Engines return such values by rounding; a sum near 0 must not scale the parts of a span."""
    ids, span = np.array([0, 1, 1], np.int32), np.array([[1, 3, 1, 2]], np.int32)
    teacher_logprobs = make_teacher_logprobs(np.log([[0.9, 0.1]]), np.array([1]), np.array([1]), 2)
    logprobs = np.array([-1e-3, 0.9999e-3], np.float32)
    example = LossInputs(ids, np.arange(2), span, np.array([0, 1], np.int32), teacher_logprobs, logprobs)
    advantages = cells_of("policy-gradient:credit=dpca", example).advantages.tolist()
    assert advantages == pytest.approx([math.log(0.1), 0], abs=2e-3)


def test_dpca_equals_span_credit_with_equal_tokenizers():
    case = random_case(3, K=3, spans=12, one_tokenizer=True)
    span_cells, dpca_cells = (cells_of(f"policy-gradient:credit={credit}", case.example) for credit in ("span", "dpca"))
    assert span_cells.num_items > 3
    torch.testing.assert_close(span_cells.advantages, dpca_cells.advantages)
    assert torch.equal(span_cells.tokens, dpca_cells.tokens)


def test_the_control_without_a_teacher_penalizes_unlikely_tokens_only():
    case = random_case(3, K=3, spans=12)
    logprobs = np.where(np.arange(len(case.example.positions)) % 2, -0.1, -3.0).astype(np.float32)
    example = dataclasses.replace(case.example, sampling_logprobs=logprobs, advantages=None)
    others = dataclasses.replace(
        example,
        teacher_logprobs=dataclasses.replace(
            example.teacher_logprobs, observed_logprobs=example.teacher_logprobs.observed_logprobs - 1
        ),
    )
    cells, same = (cells_of("policy-gradient:teacher=none,teacher_weight=0.5", one) for one in (example, others))
    assert torch.equal(cells.advantages, same.advantages)  # whatever the teacher predicts
    assert cells.advantages.tolist() == np.where(logprobs[cells.first_rows.numpy()] < -1, -0.5, 0.0).tolist()
    assert len(set(cells.advantages.tolist())) == 2
    rare = cells_of("policy-gradient:teacher=none,unlikely=0.01", example)
    assert not rare.advantages.any()


@pytest.mark.parametrize("credit", ["span", "dpca"])
def test_with_the_teacher_as_reference_the_target_is_the_frozen_student(credit):
    """CompassOPD: (ln T - ln R) - a (ln s - ln s0); with R = T this is a times the reverse KL to s0."""
    case = random_case(3, K=3, spans=12, one_tokenizer=True)
    example, rng = case.example, np.random.default_rng(0)
    old, frozen = (-rng.exponential(size=len(example.positions)).astype(np.float32) for _ in range(2))
    of_teacher = dict(
        zip(example.teacher_logprobs.positions.tolist(), example.teacher_logprobs.observed_logprobs, strict=True)
    )
    reference = np.full(len(example.positions), np.nan, np.float32)
    row = {position + 1: at for at, position in enumerate(example.positions.tolist())}
    for start, _, first, stop in example.spans.tolist():
        if start in row and all(at in of_teacher for at in range(first, stop)):
            reference[row[start]] = sum(of_teacher[at] for at in range(first, stop))
    example = dataclasses.replace(example, sampling_logprobs=old, advantages=None)
    styled = dataclasses.replace(example, reference_logprobs=reference, frozen_logprobs=frozen)
    # The teacher of the expected loss has the frozen student's log-probabilities: one token is one span.
    observed = example.teacher_logprobs.observed_logprobs.copy()
    place = {position: at for at, position in enumerate(example.teacher_logprobs.positions.tolist())}
    for start, _, first, _ in example.spans.tolist():
        if start in row and first in place:
            observed[place[first]] = frozen[row[start]]
    of_frozen = dataclasses.replace(
        example, teacher_logprobs=dataclasses.replace(example.teacher_logprobs, observed_logprobs=observed)
    )
    options = f"credit={credit},clip=1000"
    found = cells_of(f"policy-gradient:{options},offset=0.5", styled)
    expected = cells_of(f"policy-gradient:{options},teacher_weight=0.5", of_frozen)
    assert found.num_items > 3
    torch.testing.assert_close(found.advantages, expected.advantages, rtol=1e-5, atol=1e-6)
    gradients = []
    for cells in (found, expected):
        logits = torch.zeros(len(example.positions), case.weight.shape[0], dtype=torch.float64, requires_grad=True)
        loss_sum(cells, logits).backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    assert not cells_of(f"policy-gradient:{options},offset=0.5", example).num_items  # no document has a reference


def test_documents_without_sampling_logprobs_have_no_items():
    case = random_case(1, K=3, spans=12)
    for missing in (None, np.full(len(case.example.positions), np.nan, np.float32)):
        assert cells_of("policy-gradient", dataclasses.replace(case.example, sampling_logprobs=missing)).num_items == 0
    without_rewards = dataclasses.replace(case.example, advantages=None)
    missing_rewards, zero_reward_weight = (
        cells_of(text, example)
        for text, example in (("policy-gradient", without_rewards), ("policy-gradient:reward_weight=0", case.example))
    )
    assert missing_rewards.num_items > 3
    assert torch.equal(missing_rewards.advantages, zero_reward_weight.advantages)


# --- top-k, in the loss


def test_gradient_of_the_top_k_divergence_converges_to_the_full_one():
    """The support is the top k of the old student; the student has been updated since."""
    N, V, rng = 200, 6, np.random.default_rng(0)
    old, update, teacher_logits = (rng.normal(0, 1.5, (N, V)) for _ in range(3))
    full_teacher_logprobs = torch.log_softmax(torch.from_numpy(teacher_logits), 1)
    ids = np.concatenate([[0], old.argmax(1)]).astype(np.int32)
    spans = np.stack([np.arange(1, N + 1), np.arange(2, N + 2)] * 2, 1).astype(np.int32)
    full_logits = torch.from_numpy(old + 0.5 * update).requires_grad_()
    student_logprobs = torch.log_softmax(full_logits, 1)
    (student_logprobs.exp() * (student_logprobs - full_teacher_logprobs)).sum().backward()
    errors = []
    for K in range(1, V + 1):
        top_ids = np.sort(np.argsort(-old, axis=1)[:, :K], axis=1)
        kept_logprobs = np.take_along_axis(full_teacher_logprobs.numpy(), top_ids, 1)
        teacher_logprobs = dataclasses.replace(
            make_teacher_logprobs(full_teacher_logprobs.numpy(), np.arange(1, N + 1), ids[1:], 1),
            offsets=np.arange(0, N * K + 1, K),
            ids=top_ids.reshape(-1).astype(np.int32),
            logprobs=kept_logprobs.reshape(-1).astype(np.float32),
            remainder_mass=np.maximum(1 - np.exp(kept_logprobs).sum(1), 0).astype(np.float32),
        )
        logits = full_logits.detach().clone().requires_grad_()
        example = LossInputs(ids, np.arange(N), spans, ids, teacher_logprobs)
        loss_sum(cells_of("reverse-kl", example, SparseProjection.identity(V).columns), logits).backward()
        errors.append(float((logits.grad - full_logits.grad).norm() / full_logits.grad.norm()))
    assert errors[-1] < 1e-6
    assert errors[-2] < 1e-5  # the remainder is one token
    assert all(more < 0.9 * fewer for fewer, more in itertools.pairwise(errors[:-1]))
