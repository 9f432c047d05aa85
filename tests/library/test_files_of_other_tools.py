"""Log-probabilities that TRL, axolotl and DistillKit write become the cache that they describe."""

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

from xtk.artifacts.teacher_cache import TeacherCache

TEXTS = ["Anna has 12 apples and 30 pears.", "The river — é — is wide", "def f(x):\n    return x + 2019", "So."]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{{ eos_token }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TOP = 12


@pytest.fixture(scope="module")
def teacher(pair, tmp_path_factory):
    """The teacher of the other tests with a chat template that writes text after the end of a turn."""
    folder = shutil.copytree(pair.teacher, tmp_path_factory.mktemp("teacher") / "teacher")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def scored(teacher):
    """Of each text: its tokens with a start and an end token, and [T, V] log-probabilities, row t about token t.

    The model is not trained. So the tokens of the text are made likely at most positions.
    """
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    model = AutoModelForCausalLM.from_pretrained(teacher).eval()
    rows = []
    for text in TEXTS:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        ids = [start, *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        logprobs = likely(logits, ids, len(tokenizer))
        rows.append((ids, torch.cat([torch.full_like(logprobs[:1], -math.inf), logprobs[:-1]])))
    return rows


def likely(logits, ids, size):
    logits[:, size:] = -1e4
    for at, token in enumerate(ids[1:]):
        logits[at, token] += 9.0 * (at % 5 != 4)
    return logits.log_softmax(-1)


def top_of(row, token=None):
    """Ids and values of the most likely tokens, and of `token`, which replaces the last one."""
    best = row.topk(TOP)
    ids, values = best.indices.tolist(), best.values.tolist()
    if token is not None and token not in ids:
        ids, values = [*ids[:-1], token], [*values[:-1], float(row[token])]
    return ids, values


def stored(folder):
    """{token: log-probability} of each trained position of each document, and the observed ones."""
    cache, found = TeacherCache(folder), []
    for number in range(len(cache)):
        one = cache.read_document(number, None)
        scores, ids = one.teacher_logprobs, one.tokens.ids
        positions = []
        for at, position in enumerate(scores.positions.tolist()):
            some = slice(scores.offsets[at], scores.offsets[at + 1])
            listed = dict(zip(scores.ids[some].tolist(), scores.logprobs[some].tolist(), strict=True))
            positions.append((int(ids[position]), listed, float(scores.observed_logprobs[at])))
        found.append(positions)
    return found


def check(folder, scored, *, first=lambda ids: 1, normalized=False, tolerance=1e-5, with_token=False):
    """Compare a cache with the model's log-probabilities."""
    found = stored(folder)
    assert len(found) == len(scored)
    for positions, (ids, truth) in zip(found, scored, strict=True):
        wanted = [at for at in range(first(ids), len(ids)) if not normalized or ids[at] in top_of(truth[at])[0]]
        assert [token for token, _, _ in positions] == [ids[at] for at in wanted]
        for (token, listed, observed), at in zip(positions, wanted, strict=True):
            names, values = top_of(truth[at], ids[at] if with_token else None)
            shift = float(torch.tensor(values).logsumexp(0)) if normalized else 0.0
            assert {name for name in listed if name in names} == set(names)
            for name, value in zip(names, values, strict=True):
                assert listed[name] == pytest.approx(value - shift, abs=tolerance)
            if token in names:
                assert observed == pytest.approx(listed[token], abs=1e-6)
            else:  # not listed: an upper bound
                assert observed >= float(truth[at, token]) - tolerance


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def imported(run, teacher, file, output, *options):
    return run("import-cache", file, "--tokenizer", teacher, "--precision", "float32", *options, "-o", output)


def test_what_the_client_of_trl_returns(run, teacher, scored, tmp_path):
    from trl.generation.vllm_client import VLLMClient, parse_logprobs

    rows, prompt_length = [], 3
    for ids, truth in scored:
        choice = {"content": [
            {"token": f"token_id:{ids[at]}", "logprob": float(truth[at, ids[at]]), "top_logprobs": [
                {"token": f"token_id:{one}", "logprob": value}
                for one, value in zip(*top_of(truth[at], ids[at]), strict=True)
            ]}
            for at in range(prompt_length, len(ids))
        ]}  # fmt: skip
        logprobs, names = parse_logprobs([choice])
        rows.append({"prompt_ids": ids[:prompt_length], "completion_ids": ids[prompt_length:], "logprobs": logprobs[0],
                     "logprob_token_ids": names[0]})  # fmt: skip
    imported(run, teacher, write(tmp_path / "trl.jsonl", rows), tmp_path / "cache")
    check(tmp_path / "cache", scored, first=lambda _: prompt_length, with_token=True)

    rows = []
    for ids, truth in scored:
        prompt_logprobs = [None]
        for at in range(1, len(ids)):
            names, values = top_of(truth[at])
            position = {str(one): {"logprob": value, "rank": rank + 1}
                        for rank, (one, value) in enumerate(zip(names, values, strict=True))}  # fmt: skip
            if ids[at] not in names:
                position[str(ids[at])] = {"logprob": float(truth[at, ids[at]]), "rank": 999}
            prompt_logprobs.append(position)
        made = VLLMClient._format_sequence_logprobs({"prompt_logprobs": prompt_logprobs}, ids, prompt_length, TOP + 4)
        rows.append({"prompt_ids": ids[:prompt_length], "completion_ids": ids[prompt_length:], **made})
    # -inf fills up short lists.
    assert any(value == -math.inf for row in rows for one in row["logprobs"] for value in one)
    imported(run, teacher, write(tmp_path / "scored.jsonl", rows), tmp_path / "scored")
    found = stored(tmp_path / "scored")
    for positions, (ids, truth) in zip(found, scored, strict=True):
        for (token, listed, observed), at in zip(positions, range(prompt_length, len(ids)), strict=True):
            assert token == ids[at]
            assert observed == pytest.approx(float(truth[at, token]), abs=1e-5)
            assert all(value == pytest.approx(float(truth[at, one]), abs=1e-5) for one, value in listed.items())


@pytest.mark.parametrize("shift", [0, 1])
def test_prepared_datasets_of_axolotl(run, teacher, scored, tmp_path, shift):
    """Its versions differ: list j is about token j, or about token j + 1; prompts have no labels."""
    rows, first = [], 3
    for ids, truth in scored:
        lists, logprobs, mask = [], [], []
        for at in range(len(ids)):
            about = at + shift
            if not 1 <= about < len(ids):
                lists.append(list(range(TOP)))
                logprobs.append([-1e9] * TOP)
                mask.append([0] * TOP)
                continue
            names, values = top_of(truth[about])
            total = float(torch.tensor(values).logsumexp(0))
            lists.append(names)
            logprobs.append([value - total for value in values])
            mask.append([int(about >= first)] * TOP)
        labels = [-100 if at < first else one for at, one in enumerate(ids)]
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids), "target_token_ids": lists,
                     "target_logprobs": logprobs, "target_mask": mask})  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "prepared.parquet")
    said = imported(run, teacher, tmp_path / "prepared.parquet", tmp_path / "cache").stderr
    assert "normalized them, and the remainder is lost" in " ".join(said.split())
    check(tmp_path / "cache", scored, first=lambda _: first, normalized=True)
    missing = sum(ids[at] not in top_of(truth[at])[0] for ids, truth in scored for at in range(first, len(ids)))
    assert bool(missing) == (f"{missing} of" in said)


@pytest.mark.parametrize("version", ["vllm lists", "arrays"])
def test_datasets_for_axolotl_are_placed_in_the_conversation(run, teacher, tmp_path, version):
    """Lists of the answer's tokens; the template writes more tokens after them."""
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    model = AutoModelForCausalLM.from_pretrained(teacher).eval()
    rows, wanted = [], []
    for text in TEXTS[:3]:
        messages = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": text}]
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        prompt = tokenizer.apply_chat_template(
            messages[:1], tokenize=True, return_dict=False, add_generation_prompt=True
        )
        end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        logprobs = likely(logits, ids, len(tokenizer))
        lists = [top_of(logprobs[at - 1], ids[at]) for at in range(len(prompt), end)]
        wanted.append([(ids[at], dict(zip(*one, strict=True)))
                       for at, one in zip(range(len(prompt), end), lists, strict=True)])  # fmt: skip
        if version == "arrays":
            rows.append({"messages": messages, "target_token_ids": [one for one, _ in lists],
                         "logprobs": [values for _, values in lists]})  # fmt: skip
        else:
            rows.append({"messages_combined": messages, "llm_text_generation_vllm_logprobs": [
                [{"token": f"token_id:{name}", "logprob": value} for name, value in zip(*one, strict=True)]
                for one in lists]})  # fmt: skip
    imported(run, teacher, write(tmp_path / "rows.jsonl", rows), tmp_path / "cache")
    found = stored(tmp_path / "cache")
    for positions, own in zip(found, wanted, strict=True):
        assert [token for token, _, _ in positions] == [token for token, _ in own]
        for (token, listed, observed), (_, expected) in zip(positions, own, strict=True):
            assert {one: pytest.approx(value, abs=1e-5) for one, value in expected.items()} == listed
            assert observed == pytest.approx(expected[token], abs=1e-5)
    rows[1]["messages" if version == "arrays" else "messages_combined"][1]["content"] = "Something else entirely, yes."
    refused = run("import-cache", write(tmp_path / "rows.jsonl", rows), "--tokenizer", teacher, "-o", tmp_path / "no",
                  code=1)  # fmt: skip
    assert "document 1" in refused.stderr
    assert "other tokens" in refused.stderr


def packed(values, bits):
    """Integers of some bits as bytes, the highest bit first, by Python's own integers."""
    stream = "".join(format(value, f"0{bits}b") for value in values)
    stream += "0" * (-len(stream) % 8)
    return [int(stream[at : at + 8], 2) for at in range(0, len(stream), 8)]


def number_bytes(value, dtype):
    if dtype == "bfloat16":
        whole = struct.unpack("<I", struct.pack("<f", value))[0]
        return list(((whole + 0x7FFF + ((whole >> 16) & 1)) >> 16).to_bytes(2, "little"))
    return list(struct.pack({"float16": "<e", "float32": "<f", "float64": "<d"}[dtype], value))


def compress(values, config):
    """One position in DistillKit's layout, written with plain Python and NumPy's least squares."""
    values = np.array(values)
    if config["delta_encoding"]:
        values = np.concatenate([values[:1], np.diff(values)])
    exact, rest = values[: config["exact_k"]], values[config["exact_k"] :]
    found = [byte for value in exact for byte in number_bytes(value, config["exact_dtype"])]
    terms = config["polynomial_terms"]
    if terms:
        ranks = np.linspace(0, 1, len(rest)) if config["normalize_t"] else np.arange(len(rest), dtype=float)
        curves = np.stack([getattr(np, one)(ranks) if isinstance(one, str) else ranks**one for one in terms], axis=1)
        solution = np.linalg.lstsq(curves, rest, rcond=None)[0]
        found += [byte for value in solution for byte in number_bytes(value, config["term_dtype"])]
        rest = rest - curves @ solution
    at = 0
    for one in config["residual_bins"]:
        some, bits = rest[at : at + one["num_elements"]], one["element_bits"]
        scale = (np.abs(some).max() or 1.0) / (2 ** (bits - 1) if bits > 1 else 1)
        low, high = (0, 1) if bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        whole = [int(np.clip(round(value / scale), low, high)) - low for value in some]
        found += number_bytes(scale, one["scale_dtype"]) + packed(whole, bits)
        at += one["num_elements"]
    return found


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


def compressed(scored, folder, name):
    vocabulary = scored[0][1].shape[1]
    config = {"d": vocabulary, "k": TOP, "term_dtype": "float32", "normalize_t": False, "error_diffusion": False,
              **CONFIGS[name]}  # fmt: skip
    bits, rows = math.ceil(math.log2(vocabulary)), []
    for ids, truth in scored:
        lists = [top_of(truth[at]) for at in range(1, len(ids))]
        rows.append({"input_ids": ids, "compressed_logprobs": [compress(values, config) for _, values in lists],
                     "bytepacked_indices": [packed(names, bits) for names, _ in lists]})  # fmt: skip
    folder.mkdir()
    (folder / "compression_config.yaml").write_text(yaml.safe_dump(config))
    types = [("input_ids", pa.list_(pa.uint64())), *((one, pa.list_(pa.list_(pa.uint8())))
             for one in ("compressed_logprobs", "bytepacked_indices"))]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(types)), folder / "data_0.parquet")
    return config


@pytest.mark.parametrize("name", CONFIGS)
def test_files_of_distillkit(run, teacher, scored, tmp_path, name):
    compressed(scored, tmp_path / "kit", name)
    imported(run, teacher, tmp_path / "kit", tmp_path / "cache")
    check(tmp_path / "cache", scored, tolerance={"half": 0.06, "polynomial": 0.02}.get(name, 1e-3))
    if name == "exact":
        imported(run, teacher, tmp_path / "kit" / "data_0.parquet", tmp_path / "of the file")
        assert stored(tmp_path / "of the file") == stored(tmp_path / "cache")


def test_lists_of_distillkit_without_compression(run, teacher, scored, tmp_path):
    rows = [
        {"input_ids": ids, "token_ids": [top_of(truth[at])[0] for at in range(1, len(ids))],
         "top_values": [top_of(truth[at])[1] for at in range(1, len(ids))]}
        for ids, truth in scored
    ]  # fmt: skip
    imported(run, teacher, write(tmp_path / "rows.jsonl", rows), tmp_path / "cache")
    check(tmp_path / "cache", scored)


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
def test_a_wrong_configuration_is_named_and_nothing_is_written(run, teacher, scored, tmp_path, change, message):
    config = change(compressed(scored, tmp_path / "kit", "exact"))
    file = tmp_path / "kit" / "compression_config.yaml"
    file.unlink() if config is None else file.write_text(yaml.safe_dump(config))
    refused = run("import-cache", tmp_path / "kit", "--tokenizer", teacher, "-o", tmp_path / "cache", code=1)
    assert message in " ".join(refused.stderr.split())
    assert not (tmp_path / "cache").exists()


def test_lists_of_other_tokens_and_broken_columns_are_refused(run, teacher, scored, tmp_path):
    ids, truth = scored[0]
    lists = [top_of(truth[at]) for at in range(1, len(ids))]
    good = {"input_ids": ids, "token_ids": [one for one, _ in lists], "top_values": [values for _, values in lists]}
    cases = {
        "other tokens": good | {"input_ids": ids[::-1]},
        "same length": good | {"top_values": good["top_values"][:-1]},
        "different shapes": good | {"top_values": [one[:-1] for one in good["top_values"]]},
        "not an array of numbers": good | {"token_ids": [["a"] * TOP for _ in lists]},
        "sum": good | {"top_values": [[-0.1 for _ in values] for _, values in lists]},
        "no conversation": {"target_token_ids": good["token_ids"], "logprobs": good["top_values"]},
    }
    for message, row in cases.items():
        file = write(tmp_path / "rows.jsonl", [good, row])
        refused = run("import-cache", file, "--tokenizer", teacher, "-o", tmp_path / "cache", code=1)
        assert message in refused.stderr, refused.stderr
        assert "document 1" in refused.stderr
        assert not (tmp_path / "cache").exists()
        said = run(
            "import-cache", file, "--tokenizer", teacher, "--skip-invalid", "-o", tmp_path / "cache", "--force"
        ).stderr
        assert "1 invalid rows were skipped" in said
        shutil.rmtree(tmp_path / "cache")
