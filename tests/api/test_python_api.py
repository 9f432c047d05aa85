"""The public names of the Python API: light to import, typed, documented, and equal to the commands."""

from __future__ import annotations

import inspect
import json
import shutil
import statistics
import subprocess
import sys

import numpy as np
import pytest
import torch
from small_inputs import ODD_TEXTS, sentences
from tokenizers import normalizers
from transformers import AutoTokenizer

import xtk
from xtk.api.tokenizer_argument import to_tokenizer

HEAVY = {"torch", "transformers", "pyarrow", "numba", "accelerate", "datasets", "numpy", "safetensors"}
MAX_IMPORT_SECONDS = 0.05


def test_importing_xtk_loads_no_heavy_modules():
    script = f"import sys, xtk; dir(xtk); print(sorted({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_importing_xtk_takes_less_than_50_ms():
    script = "import time; start = time.process_time(); import xtk; print(time.process_time() - start)"
    seconds = [float(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
               for _ in range(5)]  # fmt: skip
    assert statistics.median(seconds) < MAX_IMPORT_SECONDS


@pytest.mark.parametrize("name", [name for name in xtk.PUBLIC if name != "XtkError"])
def test_public_names_are_typed_and_documented(name):
    public_object = getattr(xtk, name)
    functions = [public_object] if inspect.isfunction(public_object) else [
        value for key, value in vars(public_object).items()
        if inspect.isfunction(value) and not key.startswith("_")
    ]  # fmt: skip
    assert inspect.getdoc(public_object)
    for function in functions:
        assert inspect.getdoc(function), f"{name}.{function.__name__}"
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty
        parameters = [parameter for key, parameter in signature.parameters.items() if key != "self"]
        assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters), function


def test_unknown_names_raise_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = xtk.nothing
    assert {"align", "TeacherCache", "DistillationLoss"} <= set(dir(xtk))


@pytest.mark.slow
def test_align_has_the_spans_of_the_command(run, pair):
    texts = [*sentences(3), *ODD_TEXTS]
    tokenizers = [AutoTokenizer.from_pretrained(side) for side in (pair.student, pair.teacher)]
    for text in texts:
        found = xtk.align(*tokenizers, text)
        line = json.loads(run("align", pair.student, pair.teacher, text, "--json").stdout)
        assert found.spans.tolist() == line["spans"]
        assert (found.student_ids.tolist(), found.teacher_ids.tolist()) == (line["student_ids"], line["teacher_ids"])
        assert found.is_exact == line["exact"]
        assert found.student_byte_ends[-1] == found.teacher_byte_ends[-1] == len(text.encode())


def test_tokenizer_changed_in_memory_is_used_as_it_is(pair):
    changed = AutoTokenizer.from_pretrained(pair.student)
    changed.add_tokens(["<|new|>"])
    found = xtk.align(changed, pair.teacher, "a <|new|> b")
    assert found.student_ids.tolist() == changed("a <|new|> b", add_special_tokens=False)["input_ids"]


def test_tokenizers_are_read_once_until_they_change(pair, tmp_path):
    loaded = AutoTokenizer.from_pretrained(pair.student)
    first = to_tokenizer(loaded)
    assert to_tokenizer(loaded) is first
    assert to_tokenizer(AutoTokenizer.from_pretrained(pair.student)) is first
    for change in (
        lambda: loaded.add_tokens(["<|new|>"]),
        lambda: setattr(loaded, "chat_template", "{{ messages }}"),
        lambda: setattr(loaded.backend_tokenizer, "normalizer", normalizers.Lowercase()),
        lambda: setattr(loaded, "eos_token", "<|new|>"),
    ):
        before = to_tokenizer(loaded)
        change()
        assert to_tokenizer(loaded) is not before
    folder = tmp_path / "tokenizer"
    shutil.copytree(pair.student, folder)
    of_folder = to_tokenizer(folder)
    assert to_tokenizer(str(folder)) is of_folder
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ messages }}"}))
    assert to_tokenizer(folder) is not of_folder
    for number in range(6):  # few are kept
        shutil.copytree(pair.teacher, tmp_path / str(number))
        to_tokenizer(tmp_path / str(number))
    assert to_tokenizer(folder) is not of_folder


@pytest.mark.parametrize("method", ["multitoken", "exact", "first-token", "partition"])
def test_projections_equal_those_of_the_command_byte_for_byte(run, pair, tmp_path, method):
    run("build-projection", pair.student, pair.teacher, "--method", method, "-o", tmp_path / "command")
    projection = xtk.build_projection(AutoTokenizer.from_pretrained(pair.student), pair.teacher, method)
    projection.save(tmp_path / "python")
    assert (tmp_path / "python").read_bytes() == (tmp_path / "command").read_bytes()
    pruned_projection = xtk.Projection.load(tmp_path / "command").prune(top_k=1)
    run("prune-projection", tmp_path / "command", "--top-k", 1, "-o", tmp_path / "pruned")
    pruned_projection.save(tmp_path / "python-pruned")
    assert (tmp_path / "python-pruned").read_bytes() == (tmp_path / "pruned").read_bytes()
    with pytest.raises(xtk.XtkError, match="--force"):
        projection.prune(top_k=1).save(tmp_path / "command") if method == "multitoken" else xtk.build_projection(
            pair.teacher, pair.student
        ).save(tmp_path / "command")


def test_sparse_tensor_of_a_projection_maps_probabilities(pair):
    projection = xtk.build_projection(pair.student, pair.teacher)
    probs = torch.rand(3, projection.student_width)
    dense = np.zeros((projection.student_width, projection.teacher_width), np.float32)
    dense[projection.entry_rows, projection.teacher_ids] = projection.weights
    assert torch.allclose(probs @ projection.to_torch_sparse(), probs @ torch.from_numpy(dense), atol=1e-6)


def test_invalid_arguments_are_refused_with_a_clear_message(pair, tmp_path):
    with pytest.raises(xtk.XtkError, match="not a fast tokenizer"):
        xtk.align(object(), pair.teacher, "text")
    with pytest.raises(xtk.XtkError, match="does not exist"):
        xtk.align("./nowhere", pair.teacher, "text")
    with pytest.raises(xtk.XtkError, match="did you mean"):
        xtk.build_projection(pair.student, pair.teacher, "multi-token")
    with pytest.raises(xtk.XtkError, match="does not exist"):
        xtk.Projection.load(tmp_path / "nothing")


def test_unusable_cache_folder_is_refused_with_a_clear_message(pair, tmp_path):
    changed = AutoTokenizer.from_pretrained(pair.student)
    changed.add_tokens(["<|other|>"])
    (tmp_path / "file").write_text("")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XTK_CACHE", str(tmp_path / "file" / "below"))
        with pytest.raises(xtk.XtkError, match="XTK_CACHE"):
            xtk.align(changed, pair.teacher, "text")
