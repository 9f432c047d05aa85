"""A teacher that scores while the student trains is the teacher of a cache, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import small_inputs
import torch
from accelerate import Accelerator
from interrupted_runs import ended, start, wait_for
from recorded_training_steps import inputs_of, recipe_of
from safetensors.torch import load_file
from xtk_processes import run_xtk

from xtk.artifacts.atomic_files import TEMPORARY_PREFIX
from xtk.artifacts.corpus_reader import Corpus
from xtk.errors import MismatchError, XtkError
from xtk.losses.loss_term import TeacherOutput
from xtk.teachers.cache_building import cache_teacher
from xtk.teachers.online_teacher import OnlineTeacher, parse_online_teacher
from xtk.tokens.document import Document
from xtk.tokens.token_sequence import tokenize_documents
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.graceful_stop import StopListener
from xtk.training.metrics_file import read_metrics
from xtk.training.micro_batches import BatchSampler
from xtk.training.online_teacher_scoring import OnlineSource, TeacherBlocks
from xtk.training.runs.open_inputs import open_inputs
from xtk.training.runs.run_inputs import RunInputs
from xtk.training.train_config import RunPaths

# A document a forward pass, so that rounding does not depend on which documents are scored together.
ALONE = "batch_tokens=1"
OPTIONS = ["--max-steps", 10, "--learning-rate", 1e-3, "--logging-steps", 1, "--save-steps", 0]


def live(model: Path, options: str = "", long_documents: str = "refuse") -> OnlineTeacher:
    text = f"{model}:{options}" if options else str(model)
    return parse_online_teacher(text, long_documents=long_documents, trust_remote_code=False)


def cached(teacher: OnlineTeacher, data: Path, folder: Path, **columns: str) -> Path:
    """The cache that `xtk cache-teacher` makes of the same request."""
    cache_teacher(teacher.request, Corpus([str(data)], columns), folder)
    return folder


def live_inputs(
    student: Path, data: Path, models: list[OnlineTeacher], columns: dict[str, str] | None = None, **options: str
) -> RunInputs:
    places = RunPaths(student, (str(data),), (), Path("nowhere"), columns or {}, online_teachers=tuple(models))
    return open_inputs(places, recipe_of(["byte-kl"], **options), Tokenizer(student))


def blocks_of(inputs: RunInputs, folder: Path, *, steps: int, size: int = 0, per_step: int = 8) -> TeacherBlocks:
    assert isinstance(inputs.source, OnlineSource)
    order = BatchSampler(np.arange(len(inputs.source)), inputs.source.text_bytes(), per_step, 42)
    return TeacherBlocks(inputs.source, order, steps, size, folder, Accelerator(cpu=True))


def all_heard(inputs: RunInputs, folder: Path) -> list[tuple[TeacherOutput | None, ...]]:
    """What teachers say of all documents, scored in one block."""
    for _ in blocks_of(inputs, folder, steps=1, per_step=len(inputs.source))(range(1), StopListener()):
        heard = [inputs.source.teacher_outputs(number) for number in range(len(inputs.source))]
    return heard


def assert_same_words(
    found: list[tuple[TeacherOutput | None, ...]], expected: list[tuple[TeacherOutput | None, ...]]
) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert np.array_equal(one.tokens.ids, other.tokens.ids)
                for name in (
                    "positions",
                    "offsets",
                    "ids",
                    "logprobs",
                    "remainder_mass",
                    "observed_logprobs",
                    "entropy",
                ):
                    assert np.array_equal(getattr(one.logprobs, name), getattr(other.logprobs, name)), name


@pytest.fixture(scope="module")
def second(tmp_path_factory) -> Path:
    """Another teacher with the first one's tokenizer, of a shorter context."""
    return small_inputs.make_teacher(tmp_path_factory.mktemp("second") / "second", context=40, seed=7)


# --- runs


@pytest.fixture(scope="module")
def whole(pair, corpus, tmp_path_factory) -> Path:
    """Two epochs of five steps, in blocks of three and of the two that are left of an epoch."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    done = run_xtk(*command(pair, corpus), "-o", folder)
    assert done.stdout == f"{folder}\n"
    assert "teacher scores the documents of 3 steps at a time, in each process" in done.stderr
    assert "cache-teacher" not in done.stderr
    return folder


def command(pair, corpus) -> list[object]:
    teacher = f"{pair.teacher}:seed=5,num_samples=4,top_k=8,support=top-k+sample,{ALONE}"
    return ["distill", pair.student, corpus, "--teacher", teacher, "--teacher-block-steps", 3, *OPTIONS]


def test_a_run_beside_its_teacher_is_to_the_bit_the_run_from_a_cache(pair, corpus, tmp_path):
    model = f"{pair.teacher}:top_k=16,{ALONE}"
    cache = cached(live(pair.teacher, f"top_k=16,{ALONE}"), corpus, tmp_path / "cache")
    run_xtk("distill", pair.student, cache, *OPTIONS, "-o", tmp_path / "from-cache")
    run_xtk(
        "distill",
        pair.student,
        corpus,
        "--teacher",
        model,
        "--teacher-block-steps",
        2,
        *OPTIONS,
        "-o",
        tmp_path / "live",
    )
    found, expected = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("live", "from-cache"))
    assert found == expected
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("live", "from-cache"))
    assert [line["loss"] for line in ours] == [line["loss"] for line in theirs]
    assert [line["teacher_seconds"] for line in ours] == sorted(line["teacher_seconds"] for line in ours)
    assert all("teacher_seconds" not in line for line in theirs)
    assert not list((tmp_path / "live").glob(f"{TEMPORARY_PREFIX}*"))
    recipe = json.loads((tmp_path / "live" / "recipe.json").read_text())["identity"]
    assert recipe["inputs"].keys() == {"student", "teacher", "projection"}


@pytest.mark.long
def test_two_processes_give_what_one_gives(pair, corpus, whole, tmp_path):
    shared = ["--num-processes", 2, "--per-device-train-batch-size", 4, "-o", tmp_path / "two"]
    done = run_xtk(*command(pair, corpus), *shared, fresh=True)
    assert "2 processes" in done.stderr
    assert done.stderr.count("scores the documents of 3 steps") == 1
    for one, other in zip(
        *(read_metrics(folder / "metrics.jsonl") for folder in (tmp_path / "two", whole)), strict=True
    ):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    expected = load_file(whole / "model.safetensors")
    for name, weight in load_file(tmp_path / "two" / "model.safetensors").items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5 * float(expected[name].abs().max()))


@pytest.mark.slow
def test_killed_in_the_midst_of_a_block_the_run_ends_bitwise_equal(pair, corpus, whole, tmp_path):
    output = tmp_path / "out"
    arguments = [*command(pair, corpus), "--save-steps", 1, "--save-total-limit", 10, "-o", output]
    process = subprocess.Popen(
        [sys.executable, "-m", "xtk", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    until = time.monotonic() + 300
    while not (output / "checkpoint-4").is_dir() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    for later in range(5, 10):  # however late the signal came: the run goes on in the midst of a block
        shutil.rmtree(output / f"checkpoint-{later}", ignore_errors=True)
    left = output / f"{TEMPORARY_PREFIX}live-00001" / "0"
    left.mkdir(parents=True, exist_ok=True)
    (left / "shard-00000.arrow").write_bytes(b"half of a")
    assert f"resuming from {output}/checkpoint-4" in run_xtk(*arguments).stderr
    assert (output / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert not list(output.glob(f"{TEMPORARY_PREFIX}*"))


@pytest.mark.slow
def test_a_signal_is_heeded_while_a_teacher_scores_and_blocks_of_another_size_go_on_to_the_bit(
    pair, corpus, whole, tmp_path
):
    output = tmp_path / "out"
    arguments = [*command(pair, corpus), "-o"]
    process = start([*arguments, output])
    wait_for(
        output / f"{TEMPORARY_PREFIX}live-00002", process
    )  # of the second epoch, for which the teacher is opened anew
    process.send_signal(signal.SIGTERM)
    code, stderr = ended(process, output)
    assert code == os.EX_TEMPFAIL, stderr
    assert "stopped after step 5 of 10: SIGTERM" in stderr
    assert "Traceback" not in stderr
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-5"]
    assert not list(output.glob(f"{TEMPORARY_PREFIX}live*"))
    done = run_xtk(*arguments, output, "--teacher-block-steps", 2)
    assert f"resuming from {output}/checkpoint-5" in done.stderr
    assert (output / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


# --- what teachers say


def test_draws_of_an_epoch_are_those_of_a_seed_further_on(pair, corpus, tmp_path):
    options = f"support=sample,num_samples=3,{ALONE}"
    expected = [
        inputs_of(pair.student, [cached(live(pair.teacher, f"{options},seed={seed}"), corpus, tmp_path / str(seed))],
                  recipe_of(["byte-kl"])).source
        for seed in (5, 6)
    ]  # fmt: skip
    inputs = live_inputs(pair.student, corpus, [live(pair.teacher, f"{options},seed=5")])
    blocks = blocks_of(inputs, tmp_path, steps=2, per_step=len(inputs.source))
    for block in blocks(range(2), StopListener()):
        for number in range(len(inputs.source)):
            assert_same_words([inputs.source.teacher_outputs(number)], [expected[block.start].teacher_outputs(number)])


def test_blocks_begin_where_they_always_do_and_none_has_two_epochs(pair, corpus, tmp_path):
    inputs = live_inputs(pair.student, corpus, [live(pair.teacher, "top_k=4")])
    blocks = blocks_of(inputs, tmp_path, steps=12, size=4, per_step=16)
    assert list(blocks.blocks()) == [range(3), range(3, 5), range(5, 8), range(8, 10), range(10, 12)]
    assert list(blocks(range(6, 12), StopListener())) == [range(6, 8), range(8, 10), range(10, 12)]
    assert list(tmp_path.iterdir()) == []
    assert blocks_of(inputs, tmp_path, steps=12).size == 64


def test_all_of_the_vocabulary_is_a_distribution(pair, corpus, tmp_path):
    inputs = live_inputs(pair.student, corpus, [live(pair.teacher, "top_k=all")])
    for (word,) in all_heard(inputs, tmp_path):
        sizes = np.diff(word.logprobs.offsets)
        assert set(sizes.tolist()) == {496}
        masses = np.add.reduceat(np.exp(word.logprobs.logprobs.astype(np.float64)), word.logprobs.offsets[:-1])
        assert np.allclose(masses, 1, atol=1e-5)


@pytest.mark.parametrize("way", ["sum", "mixture"])
def test_several_teachers_say_what_their_caches_say(pair, corpus, tmp_path, way):
    third = small_inputs.make_teacher(tmp_path / "third", seed=7)
    options = [f"top_k=16,{ALONE}", f"support=top-k+sample,top_k=4,{ALONE}"]
    teachers = [live(model, option) for model, option in zip((pair.teacher, third), options, strict=True)]
    caches = [cached(teacher, corpus, tmp_path / f"cache-{at}") for at, teacher in enumerate(teachers)]
    from_caches = inputs_of(pair.student, caches, recipe_of(["byte-kl"], combine_teachers=way))
    inputs = live_inputs(pair.student, corpus, teachers, combine_teachers=way)
    assert [objective.name for objective in inputs.objectives] == [one.name for one in from_caches.objectives]
    assert inputs.teachers == from_caches.teachers
    expected = [from_caches.source.teacher_outputs(number) for number in range(len(from_caches.source))]
    assert_same_words(all_heard(inputs, tmp_path), expected)


def test_each_document_is_read_by_the_teacher_whom_it_names(pair, second, tmp_path):
    texts = small_inputs.sentences(12, seed=5)
    lines = [{"text": text, "by": ["teacher", "second"][at % 3 == 0], "counts": at} for at, text in enumerate(texts)]
    data = tmp_path / "routed.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    teachers = [live(model, f"top_k=16,{ALONE}", "truncate") for model in (pair.teacher, second)]
    inputs = live_inputs(pair.student, data, teachers, {"route": "by", "weight": "counts"}, combine_teachers="route")
    for number, words in enumerate(all_heard(inputs, tmp_path)):
        document = inputs.source.document(number)
        names = {"teacher": words[0], "second": words[1]}
        assert [name for name, word in names.items() if word is not None] == [document.teacher_name]
    assert sorted(inputs.source.weights().tolist()) == list(range(12))
    order = BatchSampler(
        np.arange(12), inputs.source.text_bytes(), 1, 42
    )  # a document a step: one teacher has no part in it
    for block in TeacherBlocks(inputs.source, order, 1, 1, tmp_path, Accelerator(cpu=True))(range(1), StopListener()):
        heard = inputs.source.teacher_outputs(order.documents_of_step(block.start)[0])
        assert sorted(word is None for word in heard) == [False, True]
    with pytest.raises(XtkError, match="the --route-column of a document is empty"):
        live_inputs(pair.student, data, teachers, combine_teachers="route")
    data.write_text(json.dumps({"text": "x", "by": "nobody"}) + "\n")
    with pytest.raises(
        XtkError, match="the --route-column of a document has 'nobody', which is not the name of a teacher"
    ):
        live_inputs(pair.student, data, teachers, {"route": "by"}, combine_teachers="route")


def test_documents_are_cut_to_what_all_teachers_read(pair, second, tmp_path):
    texts = [*small_inputs.sentences(6, seed=8), " ".join(small_inputs.sentences(6, seed=9))]
    data = small_inputs.write_jsonl(tmp_path / "long.jsonl", texts)
    with pytest.raises(XtkError, match="longer than the 40 tokens of the teacher's context"):
        live_inputs(pair.student, data, [live(pair.teacher), live(second)])
    read = tokenize_documents(Tokenizer(second), list(map(Document.from_text, texts)))
    short = [text for text, tokens in zip(texts, read, strict=True) if len(tokens) <= 40]
    assert 0 < len(short) < 7
    for way, count in (("truncate", 7), ("skip", len(short))):
        teachers = [live(model, "top_k=16", way) for model in (pair.teacher, second)]
        inputs = live_inputs(pair.student, data, teachers)
        words = all_heard(inputs, tmp_path)
        assert len(words) == len(inputs.source) == count
        for number, pair_of_words in enumerate(words):
            text = inputs.source.document(number).text
            assert any(whole.startswith(text) for whole in texts)
            for word in pair_of_words:
                assert len(word.tokens) <= 40
                assert word.tokens.byte_ends.max() == len(text.encode())


@pytest.mark.long
def test_a_teacher_cut_over_two_processes_says_the_same(pair, corpus, tmp_path):
    wide = tmp_path / "wide"
    shutil.copytree(pair.student, wide)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    configuration = LlamaConfig(
        vocab_size=656, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(configuration).save_pretrained(wide)
    one, two = (
        all_heard(live_inputs(pair.student, corpus, [live(wide, f"top_k=8,{ALONE}{cut}")]), tmp_path)
        for cut in ("", ",engine.tp_size=2")
    )
    for (ours,), (theirs,) in zip(two, one, strict=True):
        assert np.array_equal(ours.tokens.ids, theirs.tokens.ids)
        assert np.allclose(ours.logprobs.observed_logprobs, theirs.logprobs.observed_logprobs, atol=1e-5)


# --- what is refused


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("top=4", "no option of a teacher called 'top'"),
        ("top_k=many", "top_k is 'many', but must be an integer"),
        ("top_k=0", "--top-k is 0"),
        ("top_k=4,top-k=5", "given twice"),
        ("backend=jax", "no backend called 'jax'"),
        ("backend=vllm,support=sample", "does not support --support sample"),
        ("server=http://localhost:1/v1", "--server needs --backend server"),
        ("dtype=float8", "no dtype called 'float8'"),
        ("precision=rough", "no precision called 'rough'"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(pair, options, told):
    with pytest.raises(XtkError, match=told):
        live(pair.teacher, options)


def test_what_cannot_be_is_refused_with_the_reason(pair, corpus, cache, tmp_path):
    teacher = live(pair.teacher)
    with pytest.raises(XtkError, match="--teacher needs plain data, but CACHE is a teacher cache"):
        live_inputs(pair.student, cache, [teacher])
    places = RunPaths(pair.student, (str(corpus),), (), tmp_path, online_teachers=(teacher,))
    with pytest.raises(XtkError, match="--teacher is given, but no --loss uses a teacher"):
        open_inputs(places, recipe_of(["ce"]), Tokenizer(pair.student))
    with pytest.raises(MismatchError, match="the student's tokenizer"):
        open_inputs(places, recipe_of(["forward-kl"]), Tokenizer(pair.student))
    with pytest.raises(XtkError, match="--combine-teachers needs several teachers, but this run has one"):
        live_inputs(pair.student, corpus, [teacher], combine_teachers="mixture")
    with pytest.raises(MismatchError, match="mixture needs teachers with the same tokenizer"):
        live_inputs(pair.student, corpus, [teacher, live(pair.student)], combine_teachers="mixture")
    with pytest.raises(XtkError, match=r"--teacher .*:support=\.\.\. with top-k\+sample"):
        live_inputs(pair.student, corpus, [live(pair.teacher, "support=none")])
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"input_ids": [5, 6, 7]}) + "\n")
    with pytest.raises(XtkError, match="token ids of one tokenizer, but the teachers have different tokenizers"):
        live_inputs(pair.student, ids, [teacher, live(pair.student)])
