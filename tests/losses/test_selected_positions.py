"""The options `where` and `whitespace`: which items of a loss count, for all losses in the same way."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from recorded_training_steps import make_train_config, open_run_inputs
from reference_losses import Case, random_case
from test_loss_contract import comparison_space_of, fused

from xtk.errors import XtkError
from xtk.losses import LOSSES
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.interface import join_inputs
from xtk.losses.spec import parse_losses
from xtk.losses.term import LossTerm, make_loss_inputs
from xtk.name_registry import load_registered
from xtk.text.document import Document
from xtk.text.token_sequence import TokenSequence, tokenize_documents
from xtk.text.tokenizer import Tokenizer

SPAN_LOSSES = ("p-kl", "alm", "gold", "h-kl", "policy-gradient")
CROSS_TOKENIZER_LOSSES = [
    name for name in LOSSES if load_registered(LOSSES, name, "loss").comparison_space not in ("text", "tokens")
]


def case_with_whitespace(seed: int, *, one_tokenizer: bool = False) -> Case:
    case = random_case(seed, K=4, spans=12, one_tokenizer=one_tokenizer)
    is_whitespace = np.random.default_rng(seed).random(len(case.example.positions)) < 0.3
    return dataclasses.replace(case, example=dataclasses.replace(case.example, is_whitespace=is_whitespace))


def cells_of(text: str, case: Case) -> LossCells:
    name = text.split(":")[0]
    (spec,) = parse_losses([text])
    term = LossTerm(spec.make_loss(), spec.make_divergence(), comparison_space_of(name, case))
    return term.build_cells(case.example)


def value(cells: LossCells, case: Case) -> float:
    return float(fused(case, [cells], [1.0])[1][0]) if cells.num_items else 0.0


def rows_of(cells: LossCells, name: str, item: int, case: Case) -> list[int]:
    """Return the rows of an item: of its position, or for a span loss of all tokens of the span."""
    first = int(cells.first_rows[item])
    if name not in SPAN_LOSSES:
        return [first]
    position = int(case.example.positions[first]) + 1
    (size,) = [int(stop - start) for start, stop, _, _ in case.example.spans if start == position]
    return list(range(first, first + size))


@pytest.mark.slow
@pytest.mark.parametrize("options", ["where=common", "whitespace=mask", "where=common,whitespace=mask"])
@pytest.mark.parametrize("name", CROSS_TOKENIZER_LOSSES)
def test_loss_is_the_sum_of_the_selected_items(name, options):
    left_out = 0
    for seed in range(3):
        case = case_with_whitespace(seed)
        all_cells = cells_of(name, case)
        shared = {int(start) for start in case.example.spans[:, 0]}
        kept = []
        for item in range(all_cells.num_items):
            rows = rows_of(all_cells, name, item, case)
            selected = "mask" not in options or not case.example.is_whitespace[rows].any()
            if "common" in options:
                selected &= all(int(case.example.positions[row]) + 1 in shared for row in rows)
                selected &= name != "byte-kl" or not bool(all_cells.is_inside_token[item])
            kept += [item] if selected else []
        left_out += all_cells.num_items - len(kept)
        cells = cells_of(f"{name}:{options}", case)
        assert cells.denominator == len(kept)
        expected = sum(value(all_cells.select(slice(item, item + 1), 0), case) for item in kept)
        assert value(cells, case) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert left_out > 0 or (name in ("boundary-kl", "uld", "simct", "strict") and options == "where=common")


def test_ce_and_same_tokenizer_losses_can_mask_whitespace():
    case = case_with_whitespace(1, one_tokenizer=True)
    for name in ("ce", "forward-kl", "tvd"):
        all_cells, cells = cells_of(name, case), cells_of(f"{name}:whitespace=mask", case)
        kept = [
            item
            for item in range(all_cells.num_items)
            if not case.example.is_whitespace[int(all_cells.first_rows[item])]
        ]
        assert cells.denominator == len(kept) < all_cells.num_items
        expected = sum(value(all_cells.select(slice(item, item + 1), 0), case) for item in kept)
        assert value(cells, case) == pytest.approx(expected, rel=1e-6)
    assert cells_of("forward-kl:where=common", case).denominator == cells_of("forward-kl", case).num_items


@pytest.mark.parametrize("name", ["byte-kl", "p-kl", "escd"])
def test_masked_rows_have_no_gradient_and_document_weights_multiply(name):
    case = case_with_whitespace(2)
    cells = cells_of(f"{name}:whitespace=mask", case)
    row_counts = np.full(len(case.example.positions), 2.0)
    weighted = cells.with_row_weights(row_counts, np.full(len(row_counts), 0.25))
    assert weighted.denominator == 2 * cells.denominator
    assert value(weighted, case) == pytest.approx(value(cells, case) / 2, rel=1e-6)
    only_whitespace = dataclasses.replace(case.example, is_whitespace=np.ones(len(row_counts), np.bool_))
    empty_cells = cells_of(f"{name}:whitespace=mask", dataclasses.replace(case, example=only_whitespace))
    total, _, gradients = fused(case, [empty_cells], [1.0])
    assert empty_cells.denominator == float(total) == 0
    assert not any(gradient.any() for gradient in gradients)


def test_defaults_select_all_items_and_batches_join_whitespace_masks():
    case = case_with_whitespace(1)
    assert cells_of("byte-kl:where=all,whitespace=keep", case).weights is None
    is_whitespace = case.example.is_whitespace
    unmasked = dataclasses.replace(case.example, is_whitespace=None)
    joined = join_inputs([case.example, unmasked])
    assert joined.is_whitespace.tolist() == [*is_whitespace, *np.zeros(len(is_whitespace), np.bool_)]
    assert join_inputs([unmasked, unmasked]).is_whitespace is None


def test_whitespace_tokens_contain_only_spaces_tabs_and_newlines(pair):
    tokenizer = Tokenizer(pair.student)
    text = "if x:\n\n\t  return \u00a0 12  apples\n "
    (sequence,) = tokenize_documents(tokenizer, [Document.from_text(text)])
    example = make_loss_inputs(sequence, Document.from_text(text), None, sequence.whitespace_mask(text))
    found = []
    for row, is_whitespace in zip(example.positions.tolist(), example.is_whitespace.tolist(), strict=True):
        spelled = tokenizer.vocabulary.bytes_by_id[sequence.ids[row + 1]]
        assert is_whitespace == (spelled != b"" and not spelled.strip(b" \t\r\n"))
        found.append(is_whitespace)
    assert 0 < sum(found) < len(found)


def test_whitespace_is_computed_once_per_document_and_only_if_masked(pair, cache, projection, monkeypatch):
    computed: list[str] = []
    original = TokenSequence.whitespace_mask
    monkeypatch.setattr(
        TokenSequence, "whitespace_mask", lambda self, text: computed.append(text) or original(self, text)
    )
    for losses, expected in ((["ce", "p-kl"], []), (["ce", "p-kl:whitespace=mask"], [0, 1, 2])):
        inputs = open_run_inputs(pair.student, [cache], make_train_config(losses), (projection,))
        computed.clear()
        inputs.batch_builder(256).build([0, 1, 2])
        assert computed == [inputs.source.document(number).text for number in expected]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("byte-kl:where=shared", "no value of where of the loss byte-kl:where=shared called 'shared'"),
        ("jsd:whitespace=drop", "no value of whitespace of the loss jsd:whitespace=drop called 'drop'"),
        ("ce:where=common", "where=common does not fit the loss ce: it has no teacher, so no boundary is shared"),
    ],
)
def test_invalid_selections_are_refused(text, what):
    with pytest.raises(XtkError) as raised:
        parse_losses([text])
    assert raised.value.what.startswith(what)
