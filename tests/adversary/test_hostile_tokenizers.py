"""Untrusted tokenizer.json files: any content is read or refused with an error."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path

import pytest

from xtk.errors import XtkError
from xtk.text.tokenizer import Tokenizer

TEXTS = ["Anna has 12 apples.", "日本 😀 e\u0301\n", " </s>x", ""]


def copy_with_change(folder: Path, target: Path, change) -> Path:
    shutil.copytree(folder, target)
    content = json.loads((target / "tokenizer.json").read_text())
    change(content)
    (target / "tokenizer.json").write_text(json.dumps(content))
    return target


def large_id(content):
    content["added_tokens"][0]["id"] = 4_000_000_000
    content["model"]["vocab"][content["added_tokens"][0]["content"]] = 4_000_000_000


def large_id_in_vocabulary(content):
    content["model"]["vocab"]["zzzz"] = 300_000_000


def empty_added_token(content):
    content["added_tokens"].append({**content["added_tokens"][0], "content": "", "id": 5000})


def missing_unknown_token(content):
    content["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    content["added_tokens"], content["pre_tokenizer"], content["post_processor"] = [], None, None


def deeply_nested(content):
    normalizer = {"type": "NFC"}
    for _ in range(150):
        normalizer = {"type": "Sequence", "normalizers": [normalizer]}
    content["normalizer"] = normalizer


ATTACKS = {
    large_id: "has a token with id 4,000,000,000; ids must be at most 9,999,999",
    large_id_in_vocabulary: "has a token with id 300,000,000",
    empty_added_token: "added token 5000 in tokenizer.json has no text",
    missing_unknown_token: "the tokenizer cannot encode a text: WordLevel error: Missing [UNK] token",
    deeply_nested: "recursion limit exceeded",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_hostile_tokenizer_is_refused(run, pair, corpus, tmp_path, attack):
    teacher = copy_with_change(pair.teacher, tmp_path / "teacher", attack)
    for command in (
        ("align", pair.student, teacher, "Anna has 12 apples."),
        ("cache-teacher", teacher, corpus, "-o", tmp_path / "cache"),
    ):
        result = run(*command, code=None)
        assert result.returncode == 1, result.stderr
        assert "Traceback" not in result.stderr
        assert ATTACKS[attack] in result.stderr


def test_tokenizer_json_nested_10000_levels_deep_is_refused(run, pair, tmp_path):
    for name, message in (
        ("tokenizer.json", "xtk: invalid tokenizer.json"),
        ("tokenizer_config.json", "xtk: this file is nested more than 100 levels deep"),
    ):
        folder = shutil.copytree(pair.teacher, tmp_path / name)
        (folder / name).write_text('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}")
        result = run("align", pair.student, folder, "Anna", code=None)
        assert result.returncode == 1
        assert "Traceback" not in result.stderr
        assert message in result.stderr


def test_bpe_dropout_is_disabled_with_one_message(run, pair, corpus, tmp_path):
    teacher = copy_with_change(pair.teacher, tmp_path / "teacher", lambda content: content["model"].update(dropout=0.5))
    result = run("cache-teacher", teacher, corpus, "-o", tmp_path / "cache")
    assert result.stderr.count("disabled this tokenizer's BPE dropout of 0.5") == 1
    plain = Tokenizer(pair.teacher).encode(TEXTS)
    assert [one.ids.tolist() for one in Tokenizer(teacher).encode(TEXTS)] == [one.ids.tolist() for one in plain]


# Mutations.

VALUES = [None, True, -1, 0, 1.5, 4_000_000_000, 1 << 80, "", "a", "\ud800", [], {}, [[]], {"type": "nosuch"}]


def json_paths(value, path=()):
    """Yield the paths of all values in a JSON value; of each table only the first 12 entries."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for number, (key, item) in enumerate(items):
        if number < 12:
            yield from json_paths(item, (*path, key))


def mutated(content, rng):
    content = copy.deepcopy(content)
    for _ in range(rng.choice([1, 1, 2])):
        path = rng.choice([path for path in json_paths(content) if path])
        parent = content
        for key in path[:-1]:
            parent = parent[key]
        if rng.random() < 0.3:
            del parent[path[-1]]
        else:
            parent[path[-1]] = rng.choice(VALUES)
    return content


def count_refused(folder: Path, name: str, count: int, seed: int) -> int:
    """Read mutated files and return how many were refused; any exception but XtkError fails the test."""
    rng = random.Random(seed)
    original = json.loads((folder / name).read_text())
    refused = 0
    for _ in range(count):
        text = json.dumps(mutated(original, rng))
        (folder / name).write_text(text)
        try:
            tokenizer = Tokenizer(folder)
            tokenizer.encode(TEXTS)
            tokenizer.encode_bytes([b"Anna", b"\xff"])
            tokenizer.to_files()
            _ = tokenizer.start_ids, tokenizer.end_ids, tokenizer.adds_prefix_space
        except XtkError:
            refused += 1
        except BaseException as error:
            raise AssertionError(text[:3000]) from error
    return refused


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_mutated_tokenizers_are_read_or_refused(pair, metaspace, tmp_path, name):
    for number, folder in enumerate((pair.teacher, metaspace)):
        copied_folder = shutil.copytree(folder, tmp_path / str(number))
        assert count_refused(copied_folder, name, 60, seed=number) <= 60


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_hundreds_of_mutated_tokenizers_are_read_or_refused(families, tmp_path, seed):
    for family, folder in families.items():
        copied_folder = shutil.copytree(folder, tmp_path / family)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                count_refused(copied_folder, name, 100, seed)
                shutil.copy(folder / name, copied_folder / name)
