"""policy-gradient: what its gradient is on average, what PPO clips, and what of a rollout is trained."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from reference_losses import Case, draw_case, plain_policy_gradient, predicted_spans, signal_of
from small_vocabularies import spell
from torch import Tensor

from xtk.errors import XtkError
from xtk.losses import LOSSES
from xtk.losses.divergences import DIVERGENCES
from xtk.losses.fused_head_and_loss import fused_loss
from xtk.losses.loss_cells import LossCells
from xtk.losses.loss_interface import LossInputs
from xtk.losses.loss_spec import parse_losses
from xtk.models.output_head import OutputHead
from xtk.projection.projection import SparseProjection

CPU = torch.device("cpu")
UNCLIPPED = "policy-gradient:clip=1000,epsilon=1,epsilon_high=1000"


def cells_of(text: str, example: LossInputs, ground: object = None) -> LossCells:
    (loss,) = parse_losses([text])
    return dataclasses.replace(loss.make_loss().build_cells(example, ground), divergence=loss.make_divergence())


def summed(cells: LossCells, logits: Tensor, scale: float = 1.0) -> Tensor:
    return fused_loss(logits, OutputHead(None), [cells.to(CPU, scale)], 64)[0]


# --- on average


Ids = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Toy:
    """All that a student can write: at most `length` tokens, token 0 ends a text and stands before it.

    `whole`: a text is one span; else each of the student's tokens is one, and the teacher spells it in its own tokens.
    """

    student: tuple[bytes, ...]
    teacher: tuple[bytes, ...]
    length: int
    whole: bool = False

    @functools.cached_property
    def texts(self) -> list[Ids]:
        def longer(prefix: Ids) -> Iterator[Ids]:
            if len(prefix) == self.length or prefix[-1:] == (0,):
                yield prefix
                return
            for token in range(len(self.student)):
                yield from longer((*prefix, token))

        return list(longer(()))

    @functools.cached_property
    def prefixes(self) -> dict[Ids, int]:
        """Each with its row of the student's logits."""
        found = {ids[:stop]: None for ids in self.texts for stop in range(len(ids))}
        return {prefix: number for number, prefix in enumerate(found)}

    @functools.cached_property
    def logits(self) -> Tensor:
        draw = torch.Generator().manual_seed(len(self.student))
        return torch.randn(len(self.prefixes), len(self.student), generator=draw, dtype=torch.float64)

    def teacher_said(self, prefix: Ids) -> np.ndarray:
        logits = np.random.default_rng([7, *prefix]).normal(0, 1.5, len(self.teacher))
        return logits - np.log(np.exp(logits).sum())

    def read(self, ids: Ids) -> Ids:
        """The teacher's tokens of what the student wrote."""
        text = b"".join(self.student[token] for token in ids if token)
        return (*spell(list(self.teacher), text), *(token for token in ids if not token))

    def teacher_logprob(self, ids: Ids, before: Ids = ()) -> float:
        return sum(self.teacher_said((*before, *ids[:at]))[token] for at, token in enumerate(ids))

    def example(self, ids: Ids) -> LossInputs:
        theirs = self.read(ids)
        sides = np.arange(1, len(ids) + 1), np.arange(1, len(theirs) + 1)
        edges = [(1 + at, 1 + len(self.read(ids[:at]))) for at in range(len(ids) + 1)]
        edges = [edges[0], edges[-1]] if self.whole else edges
        spans = np.array([[s0, s1, t0, t1] for (s0, t0), (s1, t1) in itertools.pairwise(edges)], np.int32)
        said = np.stack([self.teacher_said(theirs[:at]) for at in range(len(theirs))])
        signal = signal_of(said, sides[1], np.array(theirs), 99)
        own = torch.log_softmax(self.logits[self.rows(ids)], 1)[range(len(ids)), list(ids)]
        return LossInputs(
            np.array([0, *ids], np.int32), sides[0] - 1, spans, np.array([0, *theirs], np.int32), signal,
            own.numpy().astype(np.float32),
        )  # fmt: skip

    def rows(self, ids: Ids) -> list[int]:
        return [self.prefixes[ids[:at]] for at in range(len(ids))]

    def logprob(self, ids: Ids, said: Tensor) -> Tensor:
        return said[self.rows(ids), list(ids)].sum()

    def expected_gradient(self, cells_of_example: Callable[[Ids, LossInputs], LossCells]) -> Tensor:
        """Of a loss, over all that the student can write."""
        logits = self.logits.clone().requires_grad_()
        said = torch.log_softmax(self.logits, 1)
        for ids in self.texts:
            probability = float(self.logprob(ids, said).exp())
            summed(cells_of_example(ids, self.example(ids)), logits[self.rows(ids)], probability).backward()
        return logits.grad

    def gradient_of_kl(self) -> Tensor:
        """Of KL(student || teacher): over texts, or, each token being a span, at each place with the text before it."""
        logits = self.logits.clone().requires_grad_()
        said, total = torch.log_softmax(logits, 1), torch.zeros((), dtype=torch.float64)
        if self.whole:
            for ids in self.texts:
                ours = self.logprob(ids, said)
                total = total + ours.exp() * (ours - self.teacher_logprob(self.read(ids)))
        else:
            for prefix, row in self.prefixes.items():
                before = self.read(prefix)
                theirs = [self.teacher_logprob(self.read((token,)), before) for token in range(len(self.student))]
                kl = (said[row].exp() * (said[row] - torch.tensor(theirs, dtype=torch.float64))).sum()
                total = total + self.logprob(prefix, said.detach()).exp() * kl
        total.backward()
        return logits.grad


SIX = tuple(letter.encode() for letter in ("", "a", "b", "c", "d", "e"))
LETTERS, PACKED = (b"", b"a", b"b"), (b"", b"a", b"b", b"ab")
TOYS = {
    "one token": Toy(SIX, SIX, 1),
    "one tokenizer": Toy(SIX[:4], SIX[:4], 3),
    "one tokenizer, whole texts": Toy(SIX[:4], SIX[:4], 3, whole=True),
    "a teacher of letters": Toy(PACKED, LETTERS, 3),
    "a teacher of letters, whole texts": Toy(PACKED, LETTERS, 3, whole=True),
    "a student of letters, whole texts": Toy(LETTERS, PACKED, 3, whole=True),
}
every_toy = pytest.mark.parametrize("toy", TOYS.values(), ids=list(TOYS))


@every_toy
def test_the_gradient_is_on_average_that_of_the_reverse_kl(toy):
    """Of whole texts where a text is one span; of each next token, the text before it held fixed, where a token is.

    What a teacher with other tokens says of one of the student's is what it says of its own spelling of it.
    """
    found = toy.expected_gradient(lambda ids, example: cells_of(UNCLIPPED, example))
    expected = toy.gradient_of_kl()
    assert float(expected.abs().max()) > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # log-probabilities are stored in fp32


def test_a_token_is_not_charged_with_what_comes_behind_it():
    tokens, texts = TOYS["one tokenizer"], TOYS["one tokenizer, whole texts"]
    assert float((tokens.gradient_of_kl() - texts.gradient_of_kl()).abs().max()) > 1e-2


@every_toy
def test_a_detached_divergence_as_an_advantage_has_no_gradient_on_average(toy):
    """It is the same whichever token was drawn, and E[grad ln s] = 0."""

    def with_divergence(ids: Ids, example: LossInputs) -> LossCells:
        cells = cells_of(UNCLIPPED, example)
        said = torch.log_softmax(toy.logits[toy.rows(ids)], 1)
        # Any function of the text before the span: here the KL to the uniform distribution.
        of_rows = ((said.exp() * said).sum(1) + math.log(len(toy.student))).numpy()
        values = -of_rows[: cells.num_items]
        return dataclasses.replace(cells, advantages=torch.from_numpy(values))

    assert float(toy.expected_gradient(with_divergence).abs().max()) < 1e-7


@pytest.mark.parametrize("name", sorted({*LOSSES, *DIVERGENCES}))
def test_a_divergence_as_an_advantage_is_refused_with_the_reason(name):
    with pytest.raises(
        XtkError, match=f"cannot use {name} as its advantage: a divergence does not depend on the sampled token"
    ) as told:
        parse_losses([f"policy-gradient:advantage={name}"])
    assert told.value.hint == f"remove advantage={name}, and add --loss {name} as a separate term"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("advantage=observd", "no advantage called 'observd'; did you mean observed?"),
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
        ("credit=token", "no value of credit of the loss policy-gradient:credit=token called 'token'"),
    ],
)
def test_bad_options_are_told(options, what):
    with pytest.raises(XtkError) as told:
        parse_losses([f"policy-gradient:{options}"])
    assert told.value.what == what


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
def test_options_are_those_of_the_readable_loss_wherever_the_ratio_is(text):
    met = set()
    for seed in range(6):
        case = draw_case(seed, K=3, spans=12)
        # An old student that drew all of it, from near to far.
        drawn = torch.log_softmax(case.states @ case.weight.T, 1)[
            range(len(case.example.positions)), case.example.student_ids[case.example.positions + 1]
        ] + torch.randn(len(case.example.positions)) * (0.1 + 0.1 * seed)
        example = dataclasses.replace(case.example, sampling_logprobs=drawn.numpy().astype(np.float32))
        case = dataclasses.replace(
            case, example=example, states=case.states.requires_grad_(), weight=case.weight.requires_grad_()
        )
        said = torch.softmax(case.states @ case.weight.T, 1)
        items = plain_policy_gradient(case, said, **OPTIONS[text])
        cells = cells_of(text, example)
        assert cells.num_items == len(items)
        term = cells.to(CPU, 1.0)
        found, _ = fused_loss(case.states, OutputHead(case.weight), [term], 3)
        for one, other in zip(value_and_gradients(found, case), value_and_gradients(sum(items), case), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        clipped, ratios = 0, 0.0
        for item, advantage in zip(items, cells.advantages.tolist(), strict=True):
            ratio, bounds = -float(item.detach()) / advantage, (cells.min_ratio, cells.max_ratio)
            met.add((advantage > 0, "clipped" if min(abs(ratio - bound) for bound in bounds) < 1e-12 else "free"))
            clipped += min(abs(ratio - bound) for bound in bounds) < 1e-12
        number = {row + 1: at for at, row in enumerate(example.positions.tolist())}
        spans = [tokens for tokens, _ in predicted_spans(example)]
        of_tokens = [[at] for tokens in spans for at in tokens]
        for tokens in of_tokens if "dpca" in text else spans:
            ours = math.prod(float(said.detach()[number[at], example.student_ids[at]]) for at in tokens)
            ratios += ours / math.exp(sum(float(example.sampling_logprobs[number[at]]) for at in tokens))
        assert term.ratio_statistics.tolist() == pytest.approx([len(items), ratios, clipped], rel=1e-5)
    assert met == set(itertools.product((False, True), ("clipped", "free")))


def one_token(
    token: int, probability: float, old: float, reward: float, theirs: float = 0.1
) -> tuple[LossInputs, Tensor]:
    """A student with two tokens that drew one of them, and logits that give it a probability."""
    said = np.log([[theirs, 1 - theirs] if token == 0 else [1 - theirs, theirs]])
    ids, span = np.array([0, token], np.int32), np.array([[1, 2, 1, 2]], np.int32)
    signal = signal_of(said, np.array([1]), np.array([token]), 2)
    own = np.array([math.log(old)], np.float32), np.array([reward], np.float32)
    logits = torch.tensor([[probability, 1 - probability]], dtype=torch.float64).log()
    return LossInputs(ids, np.array([0]), span, ids, signal, *own), (logits if token == 0 else logits.flip(1))


@pytest.mark.parametrize(
    ("probability", "old", "reward", "value", "slope"),
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
def test_rewards_alone_are_the_surrogate_of_grpo(probability, old, reward, value, slope):
    example, logits = one_token(1, probability, old, reward)
    logits.requires_grad_()
    total = summed(cells_of("policy-gradient:teacher_weight=0", example), logits)
    total.backward()
    assert float(total.detach()) == pytest.approx(value, abs=1e-7)
    np.testing.assert_allclose(logits.grad, [[-slope, slope]], atol=1e-7)


def test_a_teacher_and_a_reward_add_up_and_the_teacher_alone_is_clipped():
    for theirs, said in ((0.1, math.log(0.1 / 0.5)), (1e-9, -5.0), (0.9, math.log(0.9 / 0.5))):
        example, logits = one_token(0, 0.5, 0.5, 7.0, theirs)
        assert float(summed(cells_of("policy-gradient", example), logits)) == pytest.approx(-said - 7, rel=1e-6)
        half = cells_of("policy-gradient:teacher_weight=0.5,reward_weight=0.1", example)
        assert float(summed(half, logits)) == pytest.approx(-said / 2 - 0.7, rel=1e-6)


def test_what_a_side_finds_impossible_stays_in_its_item():
    """A teacher that gives a token nothing is at the clip; a token that was drawn with nothing is no item."""
    example, text = draw_case(2, K=3, spans=12).example, "policy-gradient:reward_weight=0,clip=1000"
    whole = cells_of(text, example).advantages.numpy()
    changed = []
    for at in range(len(example.teacher_logprobs)):
        said = example.teacher_logprobs.observed_logprobs.copy()
        said[at] = -np.inf
        silent = dataclasses.replace(
            example, teacher_logprobs=dataclasses.replace(example.teacher_logprobs, observed_logprobs=said)
        )
        advantages = cells_of(text, silent).advantages.numpy()
        changed.append((advantages != whole).sum())
        assert set(advantages[advantages != whole]) <= {-1000.0}
        assert np.isfinite(cells_of("alm", silent).teacher_probs.numpy()).all()
    assert sorted(set(changed)) == [0, 1]
    assert sum(changed) >= len(whole)
    left = []
    for at in range(len(example.positions)):
        drawn = example.sampling_logprobs.copy()
        drawn[at] = -np.inf
        kept = cells_of(text, dataclasses.replace(example, sampling_logprobs=drawn)).advantages.tolist()
        assert kept in [whole.tolist(), *(np.delete(whole, item).tolist() for item in range(len(whole)))]
        left.append(len(whole) - len(kept))
    assert sum(left) >= len(whole)


def test_a_ratio_that_is_huge_stays_finite_in_fp32():
    example, logits = one_token(0, 1 - 1e-6, 1e-40, -1.0)
    example.sampling_logprobs[:] = -300
    cells = cells_of("policy-gradient:teacher_weight=0", example)
    logits = logits.float().requires_grad_()
    total = summed(cells, logits)
    total.backward()
    assert float(total.detach()) == pytest.approx(math.exp(20), rel=1e-5)
    assert torch.isfinite(logits.grad).all()


def test_dpca_divides_the_advantage_of_a_span_among_its_tokens_by_their_log_probabilities():
    """(L_T / L_S - 1) ln p: two tokens of 0.5 and 0.25 as one teacher token of 0.5; one span that was certain."""
    ids, span = np.array([0, 1, 1, 1, 1], np.int32), np.array([[1, 3, 1, 2], [3, 5, 2, 3]], np.int32)
    old = np.array([math.log(0.5), math.log(0.25), 0, 0], np.float32)
    signal = signal_of(np.log([[0.5, 0.5], [0.9, 0.1]]), np.array([1, 2]), np.array([1, 1]), 2)
    example = LossInputs(ids, np.arange(4), span, np.array([0, 1, 1], np.int32), signal, old)
    cells = cells_of("policy-gradient:credit=dpca", example)
    ratio = math.log(0.5) / math.log(0.125) - 1
    expected = [ratio * math.log(0.5), ratio * math.log(0.25), math.log(0.1) / 2, math.log(0.1) / 2]
    assert cells.advantages.tolist() == pytest.approx(expected, rel=1e-6)
    of_spans = cells_of("policy-gradient", example).advantages.tolist()
    assert of_spans == pytest.approx([sum(expected[:2]), sum(expected[2:])], rel=1e-6)
    assert cells.sampling_logprobs.tolist() == old.tolist()
    assert cells.rows.tolist() == [0, 1, 2, 3]


def test_with_equal_tokenizers_dpca_is_the_credit_of_spans():
    case = draw_case(3, K=3, spans=12, one_tokenizer=True)
    one, other = (cells_of(f"policy-gradient:credit={credit}", case.example) for credit in ("span", "dpca"))
    assert one.num_items > 3
    torch.testing.assert_close(one.advantages, other.advantages)
    assert torch.equal(one.tokens, other.tokens)


def test_documents_that_the_student_did_not_draw_have_no_items():
    case = draw_case(1, K=3, spans=12)
    for missing in (None, np.full(len(case.example.positions), np.nan, np.float32)):
        assert cells_of("policy-gradient", dataclasses.replace(case.example, sampling_logprobs=missing)).num_items == 0
    without_rewards = dataclasses.replace(case.example, advantages=None)
    one, other = (
        cells_of(text, example)
        for text, example in (("policy-gradient", without_rewards), ("policy-gradient:reward_weight=0", case.example))
    )
    assert one.num_items > 3
    assert torch.equal(one.advantages, other.advantages)


# --- top-k, in the loss


def test_the_top_k_divergence_has_the_gradient_of_the_full_one_as_k_grows():
    """The support is what the old student found likeliest; the student has moved since."""
    N, V, draw = 200, 6, np.random.default_rng(0)
    old, moved, teacher = (draw.normal(0, 1.5, (N, V)) for _ in range(3))
    theirs = torch.log_softmax(torch.from_numpy(teacher), 1)
    ids = np.concatenate([[0], old.argmax(1)]).astype(np.int32)
    spans = np.stack([np.arange(1, N + 1), np.arange(2, N + 2)] * 2, 1).astype(np.int32)
    exact = torch.from_numpy(old + 0.5 * moved).requires_grad_()
    said = torch.log_softmax(exact, 1)
    (said.exp() * (said - theirs)).sum().backward()
    errors = []
    for K in range(1, V + 1):
        best = np.sort(np.argsort(-old, axis=1)[:, :K], axis=1)
        kept = np.take_along_axis(theirs.numpy(), best, 1)
        signal = dataclasses.replace(
            signal_of(theirs.numpy(), np.arange(1, N + 1), ids[1:], 1),
            offsets=np.arange(0, N * K + 1, K),
            ids=best.reshape(-1).astype(np.int32),
            logprobs=kept.reshape(-1).astype(np.float32),
            remainder_mass=np.maximum(1 - np.exp(kept).sum(1), 0).astype(np.float32),
        )
        logits = exact.detach().clone().requires_grad_()
        example = LossInputs(ids, np.arange(N), spans, ids, signal)
        summed(cells_of("reverse-kl", example, SparseProjection.identity(V).columns), logits).backward()
        errors.append(float((logits.grad - exact.grad).norm() / exact.grad.norm()))
    assert errors[-1] < 1e-6
    assert errors[-2] < 1e-5  # what is left over is one token
    assert all(more < 0.9 * fewer for fewer, more in itertools.pairwise(errors[:-1]))
