"""Import of rows with mutated values: an error that names the row, or a readable cache; never a traceback."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from xtk.cache.reader import TeacherCache
from xtk.errors import XtkError
from xtk.importers.cache_import import import_cache
from xtk.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "adversary"))
from json_mutations import mutate, to_json


def make_rows(folder: Path) -> dict[str, dict]:
    """Return a row of each import format."""
    tokenizer = Tokenizer(folder)
    ids = [tokenizer.start_ids[0], *tokenizer.encode(["Anna has 12 apples."])[0].ids.tolist()]
    top = [[token, 40 + i] for i, token in enumerate(ids[1:])]
    logprobs = [[-0.25, -2.0] for _ in top]
    tokens = [tokenizer.vocabulary.bytes_of(token) for token in ids[1:]]
    entries = [{"id": 5, "token": one.decode(), "bytes": list(one), "logprob": -0.25, "top_logprobs": [
               {"id": 5, "token": one.decode(), "bytes": list(one), "logprob": -0.25}]} for one in tokens]  # fmt: skip
    text = b"".join(tokens).decode()
    message = {"role": "user", "content": "x"}
    choice = {"finish_reason": "stop", "message": {"content": text}, "logprobs": {"content": entries}}
    legacy = {"tokens": [one.decode() for one in tokens], "token_logprobs": [-0.25] * len(tokens),
              "top_logprobs": [{one.decode(): -0.25} for one in tokens]}  # fmt: skip
    exact_bytes = np.array(logprobs, "<f4").view(np.uint8).tolist()
    packed_ids = [list(int(f"{one:09b}{other_value:09b}000000", 2).to_bytes(3, "big")) for one, other_value in top]
    return {
        "chat": {"messages": [message], "response": {"model": "m", "choices": [choice], "usage": {
            "completion_tokens": len(entries)}}},
        "text": {"prompt": "x", "response": {"model": "m", "choices": [{"text": text, "logprobs": legacy}]}},
        "ids": {"token_ids": ids, "logprobs": [None, *[-0.25] * len(top)], "top_ids": [None, *top],
                "top_logprobs": [None, *logprobs]},
        "kit": {"input_ids": ids, "bytepacked_indices": packed_ids, "compressed_logprobs": exact_bytes},
        "raw kit": {"input_ids": ids, "token_ids": top, "top_values": logprobs},
    }  # fmt: skip


CONFIG = {"d": 496, "k": 2, "exact_k": 2, "exact_dtype": "float32", "polynomial_terms": None, "residual_bins": [],
          "delta_encoding": False}  # fmt: skip


@pytest.fixture(scope="module")
def teacher(pair, tmp_path_factory):
    import shutil

    folder = Path(shutil.copytree(pair.teacher, tmp_path_factory.mktemp("teacher") / "teacher"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


def count_import_outcomes(teacher: Path, folder: Path, name: str, seeds: range) -> dict[str, int]:
    """Import mutated rows; return the number of caches and of errors."""
    row, counts = make_rows(teacher)[name], {"cache": 0, "error": 0}
    (folder / "compression_config.yaml").write_text(yaml.safe_dump(CONFIG))
    file = folder / "rows.jsonl"
    for seed in seeds:
        config = mutate(CONFIG, seed) if name == "kit" and seed % 4 == 0 else CONFIG
        changed = row if config is not CONFIG else mutate(row, seed)
        (folder / "compression_config.yaml").write_bytes(to_json(config).encode("utf-8", "replace"))
        file.write_bytes(to_json(changed).encode("utf-8", "replace") + b"\n")
        try:
            import_cache([str(file)], folder / "cache", tokenizer=str(teacher), force=True)
        except XtkError:
            counts["error"] += 1
        else:
            stored = TeacherCache(folder / "cache").read_document(0, None)
            teacher_logprobs = stored.teacher_logprobs
            assert np.isfinite(teacher_logprobs.observed_logprobs).all()
            assert (teacher_logprobs.observed_logprobs <= 0).all()
            for i in range(len(teacher_logprobs.positions)):
                entries = slice(teacher_logprobs.offsets[i], teacher_logprobs.offsets[i + 1])
                assert np.exp(teacher_logprobs.logprobs[entries]).sum() < 1.02
            counts["cache"] += 1
    return counts


NAMES = ["chat", "text", "ids", "kit", "raw kit"]


@pytest.mark.parametrize("name", NAMES)
def test_original_rows_are_imported_and_mutated_ones_are_read_or_refused(teacher, tmp_path, name):
    (tmp_path / "compression_config.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "rows.jsonl").write_text(json.dumps(make_rows(teacher)[name]) + "\n")
    import_cache([str(tmp_path / "rows.jsonl")], tmp_path / "whole", tokenizer=str(teacher))
    counts = count_import_outcomes(teacher, tmp_path, name, range(25))
    assert counts["error"] > 5


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_hundreds_of_mutated_rows_are_read_or_refused(teacher, tmp_path, name):
    counts = count_import_outcomes(teacher, tmp_path, name, range(1000, 1400))
    assert counts["error"] > 100
