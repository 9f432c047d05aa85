"""Which special token plays the part of which."""

from __future__ import annotations

import json
import shutil

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from xtk.errors import XtkError
from xtk.projection.build import build_projection
from xtk.projection.special_tokens import END_OF_TURN_TOKENS, match_special_tokens
from xtk.tokens.tokenizer import Tokenizer


def with_tokens(folder, place, *tokens: str, **roles: str) -> Tokenizer:
    """A copy of a tokenizer with more special tokens."""
    shutil.copytree(folder, place)
    backend = Backend.from_file(str(place / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    backend.save(str(place / "tokenizer.json"))
    configuration = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps({**configuration, **roles}))
    return Tokenizer(place)


def pairs(student: Tokenizer, teacher: Tokenizer, how="role") -> dict[str, str]:
    names = [{token: name for name, token in side.vocabulary.special_tokens.items()} for side in (student, teacher)]
    matched = zip(*match_special_tokens(student, teacher, how), strict=True)
    return {names[0][int(one)]: names[1][int(other)] for one, other in matched}


@pytest.mark.parametrize("one", END_OF_TURN_TOKENS)
@pytest.mark.parametrize("other", END_OF_TURN_TOKENS)
def test_the_end_of_a_turn_is_matched_whatever_it_is_called(families, tmp_path, one, other):
    student = with_tokens(families["student"], tmp_path / "one", one)
    teacher = with_tokens(families["metaspace"], tmp_path / "other", other)
    assert pairs(student, teacher)[one] == other
    assert pairs(student, teacher)["<|end_of_text|>"] == "</s>"


def test_a_turn_end_that_is_the_end_of_text_was_matched_by_that_role(families, tmp_path):
    student = with_tokens(families["student"], tmp_path / "one", "<|eot_id|>", eos_token="<|eot_id|>")
    teacher = with_tokens(families["metaspace"], tmp_path / "other", "<end_of_turn>")
    assert pairs(student, teacher)["<|eot_id|>"] == "</s>"


def test_of_several_turn_ends_none_is_guessed(families, tmp_path):
    student = with_tokens(families["student"], tmp_path / "one", "<|eot_id|>", "<|end|>")
    teacher = with_tokens(families["metaspace"], tmp_path / "other", "<end_of_turn>")
    assert not {"<|eot_id|>", "<|end|>"} & set(pairs(student, teacher))


def test_a_table_is_all_there_is_and_none_is_none(tokenizer_of):
    pair = tokenizer_of["student"], tokenizer_of["metaspace"]
    table = {"<|pad|>": "</s>"}
    assert pairs(*pair, table) == table
    assert pairs(*pair, "none") == {}
    built = build_projection(*pair, special_tokens=table)
    assert built.header["special_tokens"] == table
    assert built.header["audit"]["rows"]["special"] == 1
    assert build_projection(*pair, special_tokens="none").header["audit"]["rows"]["special"] == 0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"<|end_of_txt|>": "</s>"}, r"no special token '<\|end_of_txt\|>'; did you mean <\|end_of_text\|>\?"),
        ({"<|pad|>": "<s"}, "no special token '<s'; did you mean <s>"),
        ({"the": "</s>"}, "no special token 'the'"),
        ("roles", "must be role, none or a JSON or YAML file"),
    ],
)
def test_an_unknown_token_is_answered_with_the_nearest_one(tokenizer_of, table, message):
    with pytest.raises(XtkError, match=message):
        match_special_tokens(tokenizer_of["student"], tokenizer_of["metaspace"], table)
