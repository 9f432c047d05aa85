"""Files that lack weights, hold others or hold no numbers: refused by their names, never filled with random numbers."""

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
from xtk.rollouts.transformers_generator import TransformersGenerator
from xtk.tokens.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

Weights = dict[str, Tensor]
LAYER = "model.layers.1.mlp."
MISSING = "the model's files lack 3 of its weights: model.layers.1.mlp.down_proj.weight"


def changed(model: Path, folder: Path, change: Callable[[Weights], object], file: str = "model.safetensors") -> Path:
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


def refusal(model: Path, **options: object) -> str:
    with pytest.raises(XtkError) as refused:
        load_causal_lm(model, **options)
    return str(refused.value)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", sentences(4, seed=7))


@pytest.mark.parametrize("command", ["cache-teacher", "distill", "live teacher", "evaluate", "rollout", "doctor"])
def test_every_command_refuses_a_model_without_some_of_its_weights(command, pair, corpus, cache, prompts, tmp_path):
    teacher = command in ("cache-teacher", "live teacher")
    broken = changed(pair.teacher if teacher else pair.student, tmp_path / "broken", without(LAYER))
    arguments = {
        "cache-teacher": ["cache-teacher", broken, corpus, "-o"],
        "distill": ["distill", broken, corpus, "--loss", "ce", "-o"],
        "live teacher": ["distill", pair.student, corpus, "--teacher", broken, "-o"],
        "evaluate": ["evaluate", broken, corpus],
        "rollout": ["rollout", broken, prompts, "--max-completion-length", 4, "-o"],
        "doctor": ["doctor", broken, pair.teacher, cache, "-o"],
    }[command]
    done = run_xtk(
        *arguments, *{"evaluate": [], "rollout": [tmp_path / "out.jsonl"]}.get(command, [tmp_path / "out"]), code=1
    )
    assert MISSING.removeprefix("missing ").split(": ")[1] in (done.stdout if command == "doctor" else done.stderr)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "xtk.json").exists()


def test_a_finished_run_that_lost_weights_is_not_exported(pair, corpus, tmp_path):
    run_xtk("distill", pair.teacher, corpus, "--loss", "ce", "--max-steps", 2, "-o", tmp_path / "run")
    weights = load_file(tmp_path / "run" / "model.safetensors")
    without(LAYER)(weights)
    save_file(weights, tmp_path / "run" / "model.safetensors", metadata={"format": "pt"})
    done = run_xtk("export", tmp_path / "run", "-o", tmp_path / "out", code=1)
    assert "according to the manifest" in done.stderr  # sizes are compared before weights are loaded
    assert not (tmp_path / "out").exists()


def test_a_run_does_not_go_on_from_a_checkpoint_that_lost_weights(pair, corpus, tmp_path):
    arguments = ["distill", pair.teacher, corpus, "--loss", "ce", "--max-steps", 3, "--save-steps", 1, "-o", "run"]
    run_xtk(*arguments, "--max-seconds", 0.001, cwd=tmp_path, code=75)
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    weights = load_file(checkpoint / "model.safetensors")
    without(LAYER)(weights)
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    done = run_xtk(*arguments, cwd=tmp_path, code=None)
    if done.returncode:  # or the run took an earlier state, and said so
        assert "the model's files lack 3 of its weights" in done.stderr or checkpoint.name in done.stderr
    else:
        assert checkpoint.name in done.stderr


# --- which weights may be left out


def test_a_tied_head_may_be_left_out_or_stored_twice(pair, tmp_path):
    ids = torch.arange(3, 40)[None]
    expected = load_causal_lm(pair.teacher)(ids).logits
    assert "lm_head.weight" not in load_file(pair.teacher / "model.safetensors")
    twice = changed(
        pair.teacher,
        tmp_path / "twice",
        lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}),
    )
    assert torch.equal(load_causal_lm(twice)(ids).logits, expected)
    check_loadable(pair.teacher, Tokenizer(pair.teacher))
    check_loadable(twice, Tokenizer(twice))


def test_a_head_that_the_configuration_contradicts_is_used_with_a_line_and_stays(pair, corpus, tmp_path):
    assert json.loads((pair.teacher / "config.json").read_text())["tie_word_embeddings"]
    ids = torch.arange(3, 40)[None]
    other = changed(
        pair.teacher,
        tmp_path / "other",
        lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].flip(0).contiguous()}),
    )
    trained = run_xtk("distill", other, corpus, "--loss", "ce", "--max-steps", 1, "--learning-rate", 0, "-o", "run",
                      cwd=tmp_path)  # fmt: skip
    assert trained.stderr.count("tie_word_embeddings true, but the weights contain a separate output") == 1
    run_xtk("export", tmp_path / "run", "-o", tmp_path / "exported")
    expected = load_causal_lm(other)(ids).logits
    assert not torch.equal(expected, load_causal_lm(pair.teacher)(ids).logits)
    for folder in (tmp_path / "run", tmp_path / "exported"):
        assert not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
        assert torch.allclose(load_causal_lm(folder)(ids).logits, expected, atol=1e-5)


def test_a_head_or_an_embedding_that_is_not_tied_may_not(pair, tmp_path):
    headless = changed(pair.student, tmp_path / "headless", without("lm_head"))
    assert "the model's files lack 1 of its weights: lm_head.weight" in refusal(headless)
    with pytest.raises(XtkError, match=r"the model's files lack 1 of its weights: lm_head.weight"):
        check_loadable(headless, Tokenizer(headless))
    for number, model in enumerate((pair.student, pair.teacher)):
        blind = changed(model, tmp_path / f"blind-{number}", without("embed_tokens"))
        assert "of its weights: " in refusal(blind)


def test_weights_that_the_model_does_not_use_are_one_line_and_change_nothing(pair, corpus, tmp_path):
    more = changed(
        pair.teacher,
        tmp_path / "more",
        lambda weights: weights.update({f"vision.layers.{n}.weight": torch.ones(2) for n in range(5)}),
    )
    tables = [run_xtk("evaluate", model, corpus) for model in (pair.teacher, more)]
    assert "the model does not use 5 weights (vision.layers.0.weight, " in tables[1].stderr
    assert tables[1].stderr.count("does not use") == 1
    assert "does not use" not in tables[0].stderr
    assert tables[0].stdout.replace(str(pair.teacher), "") == tables[1].stdout.replace(str(more), "")


def test_weights_of_another_shape_are_refused_with_both_shapes(pair, tmp_path):
    def change(weights: Weights) -> None:
        weights["model.layers.0.mlp.up_proj.weight"] = torch.ones(7, 32)

    told = refusal(changed(pair.student, tmp_path / "other", change))
    assert "model.layers.0.mlp.up_proj.weight [7, 32] instead of [64, 32]" in told


def test_weights_that_are_not_finite_are_refused(pair, tmp_path):
    for number, value in enumerate((float("nan"), float("inf"), -float("inf"))):

        def change(weights: Weights, value: float = value) -> None:
            weights["model.layers.1.mlp.up_proj.weight"][5, 7] = value

        told = refusal(changed(pair.student, tmp_path / str(number), change))
        assert (
            "the model has weights that are NaN or infinite in float32: 1 (model.layers.1.mlp.up_proj.weight)" in told
        )

    def large(weights: Weights) -> None:
        weights["lm_head.weight"][3, 4] = 1e6

    told = refusal(changed(pair.student, tmp_path / "large", large), dtype=torch.float16)
    assert "in float16: 1 (lm_head.weight)" in told
    assert "--dtype bfloat16" in told


# --- shards


@pytest.fixture(scope="module")
def sharded(pair, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sharded") / "model"
    shutil.copytree(pair.student, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    load_causal_lm(pair.student).save_pretrained(folder, max_shard_size="60KB")
    return folder


def test_shards_that_are_not_there_are_named(sharded, pair, cache, tmp_path):
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    assert len(sorted(folder.glob("*.safetensors"))) > 2
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    assert (
        f"1 of {len(list(folder.glob('*.safetensors'))) + 1} weight files in the index do not exist: {lost.name}"
        in refusal(folder)
    )
    done = run_xtk("doctor", folder, pair.teacher, cache, code=1)
    assert f"1 of 3 weight files in the index do not exist: {lost.name}" in done.stdout or lost.name in done.stdout


def test_an_index_names_files_of_its_own_folder(sharded, tmp_path):
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    path = folder / "model.safetensors.index.json"
    for named in ("../secret.safetensors", "/etc/hostname", "a/b.safetensors"):
        index = json.loads(path.read_text())
        index["weight_map"]["lm_head.weight"] = named
        path.write_text(json.dumps(index))
        assert f"a path outside of the model folder: '{named}'" in refusal(folder)
    for content in ("[]", '{"weight_map": 5}', '{"weight_map": null}', "[" * 10_000, "{"):
        path.write_text(content)
        assert "the index of the model's weight files is not valid" in refusal(folder)


@pytest.mark.parametrize(
    "header",
    [b"", b"\x00" * 7, b"[]", b'{"a": 5}', b'{"a": {"dtype": "F32", "shape": 5, "data_offsets": [0, 4]}}', b"[" * 9999],
)
def test_headers_that_cannot_be_read_end_in_a_sentence(header, pair, tmp_path):
    folder = Path(shutil.copytree(pair.student, tmp_path / "model"))
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(XtkError, match="the weight file cannot be read"):
        check_loadable(folder, Tokenizer(folder))
    assert "cannot be read" in refusal(folder)


# --- adapters


@pytest.fixture(scope="module", params=["untied", "tied"])
def adapter(request, pair, corpus, tmp_path_factory) -> tuple[Path, Path]:
    """A model, and an adapter of it that has learned something."""
    pytest.importorskip("peft")
    folder, model = tmp_path_factory.mktemp("adapters"), pair.student if request.param == "untied" else pair.teacher
    arguments = ("--loss", "ce", "--lora-r", 4, "--learning-rate", 0.01, "--max-steps", 2)
    run_xtk("distill", model, corpus, *arguments, "-o", folder / "run")
    return model, folder / "run" / "adapter"


def test_adapters_are_loaded_whole_or_not_at_all(adapter, tmp_path):
    model, whole = adapter
    file = "adapter_model.safetensors"
    check_loadable(model, Tokenizer(model), adapter=whole)
    load_causal_lm(model, adapter=whole)
    some = next(name for name in load_file(whole / file) if "layers.1.mlp" in name and "lora_B" in name)

    def reshape(weights: Weights) -> None:
        weights[some] = torch.ones(3, 3)

    def spoil(weights: Weights) -> None:
        weights[some][:] = float("nan")

    lost = changed(whole, tmp_path / "lost", without("layers.1.mlp"), file)
    other = changed(whole, tmp_path / "other", reshape, file)
    spoiled = changed(whole, tmp_path / "spoiled", spoil, file)
    assert (
        "the model's files lack 6 of its weights: base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
        in refusal(model, adapter=lost)
    )
    assert some.removesuffix(".weight") in refusal(model, adapter=other)
    assert "NaN or infinite" in refusal(model, adapter=spoiled)
    for broken in (lost, other):
        with pytest.raises(XtkError):
            check_loadable(model, Tokenizer(model), adapter=broken)


def test_commands_refuse_an_adapter_without_some_of_its_weights(adapter, corpus, tmp_path):
    _, whole = adapter
    lost = changed(whole, tmp_path / "lost", without("layers.1.mlp"), "adapter_model.safetensors")
    for arguments in (["evaluate", lost, corpus], ["distill", lost, corpus, "--loss", "ce", "-o", tmp_path / "out"]):
        done = run_xtk(*arguments, code=1)
        assert "the model's files lack 6 of its weights: base_model" in done.stderr


# --- live weights


def test_new_weights_of_a_generator_are_all_of_them(pair):
    for model in (pair.student, pair.teacher):
        writer = TransformersGenerator(load_causal_lm(model), Tokenizer(model))
        new = load_file(model / "model.safetensors")
        writer.update_weights(new.items())  # a tied head is not among them
        without(LAYER)(new)
        with pytest.raises(XtkError, match=r"the new weights lack 3 of the model's weights: model.layers.1.mlp"):
            writer.update_weights(new.items())


@pytest.mark.parametrize("attack", ["none", "pickle", "fifo", "rank", "pattern"])
def test_an_adapter_is_checked_before_peft_reads_it(adapter, corpus, tmp_path, attack):
    broken = Path(shutil.copytree(adapter[1], tmp_path / "broken"))
    weights, configuration = broken / "adapter_model.safetensors", broken / "adapter_config.json"
    described = json.loads(configuration.read_text())
    if attack in ("rank", "pattern"):
        key = {"r": 2_000_000} if attack == "rank" else {"rank_pattern": {"q_proj": 2_000_000}}
        configuration.write_text(json.dumps({**described, **key}))
    else:
        weights.unlink()
    if attack == "pickle":
        (broken / "adapter_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    if attack == "fifo":
        os.mkfifo(weights)
    done = run_xtk("distill", broken, corpus, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "out", code=1)
    told = "adapter_config.json has rank 2,000,000, but the largest rank of its weights is"
    told = told if attack in ("rank", "pattern") else "the folder of the adapter has no file adapter_model.safetensors"
    assert ("must be a regular file" if attack == "fifo" else told) in done.stderr
    assert "Traceback" not in done.stderr
