"""GGUF models: the same logits and tokens as the original folder, converted once, and clear errors."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf_files
import numpy as np
import pytest
import small_inputs
import torch
import transformers
from safetensors.numpy import load_file, save_file

from xtk.errors import CorruptError, XtkError
from xtk.models.causal_lm import load_causal_lm
from xtk.models.gguf_models import GGUF_RECORD, find_gguf, gguf_name
from xtk.models.gguf_to_huggingface import GgufHeader, set_rope_scaling
from xtk.models.resolver import ModelRef, resolve_model_folder, weights_fingerprint
from xtk.text.tokenizer import Tokenizer

TEXTS = ["Anna has 2017 apples.", "a  1\n\n2", "x = 3.14159;\n\n\n  7", "日本語の文 😀", *small_inputs.sentences(8)]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def original(request, tmp_path_factory) -> Path:
    return gguf_files.make_llama(tmp_path_factory.mktemp("llama"), tied=request.param)


@pytest.fixture
def gguf_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XTK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def test_logits_tokens_and_template_equal_the_original(original, gguf_cache, tmp_path):
    file = gguf_files.write_gguf(original, tmp_path / "tiny.gguf")
    folder = resolve_model_folder(str(file), with_weights=True)
    converted_tokenizer, original_tokenizer = Tokenizer(folder), Tokenizer(original)
    for one, other in zip(converted_tokenizer.encode(TEXTS), original_tokenizer.encode(TEXTS), strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
    assert converted_tokenizer.special_token_ids == original_tokenizer.special_token_ids
    messages = [{"role": "user", "content": "Hi"}]
    assert str(converted_tokenizer.chat_template.render(messages)) == str(
        original_tokenizer.chat_template.render(messages)
    )
    ids = torch.tensor(original_tokenizer.encode(TEXTS[4:5])[0].ids[None].astype(np.int64))
    with torch.no_grad():
        found, expected = (load_causal_lm(ModelRef(model_folder))(ids).logits for model_folder in (folder, original))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_weights_keep_float16_when_it_is_exact(tmp_path, gguf_cache):
    original = gguf_files.make_llama(tmp_path / "llama")
    model = load_causal_lm(ModelRef(original, dtype="float16"))
    model.float().save_pretrained(original)  # float32 weights with values of float16
    folder = resolve_model_folder(str(gguf_files.write_gguf(original, tmp_path / "half.gguf")), with_weights=True)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"


def test_conversion_is_reused_by_checksum_and_named_after_the_file(original, gguf_cache, tmp_path):
    file = gguf_files.write_gguf(original, tmp_path / "tiny.gguf")
    folder = resolve_model_folder(str(file), with_weights=True)
    modified_ns = (folder / "model.safetensors").stat().st_mtime_ns
    other_folder = tmp_path / "elsewhere"
    other_folder.mkdir()
    file.rename(other_folder / "renamed.gguf")
    renamed = resolve_model_folder(str(other_folder), with_weights=True)
    assert renamed == folder
    assert gguf_name(folder) == "tiny"
    assert (folder / "model.safetensors").stat().st_mtime_ns == modified_ns
    checksum = json.loads((folder / GGUF_RECORD).read_text())["gguf"]
    assert weights_fingerprint(folder) == checksum
    (folder / "tokenizer.json").unlink()
    restored = resolve_model_folder(str(other_folder), with_weights=True)
    assert (restored / "tokenizer.json").is_file()
    assert weights_fingerprint(restored) == checksum
    assert gguf_name(restored) == "renamed"


@pytest.mark.parametrize("names", [(".hidden.gguf", "b.gguf", ".hidden.gguf"), ("ä.gguf", "..x.gguf", "a b")])
def test_a_file_under_any_name_is_converted_once(original, gguf_cache, tmp_path, names, capsys):
    file = gguf_files.write_gguf(original, tmp_path / "tiny.gguf")
    for name in names:
        file = file.rename(tmp_path / name)
        folder = resolve_model_folder(str(file), with_weights=True)
        assert gguf_name(folder)
        assert (folder / "model.safetensors").is_file()
    assert capsys.readouterr().err.count("converting") == 1


def test_changed_weights_have_another_fingerprint(original, gguf_cache, tmp_path):
    folder = resolve_model_folder(str(gguf_files.write_gguf(original, tmp_path / "tiny.gguf")), with_weights=True)
    fingerprint = weights_fingerprint(folder)
    model = load_causal_lm(ModelRef(folder))
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1)
    model.save_pretrained(folder)
    assert weights_fingerprint(folder) != fingerprint


@pytest.mark.slow
def test_two_concurrent_processes_convert_a_file_once(original, gguf_cache, tmp_path):
    file = gguf_files.write_gguf(original, tmp_path / "tiny.gguf")
    script = (
        "import sys; from xtk.models.resolver import resolve_model_folder as r; "
        "print(r(sys.argv[1], with_weights=True))"
    )
    command = [sys.executable, "-c", script, str(file)]
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(lambda _: subprocess.run(command, capture_output=True, text=True), range(2)))
    assert [result.returncode for result in results] == [0, 0], results
    assert results[0].stdout == results[1].stdout
    assert sum("converting" in result.stderr for result in results) == 1
    assert [path.name for path in gguf_cache.iterdir() if not path.name.startswith(".")] == [
        Path(results[0].stdout.strip()).name
    ]


def test_truncated_files_are_refused(tmp_path, gguf_cache):
    file = gguf_files.write_gguf(gguf_files.make_llama(tmp_path / "llama"), tmp_path / "tiny.gguf")
    content = file.read_bytes()
    for size in (0, 10, 40, 3000, len(content) // 2, len(content) - 1):
        truncated = tmp_path / "cut.gguf"
        truncated.write_bytes(content[:size])
        with pytest.raises(CorruptError, match="truncated"):
            resolve_model_folder(str(truncated), with_weights=True)
    assert [path for path in gguf_cache.iterdir() if not path.name.startswith(".")] == []


def integer(value: int) -> bytes:
    return struct.pack("<I", value)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"offset": 2**63}, "truncated or corrupt"),
        ({"shape": (32, 2**40)}, "truncated or corrupt"),
        (
            {"shape": (16, 64)},
            "weights do not have the shapes of the configuration",
        ),  # as many values: another model, which transformers refuses
        ({"kind": 1000}, "is not a valid GGMLQuantizationType"),
    ],
)
def test_invalid_tensor_layouts_are_refused(original, gguf_cache, tmp_path, change, what):
    file = gguf_files.write_gguf(original, tmp_path / "x.gguf")
    gguf_files.set_tensor(file, "blk.1.attn_q.weight", **change)
    with pytest.raises(XtkError, match=what) as raised:
        resolve_model_folder(str(file), with_weights=True)
    assert raised.value.where == str(file)
    assert [path for path in gguf_cache.iterdir() if not path.name.startswith(".")] == []


@pytest.mark.slow
@pytest.mark.parametrize("alignment", [0, 3, 48])
def test_invalid_alignments_are_refused(original, gguf_cache, tmp_path, alignment):
    file = gguf_files.write_gguf(original, tmp_path / "x.gguf", alignment=64)
    resolve_model_folder(str(file), with_weights=True)
    gguf_files.set_field(file, "general.alignment", integer(alignment))
    with pytest.raises(CorruptError, match="must be a non-zero power of two"):
        resolve_model_folder(str(file), with_weights=True)


def test_headers_that_libraries_read_differently_are_refused(original, gguf_cache, tmp_path):
    content = gguf_files.write_gguf(original, tmp_path / "x.gguf").read_bytes()
    contents = [content.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight")]
    num_fields = struct.pack("<Q", struct.unpack_from("<Q", content, 16)[0] + 1)
    nested_arrays = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 4, 0)
    for key, value in ((b"general.name", struct.pack("<IQ", 8, 1) + b"x"), (b"other", nested_arrays)):
        contents.append(content[:16] + num_fields + struct.pack("<Q", len(key)) + key + value + content[24:])
    for number, changed in enumerate(contents):
        (tmp_path / f"{number}.gguf").write_bytes(changed)
        with pytest.raises(CorruptError, match="truncated or corrupt"):
            resolve_model_folder(str(tmp_path / f"{number}.gguf"), with_weights=True)


@pytest.mark.slow
def test_file_with_missing_weights_is_refused(original, gguf_cache, tmp_path):
    incomplete = shutil.copytree(original, tmp_path / "less")
    weights = load_file(incomplete / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, incomplete / "model.safetensors")
    file = gguf_files.write_gguf(incomplete, tmp_path / "less.gguf")
    with pytest.raises(CorruptError, match=r"lack 1 of its weights: model\.layers\.1\.mlp\.up_proj\.weight") as raised:
        resolve_model_folder(str(file), with_weights=True)
    assert raised.value.where == str(file)
    assert [path for path in gguf_cache.iterdir() if not path.name.startswith(".")] == []


def test_file_in_the_place_of_a_conversion_is_moved_aside(original, gguf_cache, tmp_path):
    file = gguf_files.write_gguf(original, tmp_path / "tiny.gguf")
    folder = resolve_model_folder(str(file), with_weights=True)
    shutil.rmtree(folder)
    folder.write_text("a file in the place of the folder")
    assert resolve_model_folder(str(file), with_weights=True) == folder
    assert folder.with_name(f"{folder.name}.replaced-1").read_text() == "a file in the place of the folder"
    assert len([path for path in gguf_cache.iterdir() if not path.name.startswith(".")]) == 2


def test_invalid_files_are_refused_with_a_clear_message(tmp_path, gguf_cache, monkeypatch):
    llama = gguf_files.make_llama(tmp_path / "llama")
    unknown = gguf_files.write_gguf(llama, tmp_path / "mystery.gguf", architecture="mystery9")
    with pytest.raises(XtkError, match="architecture mystery9") as raised:
        resolve_model_folder(str(unknown), with_weights=True)
    assert "original folder" in (raised.value.hint or "")
    folder = tmp_path / "several"
    folder.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(unknown.read_bytes())
    with pytest.raises(XtkError, match=r"contains 2 GGUF models: a\.gguf, b\.gguf"):
        resolve_model_folder(str(folder), with_weights=True)
    (folder / "b.gguf").rename(folder / "mmproj-b.gguf")  # of images: not a model for text
    assert find_gguf(folder) == folder / "a.gguf"
    noise = tmp_path / "noise.gguf"
    noise.write_bytes(b"not a model " * 100)
    with pytest.raises(CorruptError, match="magic invalid"):
        resolve_model_folder(str(noise), with_weights=True)
    text = tmp_path / "text.txt"
    text.write_text("hello, this is text")
    with pytest.raises(XtkError, match="this is another file"):
        resolve_model_folder(str(text), with_weights=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(XtkError, match="needs the package gguf") as raised:
        resolve_model_folder(str(unknown), with_weights=True)
    assert ".[gguf]" in (raised.value.hint or "")


def test_unknown_pre_tokenizer_is_reported(tmp_path, gguf_cache, capsys):
    file = gguf_files.write_gguf(gguf_files.make_llama(tmp_path / "llama"), tmp_path / "x.gguf", pre="unheard-of")
    resolve_model_folder(str(file), with_weights=True)
    assert "does not know the pre-tokenizer 'unheard-of'" in capsys.readouterr().err


@pytest.mark.slow
def test_commands_accept_a_gguf_file(run, corpus, tmp_path, pair):
    original = gguf_files.make_llama(tmp_path / "llama")
    file = gguf_files.write_gguf(original, tmp_path / "tiny.gguf")
    scores = [json.loads(run("evaluate", model, corpus, "--json").stdout) for model in (file, original)]
    assert scores[0]["bits_per_byte"] == pytest.approx(scores[1]["bits_per_byte"], abs=1e-5)
    run("cache-teacher", file, corpus, "--top-k", 8, "-o", tmp_path / "cache")
    header = json.loads(run("inspect", tmp_path / "cache", "--json").stdout)["header"]
    assert header["teacher"]["name"] == "tiny"
    run("distill", pair.student, tmp_path / "cache", "--max-steps", 1, "-o", tmp_path / "student")
    run("distill", file, tmp_path / "cache", "--max-steps", 1, "-o", tmp_path / "same")
    assert not (tmp_path / "same" / GGUF_RECORD).exists()
    assert (tmp_path / "same" / "model.safetensors").is_file()
    card = (tmp_path / "same" / "README.md").read_text()
    assert "# tiny, distilled" in card
    assert "| Base model | `tiny` (weights " in card


def llama_with_rope(folder: Path, scaling: dict[str, object]) -> Path:
    """Return a small Llama whose rotary embedding is scaled."""
    gguf_files.make_llama(folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 10000.0, **scaling}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def llama3_factors(*, factor: float, context: int, dimensions: int) -> np.ndarray:
    """Return the divisor of each rotary frequency, as written by llama.cpp's converter."""
    factors = []
    for number in range(0, dimensions, 2):
        wavelength = 2 * np.pi * 10000.0 ** (number / dimensions)
        if wavelength < context / 4:
            factors.append(1.0)
        elif wavelength > context:
            factors.append(factor)
        else:
            weight = (context / wavelength - 1) / 3
            factors.append(1 / ((1 - weight) / factor + weight))
    return np.array(factors)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scaling", "fields", "tensors"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}, {}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {"type": "yarn", "factor": 4.0, "original_context_length": 64.0},
            {},
        ),
        (
            {"rope_type": "llama3", **LLAMA3},
            {},
            {"rope_freqs.weight": llama3_factors(factor=8.0, context=2048, dimensions=8)},
        ),
    ],
    ids=["linear", "yarn", "llama3"],
)
def test_scaled_rotary_embeddings_are_kept(tmp_path, gguf_cache, scaling, fields, tensors):
    original = llama_with_rope(tmp_path / "llama", scaling)
    unscaled_file = gguf_files.write_gguf(original, tmp_path / "plain.gguf")
    fields = {f"llama.rope.scaling.{name}": value for name, value in fields.items()}
    file = gguf_files.write_gguf(original, tmp_path / "scaled.gguf", fields=fields, tensors=tensors)
    folder, unscaled_folder = (
        resolve_model_folder(str(gguf_path), with_weights=True) for gguf_path in (file, unscaled_file)
    )
    ids = torch.randint(3, 480, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected, unscaled_logits = (
            load_causal_lm(ModelRef(model_folder))(ids).logits for model_folder in (folder, original, unscaled_folder)
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert (unscaled_logits - expected).abs().max() > 1e-2
    # Earlier conversions ignored the scaling; the fingerprint prevents that their caches are used with this model.
    checksum = "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()
    assert weights_fingerprint(folder) != checksum
    assert weights_fingerprint(unscaled_folder) == "sha256:" + hashlib.sha256(unscaled_file.read_bytes()).hexdigest()


def test_rope_scaling_of_gemma_applies_only_to_global_layers():
    config = transformers.Gemma3TextConfig()
    header = GgufHeader("gemma3", "", "", {"type": "linear", "factor": 8.0})
    local = dict(config.rope_parameters["sliding_attention"])
    set_rope_scaling(Path("gemma.gguf"), header, config)
    assert config.rope_parameters["full_attention"]["factor"] == 8.0
    assert config.rope_parameters["sliding_attention"] == local


@pytest.mark.parametrize(
    ("fields", "tensors", "what"),
    [
        ({"type": "longrope", "factor": 2.0}, {}, "longrope"),
        ({"type": "yarn", "factor": 2.0}, {}, "without the original context"),
        ({"type": "yarn", "factor": 2.0, "original_context_length": 64.0, "attn_factor": 2.0}, {}, "yarn"),
        ({}, {"rope_factors_long.weight": np.ones(4)}, "longrope"),
        ({}, {"rope_freqs.weight": np.array([1.0, 5.0, 2.0, 3.0])}, "other factors"),
        ({}, {"blk.0.attn_q.bias": np.zeros(32)}, "of the"),
    ],
)
def test_unsupported_rope_scaling_and_tensors_are_refused(original, tmp_path, gguf_cache, fields, tensors, what):
    fields = {f"llama.rope.scaling.{name}": value for name, value in fields.items()}
    file = gguf_files.write_gguf(original, tmp_path / "x.gguf", fields=fields, tensors=tensors)
    with pytest.raises(XtkError, match=what) as raised:
        resolve_model_folder(str(file), with_weights=True)
    assert raised.value.where == str(file)
    assert [path for path in gguf_cache.iterdir() if not path.name.startswith(".")] == []
