"""vLLM in the same process: log-probabilities equal those of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
from reference_logprobs import assert_logprobs_match, compute_full_logprobs, make_documents
from vllm_on_cpu import ENGINE, ENVIRONMENT

from xtk.cache.teacher_logprobs import StoredLogprobs, Support

from .conftest import CONTEXT

SCRIPT = Path(__file__).parent / "vllm_scoring_process.py"


def run_engine(folder: Path, support: Support, out: Path, *engine: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(folder), json.dumps(asdict(support)), str(out), *ENGINE, *engine]
    return subprocess.run(command, env={**ENVIRONMENT, **env}, capture_output=True, text=True, timeout=600, check=False)


def descendants(process: int) -> set[int]:
    """Return the processes that a process started, directly or indirectly."""
    found: set[int] = set()
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # the process has ended
                continue
    while new := {child for child, parent in parents.items() if parent in found | {process}} - found:
        found |= new
    return found


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def load_scores(path: Path) -> list[StoredLogprobs]:
    arrays = np.load(path)
    count = len({name.split()[0] for name in arrays})
    return [
        StoredLogprobs(**{field.name: arrays[f"{at} {field.name}"] for field in fields(StoredLogprobs)})
        for at in range(count)
    ]


@pytest.mark.parametrize(
    ("support", "engine"),
    [
        (Support("top-k", top_k=16), []),
        (Support("top-p", top_k=32, top_p=0.7), ["max_num_batched_tokens=64", "max_num_seqs=3"]),
        (Support("none"), []),
    ],
    ids=["top-k", "top-p in small batches", "none"],
)
def test_vllm_engine_matches_transformers(teacher, tmp_path, support, engine):
    result = run_engine(teacher, support, tmp_path / "out.npz", *engine)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "", "stdout carries results only"
    documents = make_documents(teacher, CONTEXT)
    assert max(map(len, documents)) == CONTEXT, "a document as long as the context is among them"
    full_logprobs = compute_full_logprobs(teacher, documents)
    for document, scores, expected in zip(documents, load_scores(tmp_path / "out.npz"), full_logprobs, strict=True):
        assert_logprobs_match(scores, document, expected, support, tolerance=1e-4)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("tensor_paralel_size=2", "did you mean --engine tensor_parallel_size"),
        ("max_logprobs=5", "the engine option max_logprobs is not allowed: xtk sets this argument"),
        ("max_num_seqs=0", "vLLM cannot run this model"),
    ],
)
def test_invalid_engine_option_is_refused(teacher, tmp_path, engine, message):
    result = run_engine(teacher, Support("top-k", top_k=4), tmp_path / "out.npz", engine)
    assert result.returncode == 1
    assert "XtkError" in result.stderr
    assert message in result.stderr


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_killed_process_leaves_no_engine_running(teacher, tmp_path):
    out = tmp_path / "out.npz"
    command = [sys.executable, str(SCRIPT), str(teacher), '{"kind": "none"}', str(out), *ENGINE]
    process = subprocess.Popen(command, env={**ENVIRONMENT, "THEN_WAIT": "1"}, stderr=subprocess.DEVNULL)
    while not out.exists():
        assert process.poll() is None
        time.sleep(0.2)
    started = descendants(process.pid)
    assert len(started) >= 2, "an engine, and the shell that watches"
    os.kill(process.pid, 9)
    process.wait()
    end = time.monotonic() + 120
    while any(map(is_running, started)) and time.monotonic() < end:
        time.sleep(0.5)
    assert not [one for one in started if is_running(one)]
