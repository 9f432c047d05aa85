"""Import of caches from files of other programs, and export of caches."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import xtk
from xtk.api.cache_from_arrays import CacheWriter
from xtk.cache.reader import TeacherCache
from xtk.cache.statistics import sample_positions, summarize_cache
from xtk.errors import XtkError
from xtk.importers.cache_export import export_cache
from xtk.importers.cache_import import import_cache
from xtk.importers.completion_logprobs import read_answer
from xtk.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}\n{{ message.content }}<|end_of_text|>{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
PROMPTS = ["Anna has 12", "The river — é", "def f(x):\n    return", "2019 and 2020"]


@pytest.mark.slow
@pytest.mark.parametrize("support", ["top-k", "top-k+sample", "sample"])
def test_cache_is_unchanged_by_export_and_import(run, pair, corpus, tmp_path, support):
    sampling = () if support == "top-k" else ("--num-samples", "5", "--num-sample-sets", "2")
    top_k = () if support == "sample" else ("--top-k", "8")
    run("cache-teacher", pair.teacher, corpus, "--support", support, *top_k, *sampling, "--precision", "float32",
        "-o", tmp_path / "cache")  # fmt: skip
    file = tmp_path / "file.parquet"
    run("cache", "export", tmp_path / "cache", "-o", file)
    run("cache", "import", file, "--tokenizer", pair.teacher, "--precision", "float32", "-o", tmp_path / "again")
    import_arguments = ("cache", "import", file, "--tokenizer", pair.teacher, "-o", tmp_path / "again")
    files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "again").iterdir()}
    assert "already finished" in run(*import_arguments, "--precision", "float32").stderr
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "again").iterdir()} == files
    assert "codec.precision: float32 there, standard in this command" in run(*import_arguments, code=1).stderr
    original_cache, imported_cache = TeacherCache(tmp_path / "cache"), TeacherCache(tmp_path / "again")
    assert len(original_cache) == len(imported_cache)
    for number in range(len(original_cache)):
        original, imported = original_cache.read_document(number, None), imported_cache.read_document(number, None)
        assert original.document == imported.document
        assert original.tokens.ids.tolist() == imported.tokens.ids.tolist()
        old, new = original.teacher_logprobs, imported.teacher_logprobs
        assert old.positions.tolist() == new.positions.tolist()
        np.testing.assert_array_equal(old.observed_logprobs, new.observed_logprobs)
        for i in range(len(old.positions)):
            pairs = [dict(zip(c.ids[c.offsets[i] : c.offsets[i + 1]].tolist(),
                c.logprobs[c.offsets[i] : c.offsets[i + 1]].tolist(), strict=True)) for c in (old, new)]  # fmt: skip
            assert pairs[0] == pairs[1]
        np.testing.assert_allclose(old.remainder_mass, new.remainder_mass, atol=2e-6)
        old_samples, new_samples = original.stored_logprobs, imported.stored_logprobs
        assert old_samples.num_sample_sets == (2 if sampling else 0)
        for name in ("sample_offsets", "sample_ids", "sample_counts", "sample_logprobs") if sampling else ():
            np.testing.assert_array_equal(getattr(old_samples, name), getattr(new_samples, name))
    run("cache", "export", tmp_path / "cache", "-o", file, code=1)
    run("cache", "export", tmp_path / "cache", "-o", file, "--force")


@pytest.mark.slow
def test_token_ids_that_a_file_cannot_store_are_reported(run, pair, tmp_path):
    rows = [
        {"prompt": "12 + 5 =", "completion": " 17", "w": 5, "teacher_prompt": "The sum is 17.\n12 + 5 ="},
        {"prompt": "The cat", "completion": " sat.", "w": 1},
        {"prompt": "The dog", "completion": " sat.", "w": 0},
    ]
    for name, columns in (
        ("all", ("prompt", "completion", "w", "teacher_prompt")),
        ("plain", ("prompt", "completion")),
    ):
        lines = (json.dumps({column: row[column] for column in columns if column in row}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        weights = ("--weight-column", "w") if name == "all" else ()
        run("cache-teacher", pair.teacher, tmp_path / f"{name}.jsonl", *weights, "-o", tmp_path / name)
        file = tmp_path / f"{name}.parquet"
        printed = run("cache", "export", tmp_path / name, "-o", file).stderr
        assert ("warning: 1 of 3 documents have teacher tokens that are not" in printed) == (name == "all")
        printed = run("cache", "import", file, "--tokenizer", pair.teacher, "-o", tmp_path / f"{name}-imported").stderr
        assert ("1 rows have token ids that are not those of their text or messages" in printed) == (name == "all")


@pytest.mark.slow
def test_weights_and_routes_are_kept(run, pair, tmp_path):
    rows = [
        {"prompt": "12 + 5 =", "completion": " 17", "w": 5, "r": "maths"},
        {"text": "The cat", "w": 0.25, "r": "other"},
        {"prompt": "The dog", "completion": " sat.", "w": 0, "r": "other", "teacher_prompt": "A dog sat.\nThe dog"},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("--weight-column", "w", "--route-column", "r", "--long-documents", "truncate")
    run("cache-teacher", pair.teacher, tmp_path / "data.jsonl", *columns, "-o", tmp_path / "cache")
    file = tmp_path / "file.parquet"
    run("cache", "export", tmp_path / "cache", "-o", file)
    run("cache", "import", file, "--tokenizer", pair.teacher, "-o", tmp_path / "again")
    run("cache", "merge", tmp_path / "cache", "-o", tmp_path / "merged")
    run("cache", "export", tmp_path / "merged", "-o", tmp_path / "merged.parquet")
    from_merged = ("cache", "import", tmp_path / "merged.parquet", "--tokenizer", pair.teacher)
    run(*from_merged, "-o", tmp_path / "from-merged")
    for name in ("again", "from-merged"):
        imported = TeacherCache(tmp_path / name)
        imported.verify()
        assert imported.document_weights().tolist() == [5, 0.25, 0]
        assert imported.routes() == ["maths", "other", "other"]
    with CacheWriter(tmp_path / "written", pair.teacher, support="none") as writer:
        for row in ({"text": "ab", "weight": None}, {"text": "cd", "weight": 2.0}, {"text": "ef", "route": "other"}):
            positions = len(writer.tokenize(row)[1])
            writer.add(row, np.zeros((positions, 0)), np.zeros((positions, 0)), -np.ones(positions))
        with pytest.raises(XtkError, match="the column weight is -1"):
            writer.tokenize({"text": "gh", "weight": -1})
    written_cache = TeacherCache(tmp_path / "written")
    assert written_cache.document_weights().tolist() == [1, 2, 1]
    assert written_cache.routes() == ["", "", "other"]


@pytest.mark.slow
@pytest.mark.parametrize("support", ["candidates", "none", "top-p"])
def test_support_is_kept_by_export_and_import(run, pair, tmp_path, support):
    """A cache whose stored tokens are not the most likely ones keeps its support after export and import."""
    data = tmp_path / "data.jsonl"
    ids = Tokenizer(pair.teacher).encode(["Anna has 12"])[0].ids.tolist()
    row = (
        {"input_ids": ids, "candidate_ids": [[5, 6]] * (len(ids) - 1)}
        if support == "candidates"
        else {"text": "Anna has 12"}
    )
    data.write_text(json.dumps(row) + "\n")
    run("cache-teacher", pair.teacher, data, "--support", support, "-o", tmp_path / "cache")
    file = tmp_path / "file.parquet"
    run("cache", "export", tmp_path / "cache", "-o", file)
    run("cache", "import", file, "--tokenizer", pair.teacher, "-o", tmp_path / "again")
    options = TeacherCache(tmp_path / "again").header["options"]
    assert options["support"] == ("top-k" if support == "top-p" else support)


@pytest.mark.slow
@pytest.mark.parametrize(("support", "expected"), [("top-k", 8), ("top-k+sample", 8), ("top-p", 1)])
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_imported_cache_has_the_top_k_of_the_exported_one(pair, corpus, tmp_path, support, expected):
    original = xtk.cache_teacher(str(pair.teacher), str(corpus), tmp_path / "cache", support=support, top_k=8)
    file = tmp_path / "file.parquet"
    export_cache(original, file)
    imported, _ = import_cache([str(file)], tmp_path / "again", tokenizer=str(pair.teacher))
    assert imported.header["options"]["top_k"] == expected
    fractions = [
        summarize_cache(cache, sample_positions(cache), len(cache))["observed_outside_top_k_fraction"]
        for cache in (original, imported)
    ]
    assert 0 < fractions[1] < 1
    assert support == "top-p" or fractions[0] == fractions[1]


@pytest.mark.slow
def test_answers_without_top_logprobs_have_support_none(run, pair, service_answers, tmp_path):
    file, _ = service_answers
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        for token in row["response"]["choices"][0]["logprobs"]["content"]:
            token["top_logprobs"] = []
    (tmp_path / "bare.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("cache", "import", tmp_path / "bare.jsonl", "-o", tmp_path / "bare")
    assert TeacherCache(tmp_path / "bare").header["options"]["support"] == "none"
    run("cache", "import", file, "-o", tmp_path / "whole")
    assert TeacherCache(tmp_path / "whole").header["options"]["support"] == "top-k"


def entry(tokenizer, token: int, logprob: float) -> dict:
    token_bytes = tokenizer.vocabulary.bytes_of(token)
    text = tokenizer.special_token_names.get(token, token_bytes.decode("utf-8", "replace"))
    return {"token": text, "logprob": logprob, "bytes": list(token_bytes) if token_bytes else list(text.encode())}


def text_of(content: list[dict]) -> str:
    return b"".join(bytes(one["bytes"]) for one in content).decode(errors="replace")


def make_answers(folder, *, top: int, num_tokens: int = 12) -> list[dict]:
    """Return answers of an OpenAI-compatible service, computed from the model's logits."""
    tokenizer, model = Tokenizer(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    bytes_by_id, rows = tokenizer.vocabulary.bytes_by_id, []
    vocabulary_size = model.get_output_embeddings().out_features
    is_ascii = torch.tensor([i < len(bytes_by_id) and bytes_by_id[i].isascii() for i in range(vocabulary_size)]).float()
    for number, prompt in enumerate(PROMPTS):
        torch.manual_seed(number)
        ids = [tokenizer.start_ids[0], *tokenizer.encode([prompt])[0].ids.tolist()]
        content = []
        for _ in range(num_tokens):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            logits[[*tokenizer.special_token_names]] = -30.0  # no end of the answer
            logits[len(tokenizer) :] = -30.0
            logprobs = logits.log_softmax(-1)
            token = int(torch.multinomial(logprobs.exp() * is_ascii, 1))  # untrained models generate broken UTF-8
            most_likely = logprobs.topk(top)
            pairs = zip(most_likely.indices.tolist(), most_likely.values.tolist(), strict=True)
            top_entries = [entry(tokenizer, *pair) for pair in pairs]
            content.append(entry(tokenizer, token, float(logprobs[token])) | {"top_logprobs": top_entries})
            ids.append(token)
        text = text_of(content)
        rows.append(
            {
                "messages": [{"role": "user", "content": prompt}],
                "response": {
                    "object": "chat.completion", "model": "tiny", "system_fingerprint": "fp_1",
                    "choices": [{
                        "index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": text},
                        "logprobs": {"content": content},
                    }],
                },
            }
        )  # fmt: skip
    return rows


@pytest.fixture(scope="module")
def service_answers(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    rows = make_answers(pair.teacher, top=8)
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "answers.jsonl", rows


def distributions(cache: TeacherCache) -> list[dict[bytes, float]]:
    bytes_by_id = cache.teacher_tokenizer.vocabulary.bytes_by_id
    positions = []
    for number in range(len(cache)):
        one = cache.read_document(number, None).teacher_logprobs
        for i in range(len(one.positions)):
            entries = slice(one.offsets[i], one.offsets[i + 1])
            positions.append({bytes_by_id[token]: value for token, value in
                              zip(one.ids[entries].tolist(), one.logprobs[entries].tolist(), strict=True)})  # fmt: skip
    return positions


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_service_answers_are_imported_with_and_without_the_tokenizer(
    run, pair, service_answers, tmp_path, with_tokenizer
):
    file, rows = service_answers
    tokenizer = ["--tokenizer", pair.teacher] if with_tokenizer else []
    run("cache", "import", file, *tokenizer, "--precision", "float32", "-o", tmp_path / "cache")
    cache = TeacherCache(tmp_path / "cache")
    assert cache.header["teacher"]["name"] == "tiny"
    found = distributions(cache)
    listed = [token for row in rows for token in row["response"]["choices"][0]["logprobs"]["content"]]
    assert len(found) == len(listed)
    for found_logprobs, expected in zip(found, listed, strict=True):
        expected_logprobs = {bytes(token["bytes"]): token["logprob"] for token in [*expected["top_logprobs"], expected]}
        assert found_logprobs.keys() == expected_logprobs.keys()
        assert all(
            found_logprobs[token_bytes] == pytest.approx(expected_logprobs[token_bytes], abs=1e-6)
            for token_bytes in found_logprobs
        )
    for number, row in enumerate(rows):
        document = cache.read_document(number, None).document
        assert document.segments[-1].text == row["response"]["choices"][0]["message"]["content"]
        assert [segment.train for segment in document.segments] == [False, True]
        assert not document.is_complete


@pytest.mark.long
@pytest.mark.slow
def test_losses_from_token_bytes_equal_those_from_token_ids(run, pair, service_answers, tmp_path):
    file, _ = service_answers
    student = tmp_path / "student"
    shutil.copytree(pair.student, student)
    (student / "chat_template.jinja").write_text(TEMPLATE)
    losses = {}
    for name, options in (("bytes", []), ("ids", ["--tokenizer", pair.teacher])):
        run("cache", "import", file, *options, "--precision", "float32", "-o", tmp_path / name)
        for loss in ("byte-kl", "alm", "bpm", "escd"):
            run("distill", student, tmp_path / name, "--loss", loss, "--max-steps", "3", "--logging-steps", "1",
                "-o", tmp_path / f"{name}-{loss}")  # fmt: skip
            lines = (tmp_path / f"{name}-{loss}" / "metrics.jsonl").read_text().splitlines()
            losses[name, loss] = [json.loads(line)["loss"] for line in lines]
    for loss in ("byte-kl", "alm", "bpm", "escd"):
        # The cells of byte-kl depend on all teacher tokens, also on those that no answer lists.
        assert losses["bytes", loss] == pytest.approx(losses["ids", loss], rel=5e-2)
        assert math.isfinite(losses["bytes", loss][-1])
    for loss in ("p-kl", "boundary-kl", "simct", "strict", "gold"):
        result = run("distill", student, tmp_path / "bytes", "--loss", loss, "-o", tmp_path / "x", code=1)
        assert f"the loss {loss} needs the teacher's whole vocabulary" in result.stderr
    stderr = run("distill", student, tmp_path / "bytes", "--max-steps", "1", "-o", tmp_path / "auto").stderr
    assert "known by their bytes" in stderr


def change_row(rows: list[dict], change) -> list[dict]:
    copied_rows = json.loads(json.dumps(rows))
    change(copied_rows[1]["response"], copied_rows[1]["response"]["choices"][0])
    return copied_rows


def other_text(response, choice):
    choice["message"]["content"] += "!"


def positive_logprob(response, choice):
    choice["logprobs"]["content"][2]["logprob"] = 0.5


def missing_bytes(response, choice):
    choice["logprobs"]["content"][2] |= {"bytes": None, "token": "\ufffd"}


def nan_logprob(response, choice):
    choice["logprobs"]["content"][2]["logprob"] = float("nan")


def mass_above_one(response, choice):
    for one in choice["logprobs"]["content"][2]["top_logprobs"]:
        one["logprob"] = -0.1


def no_logprobs(response, choice):
    choice["logprobs"] = None


def other_model(response, choice):
    response["model"] = "another"


def tool_call(response, choice):
    choice["message"]["tool_calls"] = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def reasoning(response, choice):
    choice["message"]["reasoning_content"] = "12 is twelve."


def second_choice(response, choice):
    response["choices"].append(choice)


def set_message(response, choice):
    choice["message"] = None


def set_choice(response, choice):
    response["choices"] = ["text"]


def set_logprobs(response, choice):
    choice["logprobs"] = "none"


def set_tokens(response, choice):
    choice["logprobs"]["content"] = {"a": 1}


def set_token(response, choice):
    choice["logprobs"]["content"][2] = "a"


def set_bytes(response, choice):
    choice["logprobs"]["content"][2]["bytes"] = [300]


def set_top(response, choice):
    choice["logprobs"]["content"][2]["top_logprobs"] = {"a": -1}


OTHER_TYPE = "a value of the row has another type than its format"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_message, OTHER_TYPE),
        (set_choice, OTHER_TYPE),
        (set_logprobs, OTHER_TYPE),
        (set_tokens, OTHER_TYPE),
        (set_token, OTHER_TYPE),
        (set_bytes, "bytes must be in range(0, 256)"),
        (set_top, OTHER_TYPE),
        (other_text, "of another text than the answer"),
        (positive_logprob, "must be a number of at most 0"),
        (nan_logprob, "must be a number of at most 0"),
        (missing_bytes, "bytes of a token are missing"),
        (mass_above_one, "sum"),
        (no_logprobs, "no log-probabilities"),
        (other_model, "of another model: another"),
        (tool_call, "the answer has a tool call apart from its content"),
        (reasoning, "the answer has reasoning apart from its content"),
        (second_choice, "2 choices"),
    ],
)
def test_invalid_rows_are_named_and_nothing_is_written(run, service_answers, tmp_path, change, message):
    rows = change_row(service_answers[1], change)
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("cache", "import", tmp_path / "bad.jsonl", "-o", tmp_path / "cache", code=1)
    assert message in result.stderr
    assert "document 1" in result.stderr
    assert not (tmp_path / "cache").exists()
    stderr = run("cache", "import", tmp_path / "bad.jsonl", "--skip-invalid", "-o", tmp_path / "cache").stderr
    assert "1 invalid rows were skipped" in stderr
    assert len(TeacherCache(tmp_path / "cache")) == len(rows) - 1


def test_changed_service_configuration_is_reported(run, service_answers, tmp_path):
    rows = change_row(service_answers[1], lambda response, choice: response.update(system_fingerprint="fp_2"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stderr = run("cache", "import", tmp_path / "a.jsonl", "-o", tmp_path / "cache").stderr
    assert "2 values of system_fingerprint" in stderr
    assert len(TeacherCache(tmp_path / "cache")) == len(rows)


def test_text_completions_are_imported(run, pair, tmp_path):
    row = {
        "prompt": "Anna has", "response": {
            "object": "text_completion", "model": "tiny", "choices": [{
                "text": " 12 é", "finish_reason": "stop", "logprobs": {
                    "tokens": [" 12", " ", "bytes:\\xc3", "bytes:\\xa9"], "token_logprobs": [-0.5, -1.0, -0.25, -0.125],
                    "top_logprobs": [{" 12": -0.5, " 3": -2.0}, {" ": -1.0, "<|endoftext|>": -1.5}, {}, None],
                },
            }],
        },
    }  # fmt: skip
    (tmp_path / "text.jsonl").write_text(json.dumps(row) + "\n")
    run("cache", "import", tmp_path / "text.jsonl", "--precision", "float32", "-o", tmp_path / "cache")
    cache = TeacherCache(tmp_path / "cache")
    assert [(segment.text, segment.train) for segment in cache.read_document(0, None).document.segments] == [
        ("Anna has", False),
        (" 12 é", True),
    ]
    assert distributions(cache) == [{b" 12": -0.5, b" 3": -2.0}, {b" ": -1.0}, {b"\xc3": -0.25}, {b"\xa9": -0.125}]


# Response of llama.cpp's server (xllamacpp 2026.10.11549, SmolLM2): eight tokens, four for each emoji.
LLAMA_CPP_ANSWER = {
    "choices": [{"finish_reason": "length", "index": 0, "message": {"content": "🔶🔶"}, "logprobs": {
        "content": [
            {"id": 131, "token": "🔶", "bytes": [240, 159, 148, 182], "logprob": -3.3992953300476074, "top_logprobs": [
                {"id": 115, "token": "\ufffd", "bytes": [165], "logprob": -1.9704431295394897},
                {"id": 231, "token": "\ufffd", "bytes": [141], "logprob": -2.098445415496826},
                {"id": 122, "token": "\ufffd", "bytes": [172], "logprob": -2.5644752979278564}]},
            {"id": 131, "token": "🔶", "bytes": [240, 159, 148, 182], "logprob": -0.8707250356674194, "top_logprobs": [
                {"id": 131, "token": "\ufffd", "bytes": [182], "logprob": -0.8707250356674194},
                {"id": 122, "token": "\ufffd", "bytes": [172], "logprob": -1.8546003103256226},
                {"id": 132, "token": "\ufffd", "bytes": [183], "logprob": -2.2529349327087402}]}]}}],
    "model": "smollm2", "system_fingerprint": "b0-unknown", "object": "chat.completion",
    "usage": {"completion_tokens": 8, "prompt_tokens": 47, "total_tokens": 55},
}  # fmt: skip


def test_character_of_several_tokens_is_not_trained(run, tmp_path):
    """llama.cpp returns the log-probability of the last token as if it were that of the character."""
    letters = [
        {"id": 5, "token": letter, "bytes": [ord(letter)], "logprob": -0.5, "top_logprobs": [
            {"id": 5, "token": letter, "bytes": [ord(letter)], "logprob": -0.5}]} for letter in "ab"
    ]  # fmt: skip
    complete_character = {"id": 9, "token": " é", "bytes": list(" é".encode()), "logprob": -0.25, "top_logprobs": [
        {"id": 9, "token": " é", "bytes": list(" é".encode()), "logprob": -0.25}]}  # fmt: skip
    answer = json.loads(json.dumps(LLAMA_CPP_ANSWER))
    choice = answer["choices"][0]
    choice["message"]["content"] = "a🔶 éb🔶"
    emoji_entries = choice["logprobs"]["content"]
    choice["logprobs"]["content"] = [letters[0], emoji_entries[0], complete_character, letters[1], emoji_entries[1]]
    answer["usage"]["completion_tokens"] = 11
    row = {"messages": [{"role": "user", "content": "x"}], "response": answer}
    (tmp_path / "answer.jsonl").write_text(json.dumps(row) + "\n")
    stderr = run(
        "cache", "import", tmp_path / "answer.jsonl", "--precision", "float32", "-o", tmp_path / "cache"
    ).stderr
    assert "2 characters are not trained" in stderr
    cache = TeacherCache(tmp_path / "cache")
    assert cache.read_document(0).document.segments[-1].text == "a🔶 éb🔶"
    assert distributions(cache) == [{b"a": -0.5}, {" é".encode(): -0.25}, {b"b": -0.5}]
    # Without the token count, the listed token with the same id reveals it: here for the second emoji only.
    del answer["usage"]
    choice["logprobs"]["content"] = choice["logprobs"]["content"][3:]
    choice["message"]["content"] = "b🔶"
    (tmp_path / "answer.jsonl").write_text(json.dumps(row) + "\n")
    run("cache", "import", tmp_path / "answer.jsonl", "--precision", "float32", "--force", "-o", tmp_path / "cache")
    assert distributions(TeacherCache(tmp_path / "cache")) == [{b"b": -0.5}]


def test_observed_token_outside_of_top_logprobs_gets_an_upper_bound(run, tmp_path):
    """OpenAI returns -9999 for a sampled token that is not among the 20 most likely ones."""
    top_pairs = [("c", -0.5), (" d", -2.0)]  # probabilities 0.61 and 0.14, remainder 0.26

    def token(name: str, logprob: float, pairs: list[tuple[str, float]]) -> dict:
        top = [{"token": text, "bytes": list(text.encode()), "logprob": value} for text, value in pairs]
        return {"token": name, "bytes": list(name.encode()), "logprob": logprob, "top_logprobs": top}

    content = [
        token("a", -9999.0, top_pairs),
        token("b", -9999.0, [("c", -1e-9), ("d", -9999.0)]),
        token("c", -0.25, [("c", -0.25), ("d", -9999.0)]),
    ]
    choice = {"message": {"content": "abc"}, "finish_reason": "stop", "logprobs": {"content": content}}
    row = {"messages": [{"role": "user", "content": "x"}], "response": {"model": "m", "choices": [choice]}}
    (tmp_path / "answers.jsonl").write_text(json.dumps(row) + "\n")
    stderr = run(
        "cache", "import", tmp_path / "answers.jsonl", "--precision", "float32", "-o", tmp_path / "cache"
    ).stderr
    stderr = " ".join(stderr.split())
    assert "at 1 of 3 positions the token of the text is not listed; an upper bound" in stderr
    assert "1 of 3 positions are not trained" in stderr
    cache = TeacherCache(tmp_path / "cache")
    first, last = distributions(cache)
    assert first == pytest.approx({b"c": -0.5, b" d": -2.0, b"a": -2.0}, abs=1e-6)
    assert last == {b"c": -0.25}
    assert cache.read_document(0).teacher_logprobs.observed_logprobs.tolist() == [-2.0, -0.25]


@pytest.mark.slow
def test_changed_finish_reason_needs_force(run, tmp_path):
    entry = {"token": "b", "bytes": [98], "logprob": -0.5, "top_logprobs": []}
    file = tmp_path / "answers.jsonl"

    def write(finish: str) -> None:
        choice = {"message": {"content": "b"}, "finish_reason": finish, "logprobs": {"content": [entry]}}
        row = {"messages": [{"role": "user", "content": "a"}], "response": {"model": "m", "choices": [choice]}}
        file.write_text(json.dumps(row) + "\n")

    write("length")
    run("cache", "import", file, "-o", tmp_path / "cache")
    assert not TeacherCache(tmp_path / "cache").read_document(0).document.is_complete
    run("cache", "import", file, "-o", tmp_path / "cache")
    write("eos")
    run("cache", "import", file, "-o", tmp_path / "cache", code=1)
    run("cache", "import", file, "--force", "-o", tmp_path / "cache")
    assert TeacherCache(tmp_path / "cache").read_document(0).document.is_complete


@pytest.mark.slow
def test_only_files_of_export_cache_are_replaced(run, pair, corpus, tmp_path):
    run("cache-teacher", pair.teacher, corpus, "--top-k", 4, "-o", tmp_path / "cache")
    user_row = {"token_ids": [1, 2], "logprobs": [None, -1.0], "top_ids": [None, [2]], "top_logprobs": [None, [-1.0]]}
    (tmp_path / "mine.jsonl").write_text(json.dumps(user_row) + "\n")
    run("cache", "export", tmp_path / "cache", "-o", tmp_path / "mine.jsonl", code=1)
    assert json.loads((tmp_path / "mine.jsonl").read_text()) == user_row
    run("cache", "export", tmp_path / "cache", "-o", tmp_path / "out.parquet")
    run("cache", "export", tmp_path / "cache", "-o", tmp_path / "out.parquet", code=1)
    run("cache", "export", tmp_path / "cache", "-o", tmp_path / "out.parquet", "--force")


def test_large_row_is_read_up_to_max_document_bytes(run, service_answers, tmp_path):
    _, rows = service_answers
    large = {**rows[0], "note": "x" * 20_000_000}
    (tmp_path / "large.jsonl").write_text(json.dumps(large) + "\n")
    run("cache", "import", tmp_path / "large.jsonl", "-o", tmp_path / "cache")
    limit = ("--max-document-bytes", 1_000_000)
    result = run("cache", "import", tmp_path / "large.jsonl", *limit, "-o", tmp_path / "other", code=1)
    assert "--max-document-bytes" in result.stderr


def test_id_columns_need_the_tokenizer_and_equal_lengths(run, pair, tmp_path):
    tokenizer = Tokenizer(pair.teacher)
    ids = [tokenizer.start_ids[0], *tokenizer.encode(["Anna has 12"])[0].ids.tolist()]
    count = len(ids) - 1
    row = {
        "token_ids": ids, "logprobs": [None, *[-1.0] * count], "top_ids": [None, *[[token] for token in ids[1:]]],
        "top_logprobs": [None, *[[-1.0]] * count],
    }  # fmt: skip
    (tmp_path / "ids.jsonl").write_text(json.dumps(row) + "\n")
    result = run("cache", "import", tmp_path / "ids.jsonl", "-o", tmp_path / "cache", code=1)
    assert "--tokenizer" in result.stderr
    run("cache", "import", tmp_path / "ids.jsonl", "--tokenizer", pair.teacher, "-o", tmp_path / "cache")
    assert TeacherCache(tmp_path / "cache").read_document(0, None).document.text == "Anna has 12"
    row["top_ids"] = row["top_ids"][1:]
    (tmp_path / "ids.jsonl").write_text(json.dumps(row) + "\n")
    result = run(
        "cache", "import", tmp_path / "ids.jsonl", "--tokenizer", pair.teacher, "-o", tmp_path / "other", code=1
    )
    assert "different lengths" in result.stderr


@pytest.mark.parametrize(("top", "num_uncounted"), [("none", 3), ("other", 1), ("observed", 3)])
def test_unlisted_end_token_joins_no_characters(top, num_uncounted):
    """A service may count the end token without listing it; entries without a list are not compared with it."""
    tokens = ["Caf", "é", " au", " lait", "日本"]

    def entry(token: str, listed: str | None) -> dict:
        found = {"token": token, "bytes": list(token.encode()), "logprob": -1.0}
        return found if listed is None else found | {"top_logprobs": [entry(listed, None)]}

    content = [entry(one, {"none": None, "other": "x", "observed": one}[top]) for one in tokens]
    choice = {"message": {"content": "".join(tokens)}, "finish_reason": "stop", "logprobs": {"content": content}}
    usage = {"completion_tokens": len(tokens) + num_uncounted}
    row = {"messages": [{"role": "user", "content": "hi"}], "model": "m", "choices": [choice], "usage": usage}
    assert read_answer(row).num_joined == 0
    if top == "other":
        choice["finish_reason"] = "length"  # no end token: more tokens than entries are joined ones
        assert read_answer(row).num_joined == 2


def test_truncated_character_at_the_end_is_left_out(run, tmp_path):
    content = [
        {"token": " é", "bytes": list(" é".encode()), "logprob": -0.5, "top_logprobs": []},
        {"token": "bytes", "bytes": [0xE2, 0x82], "logprob": -0.25, "top_logprobs": []},
    ]
    for finish, text, code in (
        ("length", " é\ufffd", 0),
        ("length", " é", 0),
        ("stop", " é\ufffd", 1),
        ("length", "x", 1),
    ):
        choice = {"message": {"content": text}, "finish_reason": finish, "logprobs": {"content": content}}
        row = {"messages": [{"role": "user", "content": "a"}], "response": {"model": "m", "choices": [choice]}}
        (tmp_path / "cut.jsonl").write_text(json.dumps(row) + "\n")
        run("cache", "import", tmp_path / "cut.jsonl", "--force", "-o", tmp_path / "cache", code=code)
        if not code:
            stored = TeacherCache(tmp_path / "cache").read_document(0)
            assert stored.document.segments[-1].text == " é"
            assert len(stored.trained_positions) == 1


def test_id_rows_need_an_end_token_to_be_complete_and_a_log_probability(run, pair, tmp_path):
    tokenizer = Tokenizer(pair.teacher)
    ids = [tokenizer.start_ids[0], *tokenizer.encode(["Anna has"])[0].ids.tolist()]
    missing_values = [None] * len(ids)
    row = {
        "token_ids": ids,
        "logprobs": [*missing_values[1:], -1.0],
        "top_ids": missing_values,
        "top_logprobs": missing_values,
    }
    arguments = ["cache", "import", tmp_path / "ids.jsonl", "--tokenizer", pair.teacher]
    (tmp_path / "ids.jsonl").write_text(json.dumps(row | {"complete": True}) + "\n")
    run(*arguments, "-o", tmp_path / "cache")
    assert not TeacherCache(tmp_path / "cache").read_document(0, None).document.is_complete
    (tmp_path / "ids.jsonl").write_text(json.dumps(row | {"logprobs": missing_values}) + "\n")
    result = run(*arguments, "-o", tmp_path / "nothing", code=1)
    assert "no document has a log-probability" in result.stderr
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": "Anna"},
        {"completion": " has"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [{"role": "user", "content": "Anna"}, {"role": "assistant", "content": " has"}]},
    ],
    ids=lambda columns: next(iter(columns)),
)
def test_ids_suffice_without_a_document_that_can_be_tokenized(pair, tmp_path, capsys, columns):
    ids = Tokenizer(pair.teacher).encode(["Anna has"])[0].ids.tolist()
    row = {
        "token_ids": ids, "logprobs": [None, *[-1.0] * (len(ids) - 1)], "top_ids": [None] * len(ids),
        "top_logprobs": [None] * len(ids),
    }  # fmt: skip
    (tmp_path / "ids.jsonl").write_text(json.dumps(row | columns) + "\n")
    cache, _ = import_cache([str(tmp_path / "ids.jsonl")], tmp_path / "cache", tokenizer=str(pair.teacher))
    assert cache.read_document(0).document.text == "Anna has"
    assert "1 rows have token ids that are not those of their text or messages" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("token_ids", "abc", "the column token_ids is not a list"),
        ("token_ids", ["a", "b"], "token_ids is not an array of numbers"),
        ("token_ids", [1, 2.5], "token_ids is not an array of numbers: it has a number that is not an integer"),
        ("token_ids", [True, False], "token_ids is not an array of numbers: it has a number that is not an integer"),
        ("top_ids", [None, 3], "lists of the same length"),
        ("top_ids", [None, [1, 2]], "lists of the same length"),
        ("top_logprobs", [None, ["x"]], "top_logprobs is not an array of numbers"),
        ("logprobs", [None, "x"], "observed_logprobs is not an array of numbers"),
    ],
)
def test_invalid_columns_are_refused_with_the_row_number(run, pair, tmp_path, column, value, message):
    tokenizer = Tokenizer(pair.teacher)
    ids = [tokenizer.start_ids[0], tokenizer.encode(["a"])[0].ids.tolist()[0]]
    valid = {"token_ids": ids, "logprobs": [None, -1.0], "top_ids": [None, ids[1:]], "top_logprobs": [None, [-1.0]]}
    rows = [valid, valid | {column: value}]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["cache", "import", tmp_path / "ids.jsonl", "--tokenizer", pair.teacher, "-o", tmp_path / "cache"]
    result = run(*arguments, code=1)
    assert message in result.stderr
    assert "document 1" in result.stderr
    assert not (tmp_path / "cache").exists()
    stderr = run(*arguments, "--skip-invalid").stderr
    assert message in stderr  # a warning names the row and the reason
    assert "1 invalid rows were skipped" in stderr
