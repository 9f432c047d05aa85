"""The memory estimates of the doctor are within 25 % of the peak of a real process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import small_inputs
from transformers import LlamaConfig, LlamaForCausalLM

from xtk.data.corpus_reader import Corpus
from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, RunPlan
from xtk.doctor.memory_and_disk_estimates import estimate_caching_memory, estimate_training_memory

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the peak is read from /proc")

TOLERANCE = 0.25
# ru_maxrss would start at the memory of this process.
PEAK_SCRIPT = (
    "import sys; from xtk.cli import run_command; code = run_command(sys.argv[1:]); "
    "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')), file=sys.stderr); "
    "sys.exit(code)"
)


def peak_memory(estimate: int, *arguments: object) -> int:
    """Return the peak memory of a process in bytes; measure a high peak again, since kernels may have been compiled."""
    peak = 0
    for _ in range(2):
        command = [sys.executable, "-c", PEAK_SCRIPT, *map(str, arguments), "--force", "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peak = 1024 * int(done.stderr.split()[-1])
        if peak <= (1 + TOLERANCE) * estimate:
            break
    return peak


@pytest.mark.long  # a minute; bench_doctor.py has 22 cases
def test_memory_estimates_match_the_measured_peaks(tmp_path):
    configuration = LlamaConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    model = LlamaForCausalLM(configuration)
    student = small_inputs.make_student_tokenizer(tmp_path / "student")
    teacher = small_inputs.make_teacher_tokenizer(tmp_path / "teacher")
    for folder in (student, teacher):
        model.save_pretrained(folder)
    data = small_inputs.write_jsonl(
        tmp_path / "data.jsonl", [" ".join(small_inputs.sentences(12, seed)) for seed in range(16)]
    )
    models = [DoctorModel.read(role, folder, role) for role, folder in (("student", student), ("teacher", teacher))]
    inputs = DoctorInputs(*models, RunPlan(batch_tokens=2048, max_batch_tokens=2048), None, Corpus([str(data)]))
    cache = tmp_path / "cache"
    estimate = sum((estimate_caching_memory(inputs) or {}).values())
    command: tuple[object, ...] = ("cache-teacher", teacher, data, "-o", cache, "--batch-tokens", 2048)
    assert estimate == pytest.approx(peak_memory(estimate, *command), rel=TOLERANCE)
    estimate = sum((estimate_training_memory(inputs) or {}).values())
    command = ("distill", student, cache, "-o", tmp_path / "run", "--max-steps", 2, "--max-batch-tokens", 2048)
    assert estimate == pytest.approx(peak_memory(estimate, *command), rel=TOLERANCE)
