"""Invalid input: exit code 1, an error that names what is wrong, where and what to do, and no partial output."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_inputs
from xtk_processes import run_here

from xtk.subprocesses import SignalForwarder


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Assert that a command failed with exit code 1 and with these words on stderr."""
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, f"{word!r} is not in\n{done.stderr}"


def copy(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))


def test_build_projection_refuses_a_slow_tokenizer(pair, tmp_path):
    slow = copy(pair.student, tmp_path / "slow")
    (slow / "tokenizer.json").rename(slow / "vocab.txt")
    done = run_here("build-projection", slow, pair.teacher, "-o", "p", cwd=tmp_path, code=None)
    assert_refused(done, "only a slow tokenizer", str(slow), "try:")
    assert not (tmp_path / "p").exists()


def test_cache_teacher_refuses_a_model_folder_without_a_tokenizer(pair, corpus, tmp_path):
    bare = copy(pair.teacher, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    assert_refused(
        run_here("cache-teacher", bare, corpus, "-o", "c", cwd=tmp_path, code=None),
        "this folder has no tokenizer.json",
        "try:",
    )
    assert not (tmp_path / "c").exists()


def test_cache_teacher_refuses_a_tokenizer_folder_without_a_model(pair, corpus, tmp_path):
    bare = small_inputs.make_teacher_tokenizer(tmp_path / "tokenizer")
    assert_refused(
        run_here("cache-teacher", bare, corpus, "-o", "c", cwd=tmp_path, code=None), "the folder contains no model"
    )


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_cache_teacher_refuses_an_empty_corpus(pair, tmp_path, content):
    (tmp_path / "empty.jsonl").write_text(content)
    assert_refused(
        run_here("cache-teacher", pair.teacher, "empty.jsonl", "-o", "c", cwd=tmp_path, code=None), "empty.jsonl"
    )
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_cache_teacher_counts_documents_longer_than_the_teachers_context(run, pair, tmp_path):
    texts = [*small_inputs.sentences(3), "many words " * 300]
    corpus = small_inputs.write_jsonl(tmp_path / "long.jsonl", texts)
    done = run_here("cache-teacher", pair.teacher, corpus, "-o", "c", cwd=tmp_path, code=None)
    assert_refused(done, "1 of 4 documents", "256 tokens", "--long-documents")
    assert not (tmp_path / "c").exists()
    for policy, documents in (("skip", 3), ("truncate", 4)):
        done = run(
            "cache-teacher", pair.teacher, corpus, "--long-documents", policy, "-o", policy, "--json", cwd=tmp_path
        )
        assert json.loads(done.stdout)["documents"] == documents
        assert "1 of 4 documents" in done.stderr
    done = run(
        "cache-teacher", pair.teacher, corpus, "--long-documents", "split", "-o", "split", "--json", cwd=tmp_path
    )
    assert json.loads(done.stdout)["documents"] > 5


@pytest.mark.slow
def test_the_parts_of_a_split_document_concatenate_to_its_text(run, pair, tmp_path):
    from xtk.cache.reader import TeacherCache

    text = "日本語 with emoji 😀 and numbers 12345. " * 40
    corpus = small_inputs.write_jsonl(tmp_path / "long.jsonl", [text])
    run("cache-teacher", pair.teacher, corpus, "--long-documents", "split", "-o", "c", cwd=tmp_path)
    rows = list(TeacherCache(tmp_path / "c"))
    assert "".join(row.document.text for row in rows) == text
    assert [bool((row.tokens.segment_end_tokens >= 0).any()) for row in rows] == [False] * (len(rows) - 1) + [True]
    assert all(len(row.tokens) <= 256 for row in rows)


@pytest.mark.slow
def test_distill_counts_documents_longer_than_the_students_context(run, pair, cache, projection, tmp_path):
    short = small_inputs.make_student(tmp_path / "short", context=24)
    arguments = ("distill", short, cache, "--projection", projection, "--max-steps", 1)
    done = run_here(*arguments, "-o", "out", cwd=tmp_path, code=None)
    assert_refused(done, "40 documents have more tokens than the limit of 24", "--long-documents")
    assert not (tmp_path / "out").exists()
    done = run(*arguments, "--long-documents", "truncate", "-o", "cut", cwd=tmp_path)
    assert "40 documents have more tokens than the limit of 24: --long-documents truncate" in done.stderr


@pytest.mark.slow
def test_distill_refuses_a_projection_for_another_teacher(run, pair, cache, metaspace, tmp_path):
    run("build-projection", pair.student, metaspace, "-o", "p", cwd=tmp_path)
    done = run_here("distill", pair.student, cache, "--projection", "p", "-o", "out", cwd=tmp_path, code=None)
    assert_refused(done, "built for another teacher", str(cache), "xtk build-projection")
    assert not (tmp_path / "out").exists()


def test_distill_refuses_a_projection_for_another_student(run, pair, cache, metaspace, tmp_path):
    run("build-projection", metaspace, pair.teacher, "-o", "p", cwd=tmp_path)
    done = run_here("distill", pair.student, cache, "--projection", "p", "-o", "out", cwd=tmp_path, code=None)
    assert_refused(done, "built for another student")


def copy_with_other_eos(folder: Path, target: Path) -> Path:
    path = copy(folder, target) / "tokenizer_config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "eos_token": content["pad_token"]}))
    return target


@pytest.mark.slow
def test_a_projection_depends_on_special_tokens_but_not_on_the_chat_template(run, pair, cache, tmp_path):
    template = copy(pair.teacher, tmp_path / "template")
    (template / "chat_template.jinja").write_text("{{ messages }}")
    build = ("build-projection", pair.student)
    run(*build, pair.teacher, "-o", "p", cwd=tmp_path)
    run(*build, template, "-o", "p", cwd=tmp_path)  # the same request: the file is reused
    steps = ("--max-steps", 1)
    run("distill", pair.student, cache, "--projection", "p", "-o", "out", *steps, cwd=tmp_path)
    eos = copy_with_other_eos(pair.teacher, tmp_path / "eos")
    assert_refused(run_here(*build, eos, "-o", "p", cwd=tmp_path, code=None), "different teacher", "--force")
    student = copy_with_other_eos(pair.student, tmp_path / "student")
    done = run_here("distill", student, cache, "--projection", "p", "-o", "out2", *steps, cwd=tmp_path, code=None)
    assert_refused(done, "built for another student", "eos")


def test_forward_kl_needs_a_teacher_with_the_students_tokenizer(pair, cache, tmp_path):
    done = run_here("distill", pair.student, cache, "--loss", "forward-kl", "-o", "out", cwd=tmp_path, code=None)
    assert_refused(done, "the loss forward-kl needs a teacher with the student's tokenizer", "--loss byte-kl")


def test_distill_refuses_a_cache_without_its_tokenizer(pair, cache, tmp_path):
    broken = copy(cache, tmp_path / "broken")
    (broken / "tokenizer.json").unlink()
    done = run_here("distill", pair.student, broken, "--loss", "p-kl", "-o", "out", cwd=tmp_path, code=None)
    assert_refused(done, "the teacher's tokenizer cannot be loaded from the cache", str(broken), "--projection")


def test_distill_refuses_a_cache_with_a_replaced_tokenizer(pair, cache, tmp_path):
    broken = copy(cache, tmp_path / "broken")
    (broken / "tokenizer.json").write_bytes((pair.student / "tokenizer.json").read_bytes())
    done = run_here("distill", pair.student, broken, "--loss", "p-kl", "-o", "out", cwd=tmp_path, code=None)
    assert_refused(done, "does not match its checksum in the manifest", str(broken))


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_distill_and_inspect_name_a_corrupt_shard(pair, cache, projection, tmp_path, damage):
    broken = copy(cache, tmp_path / "broken")
    shard = broken / "shard-00001.arrow"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    {
        "truncated": lambda: shard.write_bytes(shard.read_bytes()[:-100]),
        "changed": lambda: shard.write_bytes(bytes(raw)),
        "missing": shard.unlink,
    }[damage]()
    done = run_here("distill", pair.student, broken, "--projection", projection, "-o", "out", cwd=tmp_path, code=None)
    assert_refused(done, "shard-00001.arrow", "try:")
    assert not (tmp_path / "out" / "config.json").exists()
    assert_refused(run_here("inspect", "--verify", broken, code=None), "shard-00001.arrow")


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_corrupt_projection_is_refused(pair, cache, projection, tmp_path, damage):
    raw = bytearray(projection.read_bytes())
    raw[-40] ^= 1
    (tmp_path / "p").write_bytes(raw[:-100] if damage == "truncated" else raw)
    assert_refused(
        run_here("prune-projection", "p", "--top-k", 1, "-o", "p1", cwd=tmp_path, code=None), "projection", "where: p"
    )
    assert_refused(
        run_here("distill", pair.student, cache, "--projection", "p", "-o", "out", cwd=tmp_path, code=None), "where: p"
    )
    assert not (tmp_path / "p1").exists()


def test_a_student_with_fewer_embedding_rows_than_tokens_is_refused(run, pair, cache, tmp_path):
    small = copy(pair.student, tmp_path / "small")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small)
    model.resize_token_embeddings(600)
    model.save_pretrained(small)
    run("build-projection", small, pair.teacher, "-o", "p", cwd=tmp_path)
    done = run_here("distill", small, cache, "--projection", "p", "-o", "out", cwd=tmp_path, code=None)
    assert_refused(done, "embedding has only 600 rows", "640 tokens")
    assert not (tmp_path / "out").exists()
    assert_refused(run_here("evaluate", small, "-", stdin="some text", code=None), "embedding has only 600 rows")


@pytest.mark.parametrize(
    "arguments",
    [
        ("prune-projection", "-", "-o", "p"),
        ("distill", "STUDENT", "-", "-o", "out"),
        ("evaluate", "-", "corpus.txt"),
        ("inspect", "-"),
        ("align", "STUDENT", "TEACHER", "-"),
        ("cache-teacher", "TEACHER", "-", "-o", "c"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_dash_argument_with_an_empty_stdin_is_refused(pair, tmp_path, arguments):
    paths = {"STUDENT": pair.student, "TEACHER": pair.teacher}
    done = run_here(*(paths.get(word, word) for word in arguments), cwd=tmp_path, stdin="", code=None)
    assert_refused(done, "standard input is empty: the command before the | probably failed")
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_an_error_found_by_all_processes_is_printed_once(run, pair, cache, projection, tmp_path):
    short = small_inputs.make_student(tmp_path / "short", context=24)
    done = run("distill", short, cache, "--projection", projection, "--num-processes", 2, "-o", "out", cwd=tmp_path,
               code=None)  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("more tokens than the limit of 24") == 1
    assert not (tmp_path / "out").exists()


def test_truncated_weights_are_refused(pair, corpus, tmp_path):
    broken = copy(pair.teacher, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_refused(
        run_here("cache-teacher", broken, corpus, "-o", "c", cwd=tmp_path, code=None),
        "the weight file cannot be read",
        str(broken),
    )


def test_an_output_folder_with_other_files_is_refused_even_with_force(pair, corpus, cache, projection, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("mine")
    for arguments in (
        ("cache-teacher", pair.teacher, corpus),
        ("distill", pair.student, cache, "--projection", projection),
        ("quickstart",),
        ("build-projection", pair.student, pair.teacher),
    ):
        assert_refused(run_here(*arguments, "-o", "notes", cwd=tmp_path, code=None), "notes")
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["diary.txt"]


def test_missing_and_corrupt_shards_are_rewritten(run, pair, corpus, cache, tmp_path):
    broken = copy(cache, tmp_path / "broken")
    (broken / "shard-00001.arrow").unlink()
    (broken / "shard-00002.arrow").write_bytes(b"cut short")
    run("cache-teacher", pair.teacher, corpus, "--top-k", 16, "--shard-tokens", 400, "-o", broken)
    assert same_files(cache, broken)


def test_force_keeps_the_old_cache_if_the_teacher_cannot_be_loaded(pair, corpus, cache, tmp_path):
    kept = copy(cache, tmp_path / "kept")
    broken = copy(pair.teacher, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_refused(
        run_here("cache-teacher", broken, corpus, "-o", kept, "--force", code=None), "the weight file cannot be read"
    )
    assert same_files(cache, kept)


def test_a_moved_model_folder_counts_as_the_same_model(run, pair, corpus, cache, projection, tmp_path):
    moved = copy(pair.teacher, tmp_path / "another-name")
    again = copy(cache, tmp_path / "cache")
    run("cache-teacher", moved, corpus, "--top-k", 16, "--shard-tokens", 400, "-o", again)
    assert same_files(cache, again)
    run("build-projection", pair.student, moved, "-o", projection)


def test_an_unknown_model_type_is_refused(pair, corpus, tmp_path):
    unknown = copy(pair.teacher, tmp_path / "unknown")
    (unknown / "config.json").write_text('{"model_type": "nobody-knows-this"}')
    assert_refused(
        run_here("cache-teacher", unknown, corpus, "-o", tmp_path / "c", code=None),
        "cannot load the model",
        str(unknown),
    )


def test_an_output_folder_that_is_an_input_is_refused(pair, cache, projection, tmp_path):
    student = copy(pair.student, tmp_path / "student")
    for force in ((), ("--force",)):
        done = run_here("distill", student, cache, "--projection", projection, "-o", student, *force, code=None)
        assert_refused(done, "the output folder is one of the inputs")
    assert (student / "model.safetensors").is_file()


@pytest.mark.slow
def test_invalid_option_values_are_refused(run, pair, corpus, cache, projection, tmp_path):
    train = ("distill", pair.student, cache, "--projection", projection, "-o", "out")
    for arguments, words in (
        ((*train, "--loss", "p_kl"), "did you mean p-kl?"),
        ((*train, "--loss", "p-kl:wait=2"), "did you mean weight?"),
        ((*train, "--loss", "p-kl:weight=-1"), "weight"),
        ((*train, "--lr-scheduler-type", "cosin"), "did you mean cosine?"),
        ((*train, "--learning-rate", "-1"), "--learning-rate"),
        ((*train, "--num-train-epochs", "inf"), "--num-train-epochs"),
        ((*train, "--weight-decay", "-1"), "--weight-decay"),
        ((*train, "--report-to", "nobody"), "no tracker called 'nobody'"),
        ((*train, "--eval-data", "nowhere.jsonl"), "nowhere.jsonl"),
        (("cache-teacher", pair.teacher, corpus, "--max-length", "-5", "-o", "c"), "--max-length"),
        (("build-projection", pair.student, pair.teacher, "--method", "multi", "-o", "p"), "multitoken"),
        (("cache-teacher", pair.teacher, corpus, "--top-k", "0", "-o", "c"), "--top-k"),
        (("cache-teacher", pair.teacher, corpus, "--dtype", "fp32", "-o", "c"), "float32"),
        (("prune-projection", projection, "--min-weight", "2", "-o", "p"), "--min-weight"),
    ):
        assert_refused(run(*arguments, cwd=tmp_path, code=None), words)
    assert not any(tmp_path.iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """Return the mount point of a file system of 200 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_cache_teacher_continues_after_a_full_disk_and_leaves_no_partial_files(run, pair, corpus, small_disk, tmp_path):
    options = ("--top-k", 64, "--shard-tokens", 300, "--precision", "float32")
    arguments = ("cache-teacher", pair.teacher, corpus, *options, "-o", small_disk / "c")
    done = run_here(*arguments, code=None)
    assert_refused(done, "the disk is full", "run the same command again")
    names = {path.name for path in (small_disk / "c").iterdir()}
    assert names
    assert all(name.startswith(("shard-", "tokenizer", "chat_template", ".xtk-unfinished")) for name in names)
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    done = run(*arguments)
    assert "continuing, " in done.stderr
    run(*arguments[:-1], tmp_path / "c")
    assert same_files(small_disk / "c", tmp_path / "c")


def test_build_projection_leaves_no_file_on_a_full_disk(pair, small_disk):
    (small_disk / "ballast").write_bytes(bytes(195_000))
    assert_refused(
        run_here("build-projection", pair.student, pair.teacher, "-o", small_disk / "p", code=None), "the disk is full"
    )
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]


def same_files(first: Path, second: Path) -> bool:
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "signal_number",
    [
        signal.SIGKILL,
        *(pytest.param(other_signal, marks=pytest.mark.long) for other_signal in (signal.SIGINT, signal.SIGTERM)),
    ],
)
def test_an_interrupted_cache_resumes_to_identical_files(run, pair, corpus, tmp_path, signal_number):
    large_corpus = small_inputs.write_jsonl(tmp_path / "many.jsonl", small_inputs.sentences(400))
    arguments = ["cache-teacher", pair.teacher, large_corpus, "--top-k", 8, "--shard-tokens", 500, "-o"]
    run(*arguments, tmp_path / "whole")
    command = [sys.executable, "-m", "xtk", *map(str, arguments), str(tmp_path / "stopped")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "stopped").glob("shard-*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal_number)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[signal_number]
    assert stdout == ""
    assert not (tmp_path / "stopped" / "manifest.json").exists()
    assert_refused(run("distill", pair.student, tmp_path / "stopped", "-o", tmp_path / "x", code=None), "unfinished")
    run(*arguments, tmp_path / "stopped")
    assert same_files(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.slow
def test_an_interrupt_during_startup_exits_with_130(pair, corpus, tmp_path):
    for delay in (0.05, 0.3, 1.0, 2.5):
        process = subprocess.Popen(
            [sys.executable, "-m", "xtk", "cache-teacher", str(pair.teacher), str(corpus), "-o", str(tmp_path / "c")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ},
        )
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        # Before xtk is loaded, Python's default handler receives the signal.
        assert process.returncode in ((130, -2, 1) if delay < 0.2 else (130, 0)), stderr
        if delay >= 0.3:
            assert "Traceback" not in stderr


SIGNAL_IN_DESTRUCTOR_SCRIPT = """
import os, signal, time
import xtk.__main__
import xtk.cli

class Thing:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})
        time.sleep(1)

def work(arguments):
    signal.signal(signal.SIGTERM, xtk.cli._raise_terminated)
    Thing()
    time.sleep(30)
    return 0

xtk.__main__.run_command = work
xtk.__main__.main()
"""


def test_a_sweep_ignores_a_signal_that_its_caller_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with SignalForwarder() as forwarder:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGUSR1)
        assert forwarder.received_signal == signal.SIGUSR1
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_during_a_destructor_is_not_lost(name, code):
    script = SIGNAL_IN_DESTRUCTOR_SCRIPT.format(name=name)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=25, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_evaluate_refuses_an_unfinished_run_but_reads_its_checkpoint(run, pair, corpus, tmp_path):
    unfinished = tmp_path / "run"
    shutil.copytree(pair.student, unfinished / "checkpoint-4")
    (unfinished / "checkpoint-12").mkdir()
    (unfinished / "recipe.json").write_text('{"losses": [], "inputs": {}}')
    done = run_here("evaluate", "run", corpus, cwd=tmp_path, code=None)
    assert_refused(done, "this run is not finished", "run/checkpoint-12, or")
    run("evaluate", "run/checkpoint-4", corpus, cwd=tmp_path)


def test_models_and_runs_are_refused_as_data(pair, corpus, tmp_path):
    assert_refused(
        run_here("evaluate", pair.student, corpus, pair.teacher, code=None),
        "a model folder, not data",
        str(pair.teacher),
    )
    assert_refused(
        run_here("cache-teacher", pair.teacher, pair.student, "-o", "c", cwd=tmp_path, code=None),
        "a model folder, not data",
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_text("{}")
    assert_refused(
        run_here("evaluate", pair.student, "run", cwd=tmp_path, code=None),
        "a run folder of xtk distill, not data",
        "where: run",
    )


def test_a_folder_is_refused_as_a_projection(pair, cache, tmp_path):
    done = run_here("distill", pair.student, cache, "--projection", tmp_path, "-o", "out", cwd=tmp_path, code=None)
    assert_refused(done, "a projection must be a file", str(tmp_path), "build-projection")
