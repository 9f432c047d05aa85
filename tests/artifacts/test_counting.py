"""Counting that is killed goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import small_inputs

from xtk.artifacts import corpus_cooccurrence_counts
from xtk.artifacts.corpus_cooccurrence_counts import (
    corpus_fingerprint,
    count_corpus_cooccurrences,
    counting_state_path,
    remove_counting_state,
)
from xtk.artifacts.corpus_reader import Corpus
from xtk.tokens.tokenizer import Tokenizer

TEXTS = [text for number in range(6) for text in small_inputs.sentences(20, seed=number)]


@pytest.fixture
def small(monkeypatch):
    """Batches of eight texts, a state after each."""
    monkeypatch.setattr("xtk.projection.methods.cooccurrence.BATCH_TEXTS", 8)
    monkeypatch.setattr(corpus_cooccurrence_counts, "SAVE_INTERVAL_SECONDS", 0)


@pytest.fixture
def sides(families):
    return Tokenizer(families["student"]), Tokenizer(families["metaspace"])


@pytest.fixture
def data(tmp_path):
    return small_inputs.write_jsonl(tmp_path / "data.jsonl", TEXTS)


class Stopped(Exception):
    pass


def stop_after(batches: int, told: list[int]):
    """Be told of so many batches, then stop."""

    def advance(documents: int) -> None:
        if documents and len(told) == batches:
            raise Stopped
        if documents:
            told.append(documents)

    return advance


def as_bytes(counts) -> tuple:
    arrays = (counts.student_ids, counts.teacher_ids, counts.counts)
    return (*(array.tobytes() for array in arrays), counts.num_documents, counts.corpus_fingerprint)


def test_stopped_after_any_batch_the_counts_end_equal_and_nothing_is_counted_again(small, sides, data, tmp_path):
    corpus = Corpus([str(data)])
    whole = count_corpus_cooccurrences(*sides, corpus, tmp_path / "whole")
    assert whole.num_documents == len(TEXTS)
    assert whole.corpus_fingerprint == corpus_fingerprint(corpus)[1]
    for batches in range(1, 15, 3):
        path = tmp_path / str(batches)
        counts, stops, told = None, 0, []
        while counts is None:
            try:
                told.clear()
                counts = count_corpus_cooccurrences(
                    *sides, corpus, path, stop_after(batches + 1 if stops else batches, told)
                )
            except Stopped:
                stops += 1
                assert counting_state_path(path).is_file()
        assert as_bytes(counts) == as_bytes(whole)
        assert sum(told) == len(TEXTS)
        assert stops >= 1
        remove_counting_state(path)
        assert not counting_state_path(path).exists()


@pytest.mark.parametrize("change", ["another text", "another teacher", "algorithm_version", "version", "damage"])
def test_counts_of_something_else_are_begun_anew(small, sides, families, data, tmp_path, monkeypatch, change):
    path = tmp_path / "p"
    with pytest.raises(Stopped):
        count_corpus_cooccurrences(*sides, Corpus([str(data)]), path, stop_after(4, []))
    if change == "another text":
        small_inputs.write_jsonl(data, ["something else", *TEXTS[1:]])
    if change == "another teacher":
        sides = (sides[0], Tokenizer(families["teacher"]))
    if change == "damage":
        raw = bytearray(counting_state_path(path).read_bytes())
        raw[-3] ^= 1
        counting_state_path(path).write_bytes(bytes(raw))
    if change in ("algorithm_version", "version"):
        monkeypatch.setattr(corpus_cooccurrence_counts, change.upper(), 99)
    told: list[int] = []
    found = count_corpus_cooccurrences(*sides, Corpus([str(data)]), path, told.append)
    assert told[0] == 0
    fresh = count_corpus_cooccurrences(*sides, Corpus([str(data)]), tmp_path / "fresh")
    assert as_bytes(found) == as_bytes(fresh)


COUNT = """
import sys, time
from xtk.artifacts import corpus_cooccurrence_counts as counting
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


def killed_until_done(arguments: list[str], delays: list[float]) -> int:
    """Kill a command some time after its first state, again and again; return how often."""
    kills = 0
    for delay in delays:
        child = subprocess.Popen([sys.executable, "-c", COUNT, *arguments], stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True)  # fmt: skip
        assert child.stdout is not None
        child.stderr.readline() if child.stderr else None
        time.sleep(delay)
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        kills += child.returncode == -signal.SIGKILL
    return kills


def check_kills(families, data, tmp_path, delays: list[float]) -> None:
    command = ["build-projection", str(families["student"]), str(families["teacher"]), "--method", "cooccurrence"]
    command += ["--corpus", str(data)]
    plain = [sys.executable, "-m", "xtk", *command, "-o"]
    subprocess.run([*plain, str(tmp_path / "whole")], check=True, capture_output=True)
    kills = killed_until_done([*command, "-o", str(tmp_path / "p")], delays)
    assert kills >= 1
    done = subprocess.run([*plain, str(tmp_path / "p"), "--json"], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["kind"] == "projection"
    assert (tmp_path / "p").read_bytes() == (tmp_path / "whole").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "p", "whole"]


@pytest.mark.slow
def test_a_killed_command_goes_on_and_ends_with_the_same_bytes(families, data, tmp_path):
    check_kills(families, data, tmp_path, [0.03, 0.15])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_any_time_it_ends_with_the_same_bytes(families, data, tmp_path, seed):
    check_kills(families, data, tmp_path, [0.01 * seed + 0.04 * number for number in range(6)])


def test_what_another_living_process_writes_stays(tmp_path):
    name = f"{counting_state_path(tmp_path / 'p').name}"
    dead, living = (tmp_path / f".xtk-tmp-{process}-0123abcd-{name}" for process in (2**22 + 1, os.getppid()))
    other = tmp_path / f".xtk-tmp-{2**22 + 1}-0123abcd-q"
    for path in (dead, living, other):
        path.touch()
    remove_counting_state(tmp_path / "p")
    assert sorted(tmp_path.iterdir()) == sorted([living, other])
