"""Weight files with missing, other or non-finite weights: refused by name, never filled with random values."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_inputs import sentences, write_jsonl
from torch import Tensor
from xtk_processes import run_xtk

from xtk.errors import XtkError
from xtk.models.causal_lm import check_loadable, load_causal_lm
from xtk.models.resolver import ModelRef
from xtk.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

Weights = dict[str, Tensor]
LAYER = "model.layers.1.mlp."
MISSING = "the model's files lack 3 of its weights: model.layers.1.mlp.down_proj.weight"


def copy_with_change(
    model: Path, folder: Path, change: Callable[[Weights], object], file: str = "model.safetensors"
) -> Path:
    shutil.copytree(model, folder)
    weights = load_file(folder / file)
    change(weights)
    save_file(weights, folder / file, metadata={"format": "pt"})
    return folder


def without(part: str) -> Callable[[Weights], object]:
    def change(weights: Weights) -> None:
        for name in [name for name in weights if part in name]:
            del weights[name]

    return change


def load_error(model: Path, **options: object) -> str:
    with pytest.raises(XtkError) as raised:
        load_causal_lm(ModelRef(model, **options))
    return str(raised.value)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", sentences(4, seed=7))


@pytest.mark.parametrize("command", ["cache-teacher", "distill", "online teacher", "evaluate", "rollout", "doctor"])
def test_every_command_refuses_a_model_with_missing_weights(command, pair, corpus, cache, prompts, tmp_path):
    teacher = command in ("cache-teacher", "online teacher")
    broken = copy_with_change(pair.teacher if teacher else pair.student, tmp_path / "broken", without(LAYER))
    arguments = {
        "cache-teacher": ["cache-teacher", broken, corpus, "-o"],
        "distill": ["distill", broken, corpus, "--loss", "ce", "-o"],
        "online teacher": ["distill", pair.student, corpus, "--teacher", broken, "-o"],
        "evaluate": ["evaluate", broken, corpus],
        "rollout": ["rollout", broken, prompts, "--max-completion-length", 4, "-o"],
        "doctor": ["doctor", broken, pair.teacher, cache, "-o"],
    }[command]
    result = run_xtk(
        *arguments, *{"evaluate": [], "rollout": [tmp_path / "out.jsonl"]}.get(command, [tmp_path / "out"]), code=1
    )
    if command == "doctor":
        assert MISSING.split(": ")[1] in result.stdout
    else:
        assert MISSING in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out" / "xtk.json").exists()


def test_finished_run_with_missing_weights_is_not_exported(pair, corpus, tmp_path):
    run_xtk("distill", pair.teacher, corpus, "--loss", "ce", "--max-steps", 2, "-o", tmp_path / "run")
    weights = load_file(tmp_path / "run" / "model.safetensors")
    without(LAYER)(weights)
    save_file(weights, tmp_path / "run" / "model.safetensors", metadata={"format": "pt"})
    result = run_xtk("export", tmp_path / "run", "-o", tmp_path / "out", code=1)
    assert "according to the manifest" in result.stderr  # sizes are compared before weights are loaded
    assert not (tmp_path / "out").exists()


def test_run_does_not_resume_from_a_checkpoint_with_missing_weights(pair, corpus, tmp_path):
    arguments = ["distill", pair.teacher, corpus, "--loss", "ce", "--max-steps", 3, "--save-steps", 1, "-o", "run"]
    run_xtk(*arguments, "--max-seconds", 0.001, cwd=tmp_path, code=75)
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    weights = load_file(checkpoint / "model.safetensors")
    without(LAYER)(weights)
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    result = run_xtk(*arguments, cwd=tmp_path, code=None)
    if result.returncode:  # otherwise the run used an earlier state and reported it
        assert "the model's files lack 3 of its weights" in result.stderr or checkpoint.name in result.stderr
    else:
        assert checkpoint.name in result.stderr


# --- weights that may be missing


def test_tied_head_may_be_missing_or_stored_twice(pair, tmp_path):
    ids = torch.arange(3, 40)[None]
    expected = load_causal_lm(ModelRef(pair.teacher))(ids).logits
    assert "lm_head.weight" not in load_file(pair.teacher / "model.safetensors")
    with_head = copy_with_change(
        pair.teacher,
        tmp_path / "twice",
        lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}),
    )
    assert torch.equal(load_causal_lm(ModelRef(with_head))(ids).logits, expected)
    check_loadable(ModelRef(pair.teacher), Tokenizer(pair.teacher))
    check_loadable(ModelRef(with_head), Tokenizer(with_head))


def test_separate_head_of_a_model_configured_as_tied_is_reported_and_kept(pair, corpus, tmp_path):
    assert json.loads((pair.teacher / "config.json").read_text())["tie_word_embeddings"]
    ids = torch.arange(3, 40)[None]
    other = copy_with_change(
        pair.teacher,
        tmp_path / "other",
        lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].flip(0).contiguous()}),
    )
    result = run_xtk("distill", other, corpus, "--loss", "ce", "--max-steps", 1, "--learning-rate", 0, "-o", "run",
                     cwd=tmp_path)  # fmt: skip
    assert result.stderr.count("tie_word_embeddings true, but the weights contain a separate output") == 1
    run_xtk("export", tmp_path / "run", "-o", tmp_path / "exported")
    expected = load_causal_lm(ModelRef(other))(ids).logits
    assert not torch.equal(expected, load_causal_lm(ModelRef(pair.teacher))(ids).logits)
    for folder in (tmp_path / "run", tmp_path / "exported"):
        assert not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
        assert torch.allclose(load_causal_lm(ModelRef(folder))(ids).logits, expected, atol=1e-5)


def test_missing_embedding_or_untied_head_is_refused(pair, tmp_path):
    headless = copy_with_change(pair.student, tmp_path / "headless", without("lm_head"))
    assert "the model's files lack 1 of its weights: lm_head.weight" in load_error(headless)
    with pytest.raises(XtkError, match=r"the model's files lack 1 of its weights: lm_head.weight"):
        check_loadable(ModelRef(headless), Tokenizer(headless))
    for number, model in enumerate((pair.student, pair.teacher)):
        without_embedding = copy_with_change(model, tmp_path / f"blind-{number}", without("embed_tokens"))
        assert "of its weights: " in load_error(without_embedding)


def test_unused_weights_are_reported_in_one_line_and_change_nothing(pair, corpus, tmp_path):
    extended = copy_with_change(
        pair.teacher,
        tmp_path / "more",
        lambda weights: weights.update({f"vision.layers.{n}.weight": torch.ones(2) for n in range(5)}),
    )
    tables = [run_xtk("evaluate", model, corpus) for model in (pair.teacher, extended)]
    assert "the model does not use 5 weights (vision.layers.0.weight, " in tables[1].stderr
    assert tables[1].stderr.count("does not use") == 1
    assert "does not use" not in tables[0].stderr
    assert tables[0].stdout.replace(str(pair.teacher), "") == tables[1].stdout.replace(str(extended), "")


def test_weights_of_another_shape_are_refused_with_both_shapes(pair, tmp_path):
    def change(weights: Weights) -> None:
        weights["model.layers.0.mlp.up_proj.weight"] = torch.ones(7, 32)

    message = load_error(copy_with_change(pair.student, tmp_path / "other", change))
    assert "model.layers.0.mlp.up_proj.weight [7, 32] instead of [64, 32]" in message


def test_weights_that_are_not_finite_are_refused(pair, tmp_path):
    for number, value in enumerate((float("nan"), float("inf"), -float("inf"))):

        def change(weights: Weights, value: float = value) -> None:
            weights["model.layers.1.mlp.up_proj.weight"][5, 7] = value

        message = load_error(copy_with_change(pair.student, tmp_path / str(number), change))
        assert (
            "the model has weights that are NaN or infinite in float32: 1 (model.layers.1.mlp.up_proj.weight)"
            in message
        )

    def large(weights: Weights) -> None:
        weights["lm_head.weight"][3, 4] = 1e6

    message = load_error(copy_with_change(pair.student, tmp_path / "large", large), dtype="float16")
    assert "in float16: 1 (lm_head.weight)" in message
    assert "--dtype bfloat16" in message


# --- shards


@pytest.fixture(scope="module")
def sharded(pair, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sharded") / "model"
    shutil.copytree(pair.student, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    load_causal_lm(ModelRef(pair.student)).save_pretrained(folder, max_shard_size="60KB")
    return folder


def test_missing_weight_shards_are_named(sharded, pair, cache, tmp_path):
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    assert len(sorted(folder.glob("*.safetensors"))) > 2
    missing = sorted(folder.glob("*.safetensors"))[1]
    missing.unlink()
    assert (
        f"1 of {len(list(folder.glob('*.safetensors'))) + 1} weight files in the index do not exist: {missing.name}"
        in load_error(folder)
    )
    result = run_xtk("doctor", folder, pair.teacher, cache, code=1)
    assert (
        f"1 of 3 weight files in the index do not exist: {missing.name}" in result.stdout
        or missing.name in result.stdout
    )


def test_index_that_is_invalid_or_names_files_of_other_folders_is_refused(sharded, tmp_path):
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    path = folder / "model.safetensors.index.json"
    for file in ("../secret.safetensors", "/etc/hostname", "a/b.safetensors"):
        index = json.loads(path.read_text())
        index["weight_map"]["lm_head.weight"] = file
        path.write_text(json.dumps(index))
        assert f"a path outside of the model folder: '{file}'" in load_error(folder)
    for content in ("[]", '{"weight_map": 5}', '{"weight_map": null}', "[" * 10_000, "{"):
        path.write_text(content)
        assert "the index of the model's weight files is not valid" in load_error(folder)


@pytest.mark.parametrize(
    "header",
    [b"", b"\x00" * 7, b"[]", b'{"a": 5}', b'{"a": {"dtype": "F32", "shape": 5, "data_offsets": [0, 4]}}', b"[" * 9999],
)
def test_unreadable_safetensors_headers_are_refused(header, pair, tmp_path):
    folder = Path(shutil.copytree(pair.student, tmp_path / "model"))
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(XtkError, match="the weight file cannot be read"):
        check_loadable(ModelRef(folder), Tokenizer(folder))
    assert "cannot be read" in load_error(folder)


# --- adapters


@pytest.fixture(scope="module", params=["untied", "tied"])
def adapter(request, pair, corpus, tmp_path_factory) -> tuple[Path, Path]:
    """Return a model and a trained adapter of it."""
    pytest.importorskip("peft")
    folder, model = tmp_path_factory.mktemp("adapters"), pair.student if request.param == "untied" else pair.teacher
    arguments = ("--loss", "ce", "--lora-r", 4, "--learning-rate", 0.01, "--max-steps", 2)
    run_xtk("distill", model, corpus, *arguments, "-o", folder / "run")
    return model, folder / "run" / "adapter"


def test_adapters_with_missing_or_invalid_weights_are_refused(adapter, tmp_path):
    model, intact = adapter
    file = "adapter_model.safetensors"
    check_loadable(ModelRef(model, adapter=intact), Tokenizer(model))
    load_causal_lm(ModelRef(model, adapter=intact))
    weight_name = next(name for name in load_file(intact / file) if "layers.1.mlp" in name and "lora_B" in name)

    def reshape(weights: Weights) -> None:
        weights[weight_name] = torch.ones(3, 3)

    def spoil(weights: Weights) -> None:
        weights[weight_name][:] = float("nan")

    incomplete = copy_with_change(intact, tmp_path / "lost", without("layers.1.mlp"), file)
    reshaped = copy_with_change(intact, tmp_path / "other", reshape, file)
    spoiled = copy_with_change(intact, tmp_path / "spoiled", spoil, file)
    assert (
        "the model's files lack 6 of its weights: base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
        in load_error(model, adapter=incomplete)
    )
    assert weight_name.removesuffix(".weight") in load_error(model, adapter=reshaped)
    assert "NaN or infinite" in load_error(model, adapter=spoiled)
    for broken in (incomplete, reshaped):
        with pytest.raises(XtkError):
            check_loadable(ModelRef(model, adapter=broken), Tokenizer(model))


def test_commands_refuse_an_adapter_with_missing_weights(adapter, corpus, tmp_path):
    _, intact = adapter
    incomplete = copy_with_change(intact, tmp_path / "lost", without("layers.1.mlp"), "adapter_model.safetensors")
    for arguments in (
        ["evaluate", incomplete, corpus],
        ["distill", incomplete, corpus, "--loss", "ce", "-o", tmp_path / "out"],
    ):
        result = run_xtk(*arguments, code=1)
        assert "the model's files lack 6 of its weights: base_model" in result.stderr


@pytest.mark.parametrize("attack", ["none", "pickle", "fifo"])
def test_adapter_is_checked_before_peft_reads_it(adapter, corpus, tmp_path, attack):
    broken = Path(shutil.copytree(adapter[1], tmp_path / "broken"))
    weights = broken / "adapter_model.safetensors"
    weights.unlink()
    if attack == "pickle":
        (broken / "adapter_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    if attack == "fifo":
        os.mkfifo(weights)
    result = run_xtk("distill", broken, corpus, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "out", code=1)
    message = "the folder of the adapter has no file adapter_model.safetensors"
    assert ("must be a regular file" if attack == "fifo" else message) in result.stderr
    assert "Traceback" not in result.stderr
