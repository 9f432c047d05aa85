"""Log-probabilities written by DistillKit are imported as the caches that they describe."""

import json
import math
import shutil
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from xtk.cache.reader import TeacherCache

TEXTS = ["Anna has 12 apples and 30 pears.", "The river — é — is wide", "def f(x):\n    return x + 2019", "So."]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{{ eos_token }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TOP = 12


@pytest.fixture(scope="module")
def teacher(pair, tmp_path_factory):
    """The shared teacher with a chat template that writes text after the end of a turn."""
    folder = shutil.copytree(pair.teacher, tmp_path_factory.mktemp("teacher") / "teacher")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def scored_texts(teacher):
    """Return for each text its tokens with start and end token, and [T, V] log-probabilities; row t predicts token t.

    The model is untrained, so the tokens of the text are made likely at most positions.
    """
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    model = AutoModelForCausalLM.from_pretrained(teacher).eval()
    rows = []
    for text in TEXTS:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        ids = [start, *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        logprobs = make_tokens_likely(logits, ids, len(tokenizer))
        rows.append((ids, torch.cat([torch.full_like(logprobs[:1], -math.inf), logprobs[:-1]])))
    return rows


def make_tokens_likely(logits, ids, size):
    logits[:, size:] = -1e4
    for i, token in enumerate(ids[1:]):
        logits[i, token] += 9.0 * (i % 5 != 4)
    return logits.log_softmax(-1)


def top_tokens(row):
    """Return ids and values of the most likely tokens."""
    top = row.topk(TOP)
    return top.indices.tolist(), top.values.tolist()


def read_stored_positions(folder):
    """Return {token: log-probability} of each trained position of each document, with the observed ones."""
    cache, documents = TeacherCache(folder), []
    for number in range(len(cache)):
        document = cache.read_document(number, None)
        teacher_logprobs, ids = document.teacher_logprobs, document.tokens.ids
        positions = []
        for i, position in enumerate(teacher_logprobs.positions.tolist()):
            entries = slice(teacher_logprobs.offsets[i], teacher_logprobs.offsets[i + 1])
            listed = dict(
                zip(teacher_logprobs.ids[entries].tolist(), teacher_logprobs.logprobs[entries].tolist(), strict=True)
            )
            positions.append((int(ids[position]), listed, float(teacher_logprobs.observed_logprobs[i])))
        documents.append(positions)
    return documents


def assert_cache_matches(folder, scored_texts, *, tolerance=1e-5):
    """Assert that a cache has the model's log-probabilities."""
    documents = read_stored_positions(folder)
    assert len(documents) == len(scored_texts)
    for stored_positions, (ids, expected) in zip(documents, scored_texts, strict=True):
        expected_indices = range(1, len(ids))
        assert [token for token, _, _ in stored_positions] == [ids[i] for i in expected_indices]
        for (token, listed, observed), i in zip(stored_positions, expected_indices, strict=True):
            top_ids, values = top_tokens(expected[i])
            assert {token_id for token_id in listed if token_id in top_ids} == set(top_ids)
            for token_id, value in zip(top_ids, values, strict=True):
                assert listed[token_id] == pytest.approx(value, abs=tolerance)
            if token in top_ids:
                assert observed == pytest.approx(listed[token], abs=1e-6)
            else:  # not listed: the stored value is an upper bound
                assert observed >= float(expected[i, token]) - tolerance


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def import_cache(run, teacher, file, output, *options):
    return run("cache", "import", file, "--tokenizer", teacher, "--precision", "float32", *options, "-o", output)


def pack_bits(values, bits):
    """Return integers of `bits` bits as bytes, most significant bit first, computed with Python integers."""
    bit_string = "".join(format(value, f"0{bits}b") for value in values)
    bit_string += "0" * (-len(bit_string) % 8)
    return [int(bit_string[i : i + 8], 2) for i in range(0, len(bit_string), 8)]


def encode_number(value, dtype):
    if dtype == "bfloat16":
        as_integer = struct.unpack("<I", struct.pack("<f", value))[0]
        return list(((as_integer + 0x7FFF + ((as_integer >> 16) & 1)) >> 16).to_bytes(2, "little"))
    return list(struct.pack({"float16": "<e", "float32": "<f", "float64": "<d"}[dtype], value))


def compress(values, config):
    """Return one position in DistillKit's layout, computed with plain Python and NumPy's least squares."""
    values = np.array(values)
    if config["delta_encoding"]:
        values = np.concatenate([values[:1], np.diff(values)])
    exact, remainder = values[: config["exact_k"]], values[config["exact_k"] :]
    output = [byte for value in exact for byte in encode_number(value, config["exact_dtype"])]
    terms = config["polynomial_terms"]
    if terms:
        ranks = np.linspace(0, 1, len(remainder)) if config["normalize_t"] else np.arange(len(remainder), dtype=float)
        basis = np.stack([getattr(np, term)(ranks) if isinstance(term, str) else ranks**term for term in terms], axis=1)
        solution = np.linalg.lstsq(basis, remainder, rcond=None)[0]
        output += [byte for value in solution for byte in encode_number(value, config["term_dtype"])]
        remainder = remainder - basis @ solution
    i = 0
    for term in config["residual_bins"]:
        part, bits = remainder[i : i + term["num_elements"]], term["element_bits"]
        scale = (np.abs(part).max() or 1.0) / (2 ** (bits - 1) if bits > 1 else 1)
        low, high = (0, 1) if bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        integers = [int(np.clip(round(value / scale), low, high)) - low for value in part]
        output += encode_number(scale, term["scale_dtype"]) + pack_bits(integers, bits)
        i += term["num_elements"]
    return output


CONFIGS = {
    "exact": {"exact_k": TOP, "exact_dtype": "float32", "polynomial_terms": None, "residual_bins": [],
              "delta_encoding": False},
    "differences": {"exact_k": TOP, "exact_dtype": "float32", "polynomial_terms": None, "residual_bins": [],
                    "delta_encoding": True},
    "half": {"exact_k": TOP, "exact_dtype": "bfloat16", "polynomial_terms": [], "residual_bins": [],
             "delta_encoding": False},
    "polynomial": {"exact_k": 4, "exact_dtype": "float32", "polynomial_terms": [0, 1, 2, "sqrt"],
                   "residual_bins": [{"scale_dtype": "float32", "element_bits": 12, "num_elements": 5},
                                     {"scale_dtype": "float16", "element_bits": 9, "num_elements": 3}],
                   "delta_encoding": True},
    "ranks to 1": {"exact_k": 2, "exact_dtype": "float64", "polynomial_terms": [0, 1, 2, 3, "exp"],
                   "residual_bins": [{"scale_dtype": "float64", "element_bits": 16, "num_elements": 10}],
                   "delta_encoding": False, "normalize_t": True},
}  # fmt: skip


def write_compressed(scored_texts, folder, name):
    vocabulary = scored_texts[0][1].shape[1]
    config = {"d": vocabulary, "k": TOP, "term_dtype": "float32", "normalize_t": False, "error_diffusion": False,
              **CONFIGS[name]}  # fmt: skip
    bits, rows = math.ceil(math.log2(vocabulary)), []
    for ids, expected in scored_texts:
        lists = [top_tokens(expected[i]) for i in range(1, len(ids))]
        rows.append({"input_ids": ids, "compressed_logprobs": [compress(values, config) for _, values in lists],
                     "bytepacked_indices": [pack_bits(token_ids, bits) for token_ids, _ in lists]})  # fmt: skip
    folder.mkdir()
    (folder / "compression_config.yaml").write_text(yaml.safe_dump(config))
    types = [("input_ids", pa.list_(pa.uint64())), *((column, pa.list_(pa.list_(pa.uint8())))
             for column in ("compressed_logprobs", "bytepacked_indices"))]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(types)), folder / "data_0.parquet")
    return config


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_files_of_distillkit_are_imported(run, teacher, scored_texts, tmp_path, name):
    write_compressed(scored_texts, tmp_path / "kit", name)
    import_cache(run, teacher, tmp_path / "kit", tmp_path / "cache")
    assert_cache_matches(tmp_path / "cache", scored_texts, tolerance={"half": 0.06, "polynomial": 0.02}.get(name, 1e-3))
    if name == "exact":
        import_cache(run, teacher, tmp_path / "kit" / "data_0.parquet", tmp_path / "of the file")
        assert read_stored_positions(tmp_path / "of the file") == read_stored_positions(tmp_path / "cache")


def test_uncompressed_lists_of_distillkit_are_imported(run, teacher, scored_texts, tmp_path):
    rows = [
        {"input_ids": ids, "token_ids": [top_tokens(expected[i])[0] for i in range(1, len(ids))],
         "top_values": [top_tokens(expected[i])[1] for i in range(1, len(ids))]}
        for ids, expected in scored_texts
    ]  # fmt: skip
    import_cache(run, teacher, write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "cache")
    assert_cache_matches(tmp_path / "cache", scored_texts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: None, "need its compression_config.yaml"),
        (lambda config: config | {"exact_dtype": "int8"}, "the type 'int8' is unknown"),
        (lambda config: config | {"k": 2}, "do not fit"),
        (lambda config: config | {"k": 10**9}, "do not fit"),
        (lambda config: config | {"polynomial_terms": ["sin"]}, "unknown term"),
        (lambda config: config | {"exact_dtype": "float16"}, "bytes, but compression_config.yaml describes"),
        (lambda config: config | {"d": 70000}, "bytes, but compression_config.yaml describes"),
        (lambda config: ["a"], "not a compression configuration"),
        (lambda config: {"k": 3}, "not a compression configuration"),
    ],
)
def test_invalid_distillkit_configuration_is_refused_and_nothing_is_written(
    run, teacher, scored_texts, tmp_path, change, message
):
    config = change(write_compressed(scored_texts, tmp_path / "kit", "exact"))
    file = tmp_path / "kit" / "compression_config.yaml"
    file.unlink() if config is None else file.write_text(yaml.safe_dump(config))
    result = run("cache", "import", tmp_path / "kit", "--tokenizer", teacher, "-o", tmp_path / "cache", code=1)
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_lists_of_other_tokens_and_invalid_columns_are_refused(run, teacher, scored_texts, tmp_path):
    ids, expected = scored_texts[0]
    lists = [top_tokens(expected[i]) for i in range(1, len(ids))]
    valid = {"input_ids": ids, "token_ids": [one for one, _ in lists], "top_values": [values for _, values in lists]}
    cases = {
        "other tokens": valid | {"input_ids": ids[::-1]},
        "same length": valid | {"top_values": valid["top_values"][:-1]},
        "different shapes": valid | {"top_values": [one[:-1] for one in valid["top_values"]]},
        "not an array of numbers": valid | {"token_ids": [["a"] * TOP for _ in lists]},
        "sum": valid | {"top_values": [[-0.1 for _ in values] for _, values in lists]},
    }
    for message, row in cases.items():
        file = write_rows(tmp_path / "rows.jsonl", [valid, row])
        result = run("cache", "import", file, "--tokenizer", teacher, "-o", tmp_path / "cache", code=1)
        assert message in result.stderr, result.stderr
        assert "document 1" in result.stderr
        assert not (tmp_path / "cache").exists()
        stderr = run(
            "cache", "import", file, "--tokenizer", teacher, "--skip-invalid", "-o", tmp_path / "cache", "--force"
        ).stderr
        assert "1 invalid rows were skipped" in stderr
        shutil.rmtree(tmp_path / "cache")
