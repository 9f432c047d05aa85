"""Online teachers score documents like `xtk cache-teacher`, and leave no temporary files."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import small_inputs
import torch
from accelerate import Accelerator
from interrupted_runs import exit_of_unfinished_run, start_run, wait_for_path
from recorded_training_steps import make_train_config, open_run_inputs
from safetensors.torch import load_file
from xtk_processes import run_xtk

from xtk.batches.data_sources import DocumentSource
from xtk.batches.micro_batches import BatchSampler
from xtk.cache.teacher_document import TeacherDocument
from xtk.data.corpus_reader import Corpus, InMemoryCorpus
from xtk.errors import MismatchError, XtkError
from xtk.models.resolver import ModelRef
from xtk.parallel.graceful_stop import StopListener
from xtk.runs.metrics_file import read_metrics
from xtk.teachers.cache_building import cache_teacher
from xtk.teachers.online_teacher import PART_BYTES, OnlineTeacher, parse_online_teacher
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer
from xtk.training.kinds.open_inputs import open_inputs
from xtk.training.kinds.run_inputs import RunInputs
from xtk.training.online_teacher_scoring import OnlineDocuments, TeacherBlocks, parts_of_process
from xtk.training.train_config import RunPaths

# One document per forward pass, so that rounding does not depend on which documents are scored together.
ONE_DOCUMENT = "batch_tokens=1"
OPTIONS = ["--max-steps", 10, "--learning-rate", 1e-3, "--logging-steps", 1, "--save-steps", 0]


def online_teacher(model: Path, options: str = "", long_documents: str = "refuse") -> OnlineTeacher:
    text = f"{model}:{options}" if options else str(model)
    return parse_online_teacher(text, long_documents=long_documents, trust_remote_code=False)


def write_cache(teacher: OnlineTeacher, data: Path, folder: Path, **columns: str) -> Path:
    """Return the cache that `xtk cache-teacher` writes for the same request."""
    cache_teacher(teacher.request, Corpus([str(data)], columns), folder)
    return folder


def online_inputs(
    student: Path, data: Path, teachers: list[OnlineTeacher], columns: dict[str, str] | None = None, **options: str
) -> RunInputs:
    paths = RunPaths(
        ModelRef(student), (str(data),), (), Path("nowhere"), columns or {}, online_teachers=tuple(teachers)
    )
    return open_inputs(paths, make_train_config(["byte-kl"], **options), Tokenizer(student))


def blocks_of(inputs: RunInputs, *, steps: int, size: int = 0, per_step: int = 8) -> TeacherBlocks:
    assert isinstance(inputs.source, OnlineDocuments)
    sampler = BatchSampler(np.arange(len(inputs.source)), inputs.source.text_bytes(), per_step, 42)
    return TeacherBlocks(inputs.source, sampler, steps, size, Accelerator(cpu=True))


def outputs_of(source: DocumentSource, number: int) -> tuple[TeacherDocument | None, ...]:
    """Return each teacher's output for a document."""
    return tuple(output for teacher in source.teachers for output in teacher.outputs([number]))


def all_outputs(inputs: RunInputs) -> list[tuple[TeacherDocument | None, ...]]:
    """Return the outputs of the teachers for all documents, scored in one block."""
    for _ in blocks_of(inputs, steps=1, per_step=len(inputs.source))(range(1), StopListener()):
        outputs = [outputs_of(inputs.source, number) for number in range(len(inputs.source))]
    return outputs


def assert_same_outputs(
    found: list[tuple[TeacherDocument | None, ...]], expected: list[tuple[TeacherDocument | None, ...]]
) -> None:
    assert len(found) == len(expected)
    for found_outputs, expected_outputs in zip(found, expected, strict=True):
        for one, other in zip(found_outputs, expected_outputs, strict=True):
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
                    assert np.array_equal(getattr(one.teacher_logprobs, name), getattr(other.teacher_logprobs, name)), (
                        name
                    )


@pytest.mark.slow
def test_subprocess_on_separate_devices_stays_for_the_next_blocks_and_scores_the_same(pair):
    def processes() -> set[int]:
        return {process.pid for process in psutil.Process().children()} - before

    before = {process.pid for process in psutil.Process().children()}
    text = f"{pair.teacher}:top_k=4,{ONE_DOCUMENT}"
    apart, plain = (
        parse_online_teacher(text, long_documents="refuse", trust_remote_code=False, devices=devices)
        for devices in ((0,), ())
    )
    documents = [Document.from_text("one and 201"), Document.from_text("two, 2010")]
    for teacher in (apart, plain):
        teacher.read_corpus(InMemoryCorpus(documents, ["texts"], {}), "")
    workers = []
    for block in range(2):
        parts = [plain.tokenize([document]) for document in documents]
        found = list(apart.score(parts, block, 16))
        workers.append(processes())
        for stop in (signal.SIGUSR1, signal.SIGTERM):  # Slurm signals all processes of a step; the run goes on
            os.kill(*workers[-1], stop)
        for (one,), (other,) in zip(found, plain.score(parts, block, 16), strict=True):
            assert np.array_equal(one.logprobs, other.logprobs)
    assert workers[0] == workers[1]
    assert len(workers[0]) == 1
    apart.close()
    assert not processes()
    # A block that is stopped leaves no process with unread results.
    stopped = apart.score(parts, 2, 16)
    next(stopped)
    stopped.close()
    assert not processes()


@pytest.mark.slow
@pytest.mark.parametrize("num_teachers", [1, 2])
def test_teacher_on_separate_devices_is_loaded_once_in_a_run_unless_it_shares_them(pair, tmp_path, num_teachers):
    data = small_inputs.write_jsonl(tmp_path / "data.jsonl", small_inputs.sentences(4))
    teachers = [
        parse_online_teacher(
            f"{pair.teacher}:top_k={4 + number}", long_documents="refuse", trust_remote_code=False, devices=(0,)
        )
        for number in range(num_teachers)
    ]
    blocks = blocks_of(online_inputs(pair.student, data, teachers), steps=2, size=1, per_step=2)
    before = {process.pid for process in psutil.Process().children()}
    workers = [{process.pid for process in psutil.Process().children()} - before
               for _ in blocks(range(2), StopListener())]  # fmt: skip
    assert [len(one) for one in workers] == [1, 1] if num_teachers == 1 else [0, 0]
    assert workers[0] == workers[1]
    blocks.finish()
    assert {process.pid for process in psutil.Process().children()} == before


@pytest.fixture(scope="module")
def second_teacher(tmp_path_factory) -> Path:
    """Another teacher with the tokenizer of the first one and a shorter context."""
    return small_inputs.make_teacher(tmp_path_factory.mktemp("second") / "second", context=40, seed=7)


# --- runs


@pytest.fixture(scope="module")
def original(pair, corpus, tmp_path_factory) -> Path:
    """A run of two epochs of five steps, in blocks of three steps and of the remaining two of an epoch."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    done = run_xtk(*command(pair, corpus), "-o", folder)
    assert done.stdout == f"{folder}\n"
    assert "teacher scores the documents of 3 steps at a time, in each process" in done.stderr
    assert "cache-teacher" not in done.stderr
    return folder


def command(pair, corpus) -> list[object]:
    teacher = f"{pair.teacher}:seed=5,num_samples=4,top_k=8,support=top-k+sample,{ONE_DOCUMENT}"
    return ["distill", pair.student, corpus, "--teacher", teacher, "--teacher-block-steps", 3, *OPTIONS]


@pytest.mark.slow
def test_a_run_with_an_online_teacher_equals_one_from_a_cache_bit_for_bit(pair, corpus, tmp_path):
    teacher = f"{pair.teacher}:top_k=16,{ONE_DOCUMENT}"
    cache = write_cache(online_teacher(pair.teacher, f"top_k=16,{ONE_DOCUMENT}"), corpus, tmp_path / "cache")
    run_xtk("distill", pair.student, cache, *OPTIONS, "-o", tmp_path / "from-cache")
    run_xtk(
        "distill",
        pair.student,
        corpus,
        "--teacher",
        teacher,
        "--teacher-block-steps",
        2,
        *OPTIONS,
        "-o",
        tmp_path / "live",
    )
    found, expected = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("live", "from-cache"))
    assert found == expected
    online_metrics, cache_metrics = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("live", "from-cache"))
    assert [line["loss"] for line in online_metrics] == [line["loss"] for line in cache_metrics]
    assert [line["teacher_seconds"] for line in online_metrics] == sorted(
        line["teacher_seconds"] for line in online_metrics
    )
    assert all("teacher_seconds" not in line for line in cache_metrics)
    recipe = json.loads((tmp_path / "live" / "recipe.json").read_text())["identity"]
    assert recipe["inputs"].keys() == {"student", "teacher", "projection"}


@pytest.mark.long
def test_two_processes_train_the_same_student_as_one(pair, corpus, original, tmp_path):
    options = ["--num-processes", 2, "--per-device-train-batch-size", 4, "-o", tmp_path / "two"]
    done = run_xtk(*command(pair, corpus), *options, fresh=True)
    assert "2 processes" in done.stderr
    assert done.stderr.count("scores the documents of 3 steps") == 1
    for one, other in zip(
        *(read_metrics(folder / "metrics.jsonl") for folder in (tmp_path / "two", original)), strict=True
    ):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    expected = load_file(original / "model.safetensors")
    for name, weight in load_file(tmp_path / "two" / "model.safetensors").items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5 * float(expected[name].abs().max()))


@pytest.mark.slow
def test_a_run_killed_within_a_block_ends_bitwise_equal(pair, corpus, original, tmp_path):
    output = tmp_path / "out"
    arguments = [*command(pair, corpus), "--save-steps", 1, "--save-total-limit", 10, "-o", output]
    process = subprocess.Popen(
        [sys.executable, "-m", "xtk", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 300
    while not (output / "checkpoint-4").is_dir() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    for later in range(5, 10):  # even if the signal came late, the run resumes within a block
        shutil.rmtree(output / f"checkpoint-{later}", ignore_errors=True)
    assert f"resuming from {output}/checkpoint-4" in run_xtk(*arguments).stderr
    assert (output / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_sigterm_stops_scoring_and_other_block_sizes_resume_bit_for_bit(pair, corpus, original, tmp_path):
    output = tmp_path / "out"
    arguments = [*command(pair, corpus), "-o"]
    process = start_run([*arguments, output])
    metrics = output / "metrics.jsonl"
    wait_for_path(metrics, process)
    while len(metrics.read_text().splitlines()) < 5 and process.poll() is None:  # then the second epoch is scored
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    code, stderr = exit_of_unfinished_run(process, output)
    assert code == os.EX_TEMPFAIL, stderr
    assert "stopped after step 5 of 10: SIGTERM" in stderr
    assert "Traceback" not in stderr
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-5"]
    done = run_xtk(*arguments, output, "--teacher-block-steps", 2)
    assert f"resuming from {output}/checkpoint-5" in done.stderr
    assert (output / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()


# --- outputs of teachers


def test_samples_of_an_epoch_are_those_of_the_next_seed(pair, corpus, tmp_path):
    options = f"support=sample,num_samples=3,{ONE_DOCUMENT}"
    expected = [
        open_run_inputs(pair.student, [write_cache(online_teacher(pair.teacher, f"{options},seed={seed}"), corpus,
                                                   tmp_path / str(seed))], make_train_config(["byte-kl"])).source
        for seed in (5, 6)
    ]  # fmt: skip
    inputs = online_inputs(pair.student, corpus, [online_teacher(pair.teacher, f"{options},seed=5")])
    blocks = blocks_of(inputs, steps=2, per_step=len(inputs.source))
    for block in blocks(range(2), StopListener()):
        for number in range(len(inputs.source)):
            assert_same_outputs([outputs_of(inputs.source, number)], [outputs_of(expected[block.start], number)])


def test_blocks_begin_at_fixed_steps_and_none_spans_two_epochs(pair, corpus, tmp_path):
    inputs = online_inputs(pair.student, corpus, [online_teacher(pair.teacher, "top_k=4")])
    blocks = blocks_of(inputs, steps=12, size=4, per_step=16)
    assert list(blocks.blocks()) == [range(3), range(3, 5), range(5, 8), range(8, 10), range(10, 12)]
    assert list(blocks(range(6, 12), StopListener())) == [range(6, 8), range(8, 10), range(10, 12)]
    assert blocks_of(inputs, steps=12).size == 64


def test_top_k_all_returns_a_distribution_over_the_vocabulary(pair, corpus, tmp_path):
    inputs = online_inputs(pair.student, corpus, [online_teacher(pair.teacher, "top_k=all")])
    for (output,) in all_outputs(inputs):
        sizes = np.diff(output.teacher_logprobs.offsets)
        assert set(sizes.tolist()) == {496}
        probability_sums = np.add.reduceat(
            np.exp(output.teacher_logprobs.logprobs.astype(np.float64)), output.teacher_logprobs.offsets[:-1]
        )
        assert np.allclose(probability_sums, 1, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sum", "mixture"])
def test_several_online_teachers_equal_their_caches(pair, corpus, tmp_path, method):
    third = small_inputs.make_teacher(tmp_path / "third", seed=7)
    options = [f"top_k=16,{ONE_DOCUMENT}", f"support=top-k+sample,top_k=4,{ONE_DOCUMENT}"]
    teachers = [online_teacher(model, option) for model, option in zip((pair.teacher, third), options, strict=True)]
    caches = [write_cache(teacher, corpus, tmp_path / f"cache-{at}") for at, teacher in enumerate(teachers)]
    from_caches = open_run_inputs(pair.student, caches, make_train_config(["byte-kl"], combine_teachers=method))
    inputs = online_inputs(pair.student, corpus, teachers, combine_teachers=method)
    assert [term.name for term in inputs.objectives] == [one.name for one in from_caches.objectives]
    assert inputs.teachers == from_caches.teachers
    expected = [outputs_of(from_caches.source, number) for number in range(len(from_caches.source))]
    assert_same_outputs(all_outputs(inputs), expected)


def test_each_document_is_scored_by_the_teacher_that_it_names(pair, second_teacher, tmp_path):
    texts = small_inputs.sentences(12, seed=5)
    lines = [{"text": text, "by": ["teacher", "second"][at % 3 == 0], "counts": at} for at, text in enumerate(texts)]
    data = tmp_path / "routed.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    teachers = [
        online_teacher(model, f"top_k=16,{ONE_DOCUMENT}", "truncate") for model in (pair.teacher, second_teacher)
    ]
    inputs = online_inputs(pair.student, data, teachers, {"route": "by", "weight": "counts"}, combine_teachers="route")
    for number, outputs in enumerate(all_outputs(inputs)):
        document = inputs.source.document(number)
        names = {"teacher": outputs[0], "second": outputs[1]}
        assert [name for name, output in names.items() if output is not None] == [document.teacher_name]
    assert sorted(inputs.source.weights().tolist()) == list(range(12))
    sampler = BatchSampler(
        np.arange(12), inputs.source.text_bytes(), 1, 42
    )  # one document per step: only one teacher scores it
    for block in TeacherBlocks(inputs.source, sampler, 1, 1, Accelerator(cpu=True))(range(1), StopListener()):
        outputs_of_step = outputs_of(inputs.source, sampler.documents_of_step(block.start)[0])
        assert sorted(output is None for output in outputs_of_step) == [False, True]
    with pytest.raises(XtkError, match="the --route-column of a document is empty"):
        online_inputs(pair.student, data, teachers, combine_teachers="route")
    data.write_text(json.dumps({"text": "x", "by": "nobody"}) + "\n")
    with pytest.raises(
        XtkError, match="the --route-column of a document has 'nobody', which is not the name of a teacher"
    ):
        online_inputs(pair.student, data, teachers, {"route": "by"}, combine_teachers="route")


def test_documents_are_truncated_to_the_context_of_all_teachers(pair, second_teacher, tmp_path):
    texts = [*small_inputs.sentences(6, seed=8), " ".join(small_inputs.sentences(6, seed=9))]
    data = small_inputs.write_jsonl(tmp_path / "long.jsonl", texts)
    with pytest.raises(XtkError, match="longer than the 40 tokens of the teacher's context"):
        online_inputs(pair.student, data, [online_teacher(pair.teacher), online_teacher(second_teacher)])
    token_sequences = tokenize_documents(Tokenizer(second_teacher), list(map(Document.from_text, texts)))
    short = [text for text, tokens in zip(texts, token_sequences, strict=True) if len(tokens) <= 40]
    assert 0 < len(short) < 7
    for long_documents, count in (("truncate", 7), ("skip", len(short))):
        teachers = [online_teacher(model, "top_k=16", long_documents) for model in (pair.teacher, second_teacher)]
        inputs = online_inputs(pair.student, data, teachers)
        outputs = all_outputs(inputs)
        assert len(outputs) == len(inputs.source) == count
        for number, outputs_of_document in enumerate(outputs):
            text = inputs.source.document(number).text
            assert any(original.startswith(text) for original in texts)
            for output in outputs_of_document:
                assert len(output.tokens) <= 40
                assert output.tokens.byte_ends.max() == len(text.encode())


@pytest.mark.long
def test_a_teacher_in_a_subprocess_returns_the_same_logprobs(pair, corpus):
    one, two = (
        all_outputs(
            online_inputs(
                pair.student, corpus, [online_teacher(pair.teacher, f"top_k=8,{ONE_DOCUMENT}{engine_option}")]
            ),
        )
        for engine_option in ("", ",engine.device_map=cpu")
    )
    for (found,), (expected,) in zip(two, one, strict=True):
        assert np.array_equal(found.tokens.ids, expected.tokens.ids)
        assert np.allclose(
            found.teacher_logprobs.observed_logprobs, expected.teacher_logprobs.observed_logprobs, atol=1e-5
        )


# --- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("top=4", "no option of a teacher called 'top'"),
        ("top_k=many", "top_k is 'many', but must be an integer"),
        ("top_k=0", "--top-k is 0"),
        ("top_k=4,top-k=5", "given twice"),
        ("backend=jax", "no backend called 'jax'"),
        ("backend=vllm,support=sample", "does not support --support sample"),
        ("server=http://localhost:1/v1", "--server needs --backend server"),
        ("dtype=float8", "no dtype called 'float8'"),
        ("precision=fine", "no option of a teacher called 'precision'"),
    ],
)
def test_invalid_teacher_options_are_refused(pair, options, message):
    with pytest.raises(XtkError, match=message):
        online_teacher(pair.teacher, options)


def test_invalid_inputs_are_refused_with_the_reason(pair, corpus, cache, tmp_path):
    teacher = online_teacher(pair.teacher)
    with pytest.raises(XtkError, match="--teacher needs plain data, but CACHE is a teacher cache"):
        online_inputs(pair.student, cache, [teacher])
    paths = RunPaths(ModelRef(pair.student), (str(corpus),), (), tmp_path, online_teachers=(teacher,))
    with pytest.raises(XtkError, match="--teacher is given, but no --loss uses a teacher"):
        open_inputs(paths, make_train_config(["ce"]), Tokenizer(pair.student))
    with pytest.raises(MismatchError, match="the student's tokenizer"):
        open_inputs(paths, make_train_config(["forward-kl"]), Tokenizer(pair.student))
    with pytest.raises(XtkError, match="--combine-teachers needs several teachers, but this run has one"):
        online_inputs(pair.student, corpus, [teacher], combine_teachers="mixture")
    with pytest.raises(MismatchError, match="mixture needs teachers with the same tokenizer"):
        online_inputs(pair.student, corpus, [teacher, online_teacher(pair.student)], combine_teachers="mixture")
    with pytest.raises(XtkError, match=r"--teacher .*:support=\.\.\. with top-k\+sample"):
        online_inputs(pair.student, corpus, [online_teacher(pair.teacher, "support=none")])
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"input_ids": [5, 6, 7]}) + "\n")
    with pytest.raises(XtkError, match="token ids of one tokenizer, but the teachers have different tokenizers"):
        online_inputs(pair.student, ids, [teacher, online_teacher(pair.student)])


@pytest.mark.parametrize("one_process", [False, True])
def test_each_part_is_scored_by_one_process(one_process):
    for processes, num_parts in itertools.product((1, 2, 3), range(8)):
        complete = set(range(1, num_parts, 3))
        parts = [
            parts_of_process(range(num_parts), complete, rank, processes, one_process) for rank in range(processes)
        ]
        assert sorted(itertools.chain.from_iterable(parts)) == sorted(set(range(num_parts)) - complete)
        assert all(len(own) <= len(parts[0]) for own in parts)
        assert not one_process or not any(parts[1:])


@pytest.mark.slow
def test_runs_of_a_self_teacher_with_other_block_sizes_are_different_runs(pair, corpus, tmp_path):
    """A block of steps is scored with the student's weights at its beginning."""
    command = ["distill", pair.student, corpus, "--teacher", "self", "--loss", "forward-kl", "--max-steps", 2,
               "--per-device-train-batch-size", 4, "-o", tmp_path / "out"]  # fmt: skip
    run_xtk(*command, "--teacher-block-steps", 1)
    assert "--force" in run_xtk(*command, "--teacher-block-steps", 2, code=1).stderr


@pytest.mark.parametrize(
    ("bytes_per_position", "parts"),
    [(600, [[0, 1, 2, 3, 4]]), (PART_BYTES // 100, [[0, 1], [2, 3], [4]]), (PART_BYTES, [[0], [1], [2], [3], [4]])],
)
def test_a_part_of_a_large_support_has_few_documents(bytes_per_position, parts):
    """Every process receives the parts of all: with top_k=all, 16,384 tokens would be 20 GB of each."""
    teacher = SimpleNamespace(bytes_per_position=bytes_per_position)
    source = OnlineDocuments(["text"] * 5, [teacher], np.full((1, 5), 40, np.int32), [])
    assert source.parts(0, np.arange(5)) == parts
