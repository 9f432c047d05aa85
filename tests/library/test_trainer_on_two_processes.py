"""DistillationTrainer on two processes equals one process: denominators are those of the whole step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_inputs import sentences, write_jsonl

PROGRAM = Path(__file__).parent / "trainer_process.py"


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(run, pair, tmp_path):
    texts = [text * (1 + number % 3) for number, text in enumerate(sentences(16, seed=7))]  # items differ per process
    run("cache-teacher", pair.teacher, write_jsonl(tmp_path / "data.jsonl", texts), "-o", tmp_path / "cache")
    for processes, batch in ((1, 4), (2, 2)):
        launcher = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
                    "--nproc-per-node", str(processes)]  # fmt: skip
        command = [
            sys.executable,
            *launcher,
            PROGRAM,
            pair.student,
            tmp_path / "cache",
            tmp_path / str(processes),
            batch,
        ]
        subprocess.run(
            list(map(str, command)), check=True, capture_output=True, text=True, timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    one, two = (load_file(tmp_path / str(processes) / "model.safetensors") for processes in (1, 2))
    start = load_file(pair.student / "model.safetensors")
    for name, weights in one.items():
        moved = float((weights - start[name]).abs().max())
        assert moved > 0
        assert float((two[name] - weights).abs().max()) < 1e-3 * moved
