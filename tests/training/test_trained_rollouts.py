"""Training on rollouts: only the sampled tokens are trained, even if the tokenizer encodes the text differently."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import small_inputs
import torch

from xtk.batches.data_sources import DocumentsFromCaches
from xtk.batches.losses_per_teacher import DistillationTeacher, assign_losses, open_teachers
from xtk.batches.micro_batches import BatchBuilder
from xtk.cache.reader import TeacherCache
from xtk.data.corpus_reader import Corpus
from xtk.errors import XtkError
from xtk.losses.head import fused_loss
from xtk.losses.spec import parse_losses
from xtk.losses.term import LossTerm
from xtk.models.output_head import OutputHead
from xtk.text.chat.conversation_tokens import REGIONS
from xtk.text.chat.regions import RegionWeights
from xtk.text.teacher_tokenization import teacher_views
from xtk.text.tokenizer import Tokenizer

# No ratio is clipped, so that each span has a gradient.
POLICY = "policy-gradient:epsilon=1,epsilon_high=1000"
CROSS_TOKENIZER_LOSSES = [
    POLICY,
    f"{POLICY},credit=dpca",
    "byte-kl",
    "byte-kl:divergence=reverse-kl",
    "boundary-kl:divergence=reverse-kl",
    "p-kl:divergence=jsd",
    "bpm",
    "escd",
    "simct",
    "strict",
]
LOSSES = {"alike": [*CROSS_TOKENIZER_LOSSES, "reverse-kl", "jsd"], "teacher": CROSS_TOKENIZER_LOSSES}


@dataclass(frozen=True)
class Rollouts:
    """Rollouts of the student, with two turns and a tool's answer between them, and caches of two teachers."""

    student: Tokenizer
    folder: Path
    sampled_ids: list[list[int]]

    def teacher(self, name: str) -> DistillationTeacher:
        return open_teachers([str(self.folder / f"cache-{name}")], [], self.student)[0]


@pytest.fixture(scope="module")
def rollouts(run, pair, tmp_path_factory) -> Rollouts:
    folder = tmp_path_factory.mktemp("rollouts")
    student = Tokenizer(pair.student)
    teacher_paths = {"alike": small_inputs.make_student(folder / "alike", seed=7), "teacher": pair.teacher}
    lines, sampled_ids = [], []
    for first_text, second_text in ((" ab 12 apples", " cab"), (" has 3", " left")):
        first_ids = [student.vocabulary.token_of_bytes[bytes([byte])] for byte in first_text.encode()]
        assert len(student.encode([first_text])[0].ids) < len(first_ids)  # not the tokenizer's own tokens
        second_ids = [*student.encode([second_text])[0].ids.tolist(), student.end_id]
        ids, mask = [student.start_ids[0]], [0]
        for text, turn_ids in (("Anna", first_ids), (" = 15.", second_ids)):
            encoded = student.encode([text])[0].ids.tolist()
            ids, mask = [*ids, *encoded, *turn_ids], [*mask, *[0] * len(encoded), *[1] * len(turn_ids)]
        lines.append(
            {
                "segments": [
                    {"role": role, "text": text, "train": train}
                    for role, text, train in (
                        ("user", "Anna", False), ("assistant", first_text, True), ("tool", " = 15.", False),
                        ("assistant", second_text, True),
                    )
                ],
                "student_ids": ids,
                "sampled_mask": mask,
                "student_logprobs": ((-6 - 0.1 * np.arange(len(ids))) * np.array(mask)).tolist(),
                "student_tokenizer": student.fingerprint,
                "advantage": 1.5 - len(lines),
            }
        )  # fmt: skip
        sampled_ids.append([*first_ids, *second_ids])
    for name, path in teacher_paths.items():
        (folder / "plain.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        encoded = [
            sequence for _, sequence in teacher_views(Tokenizer(path), list(Corpus([str(folder / "plain.jsonl")])))
        ]
        candidates = [[[at, at + 5, at + 9] for at in range(int(sequence.train_mask.sum()))] for sequence in encoded]
        (folder / f"{name}.jsonl").write_text(
            "".join(
                json.dumps({**line, "candidate_ids": ids}) + "\n" for line, ids in zip(lines, candidates, strict=True)
            )
        )
        run("cache-teacher", path, f"{name}.jsonl", "--support", "candidates", "--precision", "float32",
            "-o", f"cache-{name}", "-q", cwd=folder)  # fmt: skip
    return Rollouts(student, folder, sampled_ids)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in LOSSES.items() for text in texts])
def test_sampled_tokens_have_gradients_and_prompts_and_tool_answers_have_none(rollouts, name, text):
    teacher = rollouts.teacher(name)
    ((assigned,), _) = assign_losses(parse_losses([text]), [teacher])
    assert assigned.teacher == 0
    loss_term = LossTerm(
        assigned.rule, assigned.loss.make_divergence(), teacher.comparison_space(assigned.rule.comparison_space)
    )
    source = DocumentsFromCaches(teacher.source)
    batch = BatchBuilder(source, rollouts.student, [loss_term], 256).build([0, 1])
    (term,) = batch.terms
    torch.manual_seed(0)
    documents, length = batch.input_ids.shape
    logits = torch.randn(documents * length, rollouts.student.embedding_rows, dtype=torch.float64, requires_grad=True)
    fused_loss(logits[batch.loss_positions], OutputHead(None), [term.to(torch.device("cpu"), 1.0)], 16)[0].backward()
    rows_with_gradient = set(np.flatnonzero(logits.grad.abs().sum(1) > 0).tolist())
    sampled_rows = set()
    for number, expected_ids in enumerate(rollouts.sampled_ids):
        sampled_tokens = source.document(number).sampled_tokens
        np.testing.assert_array_equal(batch.input_ids[number, : len(sampled_tokens.ids)], sampled_tokens.ids)
        assert sampled_tokens.ids[sampled_tokens.sampled_mask].tolist() == expected_ids
        sampled_rows |= set((number * length + np.flatnonzero(sampled_tokens.sampled_mask) - 1).tolist())
    assert rows_with_gradient <= sampled_rows  # the logits that predict prompts and tool answers have no gradient
    if name == "alike" or text.startswith(POLICY):
        assert rows_with_gradient == sampled_rows
    if text.startswith(POLICY):
        assert term.tokens.tolist() == [token for expected_ids in rollouts.sampled_ids for token in expected_ids]
        rollout_tokens = [source.document(number).sampled_tokens for number in range(2)]
        assert float(term.sampling_logprobs.sum()) == pytest.approx(
            sum(float(one.logprobs.sum()) for one in rollout_tokens)
        )


def test_policy_gradient_on_documents_without_rollouts_is_refused(rollouts, pair, cache):
    (teacher,) = open_teachers([str(cache)], [], Tokenizer(pair.student))
    with pytest.raises(XtkError, match="policy-gradient needs rollouts of the student, but the training data has none"):
        assign_losses(parse_losses(["ce", "policy-gradient"]), [teacher])
    assert assign_losses(parse_losses(["policy-gradient"]), [teacher], on_policy=True)
    assert assign_losses(parse_losses(["policy-gradient"]), [teacher, rollouts.teacher("teacher")])


def test_a_student_with_another_tokenizer_trains_on_the_text_without_policy_gradient(rollouts, pair):
    other = Tokenizer(pair.teacher)
    cache = TeacherCache(str(rollouts.folder / "cache-alike"))
    for text, has_items in (("alm", True), ("policy-gradient", False)):
        (loss,) = parse_losses([text])
        loss_term = LossTerm(loss.make_loss(), loss.make_divergence(), None)
        (term,) = BatchBuilder(DocumentsFromCaches(cache), other, [loss_term], 256).build([0, 1]).terms
        assert (term.num_items > 0) == has_items


def test_advantages_are_summed_and_clipped_by_region(rollouts):
    teacher = rollouts.teacher("alike")
    ((assigned,), _) = assign_losses(parse_losses(["policy-gradient:reward_weight=0"]), [teacher])
    loss_term = LossTerm(assigned.rule, assigned.loss.make_divergence(), None)
    source, found = DocumentsFromCaches(teacher.source), {}
    for bounds in ({}, {"answer": 0.25, "end-of-turn": 0.5}):
        regions = RegionWeights(advantage_bounds=bounds)
        batch = BatchBuilder(source, rollouts.student, [loss_term], 256, region_weights=regions).build([0, 1])
        (term,) = batch.terms
        region_masks = {name: (term.regions == REGIONS.index(name)).numpy() for name in ("answer", "end-of-turn")}
        found[bool(bounds)] = {name: term.advantages.numpy()[mask] for name, mask in region_masks.items()}
        for name, values in found[bool(bounds)].items():
            assert batch.region_counts[2, REGIONS.index(name)] == pytest.approx(values.sum())
            assert batch.region_counts[1, REGIONS.index(name)] == len(values) > 0
    for name, bound in (("answer", 0.25), ("end-of-turn", 0.5)):
        unclipped, clipped = found[False][name], found[True][name]
        assert (np.abs(unclipped) > bound).any()
        np.testing.assert_allclose(clipped, np.clip(unclipped, -bound, bound))
