"""The options `where` and `whitespace`: which items of a loss count, for all losses in the same way."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from recorded_training_steps import inputs_of, recipe_of
from reference_losses import Case, draw_case
from test_loss_contract import fused, ground_of

from xtk.errors import XtkError
from xtk.losses import LOSSES
from xtk.losses.loss_cells import LossCells
from xtk.losses.loss_interface import Loss, join_inputs
from xtk.losses.loss_spec import parse_losses
from xtk.losses.loss_term import LossTerm, make_loss_inputs
from xtk.name_registry import load_registered
from xtk.tokens.document import Document
from xtk.tokens.token_sequence import TokenSequence, tokenize_documents
from xtk.tokens.tokenizer import Tokenizer

OF_SPANS = ("p-kl", "alm", "gold", "h-kl", "policy-gradient")
ACROSS = [name for name in LOSSES if load_registered(LOSSES, name, "loss").comparison_space not in ("text", "tokens")]


def loss(text: str) -> Loss:
    (spec,) = parse_losses([text])
    return spec.make_loss()


def case_with_whitespace(seed: int, *, one_tokenizer: bool = False) -> Case:
    case = draw_case(seed, K=4, spans=12, one_tokenizer=one_tokenizer)
    blank = np.random.default_rng(seed).random(len(case.example.positions)) < 0.3
    return dataclasses.replace(case, example=dataclasses.replace(case.example, is_whitespace=blank))


def cells_of(text: str, case: Case) -> LossCells:
    name = text.split(":")[0]
    (spec,) = parse_losses([text])
    term = LossTerm(spec.make_loss(), spec.make_divergence(), ground_of(name, case))
    return term.build_cells(case.example)


def value(cells: LossCells, case: Case) -> float:
    return float(fused(case, [cells], [1.0])[1][0]) if cells.num_items else 0.0


def rows_of(cells: LossCells, name: str, item: int, case: Case) -> list[int]:
    """The rows that an item is about: that of its position; for a span all of them, by the document's spans."""
    first = int(cells.first_rows[item])
    if name not in OF_SPANS:
        return [first]
    position = int(case.example.positions[first]) + 1
    (size,) = [int(stop - start) for start, stop, _, _ in case.example.spans if start == position]
    return list(range(first, first + size))


@pytest.mark.parametrize("options", ["where=common", "whitespace=mask", "where=common,whitespace=mask"])
@pytest.mark.parametrize("name", ACROSS)
def test_the_loss_is_that_of_the_items_that_are_selected(name, options):
    left_out = 0
    for seed in range(3):
        case = case_with_whitespace(seed)
        whole = cells_of(name, case)
        shared = {int(start) for start in case.example.spans[:, 0]}
        kept = []
        for item in range(whole.num_items):
            rows = rows_of(whole, name, item, case)
            fits = "mask" not in options or not case.example.is_whitespace[rows].any()
            if "common" in options:
                fits &= all(int(case.example.positions[row]) + 1 in shared for row in rows)
                fits &= name != "byte-kl" or not bool(whole.is_inside_token[item])
            kept += [item] if fits else []
        left_out += whole.num_items - len(kept)
        cells = cells_of(f"{name}:{options}", case)
        assert cells.denominator == len(kept)
        expected = sum(value(whole.select(slice(item, item + 1), 0), case) for item in kept)
        assert value(cells, case) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert left_out > 0 or (name in ("boundary-kl", "uld", "simct", "strict") and options == "where=common")


def test_cross_entropy_and_losses_of_one_tokenizer_leave_out_white_space():
    case = case_with_whitespace(1, one_tokenizer=True)
    for name in ("ce", "forward-kl", "tvd"):
        whole, cells = cells_of(name, case), cells_of(f"{name}:whitespace=mask", case)
        kept = [item for item in range(whole.num_items) if not case.example.is_whitespace[int(whole.first_rows[item])]]
        assert cells.denominator == len(kept) < whole.num_items
        expected = sum(value(whole.select(slice(item, item + 1), 0), case) for item in kept)
        assert value(cells, case) == pytest.approx(expected, rel=1e-6)
    assert cells_of("forward-kl:where=common", case).denominator == cells_of("forward-kl", case).num_items


@pytest.mark.parametrize("name", ["byte-kl", "p-kl", "escd"])
def test_left_out_rows_have_no_gradient_and_weights_of_documents_multiply(name):
    case = case_with_whitespace(2)
    cells = cells_of(f"{name}:whitespace=mask", case)
    documents = np.full(len(case.example.positions), 2.0)
    weighted = cells.with_row_weights(documents, np.full(len(documents), 0.25))
    assert weighted.denominator == 2 * cells.denominator
    assert value(weighted, case) == pytest.approx(value(cells, case) / 2, rel=1e-6)
    nothing = dataclasses.replace(case.example, is_whitespace=np.ones(len(documents), np.bool_))
    none = cells_of(f"{name}:whitespace=mask", dataclasses.replace(case, example=nothing))
    total, _, gradients = fused(case, [none], [1.0])
    assert none.denominator == float(total) == 0
    assert not any(gradient.any() for gradient in gradients)


def test_the_defaults_leave_out_nothing_and_batches_join_what_is_white_space():
    case = case_with_whitespace(1)
    assert cells_of("byte-kl:where=all,whitespace=keep", case).weights is None
    blank = case.example.is_whitespace
    without = dataclasses.replace(case.example, is_whitespace=None)
    joined = join_inputs([case.example, without])
    assert joined.is_whitespace.tolist() == [*blank, *np.zeros(len(blank), np.bool_)]
    assert join_inputs([without, without]).is_whitespace is None


def test_tokens_of_white_space_are_those_of_spaces_tabs_and_newlines(pair):
    tokenizer = Tokenizer(pair.student)
    text = "if x:\n\n\t  return \u00a0 12  apples\n "
    (sequence,) = tokenize_documents(tokenizer, [Document.from_text(text)])
    example = make_loss_inputs(sequence, Document.from_text(text), None, sequence.whitespace_mask(text))
    found = []
    for row, blank in zip(example.positions.tolist(), example.is_whitespace.tolist(), strict=True):
        spelled = tokenizer.vocabulary.bytes_by_id[sequence.ids[row + 1]]
        assert blank == (spelled != b"" and not spelled.strip(b" \t\r\n"))
        found.append(blank)
    assert 0 < sum(found) < len(found)


def test_white_space_is_searched_once_per_document_and_only_if_a_loss_leaves_it_out(
    pair, cache, projection, monkeypatch
):
    searched: list[str] = []
    search = TokenSequence.whitespace_mask
    monkeypatch.setattr(
        TokenSequence, "whitespace_mask", lambda self, text: searched.append(text) or search(self, text)
    )
    for losses, expected in ((["ce", "p-kl"], []), (["ce", "p-kl:whitespace=mask"], [0, 1, 2])):
        inputs = inputs_of(pair.student, [cache], recipe_of(losses), (projection,))
        searched.clear()
        inputs.batch_builder(256).build([0, 1, 2])
        assert searched == [inputs.source.document(number).text for number in expected]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("byte-kl:where=shared", "no value of where of the loss byte-kl:where=shared called 'shared'"),
        ("jsd:whitespace=drop", "no value of whitespace of the loss jsd:whitespace=drop called 'drop'"),
        ("ce:where=common", "where=common does not fit the loss ce: it has no teacher, so no boundary is shared"),
    ],
)
def test_a_bad_selection_is_told(text, what):
    with pytest.raises(XtkError) as told:
        parse_losses([text])
    assert told.value.what.startswith(what)
