"""Teacher caches in Python: from a loaded model, from arrays of another program, and reading."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
import subprocess
import sys

import datasets
import numpy as np
import pandas
import peft
import pytest
import small_inputs
import torch
from small_inputs import sentences, write_jsonl
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import xtk
from xtk.cache.statistics import sample_positions, summarize_cache
from xtk.models import precision

TEXTS = sentences(12, seed=3)


@pytest.fixture(scope="module")
def teacher(pair):
    return AutoModelForCausalLM.from_pretrained(pair.teacher, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(pair):
    return AutoTokenizer.from_pretrained(pair.teacher)


def all_logprobs(cache):
    return [cache.logprobs(number) for number in range(len(cache))]


def assert_equal_caches(found, expected, tolerance=0.0):
    assert len(found) == len(expected)
    for a, b in zip(all_logprobs(found), all_logprobs(expected), strict=True):
        assert np.array_equal(a.ids, b.ids)
        assert np.array_equal(a.offsets, b.offsets)
        assert np.allclose(a.logprobs, b.logprobs, atol=tolerance, rtol=0)
        assert np.allclose(a.observed_logprobs, b.observed_logprobs, atol=tolerance, rtol=0)


def stored_entries(cache):
    """Return a set of (document, offset of the position, id, log-probability)."""
    return {
        (number, position, token, round(float(logprob), 3))
        for number, stored in enumerate(all_logprobs(cache))
        for position in range(len(stored.offsets) - 1)
        for token, logprob in zip(
            stored.ids[stored.offsets[position] : stored.offsets[position + 1]],
            stored.logprobs[stored.offsets[position] : stored.offsets[position + 1]],
            strict=True,
        )
    }


def share_of_equal_entries(found, expected):
    found, expected = stored_entries(found), stored_entries(expected)
    return len(found & expected) / max(len(found), len(expected))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["datasets", "texts", "records"])
def test_cache_of_a_loaded_model_equals_that_of_the_command(run, pair, tokenizer, tmp_path, form):
    data = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    run("cache-teacher", pair.teacher, data, "-o", tmp_path / "command")
    forms = {"datasets": datasets.Dataset.from_dict({"text": TEXTS}), "texts": TEXTS,
             "records": [{"text": text} for text in TEXTS]}  # fmt: skip
    teacher = AutoModelForCausalLM.from_pretrained(pair.teacher, dtype=torch.float32).train()
    for layer in teacher.model.layers:
        layer.self_attn.attention_dropout = 0.5  # only in training mode
    cache = xtk.cache_teacher(teacher, forms[form], tmp_path / "python", tokenizer=tokenizer)
    assert teacher.training
    assert_equal_caches(cache, xtk.TeacherCache(tmp_path / "command"))
    assert [row.document.text for row in cache] == TEXTS


def test_folder_is_scored_in_the_dtype_that_the_command_chooses(pair, tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(pair.teacher, dtype=torch.bfloat16)
    shutil.copytree(pair.teacher, tmp_path / "teacher")
    model.save_pretrained(tmp_path / "teacher")
    for has_gpu, dtype in ((False, "float32"), (True, "bfloat16")):
        monkeypatch.setattr(precision, "has_bf16_gpu", lambda has_gpu=has_gpu: has_gpu)
        cache = xtk.cache_teacher(tmp_path / "teacher", [{"text": "2010"}], tmp_path / dtype, top_k=2)
        assert cache.manifest["header"]["options"]["dtype"] == dtype


def test_refused_support_leaves_nothing_at_the_output(teacher, tokenizer, tmp_path):
    for data in (TEXTS, [{"text": text} for text in TEXTS]):
        with pytest.raises(xtk.XtkError, match="needs the column candidate_ids"):
            xtk.cache_teacher(teacher, data, tmp_path / "c", tokenizer=tokenizer, support="candidates")
        assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_finished_cache_is_reused_and_other_weights_are_refused(pair, tokenizer, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(pair.teacher, dtype=torch.float32)
    xtk.cache_teacher(model, TEXTS, tmp_path / "c", tokenizer=tokenizer, top_k=4)
    modified_ns = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "c").iterdir()}
    xtk.cache_teacher(model, TEXTS, tmp_path / "c", tokenizer=tokenizer, top_k=4)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "c").iterdir()} == modified_ns
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[-1, -1] += 0.5
    with pytest.raises(xtk.XtkError, match="different inputs or options"):
        xtk.cache_teacher(model, TEXTS, tmp_path / "c", tokenizer=tokenizer, top_k=4)
    changed = xtk.cache_teacher(model, TEXTS, tmp_path / "c", tokenizer=tokenizer, top_k=4, force=True)
    assert changed.header["teacher"]["weights"].startswith("loaded:sha256:")


@pytest.mark.parametrize("loaded", [True, False], ids=["model", "folder"])
def test_top_k_all_stores_the_whole_vocabulary(pair, tokenizer, tmp_path, loaded):
    model = AutoModelForCausalLM.from_pretrained(pair.teacher, dtype=torch.float32) if loaded else pair.teacher
    options = {"tokenizer": tokenizer} if loaded else {}
    cache = xtk.cache_teacher(model, TEXTS[:1], tmp_path / "c", top_k="all", **options)
    sizes = np.concatenate([np.diff(row.offsets) for row in all_logprobs(cache)])
    assert set(sizes.tolist()) == {AutoConfig.from_pretrained(pair.teacher).vocab_size}
    with pytest.raises(xtk.XtkError, match="top_k is 'most', but must be a number or 'all'"):
        xtk.cache_teacher(model, TEXTS[:1], tmp_path / "d", top_k="most", **options)


def test_model_object_without_tokenizer_is_refused(teacher, tmp_path):
    with pytest.raises(xtk.XtkError, match="needs the tokenizer"):
        xtk.cache_teacher(teacher, TEXTS, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def score(model, ids, positions, top_k):
    with torch.inference_mode():
        logprobs = model(torch.from_numpy(ids).long()[None]).logits[0].log_softmax(-1)[torch.from_numpy(positions) - 1]
    top = logprobs.topk(top_k)
    observed = logprobs.gather(1, torch.from_numpy(ids[positions]).long()[:, None])[:, 0]
    entropy = -(logprobs.exp() * logprobs).sum(1)
    return top.indices.numpy(), top.values.numpy(), observed.numpy(), entropy.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "prompt", "messages"])
def test_cache_of_arrays_equals_the_cache_of_the_model(run, pair, teacher, tmp_path, kind):
    records = {
        "text": [{"text": text} for text in TEXTS],
        "prompt": [{"prompt": text[:20], "completion": text[20:]} for text in TEXTS],
        "messages": [{"messages": [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text[20:]}]}
                     for text in TEXTS],
    }[kind]  # fmt: skip
    folder = pair.teacher
    if kind == "messages":
        import shutil

        folder = tmp_path / "chat"
        shutil.copytree(pair.teacher, folder)
        template = "{% for m in messages %}<|endoftext|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        (folder / "chat_template.jinja").write_text(template)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    run("cache-teacher", folder, data, "--top-k", 6, "--shard-tokens", 150, "--precision", "float32",
        "-o", tmp_path / "command")  # fmt: skip
    with xtk.CacheWriter(tmp_path / "arrays", folder, precision="float32", shard_tokens=150) as writer:
        for record in records:
            ids, positions = writer.tokenize(record)
            top_ids, top_logprobs, observed, entropy = score(teacher, ids, positions, 6)
            writer.add(record, top_ids, top_logprobs, observed, entropy=entropy)
    cache = xtk.TeacherCache(tmp_path / "arrays")
    cache.verify()
    assert len(cache.manifest["shards"]) > 1
    assert_equal_caches(cache, xtk.TeacherCache(tmp_path / "command"), tolerance=2e-5)
    loss = xtk.DistillationLoss("ce:weight=0.3", "byte-kl")
    if kind != "messages":  # the student has no chat template
        assert len(xtk.DistillationCollator(pair.student, cache, loss)([0, 1])["teacher"].cells) == 2


def test_failed_writer_writes_nothing_and_keeps_the_old_cache(pair, teacher, tmp_path):
    def write(texts, **options):
        with xtk.CacheWriter(tmp_path / "c", pair.teacher, **options) as writer:
            for text in texts:
                ids, positions = writer.tokenize(text)
                writer.add(text, *score(teacher, ids, positions, 4)[:3])
            if len(texts) == 1:
                raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        write(TEXTS[:1])
    assert not (tmp_path / "c").exists()
    write(TEXTS[:3])
    contents = {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()}
    with pytest.raises(xtk.XtkError, match="already contains a teacher cache"):
        write(TEXTS[:4])
    with pytest.raises(RuntimeError, match="stopped"):
        write(TEXTS[:1], force=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()} == contents
    write(TEXTS[:4], force=True)
    assert len(xtk.TeacherCache(tmp_path / "c")) == 4


def test_writer_can_be_closed_again_after_an_error(pair, teacher, tmp_path):
    folder = tmp_path / "c"
    writer = xtk.CacheWriter(folder, pair.teacher, shard_tokens=60)
    for text in TEXTS:
        writer.add(text, *score(teacher, *writer.tokenize(text), 4)[:3])
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(xtk.XtkError, match="files that xtk did not write"):
        writer.close()
    with pytest.raises(xtk.XtkError, match="this CacheWriter is closed"):
        writer.add(TEXTS[0], *score(teacher, *writer.tokenize(TEXTS[0]), 4)[:3])
    (folder / "notes.txt").unlink()
    cache = writer.close()
    cache.verify()
    assert [row.document.text for row in cache] == TEXTS


def test_caches_of_one_named_teacher_can_be_merged(run, pair, teacher, tmp_path):
    def write(name, texts, teacher_name):
        with xtk.CacheWriter(tmp_path / name, pair.teacher, name=teacher_name) as writer:
            for text in texts:
                writer.add(text, *score(teacher, *writer.tokenize(text), 4)[:3])
        return tmp_path / name

    parts = [write("a", TEXTS[:5], "org/Judge"), write("b", TEXTS[5:], "org/Judge")]
    run("cache", "merge", *parts, "-o", tmp_path / "whole")
    assert [row.document.text for row in xtk.TeacherCache(tmp_path / "whole")] == TEXTS
    assert xtk.TeacherCache(parts[0]).header["teacher"]["name"] == "org/Judge"
    others = [write("c", TEXTS[:5], "other"), write("d", TEXTS[:5], ""), write("e", TEXTS[5:], "")]
    for caches in ((parts[0], others[0]), (others[1], others[2])):
        result = run("cache", "merge", *caches, "-o", tmp_path / "no", code=1)
        assert "they differ in teacher" in result.stderr
    writer = xtk.CacheWriter(parts[0], pair.teacher, name="org/Judge", exist_ok=True)
    for text in TEXTS[:5]:
        ids, logprobs, observed, _ = score(teacher, *writer.tokenize(text), 4)
        writer.add(text, ids, logprobs - 0.01, observed - 0.01)
    with pytest.raises(xtk.XtkError, match="different inputs or options"):  # other values under the same name
        writer.close()


def pad_lists(ids, keep):
    """Return the listed ids with -1 after the first `keep[p]` of each position."""
    return np.where(np.arange(ids.shape[1])[None] < np.asarray(keep)[:, None], ids, -1)


@pytest.mark.parametrize(
    ("form", "num_listed", "expected"),
    [
        ("most likely", lambda number, is_top: 5, 5),
        ("most likely and observed", lambda number, is_top: 5 if is_top else 6, 5),
        ("different lengths", lambda number, is_top: 2 + number % 4, 2),
    ],
    ids=["most-likely", "most-likely-and-observed", "different-lengths"],
)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_top_k_of_a_written_cache_is_what_every_position_has(pair, teacher, tmp_path, form, num_listed, expected):
    num_outside = num_positions = 0
    with xtk.CacheWriter(tmp_path / "cache", pair.teacher, precision="float32") as writer:
        for text in TEXTS:
            ids, positions = writer.tokenize(text)
            top_ids, top_logprobs, observed, _ = score(teacher, ids, positions, 6)
            rank = (top_logprobs > observed[:, None]).sum(1)
            if form == "most likely and observed":
                top_ids[rank >= 5, 5], top_logprobs[rank >= 5, 5] = ids[positions][rank >= 5], observed[rank >= 5]
            keep = [num_listed(number, is_top) for number, is_top in enumerate(rank < 5)]
            writer.add(text, pad_lists(top_ids, keep), top_logprobs, observed)
            num_outside += int((rank >= expected).sum())
            num_positions += len(rank)
    cache = xtk.TeacherCache(tmp_path / "cache")
    assert cache.header["options"]["top_k"] == expected
    fraction = summarize_cache(cache, sample_positions(cache), len(cache))["observed_outside_top_k_fraction"]
    assert 0 < fraction == pytest.approx(num_outside / num_positions, abs=1e-3)


def test_vocabulary_at_some_positions_only_is_not_the_whole_support(pair, teacher, tmp_path):
    refused = []
    for name, few in (("all", 0), ("some", 2)):
        with xtk.CacheWriter(tmp_path / name, pair.teacher) as writer:
            ids, positions = writer.tokenize(TEXTS[0])
            top_ids, top_logprobs, observed, _ = score(teacher, ids, positions, teacher.config.vocab_size)
            keep = [few if few and number else top_ids.shape[1] for number in range(len(positions))]
            writer.add(TEXTS[0], pad_lists(top_ids, keep), top_logprobs, observed)
        try:
            loss = xtk.DistillationLoss("strict:divergence=reverse-kl")
            xtk.DistillationCollator(pair.teacher, tmp_path / name, loss)
        except xtk.XtkError as wrong:
            refused.append((name, wrong.what))
    assert [name for name, _ in refused] == ["some"]
    assert "which this support need not contain" in refused[0][1]


def test_top_k_of_a_writer_is_compared_with_the_lists(pair, teacher, tmp_path):
    writer = xtk.CacheWriter(tmp_path / "cache", pair.teacher, top_k=4)
    with pytest.raises(xtk.XtkError, match="a position has 3 of the 4 most likely ids"):
        writer.add(TEXTS[0], *score(teacher, *writer.tokenize(TEXTS[0]), 3)[:3])
    for options in ({"top_k": -1}, {"top_k": 4, "support": "candidates"}):
        with pytest.raises(xtk.XtkError, match="top_k"):
            xtk.CacheWriter(tmp_path / "cache", pair.teacher, **options)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda ids, logprobs, observed: (ids[:-1], logprobs[:-1], observed[:-1]),
            "trained teacher tokens, but the arrays",
        ),
        (lambda ids, logprobs, observed: (ids, logprobs + 8, observed), "above 0|sum to"),
        (lambda ids, logprobs, observed: (ids, logprobs * np.nan, observed), "NaN|finite"),
        (lambda ids, logprobs, observed: (ids + 100_000, logprobs, observed), "outside|vocabulary|at most|below"),
    ],
    ids=["shape", "mass", "nan", "ids"],
)
def test_invalid_distributions_are_refused(pair, teacher, tmp_path, change, message):
    with (  # noqa: PT012 (the writer's block ends with the error)
        pytest.raises(xtk.XtkError, match=message),
        xtk.CacheWriter(tmp_path / "c", pair.teacher) as writer,
    ):
        ids, positions = writer.tokenize(TEXTS[0])
        writer.add(TEXTS[0], *change(*score(teacher, ids, positions, 4)[:3]))
    assert not (tmp_path / "c").exists()


def test_arrays_shifted_by_one_position_are_refused(pair, teacher, tmp_path):
    """Shifted arrays are valid distributions; their probability of the observed token reveals the shift."""
    writer = xtk.CacheWriter(tmp_path / "c", pair.teacher)
    ids, positions = writer.tokenize(TEXTS[0])
    top_ids, logprobs, observed, _ = score(teacher, ids, positions, 400)
    with pytest.raises(xtk.XtkError, match=r"the observed token has the log-probability .* in observed_logprobs, and"):
        writer.add(TEXTS[0], np.roll(top_ids, -1, 0), np.roll(logprobs, -1, 0), observed)
    writer.add(TEXTS[0], top_ids, logprobs, observed)


@pytest.mark.slow
def test_cache_is_a_dataset_for_dataloaders_with_workers(run, pair, tmp_path):
    data = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    run("cache-teacher", pair.teacher, data, "-o", tmp_path / "c")
    cache, loss = xtk.TeacherCache(tmp_path / "c"), xtk.DistillationLoss("ce", "byte-kl")
    collator = xtk.DistillationCollator(AutoTokenizer.from_pretrained(pair.student), cache, loss)
    loader = torch.utils.data.DataLoader(
        cache, batch_size=4, collate_fn=collator, num_workers=1, multiprocessing_context="spawn"
    )
    for batch, expected_batch in zip(loader, [collator(range(start, start + 4)) for start in (0, 4, 8)], strict=True):
        assert torch.equal(batch["input_ids"], expected_batch["input_ids"])
        logits = torch.randn(*batch["input_ids"].shape, 656)
        assert torch.equal(loss(logits=logits, batch=batch), loss(logits=logits, batch=expected_batch))
    assert len(cache) == len(TEXTS)
    assert cache[3].document.text == TEXTS[3]
    assert cache[3].index == 3
    with pytest.raises(IndexError):
        cache[len(cache)]
    assert len(pickle.loads(pickle.dumps(cache))) == len(cache)


FORKED_WORKER = """
import sys, torch, xtk
from transformers import AutoConfig, AutoModelForCausalLM
teacher, student, output = sys.argv[1:]
texts = [f"text {number} of some words" for number in range(8)]
cache = xtk.cache_teacher(AutoModelForCausalLM.from_pretrained(teacher), texts, output, tokenizer=teacher)
collator = xtk.DistillationCollator(student, cache, xtk.DistillationLoss("ce", "byte-kl"))
collator(range(4))
loader = torch.utils.data.DataLoader(cache, 4, collate_fn=collator, num_workers=1,
                                     multiprocessing_context="fork", timeout=60)
print(sum(len(batch["input_ids"]) for batch in loader))
"""


@pytest.mark.slow
def test_forked_workers_respond_after_a_cache_was_built_in_the_process(pair, tmp_path):
    # DataLoader forks on Linux by default, and a forked process does not have the threads of tokenizers.
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    command = [sys.executable, "-c", FORKED_WORKER, pair.teacher, pair.student, tmp_path / "c"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert result.stdout.strip() == "8", result.stderr


@pytest.mark.slow
def test_rows_of_a_dataset_are_compared_with_the_cache(run, pair, tmp_path):
    data = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    run("cache-teacher", pair.teacher, data, "--top-k", 4, "-o", tmp_path / "c")
    loss = xtk.DistillationLoss("byte-kl")
    collator = xtk.DistillationCollator(pair.student, tmp_path / "c", loss)
    assert len(collator([{"document": 2, "text": TEXTS[2]}])["input_ids"]) == 1
    with pytest.raises(xtk.XtkError, match="another text than the dataset"):
        collator([{"document": 2, "text": TEXTS[3]}])
    with pytest.raises(xtk.XtkError, match='no "document"'):
        collator([{"text": TEXTS[3]}])
    with pytest.raises(xtk.XtkError, match="not the index of a document"):
        collator([99])
    other = small_inputs.make_student(tmp_path / "wide")
    with pytest.raises(xtk.XtkError, match="logits, fewer than"):
        loss(logits=torch.randn(1, 500, 100)[:, : collator([0])["input_ids"].shape[1]], batch=collator([0]))
    with pytest.raises(xtk.XtkError, match="shape"):
        loss(logits=torch.randn(2, 5, 656), batch=collator([0]))
    with pytest.raises(xtk.XtkError, match="made for other losses"):
        xtk.DistillationLoss("ce")(logits=torch.randn(1, 5, 656), batch=collator([0]))
    with pytest.raises(xtk.XtkError, match="forward-kl needs a teacher with the student's tokenizer"):
        xtk.DistillationCollator(other, tmp_path / "c", xtk.DistillationLoss("forward-kl"))
    with pytest.raises(xtk.XtkError, match="did you mean byte-kl"):
        xtk.DistillationLoss("bytekl")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"train": ["a text"]}, r"keys 'train'.*\n.*\n.*dataset\['train'\]"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}), "DatasetDict with the keys"),
        ((text for text in ["a text"]), "can be read only once"),
        ([["a text"]], "row of the dataset is a list"),
        (pandas.DataFrame({"text": ["a text"], "label": [1]}), r"DataFrame of pandas[^#]*to_dict\(.records.\)"),
    ],
    ids=["mapping", "DatasetDict", "generator", "rows", "DataFrame"],
)
def test_datasets_that_are_not_a_sequence_of_rows_are_refused(pair, teacher, tmp_path, dataset, message):
    with pytest.raises(xtk.XtkError) as raised:
        xtk.cache_teacher(teacher, dataset, tmp_path / "c", tokenizer=pair.teacher)
    assert re.search(message, str(raised.value)), raised.value
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("dtype", ["bf16", "float64"])
def test_unsupported_dtypes_are_refused(pair, teacher, tmp_path, dtype):
    with pytest.raises(xtk.XtkError, match=f"dtype.*{dtype}"):
        xtk.cache_teacher(str(pair.teacher), TEXTS, tmp_path / "c", dtype=dtype)
    if dtype == "float64":
        with pytest.raises(xtk.XtkError, match=r"dtype.*float64"):
            xtk.cache_teacher(copy.deepcopy(teacher).double(), TEXTS, tmp_path / "c", tokenizer=pair.teacher)
    with pytest.raises(xtk.XtkError, match="dtype is 'bfloat16', but the model has float32"):
        xtk.cache_teacher(teacher, TEXTS, tmp_path / "c", tokenizer=pair.teacher, dtype="bfloat16")
    with pytest.raises(xtk.XtkError, match=r"--long-documents.*chunk"):
        xtk.cache_teacher(teacher, TEXTS, tmp_path / "c", tokenizer=pair.teacher, long_documents="chunk")
    assert not (tmp_path / "c").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # raised by peft
def test_adapter_folder_can_be_a_teacher(pair, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(pair.teacher)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    from_folder = xtk.cache_teacher(str(tmp_path / "adapter"), TEXTS, tmp_path / "folder")
    from_object = xtk.cache_teacher(adapted, TEXTS, tmp_path / "object", tokenizer=pair.teacher)
    # Merged and unmerged weights round differently, so a few stored values are a quantization step apart.
    assert share_of_equal_entries(from_folder, from_object) > 0.99
    assert share_of_equal_entries(from_folder, xtk.cache_teacher(pair.teacher, TEXTS, tmp_path / "base")) < 0.9
    with adapted.disable_adapter(), pytest.raises(xtk.XtkError, match="teacher"):
        xtk.cache_teacher(adapted, TEXTS, tmp_path / "object", tokenizer=pair.teacher)


def test_same_weights_with_another_configuration_are_another_teacher(pair, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(pair.teacher)
    xtk.cache_teacher(model, TEXTS, tmp_path / "c", tokenizer=pair.teacher)
    other = AutoModelForCausalLM.from_pretrained(pair.teacher, sliding_window=4, use_sliding_window=True)
    with pytest.raises(xtk.XtkError):
        xtk.cache_teacher(other, TEXTS, tmp_path / "c", tokenizer=pair.teacher)


def test_frozen_modules_stay_in_eval_mode(pair, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(pair.teacher).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    xtk.cache_teacher(model, TEXTS[:1], tmp_path / "c", tokenizer=pair.teacher)
    assert [module.training for module in model.modules()] == modes


def test_rollouts_keep_their_token_ids_in_a_cache(run, pair, teacher, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the first words", "other words")))
    run("rollout", pair.student, prompts, "--max-completion-length", 8, "-o", tmp_path / "rollouts.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    with xtk.CacheWriter(tmp_path / "c", pair.teacher) as writer:
        for row in rows:
            ids, positions = writer.tokenize(row)
            writer.add(row, *score(teacher, ids, positions, 4)[:3])
    cache = xtk.TeacherCache(tmp_path / "c")
    for cached, row in zip(cache, rows, strict=True):
        assert cached.document.sampled_tokens.ids.tolist() == row["student_ids"]


def test_tensors_of_any_dtype_are_accepted_and_invalid_arrays_are_refused(pair, teacher, tmp_path):
    def write(change):
        with xtk.CacheWriter(tmp_path / "c", pair.teacher, force=True) as writer:
            ids, positions = writer.tokenize(TEXTS[0])
            writer.add(TEXTS[0], *change(*score(teacher, ids, positions, 4)[:3]))
        return xtk.TeacherCache(tmp_path / "c")

    cache = write(
        lambda ids, logprobs, observed: (torch.tensor(ids), torch.tensor(logprobs).bfloat16(), torch.tensor(observed))
    )
    assert len(cache) == 1
    with pytest.raises(xtk.XtkError, match="top_ids is not an array of numbers"):
        write(lambda ids, logprobs, observed: ([[1], *ids[1:].tolist()], logprobs, observed))
    for invalid in (lambda ids: ids.astype(np.int64) + 2**32, lambda ids: np.where(ids == ids[0, 0], -2, ids)):
        with pytest.raises(xtk.XtkError, match="not a token id"):
            write(lambda ids, logprobs, observed, invalid=invalid: (invalid(ids), logprobs, observed))
    with pytest.raises(xtk.XtkError, match="a token id twice at one position"):
        write(lambda ids, logprobs, observed: (ids[:, [0, 0, 2, 3]], logprobs, observed))
    assert (
        len(write(lambda ids, logprobs, observed: (np.where([True, True, False, False], ids, -1), logprobs, observed)))
        == 1
    )
