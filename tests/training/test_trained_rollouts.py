"""What of a rollout is trained: the tokens that the student drew, however its tokenizer would have cut the text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import small_inputs
import torch

from xtk.artifacts.corpus_reader import Corpus
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import XtkError
from xtk.losses.fused_head_and_loss import fused_loss
from xtk.losses.loss_spec import parse_losses
from xtk.losses.loss_term import LossTerm
from xtk.models.output_head import OutputHead
from xtk.tokens.conversation_tokens import REGIONS
from xtk.tokens.teacher_tokenization import teacher_views
from xtk.tokens.token_regions import RegionWeights
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.data_sources import CacheSource
from xtk.training.losses_per_teacher import DistillationTeacher, assign_losses, open_teachers
from xtk.training.micro_batches import BatchBuilder

# Nothing is clipped, so that each item has a gradient.
POLICY = "policy-gradient:epsilon=1,epsilon_high=1000"
ACROSS = [
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
LOSSES = {"alike": [*ACROSS, "reverse-kl", "jsd"], "teacher": ACROSS}


@dataclass(frozen=True)
class Rollouts:
    """Rollouts of the student, of two turns with an answer of a tool between them, and caches of two teachers."""

    student: Tokenizer
    folder: Path
    drawn: list[list[int]]

    def teacher(self, name: str) -> DistillationTeacher:
        return open_teachers([str(self.folder / f"cache-{name}")], [], self.student)[0]


@pytest.fixture(scope="module")
def rollouts(run, pair, tmp_path_factory) -> Rollouts:
    folder = tmp_path_factory.mktemp("rollouts")
    student = Tokenizer(pair.student)
    places = {"alike": small_inputs.make_student(folder / "alike", seed=7), "teacher": pair.teacher}
    lines, drawn = [], []
    for said, after in ((" ab 12 apples", " cab"), (" has 3", " left")):
        first = [student.vocabulary.token_of_bytes[bytes([byte])] for byte in said.encode()]
        assert len(student.encode([said])[0].ids) < len(first)  # not as the tokenizer would have cut it
        second = [*student.encode([after])[0].ids.tolist(), student.end_id]
        ids, mask = [student.start_id], [0]
        for text, own in (("Anna", first), (" = 15.", second)):
            read = student.encode([text])[0].ids.tolist()
            ids, mask = [*ids, *read, *own], [*mask, *[0] * len(read), *[1] * len(own)]
        lines.append(
            {
                "segments": [
                    {"role": role, "text": text, "train": train}
                    for role, text, train in (
                        ("user", "Anna", False), ("assistant", said, True), ("tool", " = 15.", False),
                        ("assistant", after, True),
                    )
                ],
                "student_ids": ids,
                "sampled_mask": mask,
                "student_logprobs": ((-6 - 0.1 * np.arange(len(ids))) * np.array(mask)).tolist(),
                "student_tokenizer": student.fingerprint,
                "advantage": 1.5 - len(lines),
            }
        )  # fmt: skip
        drawn.append([*first, *second])
    for name, place in places.items():
        (folder / "plain.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        read = [
            sequence for _, sequence in teacher_views(Tokenizer(place), list(Corpus([str(folder / "plain.jsonl")])))
        ]
        given = [[[at, at + 5, at + 9] for at in range(int(sequence.train_mask.sum()))] for sequence in read]
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({**line, "candidate_ids": ids}) + "\n" for line, ids in zip(lines, given, strict=True))
        )
        run("cache-teacher", place, f"{name}.jsonl", "--support", "candidates", "--precision", "float32",
            "-o", f"cache-{name}", "-q", cwd=folder)  # fmt: skip
    return Rollouts(student, folder, drawn)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in LOSSES.items() for text in texts])
def test_what_was_drawn_is_trained_and_prompts_and_answers_of_tools_have_no_gradient(rollouts, name, text):
    teacher = rollouts.teacher(name)
    ((taken,), _) = assign_losses(parse_losses([text]), [teacher])
    assert taken.teacher == 0
    objective = LossTerm(
        taken.rule, taken.loss.make_divergence(), teacher.comparison_space(taken.rule.comparison_space)
    )
    source = CacheSource(teacher.source)
    batch = BatchBuilder(source, rollouts.student, [objective], 256).build([0, 1])
    (term,) = batch.terms
    torch.manual_seed(0)
    documents, length = batch.input_ids.shape
    logits = torch.randn(documents * length, rollouts.student.embedding_rows, dtype=torch.float64, requires_grad=True)
    fused_loss(logits[batch.loss_positions], OutputHead(None), [term.to(torch.device("cpu"), 1.0)], 16)[0].backward()
    moved = set(np.flatnonzero(logits.grad.abs().sum(1) > 0).tolist())
    wanted = set()
    for number, own in enumerate(rollouts.drawn):
        drawn = source.document(number).sampled_tokens
        np.testing.assert_array_equal(batch.input_ids[number, : len(drawn.ids)], drawn.ids)
        assert drawn.ids[drawn.sampled_mask].tolist() == own
        wanted |= set((number * length + np.flatnonzero(drawn.sampled_mask) - 1).tolist())
    assert moved <= wanted  # what predicts prompts and answers of tools is not moved at all
    if name == "alike" or text.startswith(POLICY):
        assert moved == wanted
    if text.startswith(POLICY):
        assert term.tokens.tolist() == [token for own in rollouts.drawn for token in own]
        old = [source.document(number).sampled_tokens for number in range(2)]
        assert float(term.sampling_logprobs.sum()) == pytest.approx(sum(float(one.logprobs.sum()) for one in old))


def test_policy_gradient_from_documents_that_nobody_drew_is_refused(rollouts, pair, cache):
    (teacher,) = open_teachers([str(cache)], [], Tokenizer(pair.student))
    with pytest.raises(XtkError, match="policy-gradient needs rollouts of the student, but the training data has none"):
        assign_losses(parse_losses(["ce", "policy-gradient"]), [teacher])
    assert assign_losses(parse_losses(["policy-gradient"]), [teacher], on_policy=True)
    assert assign_losses(parse_losses(["policy-gradient"]), [teacher, rollouts.teacher("teacher")])


def test_another_student_reads_the_text_and_has_no_part_in_the_policy_gradient(rollouts, pair):
    other = Tokenizer(pair.teacher)
    cache = TeacherCache(str(rollouts.folder / "cache-alike"))
    for text, items in (("alm", True), ("policy-gradient", False)):
        (loss,) = parse_losses([text])
        objective = LossTerm(loss.make_loss(), loss.make_divergence(), None)
        (term,) = BatchBuilder(CacheSource(cache), other, [objective], 256).build([0, 1]).terms
        assert (term.num_items > 0) == items


def test_advantages_are_counted_and_bounded_by_region(rollouts):
    teacher = rollouts.teacher("alike")
    ((taken,), _) = assign_losses(parse_losses(["policy-gradient:reward_weight=0"]), [teacher])
    objective = LossTerm(taken.rule, taken.loss.make_divergence(), None)
    source, found = CacheSource(teacher.source), {}
    for bounds in ({}, {"answer": 0.25, "end-of-turn": 0.5}):
        regions = RegionWeights(advantage_bounds=bounds)
        batch = BatchBuilder(source, rollouts.student, [objective], 256, region_weights=regions).build([0, 1])
        (term,) = batch.terms
        number = {name: (term.regions == REGIONS.index(name)).numpy() for name in ("answer", "end-of-turn")}
        found[bool(bounds)] = {name: term.advantages.numpy()[mask] for name, mask in number.items()}
        for name, values in found[bool(bounds)].items():
            assert batch.region_counts[2, REGIONS.index(name)] == pytest.approx(values.sum())
            assert batch.region_counts[1, REGIONS.index(name)] == len(values) > 0
    for name, bound in (("answer", 0.25), ("end-of-turn", 0.5)):
        free, bounded = found[False][name], found[True][name]
        assert (np.abs(free) > bound).any()
        np.testing.assert_allclose(bounded, np.clip(free, -bound, bound))
