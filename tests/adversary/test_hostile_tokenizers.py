"""tokenizer.json from outside: whatever is in it, it is read or refused in a sentence."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path

import pytest

from xtk.errors import XtkError
from xtk.tokens.tokenizer import Tokenizer

TEXTS = ["Anna has 12 apples.", "日本 😀 e\u0301\n", " </s>x", ""]


def changed(folder: Path, to: Path, change) -> Path:
    shutil.copytree(folder, to)
    content = json.loads((to / "tokenizer.json").read_text())
    change(content)
    (to / "tokenizer.json").write_text(json.dumps(content))
    return to


def large_id(content):
    content["added_tokens"][0]["id"] = 4_000_000_000
    content["model"]["vocab"][content["added_tokens"][0]["content"]] = 4_000_000_000


def large_id_of_vocabulary(content):
    content["model"]["vocab"]["zzzz"] = 300_000_000


def empty_added_token(content):
    content["added_tokens"].append({**content["added_tokens"][0], "content": "", "id": 5000})


def missing_unknown(content):
    content["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    content["added_tokens"], content["pre_tokenizer"] = [], None


def megabyte_a_letter(content):
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "a"}, "content": "x" * 1_000_000}


def doubling(content):
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [double] * 30}


def deep(content):
    part = {"type": "NFC"}
    for _ in range(150):
        part = {"type": "Sequence", "normalizers": [part]}
    content["normalizer"] = part


ATTACKS = {
    large_id: "has a token with id 4,000,000,000; ids must be at most 9,999,999",
    large_id_of_vocabulary: "has a token with id 300,000,000",
    empty_added_token: "added token 5000 in tokenizer.json has no text",
    missing_unknown: "the tokenizer cannot encode a text: WordLevel error: Missing [UNK] token",
    megabyte_a_letter: "outputs up to 1,000,000 bytes per input byte",
    doubling: "outputs up to 1,073,741,824 bytes per input byte",
    deep: "nested more than 100 levels deep",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_hostile_tokenizer_ends_in_a_sentence(run, pair, corpus, tmp_path, attack):
    teacher = changed(pair.teacher, tmp_path / "teacher", attack)
    for command in (
        ("align", pair.student, teacher, "Anna has 12 apples."),
        ("cache-teacher", teacher, corpus, "-o", tmp_path / "cache"),
    ):
        done = run(*command, code=None)
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        assert ATTACKS[attack] in done.stderr


def test_json_of_10000_levels_is_refused(run, pair, tmp_path):
    for name, told in (
        ("tokenizer.json", "xtk: invalid tokenizer.json"),
        ("tokenizer_config.json", "xtk: this file is nested more than 100 levels deep"),
    ):
        folder = shutil.copytree(pair.teacher, tmp_path / name)
        (folder / name).write_text('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}")
        done = run("align", pair.student, folder, "Anna", code=None)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert told in done.stderr


def test_dropout_is_switched_off_with_one_line(run, pair, corpus, tmp_path):
    teacher = changed(pair.teacher, tmp_path / "teacher", lambda content: content["model"].update(dropout=0.5))
    done = run("cache-teacher", teacher, corpus, "-o", tmp_path / "cache")
    assert done.stderr.count("disabled this tokenizer's BPE dropout of 0.5") == 1
    plain = Tokenizer(pair.teacher).encode(TEXTS)
    assert [one.ids.tolist() for one in Tokenizer(teacher).encode(TEXTS)] == [one.ids.tolist() for one in plain]


# Mutations.

VALUES = [None, True, -1, 0, 1.5, 4_000_000_000, 1 << 80, "", "a", "\ud800", [], {}, [[]], {"type": "nosuch"}]


def places(value, path=()):
    """Every place in a JSON value, long tables by their first entries."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for number, (key, part) in enumerate(parts):
        if number < 12:
            yield from places(part, (*path, key))


def mutated(content, random_):
    content = copy.deepcopy(content)
    for _ in range(random_.choice([1, 1, 2])):
        path = random_.choice([path for path in places(content) if path])
        parent = content
        for key in path[:-1]:
            parent = parent[key]
        if random_.random() < 0.3:
            del parent[path[-1]]
        else:
            parent[path[-1]] = random_.choice(VALUES)
    return content


def survive(folder: Path, name: str, count: int, seed: int) -> int:
    """Read mutated files; return how many were refused. Anything but an XtkError is a failure."""
    random_ = random.Random(seed)
    whole = json.loads((folder / name).read_text())
    refused = 0
    for _ in range(count):
        text = json.dumps(mutated(whole, random_))
        (folder / name).write_text(text)
        try:
            tokenizer = Tokenizer(folder)
            tokenizer.encode(TEXTS)
            tokenizer.encode_bytes([b"Anna", b"\xff"])
            tokenizer.to_files()
            _ = tokenizer.start_id, tokenizer.end_ids, tokenizer.adds_prefix_space
        except XtkError:
            refused += 1
        except BaseException as wrong:
            raise AssertionError(text[:3000]) from wrong
    return refused


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_mutated_tokenizers_are_read_or_refused(pair, metaspace, tmp_path, name):
    for number, folder in enumerate((pair.teacher, metaspace)):
        copied = shutil.copytree(folder, tmp_path / str(number))
        assert survive(copied, name, 60, seed=number) <= 60


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_hundreds_of_mutated_tokenizers_are_read_or_refused(families, tmp_path, seed):
    for family, folder in families.items():
        copied = shutil.copytree(folder, tmp_path / family)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                survive(copied, name, 100, seed)
                shutil.copy(folder / name, copied / name)
