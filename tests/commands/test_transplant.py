"""`xtk transplant`: tokens, rows, configurations and refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf_files
import numpy as np
import pytest
import small_inputs
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from xtk_processes import run_here

from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef
from xtk.projection.build import build_projection
from xtk.projection.disk_cache import cached_projection
from xtk.projection.file import write_projection
from xtk.text.tokenizer import Tokenizer
from xtk.transplant.new_rows import new_rows
from xtk.transplant.token_sources import TokenSources

TEXT = "Anna has 2017 apples and gives 12 to Bert. x = 3.14159;"


def embedding_matrix(folder: Path) -> np.ndarray:
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


@pytest.fixture(scope="module")
def models(pair, tmp_path_factory):
    """Return {kind: (model, tokenizer of the other model)}; the kind is that of the output head."""
    return {"untied": (pair.student, pair.teacher), "tied": (pair.teacher, pair.student)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_layers_and_rows_of_tokens_with_equal_bytes_are_kept(run, models, tmp_path, kind, corpus):
    model, tokenizer = models[kind]
    done = run("transplant", model, tokenizer, "-o", tmp_path / "new", "--json", "--eval-data", corpus)
    record = json.loads(done.stdout)
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "new" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"model.embed_tokens.weight"} | ({"lm_head.weight"} if kind == "untied" else set())
    old, new = Tokenizer(model), Tokenizer(tmp_path / "new")
    assert new.fingerprint == Tokenizer(tokenizer).fingerprint
    for name in changed:
        for token, spelling in enumerate(new.vocabulary.bytes_by_id):
            if spelling in old.vocabulary.token_of_bytes:
                np.testing.assert_array_equal(after[name][token], before[name][old.vocabulary.token_of_bytes[spelling]])
        np.testing.assert_array_equal(after[name][new.end_id], before[name][old.end_id])
        mean = before[name][np.flatnonzero(old.vocabulary.byte_lengths > 0)].mean(0)
        for row in range(len(new), len(after[name])):
            np.testing.assert_allclose(after[name][row], mean, atol=1e-6)
    rows = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    assert record["embedding_rows"] == len(after["model.embed_tokens.weight"]) == rows  # which programs compare
    assert record["tied"] == (kind == "tied")
    assert sum(record[name] for name in ("exact", "special", "composed", "unknown")) == record["tokens"] == len(new)
    for name in ("tokens", "exact", "special", "composed", "unknown"):
        assert sum(figures[name] for figures in record["categories"].values()) == record[name]
    assert set(record["bits_per_byte"]) == {"before", "after"}
    scored = json.loads(run("evaluate", tmp_path / "new", corpus, "--json").stdout)
    assert scored["bits_per_byte"] == pytest.approx(record["bits_per_byte"]["after"])


def test_fvt_composed_rows_are_means_of_the_old_tokens(run, pair, tmp_path):
    run("transplant", pair.teacher, pair.student, "--method", "fvt", "-o", tmp_path / "new")
    old, new = Tokenizer(pair.teacher), Tokenizer(pair.student)
    matrices = [embedding_matrix(folder) for folder in (pair.teacher, tmp_path / "new")]
    token = new.vocabulary.token_of_bytes[b"17"]
    digits = [old.vocabulary.token_of_bytes[one] for one in (b"1", b"7")]
    np.testing.assert_allclose(matrices[1][token], matrices[0][digits].mean(0), rtol=1e-5)


def test_composed_rows_get_the_old_norm_in_an_untied_embedding_but_not_in_the_head(run, pair, tmp_path):
    run("transplant", pair.student, pair.teacher, "--method", "fvt", "-o", tmp_path / "new")
    sources = TokenSources(Tokenizer(pair.teacher), Tokenizer(pair.student))
    composed = sources.pair.spellings.token_ids
    before, after = (load_file(folder / "model.safetensors") for folder in (pair.student, tmp_path / "new"))
    typical_norm = np.median(np.linalg.norm(before["model.embed_tokens.weight"], axis=1))
    norms = np.linalg.norm(after["model.embed_tokens.weight"][composed], axis=1)
    assert np.median(norms) == pytest.approx(typical_norm, rel=0.1)
    spellings = sources.pair.spellings
    token, ids = spellings.token_ids[0], spellings.spelling_ids[: spellings.offsets[1]]
    np.testing.assert_allclose(after["lm_head.weight"][token], before["lm_head.weight"][ids].mean(0), rtol=1e-5)


def test_transformers_loads_the_transplant_and_generates(run, pair, tmp_path):
    run("transplant", pair.student, pair.teacher, "-o", tmp_path / "new")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    assert ids == Tokenizer(pair.teacher).encode([TEXT])[0].ids.tolist()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    generated = model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)
    assert generated.shape[1] > len(ids)
    new = Tokenizer(pair.teacher)
    assert model.generation_config.eos_token_id == new.end_id == model.config.eos_token_id
    assert model.config.pad_token_id == new.special_token_ids["pad"]
    assert model.config.bos_token_id is None
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == 496


def test_transplant_is_deterministic_and_reuses_a_finished_output(run, pair, tmp_path):
    command = ("transplant", pair.student, pair.teacher, "-o")
    for name in ("one", "two"):
        run(*command, tmp_path / name)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    stamp = (tmp_path / "one" / "model.safetensors").stat().st_mtime_ns
    assert run(*command, tmp_path / "one").stdout.strip() == str(tmp_path / "one")
    assert (tmp_path / "one" / "model.safetensors").stat().st_mtime_ns == stamp
    done = run_here(*command, tmp_path / "one", "--method", "mean", code=None)
    assert done.returncode == 1
    assert "other options" in done.stderr
    run(*command, tmp_path / "one", "--method", "mean", "--force")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() != (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()
    assert (tmp_path / "one.replaced-1" / "model.safetensors").stat().st_mtime_ns == stamp


@pytest.mark.slow
@pytest.mark.parametrize("method", ["subword", "projection", "omp", "random", "mean"])
def test_every_method_changes_composed_rows_but_not_copied_rows(run, pair, tmp_path, method):
    donor = ("--donor", pair.student) if method == "omp" else ()
    run("transplant", pair.teacher, pair.student, "-o", tmp_path / "new", "--method", method, *donor)
    run("transplant", pair.teacher, pair.student, "--method", "fvt", "-o", tmp_path / "fvt")
    new, old = Tokenizer(pair.student), Tokenizer(pair.teacher)
    sources = TokenSources(new, old)
    one, other = (embedding_matrix(tmp_path / name) for name in ("new", "fvt"))
    copied = np.flatnonzero(sources.copied >= 0)
    np.testing.assert_array_equal(one[copied], other[copied])
    composed = sources.pair.spellings.token_ids
    assert len(composed) > 20
    assert not np.allclose(one[composed], other[composed])
    assert np.isfinite(one).all()


def test_a_projection_file_is_used_and_checked(run, pair, tmp_path):
    run("build-projection", pair.student, pair.teacher, "--method", "first-token", "-o", tmp_path / "p")
    run(
        "transplant", pair.teacher, pair.student, "--method", "projection", "--projection", tmp_path / "p",
        "-o", tmp_path / "new",
    )  # fmt: skip
    new, old = Tokenizer(pair.student), Tokenizer(pair.teacher)
    token = new.vocabulary.token_of_bytes[b"17"]
    first = old.vocabulary.token_of_bytes[b"1"]
    np.testing.assert_allclose(
        embedding_matrix(tmp_path / "new")[token], embedding_matrix(pair.teacher)[first], rtol=1e-6
    )
    done = run_here(
        "transplant", pair.student, pair.teacher, "--method", "projection", "--projection", tmp_path / "p",
        "-o", tmp_path / "other", code=None,
    )  # fmt: skip
    assert done.returncode == 1
    assert "built for other tokenizers" in done.stderr
    assert not (tmp_path / "other").exists()


def test_tokens_with_an_empty_row_of_the_projection_are_counted_as_unknown(run, pair, tmp_path):
    projection = cached_projection(Tokenizer(pair.student), Tokenizer(pair.teacher))
    emptied = TokenSources(Tokenizer(pair.student), Tokenizer(pair.teacher)).pair.spellings.token_ids[:7]
    kept = ~np.isin(projection.entry_rows, emptied)
    counts = np.bincount(projection.entry_rows[kept], minlength=projection.student_width)
    changed = replace(projection, row_offsets=np.concatenate([[0], np.cumsum(counts)]),
                      teacher_ids=projection.teacher_ids[kept], weights=projection.weights[kept])  # fmt: skip
    figures = []
    for name, one in (("all", projection), ("some", changed)):
        write_projection(one, tmp_path / f"{name}.p")
        done = run("transplant", pair.teacher, pair.student, "--method", "projection", "--projection",
                   tmp_path / f"{name}.p", "-o", tmp_path / name, "--json")  # fmt: skip
        figures.append(json.loads(done.stdout))
    assert figures[1]["composed"] == figures[0]["composed"] - 7
    assert figures[1]["unknown"] == figures[0]["unknown"] + 7
    rows = embedding_matrix(tmp_path / "some")[emptied]
    np.testing.assert_array_equal(rows, np.repeat(rows[:1], 7, axis=0))  # the mean of the old rows
    for one in figures:
        assert sum(one[kind] for kind in ("exact", "special", "composed", "unknown")) >= one["tokens"]


def test_random_rows_have_the_distribution_of_the_old_rows(pair):
    generator = torch.Generator().manual_seed(5)
    mixing = torch.randn(16, 16, generator=generator)
    old, new = Tokenizer(pair.teacher), Tokenizer(pair.student)
    embedding = torch.randn(len(old), 16, generator=generator) @ mixing + 3
    sources = TokenSources(new, old)
    from xtk.transplant.row_methods import RandomRow

    no_entries = RandomRow().weights(sources)
    rows = torch.cat([part for _, part in new_rows(embedding, sources, no_entries, 40000, sampling_seed=1)])
    random_rows = rows[: len(new)][sources.copied < 0]
    deviation = torch.linalg.norm(random_rows - random_rows.mean(0)) / len(random_rows) ** 0.5
    expected = torch.linalg.norm(embedding - embedding.mean(0)) / len(embedding) ** 0.5
    assert deviation == pytest.approx(float(expected), rel=0.15)


def test_the_dtype_is_that_of_the_model_unless_one_is_given(run, pair, tmp_path):
    load_causal_lm(ModelRef(pair.student, dtype="bfloat16")).save_pretrained(tmp_path / "half")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(pair.student / name, tmp_path / "half" / name)
    for dtype, expected in (("", torch.bfloat16), ("float16", torch.float16)):
        dtype_option = ("--dtype", dtype) if dtype else ()
        run("transplant", tmp_path / "half", pair.teacher, "-o", tmp_path / f"new{dtype}", *dtype_option)
        assert AutoModelForCausalLM.from_pretrained(tmp_path / f"new{dtype}", dtype="auto").dtype == expected


def test_the_chat_template_comes_from_the_tokenizer_unless_the_model_keeps_its_own(run, pair, tmp_path):
    llama = gguf_files.make_llama(tmp_path / "llama")
    run("transplant", llama, pair.student, "-o", tmp_path / "without")
    assert not (tmp_path / "without" / "chat_template.jinja").exists()
    done = run("transplant", llama, pair.student, "-o", tmp_path / "kept", "--keep-chat-template")
    assert (tmp_path / "kept" / "chat_template.jinja").read_text() == gguf_files.TEMPLATE
    assert "ordinary text for the new tokenizer" in done.stderr
    run("transplant", pair.student, llama, "-o", tmp_path / "new")
    assert (tmp_path / "new" / "chat_template.jinja").read_text() == gguf_files.TEMPLATE


def test_every_field_of_the_manifest_is_documented(run, pair, tmp_path):
    run("transplant", pair.student, pair.teacher, "-o", tmp_path / "new", "--method", "mean")
    content = json.loads((tmp_path / "new" / "xtk.json").read_text())
    page = (Path(__file__).parents[2] / "docs" / "reference" / "artifacts.md").read_text(encoding="utf-8")
    assert {name for name in (*content, *content["request"]) if f"`{name}`" not in page} == set()


@pytest.mark.slow
def test_the_healing_pipeline_runs(run, pair, corpus, tmp_path):
    run("transplant", pair.student, pair.teacher, "-o", tmp_path / "new")
    run("cache-teacher", pair.student, corpus, "--top-k", 8, "-o", tmp_path / "cache")
    run("distill", tmp_path / "new", tmp_path / "cache", "--max-steps", 2, "-o", tmp_path / "healed")
    assert json.loads(run("inspect", tmp_path / "new", "--json").stdout)["kind"] == "transplanted-model"


def test_invalid_input_is_refused_and_nothing_is_written(pair, metaspace, tmp_path):
    out = tmp_path / "out"
    no_eos = small_inputs.save_tokenizer(
        small_inputs.byte_level_tokenizer(small_inputs.STUDENT_SPLIT, 300, ["<|x|>"], ["a b"]), tmp_path / "no-eos"
    )
    untied = tmp_path / "two-tables"
    shutil.copytree(pair.teacher, untied)
    weights = load_file(untied / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"] * 2}, untied / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    few_rows = tmp_path / "narrow"
    shutil.copytree(pair.student, few_rows)
    shutil.copyfile(metaspace / "tokenizer.json", few_rows / "tokenizer.json")
    cases = [
        ((pair.student, no_eos), "no eos token"),
        ((untied, pair.student), "contain a separate output head"),
        ((few_rows, pair.teacher), "only 656 rows for the 700 tokens"),
        ((pair.student, pair.student), "tokenizer of the model already"),
        ((pair.student, pair.teacher, "--method", "omp", "--donor", pair.student), "donor has other tokens"),
        ((pair.student, pair.teacher, "--method", "omp"), "needs --donor"),
        ((pair.student, pair.teacher, "--donor", pair.teacher), "applies only to --method omp"),
        ((pair.student, pair.teacher, "--method", "nearest"), "nearest"),
        ((pair.student, pair.teacher, "--dtype", "bf16"), "bf16"),
        ((pair.student, pair.teacher, "--method", "projection", "--projection", tmp_path / "none"), "none"),
        ((pair.student,), "TOKENIZER is missing"),
        ((pair.student, pair.teacher, "--prune-to", 300), "remove TOKENIZER"),
        ((pair.student, "--prune-to", 100), "must be at least"),
        ((pair.student, "--prune-to", 5000), "must be at least"),
    ]
    for arguments, message in cases:
        done = run_here("transplant", *arguments, "-o", out, code=None)
        assert done.returncode in (1, 2), arguments
        assert message in " ".join(done.stderr.split()), (arguments, done.stderr)
        assert "Traceback" not in done.stderr
        assert not out.exists()


def test_an_invalid_output_or_tokenizer_is_refused_before_the_model_is_loaded(pair, tmp_path):
    data = small_inputs.write_jsonl(tmp_path / "data.jsonl", ["some text"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    truncated = tmp_path / "cut"
    shutil.copytree(pair.student, truncated)
    (truncated / "model.safetensors").write_bytes(b"")  # loading the model would fail with another error
    for arguments, message in (
        ((truncated, pair.teacher, "-o", tmp_path / "mine"), "mine"),
        ((truncated, pair.student, "-o", tmp_path / "out"), "tokenizer of the model already"),
    ):
        done = run_here("transplant", *arguments, "--eval-data", data, code=1)
        assert message in done.stderr
        assert "model.safetensors" not in done.stderr


def test_composed_rows_agree_with_a_reference_implementation(pair):
    new, old = Tokenizer(pair.student), Tokenizer(pair.teacher)
    sources = TokenSources(new, old)
    projection = build_projection(new, old, "multitoken")
    from xtk.transplant.row_methods import ProjectedRows, WeightedSpelling

    embedding = torch.randn(old.embedding_rows, 8, generator=torch.Generator().manual_seed(0))
    for method in (ProjectedRows(projection), WeightedSpelling()):
        entries = method.weights(sources)
        rows = torch.cat([part for _, part in new_rows(embedding, sources, entries, len(new), match_norms=False)])
        dense = np.zeros((len(new), old.embedding_rows))
        for row, column, weight in zip(*entries, strict=True):
            dense[row, column] += weight
        for token in range(len(new)):
            if sources.copied[token] >= 0:
                assert not dense[token].any()
            elif dense[token].any():
                assert dense[token].sum() == pytest.approx(1)
                np.testing.assert_allclose(rows[token], dense[token] @ embedding.double().numpy(), atol=1e-5)


def copy_with_settings(model: Path, folder: Path, **settings: object) -> Path:
    """Return a copy of a model with other settings in its generation configuration."""
    shutil.copytree(model, folder)
    path = folder / "generation_config.json"
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, **settings}))
    return folder


@pytest.mark.slow
def test_generation_settings_that_transformers_refuses_to_save_are_kept(run, pair, tmp_path):
    """Vicuna's generation_config.json has a temperature and no do_sample."""
    model = copy_with_settings(pair.student, tmp_path / "model", temperature=0.9, top_p=0.6)
    run("transplant", model, pair.teacher, "-o", tmp_path / "new")
    run("cache-teacher", pair.teacher, small_inputs.write_jsonl(tmp_path / "data.jsonl", ["Anna has 12."] * 4),
        "-o", tmp_path / "cache")  # fmt: skip
    run("distill", model, tmp_path / "cache", "--max-steps", 1, "-o", tmp_path / "run")
    run("export", tmp_path / "run", "-o", tmp_path / "export")
    for name in ("new", "run", "export"):
        written = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert (written["temperature"], written["top_p"], "do_sample" in written) == (0.9, 0.6, False), name
        AutoModelForCausalLM.from_pretrained(tmp_path / name)


def test_pruning_keeps_special_eos_tokens_and_drops_an_ordinary_one(run, pair, tmp_path):
    old = Tokenizer(pair.student)
    other_special_token = next(token for token in old.special_token_names if token not in old.end_ids)
    text_token = old.vocabulary.token_of_bytes[b"a"]  # default ids of configurations may be ordinary text tokens
    model = copy_with_settings(
        pair.student, tmp_path / "model", eos_token_id=[old.end_id, other_special_token, text_token]
    )
    run("transplant", model, "--prune-to", 500, "-o", tmp_path / "new")
    new = Tokenizer(tmp_path / "new")
    ids_by_name = {name: token for token, name in new.special_token_names.items()}
    expected = sorted({new.end_id, ids_by_name[old.special_token_names[other_special_token]]})
    assert json.loads((tmp_path / "new" / "generation_config.json").read_text())["eos_token_id"] == expected


def byte_fallback_token(tokenizer: Tokenizer, byte: bytes) -> int:
    """Return the byte-fallback token of a byte."""
    (found,) = (
        token
        for token in np.flatnonzero(tokenizer.vocabulary.byte_fallback_mask).tolist()
        if tokenizer.vocabulary.bytes_by_id[token] == byte
    )
    return found


def test_an_unused_byte_fallback_token_does_not_copy_the_row_of_its_character(run, pair, metaspace, tmp_path):
    sources = TokenSources(Tokenizer(metaspace), Tokenizer(pair.teacher))
    new, old = sources.new.vocabulary, sources.old.vocabulary
    character, fallback = new.token_of_bytes[b"5"], byte_fallback_token(sources.new, b"5")
    assert character != fallback
    assert fallback in sources.unused_ids
    assert sources.copied[character] == old.token_of_bytes[b"5"]
    assert sources.copied[fallback] == -1
    lone_byte = new.token_of_bytes[b"\xe6"]
    assert sources.copied[lone_byte] == old.token_of_bytes[b"\xe6"]
    # Between two tokenizers with byte fallback, the fallback token copies the row of the fallback token.
    texts = small_inputs.sentences(300, seed=9)
    special_tokens = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    second = small_inputs.save_tokenizer(
        small_inputs.metaspace_tokenizer(500, texts), tmp_path / "second", **special_tokens
    )
    sources = TokenSources(Tokenizer(second), Tokenizer(metaspace))
    assert sources.copied[byte_fallback_token(sources.new, b"5")] == fallback
    assert sources.copied[sources.new.vocabulary.token_of_bytes[b"5"]] == character
    for method in ("subword", "projection"):
        run("transplant", pair.teacher, metaspace, "--method", method, "-o", tmp_path / method)
        rows = embedding_matrix(tmp_path / method)
        np.testing.assert_array_equal(rows[character], embedding_matrix(pair.teacher)[old.token_of_bytes[b"5"]])
        assert np.linalg.norm(rows[fallback] - rows[character]) > 0.1 * np.linalg.norm(rows[character])


def test_position_embeddings_are_kept_and_per_layer_embeddings_are_refused(run, pair, tmp_path):
    tokenizer = Tokenizer(pair.student)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": len(tokenizer) + 100}
    folder = tmp_path / "gpt2"
    shutil.copytree(pair.student, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    run("transplant", folder, pair.teacher, "-o", tmp_path / "new")
    before, after = (load_file(model / "model.safetensors")["transformer.wpe.weight"]
                     for model in (folder, tmp_path / "new"))  # fmt: skip
    np.testing.assert_array_equal(before, after)
    layers = tmp_path / "layers"
    shutil.copytree(pair.student, layers)
    config = json.loads((layers / "config.json").read_text())
    (layers / "config.json").write_text(json.dumps({**config, "hidden_size_per_layer_input": 8}))
    done = run_here("transplant", layers, pair.teacher, "-o", tmp_path / "other", code=1)
    assert "another table with a row for each token" in " ".join(done.stderr.split())


def test_a_removed_or_changed_setting_is_a_different_request(run, pair, tmp_path):
    model = copy_with_settings(pair.student, tmp_path / "model", repetition_penalty=1.1)
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(pair.teacher, tokenizer)
    command = ("transplant", model, tokenizer, "-o", tmp_path / "new")
    run(*command)
    (model / "generation_config.json").rename(tmp_path / "kept.json")
    assert "generation_config" in run_here(*command, code=1).stderr
    (tmp_path / "kept.json").rename(model / "generation_config.json")
    run(*command)
    path = tokenizer / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "padding_side": "left"}))
    assert "tokenizer_settings" in run_here(*command, code=1).stderr
