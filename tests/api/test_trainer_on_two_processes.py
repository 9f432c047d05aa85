"""DistillationTrainer on two processes equals one process: losses are normalized over the whole step."""

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
def test_two_processes_give_the_weights_of_one_process(run, pair, tmp_path):
    texts = [text * (1 + number % 3) for number, text in enumerate(sentences(16, seed=7))]  # items differ per process
    run("cache-teacher", pair.teacher, write_jsonl(tmp_path / "data.jsonl", texts), "-o", tmp_path / "cache")
    for num_processes, batch in ((1, 4), (2, 2)):
        launcher = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
                    "--nproc-per-node", str(num_processes)]  # fmt: skip
        command = [
            sys.executable,
            *launcher,
            PROGRAM,
            pair.student,
            tmp_path / "cache",
            tmp_path / str(num_processes),
            batch,
        ]
        subprocess.run(
            list(map(str, command)), check=True, capture_output=True, text=True, timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    one_process, two_processes = (
        load_file(tmp_path / str(num_processes) / "model.safetensors") for num_processes in (1, 2)
    )
    initial_weights = load_file(pair.student / "model.safetensors")
    for name, weights in one_process.items():
        max_update = float((weights - initial_weights[name]).abs().max())
        assert max_update > 0
        assert float((two_processes[name] - weights).abs().max()) < 1e-3 * max_update
