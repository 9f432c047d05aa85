"""The Python API in a plain training loop: same loss and gradients as the first steps of `xtk distill`."""

from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
import re
import runpy
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from recorded_training_steps import make_train_config, open_run_inputs, record_steps
from small_inputs import sentences, write_jsonl
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer

import xtk
from xtk.batches.micro_batches import BatchSampler
from xtk.errors import MismatchError

DOCUMENTS = 24
LOSSES = {
    "default": ["ce:weight=0.3", "byte-kl"],
    "projection": ["ce", "p-kl:weight=2"],
    "spans": ["alm", "ce:weight=0.5"],
    "boundaries": ["boundary-kl:divergence=jsd,temperature=2"],
}


@pytest.fixture(scope="module")
def cache(run, pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("caches")
    data = write_jsonl(folder / "data.jsonl", sentences(DOCUMENTS, seed=7))
    run("cache-teacher", pair.teacher, data, "--top-k", 8, "-o", folder / "cache")
    return folder / "cache"


def command_steps(pair, cache, losses, batch, documents):
    recipe = make_train_config(losses, batch=batch)
    inputs = open_run_inputs(pair.student, [cache], recipe)
    gradients, metrics = record_steps(Accelerator(cpu=True), pair.student, inputs, recipe, documents)
    sampler = BatchSampler(np.arange(len(inputs.source)), inputs.source.text_bytes(), documents, recipe.seed)
    return gradients, metrics, [sampler.micro_batches_of_rank(step, 0, 1, batch) for step in range(2)]


def gradients_of(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def largest_difference(found, expected, step):
    return max(
        float((found[name] - expected[f"{step}.{name}"]).abs().max() / expected[f"{step}.{name}"].abs().max())
        for name in found
    )


@pytest.mark.slow
def test_documents_with_other_values_of_sampled_tokens_are_refused(run, pair, cache, tmp_path):
    run("cache-teacher", pair.teacher, cache.parent / "data.jsonl", "-o", tmp_path / "samples")
    collator = xtk.DistillationCollator(pair.student, tmp_path / "samples", xtk.DistillationLoss("byte-kl"))
    with pytest.raises(MismatchError, match="top-k without log-probabilities of samples"):
        collator([xtk.TeacherCache(cache)[0]])
    document = xtk.TeacherCache(tmp_path / "samples")[0]
    collator([document])
    document.header["codec"].pop("sample_logprobs")  # as in caches from before 29 November 2026
    with pytest.raises(MismatchError, match=r"top-k\+sample without log-probabilities of samples"):
        collator([document])


@pytest.mark.slow
@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("input_form", ["states", "model", "logits", "packed"])
def test_loss_and_gradient_equal_those_of_the_command(pair, cache, losses, input_form):
    expected, metrics, steps = command_steps(pair, cache, losses, 3, 8)
    model = AutoModelForCausalLM.from_pretrained(pair.student)
    loss = xtk.DistillationLoss(*losses)
    collator = xtk.DistillationCollator(
        AutoTokenizer.from_pretrained(pair.student), cache, loss, packing=input_form == "packed"
    )
    for step, groups in enumerate(steps):
        batches = [collator(group) for group in groups]
        num_items = loss.num_items(batches)
        total = 0.0
        model.zero_grad()
        for batch in batches:
            if input_form == "logits":
                value = loss(logits=model(**batch.model_inputs).logits, batch=batch, num_items_in_batch=num_items)
            else:
                states = model.model(**batch.model_inputs).last_hidden_state
                head = model if input_form == "model" else model.lm_head
                value = loss(states, head, batch, num_items_in_batch=num_items)
            value.backward()
            total += value.item()
        assert total == pytest.approx(metrics["losses"][step]["loss"], rel=1e-5)
        assert largest_difference(gradients_of(model), expected, step) < 1e-5


def test_labels_are_the_trained_tokens(pair, cache):
    loss = xtk.DistillationLoss("ce")
    collator = xtk.DistillationCollator(pair.student, cache, loss)
    batch = collator([0, 1, 5])
    model = AutoModelForCausalLM.from_pretrained(pair.student)
    with torch.no_grad():
        model_loss = model(**batch.model_inputs, labels=batch["labels"]).loss
        xtk_loss = loss(logits=model(**batch.model_inputs).logits, batch=batch)
    assert float(xtk_loss) == pytest.approx(float(model_loss), rel=1e-5)
    assert batch["attention_mask"].sum() == batch["teacher"].tokens


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        tensors = result if isinstance(result, tuple | list) else [result]
        self.numel = max([self.numel, *(tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor))])
        return result


@pytest.mark.slow
def test_no_tensor_of_the_loss_has_all_logits(pair, cache, monkeypatch):
    chunk, width = 16, 656
    monkeypatch.setattr("xtk.losses.head.chunk_rows_of", lambda head, states: chunk)
    loss = xtk.DistillationLoss("ce:weight=0.3", "byte-kl")
    collator = xtk.DistillationCollator(pair.student, cache, loss)
    head = torch.nn.Linear(8, width, bias=False)
    for documents in (4, DOCUMENTS):
        batch = collator(range(documents))
        states = torch.randn(*batch["input_ids"].shape, 8, requires_grad=True)
        with LargestTensor() as largest:
            loss(states, head, batch).backward()
        rows = len(batch["teacher"].loss_positions)
        assert largest.numel <= max(chunk * width, states.numel())
        assert rows * width > 4 * largest.numel or documents == 4


@pytest.mark.parametrize("max_length", [0, 1, -1])
def test_max_length_that_keeps_no_trained_token_is_refused(pair, cache, max_length):
    loss = xtk.DistillationLoss("ce")
    with pytest.raises(xtk.XtkError, match=f"max_length is {max_length}, but must be at least 2, or None"):
        xtk.DistillationCollator(pair.student, cache, loss, max_length=max_length)


def test_num_items_of_anything_but_batches_is_refused(pair, cache):
    loss = xtk.DistillationLoss("ce")
    collator = xtk.DistillationCollator(pair.student, cache, loss)
    batch = collator([0, 1])
    assert torch.equal(loss.num_items(batch), loss.num_items([batch]))
    for invalid in ([], [{"input_ids": batch["input_ids"]}]):
        with pytest.raises(xtk.XtkError, match="num_items needs the batches"):
            loss.num_items(invalid)
    states = torch.zeros(*batch["input_ids"].shape, 8)
    for number in (torch.ones(3), torch.tensor(17), 17):
        with pytest.raises(xtk.XtkError, match="num_items_in_batch has the shape"):
            loss(states, torch.nn.Linear(8, 5000), batch, num_items_in_batch=number)


@pytest.mark.parametrize("number", [1.7, 1.0, True, "2", None, -100, 10**6, np.float32(1)])
def test_what_is_not_the_number_of_a_document_is_refused(pair, cache, number):
    collator = xtk.DistillationCollator(pair.student, cache, xtk.DistillationLoss("ce"))
    with pytest.raises(xtk.XtkError, match="is not the index of a document in this cache"):
        collator([0, {"document": number}])
    for valid in (1, np.int64(1), np.uint8(1), torch.tensor(1)):
        assert torch.equal(collator([valid])["input_ids"], collator([1])["input_ids"])


@pytest.mark.parametrize("packing", [False, True])
def test_batch_is_pickled_without_tensors(pair, cache, packing):
    loss = xtk.DistillationLoss("ce", "byte-kl")
    collator = xtk.DistillationCollator(pair.student, cache, loss, packing=packing)
    batch = collator([0, 1, 2])
    received = pickle.loads(pickle.dumps(batch))
    assert received.keys() == batch.keys()
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(received[name], batch[name])
    for received_cells, original_cells in zip(received["teacher"].cells, batch["teacher"].cells, strict=True):
        for field in dataclasses.fields(received_cells):
            received_value, original_value = getattr(received_cells, field.name), getattr(original_cells, field.name)
            if isinstance(received_value, torch.Tensor):
                assert received_value.dtype == original_value.dtype
                assert torch.equal(received_value, original_value)
    assert b"rebuild_tensor" in pickle.dumps(batch["input_ids"])
    assert b"rebuild_tensor" not in pickle.dumps(batch)


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/python.md"])
def test_first_python_block_of_a_page_trains(pair, cache, tmp_path, monkeypatch, page):
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    block = tmp_path / "block.py"
    block.write_text(re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1], encoding="utf-8")
    (tmp_path / "quickstart").mkdir()
    for name, target in (("student", pair.student), ("cache", cache)):
        (tmp_path / name).symlink_to(target)
        (tmp_path / "quickstart" / {"student": "student-0"}.get(name, name)).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    student = runpy.run_path(str(block))["student"]
    before = AutoModelForCausalLM.from_pretrained(pair.student).state_dict()
    assert any(not torch.equal(weights, before[name]) for name, weights in student.state_dict().items())
    assert all(torch.isfinite(weights).all() for weights in student.state_dict().values())


def run_block_with_ddp(rank: int, port: int, student: Path, cache: Path, block: str, results: Any) -> None:
    """Run in a process of its own: put the gradients after the page's block, for one of two batches, into a queue."""
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model, loss, batches = model_loss_and_batches(student, cache)
    names = {"torch": torch, "student": model, "loss": loss, "num_items": loss.num_items(batches)}
    exec(block, names | {"micro_batches": batches[rank : rank + 1]})
    results.put({name: gradient.numpy() for name, gradient in gradients_of(model).items()})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def model_loss_and_batches(student: Path, cache: Path) -> tuple[Any, xtk.DistillationLoss, list[Any]]:
    loss = xtk.DistillationLoss("ce:weight=0.3", "byte-kl")
    stored = xtk.TeacherCache(cache)
    collator = xtk.DistillationCollator(AutoTokenizer.from_pretrained(student), stored, loss)
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    return model, loss, [collator([stored[number] for number in numbers]) for numbers in ((0, 1), (2, 3, 4))]


@pytest.mark.slow
def test_block_of_the_page_for_several_processes_has_the_gradients_of_one_process(pair, cache):
    text = (Path(__file__).parents[2] / "docs/how-to/python.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```python\n(class StudentWithLoss.*?)^```$", text, re.MULTILINE | re.DOTALL)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=run_block_with_ddp, args=(rank, port, pair.student, cache, block, results))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    model, loss, batches = model_loss_and_batches(pair.student, cache)
    num_items = loss.num_items(batches)
    for batch in batches:
        hidden_states = model.model(**batch.model_inputs).last_hidden_state
        loss(hidden_states, model.lm_head, batch, num_items_in_batch=num_items).backward()
    for name, expected in gradients_of(model).items():
        for gradients in found:
            torch.testing.assert_close(torch.from_numpy(gradients[name]), expected, rtol=1e-4, atol=1e-7)
