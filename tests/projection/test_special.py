"""Matching of special tokens by role."""

from __future__ import annotations

import json
import shutil

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from xtk.errors import XtkError
from xtk.projection.build import build_projection
from xtk.projection.special_tokens import END_OF_TURN_TOKENS, match_special_tokens
from xtk.text.tokenizer import Tokenizer


def add_special_tokens(folder, target, *tokens: str, **roles: str) -> Tokenizer:
    """Copy a tokenizer, and return the copy with more special tokens and other roles."""
    shutil.copytree(folder, target)
    backend = Backend.from_file(str(target / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    backend.save(str(target / "tokenizer.json"))
    configuration = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**configuration, **roles}))
    return Tokenizer(target)


def matched_names(student: Tokenizer, teacher: Tokenizer, special_tokens="role") -> dict[str, str]:
    names = [
        {token: name for name, token in tokenizer.vocabulary.special_tokens.items()} for tokenizer in (student, teacher)
    ]
    matched = zip(*match_special_tokens(student, teacher, special_tokens), strict=True)
    return {names[0][int(student_id)]: names[1][int(teacher_id)] for student_id, teacher_id in matched}


@pytest.mark.parametrize("student_token", END_OF_TURN_TOKENS)
@pytest.mark.parametrize("teacher_token", END_OF_TURN_TOKENS)
def test_end_of_turn_tokens_with_different_names_are_matched(families, tmp_path, student_token, teacher_token):
    student = add_special_tokens(families["student"], tmp_path / "one", student_token)
    teacher = add_special_tokens(families["metaspace"], tmp_path / "other", teacher_token)
    assert matched_names(student, teacher)[student_token] == teacher_token
    assert matched_names(student, teacher)["<|end_of_text|>"] == "</s>"


def test_end_of_turn_token_that_is_also_eos_is_matched_as_eos(families, tmp_path):
    student = add_special_tokens(families["student"], tmp_path / "one", "<|eot_id|>", eos_token="<|eot_id|>")
    teacher = add_special_tokens(families["metaspace"], tmp_path / "other", "<end_of_turn>")
    assert matched_names(student, teacher)["<|eot_id|>"] == "</s>"


def test_several_end_of_turn_tokens_are_not_matched(families, tmp_path):
    student = add_special_tokens(families["student"], tmp_path / "one", "<|eot_id|>", "<|end|>")
    teacher = add_special_tokens(families["metaspace"], tmp_path / "other", "<end_of_turn>")
    assert not {"<|eot_id|>", "<|end|>"} & set(matched_names(student, teacher))


def test_table_replaces_the_matching_and_none_disables_it(tokenizer_of):
    pair = tokenizer_of["student"], tokenizer_of["metaspace"]
    table = {"<|pad|>": "</s>"}
    assert matched_names(*pair, table) == table
    assert matched_names(*pair, "none") == {}
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
def test_unknown_token_in_a_table_is_refused_with_the_nearest_name(tokenizer_of, table, message):
    with pytest.raises(XtkError, match=message):
        match_special_tokens(tokenizer_of["student"], tokenizer_of["metaspace"], table)


def test_teacher_token_with_several_roles_is_paired_with_the_students_end_token(families, tmp_path):
    name = "<|endoftext|>"
    teacher = add_special_tokens(families["gpt2"], tmp_path / "one", bos_token=name, unk_token=name, pad_token=name)
    student = add_special_tokens(families["student"], tmp_path / "other")  # bos 0, eos 1, pad 2
    assert matched_names(student, teacher) == {"<|end_of_text|>": name}
    pairs = build_projection(student, teacher).columns.pairs
    assert pairs.student_of_teacher[teacher.end_id] == student.end_id
    # All roles get the row of the same embedding when a model gets this tokenizer.
    ids, _ = match_special_tokens(student, teacher, repeats_roles=True)
    assert set(ids.tolist()) == set(student.special_token_ids.values())
