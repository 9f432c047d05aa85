"""DistillationTrainer: the gradients of `xtk distill`, in the Trainer's own loop."""

from __future__ import annotations

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch
from recorded_training_steps import GradientRecorder
from small_inputs import sentences, write_jsonl
from trainer_gradients import BATCH, LOSSES, arguments, command_gradients, largest_difference
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import xtk
from xtk.integrations.transformers import DistillationTrainer

ACCUMULATION = 2


@pytest.fixture(scope="module")
def cache(run, pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("caches")
    data = write_jsonl(folder / "data.jsonl", sentences(BATCH * ACCUMULATION * 2, seed=7))
    run("cache-teacher", pair.teacher, data, "-o", folder / "cache")
    return folder / "cache"


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_trainer_has_the_losses_and_gradients_of_the_command(pair, cache, tmp_path, packing):
    expected, metrics = command_gradients(pair, cache, ACCUMULATION)
    model = AutoModelForCausalLM.from_pretrained(pair.student)
    collator = xtk.DistillationCollator(
        AutoTokenizer.from_pretrained(pair.student), cache, xtk.DistillationLoss(*LOSSES), packing=packing
    )
    recorder = GradientRecorder(model)
    trainer = DistillationTrainer(
        model, arguments(tmp_path, gradient_accumulation_steps=ACCUMULATION), data_collator=collator,
        train_dataset=xtk.TeacherCache(cache), optimizers=(recorder, None),
    )  # fmt: skip
    trainer.train()
    assert largest_difference(recorder.gradients, expected) < 1e-5
    logged = [line for line in trainer.state.log_history if "loss/byte-kl" in line]
    for step, line in zip(metrics["losses"], logged, strict=True):
        assert line["loss"] == pytest.approx(step["loss"], rel=2e-4)  # the Trainer rounds to four digits
        assert line["loss/byte-kl"] == pytest.approx(step["byte-kl"], rel=1e-5)
        assert line["loss/ce"] == pytest.approx(step["ce"], rel=1e-5)


def test_evaluation_reports_the_loss_of_held_out_documents(pair, cache, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(pair.student)
    loss = xtk.DistillationLoss(*LOSSES)
    collator = xtk.DistillationCollator(pair.student, cache, loss)
    held_out = xtk.TeacherCache(cache)
    trainer = DistillationTrainer(
        model, arguments(tmp_path, per_device_eval_batch_size=16), data_collator=collator, train_dataset=held_out,
        eval_dataset=held_out,
    )  # fmt: skip
    batch = collator(list(held_out))
    with torch.no_grad():
        expected = loss(logits=model(**batch.model_inputs).logits, batch=batch)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
def test_trainer_run_resumes_exactly(pair, cache, tmp_path):
    def train(folder, **train_options):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(pair.student)
        tokenizer = AutoTokenizer.from_pretrained(pair.student)
        collator = xtk.DistillationCollator(tokenizer, cache, xtk.DistillationLoss(*LOSSES))
        options = arguments(folder).to_dict() | {
            "save_strategy": "steps", "save_steps": 2, "max_steps": 4, "train_sampling_strategy": "random",
        }  # fmt: skip
        trainer = DistillationTrainer(
            model, TrainingArguments(**options), data_collator=collator, train_dataset=xtk.TeacherCache(cache)
        )
        trainer.train(**train_options)
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    uninterrupted = train(tmp_path)
    resumed = train(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(resumed[name], value) for name, value in uninterrupted.items())


def test_invalid_arguments_are_refused(pair, cache, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(pair.student)
    loss = xtk.DistillationLoss(*LOSSES)
    collator = xtk.DistillationCollator(pair.student, cache, loss)
    with pytest.raises(xtk.XtkError, match="must be a DistillationCollator"):
        DistillationTrainer(model, arguments(tmp_path), train_dataset=xtk.TeacherCache(cache))
    assert np.isfinite(float(loss(logits=torch.randn(1, 400, 656)[:, : collator([0])["input_ids"].shape[1]],
                                  batch=collator([0]))))  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning")  # raised by transformers, in peft
def test_trainer_trains_adapters_only(pair, cache, tmp_path):
    """The loss of the first step is that of the base model, and only the adapters change."""
    from peft import LoraConfig, get_peft_model

    _, metrics = command_gradients(pair, cache, 1)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(pair.student),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM"),
    )
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    collator = xtk.DistillationCollator(pair.student, cache, xtk.DistillationLoss(*LOSSES))
    trainer = DistillationTrainer(
        model, arguments(tmp_path), data_collator=collator, train_dataset=xtk.TeacherCache(cache)
    )
    trainer.train()
    first_record = next(line for line in trainer.state.log_history if "loss/byte-kl" in line)
    assert first_record["loss/byte-kl"] == pytest.approx(metrics["losses"][0]["byte-kl"], rel=1e-5)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, initial[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    assert any("lm_head" in name for name in changed)


def test_trainer_with_mixed_precision_has_about_the_same_loss(pair, cache, tmp_path):
    _, metrics = command_gradients(pair, cache, 1)
    model = AutoModelForCausalLM.from_pretrained(pair.student)
    collator = xtk.DistillationCollator(pair.student, cache, xtk.DistillationLoss(*LOSSES))
    trainer = DistillationTrainer(
        model, arguments(tmp_path, bf16=True), data_collator=collator, train_dataset=xtk.TeacherCache(cache)
    )
    trainer.train()
    first_record = next(line for line in trainer.state.log_history if "loss/byte-kl" in line)
    assert first_record["loss/byte-kl"] == pytest.approx(metrics["losses"][0]["byte-kl"], rel=2e-2)
    assert first_record["loss/byte-kl"] != metrics["losses"][0]["byte-kl"]


def test_copy_of_the_student_uses_its_own_weights_and_generates(pair, cache, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(pair.student).eval()
    plain_model = copy.deepcopy(model)
    collator = xtk.DistillationCollator(pair.student, cache, xtk.DistillationLoss(*LOSSES))
    trainer = DistillationTrainer(
        model, arguments(tmp_path), data_collator=collator, train_dataset=xtk.TeacherCache(cache)
    )
    batch = trainer._prepare_inputs(collator(list(xtk.TeacherCache(cache))[:2]))
    loss_before = trainer.compute_loss(model, batch)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        assert float(copied(batch["input_ids"]).logits.detach().abs().max()) == 0
        assert trainer.compute_loss(copied, batch) != loss_before
    assert trainer.compute_loss(model, batch) == loss_before
    ids = batch["input_ids"][:, :4]
    generated = model.generate(ids, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(ids))
    assert torch.equal(generated, plain_model.generate(ids, max_new_tokens=4, do_sample=False))
    assert inspect.signature(model.forward) == inspect.signature(plain_model.forward)
    with pytest.raises(ValueError, match="not_an_argument"):
        model.generate(ids, max_new_tokens=1, not_an_argument=1)
