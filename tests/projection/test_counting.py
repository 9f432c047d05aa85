"""Cooccurrence counts: interrupted and killed counting resumes with the same result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import small_inputs

from xtk.data.corpus_reader import Corpus
from xtk.projection import corpus_cooccurrence_counts
from xtk.projection.corpus_cooccurrence_counts import (
    corpus_fingerprint,
    count_corpus_cooccurrences,
    counting_state_path,
    remove_counting_state,
)
from xtk.text.tokenizer import Tokenizer

TEXTS = [text for number in range(6) for text in small_inputs.sentences(20, seed=number)]


@pytest.fixture
def small_batches(monkeypatch):
    """Use batches of eight texts and save the state after each."""
    monkeypatch.setattr("xtk.projection.methods.cooccurrence.BATCH_TEXTS", 8)
    monkeypatch.setattr(corpus_cooccurrence_counts, "SAVE_INTERVAL_SECONDS", 0)


@pytest.fixture
def tokenizers(families):
    return Tokenizer(families["student"]), Tokenizer(families["metaspace"])


@pytest.fixture
def data(tmp_path):
    return small_inputs.write_jsonl(tmp_path / "data.jsonl", TEXTS)


class Stopped(Exception):
    pass


def stop_after(num_batches: int, progress: list[int]):
    """Return a progress callback that records `num_batches` batches and then raises Stopped."""

    def advance(documents: int) -> None:
        if documents and len(progress) == num_batches:
            raise Stopped
        if documents:
            progress.append(documents)

    return advance


def as_bytes(counts) -> tuple:
    arrays = (counts.student_ids, counts.teacher_ids, counts.counts)
    return (*(array.tobytes() for array in arrays), counts.num_documents, counts.corpus_fingerprint)


def test_counting_resumes_after_any_batch_with_equal_counts(small_batches, tokenizers, data, tmp_path):
    corpus = Corpus([str(data)])
    expected = count_corpus_cooccurrences(*tokenizers, corpus, tmp_path / "whole")
    assert expected.num_documents == len(TEXTS)
    assert expected.corpus_fingerprint == corpus_fingerprint(corpus)[1]
    for num_batches in range(1, 15, 3):
        path = tmp_path / str(num_batches)
        counts, num_stops, progress = None, 0, []
        while counts is None:
            try:
                progress.clear()
                counts = count_corpus_cooccurrences(
                    *tokenizers, corpus, path, stop_after(num_batches + 1 if num_stops else num_batches, progress)
                )
            except Stopped:
                num_stops += 1
                assert counting_state_path(path).is_file()
        assert as_bytes(counts) == as_bytes(expected)
        assert sum(progress) == len(TEXTS)
        assert num_stops >= 1
        remove_counting_state(path)
        assert not counting_state_path(path).exists()


@pytest.mark.parametrize("change", ["another text", "another teacher", "algorithm_version", "version", "damage"])
def test_counting_starts_over_if_the_inputs_or_the_state_differ(
    small_batches, tokenizers, families, data, tmp_path, monkeypatch, change
):
    path = tmp_path / "p"
    with pytest.raises(Stopped):
        count_corpus_cooccurrences(*tokenizers, Corpus([str(data)]), path, stop_after(4, []))
    if change == "another text":
        small_inputs.write_jsonl(data, ["something else", *TEXTS[1:]])
    if change == "another teacher":
        tokenizers = (tokenizers[0], Tokenizer(families["teacher"]))
    if change == "damage":
        raw = bytearray(counting_state_path(path).read_bytes())
        raw[-3] ^= 1
        counting_state_path(path).write_bytes(bytes(raw))
    if change in ("algorithm_version", "version"):
        monkeypatch.setattr(corpus_cooccurrence_counts, change.upper(), 99)
    progress: list[int] = []
    found = count_corpus_cooccurrences(*tokenizers, Corpus([str(data)]), path, progress.append)
    assert progress[0] == 0
    fresh = count_corpus_cooccurrences(*tokenizers, Corpus([str(data)]), tmp_path / "fresh")
    assert as_bytes(found) == as_bytes(fresh)


COUNT_SCRIPT = """
import sys, time
from xtk.projection import corpus_cooccurrence_counts as counting
from xtk.projection.methods import cooccurrence
cooccurrence.BATCH_TEXTS = 8
counting.SAVE_INTERVAL_SECONDS = 0
write = counting._write_state
def slowly(*arguments):
    write(*arguments)
    print("state", flush=True)
    time.sleep(0.02)
counting._write_state = slowly
from xtk.cli import run_command
sys.exit(run_command(sys.argv[1:]))
"""


def kill_repeatedly(arguments: list[str], delays: list[float]) -> int:
    """Kill a command once per delay, that long after it has first saved its state; return the number of kills."""
    num_kills = 0
    for delay in delays:
        process = subprocess.Popen([sys.executable, "-c", COUNT_SCRIPT, *arguments], stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True)  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()  # "state"
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        num_kills += process.returncode == -signal.SIGKILL
    return num_kills


def check_killed_commands(families, data, tmp_path, delays: list[float]) -> None:
    command = ["build-projection", str(families["student"]), str(families["teacher"]), "--method", "cooccurrence"]
    command += ["--corpus", str(data)]
    command_line = [sys.executable, "-m", "xtk", *command, "-o"]
    subprocess.run([*command_line, str(tmp_path / "whole")], check=True, capture_output=True)
    num_kills = kill_repeatedly([*command, "-o", str(tmp_path / "p")], delays)
    assert num_kills >= 1
    result = subprocess.run([*command_line, str(tmp_path / "p"), "--json"], check=True, capture_output=True, text=True)
    assert json.loads(result.stdout)["kind"] == "projection"
    assert (tmp_path / "p").read_bytes() == (tmp_path / "whole").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "p", "whole"]


@pytest.mark.slow
def test_killed_command_resumes_with_the_same_bytes(families, data, tmp_path):
    check_killed_commands(families, data, tmp_path, [0.03, 0.15])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_command_killed_at_any_time_resumes_with_the_same_bytes(families, data, tmp_path, seed):
    check_killed_commands(families, data, tmp_path, [0.01 * seed + 0.04 * number for number in range(6)])


def test_files_of_running_processes_are_not_removed_with_the_counting_state(tmp_path):
    name = f"{counting_state_path(tmp_path / 'p').name}"
    dead, living = (tmp_path / f".xtk-tmp-{process}-0123abcd-{name}" for process in (2**22 + 1, os.getppid()))
    other = tmp_path / f".xtk-tmp-{2**22 + 1}-0123abcd-q"
    for path in (dead, living, other):
        path.touch()
    remove_counting_state(tmp_path / "p")
    assert sorted(tmp_path.iterdir()) == sorted([living, other])
